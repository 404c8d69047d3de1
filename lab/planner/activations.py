"""Write docs/results/activations.md: plans of activations beside the stores, with the memory that each store needs.

    python -m lab.planner.activations

Steps of three models on H100 are projected, at stage 3 with one sequence on each rank. A store's figures come from dry
runs at two shallow depths, a plan's from one at the full depth.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from gpt.settings.parser import parse_settings
from lab.measure.cluster import ClusterSpec
from lab.pages.markdown import ROOT, projected_here, table, write_blocks
from lab.planner.layouts import CandidateLayout, Store
from lab.planner.search import Search, show_progress

PAGE = ROOT / "docs/results/activations.md"
CLUSTER = ClusterSpec.load(ROOT / "configs/clusters/hgx-h100.yaml")
MODELS = {"gpt/1.3b": 1, "models/llama-3-8b": 8, "models/llama-3-70b": 64}  # {file in configs: nodes}
LENGTHS = 4096, 32768
STORES: tuple[Store, ...] = "none", "selective", "keep", "partition_host"
LAYOUT = {"zero.stage": 3, "parallel.tensor_size": 1, "parallel.sequence_parallel": False, "train.compile": "none"}
HEADINGS = "model", "tokens", "store", "GB", "s", "plan: GB of blocks", "GB", "s", "its time / the store's"


def search_of(model: str, seq_length: int) -> Search:
    """Return the run of a model with one sequence on each rank."""
    num_ranks = MODELS[model] * CLUSTER.gpus_per_node
    batch = {"train.micro_batch_size": 1, "train.global_batch_size": num_ranks, "model.seq_length": seq_length}
    words = [f"--{name}={str(value).lower()}" for name, value in (LAYOUT | batch).items()]
    settings = parse_settings(["--config", str(ROOT / f"configs/{model}.yaml"), *words], num_ranks)
    return Search(settings, CLUSTER, num_ranks)


def rows(model: str, seq_length: int) -> Iterator[list[str]]:
    """Yield a row for each store: what a step takes, and what it takes with the plan for as much memory."""
    search = search_of(model, seq_length)
    for store in STORES:
        show_progress(f"{model}, {seq_length} tokens, {store}")
        known = search.estimate(CandidateLayout(1, 3, store, 1))
        as_large = replace(CLUSTER, gpu_memory_gib=(known.device_peak_bytes + CLUSTER.reserved_gb * 1e9 + 1) / 2**30)
        found = replace(search, cluster=as_large).estimate(CandidateLayout(1, 3, "planned", 1))
        figures = [f"{known.device_peak_bytes / 1e9:.1f}", f"{known.seconds:#.4g}", f"{found.budget_gb:.1f}"]
        figures += [f"{found.device_peak_bytes / 1e9:.1f}", f"{found.seconds:#.4g}"]
        yield [Path(model).name, f"{seq_length:,}", store, *figures, f"{found.seconds / known.seconds:.3f}"]


def main() -> None:
    found = [row for model in MODELS for seq_length in LENGTHS for row in rows(model, seq_length)]
    write_blocks(PAGE, {"stores": [*table(HEADINGS, found), "", projected_here(CLUSTER.name)]})


if __name__ == "__main__":
    main()
