"""Hand-made launches: how long the computation waits, and which jobs hang."""

import torch

from lab.races.simulated_streams import COMPUTATION, Launch
from lab.races.stream_checker import StreamChecker
from parallel.mesh import Mesh
from parallel.world import imitated_world
from tests.launch_order import Job, waiting_time
from zero.core.memory.streams import SideStream

CPU = torch.device("cpu")
A, B = "the communicator a", "the communicator b"


def operation(number: int, *waits_for: tuple[str, int]) -> Launch:
    return Launch(COMPUTATION, number, "mm", waits_for, num_bytes=100)


def collective(stream: str, number: int, *waits_for: tuple[str, int], num_bytes: int = 8) -> Launch:
    return Launch(stream, number, "all_reduce", waits_for, (0, 1), num_bytes, torch.float32)


def test_two_communicators_in_opposite_orders_hang_if_each_waits_for_the_other():
    one = [collective(A, 1), operation(1, (A, 1)), collective(B, 1, (COMPUTATION, 1)), operation(2, (B, 1))]
    other = [collective(B, 1), operation(1, (B, 1)), collective(A, 1, (COMPUTATION, 1)), operation(2, (A, 1))]
    assert Job([one, one]).run() == []
    stuck = Job([one, other]).run()
    assert len(stuck) == 6
    assert "rank 0: all_reduce of 8 bytes of torch.float32 on the communicator a" in stuck


def test_other_messages_on_one_communicator_hang():
    assert Job([[collective(A, 1)], [collective(A, 1)]]).run() == []
    assert len(Job([[collective(A, 1)], [collective(A, 1, num_bytes=16)]]).run()) == 2
    assert len(Job([[collective(A, 1)], []]).run()) == 1


def test_a_checker_records_what_is_launched_and_what_it_waits_for():
    with imitated_world(0, 2, 2, "nccl"), StreamChecker(CPU, records_launches=True) as checker:
        axis, side = Mesh.create(tensor_size=1, imitated_backend="nccl").data, SideStream(CPU)
        total = torch.ones(4)
        reduction = axis.all_reduce(total, out=total)
        with side.context():
            reduction.wait()
            total.mul_(2)
        side.device_work().wait()
        assert total.sum().item() == 8
        total.zero_()
    found = [launch for launch in checker.launches if launch.name in ("all_reduce", "mul_", "sum", "zero_")]
    reduce, mul, add, zero = found
    assert (reduce.ranks, reduce.num_bytes, reduce.dtype) == ((0, 1), 16, torch.float32)
    assert (mul.num_bytes, add.num_bytes) == (16 + 16, 16 + 4), "those that are read, and those that are written"
    assert "the computation" in dict(reduce.waits_for)
    assert (reduce.stream, reduce.number) in mul.waits_for
    assert mul.stream == "side stream 1"
    assert dict(add.waits_for)[mul.stream] == mul.number
    assert "the host" in dict(zero.waits_for)  # it has read the sum


def test_the_computation_waits_for_what_its_operations_do_not_cover():
    launches = [operation(1), collective(A, 1, (COMPUTATION, 1)), operation(2), operation(3, (A, 1))]

    def duration(launch: Launch) -> float:
        return 250 if launch.is_collective else 100

    assert waiting_time(launches, duration) == 150
    assert waiting_time(launches[:-1], duration) == 0
    assert waiting_time(launches, duration, first=4) == 0
