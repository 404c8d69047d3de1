"""Errors that a user can correct: each is one line with the setting, both numbers and the remedy."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager


class ConfigError(ValueError):
    """A setting, or a combination of settings, that cannot work. It is printed, and the exit code is 2."""


class NodeError(ConfigError):
    """An error that all ranks of a node meet, and other nodes may not: the first rank of the node prints it."""


class MemoryLimitError(ConfigError):
    """A limit of memory, of the settings or of the system, that the run exceeds."""


def check_type(name: str, value: object, expected: type, remedy: str) -> None:
    """Raise TypeError if an argument is not an object of the class that is expected."""
    if not isinstance(value, expected):
        given = "None" if value is None else f"of class {type(value).__name__}"
        raise TypeError(f"{name} is {given}, not of class {expected.__name__}; {remedy}")


@contextmanager
def exit_on_config_error(*others: type[Exception]) -> Iterator[None]:
    """Print the message of a ConfigError, or of one of `others`, and exit with code 2.

    For commands of one process; a rank of a job uses `exit_as_rank`.
    """
    user_errors: tuple[type[Exception], ...] = (ConfigError, *others)
    try:
        yield
    except user_errors as error:
        sys.stderr.write(f"error: {printable(str(error))}\n")
        sys.exit(2)


def printable(text: str) -> str:
    """Return a text without the characters that control a terminal, or hide a part of it: names in files may have them.

    Ends of lines and tabs remain.
    """
    return "".join(each if each.isprintable() or each in "\n\t" else repr(each)[1:-1] for each in text)


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or its type's name if there is none."""
    return next(iter(str(error).splitlines()), type(error).__name__)
