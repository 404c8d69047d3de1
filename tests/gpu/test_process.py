"""A rank on a GPU: pinned memory has the size asked for, and marks and a snapshot tell what its device does."""

import os

import pytest
import torch

from parallel.comm_log import CommLog
from parallel.process_defaults import cores_near, share_cores
from parallel.torch_internals import largest_rounded_pinned_bytes, memory_snapshot
from parallel.world import start_world
from tests.gpu.waiting import waiting_is_an_error

pytestmark = pytest.mark.gpu


def test_pinned_memory_has_the_size_that_is_asked_for_if_torch_knows_the_option():
    start_world()
    torch.empty(2**20, dtype=torch.uint8, pin_memory=True)  # torch's first allocation makes its pool
    before = torch.cuda.memory.host_memory_stats()["allocated_bytes.current"]
    kept = torch.empty(5 * 2**20, dtype=torch.uint8, pin_memory=True)
    grown = torch.cuda.memory.host_memory_stats()["allocated_bytes.current"] - before
    assert grown == (kept.nbytes if largest_rounded_pinned_bytes() <= 2**20 else 8 * 2**20)


def test_a_collective_is_reached_and_complete_when_the_device_is_and_the_host_never_waits(gpu):
    log = CommLog()
    log.follow(gpu)
    message = torch.zeros(8, device=gpu)
    with waiting_is_an_error():
        torch.cuda._sleep(10**9)  # about half a second
        event = log.record("all_gather", "data", 2, message)
        log.record_wait_end(event)
        progress = log.progress()
    assert (progress.num_launched, progress.num_reached, progress.num_complete) == (1, 0, 0)
    torch.cuda.synchronize()
    progress = log.progress()
    assert (progress.num_launched, progress.num_reached, progress.num_complete) == (1, 1, 1)


def test_a_rank_runs_on_cores_near_its_gpu_if_the_system_names_them(gpu):
    before = os.sched_getaffinity(0)
    properties = torch.cuda.get_device_properties(gpu)
    near = cores_near(f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0")
    num_threads = torch.get_num_threads()
    try:
        share_cores({}, 1, gpu)
        assert os.sched_getaffinity(0) == ((near & before) or before)
    finally:
        os.sched_setaffinity(0, before)
        torch.set_num_threads(num_threads)


def test_a_snapshot_of_the_memory_is_written(gpu, tmp_path):
    kept = torch.zeros(2**20, device=gpu)
    memory_snapshot(tmp_path / "rank-0.pickle")
    assert (tmp_path / "rank-0.pickle").stat().st_size > 0
    assert kept.numel()
