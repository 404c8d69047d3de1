"""Full gradients on their way to their owners.

[Note: the way of a gradient] It passes these classes, in this order; the names at the right are of its memory:

    Passes             takes it from autograd as it arrives, and begins the backward         `param.grad`
    GradientReducer    finds its buckets; reduces each one when it is complete and its turn has come
    BucketGradient     writes it to the full gradients of a bucket, and casts these          `staged`, message
    Reductions         launches and receives; the BufferPool has the memory that does not persist
    Transport          sends the message; its wait gives the result, times 1/N, to the sum
    GradientSum        sets, or adds to, what the rank keeps, on the device or the host      `rest`, `own`

If messages are in fp16, 1/sqrt(N) is applied before the reduction, and 1/sqrt(N) after it. `own` then is the mean over
the data ranks. `ZeroOptimizer.step` adds the tensor ranks' parts to it, of those parameters whose gradients are partial
along the tensor axis (parallel/tensor/gradient_sums.py), before the norm; this sum is not divided by the number of
tensor ranks. In two cases a hook adds them before `Passes` takes the gradient: if `ZeroOptimizer` was given no `tensor`
axis, or if the bits must not depend on the number of ranks. The message is what ranks send: the full gradients of a
bucket, or their cast to `reduce_dtype`.

If full gradients persist, every bucket has staging memory of its own for the whole run; the sum is a view of it (stage
1: 4 + 12/N bytes a parameter), or separate memory if it is on the host. If they are transient, a bucket takes staging
memory from a small pool when its first gradient arrives, and the sum always has separate memory (stage 2: 2 + 14/N).
The pool and the sums on the accelerator are allocated for the whole run (M_D), or only while they hold gradients. These
figures are those of gradients in half precision. Sums of micro-batches in fp32 take 2 bytes more for each element that
is summed: of the full gradients if they persist, else of the sum that a rank keeps. Full gradients that persist are
cast into a buffer of the pool before a message of another type. `GradientPath` decides this for a bucket.

A bucket may be reduced once all of its gradients have arrived. Buckets are reduced in one fixed order, the reverse of
the layout, on every rank and in every backward: the order in which gradients arrive never changes a message or a sum,
and neither does `overlap`, which only decides when a launched reduction is waited for.
"""

import warnings
from collections.abc import Iterable, Sequence
from enum import Enum

from torch import Tensor, nn

from parallel.memory_kinds import TensorKind, tagged
from zero.core.buckets.bucket import Bucket
from zero.core.buckets.reductions import ReductionOrder, Reductions
from zero.core.partition.config import PartitionConfig
from zero.core.partition.stage import Lifetime
from zero.core.protocols.extension import Extensions
from zero.core.protocols.home import Homes
from zero.core.protocols.orders import Round
from zero.core.protocols.transport import Transport


class BackwardState(Enum):
    """The state of the reducer between two gradients."""

    NONE = "no backward is running"
    ACCUMULATING = "gradients are added up in full; the last backward of the step reduces them"
    REDUCING = "each bucket is reduced as soon as it is complete and its turn has come"


