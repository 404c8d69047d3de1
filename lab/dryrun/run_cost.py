"""Length and cost of a whole run: steps, tokens, days, GPU hours, and money if the cluster file has a price."""

import math
from dataclasses import dataclass
from typing import Self

from gpt.monitor.units import count, duration
from gpt.settings.schedule import consumed_samples_after
from gpt.settings.settings import Settings
from lab.measure.cluster import ClusterSpec
from parallel.validation.errors import ConfigError


@dataclass(frozen=True)
class RunCost:
    """The tokens, time, GPU hours and price of all steps of a run."""

    tokens: int
    seconds: float
    gpu_hours: float
    dollars: float | None  # None if the cluster has no price

    @classmethod
    def of(cls, settings: Settings, step_seconds: float, world_size: int, cluster: ClusterSpec) -> Self:
        """Return the cost of `train.steps` steps, if one with the full batch takes `step_seconds`.

        A smaller batch at the start of a run is assumed to take time in proportion. Checkpoints, evaluation and
        failures are not counted.
        """
        samples = consumed_samples_after(settings.train, settings.train.steps)
        seconds = samples / settings.train.global_batch_size * step_seconds
        gpu_hours = world_size * seconds / 3600
        price = cluster.dollars_per_gpu_hour
        return cls(samples * settings.model.seq_length, seconds, gpu_hours, price and price * gpu_hours)

    def __str__(self) -> str:
        price = "" if self.dollars is None else f", {self.dollars:,.0f} dollars"
        return f"{count(self.tokens)} tokens in {duration(self.seconds)}, {self.gpu_hours:,.0f} GPU hours{price}"


def steps_for(tokens: float, settings: Settings) -> int:
    """Return the number of steps that so many tokens take. Raise ConfigError if there are none."""
    if not 0 < tokens < math.inf:
        raise ConfigError(f"a run of {tokens:g} tokens is not possible; choose a number of tokens above 0")
    samples, train = math.ceil(tokens / settings.model.seq_length), settings.train
    steps = 0
    while (missing := samples - consumed_samples_after(train, steps)) > 0:
        steps += -(-missing // train.global_batch_size)  # exact but for smaller batches at the start
    return steps
