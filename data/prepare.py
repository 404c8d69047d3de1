"""python -m data.prepare: turn text into PREFIX.bin, PREFIX.idx, PREFIX.tokenizer.json and PREFIX.json.

The four files are written into a hidden folder beside PREFIX and renamed at the end, the index last. The index exists
only if the other three are complete. A lock on PREFIX, beside it, keeps a second process from writing the same files.
Documents that are rejected are listed in PREFIX.rejected.jsonl.
"""

import argparse
import hashlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice
from multiprocessing import set_forkserver_preload
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, ProgressColumn, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as ProgressBar

from data.chosen_tokenizers import character_tokenizer, named_tokenizer, train_tokenizer
from data.encode import Encoded, Encoder, encode_in_order
from data.errors import DataError
from data.indexed import bin_path, idx_path, missing_parts, part_prefix
from data.sidecar import INDEX, TOKENIZER, TOKENS, Sidecar, file_checksum
from data.sources import Source
from data.staging import PROGRESS, IndexedWriter, Progress, join_parts, reserved, staging_folder, token_dtype
from data.tokenizer import Tokenizer, tokenizer_path
from parallel.validation.errors import printable
from parallel.validation.paths import expanded

EXIT_USER_ERROR = 2
EXIT_INTERRUPTED = 130
MOST_PARTS = 99_999
HIGHEST = {"workers": 4096, "train_bytes": sys.maxsize, "max_documents": sys.maxsize}  # of options that are numbers
BATCHES_BETWEEN_SAVES = 256  # of half a megabyte of text
SECONDS_BETWEEN_LINES, WIDTH_OF_LINES = 30.0, 160  # of progress, without a terminal


def rejected_path(prefix: str | Path) -> Path:
    return Path(f"{prefix}.rejected.jsonl")


# In the order in which they are renamed: the index last, because a pair without an index cannot be opened.
OUTPUT_PATHS = (bin_path, tokenizer_path, Sidecar.path, idx_path)


def prepare(source: Source, output: Path, tokenizer: Tokenizer, *, tokenizer_name: str, num_workers: int) -> Sidecar:
    """Encode a corpus and write the files of prefix `output`, whose lock the caller holds.

    An interrupted preparation of the same goes on where its progress was saved. Raises DataError if the user made a
    mistake, and OSError if a file cannot be written.
    """
    with staging_folder(output, _plan(source, tokenizer)) as (folder, progress):
        staged = folder / output.name
        tokenizer.save(tokenizer_path(staged))
        with IndexedWriter(staged, token_dtype(tokenizer.vocab_size), progress.bin_bytes) as writer:
            writer.restore(tokenizer.eod, ends_in_document=2 if tokenizer.bos == tokenizer.eod else 1)
            if writer.num_documents != progress.written:
                raise DataError(
                    f"{folder} has {writer.num_documents} documents of an interrupted preparation, {progress.written} "
                    "were written; delete it"
                )
            progress = _encode(source, tokenizer, writer, progress, num_workers)
        if writer.num_documents == 0:
            raise DataError(
                f"--source {' '.join(source.names)} holds no text, so {output} is not written; give another"
            )
        checksums = {suffix: file_checksum(f"{staged}{suffix}") for suffix in (INDEX, TOKENIZER)}
        sidecar = Sidecar(
            vocab_size=tokenizer.vocab_size,
            eod=tokenizer.eod,
            tokenizer=tokenizer_name,
            documents=writer.num_documents,
            tokens=writer.num_tokens,
            source=source.names,
            bos=tokenizer.bos,
            empty=progress.empty,
            rejected=progress.rejected,
            checksums={TOKENS: writer.bin_checksum} | checksums,
            vocabulary_hash=tokenizer.vocabulary_hash,
            of_corpus=_hash_of_corpus(source, tokenizer) if source.part[1] > 1 else None,
        )
        sidecar.save(staged)
        (folder / PROGRESS).unlink(missing_ok=True)  # what is renamed cannot be continued
        # The old index is removed before the files are renamed: it must never describe the new tokens.
        idx_path(output).unlink(missing_ok=True)
        rejected_path(output).unlink(missing_ok=True)
        for path in (rejected_path, *OUTPUT_PATHS) if progress.rejected else OUTPUT_PATHS:
            os.replace(path(staged), path(output))
    return sidecar


def _plan(source: Source, tokenizer: Tokenizer) -> str:
    """Return a hash of what determines the tokens; the content of the source counts by its sizes and versions.

    Whether errors are skipped does not count: one that has ended a preparation may be skipped when it goes on.
    """
    # Versions of files are numbers, as they always were: progress from before goes on.
    versions = [int(shard.version) if shard.version.isdigit() else shard.version for shard in source.shards]
    shards = [(shard.weight, version) for shard, version in zip(source.shards, versions, strict=True)]
    facts = [replace(source, skips_errors=False), shards, tokenizer.text, tokenizer.eod, tokenizer.bos]
    return hashlib.sha256(repr(facts).encode()).hexdigest()


