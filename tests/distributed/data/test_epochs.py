"""The files of sample orders that the nodes of a run share, or that each node has for itself."""

from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from data import samples as samples_of_data
from data.epochs import Stream
from gpt.corpus import Corpus
from parallel.mesh import Mesh
from parallel.world import World
from tests.ranks import run_ranks
from tests.unit.gpt.runs_in_process import tiny_settings, write_text


def num_built(prefix: Path, is_shared: bool) -> int:
    """Open the data on a node of one rank, and return how many orders were built there."""
    cache = prefix.parent / ("cache" if is_shared else f"cache-{dist.get_rank()}")
    settings = tiny_settings(prefix, prefix.parent / "run", data__cache_dir=cache)
    world = World(dist.get_rank(), 2, 0, 1, torch.device("cpu"))
    with (
        mock.patch.object(samples_of_data, "MIN_CACHED_ENTRIES", 1),
        mock.patch.object(Stream, "build", autospec=True, side_effect=Stream.build) as build,
    ):
        Corpus.open(settings.data, settings.model, settings.train, Mesh.create(1), world)
    return build.call_count


@pytest.mark.parametrize("is_shared", [True, False])
def test_one_node_builds_what_all_share_and_each_node_what_it_has_for_itself(tmp_path: Path, is_shared: bool):
    first, second = run_ranks(2, num_built, write_text(tmp_path / "corpus"), is_shared)
    assert first > 0
    assert second == (0 if is_shared else first)