class GradientReducer:
    """Takes gradients into their buckets, and has each bucket reduced by its transport.

    A parameter is ready if no further gradient of it is expected in this backward: when its gradient arrives, if full
    parameters persist, else when its unit is marked ready.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        transports: Sequence[Transport],
        config: PartitionConfig,
        extensions: Extensions,
        homes: Homes,
    ):
        """`buckets`: the trainable ones, in the order of the layout; `transports`: those of the engine."""
        found = (bucket.transport.rounding_warning(bucket.grads.path.types.reduce) for bucket in buckets)
        for text in dict.fromkeys(filter(None, found)):
            warnings.warn(text, stacklevel=4)  # the caller of `ZeroDataParallel`
        self._policy, self._extensions = config.policy, extensions
        self._marks_on_arrival = self._policy.full_params is Lifetime.PERSISTENT
        self._order = ReductionOrder(buckets)
        self.reductions = Reductions(buckets, transports, homes, overlaps=config.overlap)
        self.used: set[nn.Parameter] = set()  # those with a gradient that the optimizer awaits
        self._backward = BackwardState.NONE
        self._discards = False  # the gradients of the running backward
        self._last_backward_has_begun = False  # of this step
        self._num_backwards = 0  # of this step
        self._num_micro_batches: int | None = None  # of this step, if it is known

    @property
    def params(self) -> list[nn.Parameter]:
        """The parameters that get gradients."""
        return list(self._order.numbers)

    def reduces(self, is_last: bool) -> bool:
        """Return whether a backward reduces gradients; `is_last`: it is the last one of its step."""
        return is_last or self._policy.full_grads is Lifetime.TRANSIENT

    def expect(self, num_micro_batches: int) -> None:
        """Announce the number of backwards of the next step."""
        self._num_micro_batches = num_micro_batches

    def begin(self, is_last: bool) -> None:
        """Begin a backward, which expects a gradient of every parameter.

        Raises ValueError if the backward before did not end, or if it was the last of its step.
        """
        self._discards = not self._extensions.on_backward()
        if self._discards:  # between two backwards, or after the last of a step: their state stays
            self._extensions.on_round(Round.ACCUMULATION)
            return
        self._check_ended()
        is_over = self._last_backward_has_begun  # the step, whose mean the optimizer still awaits
        reduced = [bucket for bucket in self._order.buckets if is_over and bucket.grads.total.is_final_mean]
        if any(bucket.grads.path.persists for bucket in reduced):
            raise ValueError(
                "a second backward after the gradients were reduced; run every backward of a step but the last "
                "inside `with model.accumulate():`"
            )
        self.reductions.settle(reduced)
        for bucket in reduced:  # gradients that an optimizer still awaits are added up
            bucket.grads.total.set_aside()
        self._order.restart()
        # Last of all: a backward that is refused must not leave anything to end.
        self._num_backwards = 1 if is_over else self._num_backwards + 1
        for bucket in self._order.buckets:
            if bucket.transport.begin_backward(self._num_backwards, self._num_micro_batches):
                bucket.grads.keep(self.reductions.staging)
        self._backward = BackwardState.REDUCING if self.reduces(is_last) else BackwardState.ACCUMULATING
        self._last_backward_has_begun = is_last
        self._extensions.on_round(Round.BACKWARD if self.reduces(is_last) else Round.ACCUMULATION)

    def complete(self) -> None:
        """Reduce the gradients of a step whose last backward has not run, or reached no parameter on this rank.

        Raises ValueError if a backward that reduces gradients did not end.
        """
        self._check_ended()
        if not self._last_backward_has_begun:
            for transport in self.reductions.transports if self._num_backwards else ():
                transport.check_missing_backward()
            self.begin(is_last=True)
            self.end()
        self._extensions.on_round(Round.STEP)

    def _check_ended(self) -> None:
        if self._backward is BackwardState.REDUCING:
            raise ValueError("the backward before this one broke off; call `optimizer.zero_grad()` before the next one")

    def accept(self, param: nn.Parameter, grad: Tensor) -> None:
        """Write a gradient to the buckets in which the parameter has elements, in the order of reduction."""
        if grad.is_sparse:
            raise ValueError(
                f"sparse gradients are not supported: parameter of shape {tuple(param.shape)}; set sparse=False in its "
                "nn.Embedding"
            )
        tagged(TensorKind.GRADIENTS, grad)
        grad = grad.reshape(-1)
        self._extensions.on_gradient(self._order.numbers[param], grad)
        if self._discards:
            return
        self.used.add(param)
        numel = stop = grad.numel()
        for position in self._order.positions_of(param):
            grads = self._order.buckets[position].grads
            start = stop - len(grads.parts[param])
            grads.write(param, grad[start:stop] if stop - start < numel else grad, self.reductions.staging)
            stop = start
            if self._marks_on_arrival:
                self._order.mark_ready(param, [position])
                # At once, before the parameter's next bucket is filled: a parameter may be larger than the pool.
                self._launch_ready()

    def mark_ready_at_end(self) -> None:
        """Mark no parameter ready before the end of backward, from now on: it may get several gradients in one.

        Raises ValueError if these would be rounded one by one in some stages, and the bits must not depend on that.
        """
        for transport in self.reductions.transports:
            transport.check_several_gradients()
        self._marks_on_arrival = False

    def mark_ready(self, params: Iterable[nn.Parameter]) -> None:
        """Expect no more gradients of `params` in this backward; a gradient that never arrived counts as zero."""
        for param in params:
            self._order.mark_ready(param)
        self._launch_ready()

    def end(self) -> None:
        """End a backward: if it reduces, every bucket reaches its owners."""
        if self._backward is BackwardState.REDUCING:
            self._order.mark_all_ready()
            self._launch_ready()
            self.reductions.receive_all()
            # Only now: no message and no staged gradient is left that needs the memory.
            if self._policy.owned_grads is Lifetime.TRANSIENT:
                self.reductions.free()
        self._backward = BackwardState.NONE

    def clear(self) -> None:
        """Discard all gradients, reduced or not: the next backward starts from nothing."""
        # A backward that broke off is ended first: by then ranks may have launched different numbers of reductions.
        self.end()
        self._last_backward_has_begun = False
        self.used.clear()
        self._num_backwards, self._num_micro_batches = 0, None
        for bucket in self._order.buckets:
            bucket.grads.unstage(self.reductions.staging)
            bucket.grads.free()

    def _launch_ready(self) -> None:
        if self._backward is BackwardState.REDUCING:
            for position, grads in self._order.take_complete():
                self._extensions.on_launch("reduce", position)
                self.reductions.launch(grads, is_last=self._last_backward_has_begun)
