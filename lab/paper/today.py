"""Write docs/paper/today.md: the paper's tables of size and throughput for nodes of 8 H100, by dry runs.

python -m lab.paper.today
"""

from collections.abc import Iterator
from dataclasses import replace

from gpt.settings.parser import parse_settings
from gpt.settings.settings import Settings
from lab.measure.cluster import ClusterSpec
from lab.pages.markdown import projected_here, table, write_blocks
from lab.paper.experiments import CONFIGS, PAPER, ROOT, Experiment, experiments
from lab.paper.plots import Series, plot_bars
from lab.paper.results import KEPT_RUNS, line_of
from lab.planner.depth import Estimate
from lab.planner.layouts import CandidateLayout
from lab.planner.search import DoesNotFit, Search, closed_form_rank, show_progress
from parallel.validation.errors import exit_on_config_error

CLUSTER_FILE = ROOT / "configs/clusters/dgx-h100.yaml"
CLUSTER = ClusterSpec.load(CLUSTER_FILE)
WORLDS = 8, 64, 400
MODELS = "1.5B", "8B", "40B", "100B", "170B"
SYSTEMS = {  # (tensor size, stage, width of the model): the depth is what is searched
    "DDP": (1, 0, 2048),
    "ZeRO, stage 2": (1, 2, 4096),
    "ZeRO, stage 3": (1, 3, 8192),
    "tensor 8": (8, 0, 8192),
    "tensor 8, stage 2": (8, 2, 8192),
    "tensor 8, stage 3": (8, 3, 8192),
}
PAPERS_LARGEST = "1.4B", "13B (128 GPUs)", "", "20B (16 GPUs)", "170B (400 GPUs)", ""  # of V100, by system


def settings_of(world_size: int, **values: object) -> Settings:
    options = (f"--{name.replace('__', '.')}={value}" for name, value in values.items())
    world = f"--dry_run.world_size={world_size}", f"--dry_run.cluster={CLUSTER_FILE}"
    return parse_settings([f"--config={CONFIGS / 'today.yaml'}", *world, *options])


def largest_models() -> Iterator[str]:
    """Yield a table of the deepest models that fit, with one sequence a rank and a checkpoint for each layer."""
    rows: list[list[object]] = [["paper, V100", *PAPERS_LARGEST]]
    for world_size in WORLDS:
        cells = []
        for name, (tensor_size, stage, width) in SYSTEMS.items():
            show_progress(f"largest model, {world_size} GPUs, {name}")
            settings = settings_of(
                world_size,
                model__hidden_size=width,
                model__num_heads=width // 128,
                parallel__tensor_size=tensor_size,
                zero__stage=stage,
                train__global_batch_size=world_size // tensor_size,
            )
            line = line_of(settings, CLUSTER)
            layers = line.max_layers(CLUSTER.usable_gpu_bytes)
            billions = line.at(layers).parameters / 1e9
            cells.append(f"{billions:,.{'0f' if billions >= 100 else '3g'}}B" if layers else "none")
        rows.append([f"{world_size} H100", *cells])
    yield from table(["", *SYSTEMS], rows)


def fastest(experiment: Experiment, world_size: int) -> tuple[CandidateLayout, Estimate, Search] | None:
    """Return the first layout, by the closed forms of the planner, that fits in a dry run; None if none does."""
    row = experiment.row
    batch = int(row["total_batch"]) * world_size // experiment.num_gpus
    settings = settings_of(
        world_size,
        model__num_layers=row["layers"],
        model__hidden_size=row["hidden"],
        model__num_heads=row["heads"],
        train__global_batch_size=batch,
    )
    search = Search(settings, CLUSTER, world_size, kept_runs=KEPT_RUNS)
    try:
        plan = search.plan()
    except DoesNotFit:
        return None
    for layout in (found.layout for found in sorted(plan.fitting, key=closed_form_rank)):
        show_progress(f"{row['model']}, {world_size} GPUs: {layout}")
        estimate = search.estimate(layout)
        if search.fits(estimate):
            return layout, estimate, search
    return None


def throughputs() -> Iterator[str]:
    """Yield a table of the paper's models, each with its batch for every GPU, and plot the rates."""
    of_zero = [one for one in experiments("figure2") if not one.is_baseline and one.row["model"] in MODELS]
    rows: list[list[object]] = []
    rates: dict[int, list[float | None]] = {world_size: [] for world_size in WORLDS}
    for experiment in of_zero:
        for world_size in WORLDS:
            found = fastest(experiment, world_size)
            rates[world_size].append(None)
            cells = ["does not fit", "", "", "", "", ""]
            if found:
                layout, estimate, search = found
                own = replace(experiment, row=experiment.row | {"gpus": str(world_size)})
                batch = search.settings.train.global_batch_size
                rate = own.tflops(estimate.seconds) * batch / int(experiment.row["total_batch"])
                rates[world_size][-1] = rate
                times = f"{rate / experiment.measured_tflops:.1f}" if experiment.measured_tflops else ""
                figures = f"{rate:.0f}", times, f"{search.mfu(estimate):.0%}", f"{estimate.seconds:.2f}"
                cells = [layout.division, *figures, f"{estimate.device_peak_bytes / 1e9:.1f}"]
            rows.append([experiment.row["model"], world_size, experiment.row["tflops_per_gpu"], *cells])
    names = [one.row["model"] for one in of_zero]
    colors = dict(zip(WORLDS, ("lightblue", "tab:blue", "navy"), strict=True))
    series = [Series("paper, 400 V100", names, [one.measured_tflops for one in of_zero], color="tab:gray")]
    series += [Series(f"{num} H100", names, rates[num], color=colors[num]) for num in WORLDS]
    plot_bars(("today", "The models of Figure 2 today", "parameters of the model", "TFLOPs a GPU"), series)
    headings = ["model", "GPUs", "V100, TFLOPs", "layout on H100", "TFLOPs", "times V100", "MFU", "step, s", "GB"]
    yield from table(headings, rows)


if __name__ == "__main__":
    with exit_on_config_error():
        blocks = {"largest": [*largest_models(), f"\n{projected_here('dgx-h100')}"], "throughput": list(throughputs())}
        write_blocks(PAPER / "today.md", blocks)
