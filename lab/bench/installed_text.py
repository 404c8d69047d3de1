"""Write a corpus of the text that is installed on this machine: documentation, licences and Python sources.

    python -m lab.bench.installed_text --output runs/packages.jsonl --megabytes 64

Of files with equal bytes one is taken. All prose is written, and Python sources until the size is reached, in the order
of their hashes: any part of the file is a random one, but depends on nothing else than the files' contents.
"""

import argparse
import hashlib
import json
import os
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path

FOLDERS = [sysconfig.get_path("purelib"), "/usr/lib/python3", "/usr/share"]
PROSE, CODE = (".md", ".rst", ".txt"), (".py",)
NAMES_OF_PROSE = "license", "licence", "copying", "notice", "authors", "readme", "copyright"
LARGEST_BYTES = 2**18  # of a file: longer ones are tables and generated code


def files(folders: Sequence[str], suffixes: tuple[str, ...], names: tuple[str, ...] = ()) -> Iterator[Path]:
    """Yield the files in these folders that have one of the suffixes, or whose name begins with one of the names."""
    for top in folders:
        for folder, _, found in os.walk(top):
            for name in found:
                path = Path(folder, name)
                is_chosen = name.endswith(suffixes) or (not path.suffix and name.lower().startswith(names or ("\0",)))
                if is_chosen and path.is_file() and path.stat().st_size <= LARGEST_BYTES:
                    yield path


def unique_texts(paths: Iterator[Path]) -> dict[str, str]:
    """Return {hash: text} of the files that may be read and are UTF-8."""
    texts = {}
    for path in paths:
        try:
            content = path.read_bytes()
            texts[hashlib.sha256(content).hexdigest()] = content.decode()
        except (UnicodeDecodeError, PermissionError):
            continue
    return texts


def main(words: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True, help="a file of JSON lines for data.prepare")
    parser.add_argument("--megabytes", type=float, default=64.0)
    parser.add_argument("--folders", nargs="+", default=FOLDERS)
    options = parser.parse_args(words)
    texts = unique_texts(files(options.folders, PROSE, NAMES_OF_PROSE))
    num_bytes = sum(len(text.encode()) for text in texts.values())
    print(f"prose: {len(texts)} files, {num_bytes} bytes")
    for key, text in sorted(unique_texts(files(options.folders, CODE)).items()):
        if num_bytes >= 1e6 * options.megabytes:
            break
        num_bytes += len(text.encode())
        texts[key] = text
    options.output.parent.mkdir(parents=True, exist_ok=True)
    with options.output.open("w") as file:
        file.writelines(json.dumps({"text": texts[key]}) + "\n" for key in sorted(texts))
    print(f"all: {len(texts)} files, {num_bytes} bytes")


if __name__ == "__main__":
    main(sys.argv[1:])
