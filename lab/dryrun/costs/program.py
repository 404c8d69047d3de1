"""The program whose step is predicted, if it is not this one: the same computation with other kernels and order."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from lab.measure.cluster import ClusterSpec
from lab.observe.kernel_log import Kernel, events_at_times
from parallel.comm_log import CommEvent

# Element-wise operations, and those along a row, which compilers and fused libraries merge with their neighbours.
MERGED = {
    "add", "add_", "mul", "mul_", "div", "div_", "sub", "gelu", "gelu_backward", "masked_fill", "masked_fill_", "fill_",
    "bernoulli_", "native_dropout", "native_dropout_backward", "_softmax", "_softmax_backward_data", "where", "neg",
    "exp", "expm1", "_to_copy", "ge", "lt", "bitwise_and", "bitwise_not", "bitwise_or", "triu", "ones",
}  # fmt: skip


@dataclass(frozen=True)
class Program:
    """The differences of another program from this one; by default none."""

    merges_elementwise: bool = False  # neighbouring element-wise kernels are one, by a compiler or by hand
    attention_gain: float = 1.0  # rate of its fused attention, as a multiple of the cluster file's
    one_card_a_ring: bool = False  # a ring between nodes uses one network card, also where each GPU has its own
    overlaps_tensor: bool = False  # products run in parts while their tensor-parallel collective does
    gathers_ahead_in_backward: bool = True  # false: a unit's gather is launched when the unit after it has ended


def cluster_for(cluster: ClusterSpec, program: Program) -> ClusterSpec:
    if cluster.attention_fraction is not None:
        cluster = replace(cluster, attention_fraction=cluster.attention_fraction * program.attention_gain)
    return replace(cluster, rings_use_all_cards=cluster.rings_use_all_cards and not program.one_card_a_ring)


def as_program(
    kernels: Sequence[Kernel], events: Sequence[CommEvent], program: Program
) -> tuple[list[Kernel], list[CommEvent]]:
    if not program.gathers_ahead_in_backward:
        # FSDP launches the gather before the reduction of the unit that has just ended.
        late = [_gathered_late(event) for event in events]
        events = sorted(late, key=lambda event: (event.launched, event.op != "all_gather"))
    if program.overlaps_tensor:
        events = [_awaited_late(event, kernels) for event in events]
    if program.merges_elementwise:
        return merged(kernels, events)
    return list(kernels), list(events)


def _gathered_late(event: CommEvent) -> CommEvent:
    if event.op == "all_gather" and event.phase == "backward" and event.awaited is not None:
        return replace(event, launched=max(event.launched, event.awaited), awaited=event.awaited)
    return event


def _awaited_late(event: CommEvent, kernels: Sequence[Kernel]) -> CommEvent:
    """Return a collective of the tensor axis with its wait after the next product, which runs in parts beside it."""
    if event.axis != "tensor" or event.awaited is None:
        return event
    later = range(int(event.awaited), len(kernels))
    after = next((position + 1 for position in later if kernels[position].product), event.awaited)
    return replace(event, awaited=after)


def merged(kernels: Sequence[Kernel], events: Sequence[CommEvent]) -> tuple[list[Kernel], list[CommEvent]]:
    """Return the kernels with each run of element-wise ones replaced by the one of them that moves the most.

    The events keep their place between the other kernels; they end a run.
    """
    borders = {int(t) for event in events for t in (event.launched, event.awaited) if t is not None}
    found: list[Kernel] = []
    places: list[int] = []
    in_run = False
    for position, kernel in enumerate(kernels):
        joins = in_run and kernel.name in MERGED and position not in borders
        places.append(len(found) - 1 if joins else len(found))
        if not joins:
            found.append(kernel)
        elif kernel.num_bytes > found[-1].num_bytes:
            found[-1] = kernel
        in_run = kernel.name in MERGED
    places.append(len(found))
    return found, events_at_times(events, places)
