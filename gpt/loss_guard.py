"""Detection of bad losses: those that are not finite, and those far above the ones before them.

A step with a bad loss updates nothing, and `guard.policy` says whether the run then goes on, stops or rolls back. Every
step is judged on the device, without a tensor being read; the host reads the number of bad losses at logged steps.
"""

import torch
from torch import Tensor

from parallel.mesh import Axis


class SpikeDetector:
    """A running mean of the good losses, against which each new loss is judged.

    A loss is bad if it is not finite, or above `factor` times the mean once `num_for_a_mean` good losses have been seen
    (None: it need only be finite). The mean keeps `memory` of its value at each good loss.
    """

    def __init__(
        self,
        factor: float | None,
        *,
        memory: float = 0.98,
        num_for_a_mean: int = 20,
        device: torch.device | str = "cpu",
    ):
        self._factor, self._memory, self._num_for_a_mean = factor, memory, num_for_a_mean
        self.mean = torch.zeros((), dtype=torch.float64, device=device)
        self.num_good = torch.zeros((), dtype=torch.int64, device=device)

    def judge(self, loss: Tensor) -> Tensor:
        """Return whether a loss (0-dim, float64) is bad, as a 0-dim tensor; a good one enters the mean."""
        is_bad = ~loss.isfinite()
        if self._factor is not None:
            is_bad |= (self.num_good >= self._num_for_a_mean) & (loss > self._factor * self.mean)
        # The first losses have equal weights, so that the high losses of the beginning are soon forgotten.
        memory = torch.clamp(self.num_good / (self.num_good + 1), max=self._memory)
        updated = memory * self.mean + (1 - memory) * loss
        self.mean.copy_(torch.where(is_bad, self.mean, updated))
        self.num_good.add_(~is_bad)
        return is_bad


class LossGuard:
    """The judge of every step's loss, with the same verdict on all ranks; it counts the bad ones."""

    def __init__(self, data: Axis, spike_factor: float | None, device: torch.device | str = "cpu"):
        self._data = data
        self._detector = SpikeDetector(spike_factor, device=device)
        self.num_bad = torch.zeros((), dtype=torch.int64, device=device)

    def judge(self, loss: Tensor) -> Tensor:
        """Return 1 if the mean of `loss` (0-dim) over the data-parallel ranks is bad, else 0, as a 0-dim tensor."""
        total = loss.detach().double()
        self._data.all_reduce(total, out=total).wait()
        is_bad = self._detector.judge(total / self._data.size)
        self.num_bad.add_(is_bad)
        return is_bad.to(torch.float32)

    def state(self) -> dict[str, Tensor]:
        """Return the tensors themselves, to save or to copy into; `num_bad` is not saved, it counts per process."""
        return {"mean": self._detector.mean, "num_good": self._detector.num_good}
