"""A DeepSpeed JSON configuration as settings of this project, and as a table that says what became of each key.

file -> keys, by their names today -> each judged by its row (`gpt/deepspeed/keys.py`)
     -> rules that read several (`gpt/deepspeed/rules.py`) -> settings
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from difflib import get_close_matches
from enum import StrEnum
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Table

from gpt.deepspeed.keys import KEYS, OTHER_SPELLINGS, UNREAD
from gpt.deepspeed.row import Kind, same
from gpt.deepspeed.rules import RULES, Reading, Surroundings
from parallel.errors import ConfigError
from parallel.world import num_ranks_from_environment

AUTO = "auto"  # what transformers fills in from its own arguments
LEFT_OPEN = None, AUTO


class Verdict(StrEnum):
    MAPPED = "mapped"
    NEEDLESS = "nothing needed"
    LEFT = "left to the settings"
    REFUSED = "refused"


@dataclass(frozen=True)
class Entry:
    """A key of the file: what is written there, and its name and value in DeepSpeed's words of today."""

    written: str
    name: str
    value: Any
    objection: str = ""


@dataclass(frozen=True)
class Line:
    """What became of one key."""

    entry: Entry
    verdict: Verdict
    why: str = ""
    settings: tuple[str, ...] = ()


@dataclass
class Translation:
    """`settings` are dotted names and their values."""

    path: Path
    reading: Reading
    lines: list[Line]

    @property
    def settings(self) -> dict[str, Any]:
        return self.reading.settings

    @property
    def refused(self) -> list[Line]:
        return [line for line in self.lines if line.verdict is Verdict.REFUSED]

    def check(self) -> None:
        """Raises ConfigError with every key that is refused."""
        if self.refused:
            raise ConfigError(f"{self.path}: {'; '.join(f'{line.entry.written}: {line.why}' for line in self.refused)}")

    def table(self) -> Table:
        table = Table(title=f"{self.path}, key by key", title_justify="left")
        table.add_column("DeepSpeed", overflow="fold")
        table.add_column("", no_wrap=True)
        table.add_column("here", overflow="fold")
        for line in sorted(self.lines, key=lambda line: list(Verdict).index(line.verdict)):
            effects = "; ".join(filter(None, [*map(self._effect, line.settings), line.why]))
            table.add_row(escape(line.entry.written), line.verdict, escape(effects))
        return table

    def _effect(self, setting: str) -> str:
        chosen = self.reading.chosen(setting)
        is_overruled = setting in self.settings and chosen != self.settings[setting]
        return f"{setting}={_text(chosen)}" + (" by option" if is_overruled else "")

    def as_tree(self) -> dict[str, Any]:
        """Return the settings as a YAML file nests them, without those that an option gives."""
        tree: dict[str, Any] = {}
        for setting, value in self.settings.items():
            if self.reading.beside.is_option(setting):
                continue
            *parents, name = setting.split(".")
            branch = tree
            for parent in parents:
                branch = branch.setdefault(parent, {})
            branch[name] = value
        return tree


def deepspeed_layer(
    path: Path,
    settings: Any,
    options: frozenset[str],
    num_ranks: int | None,
    show: Callable[[Table], None],
) -> dict[str, Any]:
    """Return the tree of settings that the file gives, without those that an option on the command line gives.

    `settings` holds the settings without this file, by dotted names; `options` are the names of those that the command
    line gives. `show` is called with a table of all keys. Raises ConfigError.
    """
    num_ranks = num_ranks or settings["dry_run.world_size"] or num_ranks_from_environment()
    found = translate(path, Surroundings(settings, options, num_ranks))
    show(found.table())
    found.check()
    return found.as_tree()


