"""The loss scale, which avoids gradients that are not finite in fp16, and a watch of the steps that they skip.

They are noticed by `ShardedOptimizer.step`.

The counters and the scale are tensors on the device, so that no update blocks the host. Those of skipped steps are
copied to host memory, and the host reads the copies that have arrived: on a GPU it may be some steps late.
"""

import warnings
from collections import deque
from collections.abc import Callable

import torch
from torch import Tensor

from zero.core.memory.streams import launched_work

LARGEST = 2.0**126  # scale: from infinity there would be no way back


class LossScale:
    """A factor by which the loss is multiplied before backward, static or dynamic.

    Multiply the loss by `scale`, and call `update` after each step. A dynamic scale is halved after `hysteresis`
    consecutive steps with overflow, and again after each overflow that follows directly, but not below `minimum`. It is
    doubled after `growth_interval` consecutive steps without overflow, up to 2^126. A static scale never changes.
    """

    def __init__(
        self,
        initial: float = 1.0,
        *,
        is_dynamic: bool = False,
        minimum: float = 1.0,
        growth_interval: int = 1000,
        hysteresis: int = 2,
        device: torch.device | str = "cpu",
    ):
        self.is_dynamic, self.initial, self._minimum = is_dynamic, initial, minimum
        self._growth_interval, self._hysteresis = growth_interval, hysteresis
        self.scale = torch.tensor(float(initial), dtype=torch.float32, device=device)
        # Consecutive steps without overflow, and with overflow, up to now.
        self._num_good = torch.zeros((), dtype=torch.int64, device=device)
        self._num_overflowed = torch.zeros((), dtype=torch.int64, device=device)

    def move(self, device: torch.device) -> None:
        """Move the scale and the counters to the device of the gradients."""
        self.scale = self.scale.to(device)
        self._num_good, self._num_overflowed = self._num_good.to(device), self._num_overflowed.to(device)

    def update(self, found_inf: Tensor) -> None:
        """Update a dynamic scale after a step.

        `found_inf` is 0-dim and the same on all ranks: 1 if a gradient was not finite, else 0.
        """
        if not self.is_dynamic:
            return
        overflowed = found_inf.bool()
        self._num_overflowed.add_(1).mul_(overflowed)
        self._num_good.add_(1).mul_(~overflowed)
        # At most one of these is true, since one of the two counts is zero.
        must_halve = self._num_overflowed >= self._hysteresis
        must_double = self._num_good >= self._growth_interval
        self.scale.mul_(1.0 - 0.5 * must_halve.float() + must_double.float()).clamp_(self._minimum, LARGEST)
        self._num_good.mul_(~must_double)

    def state(self) -> dict[str, Tensor]:
        """Return the tensors of the state by name, not copies: save them, or copy saved values into them."""
        return {"scale": self.scale, "num_good": self._num_good, "num_overflowed": self._num_overflowed}


class SkippedStepsError(RuntimeError):
    """Many steps in a row updated nothing, since gradients were not finite."""


class SkippedSteps:
    """Watches the steps of one optimizer: warns of the first skipped one in a row, and raises at the `limit`-th."""

    def __init__(self, device: torch.device, limit: int | None, warns: bool):
        """`limit`: None for no limit."""
        self._limit, self._warns = limit, warns
        self.num_skipped = torch.zeros((), dtype=torch.int64, device=device)
        self._in_a_row = torch.zeros((), dtype=torch.int64, device=device)
        self._step = 0
        self._copies: deque[tuple[int, Tensor, Callable[[], bool]]] = deque()  # (step, counter, has arrived)

    def record(self, found_inf: Tensor, skipped: Tensor) -> None:
        """Record a step; both 0-dim: `found_inf` is 1 if a gradient was not finite, `skipped` if nothing was updated.

        Raises SkippedStepsError if a recent step was the `limit`-th in a row.
        """
        self._step += 1
        self.num_skipped.add_(skipped.long())
        self._in_a_row.add_(1).mul_(found_inf.long())
        copy = self._in_a_row.to("cpu", non_blocking=True)  # pinned, if the counter is on a GPU
        if type(copy) is not Tensor:
            return  # a fake tensor, which has no value
        self._copies.append((self._step, copy, launched_work(self._in_a_row.device)))
        while self._copies and self._copies[0][2]():
            step, copy, _ = self._copies.popleft()
            self._report(step, int(copy.numpy()))

    def _report(self, step: int, in_a_row: int) -> None:
        if self._limit is not None and in_a_row >= self._limit:
            raise SkippedStepsError(
                f"the last {in_a_row} steps, from step {step - in_a_row + 1} of this optimizer on, were skipped: their "
                "gradients were not finite; look for inf or NaN in the inputs, the loss and the parameters, lower the "
                f"learning rate or the loss scale, or raise ZeroOptimizer(max_skipped_in_a_row={self._limit})"
            )
        if self._warns and in_a_row == 1:
            warnings.warn(
                f"step {step} of this optimizer was skipped: its gradients were not finite; `num_skipped` counts such "
                "steps",
                RuntimeWarning,
                stacklevel=6,  # the caller of `ZeroOptimizer.step`
            )
