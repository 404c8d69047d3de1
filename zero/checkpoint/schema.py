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
import sys
from typing import Any

from parallel.validation.errors import ConfigError

COUNT = range(2**63)  # an integer that fits into 64 bits
SHOWN_CHARACTERS = 60

Schema = Any  # as in the docstring of the module


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


def check(content: Any, schema: Schema, origin: object, place: str = "") -> None:
    """Raise ConfigError if the content of the file `origin`, at a place in it, does not fit the schema."""
    if need := _need(content, schema):
        found = f"{place.lstrip('.') or 'the content'} is {shown(content)}"
        raise ConfigError(f"{origin} is damaged: {found}, {need} is needed")
    if isinstance(schema, (list, tuple)):
        for number, item in enumerate(content):
            check(item, schema[number if isinstance(schema, tuple) else 0], origin, f"{place}[{number}]")
    elif isinstance(schema, dict):
        of_items = dict.fromkeys(content, schema[str]) if str in schema else schema
        for key, of_item in of_items.items():
            step = f"{place}.{shown(key)[1:-1]}"
            if key not in content:
                raise ConfigError(f"{origin} is damaged: {step.lstrip('.')} is missing")
            check(content[key], of_item, origin, step)


def shown(value: object) -> str:
    """Return a value from a file as a few characters for a message of one line."""
    text = ascii(value)
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}..."


def _need(value: Any, schema: Schema) -> str:
    """Return what is needed instead of the value itself, without its items; "" if it fits."""
    if isinstance(schema, range):
        fits = type(value) is int and value in schema
        return "" if fits else f"an integer from {schema.start} to {schema.stop - 1}"
    if isinstance(schema, set):
        fits = type(value) in (str, int, type(None)) and value in schema
        return "" if fits else f"one of {', '.join(sorted(map(str, schema)))}"
    if isinstance(schema, tuple):
        return "" if type(value) is list and len(value) == len(schema) else f"a list of {len(schema)}"
    if isinstance(schema, (dict, list)):
        return "" if type(value) is type(schema) else "an object" if isinstance(schema, dict) else "a list"
    if schema is float:
        return "" if type(value) in (int, float) and abs(value) <= sys.float_info.max else "a finite number"
    # Exactly: True is an int for isinstance.
    return "" if type(value) is schema else f"a value of type {schema.__name__}"
