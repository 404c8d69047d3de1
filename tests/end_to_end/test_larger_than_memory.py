"""A model whose states are three times the memory of a rank is built, trained, saved and consolidated."""

import ctypes
import resource
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from transformers import GPT2LMHeadModel

from gpt.checkpoint.export import export_checkpoint
from gpt.run_folder.files import CHECKPOINTS, WEIGHTS, read_steps
from gpt.settings.parser import parse_settings
from lab.faults.runs import prepare_corpus
from parallel.world import start_world
from pretrain_gpt import pretrain
from tests.end_to_end.runs import VOCAB_SIZE, options, run_on_rank
from tests.ranks import RankError, rank_pool, run_ranks

M_MMAP_THRESHOLD = -3  # from malloc.h
NUM_RANKS = 4
MODEL = {"num_layers": 40, "hidden_size": 256, "num_heads": 4, "seq_length": 16, "vocab_size": VOCAB_SIZE, "dropout": 0}
BLOCK_NUMEL = 12 * 256**2
NUM_PARAMETERS = MODEL["num_layers"] * BLOCK_NUMEL  # and a little more
ADAM_BYTES = 16  # a parameter, its gradient and two moments in fp32


@contextmanager
def memory_limited_to(num_bytes: int) -> Iterator[None]:
    """Limit the data of the process to so much more than it has now; further allocations fail."""
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 2**16)  # memory that tensors free is returned at once, as on a device
    threading.stack_size(2**18)  # stacks of threads are reserved and counted, but hardly used
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    now = int(status["VmData"].split()[0]) * 1024
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (now + num_bytes, hard))
    try:
        yield
    finally:
        threading.stack_size(0)
        resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))


def train_in_little_memory(arguments: list[str], num_bytes: int) -> list[float]:
    """Train under a memory limit, which begins when the ranks have connected, and return the losses."""
    settings, world = parse_settings(arguments), start_world()
    with memory_limited_to(num_bytes):
        pretrain(settings, world)
    return [record["loss"] for record in read_steps(Path(settings.run.dir))]


def train_under_limit(folder: Path, stage: int) -> list[list[float]]:
    """Train under a memory limit, after a tiny run that loads everything that the program itself needs.

    The processes are new: memory that earlier tests have left to them would not count.
    """
    rank_pool().stop()
    arguments = large_run(folder, stage)
    tiny = ["--model.num_layers=1", "--train.steps=1", "--checkpoint.every=1", f"--run.dir={folder / 'tiny'}"]
    run_ranks(NUM_RANKS, run_on_rank, [*arguments, *tiny], init_process_group=False)
    limit = NUM_PARAMETERS * ADAM_BYTES // 3
    return run_ranks(NUM_RANKS, train_in_little_memory, arguments, limit, init_process_group=False)


def large_run(folder: Path, stage: int) -> list[str]:
    return options(
        prepare_corpus(folder),
        folder / "run",
        **{f"model__{name}": value for name, value in MODEL.items()},
        zero__stage=stage,
        zero__bucket_numel=2**16,
        zero__prefetch_numel=0,
        activations__store="keep",
        train__steps=3,
        train__micro_batch_size=1,
        train__global_batch_size=NUM_RANKS,
        checkpoint__every=3,
        checkpoint__asynchronous=False,
        checkpoint__weights=True,
    )


@pytest.mark.full
def test_three_times_the_memory_of_a_rank_is_trained_saved_and_consolidated(tmp_path):
    losses = train_under_limit(tmp_path, stage=3)[0]
    assert len(losses) == 3
    assert losses[-1] < losses[0]
    weight_bytes = NUM_PARAMETERS * 4
    folder = tmp_path / "run"
    run_ranks(1, consolidate_in_little_memory, folder / CHECKPOINTS, tmp_path / "fp32", weight_bytes // 3)
    live = GPT2LMHeadModel.from_pretrained(folder / WEIGHTS / "step-00000003")
    offline = GPT2LMHeadModel.from_pretrained(tmp_path / "fp32")
    assert all(a.equal(b) for a, b in zip(live.parameters(), offline.parameters(), strict=True))


def consolidate_in_little_memory(checkpoints: Path, output: Path, num_bytes: int) -> None:
    with memory_limited_to(num_bytes):
        export_checkpoint(checkpoints, output, torch.float32, file_bytes=num_bytes // 4)


@pytest.mark.full
def test_without_partitioned_parameters_it_does_not_fit(tmp_path):
    with pytest.raises(RankError, match="allocate memory"):
        train_under_limit(tmp_path, stage=2)
