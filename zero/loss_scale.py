"""The loss scale that keeps fp16 gradients from underflow. Its state is tensors, so updates do not block the host."""

import torch
from torch import Tensor


class LossScale:
    """A factor for the loss, static or dynamic.

    Multiply the loss by `scale`, and call `update` in each step. A dynamic scale is halved when `hysteresis` steps in a
    row have overflowed, and again in each further step that overflows, down to `minimum`. It is doubled after
    `growth_interval` steps in a row without overflow. A static scale never changes.
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
        self.is_dynamic, self._minimum = is_dynamic, minimum
        self._growth_interval, self._hysteresis = growth_interval, hysteresis
        self.scale = torch.tensor(float(initial), device=device)
        self._num_good = torch.zeros((), dtype=torch.int64, device=device)
        self._num_overflowed = torch.zeros((), dtype=torch.int64, device=device)

    def update(self, found_inf: Tensor) -> None:
        """Adapt the scale after a step.

        `found_inf` is 0-dim and the same on every rank: 1 if a gradient was not finite, else 0.
        """
        if not self.is_dynamic:
            return
        overflowed = found_inf.bool()
        self._num_overflowed.add_(1).mul_(overflowed)
        self._num_good.add_(1).mul_(~overflowed)
        halves = self._num_overflowed >= self._hysteresis
        doubles = self._num_good >= self._growth_interval
        self.scale.mul_(1.0 - 0.5 * halves.float() + doubles.float()).clamp_(min=self._minimum)
        self._num_good.mul_(~doubles)

    def state(self) -> dict[str, Tensor]:
        """Return the tensors of the state themselves, not copies: to save, or to load by copying into them."""
        return {"scale": self.scale, "num_good": self._num_good, "num_overflowed": self._num_overflowed}
