"""Streams run what is launched after what they have waited for, and places in the code are described."""

from pathlib import Path

from lab.races.simulated_streams import SimulatedStreams, calling_places, describe


def test_launches_are_numbered_from_one_on_each_stream():
    streams = SimulatedStreams()
    side = streams.new_side_stream()
    assert [streams.current.launch("a").number for _ in range(3)] == [1, 2, 3]
    assert (side.launch("b").number, side.number, streams.current.number) == (1, 1, 3)
    assert [str(stream) for stream in (side, streams.new_side_stream(), streams.new_communicator("data"))] == [
        "side stream 1",
        "side stream 2",
        "the communicator data",
    ]


def test_a_launch_is_after_all_that_the_host_has_waited_for():
    streams = SimulatedStreams()
    before, side = streams.new_side_stream(), streams.new_side_stream()
    first, second = streams.current.launch("a"), streams.current.launch("b")
    before.begin_launch()
    assert not first.is_before(before.clock)
    event = streams.current.record_event()
    third = streams.current.launch("c")
    assert event.query() is True
    late = streams.new_side_stream()
    late.record_event()
    for stream in (before, side):
        stream.begin_launch()
    for stream in (before, side, late):
        assert [access.is_before(stream.clock) for access in (first, second, third)] == [True, True, False]


def test_a_wait_takes_nothing_back_of_what_a_stream_knows():
    streams = SimulatedStreams()
    side, other = streams.new_side_stream(), streams.new_side_stream()
    events = []
    for name in "ab":
        streams.current.launch(name)
        events.append(streams.current.record_event())
    other.launch("c")
    side.wait_event(events[1])
    side.wait_event(events[0])
    side.wait_stream(other)
    assert (side.clock[streams.current], side.clock[other], side.number) == (2, 1, 0)


def test_a_recorded_launch_says_what_of_other_streams_it_waits_for():
    streams = SimulatedStreams()
    streams.launches = []
    side, idle = streams.new_side_stream(), streams.new_side_stream()
    for stream in (side, side, streams.current):
        stream.launch("a")
    for waited_for in (idle, side, side, streams.current):  # nothing of the first, and its own work, need no wait
        streams.current.wait_stream(waited_for)
    streams.current.launch("b")
    streams.current.launch("c")
    assert [launch.waits_for for launch in streams.launches[2:]] == [(), (("side stream 1", 2),), ()]


def test_a_place_is_the_line_of_the_caller_and_that_of_its_caller():
    def inner() -> str:
        return describe(calling_places())

    first, second = inner().split(", from ")
    path = Path(__file__).relative_to(Path(__file__).parents[4])
    line = inner.__code__.co_firstlineno
    assert first == f"{path}:{line + 1} in inner"
    assert second == f"{path}:{line + 3} in {test_a_place_is_the_line_of_the_caller_and_that_of_its_caller.__name__}"
    assert describe(()) == "torch"
