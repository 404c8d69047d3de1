"""The links between neighbours of an axis follow from the nodes of the ranks."""

import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from rich.table import Table

from gpt.monitor.node_map import find_nodes, links_of, node_table, ring_members, span
from parallel.comm_log import CommLog
from parallel.mesh import Axis, Mesh
from parallel.world import World


def mesh(data_size: int, tensor_size: int) -> Mesh:
    log = CommLog()
    return Mesh(Axis("data", data_size, 0, log), Axis("tensor", tensor_size, 0, log), log)


def found(hosts: list[str], local_size: int) -> list[tuple[str, ...]]:
    """Return the nodes that each rank finds, on hosts of these names."""
    here, size = threading.local(), len(hosts)

    def find(rank: int) -> tuple[str, ...]:
        here.name = hosts[rank]
        return find_nodes(World(rank, size, rank % local_size, local_size, torch.device("cpu")))

    with (
        mock.patch("parallel.store.shared_store", return_value=dist.HashStore()),
        mock.patch("socket.gethostname", side_effect=lambda: here.name),
        ThreadPoolExecutor(size) as pool,
    ):
        return list(pool.map(find, range(size)))


def test_all_ranks_find_the_nodes_of_all():
    assert found(["a", "a", "b", "b"], 2) == [("a", "a", "b", "b")] * 4


def test_nodes_of_one_name_are_told_apart_by_their_first_ranks():
    assert found(["a"] * 4 + ["b"] * 2, 2)[0] == ("a#0", "a#0", "a#2", "a#2", "b", "b")
    assert found(["a"] * 4, 4)[0] == ("a",) * 4


TWO_NODES = ("n1", "n1", "n2", "n2")


def test_tensor_groups_stay_inside_nodes_and_data_groups_cross():
    assert ring_members("tensor", 2, 2) == [[0, 1], [2, 3]]
    assert ring_members("data", 2, 2) == [[0, 2], [1, 3]]
    assert links_of(TWO_NODES, "tensor", mesh(2, 2)) == Counter({("n1", "n1"): 1, ("n2", "n2"): 1})
    assert links_of(TWO_NODES, "data", mesh(2, 2)) == Counter({("n1", "n2"): 2})


def test_a_tensor_group_over_nodes_crosses_both_ways_round_its_ring():
    assert links_of(TWO_NODES, "tensor", mesh(1, 4)) == Counter({("n1", "n1"): 1, ("n1", "n2"): 2, ("n2", "n2"): 1})
    assert links_of(TWO_NODES, "data", mesh(1, 4)) == Counter()


@pytest.mark.parametrize(
    ("ranks", "expected"), [([3], "3"), ([0, 1, 2, 3], "0-3"), ([0, 2, 4], "0, 2, 4"), ([4, 5], "4-5")]
)
def test_ranks_are_written_as_spans(ranks, expected):
    assert span(ranks) == expected


def test_a_large_job_has_a_short_table():
    names = tuple(f"n{rank // 8}" for rank in range(800))
    table = node_table(names, mesh(100, 8))
    assert table.row_count == 3 * 17
    assert [rows_of(table)[row] for row in (15, 16, 33, 50)] == [
        ("n15", "ranks", "120-127"),
        ("and 84 more", "ranks", ""),
        ("and 84 more", "tensor axis", ""),
        ("and 84 more", "data axis", ""),
    ]


def rows_of(table: Table) -> list[tuple[str, ...]]:
    return list(zip(*(column.cells for column in table.columns), strict=True))


def test_a_table_has_nodes_with_their_ranks_then_links_by_axis():
    table = node_table(TWO_NODES, mesh(2, 2))
    assert rows_of(table) == [
        ("n1", "ranks", "0-1"),
        ("n2", "ranks", "2-3"),
        ("inside n1", "tensor axis", "1 link"),
        ("inside n2", "tensor axis", "1 link"),
        ("n1 - n2", "data axis", "2 links"),
    ]
    assert [row.end_section for row in table.rows] == [False, True, False, True, False]
    assert not table.show_header
