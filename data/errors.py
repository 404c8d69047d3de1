"""The only exception class of this package, for mistakes in data or settings that the user can correct."""

import errno

LOCKS_ARE_MISSING = {errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP}  # errors of a file system without locks


class DataError(ValueError):
    """A mistake that the user can correct.

    The message is one line with the file or setting, what was expected, what was found, and the remedy. Line breaks in
    it, which names of files and messages of libraries may contain, become spaces.
    """

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.splitlines()))
