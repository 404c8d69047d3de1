"""Problems of nodes, links and devices are found and named."""

import argparse
import dataclasses
import os
import threading
from unittest import mock

import pytest
import torch.distributed as dist

from parallel.errors import ConfigError
from parallel.launch import bandwidth, device_kernels, preflight, reference_step
from parallel.launch.bandwidth import DeviceRate, LinkRate, slow_devices, slow_links
from parallel.launch.cluster import ClusterSpec
from parallel.launch.node_facts import Job, NodeFacts, find_facts, find_problems
from parallel.launch.preflight import arguments_only, main
from parallel.launch.reference_step import Shape
from parallel.launch.roll_call import collect_facts, connect, report_facts
from parallel.launch.route import Route
from tests.ranks import run_ranks

ALIKE = NodeFacts(
    name="n1",
    address="10.0.0.1",
    code={"gpt/trainer.py": "a", "gpt/build.py": "b"},
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
        (
            {"code": {"gpt/trainer.py": "x", "gpt/build.py": "b"}},
            "n2: other code than elsewhere: gpt/trainer.py",
        ),
        ({"code": {"gpt/build.py": "b"}}, "n2: other code than elsewhere: gpt/trainer.py"),
        ({"data": {"corpus.idx": "missing"}}, "n2: other data than elsewhere: corpus.idx"),
        ({"settings": ["train.steps=9"]}, "n2: other settings than elsewhere: train.steps=10, train.steps=9"),
        (
            {"versions": "Python 3.11.7, torch 2.11.0"},
            "n2: versions: Python 3.11.7, torch 2.11.0, elsewhere Python 3.11.7, torch 2.13.0",
        ),
        ({"num_devices": 7}, "n2: number of GPUs: 7, elsewhere 8"),
        ({"clock_seconds": -3.5}, "n2: its clock differs from n1's by -3.5 s"),
        ({"clock_seconds": 1.9}, None),
        ({"disk_error": "No space left on device"}, "n2: /shared/runs cannot be written: No space left on device"),
        ({"free_bytes": 10**9}, "n2: /shared/runs is nearly full: 1.00 GB are free"),
        ({"disk_bytes_per_second": 1e8}, "n2: /shared/runs is slow: 100.0 MB/s, the fastest node has 1000.0"),
        ({"disk_bytes_per_second": 3e8}, None),
    ],
)
def test_a_node_that_differs_is_named_with_what_differs(odd, problem):
    assert find_problems(nodes(**odd)) == ([problem] if problem else [])


def test_the_first_node_may_be_the_odd_one():
    n1, odd, n3 = nodes(code={"gpt/trainer.py": "x", "gpt/build.py": "b"})
    assert find_problems([odd, n1, n3]) == ["n2: other code than elsewhere: gpt/trainer.py"]


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


def test_the_rate_of_a_disk_is_that_of_bytes_which_have_reached_it(tmp_path):
    flushed, now = [], 10.0

    def flush(file: int) -> None:
        nonlocal now
        flushed.append(os.fstat(file).st_size)
        now += 0.25

    def clock() -> float:
        return now

    with mock.patch("os.fsync", flush), mock.patch("time.perf_counter", clock):
        rate = find_facts(Job(folder=tmp_path)).disk_bytes_per_second
    assert flushed == [32 * 2**20]
    assert rate == 128 * 2**20


def test_without_a_description_the_arguments_are_compared_as_they_are():
    assert arguments_only(["--steps", "7"], None) == Job(settings=("--steps", "7"))


def test_all_nodes_read_the_same_verdict():
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    first, second, third = nodes(num_devices=7)
    verdicts = {}

    def report(facts: NodeFacts) -> None:
        theirs = dist.TCPStore("127.0.0.1", store.port, is_master=False)
        verdicts[facts.name] = report_facts(theirs, facts, num_nodes=3, wait_seconds=20)

    threads = [threading.Thread(target=report, args=(facts,)) for facts in (second, third)]
    for thread in threads:
        thread.start()
    found, problems = collect_facts(store, first, num_nodes=3, names=[], wait_seconds=20)
    for thread in threads:
        thread.join()
    assert {node.name for node in found} == {"n1", "n2", "n3"}
    assert all(abs(node.clock_seconds) < 1 for node in found)
    assert verdicts == {"n2": problems, "n3": problems}
    assert problems == ["n2: number of GPUs: 7, elsewhere 8"]


