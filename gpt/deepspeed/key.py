"""A row of the table of DeepSpeed's keys (`gpt/deepspeed/keys.yaml`), and the types of their values."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

LARGEST = 1e300  # larger numbers overflow in the products of the rules; NaN is not below it


@dataclass(frozen=True)
class ValueType:
    """The type of a key's value: its description in error messages, the values that have it, and their conversion."""

    description: str
    has: Callable[[Any], bool]
    convert: Callable[[Any], Any] = lambda value: value


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < LARGEST


def _is_integer(value: Any) -> bool:
    return _is_number(value) and value == int(value)  # may be written as 5e8, as is usual in DeepSpeed's files


def _is_pair(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(map(_is_number, value))


TYPES = {
    "bool": ValueType("true or false", lambda value: isinstance(value, bool)),
    "integer": ValueType("an integer", _is_integer, int),
    "count": ValueType("an integer of 0 or more", lambda value: _is_integer(value) and value >= 0, int),
    "positive": ValueType("an integer of 1 or more", lambda value: _is_integer(value) and value >= 1, int),
    "number": ValueType("a number", _is_number),
    "pair": ValueType("a list of two numbers", _is_pair),
    "text": ValueType("a string", lambda value: isinstance(value, str)),
    "any": ValueType("anything", lambda value: True),
}


@dataclass(frozen=True)
class Key:
    """A key of DeepSpeed's configuration, and what it means for this project.

    A key with `settings` and `convert` sets one setting to the converted value. A key with `settings` but without
    `convert` is read by a rule that combines several keys (`gpt/deepspeed/rules.py`). A key without `settings` is
    accepted and changes nothing. `note` is printed beside the key in the table of a file's keys. Values that are not in
    `accepted` are refused, with the reason and the remedy in `refusal`; None accepts every value of the type.
    """

    type: ValueType
    settings: tuple[str, ...] = ()
    convert: Callable[[Any], Any] | None = None
    note: str = ""
    accepted: Sequence[Any] | None = None
    refusal: str = ""

    def reason_for_refusal(self, value: Any) -> str:
        """Return why the value is refused and what to do instead, or an empty string if it is accepted."""
        if not self.type.has(value):
            return f"is not {self.type.description}"
        is_switched_off = self.type is TYPES["any"] and (
            not value or (isinstance(value, dict) and value.get("enabled") is False)
        )
        if self.accepted is None or self.type.convert(value) in self.accepted or is_switched_off:
            return ""
        return self.refusal


def as_text(value: Any) -> str:
    """Return the value as error messages and tables show it: integral numbers without a fraction, the rest as JSON."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return value if isinstance(value, str) and value.isprintable() else json.dumps(value, default=str)


def unchanged(value: Any) -> Any:
    """Return the value itself."""
    return value
