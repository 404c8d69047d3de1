"""What a user can put right: raised with one line that names the setting, both numbers and the remedy."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager


class ConfigError(ValueError):
    """A setting, or a combination of settings, that cannot work. The program ends with the line and exit code 2."""


@contextmanager
def exit_on_config_error(*others: type[Exception]) -> Iterator[None]:
    """For commands of one process: a ConfigError, or one of `others`, ends the program: its line, exit code 2."""
    mistakes: tuple[type[Exception], ...] = (ConfigError, *others)
    try:
        yield
    except mistakes as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(2)
