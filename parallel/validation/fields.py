"""The values that fields of settings accept: each states its type and its range, and `checked` holds it to them.

    @checked
    class Schedule:
        steps: Annotated[int, Range(1)] = 1000
        peak: Annotated[float, Range(above=0, allows_inf=True)] = 1.0
        decay: Literal["cosine", "linear"] = "cosine"

Errors and the text of `--help` are made from the same types.
"""

import json
import math
import os
import re
import reprlib
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import (
    Annotated,
    Any,
    Literal,
    TypeVar,
    Union,
    cast,
    dataclass_transform,
    get_args,
    get_origin,
    get_type_hints,
)

from parallel.validation.errors import ConfigError
from parallel.validation.paths import expanded

T = TypeVar("T")

LARGEST_INT = 2**63 - 1  # of a tensor or of an index
LARGEST_FLOAT = 1e30  # numbers are read into fp32 tensors, and multiplied there
LONGEST_NAME, LONGEST_PATH = 255, 3000  # bytes, the path without the names of files of a run
UNIONS = (Union, UnionType)
SHOWN_CHARACTERS = 60  # of a value in an error
NAMES = {int: "an integer", float: "a number", bool: "true or false", str: "a text", NoneType: "null"}


@dataclass(frozen=True)
class Range:
    """The numbers that a field accepts; NaN is never one. Of a list, every element has to be in the range."""

    at_least: float | None = None
    at_most: float | None = None
    above: float | None = None
    below: float | None = None
    allows_inf: bool = False

    def problem(self, value: float) -> str | None:
        """Return what is wrong with a number, or None if it is in the range."""
        limit = LARGEST_INT if isinstance(value, int) else LARGEST_FLOAT
        at_most = limit if self.at_most is None else self.at_most
        if value != value:
            return "is not a number"
        if self.allows_inf and value == math.inf:
            return None
        if self.at_least is not None and value < self.at_least:
            return f"is below {shown(self.at_least)}"
        if self.above is not None and value <= self.above:
            return f"is not above {shown(self.above)}"
        if self.below is not None and value >= self.below:
            return f"is not below {shown(self.below)}"
        if value > at_most:
            return f"is above {shown(at_most)}"
        return f"is below {shown(-limit)}" if value < -limit else None

    def __str__(self) -> str:
        parts = [
            "" if self.at_least is None else f"of {shown(self.at_least)} or more",
            "" if self.above is None else f"above {shown(self.above)}",
            "" if self.below is None else f"below {shown(self.below)}",
            "" if self.at_most is None else f"of at most {shown(self.at_most)}",
        ]
        if self.at_least is not None and self.at_most is not None:
            parts = [f"from {shown(self.at_least)} to {shown(self.at_most)}"]
        return " and ".join(filter(None, parts)) + (", or .inf" if self.allows_inf else "")


@dataclass(frozen=True)
class PathLength:
    """The texts that may be the path of a file; a longer name fails in every call of the system."""

    def problem(self, value: str) -> str | None:
        """Return what is wrong with a path, or None."""
        longest = max(len(os.fsencode(part)) for part in value.split("/"))
        if longest > LONGEST_NAME or len(os.fsencode(value)) > LONGEST_PATH:
            return f"is longer than {LONGEST_PATH} bytes, or has a name of more than {LONGEST_NAME}"
        return None

    def expanded(self, value: str) -> str:
        """Return a path with ~ and variables replaced."""
        try:
            return expanded(value)
        except ValueError:
            raise _WrongValueError("has a user or a variable that is not known") from None

    def __str__(self) -> str:
        return "that is a path"


FilePath = Annotated[str, PathLength()]
Positive = Annotated[int, Range(1)]
Ranks = Annotated[int, Range(1, 2**20)]  # a number of ranks
NonNegative = Annotated[int, Range(0)]


class _WrongTypeError(Exception):
    """The value has another type than the field."""


class _WrongValueError(Exception):
    """The value has the type of the field, and the message says what is wrong with it."""


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def checked(cls: type[T]) -> type[T]:
    """Make a class a frozen dataclass whose fields are checked (`check_fields`) before its own `__post_init__`."""
    check_relations = getattr(cls, "__post_init__", lambda _self: None)

    def __post_init__(self: T) -> None:
        check_fields(self)
        check_relations(self)

    cls.__post_init__ = __post_init__  # type: ignore[attr-defined]
    return dataclass(frozen=True)(cls)