def translate(path: Path, beside: Surroundings) -> Translation:
    """Raises ConfigError for a file that cannot be read, or that contradicts itself or an option; keys that are refused
    are told by the translation's `check`, after the table.
    """
    entries = list(_in_words_of_today(_flatten(read(path))))
    values = {entry.name: entry.value for entry in entries}
    reading, lines = Reading(beside), []
    for entry in entries:
        switch = f"{entry.name.rpartition('.')[0]}.enabled"
        is_on = switch not in KEYS or switch == entry.name or values.get(switch) not in (None, False)
        lines.append(line := _judge(entry, is_on))
        if line.verdict is Verdict.MAPPED:
            key = KEYS[entry.name]
            reading.values[key.name] = value = key.kind.reads(entry.value)
            if key.convert is not None:
                reading.settings[key.settings[0]] = key.convert(value)
        elif entry.value == AUTO:
            reading.autos.add(entry.name)
    found = Translation(path, reading, lines)
    if not found.refused:
        for rule in RULES:
            try:
                reading.settings |= rule(reading)
            except ConfigError as error:
                raise ConfigError(f"{path}: {error}") from error
    return found


def read(path: Path) -> dict[str, Any]:
    """Raises ConfigError for a file that is no JSON object, or has a key twice."""

    def without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        names = [name for name, _ in pairs]
        if twice := [name for name in names if names.count(name) > 1]:
            raise ConfigError(f"zero.deepspeed_config={path} has the key {twice[0]} twice; remove one")
        return dict(pairs)

    try:
        content = json.loads(path.read_text(), object_pairs_hook=without_duplicates)
    except (OSError, ValueError) as error:
        raise ConfigError(f"zero.deepspeed_config={path} is no JSON file that can be read: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"zero.deepspeed_config={path} holds {_text(content)}; it must be an object of keys")
    return content


def _flatten(content: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted name, value) of every key that is no section to be read."""
    for name, value in content.items():
        if isinstance(value, dict) and prefix + name not in UNREAD:
            yield from _flatten(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def _in_words_of_today(pairs: Iterator[tuple[str, Any]]) -> Iterator[Entry]:
    """Other spellings become those of today; what cannot, or says something else than one before it, gets an
    objection.
    """
    spelled: dict[str, Entry] = {}
    for spelling, value in pairs:
        name, convert = OTHER_SPELLINGS.get(spelling, (spelling, same))
        entry = Entry(f"{spelling}={_text(value)}", name, value)
        if convert is not same and not isinstance(value, bool) and value not in LEFT_OPEN:
            yield replace(entry, objection=f"is not {Kind.SWITCH.value}")
            continue
        meant = value if value in LEFT_OPEN else convert(value)
        entry = replace(entry, value=meant)
        first = spelled.setdefault(name, entry)
        if first.value != meant:
            entry = replace(entry, objection=f"is another spelling of {first.written}; keep one of them")
        yield entry


def _judge(entry: Entry, is_on: bool) -> Line:
    """`is_on`: the section of the key is not switched off."""
    key = KEYS.get(entry.name)
    if entry.objection:
        return Line(entry, Verdict.REFUSED, entry.objection)
    if key is None:
        return Line(entry, Verdict.REFUSED, f"there is no such key; {_likely(entry.name)}")
    if entry.value in LEFT_OPEN:
        return Line(entry, Verdict.LEFT, settings=key.settings)
    if not is_on:
        return Line(entry, Verdict.NEEDLESS, f"{entry.name.rpartition('.')[0]} is off")
    if objection := key.objection(entry.value):
        return Line(entry, Verdict.REFUSED, objection)
    return Line(entry, Verdict.MAPPED if key.settings else Verdict.NEEDLESS, key.why, key.settings)


def _likely(name: str) -> str:
    """The key that may be meant: of a similar name, or of the same last name in another section."""
    known = [*KEYS, *OTHER_SPELLINGS]
    section, _, last = name.rpartition(".")
    elsewhere = [key for key in known if key.rpartition(".")[2] == last and last != "enabled"]
    likely = get_close_matches(name, known, n=1, cutoff=0.75) or elsewhere or get_close_matches(section, known, n=1)
    return f"did you mean {likely[0]}?" if likely else "docs/deepspeed.md has all of them"


def _text(value: Any) -> str:
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return value if isinstance(value, str) else json.dumps(value, default=str)
