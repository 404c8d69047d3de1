"""The axes of meshes, as each of 16 ranks has them, are as recorded."""

import torch.distributed as dist

from parallel.mesh import Axis, Mesh
from parallel.world import imitated_world
from tests.recordings import assert_recorded

SIZES = (
    {"tensor_size": 1},
    {"tensor_size": 4},
    {"tensor_size": 2, "shard_size": 4},
    {"tensor_size": 2, "context_size": 2},
    {"tensor_size": 2, "context_size": 2, "shard_size": 4},
    {"tensor_size": 16},
)


def ranks_of(axis: Axis) -> str:
    if axis.group is None:
        return "alone"
    return f"{axis.rank} of {dist.get_process_group_ranks(axis.group)}"


def axes_of(mesh: Mesh) -> dict[str, Axis]:
    shard_and_replica = {"shard": mesh.data.parts[0], "replica": mesh.data.parts[1]} if mesh.data.parts else {}
    return {"data": mesh.data, "tensor": mesh.tensor, "context": mesh.context} | shard_and_replica


def test_the_axes_of_each_rank_are_as_recorded():
    lines = []
    for sizes in SIZES:
        for rank in range(16):
            with imitated_world(rank, 16, local_size=8, backend="nccl"):
                mesh = Mesh.create(**sizes)
                found = ", ".join(f"{name} {ranks_of(axis)}" for name, axis in axes_of(mesh).items())
                lines.append(f"{sizes}, rank {rank} of {mesh.size}, {mesh.num_batch_ranks} batches: {found}")
    assert_recorded("meshes", *lines)
