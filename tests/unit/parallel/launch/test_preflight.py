"""Nodes that are missing or differ are named, on all nodes."""

import argparse
import dataclasses
import json
import os
import re
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from parallel.launch import node_facts, preflight
from parallel.launch.node_facts import Job, NodeFacts, find_facts, find_problems, marked
from parallel.launch.preflight import check_ranks, collect, connect, main, report
from parallel.launch.route import Route
from parallel.validation.errors import ConfigError
from parallel.world import World

WAIT = 600.0  # seconds, which only a test that hangs takes
ALIKE = NodeFacts(
    name="n1",
    address="10.0.0.1",
    code={"gpt/trainer.py": "a", "gpt/builder/train_state.py": "b"},
    versions="Python 3.11.7, torch 2.13.0",
    settings=["train.steps=10"],
    data={"corpus.idx": "c"},
    num_devices=8,
    disk="/shared/runs",
    free_bytes=10**12,
    disk_bytes_per_second=1e9,
)


def nodes(**odd: object) -> list[NodeFacts]:
    """Return the facts of n1, n2 and n3, of which n2 differs."""
    n1, n2, n3 = (dataclasses.replace(ALIKE, name=name) for name in ("n1", "n2", "n3"))
    return [n1, dataclasses.replace(n2, **odd), n3]


@pytest.mark.parametrize(
    ("odd", "problem"),
    [
        ({}, None),
        ({"code": {"gpt/builder/train_state.py": "b"}}, "n2: other code than elsewhere: gpt/trainer.py"),
        ({"data": {"corpus.idx": "missing"}}, "n2: other data than elsewhere: corpus.idx"),
        ({"settings": ["train.steps=9"]}, "n2: other settings than elsewhere: train.steps=10, train.steps=9"),
        ({"versions": "torch 2.11.0"}, "n2: versions: torch 2.11.0, elsewhere Python 3.11.7, torch 2.13.0"),
        ({"num_devices": 7}, "n2: number of GPUs: 7, elsewhere 8"),
        ({"clock_seconds": -3.5}, "n2: its clock differs from n1's by -3.5 s"),
        ({"clock_seconds": 2.0}, None),
        ({"clock_seconds": 2.1}, "n2: its clock differs from n1's by +2.1 s"),
        ({"data": dict.fromkeys("abcd", "x")}, "n2: other data than elsewhere: a, b, c, corpus.idx and 1 more"),
        ({"disk_error": "No space left on device"}, "n2: /shared/runs cannot be written: No space left on device"),
        ({"free_bytes": 10**9}, "n2: /shared/runs is nearly full: 1.00 GB are free"),
        ({"disk_bytes_per_second": 3e7}, "n2: /shared/runs is slow: 30.0 MB/s, the fastest node has 1000.0"),
        ({"disk_bytes_per_second": 4e7}, None),
        ({"free_bytes": 2**30}, None),
        ({"shares_folder": False}, "n2: /shared/runs is not the disk of n1; choose a folder that all nodes share"),
        ({"max_files": 1024, "num_files": 1024}, None),
        (
            {"max_files": 1024, "num_files": 1025},
            "n2: a process may open 1024 files, 1025 are needed, for the store's 3 connections of each rank or for the "
            "data; raise the hard limit (ulimit -Hn)",
        ),
    ],
)
def test_a_node_that_differs_is_named_with_what_differs(odd, problem):
    assert find_problems(nodes(**odd)) == ([problem] if problem else [])


def test_the_first_node_may_be_the_odd_one():
    n1, odd, n3 = nodes(code={"gpt/trainer.py": "x", "gpt/builder/train_state.py": "b"})
    assert find_problems([odd, n1, n3]) == ["n2: other code than elsewhere: gpt/trainer.py"]


def test_disks_may_all_be_slow():
    alike = [dataclasses.replace(node, disk_bytes_per_second=4.9e6) for node in nodes()]
    assert find_problems(alike) == [
        f"{name}: /shared/runs is slow: 4.9 MB/s, the fastest node has 4.9" for name in ("n1", "n2", "n3")
    ]
    assert find_problems([dataclasses.replace(node, disk_bytes_per_second=5e6) for node in alike]) == []


