"""Recording how much accelerator memory each moment of a training step needs."""

from collections import defaultdict
from collections.abc import Iterable
from typing import Literal

import torch

from parallel.memory_kinds import PeakMeter
from parallel.mesh import Axis
from parallel.validation.errors import MemoryLimitError

Moment = tuple[Literal["forward", "backward", "update"], int]  # the visit of a unit, counted from the pass's beginning

UPDATE: Moment = ("update", 0)  # and all that is between an update and the first visit after it
NUM_RECORDED = 2  # steps: the first allocates buffers that stay, so the second shows what is left
GIGA = 1e9


class MemoryRecorder:
    """The peak of the accelerator's memory at each moment of the first steps, beside the budget of the configuration.

    A moment lasts until the next one begins.
    """

    def __init__(self, device: torch.device, budget_bytes: float):
        self.budget_bytes = budget_bytes
        self._num_steps_left = NUM_RECORDED
        self.meter = PeakMeter(device)
        self.moment, self._has_begun = UPDATE, False
        self.peaks: defaultdict[Moment, int] = defaultdict(int)

    @property
    def is_recording(self) -> bool:
        return self._num_steps_left > 0

    def begin_forward(self) -> None:
        """Restart the meter before a step's first forward: the memory that building the model needed has been freed."""
        if self.is_recording and not self._has_begun:
            self.meter.restart()
        self._has_begun = True

    def enter(self, moment: Moment) -> None:
        """End a moment, and begin the next."""
        if self.is_recording:
            self.peaks[self.moment] = max(self.peaks[self.moment], self.meter.peak_bytes())
            self.meter.restart()
        self.moment = moment

    def check(self, axes: Iterable[Axis]) -> int:
        """Return the bytes that are free at the tightest moment of all ranks of `axes`. Blocks the host.

        Raises MemoryLimitError if a rank has needed more than the budget.
        """
        tightest = max(self.peaks, key=lambda moment: self.peaks[moment])
        least_room = int(self.budget_bytes - self.peaks[tightest])
        for axis in axes:
            least_room = axis.min_over_ranks(least_room)
        if least_room < 0:
            raise MemoryLimitError(
                f"OffloadConfig.accelerator_memory_gb={self.budget_bytes / GIGA:g} cannot be kept: this rank needs "
                f"{self.peaks[tightest] / GIGA:.6g} GB in {' visit '.join(map(str, tightest))}, and the rank that "
                f"needs most {-least_room / GIGA:.6g} GB too much; offload more, store fewer activations, or take a "
                "smaller micro-batch"
            )
        return least_room

    def end_step(self) -> bool:
        """End a step that was recorded; return whether it was the last. The peaks of the last one stay."""
        self._num_steps_left -= 1
        self._has_begun = False
        if self.is_recording:
            self.peaks.clear()
        return not self.is_recording
