"""The only exception class of this package, for mistakes in data or settings that the user can correct."""


class DataError(ValueError):
    """A mistake that the user can correct.

    The message is one line with the file or setting, what was expected, what was found, and the remedy.
    """
