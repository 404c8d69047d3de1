"""The check of a corpus's files: what the header and the sizes of the files cannot show.

    python -m data.check PREFIX...      reads all files of corpora and compares them with their checksums

Training calls `check_index` only, which reads the index and not the tokens. The arrays of the index are read once, a
block at a time, so that an index of any size needs little memory. The checksums that `data.prepare` records show also a
change that leaves the arrays consistent; files of another program have none.
"""

import argparse
import sys
from collections.abc import Iterator

import numpy as np

from data.errors import DataError
from data.indexed import IndexedDataset, idx_path
from data.sidecar import INDEX, TOKENIZER, TOKENS, Sidecar

BLOCK = 1 << 18  # sequences that are checked at once: their arrays fit into a processor's cache


def check_index(dataset: IndexedDataset) -> None:
    """Raise DataError if an array of the index is inconsistent, or if PREFIX.json describes another index."""
    path = idx_path(dataset.prefix)
    if problem := _problem(dataset):
        raise DataError(f"{path} is damaged: {problem}; copy or prepare it again")
    if Sidecar.path(dataset.prefix).is_file():
        sidecar = Sidecar.load(dataset.prefix)
        sidecar.check_file(dataset.prefix, INDEX)
        for name, count in (("documents", len(dataset)), ("tokens", dataset.num_tokens)):
            if getattr(sidecar, name) != count:
                raise DataError(
                    f"{path} holds {count} {name}, {Sidecar.path(dataset.prefix)} says {getattr(sidecar, name)}: they "
                    "belong to different corpora; copy or prepare all files again"
                )


def check_corpus(prefix: str) -> str:
    """Read all files of a corpus and return a line about them. Raises DataError if one is damaged."""
    dataset = IndexedDataset(prefix)
    check_index(dataset)
    compared = []
    if Sidecar.path(prefix).is_file():
        sidecar = Sidecar.load(prefix)
        compared = [suffix for suffix in (TOKENS, INDEX, TOKENIZER) if suffix in sidecar.checksums]
        for suffix in compared:
            sidecar.check_file(prefix, suffix)
    facts = f"{len(dataset):,} sequences, {dataset.num_tokens:,} tokens"
    return f"{prefix}: {facts}; equal to their checksums: {' '.join(compared) or 'none are recorded'}"


def _problem(dataset: IndexedDataset) -> str | None:
    """Return a description of the first inconsistency; None if there is none."""
    item_bytes, expected = dataset.dtype.itemsize, 0
    for block in _blocks(len(dataset)):
        lengths, starts = dataset.sequence_lengths[block].astype(np.int64), dataset.starts[block]
        if lengths.min() < 0:
            sequence = int(np.argmax(lengths < 0))
            return f"sequence {block.start + sequence} has a length of {lengths[sequence]} tokens"
        ends = starts + lengths * item_bytes
        is_wrong = starts != np.concatenate(([expected], ends[:-1]))
        if is_wrong.any():
            sequence = int(np.argmax(is_wrong))
            where = ends[sequence - 1] if sequence else expected
            return (
                f"sequence {block.start + sequence} starts at byte {starts[sequence]}, the one before ends at {where}"
            )
        expected = int(ends[-1])
    return _problem_of_documents(dataset)


def _problem_of_documents(dataset: IndexedDataset) -> str | None:
    indices, before = dataset.document_indices, 0
    if indices[0] != 0:
        return f"document 0 begins with sequence {indices[0]}, not with sequence 0"
    for block in _blocks(len(indices)):
        is_wrong = indices[block] < np.concatenate(([before], indices[block][:-1]))
        if is_wrong.any():
            document = block.start + int(np.argmax(is_wrong))
            return f"document {document} begins with sequence {indices[document]}, before the document ahead of it"
        before = int(indices[block][-1])
    return None  # the last one is the number of sequences, which was compared when the file was opened


def _blocks(count: int) -> Iterator[slice]:
    return (slice(first, min(first + BLOCK, count)) for first in range(0, count, BLOCK))


def main(arguments: list[str]) -> None:
    """Check corpora. Exit with code 2 and one line if a file is damaged."""
    parser = argparse.ArgumentParser("python -m data.check", description="Compare corpora with their checksums.")
    parser.add_argument("prefixes", nargs="+", metavar="PREFIX", help="as given to data.prepare --output")
    try:
        for prefix in parser.parse_args(arguments).prefixes:
            sys.stdout.write(f"{check_corpus(prefix)}\n")
    except DataError as error:
        parser.exit(2, f"data.check: {error}\n")


if __name__ == "__main__":
    main(sys.argv[1:])
