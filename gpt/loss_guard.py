"""Losses that are not finite, or far above those before: such steps update nothing, and the run may stop or go back.

The judgement is made on the device in every step, by tensors; the host reads how many were bad at logged steps.
"""

import torch
from torch import Tensor

from parallel.mesh import Axis

MEMORY = 0.98  # of the running mean, a step
NUM_FOR_A_MEAN = 20  # losses before any can be a spike


class LossGuard:
    """Flags bad losses, and keeps a running mean of the good ones."""

    def __init__(self, data: Axis, spike_factor: float | None, device: torch.device | str = "cpu"):
        self._data, self._factor = data, spike_factor
        self._mean = torch.zeros((), dtype=torch.float64, device=device)
        self._num_good = torch.zeros((), dtype=torch.int64, device=device)
        self.num_bad = torch.zeros((), dtype=torch.int64, device=device)

    def judge(self, loss: Tensor) -> Tensor:
        """`loss`: 0-dim, of this data-parallel rank. 1 where the mean over ranks is bad, else 0, alike on all ranks."""
        total = loss.detach().double()
        self._data.all_reduce(total, out=total).wait()
        mean_loss = total / self._data.size
        is_bad = ~mean_loss.isfinite()
        if self._factor is not None:
            is_bad |= (self._num_good >= NUM_FOR_A_MEAN) & (mean_loss > self._factor * self._mean)
        # Of all losses alike at first, so that a high beginning is forgotten.
        memory = torch.clamp(self._num_good / (self._num_good + 1), max=MEMORY)
        updated = memory * self._mean + (1 - memory) * mean_loss
        self._mean.copy_(torch.where(is_bad, self._mean, updated))
        self._num_good.add_(~is_bad)
        self.num_bad.add_(is_bad)
        return is_bad.to(torch.float32)

    def state(self) -> dict[str, Tensor]:
        """The tensors themselves, to save or to copy into. `num_bad` counts since the start of the process."""
        return {"mean": self._mean, "num_good": self._num_good}
