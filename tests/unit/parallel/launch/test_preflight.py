"""Nodes that are missing or differ are named, on all nodes."""

import argparse
import asyncio
import dataclasses
import json
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from lab.measure import __main__ as measurement
from parallel.launch import preflight
from parallel.launch.channel import Channel
from parallel.launch.node_facts import Job, NodeFacts, find_facts, find_problems
from parallel.launch.preflight import FIRST_NODE, First, Meeting, main, report
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


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def errors_of_nodes(facts: dict[str, NodeFacts], folders: dict[str, Path], wait: float) -> dict[str, str]:
    """Return the errors of nodes, each a thread, of which n1 is the first."""
    options = argparse.Namespace(meet=f"127.0.0.1:{free_port()}", nodes=3, names="n1,n2,n3", wait=wait)

    def name() -> str:
        return threading.current_thread().name

    def check() -> None:
        numbers[name()] = preflight.check_nodes(options, Job(folder=folders[name()]))

    numbers: dict[str, int] = {}
    replaced: dict[str, Any] = {"find_facts": lambda *_: facts[name()]}
    replaced["find_route"] = lambda _meet: Route(is_host=name() == "n1", local_address="127.0.0.1", interface="lo")
    clock = SimpleNamespace(monotonic=time.monotonic, sleep=time.sleep)
    clock.time = lambda: time.time() + 9000.0 * (name() == "n3")
    with mock.patch.multiple(preflight, time=clock, **replaced):
        errors = errors_in_threads(check, facts)
    assert sorted(numbers.values()) == list(range(len(facts) - len(errors)))
    return errors


def test_a_problem_of_one_node_is_an_error_on_all_and_the_first_names_it(tmp_path, monkeypatch):
    """It does so before others have ended: a scheduler then ends the first one."""
    monkeypatch.setattr(preflight, "SILENT_SECONDS", 0.0)
    serve, served = Channel.serve, []
    monkeypatch.setattr(Channel, "serve", lambda own, *words: (served.append(own), serve(own, *words)))
    wait = preflight.refuse

    def refuse(problems: Sequence[str]) -> None:
        served[0].run(asyncio.sleep(0))
        served[0]._loop.call_soon_threadsafe(served[0]._loop.stop)  # as the end of the process
        wait(problems)

    monkeypatch.setattr(preflight, "refuse", refuse)
    facts = {node.name: node for node in nodes(num_devices=7)}
    errors = errors_of_nodes(facts, dict.fromkeys(facts, tmp_path / "run"), WAIT)
    there = "the preflight has found problems; the first node prints them"
    of_n3 = r"n3: its clock differs from n1's by \+[89]\d{3}\.\d s"
    assert next(iter(errors)) == "n1"
    assert re.fullmatch(rf"preflight: n2: number of GPUs: 7, elsewhere 8\n  {of_n3}", errors.pop("n1"))
    assert errors == {name: f"{name}: {there}" for name in ("n2", "n3")}


def test_the_first_rank_of_each_node_reports_it_and_all_ranks_have_the_verdict():
    store = dist.HashStore()
    facts = {"0": ALIKE, "2": dataclasses.replace(ALIKE, name="n2", num_devices=7)}
    own_facts = mock.Mock(side_effect=lambda _job: facts[threading.current_thread().name])

    def check() -> None:
        rank = int(threading.current_thread().name)
        world = World(rank, 4, rank % 2, 2, torch.device("cpu"))
        measurement.check_ranks(world, Job())

    with (
        mock.patch.object(measurement, "find_facts", own_facts),
        mock.patch("parallel.store.shared_store", return_value=store),
    ):
        errors = errors_in_threads(check, "0123")
    assert errors == dict.fromkeys("0123", "preflight: n2: number of GPUs: 7, elsewhere 8")


class Answers:
    """A first node that answers as it is told."""

    def __init__(self, *answers: dict[str, Any]):
        self.asked: list[dict[str, Any]] = []
        self._answers = list(answers)

    def ask(self, **request: Any) -> dict[str, Any]:
        self.asked.append(request)
        return self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]


def reported(meeting: Meeting, *names: str) -> list[Any]:
    """Report nodes, and return their numbers."""
    facts = [json.dumps(dataclasses.asdict(dataclasses.replace(ALIKE, name=name))) for name in names]
    answers = [meeting.answer({"by": name, "facts": each}) for name, each in zip(names, facts, strict=True)]
    return [json.loads(answer)["number"] for answer in answers]


def test_missing_nodes_are_named_and_one_too_many_is_refused():
    now = 0.0

    def poll(_seconds: float) -> None:
        nonlocal now
        now += 2.5

    names = ["10.0.0.1", "n2", "n3.cluster"]
    of_two = Meeting(ALIKE, 3)
    assert reported(of_two, "n2") == [1]
    with mock.patch.object(preflight, "time", mock.Mock(monotonic=lambda: now, sleep=poll, time=lambda: now)):
        assert Meeting(ALIKE, 3).collect(names, 5) == [
            "1 of 3 nodes have reported within 5 s: n1; missing: n2, n3.cluster"
        ]
        assert now == 5.0
        of_two.answer({"by": "n2"})
        assert of_two.collect(["n1", "n2", "n3"], 5) == ["2 of 3 nodes have reported within 5 s: n1, n2; missing: n3"]
    with pytest.raises(ConfigError, match=r"n4: is one node too many: NNODES=2"):
        report(Answers({"clock": 0.0, "number": None, "verdict": None}), dataclasses.replace(ALIKE, name="n4"), 2)


