"""Detection of bad losses: those that are not finite, and those far above the ones before them.

A step with a bad loss updates nothing, and `guard.policy` says whether the run then goes on, stops or rolls back. Every
loss is judged on the device; the host reads only the number of bad losses, and only at steps that are logged or saved.
"""

import torch
from torch import Tensor

from gpt.settings.run import GuardSettings
from parallel.mesh import Axis
from parallel.validation.errors import ConfigError


class SpikeDetector:
    """An exponential moving average of the good losses, with which each new loss is compared.

    A loss is bad if it is not finite, or if it is above `factor` times the average (None: only if it is not finite).
    Losses are compared once the average contains `num_warmup` good losses. `decay` is the weight that the average keeps
    at each good loss.
    """

    def __init__(
        self,
        factor: float | None,
        *,
        decay: float = 0.98,
        num_warmup: int = 20,
        device: torch.device | str = "cpu",
    ):
        self._factor, self._decay, self._num_warmup = factor, decay, num_warmup
        self.mean = torch.zeros((), dtype=torch.float64, device=device)
        self.num_good = torch.zeros((), dtype=torch.int64, device=device)

    def judge(self, loss: Tensor) -> Tensor:
        """Return True if a loss (0-dim, float64) is bad, as a 0-dim tensor; add a good loss to the average."""
        is_bad = ~loss.isfinite()
        if self._factor is not None:
            is_bad |= (self.num_good >= self._num_warmup) & (loss > self._factor * self.mean)
        # The first losses have equal weights, so that the high losses of the beginning soon lose their influence.
        decay = torch.clamp(self.num_good / (self.num_good + 1), max=self._decay)
        updated = decay * self.mean + (1 - decay) * loss
        self.mean.copy_(torch.where(is_bad, self.mean, updated))
        self.num_good.add_(~is_bad)
        return is_bad


class LossGuard:
    """A check of every step's loss, with the same result on all ranks, and a count of the bad ones."""

    def __init__(self, data: Axis, spike_factor: float | None, device: torch.device | str = "cpu"):
        self._data = data
        self._detector = SpikeDetector(spike_factor, device=device)
        self.num_bad = torch.zeros((), dtype=torch.int64, device=device)

    def judge(self, loss: Tensor) -> Tensor:
        """Return 1 if the mean of `loss` (0-dim) over the data-parallel ranks is bad, else 0, as a 0-dim tensor."""
        total = loss.detach().to(torch.float64, copy=True)  # the sum overwrites it
        self._data.all_reduce(total, out=total).wait()
        is_bad = self._detector.judge(total / self._data.size)
        self.num_bad.add_(is_bad)
        return is_bad.to(torch.float32)

    def state(self) -> dict[str, Tensor]:
        """Return the tensors to save, or to copy saved ones into. `num_bad` is not one: it counts since the start."""
        return {"mean": self._detector.mean, "num_good": self._detector.num_good}


class SkippedInARow:
    """A check, from the number of skipped steps at each logged step, that not too many follow each other.

    It counts whole intervals between logged steps in which every step was skipped, so it needs no tensor of its own.
    """

    def __init__(self, limit: int | None, step: int, num_skipped: int):
        """`limit`: of steps in a row, None for no limit; `num_skipped`: up to `step`."""
        self._limit, self._in_a_row = limit, 0
        self._step, self._num_skipped = step, num_skipped

    def check(self, step: int, num_skipped: int) -> None:
        """Note the number of skipped steps up to `step`. Raises ConfigError if the last `limit` steps were skipped."""
        num_steps, num_new = step - self._step, num_skipped - self._num_skipped
        self._in_a_row = self._in_a_row + num_new if num_new == num_steps else 0
        self._step, self._num_skipped = step, num_skipped
        if self._limit is not None and self._in_a_row >= self._limit:
            raise ConfigError(
                f"the last {self._in_a_row} steps, up to step {step}, updated nothing, because gradients or losses "
                f"were not finite or spiked, and guard.max_skipped_steps={self._limit}; lower optimizer.lr, or resume "
                "from an earlier checkpoint"
            )


class RollBacks:
    """A decision at each step that is logged or saved: the run rolls back, or ends, if losses have become bad."""

    def __init__(self, settings: GuardSettings, guard: LossGuard | None):
        self._settings, self._guard = settings, guard
        self._num_bad, self._number = 0, 0

    def is_due(self, step: int) -> bool:
        """Return True if there were bad losses since the last call, up to `step`, and the run has to roll back.

        Raises ConfigError if the settings end the run instead. Waits for the device, if bad losses are not skipped.
        """
        settings = self._settings
        if self._guard is None or settings.policy == "skip":
            return False
        num_bad = int(self._guard.num_bad.item())
        if num_bad == self._num_bad:
            return False
        self._num_bad = num_bad
        if settings.policy == "stop" or self._number == settings.max_roll_backs:
            raise ConfigError(
                f"bad losses by step {step}: {num_bad} not finite or above guard.spike_factor={settings.spike_factor}, "
                f"after {self._number} of {settings.max_roll_backs} roll-backs (guard.policy={settings.policy}); lower "
                "optimizer.lr, or choose guard.policy=skip"
            )
        self._number += 1
        return True
