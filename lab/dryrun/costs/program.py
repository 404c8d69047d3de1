"""The program whose step is predicted, if it is not this one: the same computation with other kernels and order."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

from lab.measure.cluster import ClusterSpec
from lab.observe.kernel_log import Kernel, events_at_times
from parallel.comm_log import CommEvent

# Element-wise operations, and those along a row, which compilers and fused libraries merge with their neighbours.
MERGED = {
    "add", "add_", "mul", "mul_", "div", "div_", "sub", "gelu", "gelu_backward", "masked_fill", "masked_fill_", "fill_",
    "bernoulli_", "native_dropout", "native_dropout_backward", "_softmax", "_softmax_backward_data", "where", "neg",
    "silu", "silu_backward", "addcmul", "zero::rms_norm", "zero::rms_norm_gradients",
    "exp", "expm1", "_to_copy", "ge", "lt", "bitwise_and", "bitwise_not", "bitwise_or", "triu", "ones",
}  # fmt: skip

COPIES = {"cat", "stack"}
ACCUMULATION = {("backward", "add_"), ("backward", "copy_")}  # of gradients, in their buffers
FORWARD_PRODUCTS = 2  # of fused attention, in forward


@dataclass(frozen=True)
class Program:
    """The differences of another program from this one; by default none."""

    merges_elementwise: bool = False  # neighbouring element-wise kernels are one, by a compiler or by hand
    merges_copies: bool = False  # these may be `COPIES` too
    attention_gain: float = 1.0  # rate of its fused attention, as a multiple of the cluster file's
    one_card_a_ring: bool = False  # a ring between nodes uses one network card, also where each GPU has its own
    overlaps_tensor: bool = False  # products run in parts while their tensor-parallel collective does
    accumulates_in_products: bool = False  # products of weights' gradients add to the buffers that are reduced
    saves_products: bool = False  # in recomputation each second product, and all of attention, is left out
    is_captured: bool = False  # in CUDA graphs, which the host launches at once
    gathers_ahead_in_backward: bool = True  # false: a unit's gather is launched when the unit after it has ended


def cluster_for(cluster: ClusterSpec, program: Program) -> ClusterSpec:
    if cluster.attention_fraction is not None:
        cluster = replace(cluster, attention_fraction=cluster.attention_fraction * program.attention_gain)
    if program.is_captured:
        cluster = replace(cluster, launch_seconds=0.0)
    return replace(cluster, rings_use_all_cards=cluster.rings_use_all_cards and not program.one_card_a_ring)


def as_program(
    kernels: Sequence[Kernel], events: Sequence[CommEvent], program: Program
) -> tuple[list[Kernel], list[CommEvent]]:
    if program.accumulates_in_products:
        kernels, events = replaced(
            kernels, events, lambda _, kernel: [] if (kernel.phase, kernel.name) in ACCUMULATION else [kernel]
        )
    if program.saves_products:
        kernels, events = without_saved_products(kernels, events)
    if not program.gathers_ahead_in_backward:
        # FSDP launches the gather before the reduction of the unit that has just ended.
        late = [_gathered_late(event) for event in events]
        events = sorted(late, key=lambda event: (event.launched, event.op != "all_gather"))
    if program.overlaps_tensor:
        events = [_awaited_late(event, kernels) for event in events]
    if program.merges_elementwise:
        return merged(kernels, events, MERGED | COPIES if program.merges_copies else MERGED)
    return list(kernels), list(events)


def replaced(
    kernels: Sequence[Kernel], events: Sequence[CommEvent], by: Callable[[int, Kernel], list[Kernel]]
) -> tuple[list[Kernel], list[CommEvent]]:
    """Return a step with other kernels in the place of each, `by(position, kernel)`, between the same events."""
    found: list[Kernel] = []
    places = [0]
    for position, kernel in enumerate(kernels):
        found += by(position, kernel)
        places.append(len(found))
    return found, events_at_times(events, places)


def without_saved_products(
    kernels: Sequence[Kernel], events: Sequence[CommEvent]
) -> tuple[list[Kernel], list[CommEvent]]:
    """Return a step of recomputed blocks as it is if attention and each second product of forward are kept.

    Of each recomputed product half the columns are left: of a block the same work as that of each second product.
    """
    recomputed = _recomputed(kernels)

    def kept(position: int, kernel: Kernel) -> list[Kernel]:
        if position not in recomputed:
            return [kernel]
        if not kernel.product:
            return []
        batch, m, n, k = kernel.product
        num_bytes = round(kernel.num_bytes * (m * k + k * n / 2 + m * n / 2) / (m * k + k * n + m * n))
        return [replace(kernel, product=(batch, m, n // 2, k), num_bytes=num_bytes)]

    return replaced(kernels, events, kept)


def _recomputed(kernels: Sequence[Kernel]) -> set[int]:
    """Return the positions of products and attention that backward computes again.

    They are between gradients of weights, whose sum is over the tokens, beside an attention that is no gradient.
    """
    num_tokens = next((kernel.product[1] for kernel in kernels if kernel.product), 0)
    found: set[int] = set()
    stretch: list[int] = []
    is_forward = False
    for position, kernel in enumerate(kernels):
        if kernel.phase != "backward":
            continue
        is_forward |= kernel.attention is not None and kernel.attention[-1] == FORWARD_PRODUCTS
        if kernel.product and kernel.product[-1] == num_tokens != kernel.product[1]:
            found.update(stretch if is_forward else ())
            stretch, is_forward = [], False
        elif kernel.product or kernel.attention:
            stretch.append(position)
    return found


def _gathered_late(event: CommEvent) -> CommEvent:
    if event.op == "all_gather" and event.phase == "backward" and event.awaited is not None:
        return replace(event, launched=max(event.launched, event.awaited))
    return event


def _awaited_late(event: CommEvent, kernels: Sequence[Kernel]) -> CommEvent:
    """Return a collective of the tensor axis with its wait after the next product, which runs in parts beside it."""
    if event.axis != "tensor" or event.awaited is None:
        return event
    later = range(int(event.awaited), len(kernels))
    after = next((position + 1 for position in later if kernels[position].product), event.awaited)
    return replace(event, awaited=after)


def merged(
    kernels: Sequence[Kernel], events: Sequence[CommEvent], names: Collection[str]
) -> tuple[list[Kernel], list[CommEvent]]:
    """Return the kernels with each run of those with some names replaced by the one of them that moves the most.

    The events keep their place between the other kernels; they end a run.
    """
    borders = {int(t) for event in events for t in (event.launched, event.awaited) if t is not None}
    found: list[Kernel] = []
    places: list[int] = []
    in_run = False
    for position, kernel in enumerate(kernels):
        joins = in_run and kernel.name in names and position not in borders
        places.append(len(found) - 1 if joins else len(found))
        if not joins:
            found.append(kernel)
        elif kernel.num_bytes > found[-1].num_bytes:
            found[-1] = kernel
        in_run = kernel.name in names
    places.append(len(found))
    return found, events_at_times(events, places)


def with_keys_of_a_context(kernel: Kernel, size: int) -> Kernel:
    """Return a kernel of a rank that has a part of each sequence, whose attention reads the keys of all of it.

    The keys are assumed to come from the other ranks while attention runs, as in a ring.
    """
    if kernel.attention is None:
        return kernel
    heads, queries, keys, head_dim, num_products = kernel.attention
    return replace(kernel, attention=(heads, queries, keys * size, head_dim, num_products))
