"""The cluster file of a measured machine."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from datetime import date
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch
import yaml

from lab.measure.bandwidth import BYTES_PER_GB, LinkRate, Rates
from lab.measure.cluster import RESERVED_BYTES, ClusterSpec
from lab.measure.curves import Curve, mean_curves
from lab.measure.device_kernels import DeviceKernels
from lab.measure.kernel_costs import kernel_seconds
from lab.measure.products import Product, attention_flops, fit_overhead, peak_rate
from lab.measure.reference_step import reference_kernels
from parallel.host_memory import physical_bytes
from parallel.mesh import HALF_TYPES
from parallel.world import World

INSIDE, ACROSS = "tensor", "data"  # axes of a mesh whose tensor groups are whole nodes
GPU_TILE, CPU_TILE = 128, 16
LEAST_FACTOR = 0.1  # of the time of kernels in a step, if their models were far too slow
# Keys that fused attention reads beside those that are not masked: see ClusterSpec.attention_overhead. The blocks of
# keys of a CPU are longer than its measured sequences, so each query reads all keys, which the measured rate contains.
ATTENTION_OVERHEAD = {"cuda": 350.0, "cpu": 0.0}


@dataclass(frozen=True)
class Measured:
    """The measurements of one rank."""

    rates: Rates  # with links along the axes INSIDE and ACROSS
    one_rank_per_node: list[LinkRate]  # between nodes, while only the first rank of each node sends
    job_mesh: list[LinkRate]  # along the axes of the job's own mesh, if that is another one
    hop_seconds: float
    collectives: list[Curve]  # inside nodes
    kernels: DeviceKernels
    reserved_bytes: int  # of the device's memory, which CUDA and NCCL take


def cluster_of(by_rank: Sequence[Measured], world: World, name: str) -> ClusterSpec:
    """Return the measured machine as a cluster, in which the rates that were reached count as peaks.

    With a single node, the rate inside it also stands for the rate between nodes; with one rank a node, the rate
    between nodes also stands for the rate inside.
    """

    def slowest_all_reduce(axis: str) -> float:
        links = [link for measured in by_rank for link in measured.rates.links if link.axis == axis]
        return min((link.bytes_per_second for link in links if link.what == "all_reduce"), default=0.0)

    devices = [measured.rates.device for measured in by_rank]
    flows = [link.bytes_per_second for measured in by_rank for link in measured.one_rank_per_node]
    memory_rate = min(device.memory_bytes_per_second for device in devices)
    inside, across = slowest_all_reduce(INSIDE), slowest_all_reduce(ACROSS)
    inside, across = inside or across or memory_rate, across or inside or memory_rate
    properties = torch.cuda.get_device_properties(world.device) if world.device.type == "cuda" else None
    host_bytes = physical_bytes()
    spec = ClusterSpec(
        name=name,
        gpus_per_node=world.local_size,
        gpu_memory_gib=(properties.total_memory if properties else host_bytes / world.local_size) / 2**30,
        host_memory_gb=host_bytes / 1e9,
        peak_half_tflops=min(device.flops_per_second for device in devices) / 1e12,
        num_multiprocessors=properties.multi_processor_count if properties else 1,  # a CPU counts as one
        memory_gb_per_second=memory_rate / BYTES_PER_GB,
        intra_node_gb_per_second=inside / BYTES_PER_GB,
        node_gb_per_second=across * world.local_size / BYTES_PER_GB,
        network_card_gb_per_second=min(flows, default=across) / BYTES_PER_GB,
        host_gb_per_second=min(device.host_bytes_per_second for device in devices) / BYTES_PER_GB,
        kernel_seconds=max(device.kernel_seconds for device in devices),
        hop_seconds=max(measured.hop_seconds for measured in by_rank) or 1e-5,
        device="gpu" if properties else "cpu",
        reserved_gb=max(measured.reserved_bytes for measured in by_rank) / 1e9,
        product_tile=GPU_TILE if properties else CPU_TILE,
        splits_products=properties is not None,  # cuBLAS divides long sums of products with few tiles (split-K)
        attention_overhead=ATTENTION_OVERHEAD[world.device.type],
        collectives=mean_curves([measured.collectives for measured in by_rank]),
        calibrated=True,
    )
    kernels = [measured.kernels for measured in by_rank]
    return with_step_factors(with_kernels(spec, kernels), kernels, world.device)


def with_kernels(spec: ClusterSpec, measured: Sequence[DeviceKernels]) -> ClusterSpec:
    """Return the cluster with the measured times of kernels, and the models that are fitted to them."""
    half, full = (products_of(measured, dtype) for dtype in (torch.bfloat16, torch.float32))
    half_tiles, full_tiles = fit_overhead(spec.half_products, half), fit_overhead(spec.half_products, full)
    half_rate, full_rate = peak_rate(half_tiles, half), peak_rate(full_tiles, full)
    launch = fmean(kernels.launch_seconds for kernels in measured)
    spec = replace(
        spec,
        gemm_fraction=half_rate / (spec.peak_half_tflops * 1e12),
        tile_overhead=half_tiles.overhead,
        full_precision_share=full_rate / half_rate,
        full_precision_tile_overhead=full_tiles.overhead,
        # The measured times of a CPU's kernels contain those of launching them alone.
        launch_seconds=launch if spec.device == "gpu" else max(0.0, launch - spec.kernel_seconds),
        kernels=mean_curves([kernels.curves for kernels in measured]),
    )
    return replace(
        spec,
        attention_fraction=attention_fraction(measured, torch.bfloat16, spec),
        full_precision_attention_fraction=attention_fraction(measured, torch.float32, spec),
    )


def with_step_factors(spec: ClusterSpec, measured: Sequence[DeviceKernels], device: torch.device) -> ClusterSpec:
    """Return the cluster with the factors by which the reference step takes longer than its kernels by themselves."""
    spec = replace(spec, full_step_factor=_step_factor(spec, measured, device, torch.float32))
    return replace(spec, half_step_factor=_step_factor(spec, measured, device, torch.bfloat16))


def _step_factor(
    spec: ClusterSpec, measured: Sequence[DeviceKernels], device: torch.device, dtype: torch.dtype
) -> float:
    """Return the factor of the kernels of one type; those of other types in the same step have the spec's factor."""
    seconds = fmean(kernels.step_seconds[dtype] for kernels in measured)
    alone = others = 0.0
    for kernel in reference_kernels(device, dtype):
        if (kernel.dtype in HALF_TYPES) == (dtype in HALF_TYPES):
            alone += kernel_seconds(kernel, spec)
        else:
            others += kernel_seconds(kernel, spec)
    return max(seconds - others, LEAST_FACTOR * alone) / alone


