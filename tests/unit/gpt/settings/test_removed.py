"""Settings that are removed: what a run of an earlier version has written is read, and what it needs is named."""

from pathlib import Path

import pytest

from gpt.settings import removed
from gpt.settings.parser import parse_settings
from gpt.settings.removed import Removed
from gpt.settings.settings import Settings
from parallel.validation.errors import ConfigError
from tests.unit.gpt.settings.test_settings import BASE

GROUP = {"name": Removed("torch", "choose optimizer.name"), "parts.sizes": Removed([1, 2], "remove it")}
DEFAULTS = "train:\n  steps: 7\n  extra:\n    name: torch\n    parts:\n      sizes: [1, 2]\n"


@pytest.fixture(autouse=True)
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


def test_a_removed_group_with_its_defaults_changes_nothing(file: Path):
    expected = parse(file, "train:\n  steps: 7\n")
    assert parse(file, DEFAULTS) == expected
    assert parse(file, "train:\n  steps: 7\n  extra:\n") == expected
    assert parse(file, DEFAULTS, "--train.extra.name=torch", "--train.extra={parts: {sizes: [1, 2]}}") == expected


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


def test_a_later_layer_replaces_what_is_removed(file: Path):
    content = "optimizer:\n  name: lamb\ntrain:\n  extra:\n    name: apex\n"
    found = parse(file, content, "--optimizer.name=adamw", "--train.extra.name=torch")
    assert found == parse(file, "optimizer:\n  name: adamw\n")
