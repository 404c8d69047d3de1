"""Corpora as streams of undecoded documents: files, the standard library, or anything that `datasets` opens.

One process reads the shards one after another. The workers decode and parse the documents (`text_of`).
"""

import glob
import gzip
import json
import logging
import os
import sysconfig
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property, partial
from io import BufferedReader
from itertools import chain, islice
from pathlib import Path
from textwrap import shorten
from typing import Any, NamedTuple

from data.errors import DataError

logger = logging.getLogger(__name__)
TEXT_SUFFIXES = (".txt", ".text", ".md", ".rst", ".py")
JSON_SUFFIXES = (".jsonl", ".json", ".ndjson", ".jsonl.gz", ".json.gz", ".ndjson.gz")
PARQUET_SUFFIXES = (".parquet",)
SUFFIXES = TEXT_SUFFIXES + JSON_SUFFIXES + PARQUET_SUFFIXES
COMPRESSED = (".gz", ".bz2", ".xz", ".zst", ".lz4", ".br", ".zip")  # of which only those in JSON_SUFFIXES are read
PREPARED = (".tokenizer.json", ".json", ".rejected.jsonl", ".cache")  # ends of names of a corpus PREFIX
DATASETS_FILES = ("state.json", "dataset_dict.json")  # in a folder written by save_to_disk
NOT_IN_STDLIB = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}
NOT_IN_STDLIB |= {"encodings", "pydoc_data"}  # generated tables, a fifth of all tokens
PARQUET_ROWS = 16  # that are read at once: a dictionary makes documents of any size of a few bytes
MAX_KEYS_SHOWN = 200  # characters of the names of keys, in an error message
MAX_DOCUMENT_BYTES = 64 << 20  # a document is encoded as a whole, which takes many times its size in memory
MAX_LINE_BYTES = 2 * MAX_DOCUMENT_BYTES  # of JSON, in which a document may have escapes and other keys; of a row
MAX_SKIPPED_LINES = 8  # parts as long as a line that are read to find the end of one that is too long

# Columns of text in Arrow, and the types as which their bytes are read
BYTES_OF = {"string": "binary", "large_string": "large_binary", "string_view": "binary_view"}


class Document(NamedTuple):
    """One document as it was read: bytes of a text file, a JSON line or a Parquet column, or text of a dataset."""

    origin: str  # the file or dataset
    number: int  # of its line or row, from 1; 0 if the document is a whole file
    content: bytes | str | DataError | None  # the error if the document alone cannot be read
    weight: float  # its part of `Shard.weight`

    @property
    def place(self) -> str:
        """The file and line for an error message, or the file alone if it is one document."""
        return self.origin if self.number == 0 else f"{self.origin}:{self.number}"


@dataclass(frozen=True)
class Shard:
    """A file or dataset of the corpus. `weight` is its size in bytes or rows; None if it is unknown.

    `version` differs if the content does: the times at which files were modified, or the revision of a dataset.
    """

    weight: int | None
    documents: Callable[[], Iterator[Document]]
    version: str


