"""Ways in which a file may be damaged."""

import os
from collections.abc import Callable
from pathlib import Path


def flip_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def cut_off(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


DAMAGES: dict[str, Callable[[Path], None]] = {"flipped": flip_bit, "cut off": cut_off, "deleted": Path.unlink}
