"""The one exception of this package: a mistake in data or settings, told in one line."""


class DataError(ValueError):
    """Names the file or setting, what was expected, what was found, and the remedy."""
