"""Resuming AdamW by torch's implementation where apex's has saved, and the reverse, with either weight decay.

All keep the same moments in fp32. Torch counts the steps of each parameter in its state, apex those of a group.
"""

from typing import Any

import torch
from torch import Tensor

from parallel.validation.errors import ConfigError
from zero.checkpoint.saved_state import SavedState
from zero.optimizer import ZeroOptimizer

COUNTS_PER_GROUP = "FusedAdam"  # the name of apex's class
MOMENTS = {"exp_avg", "exp_avg_sq"}
# Of each parameter, by the class of the optimizer.
STATES = {"AdamW": MOMENTS | {"step"}, "CautiousAdamW": MOMENTS | {"step"}, COUNTS_PER_GROUP: MOMENTS}


def are_alike(saved: str, present: str) -> bool:
    """Return whether one optimizer class can continue from the state of the other."""
    return saved == present or {saved, present} <= STATES.keys()


def load_counters(
    optimizer: ZeroOptimizer, saved: SavedState, saved_class: str, counters: list[dict[str, Any]]
) -> None:
    """Load the counters of parameter groups, or make them of those of parameters. The states have been loaded before.

    `counters` are those of the saved groups. Raises ConfigError if these or the states are not those of `saved_class`.
    """
    inner = optimizer.inner
    pieces = [piece for bucket in optimizer.buckets for piece in optimizer.pieces_of(bucket)]
    if problem := _problem(inner, [piece.param for piece in pieces], saved_class, counters):
        raise ConfigError(f"{saved.folder} is damaged: {problem}")
    if (saved_class == COUNTS_PER_GROUP) == (type(inner).__name__ == COUNTS_PER_GROUP):
        for group, of_group in zip(inner.param_groups, counters, strict=True):
            group.update(of_group)
    elif saved_class == COUNTS_PER_GROUP:
        for piece in pieces:
            device = piece.param.device if inner.defaults.get("fused") else torch.device("cpu")
            step = float(counters[piece.group]["step"])
            inner.state[piece.param]["step"] = torch.tensor(step, device=device)
    else:
        # All parameters have taken the same steps. The number is read from the files, because this rank may own no part
        # of some group, and writes its counter.
        for piece in pieces:
            inner.state[piece.param].pop("step", None)
        steps = (saved.scalar(name, "step") for name in saved.parameters if "step" in saved.state_kinds(name))
        if (found := next(steps, None)) is not None:
            for group in inner.param_groups:
                group["step"] = int(found)


def _problem(
    inner: torch.optim.Optimizer, params: list[Tensor], saved_class: str, counters: list[dict[str, Any]]
) -> str | None:
    """Return what is wrong with the states that have been loaded, or with the counters of the groups; None if nothing.

    Before the first update there are neither.
    """
    if len(counters) != len(inner.param_groups):
        return f"it has the counters of {len(counters)} groups of parameters, not of {len(inner.param_groups)}"
    if any(key in inner.defaults or key == "params" for of_group in counters for key in of_group):
        return "a counter has the name of a setting of the optimizer"
    states = [(param, inner.state.get(param, {})) for param in params]
    if saved_class not in STATES or not any(state for _, state in states):
        return None
    if saved_class == COUNTS_PER_GROUP and any("step" not in of_group for of_group in counters):
        return "a group of parameters has no counter of steps"
    expected = STATES[saved_class]
    for param, state in states:
        if not state:  # a parameter that no rank has used yet, with skip_unused
            continue
        if not state.keys() >= expected:
            return f"a parameter has the states {sorted(state)}, {sorted(expected)} are needed"
        moments = [state[kind] for kind in state if kind != "step"]  # also the third one of amsgrad
        if any(moment.shape != param.shape or not moment.is_floating_point() for moment in moments):
            return "moments differ from their weights in shape, or are integers"
        if "step" in expected and state["step"].shape:
            return "the counter of steps of a parameter is not a number"
    return None
