"""The learning rate as a pure function of the step, and the batch size as one of the samples consumed so far.

The progress of a run is these two integers, which advance even if an overflow skips an update.

    warm-up    lr (step + 1) / (warmup_steps + 1)        up to warmup_steps; the first rate is above zero
    cosine     half a cosine from lr to min_lr           from warmup_steps to decay_steps
    linear     a line from lr to min_lr                  from warmup_steps to decay_steps
    wsd        lr, then a line from lr to min_lr         the line takes the last wsd_decay_steps before decay_steps
    constant   lr                                        to the end
"""

import math
from collections.abc import Iterator
from typing import Annotated, Literal

from gpt.settings.training import NumSteps, TrainSettings
from parallel.validation.errors import ConfigError
from parallel.validation.fields import Range, checked


@checked
class ScheduleConfig:
    """The learning rate over the steps of a run: it rises to optimizer.lr and falls to min_lr."""

    min_lr: Annotated[float, Range(0, 1000)] = 0.0
    """Learning rate at the end of the decay, at step decay_steps and after it."""
    warmup_steps: Annotated[int, Range(0, 10**12)] = 0
    """Steps over which the learning rate rises linearly to optimizer.lr; 0: no warm-up."""
    decay: Literal["cosine", "linear", "wsd", "constant"] = "cosine"
    """Shape of the decay from optimizer.lr to min_lr; wsd: stay at optimizer.lr and fall at the end; constant: no
    decay."""
    decay_steps: NumSteps | None = None
    """Step at which min_lr is reached; null: the last step of the run."""
    wsd_decay_steps: NumSteps | None = None
    """Steps of the decay, which ends at decay_steps; for wsd only."""

    def __post_init__(self) -> None:
        if self.decay == "wsd" and not self.wsd_decay_steps:
            raise ConfigError("ScheduleConfig.wsd_decay_steps=null, and decay=wsd needs it; choose 1 or more")


def learning_rate(config: ScheduleConfig, lr: float, step: int, num_steps: int) -> float:
    """Return the learning rate of `step`, counted from 0, in a run of `num_steps` with the highest rate `lr`.

    Raises ConfigError if warm-up and decay overlap, or if min_lr is above `lr`.
    """
    start, end = _decay_span(config, num_steps)
    if config.min_lr > lr:
        raise ConfigError(f"schedule.min_lr={config.min_lr} is above optimizer.lr={lr}; lower it")
    if step < config.warmup_steps:
        return lr * (step + 1) / (config.warmup_steps + 1)
    if config.decay == "constant" or step < start:
        return lr
    if step >= end:
        return config.min_lr
    progress = (step - start) / (end - start)
    remaining = (1 + math.cos(math.pi * progress)) / 2 if config.decay == "cosine" else 1 - progress
    return config.min_lr + (lr - config.min_lr) * remaining


def rate_change(config: ScheduleConfig, lr: float, num_steps: int, step: int, rate: float) -> str | None:
    """Return a warning if these settings give another learning rate than `rate` to `step`, counted from 1, else None.

    The run has then been resumed with another schedule: if a cosine is extended, for example, the rate rises.
    """
    expected = learning_rate(config, lr, step - 1, num_steps)
    if math.isclose(expected, rate, rel_tol=1e-6):
        return None
    following = learning_rate(config, lr, step, num_steps)
    return (
        f"warning: the schedule has changed: step {step} had the learning rate {rate:.2e}, and step {step + 1} gets "
        f"{following:.2e} (these settings give {expected:.2e} to step {step}); to continue at the old rate, keep "
        "optimizer.lr and schedule.*, and set schedule.decay_steps to the old train.steps"
    )


def _decay_span(config: ScheduleConfig, num_steps: int) -> tuple[int, int]:
    """Return the step at which the decay begins and the step at which it has ended."""
    end = num_steps if config.decay_steps is None else config.decay_steps
    if config.decay == "wsd" and (config.wsd_decay_steps or 0) > end:
        raise ConfigError(
            f"schedule.wsd_decay_steps={config.wsd_decay_steps} is above the {end} steps of schedule.decay_steps or "
            f"of the run; choose {end} or less"
        )
    latest_start = end - (config.wsd_decay_steps or 0) if config.decay == "wsd" else end
    if config.warmup_steps > latest_start and config.decay != "constant":
        raise ConfigError(
            f"schedule.warmup_steps={config.warmup_steps} is above the {latest_start} steps that the {config.decay} "
            "decay leaves for it; shorten the warm-up or decay later"
        )
    return latest_start if config.decay == "wsd" else config.warmup_steps, end


def check_batch_sizes(train: TrainSettings, data_size: int) -> None:
    """Raise ConfigError unless every batch of the run divides into micro-batches over `data_size` ranks."""
    divisor = train.samples_at_once(data_size)
    named_sizes = {"global_batch_size": train.global_batch_size}
    if train.ramp_up and train.ramp_up.start < train.global_batch_size:
        named_sizes |= {"ramp_up.start": train.ramp_up.start, "ramp_up.increment": train.ramp_up.increment}
    for name, size in named_sizes.items():
        if size % divisor:
            raise ConfigError(
                f"train.{name}={size} is not divisible by train.micro_batch_size={train.micro_batch_size} x "
                f"{data_size} data-parallel ranks = {divisor}; choose {math.ceil(size / divisor) * divisor}"
            )


def global_batch_size(train: TrainSettings, consumed_samples: int) -> int:
    """Return the number of sequences in the batch that begins at sample `consumed_samples`."""
    ramp_up = train.ramp_up
    if ramp_up is None or consumed_samples >= ramp_up.samples:
        return train.global_batch_size
    num_increments = (train.global_batch_size - ramp_up.start) // ramp_up.increment
    return ramp_up.start + consumed_samples * num_increments // ramp_up.samples * ramp_up.increment


def batch_plan(train: TrainSettings, consumed_samples: int = 0) -> Iterator[tuple[int, int]]:
    """Yield (first sample, global batch size) of every step from `consumed_samples` on, without end."""
    while True:
        size = global_batch_size(train, consumed_samples)
        yield consumed_samples, size
        consumed_samples += size


def consumed_samples_after(train: TrainSettings, num_steps: int, consumed: int = 0) -> int:
    """Return the number of samples consumed after `num_steps` more steps, in as many operations as batch sizes."""
    num_done = 0
    while num_done < num_steps:
        size, next_size_from = global_batch_size(train, consumed), _end_of_size(train, consumed)
        left = num_steps - num_done
        num_equal = left if next_size_from is None else min(left, -(-(next_size_from - consumed) // size))
        num_done, consumed = num_done + num_equal, consumed + num_equal * size
    return consumed


def _end_of_size(train: TrainSettings, consumed_samples: int) -> int | None:
    """Return the smallest sample at which the batch is larger than at `consumed_samples`; None if there is none."""
    ramp_up = train.ramp_up
    if ramp_up is None or consumed_samples >= ramp_up.samples or ramp_up.start == train.global_batch_size:
        return None
    num_increments = (train.global_batch_size - ramp_up.start) // ramp_up.increment
    num_made = consumed_samples * num_increments // ramp_up.samples
    return -(-(num_made + 1) * ramp_up.samples // num_increments)