def _hash_of_corpus(source: Source, tokenizer: Tokenizer) -> str:
    """Return a hash that the parts of a corpus have in common, wherever each of them is prepared."""
    whole = replace(source, part=(1, 1))
    sizes = [shard.weight for shard in whole.shards]
    facts = [whole.text_key, whole.config, whole.split, whole.max_documents, sizes, tokenizer.text]
    return hashlib.sha256(repr([*facts, tokenizer.eod, tokenizer.bos]).encode()).hexdigest()[:16]


def _encode(
    source: Source, tokenizer: Tokenizer, writer: IndexedWriter, progress: Progress, num_workers: int
) -> Progress:
    """Append the documents that are left and return the progress, which is saved now and then, and after an error."""
    staged = Path(writer.prefix)
    encoder = Encoder(str(tokenizer_path(staged)), tokenizer.eod, source.text_key, tokenizer.bos, source.skips_errors)
    documents = islice(source.documents(), progress.read, None)
    with (
        open(rejected_path(staged), "ab") as rejected,
        _shown_progress(staged.name, source, progress, writer.num_tokens) as advance,
    ):
        rejected.truncate(progress.rejected_bytes)
        rejected.seek(0, os.SEEK_END)

        def save() -> None:
            writer.sync()
            rejected.flush()
            os.fsync(rejected.fileno())
            progress.save(staged.parent)

        try:
            for number, encoded in enumerate(encode_in_order(encoder, documents, num_workers), 1):
                writer.add(encoded.tokens, encoded.lengths)
                rejected.writelines(f"{json.dumps(found)}\n".encode() for found in encoded.rejected)
                # One assignment, so that Ctrl-C finds the facts of the same batches. The files may have more.
                progress = replace(
                    progress,
                    read=progress.read + encoded.num_read,
                    empty=progress.empty + encoded.num_empty,
                    rejected=progress.rejected + len(encoded.rejected),
                    weight=progress.weight + encoded.weight,
                    bin_bytes=writer.num_bytes,
                    rejected_bytes=rejected.tell(),
                )
                advance(encoded)
                if number % BATCHES_BETWEEN_SAVES == 0:
                    save()
        except BaseException:
            if progress.read:
                save()
            raise
    return progress


