"""The accesses to a storage that the checker of streams remembers."""

from collections import Counter

import torch

from lab.races.memory_accesses import AccessedMemory, bytes_of
from lab.races.simulated_streams import SimulatedStreams


def test_a_write_takes_the_place_of_the_accesses_before_it():
    streams = SimulatedStreams()
    computation, side = streams.current, streams.new_side_stream()
    memory = AccessedMemory(computation, is_on_host=False, kind="parameters")
    memory.read(0, 4, side.launch("read"), side.clock)
    memory.read(4, 8, side.launch("read"), side.clock)
    write = computation.launch("write")
    memory.write(0, 8, write, computation.clock)
    assert list(memory.accesses_after(Counter())) == [write]
    read = side.launch("read")
    memory.read(2, 6, read, side.clock)
    # The stretches 0 to 2, 2 to 6 and 6 to 8.
    assert list(memory.accesses_after(Counter())) == [write, write, read, write]


def test_an_access_of_a_part_leaves_what_is_known_of_the_others():
    streams = SimulatedStreams()
    first, second, third = (streams.new_side_stream() for _ in range(3))
    memory = AccessedMemory(streams.current, is_on_host=False, kind="parameters")
    a, b, c = (stream.launch(name) for stream, name in ((first, "a"), (second, "b"), (third, "c")))
    memory.read(0, 4, a, first.clock)
    memory.read(4, 8, b, second.clock)
    memory.read(2, 6, c, third.clock)
    assert list(memory.accesses_after(Counter())) == [a, a, c, b, c, b]


def test_the_bytes_of_a_tensor_end_with_its_last_element():
    whole = torch.empty(6, 4)
    assert bytes_of(whole) == bytes_of(whole.t()) == (0, 96)
    assert bytes_of(whole[2:4]) == (32, 64)
    assert bytes_of(whole[1:3, 1:3]) == (20, 44)
    assert bytes_of(whole.double()[1:, 2].expand(3, -1)) == (48, 48 + 4 * 32 + 8)
