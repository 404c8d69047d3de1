"""Uneven data: a rank that runs out of batches first takes part in the steps of the others, with weight 0."""

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import TypeVar

import torch

from parallel.mesh import Axis
from parallel.torch_ranks import AxisLike, as_axis
from zero.core.memory.streams import SideStream

Batch = TypeVar("Batch")


def join(batches: Iterable[Batch], data: AxisLike) -> Iterator[tuple[Batch, float]]:
    """Iterate over (batch, weight), on every rank as often as on the rank that has the most batches.

    The weight is 1.0. A rank that has run out gets its last batch again, with weight 0.0, so that it takes part in the
    gathers and reductions of the others. Multiply the loss by the weight, and do not change a batch in place. Gradients
    are still means over all ranks, as in DistributedDataParallel's `join(divide_by_initial_world_size=True)`.

    In each turn the ranks exchange one byte: whether a further batch follows. So batches are read one turn ahead. On a
    GPU the exchange runs beside the turn, and the host waits only until the device has finished the turn before; over
    gloo each turn begins on all ranks together. All ranks must leave the loop in the same turn.

    Raises ValueError on every rank if one has no batch at all.
    """
    data = as_axis(data)
    remaining, side_stream = iter(batches), SideStream(data.communication_device(torch.empty(0)))
    following = list(islice(remaining, 1))
    if empty := [rank for rank, has in enumerate(_Exchange(bool(following), data, side_stream).wait()) if not has]:
        raise ValueError(f"{data.name} rank {empty[0]} of {data.size} has no batch; give each rank at least one")
    batch, weight, is_over = following[0], 1.0, False
    while not is_over:
        # Not again after the end: an iterator over worker processes may have stopped them.
        following = list(islice(remaining, 1)) if following else []
        exchange = _Exchange(bool(following), data, side_stream)
        yield batch, weight
        batch, weight = (following[0], 1.0) if following else (batch, 0.0)
        is_over = not any(exchange.wait())


class _Exchange:
    """The flags of all ranks, on their way to the host."""

    def __init__(self, flag: bool, data: Axis, side_stream: SideStream):
        with side_stream.context():
            own = torch.tensor(flag, dtype=torch.uint8)
            own = own.to(data.communication_device(own))
            with data.log.during("uneven data"):
                self._gathered = data.gather_by_rank(own)  # kept, as long as the copy reads it
            self._flags = self._gathered.to("cpu", non_blocking=True)  # into pinned memory
            self._copied = side_stream.host_work()

    def wait(self) -> list[int]:
        """Return the flags by rank. Blocks the host until they have arrived."""
        self._copied.wait()
        return self._flags.tolist()
