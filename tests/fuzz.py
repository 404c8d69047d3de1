"""The examples of the fuzzers: few in the default suite, many behind the marker `full`, the same in every run."""

import json
import math
import resource
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

MOST_SECONDS, MOST_BYTES = 10, 1 << 30  # of the processor, and of memory, for one example
EXTREME = [0, 1, -1, 2**15, 2**31 - 1, -(2**31), 2**32, 2**62, 2**63 - 1, -(2**63), 10**12]
JUNK: list[Any] = [None, True, False, -1, 0, 1, 2, 7, 2**31, 2**63, 10**12, 10**30, 1.5, math.nan, -math.inf, "", "x"]
JUNK += ["\ud800", "a\nb", "x" * 5000, "12", "F32", "I64", [], [[]], {}, {"a": 1}, [0] * 100, [2**62, 0], [0, 4]]
# What is raised where an earlier damage has left nothing to which the next one can be done.
NOTHING_LEFT = OSError, ValueError, KeyError, IndexError, TypeError, AttributeError
Damage = Callable[[bytes], bytes]


def spliced(place: float, num_removed: int, inserted: bytes) -> Damage:
    def damage(content: bytes) -> bytes:
        start = int(place * len(content))
        return content[:start] + inserted + content[start + num_removed :]

    return damage


def set_number(place: float, number: int, num_bytes: int) -> Damage:
    return spliced(place, num_bytes, (number % 2 ** (8 * num_bytes)).to_bytes(num_bytes, "little"))


PLACE = st.floats(0, 1, exclude_max=True)
DAMAGE: st.SearchStrategy[Damage] = st.one_of(
    st.builds(spliced, PLACE, st.just(1), st.binary(min_size=1, max_size=1)),
    st.builds(set_number, PLACE, st.sampled_from(EXTREME), st.sampled_from([4, 8])),
    st.builds(spliced, PLACE, st.just(10**9), st.just(b"")),
    st.builds(spliced, PLACE, st.integers(0, 16), st.binary(max_size=16)),
)


def changed_json(walk: list[int], operation: str, junk: Any) -> Callable[[Any], None]:
    """Return a function that changes JSON at the place to which the numbers lead."""

    def change(content: Any) -> None:
        for number in walk:
            keys = _keys(content)
            child = content[keys[number % len(keys)]] if keys else None
            if not _keys(child):
                break
            content = child
        keys = _keys(content)
        key = keys[walk[-1] % len(keys)]
        if operation == "set":
            content[key] = junk
        elif operation == "swap":
            other = keys[(walk[-1] + 1 + walk[0]) % len(keys)]
            content[key], content[other] = content[other], content[key]
        else:
            value = content.pop(key)
            if operation == "rename" and isinstance(content, dict):
                content[str(junk)] = value

    return change


def _keys(content: Any) -> list[Any]:
    if isinstance(content, dict):
        return list(content)
    return list(range(len(content))) if isinstance(content, list) else []


changes_of_json = st.builds(
    changed_json,
    st.lists(st.integers(0, 2**16), min_size=1, max_size=7),
    st.sampled_from(["set", "set", "set", "delete", "rename", "swap"]),
    st.sampled_from(JUNK) | st.integers(0, 2000) | st.text(max_size=8),
)


def changed_as_json(change: Callable[[Any], None]) -> Damage:
    def damage(content: bytes) -> bytes:
        tree = json.loads(content)
        with suppress(*NOTHING_LEFT):
            change(tree)
        return json.dumps(tree).encode()

    return damage


DAMAGE_OF_JSON: st.SearchStrategy[Damage] = DAMAGE | st.builds(changed_as_json, changes_of_json)


def fuzzed(few: int, many: int) -> pytest.MarkDecorator:
    """Give a test its argument `num_examples`: `few`, and `many` under the marker `full`."""
    return pytest.mark.parametrize("num_examples", [few, pytest.param(many, marks=pytest.mark.full)])


def run_examples(num_examples: int, check: Callable[..., None], *strategies: SearchStrategy) -> None:
    """Call `check` with `num_examples` values that the strategies draw."""

    def bounded_check(values: tuple[Any, ...]) -> None:
        with bounded_work():
            check(*values)

    chosen = settings(max_examples=num_examples, suppress_health_check=list(HealthCheck))
    chosen(given(st.tuples(*strategies))(bounded_check))()


@contextmanager
def bounded_work() -> Iterator[None]:
    """Fail if the block takes more of the processor, or more memory, than any small file may cost."""

    def fail(*_: object) -> NoReturn:
        raise TimeoutError(f"more than {MOST_SECONDS} seconds of the processor")

    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + MOST_BYTES, limit[1]))
    before = signal.signal(signal.SIGVTALRM, fail)
    signal.setitimer(signal.ITIMER_VIRTUAL, MOST_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
        resource.setrlimit(resource.RLIMIT_AS, limit)


def result_unless_refused(read: Callable[[], Any], refusal: type[Exception], name: object) -> Any:
    """Return what `read` returns; None if it raises `refusal`, whose message must be one line that contains `name`."""
    try:
        return read()
    except refusal as error:
        message = str(error)
    assert "\n" not in message, message
    assert str(name) in message, message
    return None
