"""Devices and links that are slow or compute wrong are named with their node, and such nodes are left out."""

from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from lab.measure import bandwidth, health
from lab.measure.bandwidth import DeviceRate, LinkRate, Rates
from lab.measure.health import Health, find_faults, measure, nodes_left, slow_devices, slow_links
from lab.measure.measured_cluster import ACROSS, INSIDE
from parallel.validation.errors import ConfigError
from parallel.world import World
from tests.ranks import run_ranks

NUM_NODES = 4
SIZES = {"cpu": (64, 2**12)}
DEVICE = DeviceRate(1e12, 1e11, 1e10, 1e-6)


def job(rank: int = 0, rates: dict[tuple[int, int], float] | None = None, **odd: Any) -> list[Health]:
    """Return what the ranks of four nodes of two find: one rank is odd, and links have other rates (GB/s) than 10."""
    found = [Health(Rates(f"n{r // 2}", r, "H100", DEVICE, []), 7, 0) for r in range(2 * NUM_NODES)]
    of_rates = {name: odd.pop(name) for name in ("device", "device_name") if name in odd}
    found[rank] = replace(found[rank], rates=replace(found[rank].rates, **of_rates), **odd)
    pairs = [(INSIDE, 2 * n, 2 * n + 1) for n in range(NUM_NODES)]
    pairs += [(ACROSS, r, (r + 2) % (2 * NUM_NODES)) for r in range(2 * NUM_NODES)]
    for axis, *ranks in pairs:
        first, second = sorted(ranks)
        rate = (rates or {}).get((first, second), 10.0)
        found[ranks[0]].rates.links.append(LinkRate(axis, "link", (first, second), rate * 1e9))
    return found


SLOW_DEVICE = DeviceRate(0.7e12, 0.7e11, 1e10, 1e-6)


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
    faults = find_faults(found)
    assert [node for node, _ in faults] == [node for node, _ in expected]
    assert all(part in what for (_, what), (_, part) in zip(faults, expected, strict=True))


def test_slow_links_are_those_far_below_the_median_of_their_kind_or_the_expected():
    def slow(*gb_per_second: float, expected: float = 0.0) -> list[int]:
        links = [LinkRate("data", "link", (rank, rank + 1), rate * 1e9) for rank, rate in enumerate(gb_per_second)]
        links.append(LinkRate("data", "all_gather", (0, 1), 1e9))
        return [link.ranks[0] for link in slow_links(links, lambda link: link.what, lambda _: expected)]

    assert slow(10, 9, 6, 10) == [2]
    assert slow(10, 6.9) == [1]
    assert slow(10, 7) == slow(10) == []
    assert slow(10, 9, expected=1.9e9) == slow(10, 9, expected=2e9) == [] != slow(10, 9, expected=2.1e9) == [0]


def test_slow_devices_are_those_far_below_the_median_of_their_name_or_the_expected():
    flops = (100e12, 79e12, 100e12, 80e12)
    ranks = [Rates("n", rank, "H100", replace(DEVICE, flops_per_second=one), []) for rank, one in enumerate(flops)]
    assert slow_devices(ranks, 158e12) == [("n", "slow device: rank 1 on n: 79 TFLOPs")]
    large = replace(ranks[0].device, flops_per_second=1234e12, memory_bytes_per_second=2345e9)
    faster = replace(large, flops_per_second=2e15, memory_bytes_per_second=4e12)
    alike = [replace(ranks[0], rank=rank, device=device) for rank, device in enumerate((large, faster, faster))]
    assert [what.rpartition(": ")[2] for _, what in slow_devices(alike)] == ["1,234 TFLOPs", "2,345 GB/s of memory"]
    assert slow_devices(ranks[1:2]) == []
    assert len(slow_devices(ranks, 201e12)) == 4


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
    assert not [what for _, what in find_faults(clean) if "wrong" in what]
    assert {link.ranks for found in clean for link in found.rates.links} == {(0, 1)}
    assert [what for _, what in find_faults(damaged) if "wrong" in what]
