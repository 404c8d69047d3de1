"""A check of the devices and links of a job before it starts: what is slow, or computes wrong, is named.

    torchrun ... -m lab.measure.health [--nodes n1,n2,n3] [--expect FILE]

The exit code is 2 if anything is. With --nodes, the names of all nodes, the nodes at fault are left out instead: one
rank of each other node prints the names of those that are left. It takes about a minute.
"""

import argparse
import json
import socket
import statistics
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from lab.measure import bandwidth
from lab.measure.bandwidth import SLOW_DEVICE, DeviceRate, LinkRate
from lab.measure.cluster import ClusterSpec
from lab.measure.measured_cluster import BYTES_PER_GB
from parallel.errors import ConfigError
from parallel.mesh import Mesh
from parallel.store import shared_store
from parallel.world import StartOptions, World, exit_with_error, start_world, stop_world

SECONDS_OF_PRODUCTS = {"cpu": 1.0, "cuda": 20.0}  # a device that is hot is slower, and makes more errors
LEFT = "nodes left: "  # before their names, for launchers: other libraries print too
HANG_SECONDS = 200.0  # a third of the time after which a collective fails
PRODUCTS_TOGETHER = 8  # between two reads of the clock


@dataclass(frozen=True)
class Health:
    """The measurements of one rank: of `num_wrong` repeated products the bits were not those of the first one."""

    node: str
    rank: int
    device_name: str
    device: DeviceRate
    links: list[LinkRate]  # inside nodes, then across
    digest: int  # of the bits of the product
    num_wrong: int


def measure(world: World) -> Health:
    """Measure links, then all devices at once. All ranks must call this."""
    mesh = Mesh.create(world.local_size, world.device.type)
    links = bandwidth.measure_mesh(mesh, world.device)
    mesh.barrier()
    digest, num_wrong = repeat_product(world.device)
    device = bandwidth.measure_device(world.rank, world.device)  # while it is hot
    is_gpu = world.device.type == "cuda"
    name = torch.cuda.get_device_name(world.device) if is_gpu else "cpu"
    return Health(socket.gethostname(), world.rank, name, device, links, digest, num_wrong)


def repeat_product(device: torch.device) -> tuple[int, int]:
    """Repeat one product for some seconds; return (a digest of its bits, how many results had other bits)."""
    size, _ = bandwidth.DEVICE_SIZES[device.type]
    random = torch.Generator().manual_seed(0)
    # Integers, which have the same bits on every host.
    a, b = (torch.randint(-128, 129, (size, size), generator=random).to(device, torch.bfloat16) for _ in range(2))
    first, num_wrong = a @ b, torch.zeros((), dtype=torch.int64, device=device)
    end = time.monotonic() + SECONDS_OF_PRODUCTS[device.type]
    while True:
        for _ in range(PRODUCTS_TOGETHER):
            num_wrong += ((a @ b).view(torch.int16) != first.view(torch.int16)).any()
        bandwidth.synchronize(device)
        if time.monotonic() >= end:
            break
    return int(first.view(torch.int16).sum(dtype=torch.int64)), int(num_wrong)


def find_faults(by_rank: Sequence[Health], expected: ClusterSpec | None) -> list[tuple[str, str]]:
    """Return (node, what is slow or wrong there). The node is empty for a link of which either end may be at fault."""
    node_of = {found.rank: found.node for found in by_rank}
    faults = [fault for found in by_rank for fault in _wrong_products(found, by_rank)]
    for name in {found.device_name for found in by_rank}:
        alike = [found.device for found in by_rank if found.device_name == name]
        faults += [
            (node_of[rank], f"slow device: rank {rank}: {what}") for rank, what in _slow_devices(alike, expected)
        ]
    links = [(link, {node_of[rank] for rank in link.ranks}) for found in by_rank for link in found.links]
    slow = {id(link) for alike in _comparable(links) for link in bandwidth.slow_links(alike)}
    across = [(link, nodes) for link, nodes in links if len(nodes) == 2]
    for link, nodes in [(link, nodes) for link, nodes in links if id(link) in slow]:
        # A node of which all links to others are slow, if that is not so of the other end too; or the only node.
        at_fault = [n for n in nodes if len(nodes) == 1 or all(id(own) in slow for own, pair in across if n in pair)]
        ranks, rate = ", ".join(map(str, link.ranks)), link.bytes_per_second / BYTES_PER_GB
        what = f"slow {link.what}: ranks {ranks} on {', '.join(sorted(nodes))}: {rate:.3g} GB/s"
        faults.append((at_fault[0] if len(at_fault) == 1 else "", what))
    return faults


