"""The parts of --long: GPT-2 124M in bf16 and fp16, stages 0 to 3, beside the loss curve that llm.c has published.

The settings are those of llm.c's run on FineWeb (llmc_124m.csv), with its schedule, which the first thousand steps of
524,288 tokens follow. The user's data are other data, so the distance from that curve is recorded and not judged; the
stages must agree with each other.

    python -m lab.acceptance.long_runs PLOT.png RUN_FOLDER...      draws the curves of runs
"""

import csv
import math
import netrc
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from itertools import pairwise
from pathlib import Path

from gpt.run_folder.files import read_steps
from lab.acceptance.child import as_options
from lab.acceptance.figures import Figure, UnreadableResult, at_most
from lab.acceptance.parts import Part
from lab.acceptance.plan import ModelSize, Plan

REFERENCE = Path(__file__).with_name("llmc_124m.csv")
# The stages add the same gradients in other orders, and rounding errors grow over a thousand steps.
STAGE_TOLERANCE = 0.03
LIMIT_SECONDS = 6 * 3600.0
STAGES = 0, 1, 2, 3


def long_parts(plan: Plan) -> list[Part]:
    """Return a row for each run, and one that draws their loss curves."""
    precisions = ("bf16", "fp16") if plan.machine.has_bf16 else ("fp16",)
    rows = [long_run(plan, precision, stage) for precision in precisions for stage in STAGES]
    plot = plan.output / "loss-curves.png"
    folders = [str(_folder(plan, precision, stage)) for precision in precisions for stage in STAGES]
    command = [sys.executable, "-m", "lab.acceptance.long_runs", str(plot), *folders]
    return [*rows, Part("loss curves", command, lambda log: [Figure("plot", str(plot))], 120, is_long=True)]


def long_run(plan: Plan, precision: str, stage: int) -> Part:
    scale, folder = plan.scale.long, _folder(plan, precision, stage)
    samples_at_once = scale["micro_batch_size"] * plan.num_ranks
    options = {
        "config": Path(__file__).with_name("long.yaml"),
        **ModelSize(**scale["model"]).options(scale["seq"]),
        **scale["options"],
        "data.path": plan.data,
        "zero.stage": stage,
        "train.precision": precision,
        "train.micro_batch_size": scale["micro_batch_size"],
        "train.global_batch_size": math.ceil(scale["global_batch_size"] / samples_at_once) * samples_at_once,
        "wandb.mode": "online" if _has_wandb_key() else "disabled",
        "run.dir": folder,
    }
    command = plan.launch(plan.num_ranks, "pretrain_gpt.py", *as_options(options))
    name = f"{scale['model']['name']}, {precision}, stage {stage}"
    return Part(name, command, partial(_read, folder, _folder(plan, precision, 0)), LIMIT_SECONDS, is_long=True)


def _folder(plan: Plan, precision: str, stage: int) -> Path:
    return plan.output / f"long-{precision}-stage-{stage}"


def _read(folder: Path, of_stage_0: Path, log: Path) -> list[Figure]:
    """Read the last validation loss of a run, and compare it with that of stage 0 and with the published curve."""
    records, (tokens, loss) = read_steps(folder), validation_curve(folder)[-1]
    num_bad = sum(not math.isfinite(record["loss"]) for record in records)
    figures = [
        Figure("validation loss", loss),
        Figure("after tokens", tokens),
        at_most("difference from stage 0", abs(loss - validation_curve(of_stage_0)[-1][1]), STAGE_TOLERANCE),
        at_most("logged steps whose loss is not finite", num_bad, 0),
    ]
    if published := published_loss(tokens):
        figures.append(Figure("difference from llm.c on FineWeb", loss - published))
    return figures


def validation_curve(folder: Path) -> list[tuple[int, float]]:
    """Return (tokens, validation loss) of the evaluations of a run. Raises UnreadableResult if there is none."""
    records = read_steps(folder)
    curve = [(record["tokens"], record["validation_loss"]) for record in records if record.get("validation_loss")]
    if not curve:
        raise UnreadableResult(f"{folder} has no finite validation loss")
    return curve


def published_curve() -> list[tuple[int, float]]:
    """Return (tokens, validation loss) of llm.c's run, without its untrained model."""
    lines = [line for line in REFERENCE.read_text().splitlines() if not line.startswith("#")]
    return [(int(row["tokens"]), float(row["validation_loss"])) for row in csv.DictReader(lines) if int(row["tokens"])]


def published_loss(tokens: int) -> float | None:
    """Return the published loss after so many tokens, interpolated over their logarithm; None outside the curve."""
    for (first, loss), (last, next_loss) in pairwise(published_curve()):
        if first <= tokens <= last:
            return loss + (next_loss - loss) * math.log(tokens / first) / math.log(last / first)
    return None


def _has_wandb_key() -> bool:
    """Return True if W&B is configured: by WANDB_API_KEY, or in ~/.netrc by `wandb login`."""
    try:
        return "WANDB_API_KEY" in os.environ or netrc.netrc().authenticators("api.wandb.ai") is not None
    except (OSError, netrc.NetrcParseError):
        return False


def draw(path: Path, folders: Sequence[Path]) -> None:
    from lab.pages.plots import plot  # imported here, because only this program needs matplotlib

    with plot(path, size=(8, 5)) as (axes,):
        for folder in folders:
            with suppress(UnreadableResult):  # a run that failed, and whose part says so
                curve = validation_curve(folder)
                axes.plot(*zip(*curve, strict=True), marker=".", label=folder.name.removeprefix("long-"))
        axes.plot(*zip(*published_curve(), strict=True), "k--", marker="x", label="llm.c on FineWeb")
        axes.set(xlabel="tokens", ylabel="validation loss", xscale="log")


if __name__ == "__main__":
    draw(Path(sys.argv[1]), [Path(folder) for folder in sys.argv[2:]])
