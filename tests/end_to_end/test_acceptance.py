"""The acceptance run: all parts pass on CPUs, and one that fails or hangs does not stop the others."""

import itertools
import json
import math
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from gpt.run_folder.files import NUMBERS_OF_A_STEP, append_records
from lab.acceptance import __main__ as acceptance
from lab.acceptance.__main__ import main, run_parts
from lab.acceptance.cases import cases_for
from lab.acceptance.child import run_child
from lab.acceptance.equality import NUM_MICRO_BATCHES, settings_of
from lab.acceptance.figures import Figure
from lab.acceptance.long_runs import long_run
from lab.acceptance.machine import Machine
from lab.acceptance.parts import Part, equality, parts
from lab.acceptance.plan import Plan
from lab.dryrun.__main__ import main as dry_run
from lab.measure.bandwidth import COLLECTIVES
from lab.measure.cluster import ClusterSpec
from lab.measure.device_kernels import KERNELS
from tests.programs import run_program, start_forked, wait_for_end, wait_until
from tests.ranks import run_ranks
from tests.source_files import ROOT

PYTHON = [sys.executable, "-c"]
MACHINE = Machine(0, "CPU", 0, "-", True, 2, "3", "2", "-", "-")
HANG_SECONDS = 1800


def small_parts(plan: Plan) -> list[Part]:
    """Return the parts of a run, with a preflight that measures little, and limits that only end a hang."""
    preflight, *others = parts(plan)
    words = [word.replace("lab.measure", "tests.unit.lab.measure.short_measurement") for word in preflight.command]
    return [replace(part, limit_seconds=HANG_SECONDS) for part in (replace(preflight, command=words), *others)]


def run_on_ranks(command: list[str], log: Path, limit_seconds: float, environment: dict[str, str]) -> str:
    """Run a command, which starts ranks or is a dry run, on the tests' ranks or in a fork: these need not import it."""
    if "parallel.launch" not in command:
        assert wait_for_end(start_forked(log, dry_run, command[2:])) == 0, log.read_text()
        return ""
    log.write_text("")
    run_ranks(2, run_program, *command[command.index("--nproc-per-node=2") + 1 :], init_process_group=False)
    return ""


@pytest.mark.parametrize("runs", [run_on_ranks, pytest.param(run_child, marks=pytest.mark.full)])
def test_all_parts_pass_on_cpus(tmp_path, monkeypatch, runs):
    monkeypatch.setattr(acceptance, "parts", small_parts)
    monkeypatch.setattr(acceptance, "run_child", runs)
    assert main(["--output", str(tmp_path), "--minutes", "60"]) == 0
    found = json.loads((tmp_path / "results.json").read_text())
    names = ["preflight", "equality, 2 ranks", "step time of a tiny GPT", "dry run, stage 2", "training, stage 2"]
    assert [part["name"] for part in found["parts"]] == [*names, "training, stage 2, without overlap"]
    assert all(part["passed"] for part in found["parts"])
    figures = {figure["what"]: figure["value"] for part in found["parts"] for figure in part["figures"]}
    assert figures["equal comparisons"] == figures["equal comparisons, delayed"] == "3 of 3"
    cluster = ClusterSpec.load(tmp_path / "cluster.yaml")
    assert {curve.name for curve in cluster.collectives} == {f"{name} of 2" for name in COLLECTIVES}
    assert len(cluster.kernels) == 2 * len(KERNELS)
    assert (cluster.name, cluster.device, cluster.gpus_per_node) == ("cpu", "cpu", 2)
    assert cluster.node_gb_per_second == pytest.approx(2 * cluster.intra_node_gb_per_second, rel=1e-3)
    page = (tmp_path / "results.md").read_text()
    assert "6 of 6 parts passed" in page
    assert all(f"| {what} |" in page for what in figures)


def part(name: str, script: str, limit_seconds: float = 60) -> Part:
    return Part(name, [*PYTHON, script], lambda log: [Figure("log", log.read_text().splitlines()[-1])], limit_seconds)


def is_running(pid: str) -> bool:
    """Return False also for a process that was killed and that nobody has waited for."""
    status = Path("/proc", pid, "status")
    return status.exists() and "State:\tZ" not in status.read_text()


def hanging_part(log: Path, monkeypatch: pytest.MonkeyPatch) -> Part:
    """Return a part that hangs, and whose time is up when it has printed the number of its child."""
    wait, limit = subprocess.Popen.wait, 77

    def wait_until_printed(child: subprocess.Popen, timeout: float | None = None) -> int:
        while timeout == limit and child.poll() is None:
            if len(log.read_text().splitlines()) > 1:  # the first line is the command
                raise subprocess.TimeoutExpired(child.args, timeout)
            time.sleep(0.01)
        return wait(child, timeout)

    monkeypatch.setattr(subprocess.Popen, "wait", wait_until_printed)
    # The child, like a rank of torchrun, is in a session of its own.
    sleep = "subprocess.Popen(['sleep', '1000'], start_new_session=True)"
    return part("hangs", f"import subprocess; p = {sleep}; print(p.pid, flush=True); p.wait()", limit)


