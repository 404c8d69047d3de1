"""Two shallow dry runs instead of a deep one: memory and time of a step are linear in the number of equal layers.

    depth 4  ----x
    depth 8  --------x          a line through both, read at depth 212: --------------- ... -----x

What is rounded (the last bucket) or takes a while to fill (reductions in flight) makes a difference of one bucket.
"""

import math
from dataclasses import dataclass, replace

from gpt.planner.dry_run import Recording, dry_run
from gpt.planner.report import DEVICE, HOST, projected
from gpt.settings import Settings
from parallel.launch.cluster import ClusterSpec

DEPTHS = 4, 8


@dataclass(frozen=True)
class Estimate:
    """Of one rank and one step."""

    parameters: float  # of the whole model
    device_peak_bytes: float
    device_resident_bytes: float
    host_peak_bytes: float
    seconds: float
    compute_seconds: float


@dataclass(frozen=True)
class Line:
    """The step at any depth, from two."""

    depths: tuple[int, int]
    estimates: tuple[Estimate, Estimate]

    def at(self, num_layers: float) -> Estimate:
        shallow, deeper = (vars(estimate).values() for estimate in self.estimates)
        steps = (num_layers - self.depths[0]) / (self.depths[1] - self.depths[0])
        return Estimate(*(a + steps * (b - a) for a, b in zip(shallow, deeper, strict=True)))

    def deepest(self, room_bytes: float, host_room_bytes: float = math.inf) -> int:
        """Layers whose peaks are within the room on the device and on the host; 0 where not even one layer's are."""
        none, one = self.at(0), self.at(1)
        on_device = (room_bytes - none.device_peak_bytes) / (one.device_peak_bytes - none.device_peak_bytes)
        per_layer = one.host_peak_bytes - none.host_peak_bytes
        on_host = (host_room_bytes - none.host_peak_bytes) / per_layer if per_layer > 0 else math.inf
        return max(0, math.floor(min(on_device, on_host)))


@dataclass(frozen=True)
class ShallowRun:
    """A dry run of the same settings with fewer layers."""

    settings: Settings
    recording: Recording


def draw_line(settings: Settings, cluster: ClusterSpec) -> Line:
    """`settings.dry_run` names the world. Raises ConfigError as a dry run does."""
    return line_through(shallow_runs(settings), cluster)


def shallow_runs(settings: Settings) -> tuple[ShallowRun, ShallowRun]:
    num_layers, group = settings.model.num_layers, settings.activations.layers_per_checkpoint
    # The last checkpoint is as full as at depth.
    first, second = (math.ceil(depth / group) * group + num_layers % group for depth in DEPTHS)
    return run_at(first, settings), run_at(second, settings)


def run_at(depth: int, settings: Settings) -> ShallowRun:
    shallow = replace(settings, model=replace(settings.model, num_layers=depth))
    return ShallowRun(shallow, dry_run(shallow))


def line_through(runs: tuple[ShallowRun, ShallowRun], cluster: ClusterSpec) -> Line:
    first, second = (estimate(run.recording, run.settings, cluster) for run in runs)
    return Line((runs[0].settings.model.num_layers, runs[1].settings.model.num_layers), (first, second))


def estimate(recording: Recording, settings: Settings, cluster: ClusterSpec) -> Estimate:
    timeline = projected(recording, cluster, settings)
    return Estimate(
        recording.state.num_parameters_of_model,
        sum(recording.peak[DEVICE].values()),
        sum(recording.resident[DEVICE].values()),
        sum(recording.peak[HOST].values()),
        timeline.seconds,
        timeline.busy_seconds().get("compute", 0.0),
    )