def check_fields(instance: Any) -> None:
    """Check all fields of a dataclass that is being made, and make lists tuples and integers floats as declared.

    Raise ConfigError, with CLASS.FIELD=VALUE, what is wrong and what to choose, if a value does not suit its field.
    """
    kind: Any = type(instance)
    for name, hint in field_types(kind).items():
        value = convert(f"{kind.__name__}.{name}", hint, getattr(instance, name))
        object.__setattr__(instance, name, value)  # the dataclass is frozen


@cache
def field_types(cls: Any) -> dict[str, Any]:
    """Return the types of the fields of a dataclass by name, with their ranges."""
    hints = get_type_hints(cls, include_extras=True)
    return {each.name: hints[each.name] for each in fields(cls)}


def convert(name: str, hint: Any, value: Any) -> Any:
    """Return the value in the type `hint`. Raise ConfigError if it has another type or is out of range."""
    try:
        return _convert(hint, value)
    except _WrongTypeError:
        kind = "" if value is None else f" is {_kind(value)}"
        raise ConfigError(f"{name}={shown(value)}{kind or ' is no value'}; choose {describe(hint)}") from None
    except _WrongValueError as error:
        raise ConfigError(f"{name}={shown(value)} {error}; choose {describe(hint)}") from None


def parse_json(cls: type[T], text: str | bytes) -> T:
    """Return the dataclass whose fields a text of JSON has, for what other processes say: nothing is converted.

    Raises ConfigError if it is none, or if a field has another type or is out of range.
    """
    try:
        instance = cls(**json.loads(text))
        types = field_types(cast(Any, cls)).items()
        wrong = next((name for name, hint in types if not _accepts(hint, getattr(instance, name))), None)
    except (TypeError, ValueError, RecursionError):
        wrong = "text"
    if wrong is not None:
        raise ConfigError(f"a {cls.__name__} of another process cannot be read: its {wrong} is wrong")
    return instance


def _accepts(hint: Any, value: Any) -> bool:
    """Return whether a value of JSON has a type as it is."""
    arguments = get_args(hint)
    match get_origin(hint):
        case origin if origin is Annotated:
            return _accepts(arguments[0], value) and not any(allowed.problem(value) for allowed in hint.__metadata__)
        case origin if origin is Literal:
            return isinstance(value, str) and value in arguments
        case origin if origin in UNIONS:
            return any(_accepts(each, value) for each in arguments)
        case origin if origin in (list, dict):
            elements = value.values() if isinstance(value, dict) else value
            return isinstance(value, origin) and all(_accepts(arguments[-1], each) for each in elements)
    is_type = type(value) is hint or (hint is float and type(value) is int)
    return is_type and (hint not in (int, float) or Range().problem(value) is None)


def alternatives(hint: Any) -> tuple[Any, ...]:
    """Return the types of which a field accepts any: several if it may be null, for example."""
    return get_args(hint) if get_origin(hint) in UNIONS else (hint,)


def is_text(hint: Any) -> bool:
    """Return True if the values of a type are texts."""
    return hint is str or (get_origin(hint) is Annotated and get_args(hint)[0] is str)


def describe(hint: Any) -> str:
    """Return the values that a field of this type accepts, in words."""
    arguments = get_args(hint)
    match get_origin(hint):
        case origin if origin is Annotated:
            return " ".join([describe(arguments[0]), *map(str, hint.__metadata__)])
        case origin if origin is Literal:
            return _listed([shown(argument) for argument in arguments])
        case origin if origin in UNIONS:
            return _listed([describe(argument) for argument in arguments])
        case origin if origin is list or arguments[1:] == (...,):
            return f"a list, each element {describe(arguments[0])}"
        case origin if origin is tuple:
            return f"a list of {len(arguments)}, each {describe(arguments[0])}"
    return "a group of settings" if is_dataclass(hint) else NAMES.get(hint, str(hint))