def test_data_that_is_missing_on_every_node_is_named():
    absent = [dataclasses.replace(node, data={"corpus.idx": "missing"}) for node in nodes()]
    assert find_problems(absent) == [f"{name}: missing data: corpus.idx" for name in ("n1", "n2", "n3")]


def test_facts_are_those_of_the_job_that_is_handed_in(tmp_path):
    (tmp_path / "a.idx").write_text("a")
    files = (tmp_path / "a.idx", tmp_path / "b.idx")
    facts = find_facts(Job(("train.steps=7", "run.dir=x"), files, tmp_path / "not" / "yet"))
    assert facts.settings == ["run.dir=x", "train.steps=7"]
    assert list(facts.data) == [str(path) for path in files]
    assert facts.data[str(files[0])] != "missing"
    assert facts.data[str(files[1])] == "missing"
    assert facts.disk == str(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["a.idx"], "the probe is deleted"


def test_the_rate_of_a_disk_is_that_of_bytes_which_have_reached_it_undisturbed(tmp_path):
    flushed, now, seconds = [], 10.0, iter([0.25, 0.0625, 8.0, 0.25])

    def flush(file: int) -> None:
        nonlocal now
        flushed.append(os.fstat(file).st_size)
        now += next(seconds)

    def clock() -> float:
        return now

    with mock.patch("os.fsync", flush), mock.patch("time.perf_counter", clock):
        rate = find_facts(Job(folder=tmp_path)).disk_bytes_per_second
    assert flushed == [part * 8 * 2**20 for part in (1, 2, 3, 4)]
    assert rate == 128 * 2**20


@pytest.mark.parametrize(("error", "said"), [(OSError(28, "No space left"), "No space left"), (OSError("odd"), "odd")])
def test_a_disk_that_cannot_be_written_is_a_fact(tmp_path, error, said):
    with mock.patch("os.fsync", side_effect=error):
        facts = find_facts(Job(folder=tmp_path), "10.0.0.1")
    assert (facts.disk_error, facts.disk_bytes_per_second, facts.address) == (said, 0.0, "10.0.0.1")
    assert list(tmp_path.iterdir()) == []
    assert {"pretrain_gpt.py", "zero/core/engine.py", "parallel/launch/route.py"} < set(facts.code)
    assert "missing" not in facts.code.values()


def errors_in_threads(check: Callable[[], object], names: Iterable[str]) -> dict[str, str]:
    """Run `check` at once in a thread of each name, and return the errors by these names."""
    errors = {}

    def run() -> None:
        try:
            check()
        except ConfigError as error:
            errors[threading.current_thread().name] = str(error)

    threads = [threading.Thread(target=run, name=name) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return errors


def test_a_problem_of_one_node_is_an_error_on_all_and_the_first_names_it():
    """It does so before others have ended: a scheduler then ends the first one."""
    served = [dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)]
    port = served[0].port
    facts = {node.name: node for node in nodes(num_devices=7)}
    options = argparse.Namespace(meet="n1:29500", nodes=3, names="n1,n2,n3", wait=WAIT)

    def route(_meet: str) -> Route:
        return Route(is_host=threading.current_thread().name == "n1", local_address="127.0.0.1", interface="lo")

    def connected(_address: object, is_host: bool, _node: str, _seconds: float) -> dist.Store:
        return served.pop() if is_host else dist.TCPStore("127.0.0.1", port, is_master=False)

    def clock() -> float:
        return time.time() + 9000.0 * (threading.current_thread().name == "n3")

    own_facts = mock.Mock(side_effect=lambda *_: facts[threading.current_thread().name])
    others = {"find_facts": own_facts, "resolve": lambda meet: meet, "connect": connected}
    others["time"] = SimpleNamespace(time=clock, monotonic=time.monotonic, sleep=time.sleep)
    with mock.patch.multiple(preflight, find_route=route, **others):
        errors = errors_in_threads(lambda: preflight.check_nodes(options, Job()), facts)
    there = "the preflight has found problems; the first node prints them"
    of_n3 = r"n3: its clock differs from n1's by \+[89]\d{3}\.\d s"
    assert next(iter(errors)) == "n1"
    assert re.fullmatch(rf"preflight: n2: number of GPUs: 7, elsewhere 8\n  {of_n3}", errors.pop("n1"))
    assert errors == {name: f"{name}: {there}" for name in ("n2", "n3")}


@pytest.mark.parametrize("num_looks", [3, None])
def test_a_node_that_does_not_see_in_time_what_the_first_has_written_is_named(tmp_path, monkeypatch, num_looks):
    """The folder of a slow disk shows the file after so many looks, of which there is time for 40; else never."""
    store, now = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False), 0.0
    with marked(tmp_path / "not" / "yet") as mark, ThreadPoolExecutor(1) as pool:

        def look_again(_seconds: float) -> None:
            nonlocal now
            now += 1.0
            if now + 1 == num_looks:
                (tmp_path / "late").rename(tmp_path / mark)

        (tmp_path / mark).rename(tmp_path / "late")
        monkeypatch.setattr(node_facts, "time", mock.Mock(monotonic=lambda: now, sleep=look_again))
        first = pool.submit(collect, store, ALIKE, 2, [], WAIT, mark)
        other = dist.TCPStore("127.0.0.1", store.port, is_master=False)
        number, found = report(other, dataclasses.replace(ALIKE, name="n2"), 2, WAIT, tmp_path / "not")
    problem = "n2: /shared/runs is not the disk of n1; choose a folder that all nodes share"
    assert first.result()[1] == found == ([] if num_looks else [problem])
    assert number == 1
    assert now == (num_looks - 1 if num_looks else 40)


