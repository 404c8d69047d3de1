"""A check, before anything is allocated, that a node's memory can hold what its ranks place there.

offloaded states          pinned; the moments, which torch's optimizer allocates, are not
activation checkpoints    pinned, with the store partition_host
copies for saves          of what a rank saves, if checkpoints are written while training goes on; pinned. Snapshots
                          have a copy of their own
snapshots                 two generations of what a rank saves, each on its node and, of several nodes, on a second one
"""

import math
import os
from collections.abc import Callable
from dataclasses import astuple, dataclass, replace

from gpt.builder.closed_forms import moment_bytes, parameters_of_rank
from gpt.builder.train_state import token_layout
from gpt.settings.settings import Settings
from parallel.host_memory import available_bytes, pinned_bytes
from parallel.mesh import Mesh
from parallel.torch_internals import largest_rounded_pinned_bytes
from parallel.validation.errors import ConfigError, NodeError
from parallel.world import World
from zero.activations.stores import stored_bytes
from zero.chosen import transport_of
from zero.core.partition.stage import Lifetime

MASTER_BYTES = 4  # of an element
GENERATIONS = 2  # of snapshots that exist at the same time


@dataclass(frozen=True)
class HostBytes:
    """The bytes of host memory that one rank needs, by purpose."""

    states: float
    activations: float
    saves: float
    snapshots: float = 0.0

    @property
    def total(self) -> float:
        return sum(astuple(self))


def check_host_memory(settings: Settings, mesh: Mesh, world: World) -> None:
    """Raise ConfigError if the node's available memory is too small for a run with these settings."""
    largest_rounded = largest_rounded_pinned_bytes() if world.device.type == "cuda" else 0
    num_nodes = world.size // world.local_size
    needed = bytes_on_host(settings, mesh, lambda num_bytes: pinned_bytes(num_bytes, largest_rounded), num_nodes)
    available, size = available_bytes(), world.local_size
    if settings.checkpoint.snapshot_every:
        available += _check_snapshot_dir(settings, needed.snapshots * size)  # the old ones are replaced
    if needed.total * size > available:
        purposes = {
            f"offload.mode={settings.offload.mode} %s of model states": needed.states,
            f"activations.store={settings.activations.store} %s of checkpoints": needed.activations,
            "checkpoint.asynchronous=true %s of copies": needed.saves,
            "checkpoint.snapshot_every %s of snapshots": needed.snapshots,
        }
        parts = [text % f"{num_bytes * size / 1e9:,.1f} GB" for text, num_bytes in purposes.items() if num_bytes]
        raise ConfigError(
            f"this run places in the memory of this node ({size} ranks): {', '.join(parts)}; "
            f"{available / 1e9:,.1f} GB are free, {(needed.total * size - available) / 1e9:,.1f} GB too little; use "
            "more nodes, a higher zero.stage, fewer offload.states, or checkpoint.asynchronous=false"
        )


def _check_snapshot_dir(settings: Settings, needed: float) -> int:
    """Return the bytes of the run's old snapshots. Raises ConfigError if new ones do not fit in their place."""
    save = settings.checkpoint
    folder = save.snapshot_folder(settings.run.dir)
    held = sum(path.stat().st_blocks * 512 for path in folder.rglob("*") if path.is_file())
    mount = os.statvfs(next(path for path in (folder, *folder.absolute().parents) if path.exists()))
    room = mount.f_bavail * mount.f_frsize + held
    if needed > room:
        raise NodeError(
            f"checkpoint.snapshot_every={save.snapshot_every} places {needed / 1e9:,.3f} GB of snapshots in the memory "
            f"of this node, and checkpoint.snapshot_dir={save.snapshot_dir} has {room / 1e9:,.3f} GB free; give the "
            "container more, such as with --shm-size, use more nodes, or choose checkpoint.snapshot_every=0"
        )
    return held


