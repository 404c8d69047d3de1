"""The update of any torch optimizer that needs no more than the elements of a shard."""

from collections.abc import Sequence, Set
from contextlib import suppress

import torch
from torch import Tensor, nn

from parallel.memory_kinds import TensorKind
from zero.core.partition.layout import cut
from zero.core.step.parameter_groups import replace_settings, settings_of
from zero.core.step.pieces import Piece
from zero.core.step.update import Shards, Update


class ElementWise(Update):
    """Steps a torch optimizer for the pieces of one or a few buckets at a time.

    A round consists of steps for all buckets. Counters that the optimizer keeps for each parameter group, such as
    the step counter of apex's Adam, advance once in a round, because each step starts from the same counters. They are
    the same on all ranks, also on one that owns nothing of a group.
    """

    def begin(self) -> None:
        """Begin a round, and read the settings of the groups, such as the learning rate."""
        self._before = {number: settings_of(group) for number, group in self.groups.items()}
        self._after, self._idle = dict(self._before), set(self.groups)

    def update(self, shards: Shards, unused: Set[Piece]) -> None:
        """Step the optimizer for its pieces in some buckets."""
        own = [(self._by_bucket[bucket], grad) for bucket, grad in shards if bucket in self._by_bucket]
        if own:
            used = [([piece for piece in pieces if piece not in unused], grad) for pieces, grad in own]
            with shards[0][0].home.allocating(TensorKind.MOMENTS):  # in the optimizer's first step
                self.step(used if unused else own)

    def step(self, shards: Sequence[tuple[Sequence[Piece], Tensor]]) -> None:
        """Step the optimizer for the pieces of some buckets, each with the flat gradient of the bucket's shard."""
        stepped = [piece for pieces, _ in shards for piece in pieces]
        for number, group in self.groups.items():
            replace_settings(group, self._before[number], [piece.param for piece in stepped if piece.group == number])
        for pieces, grad in shards:
            for piece in pieces:
                piece.param.grad = grad[piece.elements.start : piece.elements.stop]
        if self.skips_by_itself and isinstance(self.optimizer, torch.optim.SGD):
            self._make_momentum(stepped)
        self.optimizer.step()
        self._keep_counters({piece.group for piece in stepped})
        for piece in stepped:
            piece.param.grad = None

    def _keep_counters(self, stepped: set[int]) -> None:
        for number in stepped:
            self._after[number] = settings_of(self.groups[number])
        self._idle -= stepped

    def _count_idle(self) -> None:
        """Advance the counters of the groups of which this rank has stepped nothing, as other ranks have."""
        stand_in = nn.Parameter(torch.empty(0))  # without a gradient, as a parameter that was not used
        for number, group in self.groups.items():
            replace_settings(group, self._before[number], [stand_in] if number in self._idle else [])
        with suppress(AttributeError, TypeError):  # of an optimizer that takes every parameter to have a gradient
            self.optimizer.step()
            self._keep_counters(set(self._idle))

    def _make_momentum(self, pieces: Sequence[Piece]) -> None:
        """Begin with a momentum of zeros: fused SGD does not initialize it in a first step that is skipped."""
        for piece in pieces:
            state = self.optimizer.state[piece.param]
            if self._before[piece.group]["momentum"] and "momentum_buffer" not in state:
                state["momentum_buffer"] = torch.zeros_like(piece.param)

    def end(self) -> None:
        """End a round: the groups have all parameters, and the counters that the round has advanced."""
        if self._idle:
            self._count_idle()
        for number, group in self.groups.items():
            replace_settings(group, self._after[number], self._shown[number])

    def step_alone(self, pieces: Sequence[Piece], grad: Tensor) -> None:
        """Step the pieces of one whole parameter, one after the other."""
        with self.stepping():
            self.begin()
            for piece in pieces:
                self.step([([piece], cut(grad.flatten(), piece.in_param).clone())])
            self.end()
