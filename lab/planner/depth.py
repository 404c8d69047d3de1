"""Extrapolation of a deep model's dry run from two shallow ones.

The memory and the time of a step are linear in the number of layers, because all layers are equal:

    depth 4  ----x
    depth 8  --------x          the line through both, at depth 212: --------------- ... -----x

It is off by up to one bucket, because the last one is padded. Small depths may not fill the buffers of reductions in
flight, which then seem to grow with each layer: 4 GB too much for 551 layers on 1024 ranks at stage 3, where DEEPER
depths fill them. A dry run has at most three micro-batches: the first, the last, and one between them, which all
others are like. Dry runs may be kept in files, whose names have the settings and the log of kernels. Delete them after
any other change to the training step.
"""

import gzip
import hashlib
import json
import math
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import torch

from gpt.builder.closed_forms import parameters_of_rank
from gpt.settings.settings import Settings
from lab.dryrun.costs.collectives import MeshShape
from lab.dryrun.dry_run import DEVICE, HOST, dry_run, num_alike
from lab.dryrun.projection import project
from lab.measure.cluster import ClusterSpec
from lab.observe import kernel_log
from lab.observe.kernel_log import Kernel
from parallel.comm_log import CommEvent

DEPTHS = 4, 8
DEEPER = 12, 16
EVENT_FIELDS = "op", "axis", "group_size", "message_bytes", "dtype", "phase", "launched", "awaited", "sent_bytes"


@dataclass(frozen=True)
class Estimate:
    """The size of the model, and the memory and time of one rank in one step."""

    parameters: float  # of the whole model
    device_peak_bytes: float
    host_peak_bytes: float
    seconds: float
    memory: dict[str, float] = field(default_factory=dict)  # of the device's peak, by kind of tensor
    time: dict[str, float] = field(default_factory=dict)  # computing, and waiting: for each lane, by how busy it is


@dataclass(frozen=True)
class DepthExtrapolation:
    """The line through the estimates at two depths."""

    depths: tuple[int, int]
    estimates: tuple[Estimate, Estimate]

    def at(self, num_layers: float) -> Estimate:
        steps = (num_layers - self.depths[0]) / (self.depths[1] - self.depths[0])

        def on_line(one: Any, other: Any) -> Any:
            if isinstance(one, dict):
                return {name: on_line(one.get(name, 0.0), other.get(name, 0.0)) for name in one | other}
            return one + steps * (other - one)

        shallow, deeper = (vars(estimate).values() for estimate in self.estimates)
        return Estimate(*map(on_line, shallow, deeper))

    def max_layers(self, device_bytes: float, host_bytes: float = math.inf) -> int:
        """Return the most layers whose peaks fit the rank's memory on device and host; 0 if one layer does not fit."""
        zero, one = self.at(0), self.at(1)
        on_device = (device_bytes - zero.device_peak_bytes) / (one.device_peak_bytes - zero.device_peak_bytes)
        host_bytes_per_layer = one.host_peak_bytes - zero.host_peak_bytes
        on_host = (host_bytes - zero.host_peak_bytes) / host_bytes_per_layer if host_bytes_per_layer > 0 else math.inf
        return max(0, math.floor(min(on_device, on_host)))


@dataclass(frozen=True)
class ShallowRun:
    """One rank's dry run of the model with fewer layers, and perhaps with fewer micro-batches."""

    num_layers: int
    num_parameters: int  # of the whole model
    device_peak_bytes: int
    host_peak_bytes: int
    shape: MeshShape
    kernels: list[Kernel]
    events: list[CommEvent]
    num_left_out: float = 0.0  # micro-batches of a step that the dry run does not have
    memory: dict[str, float] = field(default_factory=dict)  # of the device's peak, by kind of tensor

    @classmethod
    def of(cls, settings: Settings, num_left_out: int) -> Self:
        """Run the settings dry. Raise ConfigError as `dry_run` does."""
        found = dry_run(settings)
        return cls(
            settings.model.num_layers,
            found.state.num_parameters_of_model,
            sum(found.peak[DEVICE].values()),
            sum(found.peak[HOST].values()),
            MeshShape.of(found.state.mesh),
            found.kernels,
            found.events,
            num_left_out + found.num_left_out,  # those of these settings that the dry run has left out by itself
            {str(kind): num_bytes for kind, num_bytes in found.peak[DEVICE].items()},
        )

    @classmethod
    def parse(cls, values: dict[str, Any]) -> Self:
        kernels = [Kernel(**_with_types(one, "product", "attention")) for one in values["kernels"]]
        events = [CommEvent(**_with_types(one)) for one in values["events"]]
        return cls(**(values | {"shape": MeshShape(**values["shape"]), "kernels": kernels, "events": events}))

    def as_json(self) -> dict[str, Any]:
        """Return the fields for JSON, which writes data types by their names."""
        events = [{name: getattr(one, name) for name in EVENT_FIELDS} for one in self.events]
        return vars(self) | {"shape": vars(self.shape), "kernels": list(map(vars, self.kernels)), "events": events}


