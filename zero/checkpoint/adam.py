"""Resuming AdamW by torch's implementation where apex's has saved, and the reverse, with either weight decay.

All keep the same moments in fp32. Torch counts the steps of each parameter in its state, apex those of a group.
"""

from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from parallel.validation.errors import ConfigError
from zero.checkpoint.saved_state import SavedState
from zero.core.step.update import Update
from zero.optimizer import ZeroOptimizer

COUNTS_PER_GROUP = "FusedAdam"  # the name of apex's class
SEPARATOR = "+"  # of names of classes in a checkpoint
MOMENTS = {"exp_avg", "exp_avg_sq"}
# Of each parameter, by the class of the optimizer.
STATES = {"AdamW": MOMENTS | {"step"}, "CautiousAdamW": MOMENTS | {"step"}, COUNTS_PER_GROUP: MOMENTS}


def class_names(optimizer: ZeroOptimizer) -> str:
    """Return the names of the classes of the torch optimizers, such as Muon+AdamW: one for consecutive groups."""
    return SEPARATOR.join(name for name, _ in groupby(_names_of_groups(optimizer)))


def _names_of_groups(optimizer: ZeroOptimizer) -> list[str]:
    return [type(optimizer.update_of(number).optimizer).__name__ for number in range(len(optimizer.param_groups))]


def are_alike(saved: str, present: str) -> bool:
    """Return whether the optimizers of one `class_names` can continue from the states of those of the other."""
    there, here = saved.split(SEPARATOR), present.split(SEPARATOR)
    if is_in_groups(saved, present):
        return all(name == saved or name in STATES for name in here)
    pairs = list(zip(there, here, strict=False))
    return len(there) == len(here) and all(a == b or {a, b} <= STATES.keys() for a, b in pairs)


def load_counters(
    optimizer: ZeroOptimizer, saved: SavedState, saved_classes: str, counters: list[dict[str, Any]]
) -> None:
    """Load the counters of parameter groups, or make them of those of parameters. The states have been loaded before.

    `counters` are those of the saved groups. Raises ConfigError if these or the states are not those of the saved
    `class_names`.
    """
    if len(counters) != (present := len(optimizer.param_groups)):
        raise ConfigError(
            f"{saved.folder} is damaged: it has the counters of {len(counters)} groups of parameters, not of {present}"
        )
    if is_in_groups(saved_classes, class_names(optimizer)):
        # The groups may have another order now; those that were not AdamW's have counted the same rounds.
        for update in optimizer.updates:
            names = getattr(update.optimizer, "own_counters", ())
            own = {name: of_group[name] for of_group in counters for name in names if name in of_group}
            saved_class = "AdamW" if type(update.optimizer).__name__ in STATES else saved_classes
            _load_counters(update, optimizer, saved, saved_class, [own] * present)
        return
    runs = zip(saved_classes.split(SEPARATOR), groupby(_names_of_groups(optimizer)), strict=True)
    of_groups = [saved_class for saved_class, (_, run) in runs for _ in run]
    for update in optimizer.updates:
        _load_counters(update, optimizer, saved, of_groups[next(iter(update.groups))], counters)


def is_in_groups(saved: str, present: str) -> bool:
    """Return whether one class has saved, of which some groups were AdamW's that now has an optimizer of its own."""
    here = present.split(SEPARATOR)
    return len(here) > 1 and saved in here and saved not in STATES


def _load_counters(
    update: Update, optimizer: ZeroOptimizer, saved: SavedState, saved_class: str, counters: list[dict[str, Any]]
) -> None:
    inner = update.optimizer
    pieces = [piece for bucket in optimizer.buckets for piece in update.pieces_in(optimizer.pieces_of(bucket))]
    of_groups = {number: counters[number] for number in update.groups}
    if problem := _problem(inner, [piece.param for piece in pieces], saved_class, list(of_groups.values())):
        raise ConfigError(f"{saved.folder} is damaged: {problem}")
    if (saved_class == COUNTS_PER_GROUP) == (type(inner).__name__ == COUNTS_PER_GROUP):
        for number, group in update.groups.items():
            group.update(of_groups[number])
    elif saved_class == COUNTS_PER_GROUP:
        for piece in pieces:
            device = piece.param.device if update.counts_on_device else torch.device("cpu")
            inner.state[piece.param]["step"] = torch.tensor(float(of_groups[piece.group]["step"]), device=device)
    else:
        # All parameters have taken the same steps. The number is read from the files, because this rank may own no part
        # of some group, and writes its counter.
        for piece in pieces:
            inner.state[piece.param].pop("step", None)
        steps = (saved.scalar(name, "step") for name in saved.parameters if "step" in saved.state_kinds(name))
        if (found := next(steps, None)) is not None:
            for group in update.groups.values():
                group["step"] = int(found)


def _problem(
    inner: torch.optim.Optimizer, params: list[Tensor], saved_class: str, counters: list[dict[str, Any]]
) -> str | None:
    """Return what is wrong with the states that have been loaded, or with the counters of the groups; None if nothing.

    Before the first update there are neither.
    """
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
