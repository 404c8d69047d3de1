"""A tiny corpus and tiny runs of the whole program on it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch.distributed as dist

from gpt.run_folder.files import read_steps
from gpt.settings.parser import parse_settings
from parallel.world import start_world
from pretrain_gpt import pretrain
from tests.programs import start_forked
from tests.ranks import MASTER_ADDRESS, run_ranks, torchrun_environment

VOCAB_SIZE = 300  # of the corpus that `lab.faults.runs.prepare_corpus` makes
TINY_MODEL = {"num_layers": 2, "hidden_size": 32, "num_heads": 4, "seq_length": 16, "vocab_size": VOCAB_SIZE}
EVALUATED = {"train__eval_samples": 8}
TWO_RANKS = "-m", "parallel.launch", "--standalone", "--nproc-per-node=2"


def options(prefix: Path, run_dir: Path, **settings: object) -> list[str]:
    """Return the command line of a tiny run without evaluation and texts; names of `settings` have `__` for the dot."""
    chosen = {f"model.{name}": value for name, value in (TINY_MODEL | {"dropout": 0.0}).items()} | {
        "data.path": prefix,
        "data.split": "[0.8, 0.1, 0.1]",
        "run.dir": run_dir,
        "zero.bucket_numel": 5000,
        "train.precision": "fp32",
        "train.steps": 6,
        "train.micro_batch_size": 2,
        "train.global_batch_size": 8,
        "train.log_every": 1,
        "train.eval_samples": 0,
        "train.sample_tokens": 0,
        "checkpoint.last": "false",
    }
    chosen |= {name.replace("__", "."): value for name, value in settings.items()}
    return [f"--{name}={value}" for name, value in chosen.items()]


def run_on_rank(arguments: list[str]) -> list[dict]:
    """Run the whole program on one of the test's ranks, and return the logged steps."""
    settings = parse_settings(arguments)
    pretrain(settings, start_world())
    return read_steps(Path(settings.run.dir))


def run(num_ranks: int, prefix: Path, run_dir: Path, **settings: object) -> list[dict]:
    """Run the whole program on all ranks, and return the logged steps."""
    return run_ranks(num_ranks, run_on_rank, options(prefix, run_dir, **settings), init_process_group=False)[0]


@contextmanager
def started_ranks(
    folder: Path, function: Callable[..., None], *args: object, **environment: str
) -> Iterator[list[BaseProcess]]:
    """Call a function in two processes of their own, which write what they print to `folder`, with torchrun's ranks."""
    store = dist.TCPStore(MASTER_ADDRESS, 0, is_master=True, wait_for_workers=False)
    ranks = [
        start_forked(said_by(folder, rank), function, *args, **torchrun_environment(rank, 2, store.port) | environment)
        for rank in range(2)
    ]
    try:
        yield ranks
    finally:
        for process in ranks:
            process.kill()
            process.join()


def said_by(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}.txt"
