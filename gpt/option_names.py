"""Names of settings in messages: those of `zero` and `parallel`, which have no options, become names of options."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, is_dataclass

from gpt.settings import ParallelSettings, Settings


def in_option_names(text: str) -> str:
    """Return the text with `zero.stage` for `ZeroConfig.stage`, and `parallel.tensor_size=` for `tensor_size=`."""
    return re.sub(ARGUMENT, r"parallel.\1", re.sub(CLASS, lambda found: GROUPS[found[1]], text))


@contextmanager
def errors_in_option_names() -> Iterator[None]:
    """Name settings by their options in the message of an error that leaves this block, as `in_option_names` does."""
    try:
        yield
    except (ValueError, RuntimeError) as error:  # a ConfigError is a ValueError
        error.args = tuple(in_option_names(part) if isinstance(part, str) else part for part in error.args)
        raise


def _groups(settings: type, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield (name of the class, name of the group of options) of every group: ("ZeroConfig", "zero")."""
    for field in fields(settings):
        if isinstance(field.type, type) and is_dataclass(field.type):
            yield field.type.__name__, f"{prefix}{field.name}"
            yield from _groups(field.type, f"{prefix}{field.name}.")


GROUPS = dict(_groups(Settings))
CLASS = re.compile(rf"\b({'|'.join(GROUPS)})\b(?=\.\w)")
# `parallel` receives these as arguments.
ARGUMENT = re.compile(rf"(?<![\w.-])({'|'.join(field.name for field in fields(ParallelSettings))})(?==)")
