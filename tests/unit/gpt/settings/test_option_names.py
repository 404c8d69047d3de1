"""Names of options in the errors and warnings of the libraries."""

import sys
import warnings
from pathlib import Path

import pytest

from gpt.settings import option_names
from gpt.settings.option_names import in_option_names, messages_in_option_names
from parallel.validation.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("ZeroConfig.stage=7; choose ZeroConfig.units", "zero.stage=7; choose zero.units"),
        ("OffloadConfig.mode=auto", "offload.mode=auto"),
        ("set ActivationsConfig.store=none", "set activations.store=none"),
        ("Hardware.tflops=0", "activations.hardware.tflops=0"),
        ("model.num_heads=3 / tensor_size=2", "model.num_heads=3 / parallel.tensor_size=2"),
        ("shard_size=3", "parallel.shard_size=3"),
        ("parallel.tensor_size=2", "parallel.tensor_size=2"),
        ("--tensor_size=2", "--tensor_size=2"),
        ("mics_shard_size=2", "mics_shard_size=2"),
        ("pass a ZeroConfig. OldZeroConfig.stage", "pass a ZeroConfig. OldZeroConfig.stage"),
        ("Muon.per_repetition, Muon.row_beta", "optimizer.muon.per_head, optimizer.muon.row_beta"),
        ("ZeroConfig.sum_over_ranks=leaves", "train.reproducible=layout"),
    ],
)
def test_names_of_the_libraries_become_options(text: str, expected: str):
    assert in_option_names(text) == expected
    assert in_option_names(expected) == expected


def test_an_error_keeps_its_class_and_its_other_arguments():
    class OwnError(ConfigError):
        pass

    with pytest.raises(OwnError) as raised, messages_in_option_names():
        raise OwnError("ZeroConfig.stage=7", 7)
    assert raised.value.args == ("zero.stage=7", 7)
    with pytest.raises(KeyError, match=r"ZeroConfig\.stage"), messages_in_option_names():
        raise KeyError("ZeroConfig.stage")


def test_a_warning_of_this_project_is_one_line_in_the_names_of_options(capsys: pytest.CaptureFixture[str]):
    format_before = warnings.formatwarning
    with messages_in_option_names():
        for package in ("zero", "torch"):
            file = str(Path(option_names.__file__).parents[2] / package / "some.py")
            sys.stderr.write(warnings.formatwarning("choose ZeroConfig.stage=3", UserWarning, file, 7, "stage()"))
    own, other, line = capsys.readouterr().err.splitlines()
    assert own == "warning: choose zero.stage=3"
    assert other.endswith("torch/some.py:7: UserWarning: choose ZeroConfig.stage=3")
    assert line == "  stage()"
    assert warnings.formatwarning is format_before
