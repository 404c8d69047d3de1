"""Settings that are removed: what a run of an earlier version has written is read, and what it needs is named.

earlier_config.yaml is the config.yaml of a run of configs/quickstart.yaml with all settings of the commit 4111a043.
"""

from pathlib import Path

import pytest
import yaml

from gpt.settings import removed
from gpt.settings.parser import parse_settings
from gpt.settings.removed import Removed
from gpt.settings.settings import Settings
from gpt.settings.tree import dotted
from parallel.validation.errors import ConfigError
from tests.source_files import ROOT
from tests.unit.gpt.settings.test_settings import BASE

EARLIER = Path(__file__).with_name("earlier_config.yaml")
GROUP = {"name": Removed("torch", "choose optimizer.name"), "parts.sizes": Removed([1, 2], "remove it")}
DEFAULTS = "train:\n  steps: 7\n  extra:\n    name: torch\n    parts:\n      sizes: [1, 2]\n"


@pytest.fixture
def _rows(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, row in GROUP.items():
        monkeypatch.setitem(removed.REMOVED_SETTINGS, f"train.extra.{name}", row)
    monkeypatch.setitem(removed.REMOVED_VALUES, "optimizer.name", {"lamb": "choose adamw"})


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
        ("activations.store", "store: none", "planned", "choose activations.budget with train.compile=blocks and acti"),
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


@pytest.mark.usefixtures("_rows")
def test_a_removed_group_with_its_defaults_changes_nothing(file: Path):
    expected = parse(file, "train:\n  steps: 7\n")
    assert parse(file, DEFAULTS) == expected
    assert parse(file, "train:\n  steps: 7\n  extra:\n") == expected
    assert parse(file, DEFAULTS, "--train.extra.name=torch", "--train.extra={parts: {sizes: [1, 2]}}") == expected


@pytest.mark.usefixtures("_rows")
def test_what_needs_a_removed_setting_or_value_is_refused_with_its_place_and_the_remedy(file: Path):
    place = f"{file}, line"
    for content, options, message in (
        (DEFAULTS.replace("torch", "apex"), (), f"{place} 4: train.extra.name=apex is removed; choose optimizer.name"),
        (DEFAULTS.replace("2]", "3]"), (), f"{place} 6: train.extra.parts.sizes=[1, 3] is removed; remove it"),
        (DEFAULTS, ("--train.extra.name=apex",), "train.extra.name=apex is removed; choose optimizer.name"),
        (DEFAULTS, ("--train.extra.parts={sizes: 1}",), "--train.extra.parts, line 1: train.extra.parts.sizes=1 is re"),
        ("optimizer:\n  name: lamb\n", (), f"{place} 2: optimizer.name=lamb is removed; choose adamw"),
        (DEFAULTS, ("--optimizer.name=lamb",), "optimizer.name=lamb is removed; choose adamw"),
        (DEFAULTS, ("--train.extra.nam=torch",), "train.extra.nam: there is no such setting"),
        (DEFAULTS, ("--train.extra=5",), "train.extra=5 is not a group of settings; write its settings below train.e"),
    ):
        with pytest.raises(ConfigError) as raised:
            parse(file, content, *options)
        assert str(raised.value).startswith(message)


@pytest.mark.usefixtures("_rows")
def test_a_later_layer_replaces_what_is_removed(file: Path):
    content = "optimizer:\n  name: lamb\ntrain:\n  extra:\n    name: apex\n"
    found = parse(file, content, "--optimizer.name=adamw", "--train.extra.name=torch")
    assert found == parse(file, "optimizer:\n  name: adamw\n")
