"""python -m data.prepare: turn text into PREFIX.bin, PREFIX.idx, PREFIX.tokenizer.json and PREFIX.json.

The four files are written into a hidden folder beside PREFIX and renamed at the end, the index last. The index exists
only if the other three are complete. A lock on PREFIX, beside it, keeps a second process from writing the same files.
"""

import argparse
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from data.chosen_tokenizers import character_tokenizer, named_tokenizer, train_tokenizer
from data.encode import Encoded, Encoder, encode_in_order
from data.errors import DataError
from data.indexed import bin_path, idx_path
from data.sidecar import INDEX, TOKENIZER, TOKENS, Sidecar, file_checksum
from data.sources import Source
from data.staging import IndexedWriter, reserved, staging_folder, token_dtype
from data.tokenizer import Tokenizer, tokenizer_path

EXIT_USER_ERROR = 2
EXIT_INTERRUPTED = 130
HIGHEST = {"workers": 4096, "train_bytes": sys.maxsize, "max_documents": sys.maxsize}  # of options that are numbers
# In the order in which they are renamed: the index last, because a pair without an index cannot be opened.
OUTPUT_PATHS = (bin_path, tokenizer_path, Sidecar.path, idx_path)


def prepare(source: Source, output: Path, tokenizer: Tokenizer, *, tokenizer_name: str, num_workers: int) -> Sidecar:
    """Encode a corpus and write the four files of prefix `output`, whose lock the caller holds.

    Raises DataError if the user made a mistake, and OSError if a file cannot be written.
    """
    with staging_folder(output) as folder:
        staged = folder / output.name
        tokenizer.save(tokenizer_path(staged))
        encoder = Encoder(str(tokenizer_path(staged)), tokenizer.eod, source.text_key)
        with IndexedWriter(staged, token_dtype(tokenizer.vocab_size)) as writer, _progress(output, source) as advance:
            for encoded in encode_in_order(encoder, source.documents(), num_workers):
                writer.add(encoded.tokens, encoded.lengths)
                advance(encoded)
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
            checksums={TOKENS: writer.bin_checksum} | checksums,
        )
        sidecar.save(staged)
        # The old index is removed before the files are renamed: it must never describe the new tokens.
        idx_path(output).unlink(missing_ok=True)
        for path in OUTPUT_PATHS:
            os.replace(path(staged), path(output))
    return sidecar


@contextmanager
def _progress(output: Path, source: Source) -> Iterator[Callable[[Encoded], None]]:
    """Show a progress bar on the terminal and yield the function that advances it."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TextColumn("{task.fields[documents]:,} documents, {task.fields[tokens]:,} tokens"),
        TextColumn("({task.fields[rate]:,.0f}/s)"),
        TimeRemainingColumn(),
    )
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task_id = progress.add_task(output.name, total=source.weight(), documents=0, tokens=0, rate=0.0)
        task = progress.tasks[0]

        def advance(encoded: Encoded) -> None:
            tokens = task.fields["tokens"] + len(encoded.tokens)
            progress.update(
                task_id,
                advance=encoded.weight,
                documents=task.fields["documents"] + len(encoded.lengths),
                tokens=tokens,
                rate=tokens / (task.elapsed or 1.0),
            )

        yield advance


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m data.prepare", description=__doc__.partition(":")[2])
    add = parser.add_argument
    add("--source", nargs="+", required=True, help="files, globs, folders, a hub dataset, or stdlib")
    add("--output", required=True, metavar="PREFIX", help="the common prefix of the four files")
    tokenizer = parser.add_mutually_exclusive_group(required=True)
    tokenizer.add_argument("--tokenizer", help="a tokenizer.json, a folder with one, or a hub name such as gpt2")
    tokenizer.add_argument("--train_vocab_size", type=int, metavar="N", help="train a byte-level BPE of N entries")
    tokenizer.add_argument("--characters", action="store_true", help="one entry for each character of the source")
    add("--train_bytes", type=int, default=32_000_000, metavar="N", help="text to train it on (%(default)s bytes)")
    add("--eod_token", help="the token of --tokenizer that ends a document, such as </s>")
    add("--text_key", default="text", help="the key of JSON lines, or the column (%(default)s)")
    add("--config", help="the configuration of a hub dataset")
    add("--split", default="train", help="the split of a dataset (%(default)s)")
    add("--max_documents", type=int, metavar="N", help="stop after N documents")
    add("--workers", type=int, default=os.cpu_count(), metavar="N", help="processes (%(default)s)")
    add("--overwrite", action="store_true", help="replace existing files")
    return parser


def main(arguments: list[str] | None = None) -> None:
    """Prepare a corpus. Exit with code 2 and one line if the user made a mistake, and with 130 after Ctrl-C."""
    parser = _parser()
    args = parser.parse_args(arguments)
    try:
        sidecar = _run(args)
    except DataError as error:
        parser.exit(EXIT_USER_ERROR, f"data.prepare: {error}\n")
    except OSError as error:
        place = error.filename or args.output
        parser.exit(
            EXIT_USER_ERROR,
            f"data.prepare: cannot write or read {place} ({error.strerror or error}); make room, or choose another\n",
        )
    except KeyboardInterrupt:
        parser.exit(EXIT_INTERRUPTED, f"data.prepare: interrupted, nothing written to {args.output}\n")
    facts = f"{sidecar.documents:,} documents, {sidecar.tokens:,} tokens, vocabulary {sidecar.vocab_size:,}"
    Console().print(f"{args.output}: {facts}", soft_wrap=True, highlight=False)


def _run(args: argparse.Namespace) -> Sidecar:
    source = Source(args.source, args.text_key, args.config, args.split, args.max_documents)
    for name, highest in HIGHEST.items():
        if (value := getattr(args, name)) is not None and not 1 <= value <= highest:
            raise DataError(f"--{name}={value} must be 1 or more, and at most {highest}")
    output = Path(args.output)
    with reserved(output):
        existing = [str(path(output)) for path in OUTPUT_PATHS if path(output).exists()]
        if existing and not args.overwrite:
            raise DataError(f"{existing[0]} exists; choose another --output or add --overwrite")
        if args.tokenizer is not None:
            name, tokenizer = args.tokenizer, named_tokenizer(args.tokenizer, args.eod_token)
        elif args.characters:
            name, tokenizer = "characters", character_tokenizer(source.sample(sys.maxsize))
        else:
            name, tokenizer = "trained", train_tokenizer(source.sample(args.train_bytes), args.train_vocab_size)
        return prepare(source, output, tokenizer, tokenizer_name=name, num_workers=args.workers)


if __name__ == "__main__":
    main()
