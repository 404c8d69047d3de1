"""Layouts of the residual stream, (tokens, hidden), over the tensor axis, and the collectives around split layers.

    outside a split layer                                         inside (columns, heads)
    ReplicatedTokens   every rank: all tokens    - gather ->      all tokens
                                                 <- reduce -      all tokens, partial sums       all-reduce
    SplitTokens        rank r: r-th stretch      - gather ->      all tokens                     all-gather
                                                 <- reduce -      all tokens, partial sums       reduce-scatter

Tokens of all sequences are in one dim, so a stretch is contiguous and a collective needs no transposition. With context
parallelism, "all tokens" are those of this rank's stretch of each sequence.
"""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from parallel.mesh import Axis, Work
from parallel.tensor.random_streams import own_random_stream

NO_CONTEXT = Axis.trivial("context")


@dataclass(frozen=True)
class ReplicatedTokens:
    """A layout in which every rank holds all tokens (Megatron-LM, 2019).

    `context` is the axis whose ranks have other stretches of the same sequences. Wait for the `Work` of a collective
    before its result is read.
    """

    axis: Axis
    context: Axis = NO_CONTEXT
    num_parts: ClassVar = 1
    """The number of stretches into which the tokens are divided; it must divide the number of tokens."""

    @property
    def replicas(self) -> Axis:
        """The ranks that hold the same tokens."""
        return self.axis

    def gather(self, local: Tensor) -> tuple[Tensor, Work]:
        """Gather the tokens of all ranks. Returns `local` itself if every rank has all tokens."""
        return local, Work()

    def reduce(self, partial: Tensor) -> tuple[Tensor, Work]:
        """Sum the partial sums for all tokens over ranks, and return those for this rank's. May overwrite `partial`."""
        return partial, self.axis.all_reduce(partial, out=partial)

    def cut(self, whole: Tensor) -> Tensor:
        """Return the rows of this rank's tokens, a view of the rows of all tokens."""
        return whole

    def random_stream(self) -> AbstractContextManager[None]:
        """Return a context in which two ranks draw the same random numbers if and only if they hold the same tokens."""
        return nullcontext()


@dataclass(frozen=True)
class SplitTokens:
    """A layout in which every rank holds one stretch of the tokens: sequence parallelism (Korthikanti et al., 2022)."""

    axis: Axis
    context: Axis = NO_CONTEXT

    @property
    def num_parts(self) -> int:
        return self.axis.size

    @property
    def replicas(self) -> Axis:
        return self.axis.without_peers()

    def gather(self, local: Tensor) -> tuple[Tensor, Work]:
        whole = local.new_empty(local.shape[0] * self.axis.size, *local.shape[1:])
        return whole, self.axis.all_gather(local.contiguous(), out=whole)

    def reduce(self, partial: Tensor) -> tuple[Tensor, Work]:
        local = partial.new_empty(partial.shape[0] // self.axis.size, *partial.shape[1:])
        return local, self.axis.reduce_scatter(partial.contiguous(), out=local)

    def cut(self, whole: Tensor) -> Tensor:
        return whole.chunk(self.axis.size)[self.axis.rank]

    def random_stream(self) -> AbstractContextManager[None]:
        return own_random_stream(self.axis)


TokenLayout = ReplicatedTokens | SplitTokens
