"""Checks JSON from files: that the keys that are read exist, and that their values have the right types and ranges.

A schema is written as the JSON that it describes:

    {"step": range(10), "name": str}    an object with these keys, and perhaps others
    {str: int}                          an object with any keys, whose values are integers
    [float]                             a list of any length, of finite numbers
    (str, int)                          a list of these two
    range(1, 9)                         an integer in this range
    {"a", None}                         one of these values
"""

import json
import math
from collections.abc import Iterator
from typing import Any

from parallel.errors import ConfigError

COUNT = range(2**63)  # an integer that fits into 64 bits
SHOWN_CHARACTERS = 60
HASHABLE, CONTAINERS = (str, int, type(None)), (dict, list, tuple)

Schema = Any  # as in the docstring of the module


class _Mismatch(Exception):
    """A value that does not fit its schema; `place` leads from the value that was checked to this one."""

    def __init__(self, problem: str, place: str = ""):
        self.problem, self.place = problem, place


def parse_json(text: bytes, schema: Schema, origin: object) -> Any:
    """Return the content of JSON that fits the schema.

    Raises ConfigError if it does not, with `origin`, which is the path of the file.
    """
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{origin} is damaged: it is not JSON ({shown(str(error))})") from error
    check(content, schema, origin)
    return content


def check(content: Any, schema: Schema, origin: object) -> None:
    """Raise ConfigError if the content of the file `origin` does not fit the schema."""
    try:
        _check(content, schema)
    except _Mismatch as mismatch:
        raise ConfigError(
            f"{origin} is damaged: {mismatch.place.lstrip('.') or 'the content'} {mismatch.problem}"
        ) from None


def shown(value: object) -> str:
    """Return a value from a file as a few characters for a message of one line."""
    text = ascii(value)
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}..."


def _check(value: Any, schema: Schema) -> None:
    """Raise _Mismatch if the value does not fit. Headers have thousands of entries, so messages are made last."""
    kind = type(schema)
    if kind is range:
        fits = type(value) is int and value in schema
    elif kind is dict:
        fits = type(value) is dict
    elif kind is list:
        fits = type(value) is list
    elif kind is tuple:
        fits = type(value) is list and len(value) == len(schema)
    elif kind is set:
        fits = type(value) in HASHABLE and value in schema
    elif schema is float:
        fits = type(value) in (int, float) and _is_finite(value)
    else:  # exactly: True is an int for isinstance
        fits = type(value) is schema
    if not fits:
        raise _Mismatch(f"is {shown(value)}, {_described(schema)} is needed")
    if kind in CONTAINERS:
        for key, item, of_item in _items(value, schema):
            try:
                _check(item, of_item)
            except _Mismatch as mismatch:
                step = f"[{key}]" if isinstance(key, int) else f".{shown(key)[1:-1]}"
                mismatch.place = f"{step}{mismatch.place}"
                raise


def _items(value: Any, schema: Schema) -> Iterator[tuple[str | int, Any, Schema]]:
    """Yield (key, item, schema of the item) of everything in a container that is checked."""
    if isinstance(schema, list):
        return ((number, item, schema[0]) for number, item in enumerate(value))
    if isinstance(schema, tuple):
        return ((number, item, schema[number]) for number, item in enumerate(value))
    if str in schema:
        return ((key, item, schema[str]) for key, item in value.items())
    for key in schema:
        if key not in value:
            raise _Mismatch("is missing", f".{key}")
    return ((key, value[key], of_item) for key, of_item in schema.items())


def _described(schema: Schema) -> str:
    if isinstance(schema, range):
        return f"an integer from {schema.start} to {schema.stop - 1}"
    if isinstance(schema, set):
        return f"one of {', '.join(sorted(map(str, schema)))}"
    if isinstance(schema, tuple):
        return f"a list of {len(schema)}"
    if schema is float:
        return "a finite number"
    if isinstance(schema, (dict, list)):
        return "an object" if isinstance(schema, dict) else "a list"
    return f"a value of type {schema.__name__}"


def _is_finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer that is larger than every float
        return False
