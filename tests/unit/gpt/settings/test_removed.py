"""Settings that are removed: what a run of an earlier version has written is read, and what it needs is named.

earlier_config.yaml is the config.yaml of a run of configs/quickstart.yaml with all settings of the commit 4111a043.
"""

from pathlib import Path

import pytest
import yaml

from gpt.settings import removed
from gpt.settings.parser import parse_settings
from gpt.settings.settings import Settings
from gpt.settings.tree import dotted
from parallel.validation.errors import ConfigError
from tests.source_files import ROOT
from tests.unit.gpt.settings.test_settings import BASE

EARLIER = Path(__file__).with_name("earlier_config.yaml")
DION = "optimizer:\n  dion:\n    rank_fraction: 0.25\n    lr_factor: 1.0\n"  # a group that is removed


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "config.yaml"


def parse(file: Path, content: str, *options: str) -> Settings:
    file.write_text(content)
    return parse_settings([f"--config={BASE}", f"--config={file}", *options])


@pytest.mark.parametrize("options", [(), ("--train.steps=3",)])
def test_the_file_of_an_earlier_run_is_read(options: tuple[str, ...]):
    found = parse_settings([f"--config={EARLIER}", *options])
    assert found == parse_settings([f"--config={ROOT / 'configs/quickstart.yaml'}", *options])
    earlier, now = dotted(yaml.safe_load(EARLIER.read_text())), dotted(yaml.safe_load(found.to_yaml()))
    assert earlier.keys() - now.keys() == removed.REMOVED_SETTINGS.keys()


@pytest.mark.parametrize(
    ("name", "earlier", "value", "remedy"),
    [
        ("activations.budget_gb", "budget_gb: null", "0.5", "remove it, and choose activations.budget with train.comp"),
        (
            "activations.hardware.memory_gb_per_second",
            "memory_gb_per_second: 900.0",
            "800.0",
            "nothing reads it: remove",
        ),
        ("optimizer.dion.rank_fraction", "rank_fraction: 0.25", "0.5", "choose optimizer.name=muon"),
        ("optimizer.name", "name: adamw", "dion", "choose muon"),
        ("activations.store", "store: none", "planned", "choose keep or auto; or none with activations.budget and"),
    ],
)
def test_the_file_of_an_earlier_run_that_needs_more_is_refused(
    file: Path, name: str, earlier: str, value: str, remedy: str
):
    lines = EARLIER.read_text().splitlines()
    (number,) = (number for number, line in enumerate(lines) if line.strip() == earlier)
    lines[number] = lines[number].replace(earlier.split()[1], value)
    with pytest.raises(ConfigError) as raised:
        parse(file, "\n".join(lines))
    assert str(raised.value).startswith(f"{file}, line {number + 1}: {name}={value} is removed; {remedy}")


def test_a_removed_group_with_its_defaults_changes_nothing(file: Path):
    expected = parse_settings([f"--config={BASE}"])
    assert parse(file, DION) == expected
    assert parse(file, "optimizer:\n  dion:\n") == expected
    assert parse(file, DION, "--optimizer.dion.lr_factor=1.0", "--optimizer={dion: {rank_fraction: 0.25}}") == expected


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--optimizer.dion.lr_factor=2", "optimizer.dion.lr_factor=2 is removed; choose optimizer.name=muon and opti"),
        ("--optimizer.dion={lr_factor: 2}", "--optimizer.dion, line 1: optimizer.dion.lr_factor=2 is removed; choose"),
        ("--optimizer.name=dion", "optimizer.name=dion is removed; choose muon"),
        ("--optimizer.dion.lr_facto=1", "optimizer.dion.lr_facto: there is no such setting"),
        ("--optimizer.dion=5", "optimizer.dion=5 is not a group of settings; write its settings below optimizer.dion"),
    ],
)
def test_an_option_that_needs_a_removed_setting_or_value_is_refused(file: Path, option: str, message: str):
    with pytest.raises(ConfigError) as raised:
        parse(file, DION, option)
    assert str(raised.value).startswith(message)


def test_a_later_layer_replaces_what_is_removed(file: Path):
    content = "optimizer:\n  name: dion\n  dion:\n    rank_fraction: 0.5\n"
    found = parse(file, content, "--optimizer.name=adamw", "--optimizer.dion.rank_fraction=0.25")
    assert found == parse(file, "optimizer:\n  name: adamw\n")
