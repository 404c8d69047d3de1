"""Resuming AdamW by torch's implementation where apex's has saved, and the reverse.

Both keep the same moments in fp32. Torch counts the steps of each parameter in its state, apex those of a group.
"""

from typing import Any

import torch

from zero.optimizer import ZeroOptimizer
from zero.state.saved_state import SavedState

COUNTS_PER_PARAMETER, COUNTS_PER_GROUP = "AdamW", "FusedAdam"  # the names of torch's class and apex's


def are_alike(saved: str, present: str) -> bool:
    """Return whether one optimizer class can continue from the state of the other."""
    return saved == present or {saved, present} == {COUNTS_PER_PARAMETER, COUNTS_PER_GROUP}


def load_counters(
    optimizer: ZeroOptimizer, saved: SavedState, saved_class: str, counters: list[dict[str, Any]]
) -> None:
    """Load the counters of parameter groups, or make them of those of parameters. The states have been loaded before.

    `counters` are those of the saved groups. Raises ValueError if the number of groups differs.
    """
    inner = optimizer.inner
    groups = list(zip(inner.param_groups, counters, strict=True))
    if saved_class == type(inner).__name__:
        for group, of_group in groups:
            group.update(of_group)
        return
    states = [
        (piece, inner.state[piece.param]) for bucket in optimizer.buckets for piece in optimizer.pieces_of(bucket)
    ]
    if saved_class == COUNTS_PER_GROUP:
        for piece, state in states:
            device = piece.param.device if inner.defaults.get("fused") else torch.device("cpu")
            state["step"] = torch.tensor(float(counters[piece.group]["step"]), device=device)
        return
    # All parameters have taken the same steps. The number is read from the files, because this rank may own no part of
    # some group, and writes its counter.
    for _, state in states:
        state.pop("step", None)
    steps = (saved.scalar(name, "step") for name in saved.parameters if "step" in saved.state_kinds(name))
    if (step := next(steps, None)) is not None:
        for group, _ in groups:
            group["step"] = int(step)
