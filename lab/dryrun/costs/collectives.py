"""The time of one collective on a cluster's links: bytes at the rate of the slowest link, and the latency of hops."""

from dataclasses import dataclass
from math import ceil, log2
from typing import Self

from lab.measure.cluster import ClusterSpec
from parallel.comm_log import CommEvent
from parallel.mesh import Mesh


@dataclass(frozen=True)
class MeshShape:
    """The sizes of the mesh axes. A tensor group is a run of consecutive ranks, a data group has one rank of each."""

    data_size: int
    tensor_size: int
    shard_size: int | None = None

    @classmethod
    def of(cls, mesh: Mesh) -> Self:
        return cls(mesh.data.size, mesh.tensor.size, mesh.data.parts[0].size if mesh.data.parts else None)

    def stride(self, axis: str) -> int:
        """Return the difference between the global ranks of neighbours along the axis."""
        return {"tensor": 1, "replica": self.tensor_size * (self.shard_size or 1)}.get(axis, self.tensor_size)


@dataclass(frozen=True)
class Protocol:
    """A protocol of NCCL: its latencies, and the share of a link's rate that its messages leave for data."""

    base_seconds: float
    hop_seconds: float  # between GPUs of a node, over NVLink
    node_hop_seconds: float  # between nodes
    rate: float


# NCCL 2.8, src/graph/tuning.cc: `baseLat`, `hwLat` of NVLink and NET for rings, and the factor of LL128. NCCL takes the
# protocol that its own model, this one, says is the fastest.
RING_PROTOCOLS = Protocol(8.4e-6, 3.4e-6, 9.6e-6, 1.0), Protocol(10e-6, 1.9e-6, 4.0e-6, 0.92)
TREE_PROTOCOLS = (Protocol(4.4e-6, 1.2e-6, 8.5e-6, 0.9 * 0.915),)  # of all-reduces; LL128, its `busBw * .9`


@dataclass(frozen=True)
class Group:
    """The place of a group of ranks on the nodes of a cluster."""

    size: int
    num_nodes: int
    bytes_per_second: float  # over its slowest link

    @property
    def exchange_factor(self) -> float:
        """The bytes that an all-to-all sends between nodes, in those of a ring, which one rank of each node sends."""
        members = self.size / self.num_nodes
        return members * (self.size - members) / (self.size - 1) if self.num_nodes > 1 else 1.0


def collective_seconds(event: CommEvent, cluster: ClusterSpec, shape: MeshShape) -> float:
    """Return the time of a collective at the rate of its slowest link, and of the hops of its algorithm.

    In a ring each rank sends 1/n of the message to its neighbour n - 1 times, in an all-reduce twice as often. A
    collective inside a node takes the time that was measured for a group of this size, if there is one.
    """
    if event.group_size == 1:
        return 0.0
    is_exchange = event.op == "all_to_all"
    group = group_along(event.axis, event.group_size, cluster, shape, is_exchange=is_exchange)
    measured = cluster.collective_curves.get(f"{event.op} of {event.group_size}")
    if measured is not None and group.num_nodes == 1:
        return measured.at(max(1, event.wire_bytes))
    passes = 2 if event.op == "all_reduce" else 1
    moving = event.wire_bytes / group.bytes_per_second
    if is_exchange:
        moving *= group.exchange_factor
    if cluster.latency == "hops":
        return moving + passes * (group.size - 1) * cluster.hop_seconds
    num_inside, num_across = group.size - group.num_nodes, group.num_nodes - 1
    times = [
        moving / p.rate + p.base_seconds + passes * (num_inside * p.hop_seconds + num_across * p.node_hop_seconds)
        for p in RING_PROTOCOLS
    ]
    if event.op == "all_reduce":  # other collectives have rings only
        members, levels = group.size / group.num_nodes, log2(group.num_nodes)
        times += [
            moving / p.rate + p.base_seconds + 2 * ((members - 1) * p.hop_seconds + levels * p.node_hop_seconds)
            for p in TREE_PROTOCOLS
        ]
    return min(times)


def group_along(axis: str, size: int, cluster: ClusterSpec, shape: MeshShape, *, is_exchange: bool = False) -> Group:
    """Return the place of a group of so many ranks along an axis of the mesh; an all-to-all uses all network cards."""
    stride = shape.stride(axis)
    num_nodes = max(1, ceil(stride * size / cluster.gpus_per_node))
    inside = cluster.intra_node_gb_per_second
    if num_nodes == 1:
        return Group(size, 1, inside * 1e9)
    # All rings of one axis run at the same time and share a node's links; rings of different axes are assumed not to
    # overlap. On the paper's DGX-2 a data-parallel ring uses one network card, as Figure 4 suggests, but a tensor
    # group, which has all GPUs of a node, all of the node's, as the baseline does in Figure 2.
    num_rings = min(stride, cluster.gpus_per_node)
    rate = cluster.ring_gb_per_second(num_rings, uses_all_cards=is_exchange or axis == "tensor")
    return Group(size, min(num_nodes, size), min(rate, inside) * 1e9)
