"""Check that runs which are killed and restarted log exactly the steps of an undisturbed run.

python -m scripts.kills                        # 50 kills, 5 a run, at the points of scripts/failing_run.py
python -m scripts.kills --kills 10 --first 20  # kills 20 to 29 of these
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from scripts.failing_run import FIRST_RANK_ONLY, MOMENT, POINTS, Kill

ROOT = Path(__file__).parents[1]
NUM_RANKS, KILLS_A_RUN = 2, 5
OPTIONS = {
    "model.num_layers": 2,
    "model.hidden_size": 32,
    "model.num_heads": 4,
    "model.seq_length": 16,
    "model.vocab_size": 300,
    "model.dropout": 0.1,
    "zero.bucket_numel": 5000,
    "train.precision": "fp32",
    "train.steps": 40,
    "train.micro_batch_size": 2,
    "train.global_batch_size": 8,
    "train.log_every": 1,
    "train.eval_samples": 0,
    "train.sample_tokens": 0,
    "checkpoint.every": 3,
    "run.hang_seconds": 60,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--first", type=int, default=0, help="number of the first kill, to continue an earlier series")
    options = parser.parse_args()
    num_kills, num_wrong = options.first, 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prefix = prepare_corpus(folder)
        while num_kills < options.first + options.kills:
            stage = num_kills // KILLS_A_RUN % 4
            arguments = {**OPTIONS, "data.path": prefix, "zero.stage": stage, "checkpoint.asynchronous": stage % 2 == 0}
            expected = run_under(arguments, folder / f"undisturbed-{num_kills}", [])
            kills = choose_kills(num_kills, min(KILLS_A_RUN, options.first + options.kills - num_kills))
            start = time.perf_counter()
            found = run_under(arguments, folder / f"killed-{num_kills}", kills)
            num_kills += len(kills)
            num_wrong += found != expected
            verdict = "the same losses" if found == expected else "OTHER LOSSES"
            print(f"{num_kills:>4} kills, stage {stage}: {verdict}, {time.perf_counter() - start:.0f} s:", *kills)
    sys.exit(num_wrong > 0)


def choose_kills(first: int, number: int) -> list[Kill]:
    """Choose one kill for each attempt, at the points in turn, and at a random moment at every third attempt."""
    points, kills = list(POINTS), []
    for attempt in range(number):
        generator = random.Random(first + attempt)
        point = MOMENT if (first + attempt) % 3 == 2 else points[(first + attempt) % len(points)]
        rank = 0 if point in FIRST_RANK_ONLY else generator.randrange(NUM_RANKS)
        kills.append(Kill(attempt, rank, point, generator.randint(1, max_number(point))))
    return kills


def max_number(point: str) -> int:
    """Return the largest NUMBER of a kill for which the run reaches the point that often before it ends."""
    if point == MOMENT:
        return 3000  # milliseconds
    if point in FIRST_RANK_ONLY:
        return 1
    return 2 if point.startswith("save.") else 30  # a save is rarer than the points of a step


def run_under(arguments: dict[str, object], run_dir: Path, kills: list[Kill]) -> list[tuple]:
    """Return (step, loss, gradient norm) of every step of a run that torchrun restarts after each of `kills`."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={NUM_RANKS}"]
    command += [f"--max-restarts={len(kills)}", "-m", "scripts.failing_run"]
    command += [word for kill in kills for word in ("--kill", str(kill))]
    command += ["--", *(f"--{name}={value}" for name, value in arguments.items()), f"--run.dir={run_dir}"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    if ended.returncode:
        raise RuntimeError(f"{' '.join(map(str, kills))}: exit code {ended.returncode}\n{ended.stderr[-4000:]}")
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    return [(record["step"], record["loss"], record["grad_norm"]) for record in map(json.loads, lines)]


def prepare_corpus(folder: Path) -> Path:
    """Prepare a corpus of a few thousand tokens and return its PREFIX."""
    text = folder / "text"
    text.mkdir()
    for number in range(60):
        (text / f"{number}.txt").write_text(f"{number} green bottles hanging on the wall; " * (3 + number % 7))
    command = [sys.executable, "-m", "data.prepare", "--source", str(text), "--output", str(folder / "corpus")]
    subprocess.run([*command, "--train_vocab_size", "300", "--workers", "1"], cwd=ROOT, check=True, capture_output=True)
    return folder / "corpus"


if __name__ == "__main__":
    main()