def test_a_node_too_many_leaves_the_others_in_order():
    meeting = Meeting(ALIKE, 3)
    assert reported(meeting, "n2", "n3", "n4", "n2") == [1, 2, None, 1]
    assert [node.name for node in meeting.found.values()] == ["n1", "n2", "n3"]


@pytest.mark.parametrize("ahead", [5.0, -5.0, 0.15, 0.0])
def test_the_clock_of_a_node_is_compared_unless_the_reply_took_longer(ahead):
    """The first node reads its clock halfway in a request of 0.1 s."""
    now = 1000.0
    first = Answers({"clock": now + 0.05 - ahead, "number": 1, "verdict": []})
    clock = mock.Mock(time=mock.Mock(side_effect=[now, now + 0.1]))
    with mock.patch.object(preflight, "time", clock):
        assert report(first, ALIKE, 2) == 1
    found = json.loads(first.asked[1]["facts"])["clock_seconds"]
    assert found == pytest.approx(ahead if abs(ahead) > 0.1 else 0.0)


@pytest.mark.parametrize(("num_polls", "num_seconds"), [(3, 7.5), (9, 12.5)])
def test_the_first_node_waits_for_the_others_to_read_the_verdict_and_not_for_ever(num_polls, num_seconds):
    """The other node has reported at the first poll, after 2.5 s, and reads the verdict at that of this number."""
    meeting, now = Meeting(ALIKE, 2), 0.0

    def poll(_seconds: float) -> None:
        nonlocal now
        now += 2.5
        if now == 2.5:
            reported(meeting, "n2")
        if now == 2.5 * num_polls:
            assert json.loads(meeting.answer({"by": "n2"}))["verdict"] == []

    with mock.patch.object(preflight, "time", mock.Mock(monotonic=lambda: now, sleep=poll, time=lambda: now)):
        assert meeting.collect([], 10) == []
    assert now == num_seconds


def test_one_process_per_node_compares_what_the_program_is_given(capsys, tmp_path):
    given = []

    def describe_job(arguments: Sequence[str], num_ranks: int | None) -> Job:
        given.append((arguments, num_ranks))
        return Job(folder=tmp_path)

    words = ["--meet", "localhost:29501", "--num_ranks", "4", "--", "--steps", "7", "--", "x"]
    with mock.patch.object(preflight, "find_facts", return_value=ALIKE) as found:
        main(words, describe_job)
    assert given == [(["--steps", "7", "--", "x"], 4)]
    found.assert_called_once_with(Job(folder=tmp_path), "127.0.0.1")
    said = capsys.readouterr()
    assert (said.out, said.err) == (f"{tmp_path}\n0\n", "preflight: 1 node is ready: n1\n")
    assert list(tmp_path.iterdir()) == [], "one node has no secret, and listens to nobody"


def test_a_first_node_that_is_not_there_or_has_another_folder_or_ends_is_an_error_with_the_name_of_the_node(
    monkeypatch,
):
    port = free_port()
    with pytest.raises(
        ConfigError, match=rf"n2: 127.0.0.1:{port} cannot be reached within 0.5 s: start the first node"
    ):
        First(Channel(b"k"), f"127.0.0.1:{port}", "n2", 0.5).ask()
    served = Channel(b"k")
    served.serve(("127.0.0.1", port), FIRST_NODE, Meeting(ALIKE, 2).answer)
    with pytest.raises(ConfigError, match=r"n2: the first node has another secret; all nodes need the same folder"):
        First(Channel(b"x"), f"127.0.0.1:{port}", "n2", WAIT).ask()
    monkeypatch.setattr(preflight, "SILENT_SECONDS", 0.0)
    first = First(Channel(b"k"), f"127.0.0.1:{port}", "n2", WAIT)
    assert first.ask()["number"] is None
    monkeypatch.setattr(Channel, "ask", mock.AsyncMock(side_effect=ConnectionRefusedError("refused")))
    with pytest.raises(ConfigError, match="n2: the first node has ended, or does not answer; see its output"):
        first.ask()


def test_a_port_that_is_taken_is_an_error_with_the_name_of_the_node(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        options = argparse.Namespace(meet=f"127.0.0.1:{port}", nodes=2, names="", wait=1.0)
        with (
            mock.patch.object(preflight, "find_facts", return_value=ALIKE),
            pytest.raises(ConfigError, match=rf"n1: port {port} cannot be served here"),
        ):
            preflight.check_nodes(options, Job(folder=tmp_path))
