"""Axes of the ranks that a program has in torch's own objects."""

from dataclasses import replace

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from parallel.comm_log import CommLog
from parallel.mesh import Axis, axis_of
from parallel.torch_internals import flatten_mesh
from parallel.validation.errors import ConfigError, check_type

AxisLike = Axis | DeviceMesh | dist.ProcessGroup | None  # what `as_axis` takes


def as_axis(ranks: AxisLike, name: str = "data") -> Axis:
    """Return an axis of torch's ranks; None: of all, or this process. A ProcessGroup keeps its own time limit.

    A DeviceMesh of two dims is replicas x shards, as for `fully_shard`; it passes no time limit to its groups, which
    get that of the default group. Raises ConfigError if it has other dims, or if this rank is not one of its ranks.
    """
    if isinstance(ranks, Axis):
        return ranks
    if ranks is None and not dist.is_initialized():
        if dist.is_torchelastic_launched():
            raise ConfigError(f"{name}=None before the process group exists; call start_world or init_process_group")
        return Axis.trivial(name)
    group, log = dist.group.WORLD if ranks is None else ranks, CommLog()
    is_absent = ranks == dist.GroupMember.NON_GROUP_MEMBER
    if is_absent or (isinstance(ranks, DeviceMesh) and ranks.get_coordinate() is None):
        raise ConfigError(f"{name}: rank {dist.get_rank()} is not one of these ranks; wrap the module on those only")
    if not isinstance(ranks, DeviceMesh):
        check_type(f"`{name}`", group, dist.ProcessGroup, "give an Axis, such as `mesh.data`, a DeviceMesh or None")
        assert isinstance(group, dist.ProcessGroup)
        return axis_of(group, name, log, keeps_limit=ranks is not None)
    if ranks.ndim == 1:
        return axis_of(ranks.get_group(), name, log)
    names, numbers = ranks.mesh_dim_names, ranks.mesh.flatten().tolist()
    if ranks.ndim != 2 or not names or numbers != sorted(numbers):
        raise ConfigError(
            f"{name}={ranks}: a DeviceMesh must have one dim, or replicas x shards with `mesh_dim_names` and ranks in "
            "ascending order; choose its dims, as in mesh['replicate', 'shard']"
        )
    replica, shard = (axis_of(ranks.get_group(dim), part, log) for dim, part in enumerate(("replica", "shard")))
    return replace(axis_of(flatten_mesh(ranks, "_".join(names)), name, log), parts=(shard, replica))
