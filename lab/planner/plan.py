"""The planner, which finds the layout with which a model trains on a cluster, or the largest model that fits.

    python -m lab.planner.plan --cluster configs/clusters/dgx-2.yaml --nodes 25 --config FILE [--largest]
    python -m lab.planner.plan --cluster configs/clusters/dgx-2.yaml --nodes 8 16 25 --config FILE --front PLOT.png

Settings of the layout that are given, as options or in FILE, are kept; --free names those that are searched all the
same. docs/dry_run.md describes the search.
"""

import argparse
import json
import sys
from collections.abc import Collection
from dataclasses import replace
from functools import partial
from operator import attrgetter
from pathlib import Path

from rich.console import Console
from rich.table import Table

from gpt.monitor.console import make_console, print_table
from gpt.monitor.units import COUNTS
from gpt.settings.option_names import messages_in_option_names
from gpt.settings.parser import given_settings, parse_settings
from gpt.settings.settings import Settings
from lab.dryrun.collectives import right_aligned
from lab.dryrun.run_cost import steps_for
from lab.measure.cluster import ClusterSpec
from lab.measure.recipes import RECIPES
from lab.planner.depth import Estimate
from lab.planner.explain import explanations
from lab.planner.layouts import FIELDS, CandidateLayout, with_values
from lab.planner.plan_report import (
    Choice,
    chosen_lines,
    closed_form_table,
    constraint_lines,
    dry_run_path,
    dry_run_record,
    front,
    front_table,
    launch_lines,
    plot_front,
    spread,
    too_large_line,
    verified_table,
)
from lab.planner.remedies import remedies, verified_remedies
from lab.planner.search import DEFAULT_TO_VERIFY, DoesNotFit, Plan, Search, show_progress
from parallel.validation.errors import ConfigError, exit_on_config_error


