"""A check of the devices and links of a job before it starts: what is slow, or computes wrong, is named.

    torchrun ... -m lab.measure.health [--nodes n1,n2,n3]

The exit code is 2 if anything is. With --nodes, the names of all nodes, the nodes at fault are left out instead: one
rank of each other node prints the names of those that are left. It takes about a minute.
"""

import argparse
import json
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from socket import gethostname
from statistics import median_high

import torch

from lab.measure import bandwidth
from lab.measure.bandwidth import BYTES_PER_GB, LinkRate, Rates
from parallel.mesh import Mesh
from parallel.store import shared_store
from parallel.validation.errors import ConfigError
from parallel.world import StartOptions, World, exit_as_rank, start_world

SECONDS_OF_PRODUCTS = {"cpu": 1.0, "cuda": 20.0}  # a device that is hot is slower, and makes more errors
LEFT = "nodes left: "  # before their names, for launchers: other libraries print too
HANG_SECONDS = 200.0  # a third of the time after which a collective fails
PRODUCTS_TOGETHER = 8  # between two reads of the clock
# A rate is slow below these fractions of the median of comparable links or devices, or of the rate that is expected.
SLOW_LINK, SLOW_DEVICE, SLOW_FOR_CLUSTER = 0.7, 0.8, 0.5

Fault = tuple[str, str]  # (node, what is slow or wrong there); no node for a link of which either end may be at fault


@dataclass(frozen=True)
class Health:
    """The measurements of one rank: of `num_wrong` repeated products the bits were not those of the first one."""

    rates: Rates
    digest: int  # of the bits of the product
    num_wrong: int


def measure(world: World) -> Health:
    """Measure links, then all devices at once. All ranks must call this."""
    mesh = Mesh.create(world.local_size, world.device.type)
    links = bandwidth.measure_mesh(mesh, world.device)
    mesh.barrier()
    digest, num_wrong = repeat_product(world.device)
    device = bandwidth.measure_device(world.device)  # while it is hot
    return Health(Rates.of(world, device, links), digest, num_wrong)


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


def slow_links(
    links: Sequence[LinkRate],
    kind_of: Callable[[LinkRate], object],
    expected: Callable[[LinkRate], float] = lambda link: 0.0,
) -> list[LinkRate]:
    """Return the links far below the median of their kind, or below half of the bytes per second that are expected."""
    kinds = defaultdict[object, list[float]](list)
    for link in links:
        kinds[kind_of(link)].append(link.bytes_per_second)
    limits = {kind: SLOW_LINK * median_high(rates) for kind, rates in kinds.items()}
    return [
        link for link in links if link.bytes_per_second < max(limits[kind_of(link)], SLOW_FOR_CLUSTER * expected(link))
    ]


def describe_link(link: LinkRate, node_of: Mapping[int, str]) -> str:
    ranks, nodes = ", ".join(map(str, link.ranks)), ", ".join(dict.fromkeys(node_of[rank] for rank in link.ranks))
    return f"slow {link.what}: ranks {ranks} on {nodes}: {link.bytes_per_second / BYTES_PER_GB:.3g} GB/s"


def slow_devices(by_rank: Sequence[Rates], expected_flops: float = 0.0) -> list[Fault]:
    """Return the devices far below the median of those of one name, or below half of what is expected."""
    faults, kinds = [], defaultdict[str, list[Rates]](list)
    for found in by_rank:
        kinds[found.device_name].append(found)
    for alike in kinds.values():
        median_flops = median_high(found.device.flops_per_second for found in alike)
        least_flops = max(SLOW_DEVICE * median_flops, SLOW_FOR_CLUSTER * expected_flops)
        least_bytes = SLOW_DEVICE * median_high(found.device.memory_bytes_per_second for found in alike)
        for found in alike:
            flops, num_bytes = found.device.flops_per_second, found.device.memory_bytes_per_second
            name = f"slow device: rank {found.rank} on {found.node}"
            if flops < least_flops:
                faults.append((found.node, f"{name}: {flops / 1e12:,.4g} TFLOPs"))
            if num_bytes < least_bytes:
                faults.append((found.node, f"{name}: {num_bytes / BYTES_PER_GB:,.4g} GB/s of memory"))
    return faults