@dataclass(frozen=True)
class Source:
    """A description of the text to read. Each name is "stdlib", a file, a glob, a directory, or a dataset of the hub.

    `config` and `split` select within a dataset, which is streamed. `text_key` is the JSON key or the column. With
    `skips_errors`, documents that are wrong are left out. `part` (number, count) is a run of the files: 1 to `count`
    have all of them, in their order.
    """

    names: list[str]
    text_key: str = "text"
    config: str | None = None
    split: str = "train"
    max_documents: int | None = None
    skips_errors: bool = False
    part: tuple[int, int] = field(default=(1, 1), repr=False)

    @cached_property
    def shards(self) -> list[Shard]:
        shards = [shard for name in self.names for shard in self._shards_of(name)]
        number, count = self.part
        if 1 < count > len(shards):
            raise DataError(
                f"--part {number}/{count} is one of {count} parts, and --source has {len(shards)} files; give at most "
                f"as many parts, or divide the files"
            )
        return shards[(number - 1) * len(shards) // count : number * len(shards) // count]

    def weight(self) -> int | None:
        """Return the total weight of the shards, for a progress bar; None if the amount to be read is unknown."""
        weights = [shard.weight for shard in self.shards]
        return None if self.max_documents or None in weights else sum(filter(None, weights))

    def documents(self) -> Iterator[Document]:
        return islice(chain.from_iterable(shard.documents() for shard in self.shards), self.max_documents)

    def sample(self, sample_bytes: int) -> Iterator[str]:
        """Yield about `sample_bytes` of text, from the beginning of every shard in proportion to its weight.

        A shard of unknown weight may yield as many as `sample_bytes`.
        """
        shards = [shard for shard in self.shards if shard.weight != 0]  # without those that are empty
        total = sum(shard.weight for shard in shards if shard.weight is not None)
        allowed = taken = 0.0  # bytes of all shards so far; what one shard takes too many, the next ones take less
        for shard in shards:
            allowed += sample_bytes if shard.weight is None else sample_bytes * shard.weight / total
            if taken >= allowed:
                continue
            for document in shard.documents():
                try:
                    text = text_of(document, self.text_key)
                except DataError:
                    if not self.skips_errors:
                        raise
                    continue
                taken += len(text.encode("utf-8"))
                yield text
                if taken >= allowed:
                    break

    def _shards_of(self, name: str) -> list[Shard]:
        if name == "stdlib":
            return [self._file_shard(path) for path in _stdlib_files()]
        if paths := _files_of(name):
            return [self._file_shard(path) for path in paths]
        looks_like_file = glob.has_magic(name) or name.startswith(("/", ".")) or name.endswith(SUFFIXES + COMPRESSED)
        if looks_like_file and not os.path.isdir(name):
            raise DataError(f"--source {name}: no such file; give files, globs, folders, a hub name or stdlib")
        # a hub name, or a folder in a format that only `datasets` reads
        return [_dataset_shard(name, self.config, self.split, self.text_key)]

    def _file_shard(self, path: str) -> Shard:
        if path.endswith(COMPRESSED) and not path.endswith(JSON_SUFFIXES):
            raise DataError(f"--source {path} is compressed; decompress it, or compress JSON lines as .jsonl.gz")
        read = _read_json_lines if path.endswith(JSON_SUFFIXES) else _read_text_file
        if path.endswith(PARQUET_SUFFIXES):
            read = partial(_read_parquet, text_key=self.text_key)
        status = os.stat(path)
        return Shard(status.st_size, partial(read, path), f"{status.st_mtime_ns}")


def text_of(document: Document, text_key: str) -> str:
    """Return the decoded text; "" if the row or line has null. Raises DataError, which names the file and the line."""
    content = document.content
    if isinstance(content, DataError):
        raise content
    try:
        if isinstance(content, bytes):
            content = content.decode("utf-8-sig")  # editors of Windows write a mark of the byte order first
            if document.origin.endswith(JSON_SUFFIXES):
                content = _json_text(document.place, content, text_key)
        size_bytes = len((content or "").encode("utf-8"))  # raises for half a surrogate pair, which JSON can contain
    except UnicodeError as error:
        raise DataError(f"{document.place} is not UTF-8 ({error}); convert it or leave it out") from None
    _check_size(document.place, size_bytes)
    return content or ""


def _json_text(place: str, line: str, text_key: str) -> str | None:
    try:
        row = json.loads(line.rstrip())
    except json.JSONDecodeError as error:
        raise DataError(
            f"{place} is not JSON ({error.msg}, column {error.colno}); every line must be one JSON object"
        ) from None
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, or thousands of brackets
        raise DataError(f"{place} cannot be read as JSON ({error}); leave it out") from None
    if not isinstance(row, dict):
        raise DataError(f"{place} is a JSON {type(row).__name__}; every line must be one JSON object")
    return _text_in(row, place, text_key)


def _text_in(row: dict[str, Any], place: str, text_key: str) -> str | None:
    if text_key not in row or not isinstance(row[text_key], str | None):  # null is an empty document, not an error
        keys = shorten(", ".join(row), MAX_KEYS_SHOWN, placeholder=" ...")
        raise DataError(f"{place} has no text under --text_key {text_key}; its keys are {keys}")
    return row[text_key]


def _check_size(place: str, size_bytes: int) -> None:
    if size_bytes > MAX_DOCUMENT_BYTES:
        raise DataError(
            f"{place} is one document of {size_bytes} bytes, more than {MAX_DOCUMENT_BYTES}; "
            "split it, or write it as JSON lines of one document each"
        )


def _stdlib_files() -> list[str]:
    """Return the Python sources of the interpreter's standard library without its tests, sorted by path."""
    paths = []
    for folder, folders, names in os.walk(sysconfig.get_path("stdlib")):
        folders[:] = [name for name in folders if name not in NOT_IN_STDLIB]
        paths += [os.path.join(folder, name) for name in names if name.endswith(".py")]
    return sorted(paths)


def _files_of(name: str) -> list[str]:
    """Return the files of a path, glob or directory, sorted, and log what is left out.

    Of a directory these are those with a suffix in SUFFIXES. Raises DataError if it has others of compressed text.
    """
    if os.path.isdir(name):
        is_dataset = any(os.path.exists(os.path.join(name, file)) for file in DATASETS_FILES)
        paths = [] if is_dataset else _paths_below(Path(name))  # `_open_dataset` opens a dataset
        files = [path for path in paths if path.is_file() and path.name.endswith(SUFFIXES)]
        opened = {
            path for path in paths if path.is_dir() and not path.is_symlink() and os.access(path, os.R_OK | os.X_OK)
        }
        paths = paths if files else []  # `datasets` opens a folder without such files
    else:
        paths = [Path(path) for path in glob.glob(glob.escape(name) if os.path.exists(name) else name, recursive=True)]
        files = [path for path in paths if path.is_file()]
        opened = {path for path in paths if "**" in name}
    left_out = sorted(set(paths).difference(files, opened))
    for path in left_out if os.path.isdir(name) else ():
        if path.name.endswith(COMPRESSED) and path.name.removesuffix(path.suffix).endswith(SUFFIXES):
            raise DataError(f"--source {path} is compressed; decompress it, or compress JSON lines as .jsonl.gz")
    folders = [path for path in left_out if path.is_dir()]
    kinds = {"folders": folders, "files": [path for path in left_out if path not in folders]}
    if texts := [f"{len(found)} {kind}, such as {found[0]}" for kind, found in kinds.items() if found]:
        logger.warning("--source %s leaves out %s; name them too if they are meant", name, " and ".join(texts))
    return sorted(map(str, files))


def _paths_below(folder: Path) -> list[Path]:
    """Return what is in a folder and its subfolders, without hidden files and folders and those of prepared corpora."""
    paths = [path for path in folder.rglob("*") if f"{os.sep}." not in f"{os.sep}{path.relative_to(folder)}"]
    # A preparation that has not ended, or that has made a tokenizer only, has no index.
    ends = ".idx", PREPARED[0]
    prefixes = {str(path).removesuffix(end) for path in paths for end in ends if path.name.endswith(end)}
    prepared = {f"{prefix}{ending}" for prefix in prefixes for ending in PREPARED}
    return [path for path in paths if prepared.isdisjoint(map(str, (path, *path.parents)))]


def _read_text_file(path: str) -> Iterator[Document]:
    content: bytes | DataError
    try:
        _check_size(path, size_bytes := os.path.getsize(path))
        content = Path(path).read_bytes()
    except OSError as error:
        raise DataError(f"cannot read {path}: {error}; correct it or leave it out") from None
    except DataError as error:
        content = error
    yield Document(path, 0, content, size_bytes)


def _read_json_lines(path: str) -> Iterator[Document]:
    position = 0
    try:
        with open(path, "rb") as file, gzip.open(file) if path.endswith(".gz") else file as lines:
            for number, line in enumerate(iter(partial(lines.readline, MAX_LINE_BYTES + 1), b""), 1):
                content: bytes | DataError | None = None if line.isspace() else line
                if len(line) > MAX_LINE_BYTES:
                    place = f"{path}:{number}"
                    content = DataError(f"{place} is a line of more than {MAX_LINE_BYTES:,} bytes; split its document")
                    _skip_line(lines, place)
                weight, position = file.tell() - position, file.tell()
                yield Document(path, number, content, weight)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"cannot read {path}: {error}; correct it or leave it out") from None


