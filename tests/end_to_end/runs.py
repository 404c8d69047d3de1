"""A tiny corpus and tiny runs of the whole program on it."""

from pathlib import Path

from gpt.run_folder.files import read_steps
from gpt.settings.parser import parse_settings
from parallel.world import start_world
from pretrain_gpt import pretrain
from tests.ranks import run_ranks

VOCAB_SIZE = 300  # of the corpus that `lab.faults.runs.prepare_corpus` makes
TINY_MODEL = {"num_layers": 2, "hidden_size": 32, "num_heads": 4, "seq_length": 16, "vocab_size": VOCAB_SIZE}
PLAIN = {"train__eval_samples": 0, "train__sample_tokens": 0}  # neither evaluation nor generated texts
TWO_RANKS = "-m", "parallel.launch", "--standalone", "--nproc-per-node=2"


def options(prefix: Path, run_dir: Path, **settings: object) -> list[str]:
    """Return the command line of a tiny run; the names of `settings` have `__` for the dot."""
    chosen = {f"model.{name}": value for name, value in (TINY_MODEL | {"dropout": 0.0}).items()} | {
        "data.path": prefix,
        "data.split": "[0.8, 0.1, 0.1]",
        "run.dir": run_dir,
        "zero.bucket_numel": 5000,
        "train.precision": "fp32",
        "train.steps": 6,
        "train.micro_batch_size": 2,
        "train.global_batch_size": 8,
        "train.log_every": 1,
        "train.eval_samples": 8,
        "train.sample_tokens": 4,
    }
    chosen |= {name.replace("__", "."): value for name, value in settings.items()}
    return [f"--{name}={value}" for name, value in chosen.items()]


def run_on_rank(arguments: list[str]) -> list[dict]:
    """Run the whole program on one of the test's ranks, and return the logged steps."""
    settings = parse_settings(arguments)
    pretrain(settings, start_world())
    return read_steps(Path(settings.run.dir))


def run(num_ranks: int, prefix: Path, run_dir: Path, **settings: object) -> list[dict]:
    """Run the whole program on all ranks, and return the logged steps."""
    return run_ranks(num_ranks, run_on_rank, options(prefix, run_dir, **settings), init_process_group=False)[0]
