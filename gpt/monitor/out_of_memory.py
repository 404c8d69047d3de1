"""A record and a table in the run's folder if a rank runs out of memory: which part of the run holds how much.

metrics.jsonl                  a record with `out_of_memory`, which a search for the largest model can read
out_of_memory/rank-0.txt       the bytes of each kind of model state of each block, of buffers, and of all else
out_of_memory/rank-0.pickle    torch's snapshot of a GPU's memory, for https://pytorch.org/memory_viz
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path

import torch

from gpt.builder.train_state import TrainState
from gpt.monitor.metrics import peak_memory
from gpt.run_folder.files import OUT_OF_MEMORY, MetricsFile, written_if_possible
from gpt.settings.settings import Settings
from parallel.memory_kinds import Placement
from parallel.torch_internals import memory_snapshot
from parallel.validation.errors import MemoryLimitError
from parallel.world import World
from zero.checkpoint.resident import buffer_bytes, bytes_by_group
from zero.core.units.unit import find_units, innermost_unit, named_units
from zero.data_parallel import ZeroDataParallel
from zero.formulas.memory import ModelStates

# Parts of the messages of the CPU's allocator, NCCL and cuBLAS, whose errors have no class of their own.
OTHER_MESSAGES = ("can't allocate memory", "out of memory", "ALLOC_FAILED")
KINDS = (*(field.name for field in fields(ModelStates)), "unsharded")
COLUMNS = (*KINDS, "total")


@contextmanager
def out_of_memory_recorded(
    settings: Settings, world: World, find_state: Callable[[], TrainState | None], num_steps_done: Callable[[], int]
) -> Iterator[None]:
    """Raise MemoryLimitError if an allocation in this block fails, or a limit of memory is exceeded, and record it.

    `find_state` returns what has been built at that time, and `num_steps_done` the number of steps that are done.
    """
    try:
        yield
    except (RuntimeError, MemoryError, MemoryLimitError) as error:
        if not _is_out_of_memory(error):
            raise
        run_dir, train = Path(settings.run.dir), settings.train
        state, step = find_state(), num_steps_done()
        peak = peak_memory(world.device)
        MetricsFile(run_dir).append({"step": step, "out_of_memory": True, "rank": world.rank} | peak)
        table = _write_report(run_dir / OUT_OF_MEMORY, world, state, error, peak)
        if isinstance(error, MemoryLimitError):
            raise MemoryLimitError(f"{error}; {table} says what holds the memory") from error
        raise MemoryLimitError(
            f"rank {world.rank} ran out of memory after step {step}, {peak['peak_allocated_bytes'] / 1e9:.2f} GB at "
            f"peak ({table} says what holds it); lower train.micro_batch_size={train.micro_batch_size}, raise "
            f"zero.stage={settings.zero.stage} or set activations.store=keep, partition or partition_host"
        ) from error


def _is_out_of_memory(error: Exception) -> bool:
    is_of_class = isinstance(error, (torch.OutOfMemoryError, MemoryError, MemoryLimitError))
    return is_of_class or any(part in str(error) for part in OTHER_MESSAGES)


def _write_report(folder: Path, world: World, state: TrainState | None, error: Exception, peak: dict[str, int]) -> Path:
    """Write the table, and the snapshot of a GPU, and return the path of the table."""
    table = folder / f"rank-{world.rank}.txt"
    lines = [str(error).strip().partition("\n")[0], "", *memory_lines(state, peak)]
    with written_if_possible(table):
        folder.mkdir(parents=True, exist_ok=True)
        table.write_text("\n".join(lines) + "\n")
        if world.device.type == "cuda":
            memory_snapshot(table.with_suffix(".pickle"))
    return table


def memory_lines(state: TrainState | None, peak: dict[str, int]) -> list[str]:
    """Return tables of the bytes, in MB, that a rank holds: of each block, and of what belongs to no block."""
    lines, num_held = [], 0
    if state is not None:
        block_of = _block_of(state.model)
        for placement, title in ((Placement.ACCELERATOR, "on the device"), (Placement.HOST, "in host memory")):
            rows = bytes_by_group(state.model, state.optimizer, block_of, placement)
            total = sum(rows.values(), Counter[str]())
            if total or placement is Placement.ACCELERATOR:
                lines += [*_table(f"model states {title}", rows | {"all": total}), ""]
            if placement is Placement.ACCELERATOR:
                num_held = total.total()
        buffers = {f"buffer: {name}": size for name, size in buffer_bytes(state.model, state.optimizer).items()}
        buffers["buffers of the module"] = sum(buffer.nbytes for buffer in state.model.module.buffers())
        num_held += sum(buffers.values())
        lines += [_line(name, num_bytes) for name, num_bytes in buffers.items()]
    # Activations belong to autograd, which does not say what it holds: they are what is left.
    num_left = max(0, peak["peak_allocated_bytes"] - num_held)
    lines += [_line("activations, temporary tensors and all else, at the peak", num_left)]
    lines += [_line(name.replace("_", " ").removesuffix(" bytes"), peak[name]) for name in peak if "bytes" in name]
    return lines


def _block_of(model: ZeroDataParallel) -> Callable[[str], str]:
    """Return a function from the name of a parameter to that of its block; "" for the parameters outside of blocks."""
    patterns = model.config.units
    names = find_units(model.module) if patterns is None else named_units(model.module, patterns)
    return lambda name: innermost_unit([name], names)


def _table(title: str, rows: dict[str, Counter[str]]) -> list[str]:
    width = max(map(len, (title, *rows)))
    lines = [f"{title:{width}}" + "".join(f"{column:>14}" for column in COLUMNS) + "  MB"]
    for name, sizes in rows.items():
        cells = (sizes[column] for column in KINDS)
        lines.append(f"{name or '-':{width}}" + "".join(f"{cell / 1e6:14,.3f}" for cell in (*cells, sizes.total())))
    return lines


def _line(name: str, num_bytes: float) -> str:
    return f"{name:60}{num_bytes / 1e6:14,.3f} MB"