def _with_types(values: dict[str, Any], *tuples: str) -> dict[str, Any]:
    """Return values read from JSON with their data type, and with some of them as tuples."""
    named = {name: values[name] and tuple(values[name]) for name in tuples}
    return values | named | {"dtype": getattr(torch, values["dtype"].removeprefix("torch."))}


def shallow_runs(
    settings: Settings, folder: Path | None = None, depths: tuple[int, int] | None = None
) -> tuple[ShallowRun, ShallowRun]:
    """Return dry runs at two depths, in the world of `settings.dry_run`; from `folder`, if it has them.

    Raise ConfigError as `dry_run` does. Their last activation checkpoint has as many layers as that of the model at
    its full depth, and their buckets have the size of its buckets.
    """
    path = path_of(settings, folder, depths) if folder else None
    if path and path.exists():
        first, second = map(ShallowRun.parse, json.loads(gzip.decompress(path.read_bytes())))
        return first, second
    num_left_out = _num_left_out(settings)
    first, second = (ShallowRun.of(chosen, num_left_out) for chosen in shallow_settings(settings, depths))
    if path:
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch = path.with_suffix(".new")  # a run that ends meanwhile leaves no file that looks complete
        text = json.dumps([first.as_json(), second.as_json()], default=str)
        scratch.write_bytes(gzip.compress(text.encode(), 1))
        scratch.replace(path)
    return first, second


def path_of(settings: Settings, folder: Path, depths: tuple[int, int] | None = None) -> Path:
    text = f"{settings} {depths or DEPTHS} {Path(kernel_log.__file__).read_text()}"
    return folder / f"{hashlib.sha256(text.encode()).hexdigest()[:20]}.json.gz"


def shallow_settings(settings: Settings, depths: tuple[int, int] | None = None) -> list[Settings]:
    settings = _with_few_micro_batches(_with_bucket_numel(settings))
    num_layers, group = settings.model.num_layers, settings.activations.layers_per_checkpoint
    numbers = (math.ceil(depth / group) * group + num_layers % group for depth in depths or DEPTHS)
    return [replace(settings, model=replace(settings.model, num_layers=number)) for number in numbers]


def _with_few_micro_batches(settings: Settings) -> Settings:
    train, num_sequences = settings.train, _sequences_of_micro_batches(settings)
    batch = train.global_batch_size - _num_left_out(settings) * num_sequences
    return replace(settings, train=replace(train, global_batch_size=batch))


def _num_left_out(settings: Settings) -> int:
    """Return the number of micro-batches of a step that dry runs leave out."""
    num_sequences, batch = _sequences_of_micro_batches(settings), settings.train.global_batch_size
    if not num_sequences or batch % num_sequences:
        return 0  # refused by the dry run, with these numbers
    num_recorded = num_alike(settings, num_sequences // settings.train.micro_batch_size)
    return max(0, batch // num_sequences - num_recorded)


def _sequences_of_micro_batches(settings: Settings) -> int:
    """Return the number of sequences in one micro-batch of all ranks."""
    assert settings.dry_run.world_size is not None
    num_sharing = settings.parallel.tensor_size * settings.parallel.context_size
    return settings.dry_run.world_size // num_sharing * settings.train.micro_batch_size


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


def extrapolate(
    runs: tuple[ShallowRun, ShallowRun], cluster: ClusterSpec, audit_share: float = 0.0
) -> DepthExtrapolation:
    """Return the extrapolation from two dry runs, whose time is projected on the cluster, with that of audits."""
    first, second = (estimate(run, cluster, audit_share) for run in runs)
    return DepthExtrapolation((runs[0].num_layers, runs[1].num_layers), (first, second))


def estimate(run: ShallowRun, cluster: ClusterSpec, audit_share: float = 0.0) -> Estimate:
    """Return the memory that was recorded, and the time that a step, with audits, is projected to take."""
    timeline = project(run.kernels, run.events, cluster, run.shape)
    seconds = timeline.seconds + run.num_left_out * timeline.micro_batch_seconds
    seconds *= 1 + audit_share
    busy = timeline.busy_seconds()
    share = busy.pop("compute", 0.0) / timeline.seconds if timeline.seconds else 0.0
    waiting = (1 - share) * seconds / (sum(busy.values()) or 1.0)
    time = {"computing": share * seconds} | {f"waiting for {lane}": waiting * busy[lane] for lane in busy}
    return Estimate(run.num_parameters, run.device_peak_bytes, run.host_peak_bytes, seconds, run.memory, time)
