"""The only exception class of this package: a mistake in data or settings, reported in one line."""


class DataError(ValueError):
    """A mistake that the user can correct.

    The message names the file or setting, what was expected, what was found, and the remedy.
    """