def _skip_line(lines: gzip.GzipFile | BufferedReader, place: str) -> None:
    """Read the rest of a line. Raises DataError if even this is too long, as a line of a small .gz may be."""
    for _ in range(MAX_SKIPPED_LINES):
        if not (part := lines.readline(MAX_LINE_BYTES)) or part.endswith(b"\n"):
            return
    most = MAX_LINE_BYTES * MAX_SKIPPED_LINES
    raise DataError(f"{place} is a line of more than {most:,} bytes, too long to be skipped; leave out its file")


def _read_parquet(path: str, text_key: str) -> Iterator[Document]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise DataError(f"reading {path} needs the package pyarrow: pip install pyarrow") from None
    try:
        with parquet.ParquetFile(path) as file:
            kinds = {field.name: field.type for field in file.schema_arrow}
            is_dictionary = text_key in kinds and pyarrow.types.is_dictionary(kinds[text_key])
            if is_dictionary:
                kinds[text_key] = kinds[text_key].value_type
            _check_column(path, text_key, {name: str(kind) for name, kind in kinds.items()})
            _check_row_groups(path, file.metadata, text_key)
            weight = os.path.getsize(path) / max(file.metadata.num_rows, 1)
            batches = file.iter_batches(batch_size=PARQUET_ROWS, columns=[text_key])
            # As bytes, which `text_of` decodes: a column of text may hold what is not UTF-8.
            columns = (batch.column(0) for batch in batches)
            columns = (column.dictionary_decode() for column in columns) if is_dictionary else columns
            texts = chain.from_iterable(column.cast(BYTES_OF[str(column.type)]) for column in columns)
            for number, text in enumerate(texts, 1):
                yield Document(path, number, text.as_py(), weight)
    except (OSError, UnicodeError, pyarrow.ArrowException) as error:
        raise DataError(f"cannot read {path} as Parquet: {error}; correct it or leave it out") from None