def _slow_devices(devices: Sequence[DeviceRate], expected: ClusterSpec | None) -> Iterator[tuple[int, str]]:
    """Yield (rank, a rate) of what is slow among devices of one kind."""
    peak = expected.peak_half_tflops * expected.gemm_fraction * 1e12 if expected else 0.0
    for device in bandwidth.slow_devices(devices, peak):
        yield device.rank, f"{device.flops_per_second / 1e12:.3g} TFLOPs"
    least = SLOW_DEVICE * statistics.median_high(device.memory_bytes_per_second for device in devices)
    for device in devices:
        if device.memory_bytes_per_second < least:
            yield device.rank, f"{device.memory_bytes_per_second / BYTES_PER_GB:.3g} GB/s of memory"


def _comparable(links: Sequence[tuple[LinkRate, set[str]]]) -> list[list[LinkRate]]:
    """Return links that should have one rate: inside nodes those of the same places, as GPUs may not be alike there."""
    ranks_of = defaultdict[str, set[int]](set)
    for link, nodes in links:
        if len(nodes) == 1:
            ranks_of[min(nodes)].update(link.ranks)
    alike = defaultdict[object, list[LinkRate]](list)
    for link, nodes in links:
        first = min(ranks_of[min(nodes)], default=0)
        alike[link.what, tuple(rank - first for rank in link.ranks) if len(nodes) == 1 else None].append(link)
    return list(alike.values())


def _wrong_products(found: Health, by_rank: Sequence[Health]) -> list[tuple[str, str]]:
    alike = Counter(other.digest for other in by_rank if other.device_name == found.device_name)
    if found.num_wrong:
        return [(found.node, f"wrong product: rank {found.rank}: {found.num_wrong} results differ from its first")]
    if alike[found.digest] < max(alike.values()):
        return [(found.node, f"wrong product: rank {found.rank}: its bits are not those of most ranks")]
    return []


def nodes_left(names: Sequence[str], faults: Sequence[tuple[str, str]]) -> list[str]:
    """Return the names of the nodes without faults. Raises ConfigError if a fault cannot be left out by its node."""
    left = list(names)
    for node, what in faults:
        own = [name for name in names if name.partition(":")[0] in (node, node.split(".")[0])]
        if not own:
            raise ConfigError(f"health: {node or 'two nodes'}: {what}; leave out a node by hand")
        left = [name for name in left if name not in own]
    return left


def check(names: Sequence[str], expected: ClusterSpec | None) -> None:
    """Measure, and raise ConfigError on all ranks if something is slow or wrong, or print the nodes that are left."""
    world = start_world(StartOptions(hang_seconds=HANG_SECONDS))
    store = shared_store()
    if by_rank := bandwidth.gathered(measure(world), world):
        store.set("health/faults", json.dumps(find_faults(by_rank, expected)))
    faults = [(node, what) for node, what in json.loads(store.get("health/faults"))]
    if faults and not names:
        raise ConfigError("health: " + "\n  ".join(f"{node or 'either node'}: {what}" for node, what in faults))
    left = nodes_left(names, faults)
    if names and not left:
        raise ConfigError("health: all nodes are at fault: " + "; ".join(f"{node}: {what}" for node, what in faults))
    if world.is_first:
        sys.stderr.write(
            "".join(f"health: {node} is left out: {what}\n" for node, what in faults) or "health: all are well\n"
        )
    if world.local_rank == 0 and names and socket.gethostname() not in {node for node, _ in faults}:
        sys.stdout.write(f"{LEFT}{','.join(left)}\n")
    stop_world()


def main(words: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m lab.measure.health", description=__doc__)
    parser.add_argument("--nodes", default="", help="names of all nodes, separated by commas")
    parser.add_argument("--expect", help="cluster file: a device with less than half of its rate is slow")
    options = parser.parse_args(words)
    expected = ClusterSpec.load(options.expect) if options.expect else None
    check([name for name in options.nodes.split(",") if name], expected)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except ConfigError as error:
        exit_with_error(error)