@contextmanager
def _shown_progress(
    name: str, source: Source, progress: Progress, num_tokens: int
) -> Iterator[Callable[[Encoded], None]]:
    """Yield the function that advances a progress bar; without a terminal, it prints a line from time to time."""
    facts: tuple[ProgressColumn, ...] = (
        TaskProgressColumn(),
        TextColumn("{task.fields[documents]:,} documents, {task.fields[tokens]:,} tokens"),
        TextColumn("({task.fields[rate]:,.0f}/s)"),
        TimeRemainingColumn(),
    )
    console = Console(stderr=True)
    if not console.is_terminal:
        console.width = WIDTH_OF_LINES
    columns = (TextColumn("{task.description}"), *([BarColumn()] if console.is_terminal else []), *facts)
    if progress.read:
        console.print(f"{name}: goes on after {progress.read:,} documents", highlight=False)
    with ProgressBar(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task_id = bar.add_task(
            name,
            total=source.weight(),
            completed=round(progress.weight),
            documents=progress.written,
            tokens=num_tokens,
            rate=0.0,
        )
        task = bar.tasks[0]
        last_line = time.monotonic()

        def advance(encoded: Encoded) -> None:
            nonlocal last_line
            tokens = task.fields["tokens"] + len(encoded.tokens)
            bar.update(
                task_id,
                advance=encoded.weight,
                documents=task.fields["documents"] + len(encoded.lengths),
                tokens=tokens,
                rate=(tokens - num_tokens) / (task.elapsed or 1.0),
            )
            if not console.is_terminal and time.monotonic() - last_line >= SECONDS_BETWEEN_LINES:
                last_line = time.monotonic()
                console.print(bar.get_renderable())

        yield advance


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m data.prepare", description=__doc__.partition(":")[2])
    add = parser.add_argument
    add("--source", type=expanded, nargs="+", required=True, help="files, globs, folders, a hub dataset, or stdlib")
    add("--output", type=expanded, required=True, metavar="PREFIX", help="the common prefix of the files")
    tokenizer = parser.add_mutually_exclusive_group(required=True)
    tokenizer.add_argument(
        "--tokenizer",
        type=expanded,
        help="a tokenizer.json, a folder with one, the PREFIX of a corpus, or a hub name such as gpt2",
    )
    tokenizer.add_argument("--train_vocab_size", type=int, metavar="N", help="train a byte-level BPE of N entries")
    tokenizer.add_argument("--characters", action="store_true", help="one entry for each character of the source")
    add("--train_bytes", type=int, default=32_000_000, metavar="N", help="text to train it on (%(default)s bytes)")
    add("--tokenizer_only", action="store_true", help="write PREFIX.tokenizer.json and encode nothing")
    add("--eod_token", help="the token of --tokenizer that ends a document, such as </s>")
    add("--bos_token", help="the token that begins one, or none; default: what --tokenizer puts before a text")
    add("--text_key", default="text", help="the key of JSON lines, or the column (%(default)s)")
    add("--config", help="the configuration of a hub dataset")
    add("--split", default="train", help="the split of a dataset (%(default)s)")
    add("--part", default="1/1", metavar="K/N", help="one of N parts of the files, each made by a command of its own")
    add("--max_documents", type=int, metavar="N", help="stop after N documents")
    add("--workers", type=int, default=os.cpu_count(), metavar="N", help="processes (%(default)s)")
    add("--on_error", choices=("stop", "skip"), default="stop", help="skip: list wrong documents in a file and go on")
    add("--overwrite", action="store_true", help="replace existing files")
    return parser


def main(arguments: list[str] | None = None) -> None:
    """Prepare a corpus. Exit with code 2 and one line if the user made a mistake, and with 130 after Ctrl-C."""
    parser = _parser()
    args = parser.parse_args(arguments)
    try:
        facts = _run(args)
    except DataError as error:
        parser.exit(EXIT_USER_ERROR, f"data.prepare: {printable(str(error))}\n")
    except OSError as error:
        place = printable(str(error.filename or args.output))
        parser.exit(
            EXIT_USER_ERROR,
            f"data.prepare: cannot write or read {place} ({error.strerror or error}); make room, or choose another\n",
        )
    except KeyboardInterrupt:
        parser.exit(
            EXIT_INTERRUPTED, f"data.prepare: interrupted, {args.output} is not complete; the same command goes on\n"
        )
    Console().print(f"{args.output}: {facts}", soft_wrap=True, highlight=False)


def _run(args: argparse.Namespace) -> str:
    """Return a description of what was written."""
    part = _part_of(args)
    facts_of_source = args.text_key, args.config, args.split, args.max_documents
    source = Source(args.source, *facts_of_source, skips_errors=args.on_error == "skip", part=part)
    for name, highest in HIGHEST.items():
        if (value := getattr(args, name)) is not None and not 1 <= value <= highest:
            raise DataError(f"--{name}={value} must be 1 or more, and at most {highest}")
    whole = Path(args.output)
    output = part_prefix(whole, *part) if part[1] > 1 else whole
    with reserved(output):
        paths = (tokenizer_path,) if args.tokenizer_only else OUTPUT_PATHS
        existing = [str(path) for path in (bin_path(whole), *(path(output) for path in paths)) if path.exists()]
        if existing and not args.overwrite:
            raise DataError(f"{existing[0]} exists; choose another --output or add --overwrite")
        if args.tokenizer is not None:
            name, tokenizer = args.tokenizer, named_tokenizer(args.tokenizer, args.eod_token, args.bos_token)
        elif args.characters:
            name, tokenizer = "characters", character_tokenizer(source.sample(sys.maxsize))
        else:
            name, tokenizer = "trained", train_tokenizer(source.sample(args.train_bytes), args.train_vocab_size)
        if args.tokenizer_only:
            tokenizer.save(tokenizer_path(output))
            return f"a tokenizer, vocabulary {tokenizer.vocab_size:,}"
        made = prepare(source, output, tokenizer, tokenizer_name=name, num_workers=args.workers)
    left_out = f"{made.empty:,} empty ones left out"
    joined = ""
    if part[1] > 1:
        with reserved(whole, waits=True):
            is_joined = join_parts(whole, part[1])
        joined = (
            f"; {whole} is complete" if is_joined else f"; {whole} lacks the parts {' '.join(missing_parts(whole))}"
        )
    left_out += f", {made.rejected:,} rejected ({rejected_path(output)})" if made.rejected else ""
    return f"{made.documents:,} documents ({left_out}), {made.tokens:,} tokens, vocabulary {made.vocab_size:,}{joined}"


def _part_of(args: argparse.Namespace) -> tuple[int, int]:
    """Return (number, count) of --part. Raises DataError if there is no such part."""
    number, _, count = args.part.partition("/")
    if not (number.isascii() and count.isascii() and number.isdigit() and count.isdigit()):
        raise DataError(f"--part={args.part} is no K/N, such as 3/64; correct it")
    if not 1 <= int(number) <= int(count) <= MOST_PARTS:
        raise DataError(f"--part={args.part} is no part from 1/N to N/N, of at most {MOST_PARTS}; correct it")
    if int(count) > 1 and (args.tokenizer is None or args.tokenizer_only):
        raise DataError(
            "--part needs a --tokenizer that all parts have; make one with --tokenizer_only, and without --part"
        )
    return int(number), int(count)


if __name__ == "__main__":
    set_forkserver_preload(["data.encode"])  # its imports take longer than the start of a worker without them
    main()
