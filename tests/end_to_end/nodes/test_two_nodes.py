"""Two nodes with a network between them: a run that loses a node, and faults that preflights find."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator

import pytest

from lab.acceptance.child import ROOT
from lab.faults import testbed
from lab.faults.runs import prepare_corpus
from lab.faults.testbed import Node, joined_nodes, launch_on
from lab.faults.two_nodes import NUM_STEPS, lose_and_restart
from lab.measure.cluster import ClusterSpec

pytestmark = pytest.mark.full

WAIT_SECONDS = 60  # which only nodes that cannot reach the first one need


@pytest.fixture
def nodes() -> Iterator[list[Node]]:
    if reason := testbed.testbed_problem():
        pytest.skip(reason)
    with joined_nodes() as nodes:
        yield nodes


def test_a_run_that_loses_a_node_goes_on_as_if_nothing_had_happened(nodes, tmp_path):
    undisturbed, found = lose_and_restart(nodes, prepare_corpus(tmp_path), tmp_path)
    assert [step for step, _, _ in undisturbed] == list(range(1, NUM_STEPS + 1))
    assert {what: story for what, (_, story) in found.items()} == dict.fromkeys(found, undisturbed)
    assert all(code != 0 for code, _ in found.values())


def preflight(nodes: list[Node], arguments: list[str], on_second: str = "") -> list[tuple[int, str]]:
    """Return (exit code, standard error) of each node; `on_second` is run by the shell of the second one first."""
    own = ["--nodes=2", "--meet=10.77.0.1:29501", f"--wait={WAIT_SECONDS}", "--names", "n1,n2"]
    settings = ["--config", "configs/quickstart.yaml", *arguments]
    words = [sys.executable, "-m", "gpt.preflight", *own, "--", *settings]
    running = [
        subprocess.Popen(
            node.command(words, on_second if node is nodes[1] else ""),
            cwd=ROOT,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stderr=subprocess.PIPE,
            text=True,
        )
        for node in nodes
    ]
    said = [process.communicate(timeout=600)[1] for process in running]
    return [(process.returncode, text) for process, text in zip(running, said, strict=True)]


def test_nodes_that_are_alike_pass(nodes, tmp_path):
    (first, said), (second, _) = preflight(nodes, [f"--data.path={prepare_corpus(tmp_path)}"])
    assert (first, second) == (0, 0)
    assert "preflight: 2 nodes are alike: n1, n2" in said


@pytest.mark.parametrize(
    ("on_second", "found"),
    [
        ("mount --bind /dev/null gpt/trainer.py", "n2: other code than elsewhere: gpt/trainer.py"),
        ("mount --bind /dev/null {data}.idx", "n2: other data than elsewhere: {data}.idx"),
        (
            "mount -t tmpfs -o size=40m tmpfs {run}",
            "n2: the first node has another secret; all nodes need the same folder",
        ),
        ("ip route replace blackhole 10.77.0.1/32", "1 of 2 nodes have reported within {wait} s: n1; missing: n2"),
    ],
    ids=["code", "data", "own disk", "blocked port"],
)
def test_what_is_wrong_with_a_node_is_found_with_its_name(nodes, tmp_path, on_second, found):
    data, run = prepare_corpus(tmp_path), tmp_path / "run"
    run.mkdir()
    arguments = [f"--data.path={data}", f"--run.dir={run}"]
    on_second, found = (text.format(data=data, run=run, wait=WAIT_SECONDS) for text in (on_second, found))
    (first, said), (second, said_by_second) = preflight(nodes, arguments, on_second)
    assert (first, second) == (2, 2)
    lines = (said + said_by_second).splitlines()
    problems = [re.sub(r"^error: (preflight: )?", "", line.strip()) for line in lines]
    assert any(problem.startswith(found) for problem in problems)
    assert "n2" in said_by_second


def test_links_are_measured_and_a_slow_one_is_named(nodes, tmp_path):
    for node in nodes:
        node.limit(200)
    written = tmp_path / "cluster.yaml"
    said = launch_on(nodes, 2, "lab.measure", "--expect", "configs/clusters/dgx-2.yaml", "--write", str(written))
    assert re.search(r"slow link: ranks \d, \d on n1, n2: 0\.0", said)
    found = ClusterSpec.load(written)
    # 200 Mbit/s are 0.025 GB/s per node, headers included, plus a burst of 256 KiB.
    assert found.node_gb_per_second == pytest.approx(0.025, rel=0.15)
    assert found.intra_node_gb_per_second > 4 * found.node_gb_per_second