@messages_in_option_names()
def main(arguments: list[str]) -> None:
    """Print a plan, and write the settings of its best run."""
    own, others = _parser().parse_known_args(arguments)
    console = make_console()
    if min(own.nodes) < 1 or own.verify < 1:
        raise ConfigError(f"--nodes={min(own.nodes)} or --verify={own.verify} is below 1; choose 1 or more")
    if len(own.nodes) > 1 and not own.front:
        raise ConfigError(f"--nodes={own.nodes} are {len(own.nodes)} numbers, which only --front=PLOT compares")
    cluster = ClusterSpec.load(own.cluster)
    given = {name: getattr(own, name) for name in ("reserved_gb", "dollars_per_gpu_hour")}
    cluster = replace(cluster, **{name: value for name, value in given.items() if value is not None})
    num_ranks = own.nodes[0] * cluster.gpus_per_node
    settings = parse_settings(others, num_ranks, partial(print_table, console))
    check_rates(settings, cluster, Path(own.cluster))
    if own.tokens is not None:
        settings = with_tokens(settings, own.tokens)
    origins = constraints(others, num_ranks, own.free)
    if "offload.mode" in (own.free or ()):
        settings = with_values(settings, {"offload.mode": "auto"})
    settings = replace(settings, dry_run=replace(settings.dry_run, cluster=own.cluster))
    search = Search(settings, cluster, num_ranks, tuple(origins), own.verify)
    for line in constraint_lines(settings, origins):
        console.print(line)
    if own.front:
        search, chosen = report_front(search, own.nodes, Path(own.front), console)
    else:
        chosen = (report_largest if own.largest else report_plan)(search, console)
    path, layout = Path(own.output or f"{settings.run.dir}/plan.yaml"), CandidateLayout.of(chosen)
    search = replace(search, settings=chosen)
    write_settings(chosen, path)
    record = dry_run_record(layout, search.estimate(layout), search)
    dry_run_path(path).write_text(json.dumps(record, indent=1) + "\n")
    for line in explanations(layout, search) if own.explain else ():
        console.print(line)
    for line in launch_lines(search, chosen, path):
        console.print(line, soft_wrap=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m lab.planner.plan", description=__doc__.splitlines()[0])
    parser.add_argument("--cluster", required=True, help="cluster file, such as configs/clusters/dgx-2.yaml")
    parser.add_argument("--nodes", type=int, nargs="+", required=True, help="number of nodes; several with --front")
    text = "search these settings of the layout although they are given; without names, all that files give"
    parser.add_argument("--free", nargs="*", metavar="SETTING", help=text)
    parser.add_argument("--tokens", metavar="COUNT", help="length of the run, such as 300B; by default train.steps")
    of_file = "; by default that of the cluster file"
    parser.add_argument("--reserved_gb", type=float, help=f"memory of a GPU that is left free{of_file}")
    parser.add_argument("--dollars_per_gpu_hour", type=float, help=f"price{of_file}")
    text = "YAML file for the settings of the best run; by default run.dir/plan.yaml"
    parser.add_argument("--output", metavar="FILE", help=text)
    parser.add_argument("--largest", action="store_true", help="find the largest number of layers that fits")
    parser.add_argument("--front", metavar="PLOT", help="image file: also show which layouts save memory or GPU hours")
    text = "say why the layouts lose that differ from the chosen one by a step of one setting"
    parser.add_argument("--explain", action="store_true", help=text)
    parser.add_argument("--verify", type=int, default=DEFAULT_TO_VERIFY, help="number of layouts to verify by dry runs")
    return parser


def constraints(arguments: list[str], num_ranks: int, free: list[str] | None) -> dict[str, str]:
    """Return {setting of the layout that is given: where}, without those that are freed or are auto.

    `free` are names, or is empty for all that files give; None frees nothing. Raise ConfigError for a name that is no
    such setting.
    """
    if unknown := [name for name in free or () if name not in FIELDS]:
        raise ConfigError(f"--free={unknown[0]} is no setting of the layout; choose {', '.join(FIELDS)}")
    given = given_settings(arguments, num_ranks)
    freed = {name for name, one in given.items() if one.origin} if free == [] else set(free or ())
    kept = (name for name in FIELDS if name in given and name not in freed and given[name].value != "auto")
    return {name: given[name].origin.removesuffix(": ") or "command line" for name in kept}


def check_rates(settings: Settings, cluster: ClusterSpec, path: Path) -> None:
    """Raise ConfigError, with a cluster file beside it that has them, if a file lacks the rates of FP8 products."""
    recipe = RECIPES[settings.train.fp8.recipe]
    missing = cluster.peak_fp8_tflops if recipe.bits == 8 else cluster.peak_fp4_tflops
    if settings.train.matmul != "fp8" or missing is not None:
        return
    others = {file: ClusterSpec.load(file) for file in sorted(path.parent.glob("*.yaml"))}
    able = [file for file, one in others.items() if one.peak_fp8_tflops is not None]
    like = attrgetter("peak_half_tflops", "gpu_memory_gib", "memory_gb_per_second")  # tells GPUs apart
    able.sort(key=lambda file: sum(a != b for a, b in zip(like(others[file]), like(cluster), strict=True)))
    remedy = f"choose --cluster={able[0]}" if able else f"add it to {path}"
    raise ConfigError(f"--cluster={path} has no peak_fp{recipe.bits}_tflops, which train.matmul=fp8 needs; {remedy}")


def with_tokens(settings: Settings, text: str) -> Settings:
    """Return the settings with as many steps as a number of tokens such as 300B takes."""
    sizes = {name: size for size, name in COUNTS if name}
    number = text[:-1] if text[-1:] in sizes else text
    try:
        tokens = float(number) * sizes.get(text[-1:], 1)
    except ValueError as error:
        raise ConfigError(f"--tokens={text} is no number of tokens; choose one such as 300B") from error
    return replace(settings, train=replace(settings.train, steps=steps_for(tokens, settings)))


def write_settings(settings: Settings, path: Path) -> None:
    """Write settings for `--config`. Raise ConfigError if that fails."""
    plain = replace(settings, dry_run=replace(settings.dry_run, world_size=None, cluster=None))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(plain.to_yaml())
    except OSError as error:
        raise ConfigError(f"--output={path} cannot be written ({error.strerror}); choose another file") from error


def report_plan(search: Search, console: Console) -> Settings:
    """Print the layouts, and return the settings of the roomiest of the fastest that fit in a dry run."""
    plan, fitting = plan_and_verify(search, console)
    if not fitting:
        smallest = min(plan.fitting, key=lambda found: found.device_bytes).layout
        raise ConfigError(
            f"none of the best layouts fits in a dry run; raise --verify={search.num_to_verify}, or "
            f"{verified_remedies(smallest, search)}"
        )
    for line in chosen_lines(fitting, search):
        console.print(line)
    best, _ = search.choose(fitting)
    return best.applied_to(search.settings)


def plan_and_verify(search: Search, console: Console) -> tuple[Plan, dict[CandidateLayout, Estimate]]:
    """Print the layouts for a world, and return the plan and what fits of it, as dry runs estimate it."""
    show_progress(f"computing the memory and time of all layouts on {search.world_size} GPUs by closed forms")
    try:
        plan = search.plan()
    except DoesNotFit as error:
        raise ConfigError(f"{error}; {verified_remedies(error.smallest.layout, search)}") from error
    verified = search.verify(plan)
    print_table(console, verified_table(verified, search))
    if others := [found for found in plan.fitting if found.layout not in verified]:
        print_table(console, closed_form_table(others))
    for found in plan.too_large:
        console.print(too_large_line(found, search.cluster, remedies(found.layout, search)))
    return plan, search.fitting(verified)


def report_front(search: Search, nodes: Collection[int], plot: Path, console: Console) -> tuple[Search, Settings]:
    """Print the layouts for each number of nodes, and print and plot the front of all.

    Return the search and the settings of the fastest. Numbers of nodes on which none fits are passed over.
    """
    choices: list[Choice] = []
    for num_nodes in nodes:
        own = replace(search, world_size=num_nodes * search.cluster.gpus_per_node)
        try:
            plan, found = plan_and_verify(own, console)
        except ConfigError as error:
            console.print(f"{num_nodes} nodes: {error}")
            continue
        for layout in spread(plan.fitting, search.num_to_verify):
            if layout not in found:
                show_progress(f"dry run of a layout that saves memory: {layout}")
                found[layout] = own.estimate(layout)
        choices += [Choice(own, layout, estimate) for layout, estimate in own.fitting(found).items()]
    if not choices:
        raise ConfigError(f"no layout fits on --nodes={nodes}; use more nodes or a smaller model")
    chosen = front(choices, lambda one: one.figures)
    print_table(console, front_table(chosen, search.cluster))
    try:
        plot.parent.mkdir(parents=True, exist_ok=True)
        plot_front(choices, chosen, plot, search.cluster)
    except OSError as error:
        raise ConfigError(f"--front={plot} cannot be written ({error.strerror}); choose another file") from error
    console.print(f"the plot is {plot}")
    return chosen[0].search, chosen[0].layout.applied_to(search.settings)


def report_largest(search: Search, console: Console) -> Settings:
    """Print how deep the model can be with the best layouts, and return the settings of the deepest by dry run."""
    cluster, of_size = search.cluster, f"layers of hidden size {search.settings.model.hidden_size}"
    columns = right_aligned("closed forms", "dry run", "parameters", "GB")
    table = Table("layout", *columns, title=f"The most {of_size}", title_justify="left")
    max_layers: dict[CandidateLayout, int] = {}
    show_progress("computing the largest models of all layouts by closed forms")
    for predicted, layout in search.deepest_models()[: search.num_to_verify]:
        show_progress(f"dry run {len(max_layers) + 1} of {search.num_to_verify}: {layout}")
        extrapolation = search.extrapolate(layout)
        host_bytes = cluster.host_memory_gb * 1e9 / cluster.gpus_per_node
        max_layers[layout] = extrapolation.max_layers(cluster.usable_gpu_bytes, host_bytes)
        estimate = extrapolation.at(max_layers[layout])
        figures = f"{estimate.parameters / 1e9:.1f}B", f"{estimate.device_peak_bytes / 1e9:.1f}"
        table.add_row(str(layout), str(predicted), str(max_layers[layout]), *figures)
    print_table(console, table)
    best = max(max_layers, key=lambda layout: max_layers[layout])
    console.print(f"{max_layers[best]} {of_size} are the most that fit, by dry run")
    return best.applied_to(search.with_depth(max_layers[best]).settings)


if __name__ == "__main__":
    with exit_on_config_error():
        main(sys.argv[1:])
