"""The time of one kernel on a cluster's device, or of one operation on its host.

Comments state every assumption at the line that makes it; what a device reaches of its peaks is in the cluster file.
"""

import torch

from lab.measure.cluster import ClusterSpec
from lab.measure.curves import curve_name
from lab.measure.products import attention_flops
from lab.measure.recipes import RECIPES
from lab.observe.kernel_log import Kernel
from parallel.mesh import HALF_TYPES

# Tensor cores are used if all sizes of a half-precision product are multiples of 8 (cuBLAS before version 11). Without
# them a GPU has a quarter of its half-precision rate (V100: 31 of 125 TFLOPs).
TENSOR_CORE_MULTIPLE, WITHOUT_TENSOR_CORES = 8, 1 / 4
LIKE_OTHERS = "add"  # the measured kernel that stands for those which are not measured
MEASURED = (torch.float32,)  # the type that stands for those in which a kernel is not measured


def kernel_seconds(kernel: Kernel, cluster: ClusterSpec) -> float:
    """Return the time of arithmetic or of memory traffic, whichever is longer, and at least that of a launch.

    Each byte that the kernel reads or writes is counted once. All kernels take longer in a step than by themselves, by
    the same factor.
    """
    computing = product_seconds(kernel, cluster) + attention_seconds(kernel, cluster)
    seconds = max(moving_seconds(kernel, cluster), computing, cluster.kernel_seconds)
    factor = cluster.half_step_factor if kernel.dtype in HALF_TYPES else cluster.full_step_factor
    # The cores of a CPU run the program, too: it launches the next kernel when this one has ended.
    return factor * (seconds + (cluster.launch_seconds if cluster.device == "cpu" else 0.0))


def moving_seconds(kernel: Kernel, cluster: ClusterSpec) -> float:
    """Return the time of the memory traffic, as it was measured for this kernel or one like it, or by the rate."""
    if kernel.product is None and kernel.attention is None and cluster.kernels:
        curves = cluster.kernel_curves
        names = [curve_name(name, dtype) for name in (kernel.name, LIKE_OTHERS) for dtype in (kernel.dtype, *MEASURED)]
        if curve := next((curves[name] for name in names if name in curves), None):
            return curve.at(kernel.num_bytes)
    is_cast = kernel.recipe and kernel.product is None
    fraction = (is_cast and cluster.quantizing_fraction) or cluster.memory_fraction
    return kernel.num_bytes / (cluster.memory_gb_per_second * 1e9 * fraction)


def product_seconds(kernel: Kernel, cluster: ClusterSpec) -> float:
    """Return the time of the arithmetic of a matrix product; 0 for other kernels."""
    if kernel.product is None:
        return 0.0
    if kernel.recipe:
        recipe = RECIPES[kernel.recipe]
        share = cluster.quantized_products[recipe.bits].share_of_peak(kernel.product)
        return kernel.flops / (cluster.quantized_rate(recipe) * share)
    peak = cluster.peak_half_tflops * 1e12 * cluster.clock_fraction
    rate = peak * cluster.gemm_fraction * _share_of_peak(kernel, cluster)
    return kernel.flops / rate


def attention_seconds(kernel: Kernel, cluster: ClusterSpec) -> float:
    """Return the time of the arithmetic of a fused attention, all of which is causal; 0 for other kernels.

    It is 0 too if the cluster file does not say what attention reaches: then its memory traffic alone counts.
    """
    fraction = cluster.attention_fraction_of(kernel.dtype in HALF_TYPES)
    if kernel.attention is None or fraction is None:
        return 0.0
    flops = attention_flops(kernel.attention, cluster.attention_overhead)
    return flops / (cluster.peak_half_tflops * 1e12 * cluster.clock_fraction * fraction)


def host_seconds(kernel: Kernel, cluster: ClusterSpec) -> float:
    """Return the time of an update on the host, which the memory bandwidth limits; a node's ranks share it equally."""
    if cluster.device == "cpu":
        return kernel_seconds(kernel, cluster)
    return kernel.num_bytes / (cluster.host_memory_rate_of_a_gpu * 1e9)


def _share_of_peak(kernel: Kernel, cluster: ClusterSpec) -> float:
    """Return the share of the half-precision peak that tiles and the type of a matrix product allow."""
    assert kernel.product is not None
    if kernel.dtype not in HALF_TYPES:
        return cluster.full_products.share_of_peak(kernel.product) * cluster.full_precision_share
    useful = cluster.half_products.share_of_peak(kernel.product)
    uses_tensor_cores = all(size % TENSOR_CORE_MULTIPLE == 0 for size in kernel.product[1:])
    return useful * (1.0 if uses_tensor_cores or cluster.device == "cpu" else WITHOUT_TENSOR_CORES)
