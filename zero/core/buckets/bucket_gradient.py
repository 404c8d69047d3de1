"""The gradients of a bucket, from the first one that arrives to the message that is reduced.

staged       this rank's full gradients: memory of their own for the whole run, or a buffer from a small pool
message      `staged`, or its cast if gradients are reduced in another type, which the bucket's transport reduces
total        what the rank keeps of the result, a view of `staged` or memory of its own: see
             zero/core/protocols/gradient_sum.py
"""

from enum import Enum

from torch import Tensor, nn

from parallel.memory_kinds import TensorKind
from zero.core.memory.staging import BufferPool
from zero.core.partition.stage import GradientTypes, ShardingPolicy
from zero.core.protocols.gradient_sum import GradientPath, scale_into
from zero.core.protocols.home import Home, Homes
from zero.core.protocols.transport import Transport


class Staging(Enum):
    """The use of the memory of a bucket's full gradients."""

    FREE = "no full gradient is stored; if the memory persists, the sum in it may hold the reduced gradient"
    FILLING = "gradients of one or more backwards have been written, and more may be added"
    REDUCING = "the reduction has been launched, and the memory belongs to it"


class BucketGradient:
    """The gradients of one bucket: written as they arrive, handed to the transport as a message, and then a sum.

    `total` is independent of `staging`: with accumulation it holds the sum of earlier micro-batches while the gradients
    of the next one are staged.
    """

    def __init__(
        self,
        transport: Transport,
        parts: dict[nn.Parameter, range],
        gaps: list[range],
        types: GradientTypes,
        policy: ShardingPolicy,
        homes: Homes,
    ):
        """`parts`: the elements of each parameter, in the buffer; `gaps`: those that belong to none."""
        self.transport, self.parts, self._gaps, self._ranges = transport, parts, gaps, transport.ranges
        self.path = path = GradientPath(types, policy)
        self.staging = Staging.FREE
        self.staged: Tensor | None = None  # a buffer of the pool may have more elements than the bucket
        if path.persists:
            numel = len(self._ranges.elements)
            self.staged = homes.accelerator.new(TensorKind.GRADIENTS, numel, path.staged_type)
        self._cast: Tensor | None = None  # a buffer of the pool: `staged` in the type of messages, if that is another
        self._unwritten: set[nn.Parameter] = set()  # parameters without a value in `staged`
        self._scale = transport.scale(types.reduce)
        self.place(homes.optimizer)

    @property
    def own(self) -> Tensor:
        """The gradients that this rank owns: once they are reduced, the mean over ranks."""
        return self.total.own

    @property
    def is_empty(self) -> bool:
        """True if no gradient has arrived since the last update."""
        return self.total.is_empty and self.staging is Staging.FREE

    @property
    def holds_memory(self) -> bool:
        """True if a reduction holds memory until it is waited for."""
        is_moved = self.path.casts_message or self.home.is_apart
        return not self.path.persists or is_moved or self.transport.holds_memory(self.path.types.reduce)

    def place(self, home: Home) -> None:
        """Move the sum to a home. The values of a gradient that it holds are lost."""
        self.home = home
        self.total = home.gradient_sum(self._ranges, self.path, self.staged, gives_means=self.transport.gives_means)
        self.transport.reset()

    def write(self, param: nn.Parameter, grad: Tensor, pool: BufferPool) -> None:
        """Write, or add, the elements of a flat gradient that are in this bucket."""
        self._begin_to_fill(pool)
        staged = self._view(self.parts[param])
        if param in self._unwritten:
            scale_into(staged, grad, self._scale)
            self._unwritten.discard(param)
        else:
            staged.add_(grad, alpha=self._scale)

    def finish(self, pool: BufferPool) -> Tensor:
        """Fill with zeros what no gradient has been written to; return the message, which the caller reduces next."""
        values = self._fill(pool)
        self.staging = Staging.REDUCING
        if not self.path.casts_message:
            return values
        self._cast = pool.take(self.path.types.reduce)
        return self._ranges.of_bucket(self._cast, self._ranges.elements).copy_(values)

    def unstage(self, pool: BufferPool) -> None:
        """Discard the full gradients, and return their memory to the pool unless it persists."""
        self.staging = Staging.FREE
        if self._cast is not None:
            pool.put_back(self._cast, self.total.last_read)
            self._cast = None
        if self.staged is not None and not self.path.persists:
            pool.put_back(self.staged, self.total.last_read)
            self.staged = None

    def keep(self, pool: BufferPool) -> None:
        """Let the transport keep the full gradients, which persist; the next ones begin anew."""
        self.transport.keep(self._fill(pool))
        self.staging = Staging.FREE

    def free(self) -> None:
        """Discard the reduced gradients."""
        self.total.free()
        self.transport.reset()

    def _begin_to_fill(self, pool: BufferPool) -> None:
        if self.staging is not Staging.FREE:
            return
        if self.staged is None:
            self.staged = pool.take(self.path.staged_type)
        self.total.last_read.wait()  # before anything is written: that copy may still read the memory
        for gap in self._gaps:
            self._view(gap).zero_()
        self._unwritten, self.staging = set(self.parts), Staging.FILLING

    def _fill(self, pool: BufferPool) -> Tensor:
        """Return the full gradients, with zeros where none was written."""
        self._begin_to_fill(pool)
        for param in self._unwritten:
            self._view(self.parts[param]).zero_()
        return self._view(self._ranges.elements)

    def _view(self, elements: range) -> Tensor:
        assert self.staged is not None
        return self._ranges.of_bucket(self.staged, elements)
