"""A profiled run is the same run, and writes a trace with named phases and the timers of every rank."""

import json
from collections.abc import Callable
from pathlib import Path

from gpt.monitor.profiling import TIMERS, straggler_lines, stragglers
from gpt.run_folder.files import read_steps
from gpt.settings.parser import parse_settings
from lab.faults.runs import prepare_corpus
from lab.races.stream_checker import streams_checked
from parallel.world import start_world
from pretrain_gpt import pretrain
from tests.end_to_end.runs import options, run_on_rank
from tests.ranks import run_ranks


def run_checked_on_rank(arguments: list[str]) -> list[dict]:
    """Run the program as `python -m lab.races` does, and return the logged steps."""
    settings = parse_settings(arguments)
    pretrain(settings, start_world(), streams_checked)
    return read_steps(Path(settings.run.dir))


def run(corpus: Path, run_dir: Path, on_rank: Callable = run_on_rank, **settings: object) -> list[tuple]:
    arguments = options(corpus, run_dir, checkpoint__every=3, **settings)
    records = run_ranks(2, on_rank, arguments, init_process_group=False)[0]
    return [(record["step"], record["loss"], record["grad_norm"]) for record in records]


def test_a_profiled_and_checked_run_is_the_same_run_and_names_its_phases(tmp_path):
    corpus, profiled = prepare_corpus(tmp_path), tmp_path / "profiled"
    settings = {"zero__stage": 3, "train__steps": 5}
    profile = {"profile__steps": "[2, 4]", "profile__ranks": "[1]"}
    plain = run(corpus, tmp_path / "plain", **settings)
    assert run(corpus, profiled, run_checked_on_rank, **settings, **profile) == plain
    assert sorted(path.name for path in (profiled / "profile").iterdir()) == ["rank-1.json", "timers.json"]
    trace = json.loads((profiled / "profile" / "rank-1.json").read_text())["traceEvents"]
    named = [event["name"] for event in trace if event.get("cat") == "user_annotation"]
    # Three steps of two micro-batches each, with one save and without an evaluation.
    counts = {name: named.count(name) for name in ("data", "forward", "backward", "update", "checkpoint", "evaluation")}
    assert counts == {"data": 3, "forward": 6, "backward": 6, "update": 3, "checkpoint": 1, "evaluation": 0}
    for timers in json.loads((profiled / "profile" / "timers.json").read_text()):
        assert timers.keys() == {*TIMERS, "step"}
        assert all(seconds > 0 for seconds in timers.values())
        assert sum(timers[name] for name in TIMERS) <= timers["step"]


def computing(*seconds: float) -> list[dict[str, float]]:
    """Return the timers of ranks whose forward takes so long, and which wait for the slowest of them."""
    rest = dict.fromkeys(TIMERS, 0.0)
    return [rest | {"forward": own, "reduce": max(seconds) - own, "step": max(seconds)} for own in seconds]


def test_a_straggler_is_the_rank_that_computes_while_the_others_wait():
    assert stragglers(computing(1.0, 1.0, 1.1)) == []
    assert stragglers(computing(1.0, 2.0, 1.0, 1.0)) == [(1, 2.0)]
    told = straggler_lines(computing(1.0, 2.0, 1.0, 1.0), ["n1", "n1", "n2", "n2"])
    assert told == ["straggler: rank 1 on n1 computes 2.00 times as long as the median rank"]