def products_of(measured: Sequence[DeviceKernels], dtype: torch.dtype) -> list[tuple[Product, float]]:
    found = [one for kernels in measured for one in kernels.kernels if one.kernel.dtype == dtype]
    return [(one.kernel.product, one.seconds) for one in found if one.kernel.product is not None]


def attention_fraction(measured: Sequence[DeviceKernels], dtype: torch.dtype, cluster: ClusterSpec) -> float | None:
    """Return the part of the half-precision peak that fused attention reaches; None if there is no such kernel."""
    rates = [
        attention_flops(one.kernel.attention, cluster.attention_overhead) / one.seconds
        for kernels in measured
        for one in kernels.kernels
        if one.kernel.attention is not None and one.kernel.dtype == dtype
    ]
    return median(rates) / (cluster.peak_half_tflops * 1e12) if rates else None


def reserved_bytes(device: torch.device) -> int:
    """Return the memory of the device that this process has beside torch's allocator; on a CPU the assumed one."""
    if device.type == "cpu":
        return RESERVED_BYTES
    torch.cuda.synchronize(device)
    free, total = torch.cuda.mem_get_info(device)
    return total - free - torch.cuda.memory_reserved(device)


def write_cluster(spec: ClusterSpec, path: Path, nodes: Sequence[str]) -> None:
    values = _rounded(json.loads(json.dumps(asdict(spec))))
    where = f"on {date.today()}, on {', '.join(nodes)}"
    head = f"# Measured by lab.measure {where}: rates that were reached, not those of data sheets.\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(head + yaml.safe_dump(values, sort_keys=False, default_flow_style=None, width=120))


def _rounded(value: Any) -> Any:
    """Return a tree with four digits of each float."""
    match value:
        case float():
            return float(f"{value:.4g}")
        case dict():
            return {name: _rounded(member) for name, member in value.items()}
        case list():
            return [_rounded(member) for member in value]
    return value
