"""Launch scripts run the right commands on each node, with environment and exit code; cluster commands are stubs."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
from torch.distributed import run
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from parallel.launch import __main__ as launcher
from tests.programs import wait_until
from tests.source_files import ROOT

SCRIPTS = ROOT / "scripts" / "launch"
WATCHED = ("OMP_NUM_THREADS", "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "CUDA_DEVICE_MAX_CONNECTIONS")
WATCHED += ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
WATCHED += ("MASTER_ADDR", "MASTER_PORT", "NNODES", "RDZV", "NODE_NAMES")

# Records how it was called, and exits as it is told, after ENDS_AFTER was called. As `python` it answers for the route.
STUB = f"""#!{sys.executable}
import json, os, sys, time
name, words = os.path.basename(sys.argv[0]), sys.argv[1:]
with open(os.environ["CALLS"], "a") as file:
    seen = {{key: os.environ[key] for key in {WATCHED} if key in os.environ}}
    file.write(json.dumps([os.environ.get("NODE", ""), [name, *words], seen]) + "\\n")
if "parallel.launch.route" in words:
    print(os.environ.get("IS_HOST", "1") + " 10.0.0.1 ib0")
elif "gpt.preflight" in words:
    print(os.environ.get("FOLDER", "") + "\\n2")
elif "lab.measure.health" in words and "--nodes" in words and os.environ.get("NODE") in os.environ["WELL"]:
    print("nodes left: " + os.environ["WELL"])
elif name == "scontrol" and words[:2] == ["show", "hostnames"]:
    print("n1\\nn2")
elif name == "squeue":
    print(os.environ["JOB_ENDS"])
for program, code in json.loads(os.environ.get("ENDS", "{{}}")).items():
    if program in words:
        for _ in range(6000):
            if os.environ.get("ENDS_AFTER", name) in open(os.environ["CALLS"]).read():
                sys.exit(code)
            time.sleep(0.01)
