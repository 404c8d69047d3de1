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

# In messages of the CPU's allocator, NCCL and cuBLAS.
OTHER_SIGNS = ("can't allocate memory", "out of memory", "ALLOC_FAILED")


@contextmanager
def out_of_memory_recorded(
    run_dir: Path, train: TrainSettings, zero: ZeroConfig, world: World, step: Callable[[], int]
) -> Iterator[None]:
    """Turn a failed allocation in this block into a record and a ConfigError. `step()` is the number of steps done."""
    try:
        yield
    except RuntimeError as error:
        if not isinstance(error, torch.OutOfMemoryError) and not any(sign in str(error) for sign in OTHER_SIGNS):
            raise
        peak = peak_memory(world.device)
        record = {"step": step(), "out_of_memory": True, "rank": world.rank}
        append_record(run_dir, record | peak)
        raise ConfigError(
            f"rank {world.rank} ran out of memory after step {step()}, {peak['peak_allocated_bytes'] / 1e9:.2f} GB at "
            f"peak; lower train.micro_batch_size={train.micro_batch_size}, raise "
            f"zero.stage={zero.stage} or set activations.store=keep, partition or partition_host"
        ) from error
