"""A trace ends after the messages over gloo whose ends torch writes to it."""

from pathlib import Path
from unittest import mock

import torch
from torch.profiler import profile

from gpt.monitor.profiling import Profiler
from gpt.settings.run import ProfileSettings
from parallel.mesh import Mesh
from parallel.store import shared_store
from tests.ranks import run_ranks


def has_received_when_the_trace_ends(folder: Path, numel: int) -> bool:
    mesh, store = Mesh.create(tensor_size=1), shared_store()
    profiler = Profiler(ProfileSettings(steps=(1, 1)), mesh, torch.device("cpu"), folder, ["n1"] * mesh.size)
    sent, out, found = torch.ones(numel), torch.zeros(2 * numel), []
    stop = profile.stop

    def stop_and_look(trace: profile) -> None:
        found.append(bool(out.eq(1).all()))
        stop(trace)

    profiler.begin(1)
    if mesh.data.rank:
        store.wait(["the first rank ends its trace"])
    gather = mesh.data.all_gather(sent, out=out)
    if not mesh.data.rank:
        store.set("the first rank ends its trace", "")
    with mock.patch.object(profile, "stop", stop_and_look):
        profiler.end(1)
    gather.wait()
    return found == [True]


def test_messages_under_way_are_completed_before_a_trace_ends(tmp_path: Path):
    assert run_ranks(2, has_received_when_the_trace_ends, tmp_path, 2**22) == [True, True]
