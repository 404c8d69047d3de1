"""Devices and links that are slow or compute wrong are named with their node, and such nodes are left out."""

from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from lab.measure import bandwidth, health
from lab.measure.bandwidth import DeviceRate, LinkRate
from lab.measure.health import Health, find_faults, measure, nodes_left
from lab.measure.measured_cluster import ACROSS, INSIDE
from parallel.errors import ConfigError
from parallel.world import World
from tests.ranks import run_ranks

NUM_NODES = 4
SIZES = {"cpu": (64, 2**12)}


def job(rank: int = 0, rates: dict[tuple[int, int], float] | None = None, **odd: Any) -> list[Health]:
    """Return what the ranks of four nodes of two find: one rank is odd, and links have other rates (GB/s) than 10."""
    device = DeviceRate(0, 1e12, 1e11, 1e10, 1e-6)
    found = [Health(f"n{r // 2}", r, "H100", replace(device, rank=r), [], 7, 0) for r in range(2 * NUM_NODES)]
    found[rank] = replace(found[rank], **odd)
    pairs = [(INSIDE, 2 * n, 2 * n + 1) for n in range(NUM_NODES)]
    pairs += [(ACROSS, r, (r + 2) % (2 * NUM_NODES)) for r in range(2 * NUM_NODES)]
    for axis, *ranks in pairs:
        first, second = sorted(ranks)
        rate = (rates or {}).get((first, second), 10.0)
        found[ranks[0]].links.append(LinkRate(axis, "link", (first, second), rate * 1e9))
    return found


SLOW_DEVICE = DeviceRate(3, 0.7e12, 0.7e11, 1e10, 1e-6)


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (job(), []),
        (job(3, device=SLOW_DEVICE), [("n1", "0.7 TFLOPs"), ("n1", "70 GB/s of memory")]),
        (job(3, num_wrong=2), [("n1", "2 results differ")]),
        (job(3, digest=8), [("n1", "its bits are not those of most")]),
        (job(3, digest=8, device_name="H200"), []),  # another kernel
        (job(3, device=SLOW_DEVICE, device_name="H200"), []),  # of another kind
        (job(rates={(2, 3): 1.0}), [("n1", "slow link: ranks 2, 3 on n1: 1 GB/s")]),
        (
            job(rates={(0, 2): 1.0, (2, 4): 1.0}),
            [("", "ranks 0, 2 on n0, n1"), ("", "ranks 2, 4 on n1, n2")],
        ),  # one card
        (job(rates={(0, 2): 1.0, (2, 4): 1.0, (1, 3): 1.0, (3, 5): 1.0}), [("n1", "ranks")] * 4),
        (job(rates={(2, 4): 1.0}), [("", "ranks 2, 4 on n1, n2")]),  # either end may be at fault
    ],
)
def test_what_is_slow_or_wrong_is_named_with_its_node(found, expected):
    faults = find_faults(found, None)
    assert [node for node, _ in faults] == [node for node, _ in expected]
    assert all(part in what for (_, what), (_, part) in zip(faults, expected, strict=True))


def test_nodes_at_fault_are_left_out_unless_it_is_not_known_which():
    names = ["n0:29500", "n1", "n2"]
    assert nodes_left(names, []) == names
    assert nodes_left(names, [("n0.cluster", "slow"), ("n2", "wrong")]) == ["n1"]
    for node in ("", "n7"):
        with pytest.raises(ConfigError, match="slow"):
            nodes_left(names, [(node, "slow")])


def measured() -> tuple[Health, Health]:
    """Return the measurements of this rank, and what they are if later products go wrong."""
    world = World(dist.get_rank(), 2, dist.get_rank(), 2, torch.device("cpu"))
    matmul, products = torch.Tensor.__matmul__, list[torch.Tensor]()

    def damaged(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        products.append(matmul(a, b))
        if len(products) > 4:
            products[-1][3, 5] += 1e6
        return products[-1]

    with (
        mock.patch.multiple(bandwidth, SECONDS_EACH=0.0, LINK_BYTES=2**12, SHARD_BYTES=2**10, DEVICE_SIZES=SIZES),
        mock.patch.object(health, "SECONDS_OF_PRODUCTS", {"cpu": 0.02}),
    ):
        clean = measure(world)
        with mock.patch.object(torch.Tensor, "__matmul__", damaged):
            return clean, replace(clean, num_wrong=health.repeat_product(world.device)[1])


def test_a_product_whose_bits_change_is_counted_on_real_ranks():
    clean, damaged = zip(*run_ranks(2, measured), strict=True)
    assert not [what for _, what in find_faults(clean, None) if "wrong" in what]
    assert {link.ranks for found in clean for link in found.links} == {(0, 1)}
    assert [what for _, what in find_faults(damaged, None) if "wrong" in what]
