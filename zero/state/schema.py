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
from typing import Any

from parallel.errors import ConfigError

COUNT = range(2**63)  # an integer that fits into 64 bits
SHOWN_CHARACTERS = 60

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
    if isinstance(schema, dict):
        _check_object(value, schema)
    elif isinstance(schema, list):
        _need(type(value) is list, value, "a list")
        for number, item in enumerate(value):
            _check_inside(item, schema[0], number)
    elif isinstance(schema, tuple):
        _need(type(value) is list and len(value) == len(schema), value, f"a list of {len(schema)}")
        for number, (item, of_item) in enumerate(zip(value, schema, strict=True)):
            _check_inside(item, of_item, number)
    elif isinstance(schema, range):
        _need(type(value) is int and value in schema, value, f"an integer from {schema.start} to {schema.stop - 1}")
    elif isinstance(schema, set):
        is_one = isinstance(value, (str, int, type(None))) and value in schema
        _need(is_one, value, f"one of {', '.join(sorted(map(str, schema)))}")
    elif schema is float:
        _need(type(value) in (int, float) and _is_finite(value), value, "a finite number")
    else:  # exactly: True is an int for isinstance
        _need(type(value) is schema, value, f"a value of type {schema.__name__}")


def _check_object(value: Any, schema: dict[Any, Schema]) -> None:
    _need(type(value) is dict, value, "an object")
    if str in schema:
        for key, item in value.items():
            _check_inside(item, schema[str], key)
        return
    for key, of_item in schema.items():
        if key not in value:
            raise _Mismatch("is missing", f".{key}")
        _check_inside(value[key], of_item, key)


def _check_inside(item: Any, schema: Schema, key: str | int) -> None:
    try:
        _check(item, schema)
    except _Mismatch as mismatch:
        # The place is put together only if there is a mismatch: headers of files have thousands of entries.
        step = f"[{key}]" if isinstance(key, int) else f".{shown(key)[1:-1]}"
        mismatch.place = f"{step}{mismatch.place}"
        raise


def _need(fits: bool, value: Any, expected: str) -> None:
    if not fits:
        raise _Mismatch(f"is {shown(value)}, {expected} is needed")


def _is_finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer that is larger than every float
        return False
