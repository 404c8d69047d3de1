"""Cost of a whole run: tokens, days, GPU hours, and money if the cluster file has a price."""

from dataclasses import dataclass
from typing import Self

from gpt.monitor.units import count, duration
from gpt.settings.schedule import consumed_samples_after
from gpt.settings.settings import Settings
from lab.measure.cluster import ClusterSpec


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
