"""What a row of the table of DeepSpeed's keys says (`gpt/deepspeed/keys.py`), and the words to write one in."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any


class Kind(Enum):
    """How a value is read; `reads` returns it, or None where it is no such value. DeepSpeed writes integers as 5e8."""

    SWITCH = "true or false"
    COUNT = "an integer of 0 or more"
    SIZE = "an integer of 1 or more"
    INTEGER = "an integer"
    NUMBER = "a number"
    PAIR = "a list of two numbers"
    TEXT = "a text"
    ANYTHING = "anything"

    def reads(self, value: Any) -> Any:
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
        is_integer = is_number and value == int(value)
        match self:
            case Kind.SWITCH:
                return value if isinstance(value, bool) else None
            case Kind.COUNT | Kind.SIZE:
                return int(value) if is_integer and value >= (self is Kind.SIZE) else None
            case Kind.INTEGER:
                return int(value) if is_integer else None
            case Kind.NUMBER:
                return value if is_number else None
            case Kind.PAIR:
                is_pair = isinstance(value, list) and len(value) == 2
                return value if is_pair and all(Kind.NUMBER.reads(item) is not None for item in value) else None
            case Kind.TEXT:
                return value if isinstance(value, str) else None
        return value


@dataclass(frozen=True)
class Key:
    """`settings` without `convert` are the affair of a rule that reads several keys (`gpt/deepspeed/config.py`).

    Values other than `accepts` (all, where it is None) are refused, with the reason and the remedy.
    """

    name: str
    kind: Kind
    settings: tuple[str, ...] = ()
    convert: Callable[[Any], Any] | None = None
    why: str = ""
    accepts: tuple[Any, ...] | None = None
    refusal: str = ""

    def objection(self, value: Any) -> str:
        """Why the value is refused, and the remedy; nothing where it is not."""
        if (read := self.kind.reads(value)) is None:
            return f"is not {self.kind.value}"
        if self.accepts is None or read in self.accepts or (self.kind is Kind.ANYTHING and _is_off(value)):
            return ""
        return self.refusal


def _is_off(section: Any) -> bool:
    return not section or (isinstance(section, dict) and section.get("enabled") is False)


def same(value: Any) -> Any:
    return value


def maps(name: str, kind: Kind, setting: str, convert: Callable[[Any], Any] = same, why: str = "") -> Key:
    return Key(name, kind, (setting,), convert, why)


def joins(name: str, kind: Kind, *settings: str, why: str = "") -> Key:
    return Key(name, kind, settings, None, why)


def needless(kind: Kind, why: str, *names: str) -> Iterator[Key]:
    for name in names:
        yield Key(name, kind, why=why)


def only(key: Key, *accepts: Any, else_say: str) -> Key:
    return replace(key, accepts=accepts, refusal=else_say)


def refused(name: str, kind: Kind, refusal: str, *accepts: Any) -> Key:
    """A feature that is not here. None, DeepSpeed's word for nothing, is always accepted."""
    return Key(name, kind, why="is off", accepts=accepts, refusal=refusal)


def section(name: str, *keys: Key | Iterator[Key]) -> Iterator[Key]:
    for key in keys:
        for each in [key] if isinstance(key, Key) else key:
            yield replace(each, name=f"{name}.{each.name}")