def test_a_problem_of_one_node_is_an_error_on_all_and_the_first_names_it():
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    facts = {node.name: node for node in nodes(num_devices=7)}
    options = argparse.Namespace(meet="n1:29500", nodes=3, names="n1,n2,n3", wait=20)
    errors = {}

    def check() -> None:
        try:
            preflight.check_nodes(options, Job())
        except ConfigError as error:
            errors[threading.current_thread().name] = str(error)

    def route(_meet: str) -> Route:
        return Route(is_host=threading.current_thread().name == "n1", local_address="127.0.0.1", interface="lo")

    def connected(_address: object, is_host: bool, _node: str, _seconds: float) -> dist.Store:
        return store if is_host else dist.TCPStore("127.0.0.1", store.port, is_master=False)

    own_facts = mock.Mock(side_effect=lambda *_: facts[threading.current_thread().name])
    others = {"find_facts": own_facts, "resolve": lambda meet: meet, "connect": connected}
    with mock.patch.multiple(preflight, find_route=route, **others):
        threads = [threading.Thread(target=check, name=name) for name in facts]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    there = "the preflight has found problems; the first node prints them"
    assert errors == {"n1": "preflight: n2: number of GPUs: 7, elsewhere 8", "n2": f"n2: {there}", "n3": f"n3: {there}"}


def test_missing_nodes_are_named_and_one_too_many_is_refused():
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    _, problems = collect_facts(store, ALIKE, num_nodes=3, names=["10.0.0.1", "n2", "n3.cluster"], wait_seconds=0.1)
    assert problems == ["1 of 3 nodes have reported within 0.1 s: n1; missing: n2, n3.cluster"]
    store.set("nodes/number", "1")
    with pytest.raises(ConfigError, match=r"n4: is one node too many: NNODES=2"):
        report_facts(store, dataclasses.replace(ALIKE, name="n4"), num_nodes=2, wait_seconds=1)


def test_a_store_that_cannot_be_reached_or_served_is_an_error_with_the_name_of_the_node():
    with pytest.raises(ConfigError, match=r"n2: 127.0.0.1:1 cannot be reached within 0.5 s: start the first node"):
        connect(("127.0.0.1", 1), is_host=False, node="n2", wait_seconds=0.5)
    taken = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with pytest.raises(ConfigError, match=rf"n1: port {taken.port} cannot be served here"):
        connect(("127.0.0.1", taken.port), is_host=True, node="n1", wait_seconds=5)


def rates(*gb_per_second: float) -> list[LinkRate]:
    return [LinkRate("data", "link", (rank, rank + 1), rate * 1e9) for rank, rate in enumerate(gb_per_second)]


def test_slow_links_are_those_far_below_the_median_or_the_expected():
    assert [link.ranks for link in slow_links(rates(10, 9, 6, 10), {})] == [(2, 3)]
    assert slow_links(rates(10), {}) == []
    assert [link.ranks for link in slow_links(rates(10), {"data": 25e9})] == [(0, 1)]
    assert slow_links(rates(10), {"data": 15e9}) == []


def test_slow_devices_are_those_below_the_median_or_far_below_the_expected():
    devices = [DeviceRate(rank, tflops * 1e12, 1.0, 1.0, 1.0) for rank, tflops in enumerate((100, 70, 100))]
    assert [device.rank for device in slow_devices(devices, 0.0)] == [1]
    assert [device.rank for device in slow_devices(devices, 250e12)] == [0, 1, 2]


def main_in_short(words: list[str]) -> None:
    """Run the preflight with few, small measurements."""
    sizes = {"NUMELS": {"cpu": (2**10, 2**12)}, "LAYERS": {"cpu": ((8, 16, 32), (32, 32, 32))}, "BUDGET_SECONDS": 0.0}
    messages = {"MESSAGE_BYTES": (2**10, 2**14), "SECONDS_EACH": 0.01}
    shapes = {"cpu": Shape(1, 16, 2, 8, 2, 32)}
    with (
        mock.patch.multiple(device_kernels, **sizes),
        mock.patch.multiple(bandwidth, **messages),
        mock.patch.multiple(reference_step, SHAPES=shapes, BUDGET_SECONDS=0.0),
    ):
        main(words)


def test_a_job_measures_itself_and_writes_a_cluster_file(tmp_path):
    path = tmp_path / "cluster.yaml"
    words = ["--write", str(path), "--name", "two ranks", "--tensor_size", "1"]
    run_ranks(2, main_in_short, words, init_process_group=False)
    cluster = ClusterSpec.load(path)
    assert {curve.name for curve in cluster.collectives} == {
        "all_reduce of 2",
        "all_gather of 2",
        "reduce_scatter of 2",
    }
    assert cluster.device == "cpu"
    assert cluster.attention_fraction > 0
    assert len(cluster.kernels) == 2 * len(device_kernels.KERNELS)
    assert (cluster.name, cluster.gpus_per_node) == ("two ranks", 2)
    assert cluster.node_gb_per_second == pytest.approx(2 * cluster.intra_node_gb_per_second, rel=1e-3)
