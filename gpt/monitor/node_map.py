"""The placement of ranks on nodes, and the links between neighbours on each axis."""

import socket
from collections import Counter, defaultdict
from collections.abc import Sequence
from itertools import groupby, pairwise
from typing import Any

from rich.table import Table

from parallel.mesh import Mesh
from parallel.store import Decisions
from parallel.world import World

MAX_ROWS = 16


def find_nodes(world: World) -> tuple[str, ...]:
    """Return the name of every rank's node. All ranks must call this.

    If several nodes have the same name, the number of their first rank is appended to it.
    """
    own = socket.gethostname(), world.rank - world.local_rank
    runs = Decisions(world.rank, world.size).decide(own, _runs_of_names)
    return tuple(name for name, count in runs for _ in range(count))


def _runs_of_names(found: Sequence[Sequence[Any]]) -> list[tuple[str, int]]:
    """Return the name of each run of ranks on one node, and their number: every rank reads this."""
    first_ranks: defaultdict[str, set[int]] = defaultdict(set)
    for name, first in found:
        first_ranks[name].add(first)
    names = (name if len(first_ranks[name]) == 1 else f"{name}#{first}" for name, first in found)
    return [(name, len(list(ranks))) for name, ranks in groupby(names)]


def links_of(nodes: Sequence[str], axis: str, mesh: Mesh) -> Counter[tuple[str, str]]:
    """Return {(node, node): links between neighbours in the rings of an axis}; (a, a) means inside node a."""
    links: Counter[tuple[str, str]] = Counter()
    for group in ring_members(axis, mesh.data.size, mesh.tensor.size):
        ring = [*group, group[0]] if len(group) > 2 else group  # a ring of two has one link
        for one, other in pairwise(nodes[rank] for rank in ring):
            links[min(one, other), max(one, other)] += 1
    return links


def ring_members(axis: str, data_size: int, tensor_size: int) -> list[list[int]]:
    """Return the ranks of each group of an axis: a tensor group is a run of ranks, a data group has one of each run."""
    if axis == "tensor":
        return [[d * tensor_size + t for t in range(tensor_size)] for d in range(data_size)]
    return [[d * tensor_size + t for d in range(data_size)] for t in range(tensor_size)]


def node_table(nodes: Sequence[str], mesh: Mesh) -> Table:
    """Return a table of the nodes, their ranks, and the links that the neighbours of each axis use."""
    table = Table("", "", "", title="Nodes and links", title_justify="left", show_header=False)
    ranks_on: defaultdict[str, list[int]] = defaultdict(list)
    for rank, node in enumerate(nodes):
        ranks_on[node].append(rank)
    rows = [(node, "ranks", span(ranks)) for node, ranks in ranks_on.items()]
    _add(table, rows)
    for axis in ("tensor", "data"):
        links = links_of(nodes, axis, mesh)
        if links:
            table.add_section()
        rows = [
            (f"inside {a}" if a == b else f"{a} - {b}", f"{axis} axis", f"{number} link{'s' if number > 1 else ''}")
            for (a, b), number in links.items()
        ]
        _add(table, rows)
    return table


def span(ranks: list[int]) -> str:
    """Format ranks as 0-7 if they are consecutive, otherwise as 0, 2, 4."""
    if len(ranks) > 1 and ranks == list(range(ranks[0], ranks[-1] + 1)):
        return f"{ranks[0]}-{ranks[-1]}"
    return ", ".join(map(str, ranks))


def _add(table: Table, rows: list[tuple[str, str, str]]) -> None:
    for row in rows[:MAX_ROWS]:
        table.add_row(*row)
    if len(rows) > MAX_ROWS:
        table.add_row(f"and {len(rows) - MAX_ROWS} more", rows[-1][1], "")