def test_the_first_rank_of_each_node_reports_it_and_all_ranks_have_the_verdict():
    store = dist.HashStore()
    facts = {"0": ALIKE, "2": dataclasses.replace(ALIKE, name="n2", num_devices=7)}
    own_facts = mock.Mock(side_effect=lambda _job: facts[threading.current_thread().name])

    def check() -> None:
        rank = int(threading.current_thread().name)
        world = World(rank, 4, rank % 2, 2, torch.device("cpu"))
        check_ranks(world, Job())

    with (
        mock.patch.object(preflight, "find_facts", own_facts),
        mock.patch("parallel.store.shared_store", return_value=store),
    ):
        errors = errors_in_threads(check, "0123")
    assert errors == dict.fromkeys("0123", "preflight: n2: number of GPUs: 7, elsewhere 8")


def test_missing_nodes_are_named_and_one_too_many_is_refused():
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    now = 0.0

    def poll(_seconds: float) -> None:
        nonlocal now
        now += 2.5

    names = ["10.0.0.1", "n2", "n3.cluster"]
    with mock.patch.object(preflight, "time", mock.Mock(monotonic=lambda: now, sleep=poll)):
        _, problems = collect(store, ALIKE, num_nodes=3, names=names, wait_seconds=5)
        assert now == 5.0
        assert store.add("nodes/number", 0) == 0
        _, of_two = collect(store_of_two(), ALIKE, num_nodes=3, names=["n1", "n2", "n3"], wait_seconds=5)
    assert problems == ["1 of 3 nodes have reported within 5 s: n1; missing: n2, n3.cluster"]
    assert of_two == ["2 of 3 nodes have reported within 5 s: n1, n2; missing: n3"]
    store.set("nodes/number", "1")
    with pytest.raises(ConfigError, match=r"n4: is one node too many: NNODES=2"):
        report(store, dataclasses.replace(ALIKE, name="n4"), num_nodes=2, wait_seconds=1)


def store_of_two(**others: str) -> dist.Store:
    """Return a store to which the second of two nodes has reported, and read the verdict."""
    store = dist.HashStore()
    second = json.dumps(dataclasses.asdict(dataclasses.replace(ALIKE, name="n2")))
    values = {"nodes/number": "1", "nodes/facts/1": second, "nodes/num_left": "1"} | others
    for key, value in values.items():
        store.set(key, value)
    return store


