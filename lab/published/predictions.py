"""The prediction of a row: its recordings, projected on its cluster as the program that was measured, at its depth."""

import functools
from dataclasses import dataclass, replace

from gpt.settings.settings import Settings
from lab.dryrun.costs.program import Program, as_program, cluster_for, with_keys_of_a_context
from lab.dryrun.costs.quantized import gathered_quantized, quantized
from lab.measure.cluster import ClusterSpec
from lab.planner.depth import ShallowRun, extrapolate, shallow_runs
from lab.published.row_settings import padded_vocab, recorded_micro_batches, settings_of, settings_tree
from lab.published.rows import ROOT, Row, is_fsdp
from lab.published.sources import GPUS_OF_A_TRAY, cluster_name, program_of, quantization_of
from zero.formulas.memory import formula
from zero.partition.stage import STAGES

CLUSTERS, KEPT_RUNS = ROOT / "configs/clusters", ROOT / "runs/published"
GBPS_PER_GB_PER_SECOND = 8
AXES_OF_CODES = "data", "shard", "tensor"  # along which weights and activations are gathered in FP8, if they are

HALF_BYTES, FULL_SHARD = 2, 3  # of an element; the stage of FSDP's FULL_SHARD
TYPICAL_FRACTION = 0.45  # of the peak rate, that large models reach


@dataclass(frozen=True)
class Prediction:
    """The projected step of a row, and the memory of one of its GPUs."""

    row: Row
    seconds: float
    peak_bytes: float
    fits: bool

    @property
    def tflops(self) -> float:
        return self.row.tflops(self.seconds)

    @property
    def error(self) -> float:
        return self.tflops / self.row.published_tflops - 1


@functools.cache
def runs_of(row: Row) -> tuple[ShallowRun, ShallowRun]:
    """Return the dry runs of a row, which are kept in KEPT_RUNS."""
    return shallow_runs(recorded_settings(row), KEPT_RUNS)


def recorded_settings(row: Row) -> Settings:
    return settings_of(settings_tree(row, recorded_micro_batches(row)), row.tp * row.data_size)


@functools.cache
def load_cluster(name: str) -> ClusterSpec:
    return ClusterSpec.load(CLUSTERS / f"{name}.yaml")


def cluster_of(row: Row) -> ClusterSpec:
    """Return the cluster of a row, with the network that the row states."""
    cluster = load_cluster(cluster_name(row))
    num_stated = cluster.gpus_per_node / GPUS_OF_A_TRAY.get(cluster.name, cluster.gpus_per_node)
    node_rate = row.node_gbps / GBPS_PER_GB_PER_SECOND * num_stated or cluster.node_gb_per_second
    num_cards = cluster.node_gb_per_second / cluster.network_card_gb_per_second
    return replace(cluster, node_gb_per_second=node_rate, network_card_gb_per_second=node_rate / num_cards)


def predict(row: Row, cluster: ClusterSpec | None = None, program: Program | None = None) -> Prediction:
    """Return the prediction of a row, by default on its cluster and as its program."""
    program = program or program_of(row)
    cluster = cluster_for(cluster or cluster_of(row), program)
    found = extrapolate(runs_as(row, program), cluster).at(row.layers / row.pipeline)
    peak = found.device_peak_bytes - bytes_saved(row)
    # Without interleaving, a pipeline is filled and emptied in as many micro-batches as it has other stages.
    seconds = found.seconds * (1 + (row.pipeline - 1) / row.num_micro_batches)
    return Prediction(row, seconds, peak, peak <= cluster.usable_gpu_bytes)


@functools.cache
def runs_as(row: Row, program: Program) -> tuple[ShallowRun, ShallowRun]:
    first, second = (of_program(run, row, program) for run in runs_of(row))
    return first, second


def of_program(run: ShallowRun, row: Row, program: Program) -> ShallowRun:
    """Return a dry run as the program would run it, with all micro-batches of the row."""
    kernels, events = as_program(run.kernels, run.events, program)
    kernels = [with_keys_of_a_context(kernel, row.context_parallel) for kernel in kernels]
    if how := quantization_of(row):
        kernels, events = quantized(kernels, events, how)
        if row.fp8_gather:
            embedding_bytes = HALF_BYTES * padded_vocab(row) * row.hidden
            events = gathered_quantized(events, how, AXES_OF_CODES, embedding_bytes)
    num_left_out = row.num_micro_batches - recorded_micro_batches(row)
    return replace(run, kernels=kernels, events=events, num_left_out=num_left_out)


def bytes_saved(row: Row) -> float:
    """Return the memory that the measured program needs less than this one.

    FSDP shards parameters in fp32, which are their own master weights; here there are half-precision shards beside.
    """
    return HALF_BYTES * row.parameters / row.data_size if is_fsdp(row) and row.stage == FULL_SHARD else 0.0


def by_closed_form(row: Row) -> Prediction:
    """Return a rough prediction of a row without a dry run: FLOPs at a typical rate, states and checkpoints."""
    cluster = cluster_of(row)
    seconds = row.flops / (row.tp * row.data_size) / (TYPICAL_FRACTION * cluster.peak_half_tflops * 1e12)
    states = formula(STAGES[min(max(row.stage, 0), FULL_SHARD)], row.parameters / row.tp, row.data_size).total
    peak = states + HALF_BYTES * row.layers * row.micro_batch_size * row.seq * row.hidden
    return Prediction(row, seconds, peak, peak <= cluster.usable_gpu_bytes)
