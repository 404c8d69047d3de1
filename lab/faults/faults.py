"""The faults of the harness: a table of rows, each a function that runs jobs with one fault and says what became of it.

kill             ranks are killed at points of a step or a save, and the launcher restarts them
signal           a rank gets SIGUSR1 or SIGTERM, all save and end; the job is started again
pause            a rank is stopped for two seconds
stop             a rank is stopped for good, the watchdog ends the job; it is started again
full disk        the file system of run.dir is full, or a rank's files may not grow; then there is space again
clock            the clock jumps by hours while the job runs
flip, replicated a bit flips in a state of which other ranks have replicas
flip, elsewhere  a bit flips in a state of which there is no other
"""

import random
import re
import shutil
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from gpt.run_folder.files import read_steps
from lab.faults.failing_run import FIRST_RANK_ONLY, MOMENT, POINTS, STEP, Fault
from lab.faults.runs import LIMIT_SECONDS, OPTIONS, Ended, Steps, logged_steps, start
from parallel.ending import EXIT_LOST

NUM_RANKS, NUM_REPLICAS = 2, 3  # of three replicas, two are a majority
NUM_STEPS = 40
CLOCK = Path(__file__).with_name("clock.c")
MOST_HOURS = 72  # by which the clock jumps
SAME, NOT_RUN = "same losses", "not run"
LOST_BY_NCCL = "remote process exited"  # in NCCL's error, with which torch aborts ranks that have lost another one


@dataclass(frozen=True)
class Outcome:
    """The end of a round. `verdict` is one of a few, and `is_wrong` says that it must not happen."""

    verdict: str
    detail: str = ""
    is_wrong: bool = False


class WrongError(Exception):
    """An error raised if a job did what no job may do: hang, abort, print a traceback, or log other losses."""


@dataclass(frozen=True)
class Round:
    """One round: its own generator and folder, and what all rounds share."""

    chance: random.Random
    folder: Path
    corpus: Path
    undisturbed: Callable[[Mapping[str, object], int], Steps]

    def settings(self, stage: int, **others: object) -> dict[str, object]:
        """Return the settings of a run at a stage; `__` stands for the dot of a name."""
        named = {name.replace("__", "."): value for name, value in others.items()}
        return {**OPTIONS, "data.path": self.corpus, "zero.stage": stage} | named

    @property
    def run_dir(self) -> Path:
        return self.folder / "run"

    def fault(self, action: str, points: list[str], attempt: int = 0) -> Fault:
        """Return a fault at a random point, on a random rank that reaches it."""
        point = self.chance.choice(points)
        rank = 0 if point in FIRST_RANK_ONLY else self.chance.randrange(NUM_RANKS)
        return Fault(attempt, rank, point, self.chance.randint(1, max_number(point)), action)

    def equal(self, settings: Mapping[str, object], detail: str) -> Outcome:
        """Return SAME if the run has logged what an undisturbed one does. Raises WrongError."""
        expected, found = self.undisturbed(settings, NUM_RANKS), logged_steps(self.run_dir)
        if found != expected:
            raise WrongError(f"OTHER LOSSES: {len(found)} of {len(expected)} steps, first: {_first(found, expected)}")
        if left := [path.name for path in self.run_dir.glob("checkpoints/.*.partial")]:
            raise WrongError(f"LEFT BEHIND: {left}")
        return Outcome(SAME, detail)


def max_number(point: str) -> int:
    """Return the largest NUMBER of a fault for which the run reaches the point that often before it ends."""
    if point == MOMENT:
        return 3000  # milliseconds
    if point in FIRST_RANK_ONLY:
        return 1
    return 2 if point.startswith("save.") else 30  # a save is rarer than the points of a step


def check(ended: Ended, *codes: int, breaks_connections: bool = False) -> None:
    """Raise WrongError unless a job has ended with one of these exit codes, and a reason of one line if it is not 0."""
    tracebacks = ended.unexpected_tracebacks if breaks_connections else ended.tracebacks
    if ended.code is None:
        raise WrongError(f"HANG: {ended.said[-200:]!r}")
    if ended.has_aborted and not (breaks_connections and LOST_BY_NCCL in ended.said):
        raise WrongError(f"ABORT: exit code {ended.code}: {ended.said[-200:]!r}")
    if tracebacks:
        raise WrongError(f"TRACEBACK: {tracebacks[0]}")
    if ended.code not in codes:
        raise WrongError(f"EXIT CODE {ended.code}: {' '.join(ended.errors)[:200] or repr(ended.said[-200:])}")
    if ended.code and not ended.errors:
        raise WrongError(f"NO REASON: exit code {ended.code}")


