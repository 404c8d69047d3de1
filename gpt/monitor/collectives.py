"""The profile of the collectives of a step, for tuning the network.

A run writes it after the step `profile.collectives_step`. `python -m lab.dryrun.collectives` compares two runs.
"""

import json
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gpt.run_folder.files import written_if_possible
from parallel.comm_log import CommEvent, CommLog
from parallel.torch_internals import OpOverload, UnguardedDispatchMode, runs_a_kernel

PROFILE = "collectives.json"


def profile(events: list[CommEvent], step_length: float) -> list[dict[str, Any]]:
    """Return one row for each (axis, operation, phase), in the order of their first launch.

    `step_length` and the times of the events are counts of kernels. Positions are fractions of the step. `blocking`
    counts the collectives that overlap nothing: they were waited for before another kernel was launched.
    """
    groups: dict[tuple[str, str, str], list[tuple[int, CommEvent]]] = {}
    for order, event in enumerate(events):
        groups.setdefault((event.axis, event.op, event.phase), []).append((order, event))
    return [
        {
            "axis": axis,
            "op": op,
            "phase": phase,
            "group_size": found[0][1].group_size,
            "count": len(found),
            "message_bytes": _histogram(event for _, event in found),
            "wire_bytes": sum(event.wire_bytes for _, event in found),
            "first_order": found[0][0],
            "first_position": round(found[0][1].launched / step_length, 4) if step_length else 0.0,
            "last_position": round(found[-1][1].launched / step_length, 4) if step_length else 0.0,
            "blocking": sum(event.awaited == event.launched for _, event in found),
        }
        for (axis, op, phase), found in groups.items()
    ]


class KernelCounter(UnguardedDispatchMode):
    """A counter of the operations for which a GPU runs kernels."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function: OpOverload, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = function(*args, **(kwargs or {}))
        self.count += runs_a_kernel(function, args)
        return output


@contextmanager
def profiled(log: CommLog, folder: Path | None) -> Iterator[None]:
    """Record the step inside this context, and write the profile of its collectives to `folder`, if there is one.

    The step takes longer, because Python intercepts every kernel to count it.
    """
    with KernelCounter() as kernels, log.keeping_events(lambda: kernels.count) as events:
        yield
    if folder is None:
        return
    rows = profile(events, kernels.count)
    with written_if_possible(folder / PROFILE):
        (folder / PROFILE).write_text(json.dumps({"collectives": rows}, indent=1) + "\n")


def _histogram(events: Any) -> dict[str, int]:
    """Return {bytes of a message: number of such messages}, in ascending order."""
    sizes = Counter(event.message_bytes for event in events)
    return {str(size): sizes[size] for size in sorted(sizes)}