def _check_row_groups(path: str, metadata: Any, text_key: str) -> None:
    """Raise DataError if documents of a row group are too large on average: one of them is decoded as a whole."""
    for group in map(metadata.row_group, range(metadata.num_row_groups)):
        for column in map(group.column, range(group.num_columns)):
            if (
                column.path_in_schema == text_key
                and column.total_uncompressed_size > max(group.num_rows, 1) * MAX_LINE_BYTES
            ):
                raise DataError(
                    f"{path} has {column.total_uncompressed_size:,} bytes of {text_key} in {group.num_rows} rows, more "
                    f"than {MAX_LINE_BYTES:,} in each; split its documents"
                )


def _dataset_shard(name: str, config: str | None, split: str, text_key: str) -> Shard:
    try:
        rows, version = _open_dataset(name, config, split)
    except ImportError:
        raise DataError(f"--source {name} is not a file, and a hub name needs datasets: pip install datasets") from None
    except Exception as error:  # hub, network and builders raise classes of their own
        raise DataError(
            f"--source {name} is not a file, and datasets cannot open it: {_first_line(error)}; correct the name or "
            "--split, or check the network"
        ) from None
    num_rows = len(rows) if hasattr(rows, "__len__") else None
    return Shard(num_rows, partial(_read_rows, name, rows, text_key), version)


def _open_dataset(name: str, config: str | None, split: str) -> tuple[Any, str]:
    """Open one split: memory-mapped if `save_to_disk` wrote it, otherwise streamed from the hub or a local folder.

    Returns (the rows, their version).
    """
    import datasets

    if any(os.path.exists(os.path.join(name, file)) for file in DATASETS_FILES):
        rows = datasets.load_from_disk(name)
        if isinstance(rows, datasets.DatasetDict):
            if split not in rows:
                raise ValueError(f"--split {split} is not among its splits {', '.join(rows)}")
            rows = rows[split]
        return rows, repr([os.stat(file["filename"]).st_mtime_ns for file in rows.cache_files])
    builder = datasets.load_dataset_builder(name, config)
    files = (builder.config.data_files or {}).values()  # with revisions of the hub, or times of local files
    version = repr((builder.hash, [part.origin_metadata for part in files]))
    return builder.as_streaming_dataset(split=split), version


def _read_rows(name: str, rows: Any, text_key: str) -> Iterator[Document]:
    if rows.features:
        _check_column(name, text_key, {key: str(getattr(kind, "dtype", kind)) for key, kind in rows.features.items()})
        rows = rows.select_columns([text_key])
    try:
        if hasattr(rows, "data"):  # mapped to memory: offsets of a damaged file would lead out of it
            rows.data.validate(full=True)
        for number, row in enumerate(rows, 1):
            try:
                text: str | DataError | None = _text_in(row, f"{name}:{number}", text_key)
            except DataError as error:
                text = error
            yield Document(name, number, text, 1)
    except Exception as error:  # as in _dataset_shard
        raise DataError(
            f"cannot read the dataset {name}: {_first_line(error)}; check the data and the network"
        ) from None


def _check_column(origin: str, text_key: str, columns: dict[str, str]) -> None:
    if columns.get(text_key) not in BYTES_OF:
        known = ", ".join(f"{name} ({kind})" for name, kind in columns.items())
        raise DataError(f"{origin} has no column of text called {text_key}; set --text_key to one of {known}")


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