def kill(this: Round) -> Outcome:
    stage = this.chance.randrange(4)
    settings = this.settings(stage, checkpoint__asynchronous=this.chance.random() < 0.5)
    faults = [this.fault("kill", [*POINTS, MOMENT], attempt) for attempt in range(this.chance.randint(1, 3))]
    job = start(settings, this.run_dir, faults, num_restarts=len(faults))
    check(job.end(LIMIT_SECONDS * (1 + len(faults))), 0, breaks_connections=True)
    return this.equal(settings, f"stage {stage}, {' '.join(map(str, faults))}")


def disturb(this: Round, action: str, points: list[str], code: int = 0, **others: object) -> Outcome:
    """Do an action at one of the points, then start the job again, which goes on unless it has ended."""
    stage = this.chance.randrange(4)
    settings, fault = this.settings(stage, **others), this.fault(action, points)
    ended = start(settings, this.run_dir, [fault]).end()
    check(ended, code)
    if code and f"rank {fault.rank} " not in ended.errors[0]:
        raise WrongError(f"WRONG NAME: rank {fault.rank} was stopped: {ended.errors[0]}")
    check(start(settings, this.run_dir).end(), 0)
    return this.equal(settings, f"stage {stage}, {fault}")


def full_disk(this: Round) -> Outcome:
    settings = this.settings(this.chance.randrange(4), checkpoint__asynchronous=this.chance.random() < 0.5)
    this.run_dir.mkdir()
    num_bytes = this.chance.choice([8, 64, 300, 600, 1000, 1600]) * 1024
    if this.chance.random() < 0.5 and _mount(this.run_dir, num_bytes):
        detail = f"{num_bytes:,} bytes of disk"
        try:
            check(start(settings, this.run_dir).end(), 0, 2)
            _mount(this.run_dir, 2**28, "remount,")
            check(start(settings, this.run_dir).end(), 0)
            return this.equal(settings, detail)
        finally:
            subprocess.run(["umount", "-l", str(this.run_dir)], check=True)
    fault = this.fault("full", [*POINTS, MOMENT])
    check(start(settings, this.run_dir, [fault]).end(), 0, 2)
    check(start(settings, this.run_dir).end(), 0)
    return this.equal(settings, str(fault))


def _mount(folder: Path, num_bytes: int, how: str = "") -> bool:
    """Mount a file system of this size, and return whether this process may."""
    command = ["mount", "-t", "tmpfs", "-o", f"{how}size={num_bytes}", "tmpfs", str(folder)]
    return subprocess.run(command, check=False, capture_output=True).returncode == 0


def clock(this: Round) -> Outcome:
    if not (compiler := shutil.which("cc")):
        return Outcome(NOT_RUN, "there is no C compiler for clock.c")
    library, offset = this.folder / "clock.so", this.folder / "offset"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, CLOCK, "-ldl"], check=True)
    offset.write_text("0")
    settings = this.settings(this.chance.randrange(4))
    jumps = [this.chance.randint(-MOST_HOURS, MOST_HOURS) for _ in range(2)]
    job = start(settings, this.run_dir, LD_PRELOAD=str(library), CLOCK_OFFSET=str(offset))
    for step, jump in zip(sorted(this.chance.sample(range(NUM_STEPS - 4), len(jumps))), jumps, strict=True):
        job.wait_for_step(step)
        written = offset.with_suffix(".new")
        written.write_text(str(3600 * jump))
        written.rename(offset)  # at once: a reader must not find an empty file
    check(job.end(), 0)
    return this.equal(settings, f"stage {settings['zero.stage']}, {jumps} hours")


def flip_replicated(this: Round) -> Outcome:
    """Flip a bit at stage 0, where every rank has every state: the check of replicas names rank and parameter."""
    settings = this.settings(0, guard__check_replicas_every=this.chance.randint(1, 4), optimizer__clip_norm=1e9)
    settings |= {"train.global_batch_size": 2 * NUM_REPLICAS}
    pattern = r"data rank (?P<rank>\d+) differ in (?P<parameter>.*) from those of the other 2"
    return _flip_to_be_named(this, settings, ["gradient", "weight", "moment"], pattern)


