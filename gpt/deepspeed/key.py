"""A row of the table of DeepSpeed's keys (`gpt/deepspeed/keys.py`), and the functions that make rows."""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

LARGEST = 1e300  # larger numbers overflow in the products of the rules; NaN is not below it


class ValueType(Enum):
    """The type of a key's value. The string of each member describes the type in error messages.

    Integers may be written as 5e8, as is usual in DeepSpeed's files.
    """

    BOOLEAN = "true or false"
    NON_NEGATIVE = "an integer of 0 or more"
    POSITIVE = "an integer of 1 or more"
    INTEGER = "an integer"
    NUMBER = "a number"
    PAIR = "a list of two numbers"
    STRING = "a string"
    ANY = "anything"

    def parse(self, value: Any) -> Any:
        """Return the value in this type, or None if it has another type."""
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < LARGEST
        is_integer = is_number and value == int(value)
        match self:
            case ValueType.BOOLEAN:
                return value if isinstance(value, bool) else None
            case ValueType.NON_NEGATIVE | ValueType.POSITIVE:
                return int(value) if is_integer and value >= (self is ValueType.POSITIVE) else None
            case ValueType.INTEGER:
                return int(value) if is_integer else None
            case ValueType.NUMBER:
                return value if is_number else None
            case ValueType.PAIR:
                is_pair = isinstance(value, list) and len(value) == 2
                return value if is_pair and all(ValueType.NUMBER.parse(item) is not None for item in value) else None
            case ValueType.STRING:
                return value if isinstance(value, str) else None
        return value


@dataclass(frozen=True)
class Key:
    """A key of DeepSpeed's configuration, and what it means for this project.

    A key with `settings` and `convert` sets one setting to the converted value. A key with `settings` but without
    `convert` is read by a rule that combines several keys (`gpt/deepspeed/rules.py`). A key without `settings` is
    accepted and changes nothing. `note` is printed beside the key in the table of a file's keys. Values that are not in
    `accepted` are refused, with the reason and the remedy in `refusal`; None accepts every value of the type.
    """

    name: str
    type: ValueType
    settings: tuple[str, ...] = ()
    convert: Callable[[Any], Any] | None = None
    note: str = ""
    accepted: tuple[Any, ...] | None = None
    refusal: str = ""

    def reason_for_refusal(self, value: Any) -> str:
        """Return why the value is refused and what to do instead, or an empty string if it is accepted."""
        if (parsed := self.type.parse(value)) is None:
            return f"is not {self.type.value}"
        if self.accepted is None or parsed in self.accepted or (self.type is ValueType.ANY and _is_off(value)):
            return ""
        return self.refusal


def _is_off(section: Any) -> bool:
    """Return True if a section is empty or switched off."""
    return not section or (isinstance(section, dict) and section.get("enabled") is False)


def as_text(value: Any) -> str:
    """Return the value as error messages and tables show it: integral numbers without a fraction, the rest as JSON."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return value if isinstance(value, str) and value.isprintable() else json.dumps(value, default=str)


def unchanged(value: Any) -> Any:
    """Return the value itself."""
    return value


def mapped(name: str, type: ValueType, setting: str, convert: Callable[[Any], Any] = unchanged, note: str = "") -> Key:
    """Return a key that sets one setting."""
    return Key(name, type, (setting,), convert, note)


def combined(name: str, type: ValueType, *settings: str, note: str = "") -> Key:
    """Return a key that a rule reads, together with other keys, to determine `settings`."""
    return Key(name, type, settings, None, note)


def not_needed(type: ValueType, note: str, *names: str) -> list[Key]:
    """Return keys that are accepted and change nothing; `note` says why."""
    return [Key(name, type, note=note) for name in names]


def restricted(key: Key, *accepted: Any, refusal: str) -> Key:
    """Return a copy of the key that refuses all values but `accepted`."""
    return replace(key, accepted=accepted, refusal=refusal)


def unsupported(name: str, type: ValueType, refusal: str, *accepted: Any) -> Key:
    """Return a key of a feature that is not supported; only `accepted`, the values that switch it off, are accepted."""
    return Key(name, type, note="is off", accepted=accepted, refusal=refusal)


def section(name: str, *keys: Key | list[Key]) -> list[Key]:
    """Return copies of the keys whose names begin with that of the section and a dot."""
    flat = [key for group in keys for key in ([group] if isinstance(group, Key) else group)]
    return [replace(key, name=f"{name}.{key.name}") for key in flat]
