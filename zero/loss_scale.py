"""The loss scale that keeps fp16 gradients above underflow. Its state is tensors: nothing waits for the device."""

import torch
from torch import Tensor


class LossScale:
    """Multiply the loss by `scale`; `update` with whether any gradient was non-finite.

    Dynamic: the scale halves when `hysteresis` steps in a row have overflowed, and at every further one until a step
    is good again, down to `minimum`; it doubles after `growth_interval` good steps in a row. Static: it stays what it
    is.
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
        """`found_inf`: 0-dim, 0 or 1, the same on every rank."""
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
        """The tensors themselves, to save or to copy into."""
        return {"scale": self.scale, "num_good": self._num_good, "num_overflowed": self._num_overflowed}