def find_faults(by_rank: Sequence[Health]) -> list[Fault]:
    """Return what is slow or wrong."""
    rates = [found.rates for found in by_rank]
    faults = [fault for found in by_rank for fault in _wrong_products(found, by_rank)] + slow_devices(rates)
    node_of, first_of = {found.rank: found.node for found in rates}, dict[str, int]()
    for found in rates:
        first_of.setdefault(found.node, found.rank)
    links = [link for found in rates for link in found.links]
    nodes_of = {link: {node_of[rank] for rank in link.ranks} for link in links}

    def kind_of(link: LinkRate) -> object:
        """Compare links inside nodes with those of the same places, as GPUs may not be alike there."""
        first = first_of[node_of[link.ranks[0]]]
        is_inside = len(nodes_of[link]) == 1
        return link.what, tuple(rank - first for rank in link.ranks) if is_inside else None

    slow = slow_links(links, kind_of)
    across = [link for link in links if len(nodes_of[link]) == 2]
    for link in slow:
        # A node of which all links to others are slow, if that is not so of the other end too; or the only node.
        nodes = nodes_of[link]
        at_fault = [n for n in nodes if len(nodes) == 1 or all(own in slow for own in across if n in nodes_of[own])]
        faults.append((at_fault[0] if len(at_fault) == 1 else "", describe_link(link, node_of)))
    return faults


def _wrong_products(found: Health, by_rank: Sequence[Health]) -> list[Fault]:
    own = found.rates
    alike = Counter(other.digest for other in by_rank if other.rates.device_name == own.device_name)
    if found.num_wrong:
        return [(own.node, f"wrong product: rank {own.rank}: {found.num_wrong} results differ from its first")]
    if alike[found.digest] < max(alike.values()):
        return [(own.node, f"wrong product: rank {own.rank}: its bits are not those of most ranks")]
    return []


def nodes_left(names: Sequence[str], faults: Sequence[Fault]) -> list[str]:
    """Return the names of the nodes without faults. Raises ConfigError if a fault cannot be left out by its node."""
    left = list(names)
    for node, what in faults:
        own = [name for name in names if name.partition(":")[0] in (node, node.split(".")[0])]
        if not own:
            raise ConfigError(f"health: {node or 'two nodes'}: {what}; leave out a node by hand")
        left = [name for name in left if name not in own]
    return left


def check(names: Sequence[str]) -> None:
    """Measure, and raise ConfigError on all ranks if something is slow or wrong, or print the nodes that are left."""
    world = start_world(StartOptions(hang_seconds=HANG_SECONDS))
    store = shared_store()
    if by_rank := bandwidth.gathered(measure(world), world):
        store.set("health/faults", json.dumps(find_faults(by_rank)))
    store.wait(["health/faults"])
    faults = [(node, what) for node, what in json.loads(store.get("health/faults"))]
    if faults and not names:
        raise ConfigError("health: " + "\n  ".join(f"{node or 'either node'}: {what}" for node, what in faults))
    left = nodes_left(names, faults)
    if names and not left:
        raise ConfigError("health: all nodes are at fault: " + "; ".join(f"{node}: {what}" for node, what in faults))
    if world.is_first:
        lines = [f"health: {node} is left out: {what}\n" for node, what in faults]
        sys.stderr.write("".join(lines) or "health: all are well\n")
    if world.local_rank == 0 and names and gethostname() not in {node for node, _ in faults}:
        sys.stdout.write(f"{LEFT}{','.join(left)}\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m lab.measure.health", description=__doc__)
    parser.add_argument("--nodes", default="", help="names of all nodes, separated by commas")
    with exit_as_rank():
        check([name for name in parser.parse_args().nodes.split(",") if name])
