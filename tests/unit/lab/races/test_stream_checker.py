"""Small programs that a GPU would run wrongly without one wait, and that are right with it."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from lab.races.stream_checker import StreamChecker, StreamError, streams_checked
from parallel.memory_kinds import TensorKind, tagged
from parallel.mesh import Axis, Mesh, Work
from parallel.streams import announce_host_read, current_stream, synchronize
from parallel.world import imitated_world
from tests.launch_order import waiting_time
from zero.core.memory.allocators import host_allocator
from zero.core.memory.streams import SideStream, launched_work
from zero.uneven import _Exchange

CPU = torch.device("cpu")

Program = Callable[[bool], object]  # called with True to wait where a wait is needed


@pytest.fixture(autouse=True)
def axis():
    """Two ranks of which only this one exists, with the collectives of NCCL."""
    with imitated_world(0, 2, 2, "nccl"):
        yield


def data_axis() -> Axis:
    return Mesh.create(tensor_size=1, imitated_backend="nccl").data


def on_host(numel: int) -> Tensor:
    return host_allocator(CPU, TensorKind.BUFFERS)(numel, torch.float32)


def wait_if(waits: bool, work: Work) -> Work:
    if waits:
        work.wait()
    return work


def read_before_a_gather_ends(waits: bool) -> object:
    whole = torch.zeros(8)
    gather = data_axis().all_gather(torch.ones(4), out=whole)
    wait_if(waits, gather)
    return whole.sum(), gather


def overwrite_what_a_reduction_reads(waits: bool) -> object:
    full = torch.ones(8)
    scatter = data_axis().reduce_scatter(full, out=torch.empty(4))
    wait_if(waits, scatter)
    full.zero_()
    return scatter


def overwrite_one_byte_of_an_overlapping_view(waits: bool) -> object:
    buffer = torch.zeros(12)
    gather = data_axis().all_gather(torch.ones(4), out=buffer[:8])
    buffer[8:].zero_()  # the bytes behind it are free
    wait_if(waits, gather)
    buffer[7:].zero_()
    return gather


def drop_work(waits: bool) -> object:
    total = torch.ones(8)
    wait_if(waits, data_axis().all_reduce(total, out=total))
    return total


def free_memory_that_a_gather_fills(waits: bool) -> object:
    whole = torch.zeros(8)
    gather = data_axis().all_gather(torch.ones(4), out=whole)
    wait_if(waits, gather)
    whole.untyped_storage().resize_(0)
    return torch.empty(8), gather


def read_a_copy_on_the_device(waits: bool) -> object:
    side, source, copy = SideStream(CPU), on_host(4), torch.empty(4)
    with side.context():
        copy.copy_(source, non_blocking=True)
    wait_if(waits, side.device_work())
    return copy + 1


def copy_what_is_not_computed(waits: bool) -> object:
    side, copy = SideStream(CPU), on_host(4)
    if waits:
        source = torch.ones(4)
    with side.context():
        stream = current_stream(CPU)
    if not waits:
        source = torch.ones(4)
    with stream.as_current():
        return copy.copy_(source, non_blocking=True)


def drop_memory_that_a_side_stream_reads(waits: bool) -> object:
    side, copy, source = SideStream(CPU), on_host(4), torch.ones(4)
    with side.context():
        copy.copy_(source, non_blocking=True)
    wait_if(waits, side.device_work())
    del source
    return torch.ones(4), copy


def drop_memory_of_a_side_streams_pool(waits: bool) -> object:
    side = SideStream(CPU)
    with side.context():
        made = torch.ones(4)
        stream = current_stream(CPU)
    side.device_work().wait()
    total = made + 1
    del made
    if waits:
        stream.wait_stream(current_stream(CPU))
    with stream.as_current():
        return torch.ones(4), total


def read_on_the_host_what_has_not_landed(waits: bool) -> object:
    side, copy = SideStream(CPU), on_host(4)
    with side.context():
        copy.copy_(torch.ones(4), non_blocking=True)
    side.device_work().wait()  # of no use to the host
    wait_if(waits, side.host_work())
    return copy.add(1)


def convert_on_the_host_what_has_not_landed(waits: bool) -> object:
    copy = on_host(4).copy_(torch.ones(4), non_blocking=True)
    if waits:
        synchronize(CPU)
    return copy.numpy(), copy.tolist()


def leave_to_another_thread_what_has_not_landed(waits: bool) -> object:
    copy = on_host(4).copy_(torch.ones(4), non_blocking=True)
    if waits:
        copy.copy_(torch.ones(4))  # a copy for which the host waits
    announce_host_read([copy])
    return copy


def read_on_the_host_before_a_query(waits: bool) -> object:
    copy = on_host(1).copy_(torch.ones(1), non_blocking=True)
    has_run = launched_work(CPU)
    return waits and has_run(), copy.item()


def launch_a_gather_beside_a_copy(waits: bool) -> object:
    """Launch both on the side stream, so that the gather runs behind the copy, as with offloaded parameters."""
    side, source, whole = SideStream(CPU), on_host(4), torch.zeros(8)
    with side.context():
        whole[:4].copy_(source, non_blocking=True)
        if waits:
            gather = data_axis().all_gather(whole[:4], out=whole)
    if not waits:
        gather = data_axis().all_gather(whole[:4], out=whole)
    gather.wait()
    return gather, whole


PROGRAMS: dict[Program, tuple[str, str]] = {  # (what is reported, the wait that is missing)
    read_before_a_gather_ends: ("sum by the computation", "`wait` for the `Work` of that all_gather"),
    overwrite_what_a_reduction_reads: ("zero_ by the computation", "`wait` for the `Work` of that reduce_scatter"),
    overwrite_one_byte_of_an_overlapping_view: ("zero_ by the computation", "`wait` for the `Work`"),
    drop_work: ("all_reduce by the communicator data", "without a `wait`"),
    free_memory_that_a_gather_fills: ("was freed", "`wait` for the `Work` of that all_gather before it is freed"),
    read_a_copy_on_the_device: ("add by the computation", "must wait for side stream 1 (a `device_work`)"),
    copy_what_is_not_computed: ("copy_ by side stream 1", "must wait for the computation"),
    drop_memory_that_a_side_stream_reads: ("was freed", "must wait for side stream 1 (a `device_work`)"),
    drop_memory_of_a_side_streams_pool: ("was freed", "side stream 1 must wait for the computation"),
    read_on_the_host_what_has_not_landed: ("add by the host", "the host must wait for side stream 1"),
    convert_on_the_host_what_has_not_landed: ("a read by the host", "the host must wait for the computation"),
    leave_to_another_thread_what_has_not_landed: ("a read by the host", "the host must wait for the computation"),
    read_on_the_host_before_a_query: ("_local_scalar_dense by the host", "the host must wait for the computation"),
    launch_a_gather_beside_a_copy: ("all_gather by the communicator", "must wait for side stream 1"),
}


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_missing_wait_is_reported_with_both_operations_and_the_wait(program):
    what, remedy = PROGRAMS[program]
    with StreamChecker(CPU) as checker:
        program(False)
    (report,) = checker.reports
    assert what in report
    assert remedy in report
    path = "tests/unit/lab/races/test_stream_checker.py:"
    assert report.count(f"{path}") >= 2, report  # a lost `Work` has one operation, with its caller
    assert f"in {program.__name__}" in report


@pytest.mark.parametrize("program", PROGRAMS)
def test_nothing_is_reported_with_the_wait(program):
    with streams_checked(CPU):
        program(True)


FETCHES = ["a copy by the computation", "synchronize by the host"]
# {what is computed of (vector, scalar) on the device, (vector, scalar) on the host: what runs, and on which stream}
RUNS: dict[str, tuple[Callable[[Tensor, Tensor, Tensor, Tensor], object], list[str]]] = {
    "on the device": (lambda d, s, h, t: d.mul(s), ["mul by the computation"]),
    "on the host": (lambda d, s, h, t: h.mul(t), ["mul by the host"]),
    "a scalar of the host": (lambda d, s, h, t: d.mul(t), ["mul by the computation"]),
    "a vector of the host": (lambda d, s, h, t: d.mul(h), [*FETCHES, "mul by the host"]),
    "values that the host knows": (lambda d, s, h, t: (d.mul(h), d.mul(h)), [*FETCHES, *["mul by the host"] * 2]),
    "values that the host knows in part": (
        lambda d, s, h, t: (d.mul(h), d[:2].neg_(), d.mul(h)),
        [*FETCHES, "mul by the host", "neg_ by the computation", *FETCHES, "mul by the host"],
    ),
    "no values yet": (lambda d, s, h, t: torch.empty(4).mul(h), ["empty by the computation", "mul by the host"]),
    "a scalar and a vector of the host": (lambda d, s, h, t: torch.where(t, d, h), [*FETCHES, "where by the host"]),
    "written on the device": (lambda d, s, h, t: d.mul_(h), ["mul_ by the computation", "synchronize by the host"]),
    "read and written on the device": (
        lambda d, s, h, t: d.addcmul_(h, d),
        ["addcmul_ by the computation", FETCHES[1]],
    ),
    "written on the host": (lambda d, s, h, t: h.mul_(d), [*FETCHES, "mul_ by the host"]),
    "copied": (lambda d, s, h, t: h.copy_(d), ["copy_ by the computation", "synchronize by the host"]),
    "copied back": (lambda d, s, h, t: d.copy_(h), ["copy_ by the computation", "synchronize by the host"]),
    "copied later": (lambda d, s, h, t: h.copy_(d, non_blocking=True), ["copy_ by the computation"]),
    "copied later, by position": (lambda d, s, h, t: h.copy_(d, True), ["copy_ by the computation"]),
    "copied at once, by position": (lambda d, s, h, t: h.copy_(d, False), ["copy_ by the computation", FETCHES[1]]),
    "copied on the device": (lambda d, s, h, t: d[:2].copy_(d[2:]), ["copy_ by the computation"]),
    "copied onto itself": (lambda d, s, h, t: d.copy_(d), []),
    "a value": (lambda d, s, h, t: s.item(), ["_local_scalar_dense by the computation", "synchronize by the host"]),
    "a value of the host": (lambda d, s, h, t: t.item(), ["_local_scalar_dense by the host"]),
    "values": (lambda d, s, h, t: d.tolist(), FETCHES),
    "values of the host": (lambda d, s, h, t: h.tolist(), ["a read by the host"]),
    "no values": (lambda d, s, h, t: (h[:0].tolist(), d[:0].tolist()), []),
    "a new tensor": (lambda d, s, h, t: torch.ones(4), ["ones by the computation"]),
    "a new tensor of the host": (lambda d, s, h, t: torch.zeros_like(h), ["zeros_like by the host"]),
    "a view": (lambda d, s, h, t: d[1:].t(), []),
}


@pytest.mark.parametrize("name", RUNS)
def test_an_operation_runs_where_its_memory_is(name):
    compute, expected = RUNS[name]
    with streams_checked(CPU, records_launches=True) as checker:
        device, host = torch.ones(4), on_host(4).zero_()
        scalars = device.sum() > 0, host.sum() > 0
        num_before = len(checker.launches)
        compute(device, scalars[0], host, scalars[1])
        found = [f"{launch.name} by {launch.stream}" for launch in checker.launches[num_before:]]
    assert found == expected


def test_what_happens_after_the_check_is_not_reported():
    with StreamChecker(CPU) as checker:
        total = torch.ones(8)
        work = data_axis().all_reduce(total, out=total)
    del work
    total.tolist()
    assert checker.reports == []


def test_a_second_stream_that_waits_on_the_same_work_is_not_made_to_wait():
    """The first wait removes the steps of the `Work`, as on a GPU."""
    with StreamChecker(CPU) as checker:
        whole, side = torch.zeros(8), SideStream(CPU)
        with side.context():
            stream = current_stream(CPU)
        gather = data_axis().all_gather(torch.ones(4), out=whole)
        gather.wait()
        with stream.as_current():
            gather.wait()
            whole.sum()
    assert len(checker.reports) == 1


def test_memory_that_is_tagged_as_the_hosts_is_written_by_the_host():
    with StreamChecker(CPU) as checker:
        source = tagged(TensorKind.MASTER, torch.zeros(4), on_host=True)
        torch.empty(4).copy_(source, non_blocking=True)
        source.zero_()  # the copy may not have read it yet
    (report,) = checker.reports
    assert "zero_ by the host" in report


def test_an_error_has_one_line_for_each_pair_of_places():
    def race() -> None:
        for _ in range(3):
            whole = torch.zeros(8)
            gather = data_axis().all_gather(torch.ones(4), out=whole)
            whole.sum()
            gather.wait()

    with pytest.raises(StreamError) as error, streams_checked(CPU):
        race()
    assert len(str(error.value).splitlines()) == 2


@pytest.mark.parametrize(("num_reports", "last"), [(10, "10"), (11, "and 1 more")])
def test_an_error_has_ten_reports_and_the_number_of_the_others(num_reports, last):
    checker = StreamChecker(CPU)
    checker.reports = [str(number + 1) for number in range(num_reports)]
    with pytest.raises(StreamError) as error:
        checker.raise_reports()
    assert str(error.value).splitlines()[1:11] == [str(number + 1) for number in range(min(10, num_reports))]
    assert str(error.value).splitlines()[-1] == last
    checker.raise_reports()  # they have been reported


def test_flags_of_uneven_data_are_exchanged_beside_the_computation():
    """On the stream of the computation this would be right, too, and the computation would wait for it."""
    with streams_checked(CPU, records_launches=True) as checker:
        exchange = _Exchange(True, data_axis(), SideStream(CPU))
        torch.ones(4).add(1)
        launches = list(checker.launches)
        exchange.wait()
    assert any(launch.is_collective for launch in launches)
    assert waiting_time(launches, lambda launch: float(launch.is_collective)) == 0
