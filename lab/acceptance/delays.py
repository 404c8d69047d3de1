"""Work that is queued before every collective and every copy, so that a missing wait shows as a wrong result.

    before a collective    on the stream that launches it, for some in a row on about half of the ranks, then on others:
                           the other ranks get late results, and their computation runs ahead of them
    before a copy          on the side stream (the copy is late) and on the computing stream (the copy is early) in turn

On a CPU, which has no streams, these ranks sleep instead.
"""

import random
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch

from parallel.mesh import Axis
from parallel.world import World
from zero.core.memory.streams import SideStream

COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce", "broadcast")
NUM_PRODUCTS, PRODUCT_SIZE = 10, 2048  # on an H100 about 4 ms in fp32, longer than the collectives of a small model
# A rank then falls behind by more than a forward pass. Delayed one by one, updated parameters would still arrive before
# they are read: they are sent in the order in which the forward reads them.
NUM_IN_A_ROW = 20
SLEEP_SECONDS = 0.003


class Delays:
    """The delays of one rank; `num_collectives` and `num_copies` count those that were queued here."""

    def __init__(self, world: World):
        self._device = world.device
        self._coin = random.Random(world.rank)  # another order on every rank, and the same in every run
        self._num_launches, self._is_slow = 0, False
        self.num_collectives = self.num_copies = 0
        if self._device.type == "cuda":
            # Allocated once: a matrix that is allocated on a side stream would change what the allocator does there.
            self._factor = torch.randn(PRODUCT_SIZE, PRODUCT_SIZE, device=self._device) / PRODUCT_SIZE
            self._product = torch.empty_like(self._factor)

    @contextmanager
    def inserted(self) -> Iterator[None]:
        """Delay the collectives and copies that are launched in this context."""
        with ExitStack() as patches:
            for name in COLLECTIVES:
                patches.enter_context(mock.patch.object(Axis, name, self._delayed(getattr(Axis, name))))
            patches.enter_context(mock.patch.object(SideStream, "context", self._delayed_context(SideStream.context)))
            yield

    def _delayed(self, collective: Callable[..., Any]) -> Callable[..., Any]:
        def launch(axis: Axis, *args: Any, **kwargs: Any) -> Any:
            if self._num_launches % NUM_IN_A_ROW == 0:
                self._is_slow = self._coin.random() < 0.5
            self._num_launches += 1
            if self._is_slow:
                self.num_collectives += 1
                self._delay()
            return collective(axis, *args, **kwargs)

        return launch

    def _delayed_context(self, context: Callable[..., Any]) -> Callable[..., Any]:
        @contextmanager
        def delayed(stream: SideStream) -> Iterator[None]:
            self.num_copies += 1
            if is_early := self.num_copies % 2 == 0:
                self._delay()
            with context(stream):
                if not is_early:
                    self._delay()
                yield

        return delayed

    def _delay(self) -> None:
        """Keep the current stream busy; on a CPU, keep the rank waiting."""
        if self._device.type != "cuda":
            time.sleep(SLEEP_SECONDS)
            return
        for _ in range(NUM_PRODUCTS):
            torch.mm(self._factor, self._factor, out=self._product)
