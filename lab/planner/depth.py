"""Extrapolation of a deep model's dry run from two shallow ones.

The memory and the time of a step are linear in the number of layers, because all layers are equal:

    depth 4  ----x
    depth 8  --------x          the line through both, at depth 212: --------------- ... -----x

The extrapolation is off by up to one bucket: the last bucket is padded, and at small depths the reductions in flight
do not fill their buffers yet.

A dry run has at most three micro-batches: the first, the last, and one between them, which all others are like. They
need no more memory than their tokens.
"""

import math
from dataclasses import dataclass, replace

from gpt.builder.closed_forms import parameters_of_rank
from gpt.settings.settings import Settings
from lab.dryrun.dry_run import DEVICE, HOST, MAX_MICRO_BATCHES, Recording, dry_run
from lab.dryrun.projection import project_recording
from lab.measure.cluster import ClusterSpec

DEPTHS = 4, 8


@dataclass(frozen=True)
class Estimate:
    """The size of the model, and the memory and time of one rank in one step."""

    parameters: float  # of the whole model
    device_peak_bytes: float
    device_resident_bytes: float
    host_peak_bytes: float
    seconds: float


@dataclass(frozen=True)
class DepthExtrapolation:
    """The line through the estimates at two depths."""

    depths: tuple[int, int]
    estimates: tuple[Estimate, Estimate]

    def at(self, num_layers: float) -> Estimate:
        """Return the estimate for a model of `num_layers` layers."""
        shallow, deeper = (vars(estimate).values() for estimate in self.estimates)
        steps = (num_layers - self.depths[0]) / (self.depths[1] - self.depths[0])
        return Estimate(*(a + steps * (b - a) for a, b in zip(shallow, deeper, strict=True)))

    def max_layers(self, device_bytes: float, host_bytes: float = math.inf) -> int:
        """Return the most layers whose peaks fit the rank's memory on device and host; 0 if one layer does not fit."""
        zero, one = self.at(0), self.at(1)
        on_device = (device_bytes - zero.device_peak_bytes) / (one.device_peak_bytes - zero.device_peak_bytes)
        host_bytes_per_layer = one.host_peak_bytes - zero.host_peak_bytes
        on_host = (host_bytes - zero.host_peak_bytes) / host_bytes_per_layer if host_bytes_per_layer > 0 else math.inf
        return max(0, math.floor(min(on_device, on_host)))


@dataclass(frozen=True)
class ShallowRun:
    """A dry run of the model with fewer layers, and perhaps with fewer micro-batches."""

    num_layers: int
    recording: Recording
    num_left_out: int = 0  # micro-batches of a step that the dry run does not have


def shallow_runs(settings: Settings) -> tuple[ShallowRun, ShallowRun]:
    """Return dry runs at two depths, in the world of `settings.dry_run`. Raise ConfigError as `dry_run` does.

    Their last activation checkpoint has as many layers as that of the model at its full depth, and their buckets have
    the size of its buckets.
    """
    settings, num_left_out = _with_few_micro_batches(_with_bucket_numel(settings))
    num_layers, group = settings.model.num_layers, settings.activations.layers_per_checkpoint
    models = (
        replace(settings.model, num_layers=math.ceil(depth / group) * group + num_layers % group) for depth in DEPTHS
    )
    first, second = (
        ShallowRun(model.num_layers, dry_run(replace(settings, model=model)), num_left_out) for model in models
    )
    return first, second


def _with_few_micro_batches(settings: Settings) -> tuple[Settings, int]:
    """Return the settings with at most MAX_MICRO_BATCHES in a step, and the number of those that are left out."""
    assert settings.dry_run.world_size is not None
    parallel, train = settings.parallel, settings.train
    num_batch_ranks = settings.dry_run.world_size // (parallel.tensor_size * parallel.context_size)
    num_sequences = train.micro_batch_size * num_batch_ranks
    if not num_sequences or train.global_batch_size % num_sequences:  # refused by the dry run, with these numbers
        return settings, 0
    num_left_out = max(0, train.num_micro_batches(num_batch_ranks) - MAX_MICRO_BATCHES)
    batch = train.global_batch_size - num_left_out * num_sequences
    return replace(settings, train=replace(train, global_batch_size=batch)), num_left_out


def _with_bucket_numel(settings: Settings) -> Settings:
    """Return the settings with the bucket size that `auto` stands for at the full depth."""
    assert settings.dry_run.world_size is not None
    tensor_size = settings.parallel.tensor_size
    data_size = settings.dry_run.world_size // tensor_size
    if settings.zero.bucket_numel != "auto" or not data_size:
        return settings
    zero = settings.with_gradient_types(data_size).zero
    numel = zero.chosen_bucket_numel(parameters_of_rank(settings.model, tensor_size), data_size, settings.train.dtype)
    return replace(settings, zero=replace(settings.zero, bucket_numel=numel))


def extrapolate(runs: tuple[ShallowRun, ShallowRun], cluster: ClusterSpec) -> DepthExtrapolation:
    """Return the extrapolation from two dry runs, whose time is projected on the cluster."""
    first, second = (estimate(run, cluster) for run in runs)
    return DepthExtrapolation((runs[0].num_layers, runs[1].num_layers), (first, second))


def estimate(run: ShallowRun, cluster: ClusterSpec) -> Estimate:
    """Return the memory that was recorded, and the time that a step is projected to take on the cluster."""
    recording, timeline = run.recording, project_recording(run.recording, cluster)
    return Estimate(
        recording.state.num_parameters_of_model,
        sum(recording.peak[DEVICE].values()),
        sum(recording.resident[DEVICE].values()),
        sum(recording.peak[HOST].values()),
        timeline.seconds + run.num_left_out * timeline.micro_batch_seconds,
    )
