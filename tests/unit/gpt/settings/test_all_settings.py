"""Every setting with values that no one would choose: one line that names it, or settings that can be trained with."""

import math
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

import pytest

from gpt.settings.parser import DEEPSPEED_CONFIG, GROUPS, LEAVES, TREE, parse_settings
from gpt.settings.settings import Settings
from gpt.settings.tree import help_text
from lab.settings_page import page
from parallel.validation.errors import ConfigError
from parallel.validation.fields import LARGEST_INT, alternatives, describe
from tests.source_files import ROOT
from tests.unit.gpt.settings.test_settings import BASE
from zero.settings.config import ZeroConfig

VALUES = {
    "null": None,
    ".nan": math.nan,
    ".inf": math.inf,
    "-.inf": -math.inf,
    "-1": -1,
    "0": 0,
    str(2**63): 2**63,
    str(10**30): 10**30,
    "''": "",
    "[]": [],
}
NUMBERS = int, float
MAY_BE_INFINITE = {"optimizer.clip_norm"}


def as_config(name: str, text: str) -> str:
    """Return the option `--config={GROUP: {SETTING: TEXT}}`."""
    for part in reversed(name.split(".")):
        text = f"{{{part}: {text}}}"
    return f"--config={text}"


def parts_of(hint: Any) -> list[Any]:
    """Return the types of which a type consists, lists by their elements."""
    if get_origin(hint) in (list, tuple):
        return [part for argument in get_args(hint) if argument is not ... for part in parts_of(argument)]
    kinds = alternatives(hint)
    return [hint] if kinds == (hint,) else [part for kind in kinds for part in parts_of(kind)]


@pytest.mark.parametrize("name", sorted(LEAVES.keys() | GROUPS.keys()))
def test_any_value_of_a_setting_is_taken_as_it_is_or_refused_in_one_line(name: str, tmp_path: Path):
    taken = None
    for text, value in VALUES.items():
        for argument, is_quoted in ((as_config(name, text), True), (f"--{name}={text}", False)):
            settings, error = parsed_or_refused([f"--config={BASE}", argument])
            if settings is None:
                assert error.isprintable()
                assert name in error or f"{name.rpartition('.')[0]}." in error
            elif name in LEAVES and name != DEEPSPEED_CONFIG:
                taken, found = settings, attrgetter(name)(settings)
                assert found == (text if isinstance(found, str) and not is_quoted else alike(found, value))
                assert found != math.inf or name in MAY_BE_INFINITE
    if taken is not None:
        (tmp_path / "c.yaml").write_text(taken.to_yaml())
        assert parse_settings([f"--config={tmp_path / 'c.yaml'}"]) == taken


def parsed_or_refused(arguments: list[str]) -> tuple[Settings | None, str]:
    try:
        return parse_settings(arguments), ""
    except ConfigError as error:
        return None, str(error)


def alike(found: Any, value: Any) -> Any:
    """Return the value in the type of the setting."""
    return type(found)(value) if isinstance(found, (float, tuple)) else value


def test_every_number_states_its_range():
    for leaf in LEAVES.values():
        assert not [part for part in parts_of(leaf.hint) if part in NUMBERS], leaf.name


def test_no_integer_exceeds_what_a_tensor_holds():
    for leaf in LEAVES.values():
        for part in parts_of(leaf.hint):
            if get_origin(part) is Annotated and get_args(part)[0] is int:
                assert all(allowed.problem(LARGEST_INT + 1) for allowed in part.__metadata__), leaf.name


@pytest.mark.parametrize(("columns", "width"), [(500, 120), (100, 100), (40, 40), (16, 16)])
def test_the_help_shows_every_setting_with_its_text_and_its_values(
    monkeypatch: pytest.MonkeyPatch, columns: int, width: int
):
    monkeypatch.setenv("COLUMNS", str(columns))
    lines = help_text(Settings, TREE).splitlines()[1:]
    assert width - 4 <= max(len(line) for line in lines if len(line.split()) > 1) <= width
    text = " ".join(" ".join(lines).split())
    for leaf in LEAVES.values():
        assert leaf.text, leaf.name
        assert f"--{leaf.name} {leaf.text} ({describe(leaf.hint)}; " in text
    assert "--optimizer.eps Number added" in text
    assert "(a number from 1e-30 to 1; default: 1e-08)" in text
    assert "(an integer of 1 or more or null; default: 50)" in text

    assert text.index("--zero.units ") < text.index("--zero.deepspeed_config ") < text.index("offload: ")
    assert text.index("--train.prompts ") < text.index("train.ramp_up: ") < text.index("--train.ramp_up.start ")


def test_the_page_of_settings_is_the_one_that_is_made():
    assert (ROOT / "docs" / "settings.md").read_text() == page(TREE), "run python -m lab.settings_page"
    assert all(page(TREE).count(f"| `{leaf.name}` | {leaf.text} |") == 1 for leaf in LEAVES.values())


def test_a_group_is_an_object_of_its_class():
    settings = parse_settings([f"--config={BASE}"])
    with pytest.raises(ConfigError, match=r"Settings\.train=3"):
        replace(settings, train=3)
    with pytest.raises(ConfigError, match=r"DataSettings\.split=\[1\]"):
        replace(settings.data, split=[1])


def test_the_defaults_are_those_of_the_dataclasses():
    assert parse_settings([f"--config={BASE}"]).zero == ZeroConfig(overlap_gather=True)
    assert parse_settings([f"--config={BASE}", "--zero.stage=1"]).zero == ZeroConfig(1, overlap_gather=True)