"""
# Runs its command once per task.
SRUN = """#!/usr/bin/env bash
"$(dirname "$0")/noted" srun "$@"
while [[ $1 == --* ]]; do [[ $1 != --ntasks=* ]] || tasks=${1#*=}; shift; done
export SLURM_NTASKS=$tasks
for ((task = 0; task < tasks; task++)); do
    NODE=n$((task + 1)) SLURM_PROCID=$task SLURM_LOCALID=$((task % (tasks / SLURM_JOB_NUM_NODES))) "$@" || exit
done
"""
SSH = """#!/usr/bin/env bash
NODE=${*: -2:1} exec bash -c "${*: -1}"
"""


@dataclass(frozen=True)
class Call:
    node: str
    words: list[str]
    environment: dict[str, str]


@pytest.fixture
def stubs(tmp_path: Path) -> Path:
    folder = tmp_path / "bin"
    folder.mkdir()
    programs = {
        "python": STUB,
        "scontrol": STUB,
        "scancel": STUB,
        "squeue": STUB,
        "noted": STUB,
        "srun": SRUN,
        "ssh": SSH,
    }
    for name, source in programs.items():
        (folder / name).write_text(source)
        (folder / name).chmod(0o755)
    return folder


def environment(stubs: Path, **settings: str) -> dict[str, str]:
    kept = {key: value for key, value in os.environ.items() if key not in WATCHED and not key.startswith("SLURM")}
    own = {"PATH": f"{stubs}:{os.environ['PATH']}", "PYTHON": str(stubs / "python"), "CALLS": str(stubs / "calls")}
    return kept | own | settings


def calls_in(stubs: Path) -> list[Call]:
    calls = stubs / "calls"
    return [Call(*json.loads(line)) for line in calls.read_text().splitlines()] if calls.exists() else []


def launch(script: str, stubs: Path, *arguments: str, **settings: str) -> tuple[int, list[Call], str]:
    """Return (exit code, the calls of stubs, the output)."""
    command, own = [SCRIPTS / script, *arguments], environment(stubs, **settings)
    ended = subprocess.run(command, env=own, capture_output=True, text=True, check=False)
    return ended.returncode, calls_in(stubs), ended.stdout + ended.stderr


def test_torchrun_checks_the_nodes_then_starts_their_ranks_and_says_so(stubs):
    settings = {"NNODES": "2", "RDZV": "n1:29500", "RANKS_PER_NODE": "4", "NODE_NAMES": "n1,n2"}
    settings["GLOO_SOCKET_IFNAME"] = "eth9"  # which the user has set
    code, calls, said = launch("torchrun.sh", stubs, "--train.steps=5", **settings)
    assert code == 0
    route, check, start = calls
    assert route.words[1:] == ["-m", "parallel.launch.route", "n1:29500"]
    nodes = ["--nodes", "2", "--num_ranks", "8", "--meet", "n1:29501", "--names", "n1,n2", "--wait", "120"]
    assert check.words[1:] == ["-m", "gpt.preflight", *nodes, "--", "--train.steps=5"]
    assert start.words[1:3] == ["-m", "parallel.launch"]
    assert {"--nnodes=2", "--nproc-per-node=4", "--local-addr=10.0.0.1"} < set(start.words)
    # Torch's static rendezvous, which unpickles nothing.
    assert {"--master-addr=10.0.0.1", "--master-port=29500", "--node-rank=0"} < set(start.words)
    assert not [word for word in start.words if "rdzv-backend" in word]
    assert start.words[-2:] == ["pretrain_gpt.py", "--train.steps=5"]
    seen = start.environment
    assert (seen["NCCL_SOCKET_IFNAME"], seen["GLOO_SOCKET_IFNAME"]) == ("=ib0", "eth9")
    assert {"OMP_NUM_THREADS", "CUDA_DEVICE_MAX_CONNECTIONS", "TORCH_NCCL_ASYNC_ERROR_HANDLING"}.isdisjoint(seen)
    assert "+ " + " ".join([str(stubs / "python"), *start.words[1:]]) in said


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"NNODES": "2", "IS_HOST": "0"}, ["--master-addr=n1", "--node-rank=1"]),
        ({"NNODES": "3", "IS_HOST": "0"}, ["--master-addr=n1", "--node-rank=2"]),  # its number in the checks
        ({"NNODES": "3", "NODE_RANK": "1", "CHECK": "0"}, ["--node-rank=1"]),
        ({"NNODES": "3", "CHECK": "0"}, None),
        ({"NNODES": "2", "MAX_RESTARTS": "1"}, ["--rdzv-backend=c10d", "--rdzv-endpoint=n1:29500", "--node-rank=0"]),
    ],
    ids=str,
)
def test_each_node_has_a_number(stubs, settings, expected):
    code, calls, said = launch("torchrun.sh", stubs, RDZV="n1:29500", **settings)
    assert code == (0 if expected else 2)
    assert set(expected or ()) < set(calls[-1].words)
    assert (
        expected
        or said == "error: NNODES=3 with CHECK=0 needs the number of each node: set NODE_RANK, 0 on the node of RDZV\n"
    )


@pytest.mark.parametrize(
    "name", ["NNODES", "RANKS_PER_NODE", "MAX_RESTARTS", "MIN_NODES", "PREFLIGHT_SECONDS", "NODE_RANK"]
)
def test_arithmetic_executes_nothing_of_the_environment(stubs, tmp_path, name):
    value = f"a[$(touch {tmp_path}/executed)]"
    code, calls, said = launch("torchrun.sh", stubs, **{name: value})
    assert (code, calls, said) == (2, [], f"error: {name}={value} is not a whole number; change it\n")
    assert not (tmp_path / "executed").exists()


def test_each_rank_has_a_log_in_the_folder_of_the_run_unless_a_terminal_or_the_user_says_otherwise(stubs):
    def options(**settings: str) -> list[str]:
        (stubs / "calls").unlink(missing_ok=True)
        _, calls, _ = launch("torchrun.sh", stubs, FOLDER="runs/a b", **settings)
        return [word for word in calls[-1].words if word.startswith(("--tee", "--log-dir"))]

    host = os.uname().nodename
    assert options() == ["--tee=3", f"--log-dir=runs/a b/logs/{host}"]
    assert options(LOGS="/logs", CHECK="0") == ["--tee=3", f"--log-dir=/logs/{host}"]
    assert options(LOGS="none") == options(CHECK="0") == []


def test_devices_are_measured_first_and_the_nodes_that_are_at_fault_are_left_out_of_a_run_that_can_go_on(stubs):
    settings = {"NNODES": "2", "RDZV": "n1:29500", "HEALTH": "1", "CHECK": "0"}
    code, calls, _ = launch("torchrun.sh", stubs, **settings, ENDS='{"lab.measure.health": 2}')
    assert (code, calls[-1].words[-2:]) == (2, ["-m", "lab.measure.health"])
    assert {"--nnodes=2", "--rdzv-id=health"} < set(calls[-1].words)
    settings |= {"MIN_NODES": "1", "NODE_NAMES": "n1,n2", "WELL": "n2"}
    for node, nodes in {"n1": [], "n2": ["n2"]}.items():
        (stubs / "calls").unlink()
        code, calls, _ = launch("torchrun.sh", stubs, **settings, NODE=node)
        starts = [call.words[call.words.index("--nodes") + 1] for call in calls if "gpt.elastic" in call.words]
        assert (code, starts) == (0, nodes)


@pytest.mark.parametrize(("ends", "expected", "num_calls"), [("gpt.preflight", 2, 2), ("parallel.launch", 3, 3)])
def test_exit_codes_pass_through_and_nothing_starts_after_a_failed_check(stubs, ends, expected, num_calls):
    code, calls, _ = launch("torchrun.sh", stubs, ENDS=json.dumps({ends: expected}))
    assert (code, len(calls)) == (expected, num_calls)


def test_hostfile_starts_the_same_on_every_host_and_passes_on_the_code_of_the_one_that_fails(stubs, tmp_path):
    hosts = tmp_path / "hosts"
    hosts.write_text("me@n1  # the first\n\n# n9\nn2\n")
    settings = {"HOSTS": str(hosts), "RANKS_PER_NODE": "3", "GRACE_SECONDS": "60"}
    settings |= {
        "NCCL_SOCKET_IFNAME": "ib 7",
        "PROXY": "x",
        "PASS": "PROXY",
        **dict.fromkeys(("WANDB_API_KEY", "HF_PAT", "WANDB_PWD", "HF_BEARER", "NCCL_COOKIE"), "secret"),
        "MASTER_PORT": "1",
    }
    code, calls, said = launch("hostfile.sh", stubs, "--run.dir=a b", **settings, ENDS='{"parallel.launch": 5}')
    assert code == 5
    starts = [call for call in calls if "parallel.launch" in call.words]
    assert sorted(call.node for call in starts) == ["me@n1", "n2"]
    for call in starts:
        assert {"--nnodes=2", "--nproc-per-node=3", "--master-port=29500", "--run.dir=a b"} < set(call.words)
        assert call.environment["NODE_NAMES"] == "n1,n2"
    assert " NCCL_SOCKET_IFNAME=ib\\ 7 " in said
    assert " PROXY=x " in said
    assert not re.search("secret|MASTER_PORT", said)
    assert re.search(r"^n2: \+ .*parallel.launch", said, re.MULTILINE)
    (stubs / "calls").unlink()
    assert launch("hostfile.sh", stubs, **settings)[0] == 0
    assert "no such job" not in said
    code, _, said = launch("hostfile.sh", stubs, HOSTS="nowhere")
    assert (code, said) == (2, "error: HOSTS=nowhere cannot be read; give a file with one host a line\n")


HOSTILE = [
    "$(touch X)",
    "`touch X`",
    "n1;touch X",
    "n1&touch X",
    "n0&x",
    "n1|e",
    "-oProxyCommand=touch_X",
    "n1/e touch X",
    "n1 n2",
]
HOSTILE += ["u$HOME@n1", "n1\\tn2", "a@b@c", "n1:22", "'n1'", "..", "@n1", "n1@", "n\u00fc", "*", "~", "n1\\", "n1-"]


@pytest.mark.parametrize("pattern", HOSTILE)
def test_what_is_no_host_is_refused_before_the_first_ssh(stubs, tmp_path, pattern):
    hosts = tmp_path / "hosts"
    hosts.write_text(f"n0\n  {pattern.replace('X', str(tmp_path / 'X'))} # the second\n")
    code, calls, said = launch("hostfile.sh", stubs, HOSTS=str(hosts))
    assert (code, calls, said.count("\n")) == (2, [], 1), said
    assert "which is no host" in said
    assert not (tmp_path / "X").exists()


def test_a_host_that_is_named_twice_is_refused(stubs, tmp_path):
    (tmp_path / "hosts").write_text("n1\nme@n1\r\n")
    code, calls, said = launch("hostfile.sh", stubs, HOSTS=str(tmp_path / "hosts"))
    assert (code, calls, said) == (2, [], f"error: HOSTS={tmp_path}/hosts has n1 twice; delete one\n")


def slurm(**more: str) -> dict[str, str]:
    job = {"SLURM_JOB_ID": "123", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_JOB_NUM_NODES": "2"}
    return job | {"SLURM_SUBMIT_DIR": str(ROOT), "SLURM_JOB_CPUS_PER_NODE": "96(x2)"} | more


def test_slurm_runs_torchrun_on_every_node_of_the_job(stubs):
    ends = json.dumps({"parallel.launch": 5})
    code, calls, said = launch("slurm.sbatch", stubs, "--train.steps=5", **slurm(ENDS=ends))
    assert code == 5
    assert "requeue" not in calls[-1].words
    step = next(call for call in calls if call.words[:2] == ["noted", "srun"])
    assert {"--export=ALL", "--kill-on-bad-exit=1", "--wait=600", "--cpu-bind=none"} < set(step.words)
    task = ["--label", "scripts/launch/slurm_task.sh"]
    assert step.words[-4:] == [*task, "scripts/launch/torchrun.sh", "--train.steps=5"]
    starts = [call for call in calls if "parallel.launch" in call.words]
    assert [call.node for call in starts] == ["n1"]  # the stub of srun ends with the first code
    options = {"--nnodes=2", "--master-port=20369", "--rdzv-id=123", "--signals-to-handle=SIGINT"}
    for call in starts:
        assert options < set(call.words)
        assert call.environment["NODE_NAMES"] == "n1,n2"
    assert "+ srun" in said


def test_slurms_script_started_by_hand_says_so(stubs):
    code, calls, said = launch("slurm.sbatch", stubs, "--train.steps=5")
    assert (code, calls, said.count("\n")) == (2, [], 1)
    assert "submit it with sbatch" in said
    assert "slurm.sbatch --train.steps=5" in said


def test_slurm_itself_starts_the_ranks_where_that_is_asked_for(stubs, tmp_path):
    ranks = {"LAUNCH": "srun", "SLURM_NTASKS_PER_NODE": "2", "HEALTH": "1"}
    code, calls, _ = launch("slurm.sbatch", stubs, "--run.dir=a b", **slurm(FOLDER=f"{tmp_path}/a b", **ranks))
    assert code == 0
    assert sorted(os.listdir(tmp_path / "a b" / "logs")) == [f"rank_{rank}.log" for rank in range(4)]
    assert [call.words[1:] for call in calls if "lab.measure.health" in call.words and call.words[0] == "python"] == [
        ["-m", "lab.measure.health"]
    ] * 4
    assert len([call for call in calls if "gpt.preflight" in call.words and call.words[0] == "python"]) == 2
    starts = [call for call in calls if "pretrain_gpt.py" in call.words and call.words[0] == "python"]
    assert [call.words[1:] for call in starts] == [["pretrain_gpt.py", "--run.dir=a b"]] * 4
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    found = [tuple(call.environment[name] for name in names) for call in starts]
    assert found == [(str(rank), str(rank % 2), "4", "2", "n1", "20369") for rank in range(4)]


@pytest.mark.parametrize(
    ("asked", "node_cores", "expected"),
    [
        ({"SLURM_NTASKS_PER_NODE": "8"}, "128(x2),96,112", ["2", "1", "96"]),  # torchrun starts the ranks
        ({"SLURM_NTASKS_PER_NODE": "2", "LAUNCH": "srun"}, "97(x2)", ["4", "2", "48"]),
    ],
)
def test_tasks_of_slurm_have_the_cores_that_every_node_has(stubs, tmp_path, asked, node_cores, expected):
    _, calls, _ = launch(
        "slurm.sbatch", stubs, **slurm(SLURM_JOB_CPUS_PER_NODE=node_cores, FOLDER=str(tmp_path), **asked)
    )
    step = [call.words for call in calls if call.words[:2] == ["noted", "srun"]][-1]
    options = ["--ntasks", "--ntasks-per-node", "--cpus-per-task"]
    assert step[2:5] == [f"{name}={value}" for name, value in zip(options, expected, strict=True)]


def test_slurm_fetches_a_container_and_starts_it_with_what_is_mounted(stubs):
    _, calls, _ = launch("slurm.sbatch", stubs, **slurm(CONTAINER="image.sqsh", MOUNTS="/runs,/data:/d:ro"))
    fetch, start, remove = [call.words for call in calls if call.words[:2] == ["noted", "srun"]]
    container = {"--container-image=image.sqsh", "--container-name=zero-gpt-123"}
    mounts = f"--container-mounts={ROOT}:{ROOT},/runs:/runs,/data:/d:ro"
    assert container | {mounts} < set(fetch) & set(start)
    assert fetch[-1] == "true"
    assert (remove[-1], container & set(remove)) == ('enroot remove --force "pyxis_zero-gpt-$SLURM_JOB_ID"', set())


def warned_job(stubs: Path, *signals: int, **settings: str) -> tuple[int, list[list[str]], str]:
    """Return (exit code, calls after the start, output) of a job that gets signals while it runs, or starts."""
    ready = settings.pop("READY", '"parallel.launch"')
    own = slurm(JOB_ENDS="2099-01-01T00:00:00", SLURM_JOB_NUM_NODES="1") | settings
    words = [SCRIPTS / "slurm.sbatch"]
    with subprocess.Popen(words, env=environment(stubs, **own), stderr=subprocess.PIPE, text=True) as job:
        wait_until(lambda: (stubs / "calls").exists() and ready in (stubs / "calls").read_text())
        for number in signals:
            job.send_signal(number)
        assert job.stderr is not None
        said = job.stderr.read()
    return job.returncode, [call.words for call in calls_in(stubs)], said


def test_slurms_warning_reaches_the_ranks_and_the_job_goes_back_into_the_queue(stubs):
    ends = {"ENDS": '{"parallel.launch": 0}', "ENDS_AFTER": "scancel"}
    code, calls, _ = warned_job(stubs, signal.SIGUSR1, signal.SIGTERM, **ends)
    assert code == 0
    assert [words for words in calls if words[0] in ("scancel", "scontrol")][-2:] == [
        ["scancel", "--signal=USR1", "123"],
        ["scontrol", "requeue", "123"],
    ]


def test_a_warning_before_the_ranks_are_up_is_sent_when_they_can_take_it(stubs):
    ends = {"ENDS": '{"hostnames": 0, "parallel.launch": 0}', "ENDS_AFTER": "scancel", "READY": "hostnames"}
    (stubs / "calls").touch()
    slow = (
        (stubs / "scontrol")
        .read_text()
        .replace('print("n1\\nn2")', 'print("n1\\nn2"); sys.stdout.flush(); time.sleep(0.3)')
    )
    (stubs / "scontrol").write_text(slow)
    code, calls, _ = warned_job(stubs, signal.SIGUSR1, **{**ends, "ENDS": '{"parallel.launch": 0}'})
    assert code == 0
    assert calls[-1] == ["scontrol", "requeue", "123"]


def test_a_job_that_is_shorter_than_its_warning_is_refused(stubs):
    ends = {"ENDS": '{"parallel.launch": 0}', "ENDS_AFTER": "squeue", "JOB_ENDS": time.strftime("%Y-%m-%dT%H:%M:%S")}
    code, calls, said = warned_job(stubs, signal.SIGUSR1, **ends)
    assert code == 2
    assert "scontrol requeue" not in said
    assert re.search(r"error: the job was warned \d+ s after its start, and ends in -?\d+ s: give it more --time", said)
    assert ["scontrol", "requeue", "123"] not in calls


@pytest.mark.parametrize(
    ("code_of_ranks", "restarts", "expected", "is_requeued"),
    [(3, "0", 3, True), (134, "2", 134, True), (3, "3", 3, False), (0, "0", 3, False), (7, "0", 7, False)],
)
def test_a_lost_rank_queues_the_job_again_and_a_run_that_a_signal_by_hand_has_stopped_is_not_complete(
    stubs, code_of_ranks, restarts, expected, is_requeued
):
    if not code_of_ranks:  # the first rank notes that it was stopped
        (stubs / "python").write_text(STUB + 'open(os.path.join(os.environ["ZERO_LAUNCH_NOTES"], "unfinished"), "w")')
    ends = json.dumps({"parallel.launch": code_of_ranks})
    code, calls, said = launch("slurm.sbatch", stubs, **slurm(ENDS=ends, SLURM_RESTART_COUNT=restarts))
    assert code == expected
    assert (calls[-1].words == ["scontrol", "requeue", "123"]) == is_requeued
    assert ("the run was stopped by a signal before its end" in said) == (code_of_ranks == 0)
    assert not list(ROOT.glob("slurm-*.notes"))


def failed(**exit_codes: int) -> ChildFailedError:
    """The error of ranks that failed one after the other."""
    times = enumerate(exit_codes.items())
    ranks = {int(rank[4:]): SimpleNamespace(exitcode=code, timestamp=time) for time, (rank, code) in times}
    with mock.patch.object(ChildFailedError, "format_msg", return_value=""):
        return ChildFailedError("program", ranks)


HUNG = "launch: rank 0 was the first to end because a rank hangs or was lost, with exit code 3; see its error\n"


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (None, 0, ""),
        (failed(rank1=1, rank0=-9), 1, "launch: rank 1 failed first, with exit code 1\n"),
        (failed(rank1=3, rank0=-9), 137, "launch: rank 0 failed first, with exit code -9\n"),
        (failed(rank0=3, rank2=3), 3, HUNG),
        (SignalException("", signal.SIGTERM), 143, ""),
    ],
    ids=["none", "a rank", "a killed rank", "a hang of another rank", "a signal"],
)
def test_the_launcher_returns_the_code_of_what_ended_the_job(monkeypatch, capsys, error, code, said):
    started, killed = mock.Mock(side_effect=error), mock.Mock(return_value=[])
    monkeypatch.setattr(run, "main", started)
    monkeypatch.setattr(launcher, "children", killed)
    assert launcher.main(["--nnodes=1", "program.py"]) == code
    assert capsys.readouterr().err == said
    assert started.call_args.args == (["--shutdown-timeout=600", "--nnodes=1", "program.py"],)
    assert killed.called == isinstance(error, SignalException)


def test_a_second_signal_kills_the_ranks_that_still_run(monkeypatch):
    killed = mock.Mock()
    monkeypatch.setattr(os, "killpg", killed)
    with subprocess.Popen(["sleep", "60"]) as child:
        launcher.pass_on(signal.SIGKILL)
        child.kill()
    assert mock.call(child.pid, signal.SIGKILL) in killed.call_args_list


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
def test_a_schedulers_signal_to_the_launcher_alone_reaches_the_ranks(monkeypatch, number):
    """Slurm signals only the process that it has started, which scripts/launch has made ignore the signal."""
    ended = []

    def run_ranks(_arguments: list[str]) -> None:
        # A rank that still starts up holds warnings back.
        words = [sys.executable, "-c", "import signal; print(signal.sigwait({10, 15}))"]
        with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, start_new_session=True) as rank:
            monkeypatch.setattr(launcher, "children", lambda: [rank.pid])  # this process has others
            os.kill(os.getpid(), number)
            wait_until(lambda: rank.poll() is not None)  # a launcher waits in this way, too
            ended.append((rank.returncode, rank.stdout and rank.stdout.read()))

    monkeypatch.setattr(run, "main", run_ranks)
    before = signal.signal(number, signal.SIG_IGN)
    try:
        assert launcher.main(["program.py"]) == 0
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR1})
        signal.signal(number, before)
    assert ended == [(0, "10\n") if number == signal.SIGUSR1 else (-signal.SIGTERM, "")]


def test_the_packages_are_installed_also_on_a_disk_without_locks(tmp_path):
    programs = {"python": "#!/bin/sh\n[ $1 = -c ] && echo the same\ntrue", "pip": "", "activate": ""}
    programs["flock"] = "#!/bin/sh\necho flock: Function not implemented >&2\nexit 1"
    for folder in (tmp_path / ".venv" / "bin", tmp_path / "scripts"):
        folder.mkdir(parents=True)
    for name, source in programs.items():
        (tmp_path / ".venv" / "bin" / name).write_text(source)
        (tmp_path / ".venv" / "bin" / name).chmod(0o755)
    for name in ("requirements.txt", "scripts/setup.sh"):
        shutil.copy(ROOT / name, tmp_path / name)
    variables = {"PATH": f"{tmp_path}/.venv/bin:{os.environ['PATH']}"}
    command = ["bash", str(tmp_path / "scripts" / "setup.sh")]
    ended = subprocess.run(command, env=variables, capture_output=True, text=True, check=True)
    assert "setup: no lock on this disk; run scripts/setup.sh once" in ended.stderr
    assert (tmp_path / ".venv" / "complete").read_text() == "the same\n"


def test_the_scripts_pass_shellcheck():
    if not shutil.which("shellcheck"):
        pytest.skip("shellcheck is not installed")
    scripts = [*sorted(map(str, SCRIPTS.iterdir())), "scripts/container/install.sh"]
    ended = subprocess.run(["shellcheck", "-x", *scripts], cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.stdout == ""
