"""Translation of a DeepSpeed JSON configuration into settings of this project, with a table of all its keys.

file -> keys under their current names -> each key is translated by its row (`gpt/deepspeed/keys.yaml`)
     -> rules combine the values of several keys (`gpt/deepspeed/rules.py`) -> settings
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from rich.table import Table

from gpt.deepspeed.keys import KEYS, ONLY_ENABLED_IS_READ, OTHER_NAMES, TYPES, as_text, unchanged
from gpt.deepspeed.rules import RULES
from gpt.deepspeed.translation import AUTO, FileKey, Translation, Verdict
from gpt.formats.config_files import read_json
from parallel.validation.errors import ConfigError
from parallel.world import num_ranks_from_environment

LEFT_OPEN = None, AUTO  # values with which the file leaves a key open: the settings then decide


def deepspeed_layer(
    path: Path,
    base: Any,
    options: frozenset[str],
    num_ranks: int | None,
    show: Callable[[Table], None],
) -> dict[str, Any]:
    """Return the settings that the file sets, by dotted names, without those that an option sets.

    `base` has all settings as they are without the file, by dotted names; `options` are the names of those that the
    command line sets. `show` is called with a table of all keys. Raise ConfigError if the file cannot be translated.
    """
    num_ranks = num_ranks or base["dry_run.world_size"] or num_ranks_from_environment()
    translation = translate(path, base, options, num_ranks)
    show(translation.table())  # before the check, so that the user sees all keys even if some are refused
    translation.check()
    return translation.settings_of_file()


def translate(path: Path, base: Mapping[str, Any], options: frozenset[str], num_ranks: int) -> Translation:
    """Return the translation of the file at `path`; the parameters are fields of Translation.

    Raise ConfigError if the file cannot be read, or contradicts itself or an option. Keys that are refused are part of
    the translation, so that its table can be shown before its `check` raises.
    """
    found = Translation(path, base, options, num_ranks)
    keys = list(_under_current_names(_flatten(read(path))))
    values = {key.name: key.value for key in keys}
    for key in keys:
        switch = f"{key.name.rpartition('.')[0]}.enabled"  # the key that switches the section of this key on or off
        is_on = switch not in KEYS or switch == key.name or values.get(switch) not in (None, False)
        found.keys.append(translated := _translate_key(key, is_on))
        if translated.verdict == "mapped":
            row = KEYS[key.name]
            found.values[key.name] = value = row.type.convert(key.value)
            if row.convert is not None:
                found.settings[row.settings[0]] = row.convert(value)
    if not found.refused:
        for rule in RULES:
            try:
                found.settings |= rule(found)
            except ConfigError as error:
                raise ConfigError(f"{path}: {error}") from error
    return found


def read(path: Path) -> dict[str, Any]:
    """Return the file's JSON object. Raise ConfigError if it is not one, or has a key twice."""
    content = read_json(path, f"zero.deepspeed_config={path}")
    if not isinstance(content, dict):
        raise ConfigError(f"zero.deepspeed_config={path} contains {as_text(content)}; it must be an object of keys")
    return content


def _flatten(content: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted name, value) of every key. A section of which only `enabled` is read counts as one key."""
    for name, value in content.items():
        if isinstance(value, dict) and prefix + name not in ONLY_ENABLED_IS_READ:
            yield from _flatten(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def _under_current_names(pairs: Iterator[tuple[str, Any]]) -> Iterator[FileKey]:
    """Yield the keys with the names and values that the current version of DeepSpeed uses.

    A key is refused if its value cannot be converted, or if the file has the key under two names with different values.
    """
    earlier: dict[str, FileKey] = {}
    for spelling, value in pairs:
        name, convert = OTHER_NAMES.get(spelling, (spelling, unchanged))
        key = FileKey(f"{as_text(spelling)}={as_text(value)}", name, value)
        if convert is not unchanged and not isinstance(value, bool) and value not in LEFT_OPEN:
            yield replace(key, verdict="refused", reason=f"is not {TYPES['bool'].description}")
            continue
        converted = value if value in LEFT_OPEN else convert(value)
        key = replace(key, value=converted)
        first = earlier.setdefault(name, key)
        if first.value != converted:
            reason = f"is another spelling of {first.written}; keep one of them"
            key = replace(key, verdict="refused", reason=reason)
        yield key


def _translate_key(key: FileKey, is_on: bool) -> FileKey:
    """Return the key with its verdict; `is_on` is False if its section is switched off."""
    row = KEYS.get(key.name)
    if key.verdict == "refused":
        return key
    if row is None:
        return replace(key, verdict="refused", reason=f"there is no such key; {_suggestion(key.name)}")
    if key.value in LEFT_OPEN:
        return replace(key, verdict="left to the settings", settings=row.settings)
    if not is_on:
        return replace(key, verdict="not needed", reason=f"{key.name.rpartition('.')[0]} is off")
    if reason := row.reason_for_refusal(key.value):
        return replace(key, verdict="refused", reason=reason)
    verdict: Verdict = "mapped" if row.settings else "not needed"
    return replace(key, verdict=verdict, reason=row.note, settings=row.settings)


def _suggestion(name: str) -> str:
    """Suggest a key for an unknown one: one with a similar name, or with the same name in another section."""
    known = [*KEYS, *OTHER_NAMES]
    section, _, last = name.rpartition(".")
    elsewhere = [key for key in known if key.rpartition(".")[2] == last and last != "enabled"]
    likely = get_close_matches(name, known, cutoff=0.75) or elsewhere or get_close_matches(section, known)
    return f"did you mean {likely[0]}?" if likely else "docs/deepspeed.md lists all keys"
