"""The harness of faults: what it takes for a traceback, an abort or a hang, and the bits that it flips."""

import random
import sys
from argparse import ArgumentTypeError
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lab.faults.__main__ import run_round, table
from lab.faults.failing_run import Fault
from lab.faults.faults import FAULTS, Outcome, Round, WrongError, check
from lab.faults.flips import TARGETS, flip
from lab.faults.runs import Ended, Job
from parallel.mesh import Axis
from zero.data_parallel import ZeroDataParallel
from zero.optimizer import ZeroOptimizer
from zero.settings.config import ZeroConfig

TRACEBACK = 'Traceback (most recent call last):\n  File "a.py", line 1, in f\n    g()\n'
OF_RANK = "".join(f"[rank1]:     {line}\n" for line in TRACEBACK.splitlines()).replace("     Traceback", " Traceback")
BROKEN = "RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:5"


@pytest.mark.parametrize(
    ("ended", "reason"),
    [
        (Ended(0, "step 1"), ""),
        (Ended(2, "error: the disk is full"), ""),
        (Ended(None, "step 1"), "HANG"),
        (Ended(1, f"{TRACEBACK}KeyError: 'a'\n"), "TRACEBACK: KeyError: 'a'"),
        (Ended(0, f"{OF_RANK}[rank1]: ValueError: of a rank\nstep 2"), "TRACEBACK: ValueError: of a rank"),
        (Ended(0, f"{TRACEBACK}{BROKEN}\n"), "TRACEBACK: RuntimeError"),
        (Ended(1, "exitcode: -6\nSignal 6 (SIGABRT) received by PID 7"), "ABORT"),
        (Ended(139, ""), "ABORT"),
        (Ended(7, "error: no code for this"), "EXIT CODE 7: error: no code for this"),
        (Ended(2, "exit code 2"), "NO REASON"),
    ],
)
def test_a_job_may_end_well_or_with_a_reason_and_in_no_other_way(ended: Ended, reason: str):
    if reason:
        with pytest.raises(WrongError) as found:
            check(ended, 0, 2)
        assert str(found.value).startswith(reason)
    else:
        check(ended, 0, 2)


def test_only_where_a_rank_is_killed_the_others_may_say_that_its_connection_broke():
    check(Ended(0, f"{TRACEBACK}{BROKEN}\n"), 0, breaks_connections=True)
    aborted = "NCCL error: remote process exited or there was a network error\nSignal 6 (SIGABRT) received by PID 7"
    check(Ended(0, aborted), 0, breaks_connections=True)
    with pytest.raises(WrongError, match="ABORT"):
        check(Ended(0, "Signal 6 (SIGABRT) received by PID 7"), 0, breaks_connections=True)
    with pytest.raises(WrongError, match="KeyError"):
        check(Ended(0, f"{TRACEBACK}{BROKEN}\n{TRACEBACK}KeyError: 'a'\n"), 0, breaks_connections=True)


def test_a_job_that_does_not_end_is_killed_with_all_of_its_processes(tmp_path: Path):
    grandchild = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(60)'])"
    job = Job({"launcher": [sys.executable, "-c", grandchild]}, tmp_path / "run")
    assert job.end(limit_seconds=0.5) == Ended(None, "")


def test_a_fault_is_read_as_it_is_written():
    for text in ("0:1:reduce:5:kill", "2:0:moment:300:pause", "0:2:step:7:moment.31"):
        assert str(Fault.parse(text)) == text
    assert Fault.parse("0:1:reduce:5").action == "kill"
    wrong = "0:1:nowhere:5", "0:1:reduce:5:laugh", "0:1:step:5:nothing.3", "0:1:step:5", "0:1:step:5:moment"
    for text in (*wrong, "0:1:reduce:5:moment.3"):
        with pytest.raises(ArgumentTypeError, match="choose one of"):
            Fault.parse(text)


@pytest.mark.parametrize("target", TARGETS)
def test_one_bit_of_one_parameter_flips_in_the_step_that_is_asked_for(target: str, capfd: pytest.CaptureFixture):
    model = ZeroDataParallel(nn.Linear(5, 3), Axis.trivial("data"), ZeroConfig(1))
    optimizer = ZeroOptimizer(model, torch.optim.AdamW)
    model(torch.ones(2, 5)).sum().backward()
    optimizer.step()  # the moments exist from here on
    states: list[dict[str, torch.Tensor]] = []

    def step(model: Any, optimizer: Any, batches: Any, mesh: Any, guard: Any, hook: Any, leaves: Any) -> None:
        model(torch.ones(2, 5)).sum().backward()
        hook()
        states.append({name: tensor.clone() for name, tensor in TARGETS[target](model, optimizer)})
        model.zero_grad()

    failing = flip(step, 2, target, 3, rank=1)
    for _ in range(2):
        failing(model, optimizer, [], None, None, lambda: None, None)
    said = capfd.readouterr().err
    changed = {name: (states[0][name] != states[1][name]).sum().item() for name in states[0]}
    (name,) = [name for name, number in changed.items() if number]
    assert changed[name] == 1
    assert said.startswith(f"chaos: rank 1, step 2: {target} of {name}, bit 3: ")
    assert said.count("\n") == 1


def test_a_round_that_goes_wrong_is_counted_and_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def wrong(this: Round) -> Outcome:
        raise WrongError("OTHER LOSSES: 3 of 4 steps")

    monkeypatch.setitem(FAULTS, "kill", wrong)
    this = Round(random.Random(0), tmp_path, tmp_path, lambda settings, num_ranks: [])
    outcome = run_round("kill", this)
    assert outcome == Outcome("OTHER LOSSES", "3 of 4 steps", is_wrong=True)
    rows = table({"kill": [outcome, Outcome("same losses")], "clock": [Outcome("not run")]})
    assert [list(column.cells) for column in rows.columns] == [
        ["kill", "clock"],
        ["2", "1"],
        ["1 OTHER LOSSES, 1 same losses", "1 not run"],
        ["1", "0"],
    ]