def shown(value: Any) -> str:
    """Return a value as it is written in YAML, in one line and shortened."""
    match value:
        case None:
            return "null"
        case bool():
            return str(value).lower()
        case int():  # the decimal digits of a huge integer take long to compute, and Python refuses to
            return f"{'-' * (value < 0)}2**{value.bit_length() - 1}..." if abs(value) >= 1e60 else f"{value}"
        case float():
            text = f"{value:g}" if abs(value) >= 1e6 and float(f"{value:g}") == value else f"{value}"
            return text.replace("inf", ".inf").replace("nan", ".nan")
        case str():
            text = value if value.isprintable() else repr(value)
        case _:
            text = reprlib.repr(list(value) if isinstance(value, tuple) else value)
    text = re.sub(r"\s+", " ", text)
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[: SHOWN_CHARACTERS - 3]}..."


def _convert(hint: Any, value: Any) -> Any:
    arguments = get_args(hint)
    match get_origin(hint):
        case origin if origin is Annotated:
            converted = _convert_single(arguments[0], value)
            for allowed in hint.__metadata__:
                _refuse(allowed.problem(converted))
                converted = allowed.expanded(converted) if isinstance(allowed, PathLength) else converted
            return converted
        case origin if origin is Literal:
            if not isinstance(value, (bool, int, str)):
                raise _WrongTypeError
            if not any(value == argument and type(value) is type(argument) for argument in arguments):
                raise _WrongValueError("is unknown")
            return value
        case origin if origin in UNIONS:
            return _convert_to_any(arguments, value)
        case origin if origin in (list, tuple):
            return _convert_list(origin, arguments, value)
    converted = _convert_single(hint, value)
    _refuse(Range().problem(converted) if hint is int or hint is float else None)
    return converted


def _convert_single(hint: Any, value: Any) -> Any:
    """Return a value that is no list in a type without arguments."""
    is_integer = isinstance(value, int) and not isinstance(value, bool)
    if hint is float and is_integer:
        try:
            value = float(value)
        except OverflowError:
            raise _WrongValueError(f"is above {shown(LARGEST_FLOAT)}") from None
    if is_dataclass(hint) and isinstance(value, dict):  # an element of a list of groups
        return _convert_group(hint, value)
    if not isinstance(value, hint) or (hint is int and not is_integer):
        raise _WrongTypeError
    if hint is str:
        _refuse(_problem_of_text(value))
    return value


def _convert_group(kind: Any, values: dict[str, Any]) -> Any:
    """Return the group of settings that has these values."""
    names = list(field_types(kind))
    if sorted(values) != sorted(names):
        raise _WrongValueError(f"has the settings {', '.join(values)}, and not {', '.join(names)}")
    return kind(**values)


def _convert_to_any(hints: tuple[Any, ...], value: Any) -> Any:
    """Return the value in the first of several types that accepts it."""
    wrong_value = None
    for hint in hints:
        try:
            return _convert(hint, value)
        except _WrongTypeError:
            continue
        except _WrongValueError as error:
            wrong_value = wrong_value or error
    raise wrong_value or _WrongTypeError


def _convert_list(kind: type, arguments: tuple[Any, ...], value: Any) -> Any:
    """Return the elements of a list or a tuple in their types."""
    if not isinstance(value, (list, tuple)):
        raise _WrongTypeError
    if kind is list or arguments[1:] == (...,):
        arguments = arguments[:1] * len(value)
    if len(value) != len(arguments):
        raise _WrongValueError(f"has {len(value)} elements, not {len(arguments)}")
    converted = []
    for hint, element in zip(arguments, value, strict=True):
        try:
            converted.append(_convert(hint, element))
        except _WrongTypeError:
            raise _WrongValueError(f"contains {shown(element)}, {_kind(element)}") from None
        except _WrongValueError as error:
            raise _WrongValueError(f"contains {shown(element)}, which {error}") from None
    return kind(converted)


def _problem_of_text(text: str) -> str | None:
    """Return why a text can be neither a name nor the path of a file, or None."""
    if not text:
        return "is empty"
    if "\0" in text or (not text.isascii() and any("\ud800" <= character <= "\udfff" for character in text)):
        return "has a character that is not text"
    return None


def _refuse(problem: str | None) -> None:
    if problem is not None:
        raise _WrongValueError(problem)


def _kind(value: Any) -> str:
    """Return the type of a value in words."""
    match value:
        case None:
            return "no value"
        case bool():
            return "true or false"
        case int():
            return "an integer"
        case float():
            return "a number with a decimal point"
        case str():
            return "a text"
        case list() | tuple():
            return "a list"
        case dict():
            return "a section"
    return f"a {type(value).__name__}"


def _listed(parts: list[str]) -> str:
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} or {parts[-1]}"