def test_a_part_that_fails_or_hangs_does_not_stop_the_others(tmp_path, monkeypatch):
    (tmp_path / "logs").mkdir()
    rows = [
        part("fails", "print('start'); raise RuntimeError('no peer')"),
        hanging_part(tmp_path / "logs" / "hangs.log", monkeypatch),
        part("works", "print('fine')"),
    ]
    fails, hangs, works = run_parts(rows, Plan(MACHINE, 2, tmp_path), 15, Console(quiet=True))
    assert (fails.passed, hangs.passed, works.passed) == (False, False, True)
    assert fails.problem.startswith("RuntimeError: no peer (exit code 1; see ")
    assert hangs.problem.startswith("did not end within 77 s and was stopped; see ")
    assert works.figures == (Figure("log", "fine"),)
    wait_until(lambda: not is_running(str(hangs.figures[0].value)))  # the child of the part that hangs
    (late,) = run_parts(rows[2:], Plan(MACHINE, 2, tmp_path), 0, Console(quiet=True))
    assert late.problem == "was not run: the time is used up; --minutes gives more"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--gpus", "99"], "error: --gpus=99: this machine has "),
        (["--gpus", "many"], "error: argument --gpus: invalid int value: 'many'"),
        (["--minutes", "0"], "error: --minutes=0 is not above 0; choose 15"),
        (["--long"], "error: --long and --data PREFIX need each other"),
        (["--long", "--data", "nowhere"], "error: --data=nowhere: nowhere.bin does not exist"),
        (["--output", str(ROOT)], f"error: --output={ROOT} is not an empty folder"),
    ],
)
def test_wrong_arguments_end_with_code_2_and_one_line(arguments, message, capsys):
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    said = capsys.readouterr().err
    assert ended.value.code == 2
    assert said.startswith(message)
    assert said.count("\n") == 1


def test_a_different_loss_fails(tmp_path):
    file = tmp_path / "equality-2-ranks.jsonl"
    rows = [{"what": "a", "difference": 0.0, "passed": True}, {"what": "b", "difference": 0.1, "passed": False}]
    file.write_text("\n".join(json.dumps(row | {"ranks": 2, "is_delayed": True}) for row in rows))
    equal, largest = equality(Plan(MACHINE, 2, tmp_path), 2).read(tmp_path)
    assert (equal.value, equal.passed, largest.passed) == ("1 of 2; not: b", False, False)


@pytest.mark.parametrize(
    ("value", "text"), [(123456.7, "123,457 ms"), (524288000, "524,288,000 ms"), (1.23456, "1.235 ms"), ("no", "no ms")]
)
def test_a_figure_is_written_without_an_exponent(value, text):
    assert Figure("what", value, "ms").text == text


def test_a_long_run_with_a_loss_that_is_not_finite_fails(tmp_path):
    numbers = dict.fromkeys(sorted(NUMBERS_OF_A_STEP), 1.0)
    for stage in (0, 1):
        records = [numbers | {"step": 1, "loss": math.nan if stage else 5.0}]
        records += [numbers | {"step": 2, "loss": 4.0, "tokens": 10**9, "validation_loss": 4.0}]
        append_records(tmp_path / f"long-fp32-stage-{stage}", records)
    found = {figure.what: figure for figure in long_run(Plan(MACHINE, 2, tmp_path), "fp32", 1).read(tmp_path)}
    assert found["difference from stage 0"].passed
    not_finite = found["logged steps whose loss is not finite"]
    assert (not_finite.value, not_finite.passed) == (1, False)


@pytest.mark.parametrize("num_gpus", [1, 3, 6, 16])
def test_every_number_of_ranks_that_is_compared_has_cases_whose_settings_divide(num_gpus, tmp_path):
    plan = Plan(replace(MACHINE, num_gpus=num_gpus, gpu="NVIDIA H100"), num_gpus, tmp_path)
    commands = [part.command for part in parts(plan) if part.name.startswith("equality")]
    launched = [int(word.partition("=")[2]) for command in commands for word in command if "nproc" in word]
    assert len(launched) == len(plan.world_sizes) + 1
    for num_ranks in launched:
        for case in cases_for(num_ranks):
            train = settings_of(case, num_ranks).train
            assert train.num_micro_batches(num_ranks // case.tensor_size) == NUM_MICRO_BATCHES


@pytest.mark.parametrize("num_ranks", [1, 2, 4, 8])
def test_cases_contain_every_pair_of_values(num_ranks):
    cases = [vars(case) for case in cases_for(num_ranks)]
    assert all(case["store"] != "partition" or case["tensor_size"] > 1 for case in cases)
    assert all(num_ranks % (case["tensor_size"] * case["num_shard_groups"]) == 0 for case in cases)
    pairs = {pair for case in cases for pair in itertools.combinations(case.items(), 2)}
    for stage, store in itertools.product(range(4), ["none", "keep", "partition_host"]):
        assert (("stage", stage), ("store", store)) in pairs
    for stage, groups in itertools.product(range(4), [1, 2] if num_ranks > 1 else [1]):
        assert (("stage", stage), ("num_shard_groups", groups)) in pairs
