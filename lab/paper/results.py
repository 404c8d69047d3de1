"""The dry runs of the paper's configurations, from a cache if it has them, and what is read from them."""

from dataclasses import dataclass
from functools import cache
from typing import Any

from gpt.run_folder.files import CONFIG, read_steps
from gpt.settings.parser import parse_settings
from gpt.settings.settings import Settings
from lab.measure.cluster import ClusterSpec
from lab.paper.calibrate import CALIBRATED
from lab.paper.experiments import CLUSTER_FILE, ROOT, SEQ_LENGTH, Experiment, experiments
from lab.planner.depth import DepthExtrapolation, Estimate, extrapolate, shallow_runs
from parallel.validation.fields import shown

Part = tuple[str, list[str]]  # the status of a table or figure, and the lines of its section
KEPT_RUNS = ROOT / "runs/paper/dry"
CLUSTER = ClusterSpec.load(CLUSTER_FILE)
FREE = {  # settings of `train` in which a run may differ from its row: how long it is, and what it logs
    f"train.{name}" for name in ("steps", "seed", "log_every", "eval_samples", "sample_tokens", "peak_tflops")
}


@dataclass(frozen=True)
class Result:
    experiment: Experiment
    line: DepthExtrapolation

    @property
    def key(self) -> str:
        return f"{self.experiment.figure}/{self.experiment.name}"

    @property
    def is_calibrated(self) -> bool:
        return self.experiment.figure == "figure2" and self.experiment.name in CALIBRATED

    @property
    def estimate(self) -> Estimate:
        return self.line.at(int(self.experiment.row["layers"]))

    @property
    def fits(self) -> bool:
        """True if the tensors leave the reserve of `ClusterSpec` free."""
        return self.estimate.device_peak_bytes <= CLUSTER.usable_gpu_bytes

    @property
    def tflops(self) -> float | None:
        """The TFLOPs a GPU; None if the run is out of memory, and so has none."""
        return self.experiment.tflops(self.estimate.seconds) if self.fits else None

    @property
    def error(self) -> float | None:
        measured = self.experiment.measured_tflops
        return self.tflops / measured - 1 if measured and self.tflops else None


def line_of(
    settings: Settings, cluster: ClusterSpec = CLUSTER, depths: tuple[int, int] | None = None
) -> DepthExtrapolation:
    """Return the line through two dry runs, which are kept in KEPT_RUNS."""
    return extrapolate(shallow_runs(settings, KEPT_RUNS, depths), cluster)


@cache
def results(figure: str) -> tuple[Result, ...]:
    found = []
    for experiment in experiments(figure):
        print(f"{experiment.figure} {experiment.name}", flush=True)
        found.append(Result(experiment, line_of(experiment.settings())))
    return tuple(found)


def residual_bytes() -> float:
    """Return the memory that the paper measures for C1 at 40B (Figure 7) beyond that of the dry run."""
    first = results("figure7")[0]
    return float(first.experiment.row["max_cached_GB"]) * 1e9 - first.estimate.device_peak_bytes


def measured_here(experiment: Experiment) -> str:
    """Return the TFLOPs a GPU of a run on a real cluster, counted as those of the row; "" if there is none.

    If the run is not the one of the row, return the first difference.
    """
    folder = ROOT / "runs/paper" / experiment.figure / experiment.name
    if not (steps := read_steps(folder)):
        return ""
    found = _compared(parse_settings([f"--config={folder / CONFIG}", f"--run.dir={folder}"]), steps[-1].get("ranks"))
    for name, expected in _compared(experiment.settings(), experiment.num_gpus).items():
        if found[name] != expected:
            return f"another run: {name}={shown(found[name])}, not {shown(expected)}"
    tokens = int(experiment.row["total_batch"]) * SEQ_LENGTH
    return f"{experiment.tflops(tokens / steps[-1]['tokens_per_second']):.1f}"


def _compared(settings: Settings, num_ranks: float | None) -> dict[str, Any]:
    """Return what a run and its row must have in common, by name."""
    groups = "model", "parallel", "zero", "activations", "offload", "optimizer", "train"
    values = {f"{group}.{name}": value for group in groups for name, value in vars(getattr(settings, group)).items()}
    return {name: value for name, value in values.items() if name not in FREE} | {"ranks": num_ranks}
