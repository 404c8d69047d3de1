"""Errors that a user can correct: each is one line with the setting, both numbers and the remedy."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager


class ConfigError(ValueError):
    """A setting, or a combination of settings, that cannot work. The program ends with the line and exit code 2."""


@contextmanager
def exit_on_config_error(*others: type[Exception]) -> Iterator[None]:
    """End the program with the line of a ConfigError, or of one of `others`, and exit code 2.

    For commands of one process; a rank of a job uses `exit_with_error`.
    """
    mistakes: tuple[type[Exception], ...] = (ConfigError, *others)
    try:
        yield
    except mistakes as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(2)
