"""A program that stands for a training: it notes the steps of a run, with validation losses that stand in a file."""

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from gpt.run_folder.files import NUMBERS_OF_A_STEP

PROGRAM = f"""
import json, pathlib, sys
options = dict(word.removeprefix("--").split("=") for word in sys.argv[1:] if "=" in word)
folder, here = pathlib.Path(options["run.dir"]), pathlib.Path(__file__).parent
losses = json.loads((here / "losses.json").read_text())[str(folder.relative_to(here / "runs"))]
folder.mkdir(parents=True)
with (folder / "metrics.jsonl").open("w") as file:
    for number, loss in enumerate(losses, 1):
        step = int(options["train.steps"]) * number // len(losses)
        record = dict.fromkeys({sorted(NUMBERS_OF_A_STEP)}, 1.0) | dict(step=step, tokens=10 * step)
        file.write(json.dumps(record | dict(validation_loss=loss)) + chr(10))
"""


def write_launch(folder: Path, losses: Mapping[str, Sequence[float]]) -> str:
    """Return the command that starts such a run in the folder `runs`. `losses` has those of each run."""
    (folder / "losses.json").write_text(json.dumps(losses))
    (folder / "launch.py").write_text(PROGRAM)
    return f"{sys.executable} {folder / 'launch.py'}"