def bytes_on_host(settings: Settings, mesh: Mesh, allocated: Callable[[float], float], num_nodes: int = 1) -> HostBytes:
    """Return the bytes that one rank places in host memory; with offload.mode=auto, an upper bound.

    `allocated` returns the size of an allocation of pinned memory. The moments of a bucket are copied as one tensor
    here; a save copies those of each parameter.
    """
    settings = settings.with_gradient_types(mesh.data.size)
    zero, itemsize, states = settings.zero, settings.train.dtype.itemsize, settings.offload.offloaded_states
    policy = zero.policy
    transport = transport_of(zero, mesh.data)
    moments = moment_bytes(settings.optimizer, settings.model, mesh.tensor.size)
    # Bytes of an element: of each state that has an allocation of its own, and of the others
    in_group: list[float] = []
    pinned: list[float] = []
    pageable = 0.0
    has_parameters = "parameters" in states and policy.full_params is Lifetime.TRANSIENT
    if has_parameters:
        in_group.append(itemsize)
    if "optimizer" in states:
        in_group.append(zero.gradient_types(settings.train.dtype).accumulate.itemsize)
        # Parameters in fp32 are their own master weights, if both are in the same memory.
        pinned += [] if has_parameters and itemsize == MASTER_BYTES else [MASTER_BYTES]
        pageable = moments
    save = settings.checkpoint
    num_copies = save.is_async + bool(save.snapshot_every)
    saved = [MASTER_BYTES, moments / 2, moments / 2] if transport.replicas.rank == 0 else []
    group_shards, shards = (_shards(settings, mesh, axis.size) for axis in (transport.gathered_along, transport.owners))
    of_group = sum(n * sum(allocated(numel * each) for each in in_group) for numel, n in group_shards)
    own = sum(n * (numel * pageable + sum(allocated(numel * each) for each in pinned)) for numel, n in shards)
    num_generations = GENERATIONS * min(num_nodes, 2) if save.snapshot_every else 0
    return HostBytes(
        states=of_group + own,
        activations=allocated(_checkpoint_bytes(settings, mesh)),
        saves=num_copies * sum(n * sum(allocated(numel * each) for each in saved) for numel, n in shards),
        snapshots=num_generations * sum(saved) * sum(n * numel for numel, n in shards),
    )


def _shards(settings: Settings, mesh: Mesh, shard_size: int) -> list[tuple[int, int]]:
    """Return (elements, how many there are) of a rank's shards of buckets, without the gaps between parameters."""
    model, tensor_size = settings.model, mesh.tensor.size
    total = parameters_of_rank(model, tensor_size)
    bucket_numel = settings.zero.chosen_bucket_numel(total, mesh.data.size, settings.train.dtype)
    units = [(total, 1)]
    if settings.zero.policy.full_params is Lifetime.TRANSIENT:  # then a bucket ends with its unit
        one, two = (parameters_of_rank(replace(model, num_layers=number), tensor_size) for number in (1, 2))
        units = [(2 * one - two, 1), (two - one, model.num_layers)]
    shards = []
    for numel, num_units in units:
        num_full, rest = divmod(numel, bucket_numel)
        shards += [(math.ceil(bucket_numel / shard_size), num_full * num_units)]
        shards += [(math.ceil(rest / shard_size), num_units)]
    return shards


def _checkpoint_bytes(settings: Settings, mesh: Mesh) -> int:
    """Return the bytes of the activation checkpoints of one micro-batch in host memory."""
    activations, model, train = settings.activations, settings.model, settings.train
    if activations.store != "partition_host":
        return 0
    num_parts = mesh.tensor.size if settings.parallel.sequence_parallel else 1
    numel = train.micro_batch_size * model.seq_length // num_parts * model.hidden_size
    num_checkpoints = math.ceil(model.num_layers / activations.layers_per_checkpoint)
    num_replicas = token_layout(settings.parallel, mesh).replicas.size
    return stored_bytes(activations.store, num_checkpoints, numel, train.dtype.itemsize, num_replicas).host