def flip_elsewhere(this: Round) -> Outcome:
    """Flip a bit in a shard: only a non-finite number or a spike of the loss shows it."""
    settings = this.settings(this.chance.randint(1, 3), guard__check_replicas_every=2)
    settings |= {"guard.policy": "stop", "guard.spike_factor": 3}
    ended, _, _, detail = _flip(this, settings, ["gradient", "master", "moment"], NUM_RANKS)
    if any("differ in" in error for error in ended.errors):
        return Outcome("rank and parameter named", detail)
    if any("bad losses" in error for error in ended.errors):
        return Outcome("bad loss", detail)
    if ended.code:
        raise WrongError(f"EXIT CODE {ended.code}: {' '.join(ended.errors)} ({detail})")
    if read_steps(this.run_dir)[-1]["skipped_steps"]:
        return Outcome("non-finite gradient", detail)
    plain = {name: value for name, value in settings.items() if not name.startswith("guard.")}
    is_same = logged_steps(this.run_dir) == this.undisturbed(plain, NUM_RANKS)
    return Outcome("no effect" if is_same else "not detectable", detail)


def flip_audited(this: Round) -> Outcome:
    """Flip a bit where audits look: in a weight that its rank computes with, or in a state at rest."""
    stage = this.chance.randint(1, 3)
    settings = this.settings(stage, guard__audit_every=1, train__reproducible="layout")
    settings |= {"train.global_batch_size": 2 * NUM_REPLICAS, "train.reproducible_blocks": NUM_REPLICAS}
    targets = ["master", "moment", *(["weight"] if stage < 3 else [])]
    return _flip_to_be_named(this, settings, targets, r"(?:are those|model states) of ranks? (?P<rank>\d+) ")


def _flip_to_be_named(this: Round, settings: dict[str, object], targets: list[str], pattern: str) -> Outcome:
    """Flip a bit on one of three ranks. The groups of `pattern` are what an error must name: rank and parameter."""
    ended, rank, parameter, detail = _flip(this, settings, targets, NUM_REPLICAS)
    if found := next(filter(None, (re.search(pattern, error) for error in ended.errors)), None):
        named = found.groupdict()
        listed = named.get("parameter", parameter)
        if int(named["rank"]) == rank and (parameter in listed or " more" in listed):
            return Outcome(f"{' and '.join(named)} named", detail)
        raise WrongError(f"WRONG NAME: {found.string} ({detail})")
    if ended.code == 0 and logged_steps(this.run_dir) == this.undisturbed(settings, NUM_REPLICAS):
        return Outcome("no effect", detail)
    raise WrongError(f"NOT NAMED: exit code {ended.code}, {' '.join(ended.errors)} ({detail})")


def _flip(this: Round, settings: dict[str, object], targets: list[str], num_ranks: int) -> tuple[Ended, int, str, str]:
    """Flip a random bit. Return how the job ended, the rank, the parameter, and a description."""
    target, bit = this.chance.choice(targets), this.chance.randrange(32)
    fault = Fault(0, this.chance.randrange(num_ranks), STEP, this.chance.randint(2, NUM_STEPS - 4), f"{target}.{bit}")
    ended = start(settings, this.run_dir, [fault], num_ranks=num_ranks).end()
    check(ended, 0, 2)
    flipped = re.search(r"chaos: (.* of (\S+), bit .*)", ended.said)
    if not flipped:
        raise WrongError(f"NO FLIP: {fault}: {ended.said[-200:]!r}")
    return ended, fault.rank, flipped[2], f"stage {settings['zero.stage']}, {flipped[1]}"


def _first(found: Steps, expected: Steps) -> str:
    pairs = ((one, other) for one, other in zip(found, expected, strict=False) if one != other)
    return "{} for {}".format(*next(pairs, (found[-1:], expected[-1:])))


FAULTS: dict[str, Callable[[Round], Outcome]] = {
    "kill": kill,
    "signal": lambda this: disturb(this, this.chance.choice(["usr1", "term"]), list(POINTS)),
    "pause": lambda this: disturb(this, "pause", [*POINTS, MOMENT]),
    "stop": lambda this: disturb(this, "stop", list(POINTS), EXIT_LOST, run__hang_seconds=8),
    "full disk": full_disk,
    "clock": clock,
    "flip, replicated": flip_replicated,
    "flip, elsewhere": flip_elsewhere,
    "flip, audited": flip_audited,
}
