"""Files that a run writes: nothing through a link, and no secret of its environment.

The process notes each path that Python writes, removes or renames. Then the run is copied as a tree of links, with a
link also in the place of all that it has written for a moment, and goes on in the copy, which is reached by a link.
"""

import gzip
import json
import os
import sys
import zipfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from gpt.checkpoint.export import export_checkpoint
from lab.faults.runs import prepare_corpus
from tests.end_to_end.runs import EVALUATED, options
from tests.programs import run_program, start_forked, wait_for_end

SECRETS = {
    "WANDB_API_KEY": "0123456789" * 4,
    "HF_TOKEN": "hf_aSecretOfTheHub",
    "AWS_SECRET_ACCESS_KEY": "aSecretOfTheCloud",
    "DATABASE_URL": "https://user:aSecretOfTheProxy@127.0.0.1:9",
}
EVERYTHING = EVALUATED | {
    "checkpoint__every": 2,
    "checkpoint__keep": 1,
    "checkpoint__weights": True,
    "checkpoint__snapshot_every": 1,
    "run__tensorboard": True,
    "profile__steps": "[2, 3]",
    "train__sample_tokens": 4,
    "train__reproducible": "layout",
    "guard__audit_every": 2,
}
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
FOLLOW = {"open", "os.truncate", "os.chmod"}  # what changes the file that a link names
CHANGES: dict[str, Callable[[tuple[Any, ...]], tuple[Any, ...]]] = {
    "open": lambda values: values[:1] if values[2] & WRITES else (),
    "os.truncate": lambda values: values[:1],
    "os.chmod": lambda values: values[:1],
    "os.mkdir": lambda values: values[: not os.path.lexists(values[0])],
    "os.remove": lambda values: values[: values[1] == -1],  # else one of a folder that is removed
    "os.rmdir": lambda values: values[: values[1] == -1],
    "os.rename": lambda values: values[:2],
    "os.link": lambda values: values[1:2],
    "os.symlink": lambda values: values[1:2],
    "shutil.rmtree": lambda values: values[:1],
}


def run_noting_changes(notes: Path, *words: str) -> None:
    """Run a program, and append to `notes` each path that it changes, and the same with links followed."""
    file = os.open(notes, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def note(event: str, values: tuple[Any, ...]) -> None:
        for path in CHANGES[event](values) if event in CHANGES else ():
            if isinstance(path, str | bytes | os.PathLike):
                named = Path(os.fsdecode(path)).absolute()
                changed = named.resolve() if event in FOLLOW else named.parent.resolve() / named.name
                os.write(file, f"{json.dumps([str(named), str(changed)])}\n".encode())

    sys.dont_write_bytecode = True  # of libraries that nobody has imported on this machine
    sys.addaudithook(note)
    run_program(*words)


def changed_by(folder: Path, *words: str) -> dict[Path, Path]:
    """Run a program with secrets in its environment; return {path: the same with links followed} of what it changed."""
    folder.mkdir()
    variables = SECRETS | {"RANK": "0", "TORCHELASTIC_RESTART_COUNT": "0"}
    process = start_forked(folder / "said", run_noting_changes, folder / "notes", *words, **variables)
    assert wait_for_end(process) == 0, (folder / "said").read_text()
    notes = (json.loads(line) for line in (folder / "notes").read_text().splitlines())
    return {Path(named): Path(changed) for named, changed in notes if not named.startswith(("/dev/null", "/proc/"))}


def state_of(*folders: Path) -> dict[Path, tuple[int, int, bytes | str]]:
    """Return the mode, the time and the content of all that is in folders, links not followed."""
    found = {}
    for path in (path for folder in folders for path in (folder, *folder.rglob("*"))):
        status = path.lstat()
        content = os.readlink(path) if path.is_symlink() else path.read_bytes() if path.is_file() else ""
        found[path] = status.st_mode, status.st_mtime_ns, content
    return found


def unpacked(path: Path) -> bytes:
    """Return the bytes of a file, and of what it holds if it is an archive."""
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            return b"".join(map(archive.read, archive.namelist()))
    return gzip.open(path).read() if path.suffix == ".gz" else path.read_bytes()


def files_with_secrets(folder: Path) -> list[Path]:
    secrets = [secret.encode() for secret in SECRETS.values()]
    files = [path for path in folder.rglob("*") if path.is_file() and not path.is_symlink()]
    return [path for path in files if any(secret in unpacked(path) for secret in secrets)]


def folders_in(folder: Path, paths: Iterable[Path]) -> set[str]:
    return {path.relative_to(folder).parts[0] for path in paths}


def link_in_place_of(written: Iterable[Path], run: Path, copy: Path, archive: Path) -> None:
    """Make `copy` of links to all that a run has written, whose checkpoints are moved to `archive`.

    What the run no longer has is a link to something in `archive`.
    """
    for number, path in enumerate(written):
        link, target = copy / path.relative_to(run), path
        if path.name.startswith("step-"):
            target = archive / f"{number}"
            (path.rename if path.exists() else Path.mkdir)(target)
        elif not path.exists():
            target = archive / f"{number}"
            target.write_text("of nobody")
        if not path.is_dir() and not any(parent.parent != copy and parent.is_symlink() for parent in link.parents):
            link.parent.mkdir(parents=True, exist_ok=True)
            link.unlink(missing_ok=True)
            link.symlink_to(target)


def test_a_run_that_goes_on_in_a_tree_of_links_changes_nothing_outside_of_its_folder(tmp_path: Path):
    """It also writes no secret of its environment to any file."""
    corpus, run, copy, archive = prepare_corpus(tmp_path), tmp_path / "run", tmp_path / "copy", tmp_path / "archive"
    memory = {"checkpoint__snapshot_dir": tmp_path / "memory"}
    changed = changed_by(tmp_path / "first", "pretrain_gpt.py", *options(corpus, run, **EVERYTHING, **memory))
    assert folders_in(tmp_path, changed.values()) == {"run", "memory"}

    for folder in (archive, copy, tmp_path / "disk"):
        folder.mkdir()
    (tmp_path / "link").symlink_to(copy)
    (copy / "checkpoints").symlink_to(tmp_path / "disk")
    link_in_place_of((path for path in changed if path.is_relative_to(run)), run, copy, archive)
    before = state_of(run, archive)
    arguments = options(corpus, tmp_path / "link", **EVERYTHING | {"train__steps": 8}, **memory)
    changed = changed_by(tmp_path / "second", "pretrain_gpt.py", *arguments)
    assert folders_in(tmp_path, changed.values()) == {"copy", "disk", "memory"}
    assert "after step 6" in (tmp_path / "second/said").read_text()

    export_checkpoint(tmp_path / "link/checkpoints", tmp_path / "exported", torch.float32)
    assert state_of(run, archive) == before
    names = {path.name for path in copy.iterdir()}
    assert names >= {"config.yaml", "metrics.jsonl", "checkpoints", "weights", "tensorboard", "profile", "loss.png"}
    assert files_with_secrets(tmp_path) == []
