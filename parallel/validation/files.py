"""Reading of files that anybody may have written: each has a limit, so that none fills the memory or has no end."""

import errno
from pathlib import Path

SETTINGS_BYTES = 1 << 20  # of a file that people write
FACTS_BYTES = 16 << 20  # of a file that programs write beside their data
NOTE_BYTES = 1 << 12  # of a file of one name, path or number


def read_limited(path: Path, most_bytes: int) -> bytes:
    """Return the content of a file. Raises OSError also if it has more than `most_bytes`, as an endless device has."""
    with path.open("rb") as file:
        content = file.read(most_bytes + 1)
    if len(content) > most_bytes:
        raise OSError(errno.EFBIG, f"it has more than {most_bytes:,} bytes", str(path))
    return content


def read_note(path: Path) -> str:
    """Return the text of a file of one line, of a longer one the beginning, "" if there is none that can be read."""
    try:
        with path.open("rb") as file:
            return file.read(NOTE_BYTES).decode(errors="replace")
    except OSError:
        return ""