def test_a_node_too_many_leaves_the_others_in_order():
    store = store_of_two(**{"nodes/number": "3", "nodes/asked/2/0": ""})
    found, problems = collect(store, ALIKE, num_nodes=2, names=[], wait_seconds=WAIT)
    assert ([node.name for node in found], problems) == (["n1", "n2"], [])
    assert not store.check(["nodes/clock/2/0"])


@pytest.mark.parametrize("ahead", [5.0, -5.0, 0.15, 0.0])
def test_the_clock_of_a_node_is_compared_by_the_fastest_reply(ahead):
    """The first node reads its clock halfway in the fastest request, and late in the others."""
    now, seconds = 1000.0, iter([(0.4, 0.1), (0.2, 0.1), (0.05, 0.05), (0.3, 0.0), (0.11, 0.0)])

    def reply(_key: str) -> bytes:
        nonlocal now
        before, after = next(seconds)
        now += before + after
        return repr(now - after - ahead).encode()

    store = mock.Mock(wraps=dist.HashStore(), get=reply)
    with mock.patch.object(preflight, "time", mock.Mock(time=lambda: now)):
        found = preflight.clock_difference(store, 7)
    assert found == pytest.approx(ahead if abs(ahead) > 0.1 else 0.0)
    assert next(seconds, None) is None


def test_a_node_waits_twice_as_long_for_the_verdict_and_says_if_the_first_has_ended():
    store = mock.Mock(wraps=dist.HashStore())
    store.get = lambda key: b"" if key == "nodes/mark" else b"0"
    store.wait.side_effect = dist.DistStoreError("Broken pipe\nstack")
    with pytest.raises(ConfigError, match=r"^n1: the first node has ended, or does not answer: Broken pipe; see its"):
        report(store, ALIKE, num_nodes=2, wait_seconds=20)
    assert store.wait.call_args.args == (["nodes/verdict"], timedelta(seconds=40))
    assert store.add("nodes/num_left", 0) == 1, "the first node is told"


@pytest.mark.parametrize(("num_polls", "num_seconds"), [(3, 7.5), (9, 12.5)])
def test_the_first_node_waits_for_the_others_to_read_the_verdict_and_not_for_ever(num_polls, num_seconds):
    """The other node has reported at the first poll, after 2.5 s, and reads the verdict at that of this number."""
    store, now = store_of_two(**{"nodes/num_left": "0"}), 0.0

    def poll(_seconds: float) -> None:
        nonlocal now
        now += 2.5
        store.add("nodes/num_left", int(now == 2.5 * num_polls))

    with mock.patch.object(preflight, "time", mock.Mock(monotonic=lambda: now, sleep=poll)):
        collect(store, ALIKE, num_nodes=2, names=[], wait_seconds=10)
    assert now == num_seconds


def test_one_process_per_node_compares_what_the_program_is_given(capsys, tmp_path):
    given = []

    def describe_job(arguments: Sequence[str], num_ranks: int | None) -> Job:
        given.append((arguments, num_ranks))
        return Job(folder=tmp_path)

    words = ["--meet", "localhost:29501", "--num_ranks", "4", "--", "--steps", "7", "--", "x"]
    connected, found = mock.Mock(return_value=dist.HashStore()), mock.Mock(return_value=ALIKE)
    with mock.patch.multiple(preflight, connect=connected, find_facts=found):
        main(words, describe_job)
    assert given == [(["--steps", "7", "--", "x"], 4)]
    found.assert_called_once_with(Job(folder=tmp_path), "127.0.0.1")
    connected.assert_called_once_with(("127.0.0.1", 29501), True, "n1", 120.0)
    assert capsys.readouterr().err == "preflight: 1 node is ready: n1\n"


def test_a_store_that_cannot_be_reached_or_served_is_an_error_with_the_name_of_the_node():
    with pytest.raises(ConfigError, match=r"n2: 127.0.0.1:1 cannot be reached within 0.5 s: start the first node"):
        connect(("127.0.0.1", 1), is_host=False, node="n2", wait_seconds=0.5)
    taken = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with pytest.raises(ConfigError, match=rf"n1: port {taken.port} cannot be served here"):
        connect(("127.0.0.1", taken.port), is_host=True, node="n1", wait_seconds=5)
