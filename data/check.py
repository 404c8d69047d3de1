"""python -m data.check PREFIX...: read all files of corpora and compare them with their checksums.

Training calls `check_index` only, which reads the index and not the tokens. Files of another program have no checksums.
"""

import argparse
import sys

from data.errors import DataError
from data.indexed import IndexedDataset, check_index, part_prefix
from data.sidecar import INDEX, TOKENIZER, TOKENS, Sidecar
from parallel.validation.errors import printable


def check_corpus(prefix: str) -> str:
    """Read all files of a corpus and return a line about them. Raises DataError if one is damaged."""
    dataset = IndexedDataset(prefix)
    check_index(dataset)
    compared = []
    if Sidecar.path(prefix).is_file():
        sidecar = Sidecar.load(prefix)
        compared = [suffix for suffix in (TOKENS, INDEX, TOKENIZER) if suffix in sidecar.checksums]
        for suffix in compared if not sidecar.parts else compared[1:]:
            sidecar.check_file(prefix, suffix)
        for number in range(1, len(sidecar.parts) + 1):
            check_corpus(str(part_prefix(prefix, number, len(sidecar.parts))))
    facts = f"{len(dataset):,} sequences, {dataset.num_tokens:,} tokens"
    return f"{prefix}: {facts}; equal to their checksums: {' '.join(compared) or 'none are recorded'}"


def main(arguments: list[str]) -> None:
    """Check corpora. Exit with code 2 and one line if a file is damaged."""
    parser = argparse.ArgumentParser("python -m data.check", description="Compare corpora with their checksums.")
    parser.add_argument("prefixes", nargs="+", metavar="PREFIX", help="as given to data.prepare --output")
    try:
        for prefix in parser.parse_args(arguments).prefixes:
            sys.stdout.write(f"{check_corpus(prefix)}\n")
    except DataError as error:
        parser.exit(2, f"data.check: {printable(str(error))}\n")


if __name__ == "__main__":
    main(sys.argv[1:])
