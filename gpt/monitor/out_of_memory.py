"""A record in metrics.jsonl if a rank runs out of memory, which a search for the largest model can read."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from gpt.monitor.metrics import peak_memory
from gpt.run_folder.files import append_record
from gpt.settings import TrainSettings
from parallel.errors import ConfigError
from parallel.world import World
from zero.config import ZeroConfig

# Parts of the messages of the CPU's allocator, NCCL and cuBLAS, whose errors have no class of their own.
OTHER_MESSAGES = ("can't allocate memory", "out of memory", "ALLOC_FAILED")


@contextmanager
def out_of_memory_recorded(
    run_dir: Path, train: TrainSettings, zero: ZeroConfig, world: World, num_steps_done: Callable[[], int]
) -> Iterator[None]:
    """Raise ConfigError if an allocation in this block fails, and append a record of it to metrics.jsonl.

    `num_steps_done` returns the number of steps that are done at that time.
    """
    try:
        yield
    except RuntimeError as error:
        if not isinstance(error, torch.OutOfMemoryError) and not any(part in str(error) for part in OTHER_MESSAGES):
            raise
        peak, step = peak_memory(world.device), num_steps_done()
        append_record(run_dir, {"step": step, "out_of_memory": True, "rank": world.rank} | peak)
        raise ConfigError(
            f"rank {world.rank} ran out of memory after step {step}, {peak['peak_allocated_bytes'] / 1e9:.2f} GB at "
            f"peak; lower train.micro_batch_size={train.micro_batch_size}, raise "
            f"zero.stage={zero.stage} or set activations.store=keep, partition or partition_host"
        ) from error
