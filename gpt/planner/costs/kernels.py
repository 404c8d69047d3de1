"""The time of one kernel on a cluster's device, or of one operation on its host.

Comments state every assumption at the line that makes it; what a device reaches of its peaks is in the cluster file.
"""

from math import ceil

import torch

from parallel.instruments.kernel_log import Kernel
from parallel.launch.cluster import ClusterSpec

# A matrix product is computed in tiles of this many rows and columns, one per multiprocessor at a time. The last round
# of tiles leaves some multiprocessors idle, and tiles at the border are computed in full.
TILE = 128
# Tensor cores are used if all sizes of a half-precision product are multiples of 8 (cuBLAS before version 11). Without
# them a GPU has a quarter of its half-precision rate (V100: 31 of 125 TFLOPs).
TENSOR_CORE_MULTIPLE, WITHOUT_TENSOR_CORES = 8, 1 / 4
MOST_PARTS_OF_K = 8
IN_FULL_PRECISION = 1 / 8  # of the half-precision rate; V100: 15.7 of 125 TFLOPs
# Keys that fused attention seems to read for each query beside those that are not masked: half-masked tiles and the
# start of a tile. FlashAttention-2 on an H100 (FlashAttention-3, figure 5: forward, causal, heads of 128) reaches 191,
# 260, 298, 319, 333 and 335 TFLOPs at 512 to 16k tokens: within 4% of 345 s / (s + 350), 7% at 512.
ATTENTION_OVERHEAD = 350
HEAD_DIM_MULTIPLE = 32  # for which fused attention has kernels (FlashAttention-2)


def kernel_seconds(kernel: Kernel, cluster: ClusterSpec) -> float:
    """Return the time of arithmetic or of memory traffic, whichever is longer, and at least that of a launch.

    Each byte that the kernel reads or writes is counted once.
    """
    moving = kernel.num_bytes / (cluster.memory_gb_per_second * 1e9 * cluster.memory_fraction)
    computing = product_seconds(kernel, cluster) + attention_seconds(kernel, cluster)
    return max(moving, computing, cluster.kernel_seconds)


def product_seconds(kernel: Kernel, cluster: ClusterSpec) -> float:
    """Return the time of the arithmetic of a matrix product; 0 for other kernels."""
    if kernel.product is None:
        return 0.0
    rate = cluster.peak_half_tflops * 1e12 * cluster.gemm_fraction * _share_of_peak(kernel, cluster)
    return kernel.flops / rate


def attention_seconds(kernel: Kernel, cluster: ClusterSpec) -> float:
    """Return the time of the arithmetic of a fused attention, all of which is causal; 0 for other kernels.

    It is 0 too if the cluster file does not say what attention reaches: then its memory traffic alone counts.
    """
    if kernel.attention is None or cluster.attention_fraction is None:
        return 0.0
    heads, queries, keys, head_dim, num_products = kernel.attention
    scores = queries * (keys + ATTENTION_OVERHEAD) / 2
    padded = ceil(head_dim / HEAD_DIM_MULTIPLE) * HEAD_DIM_MULTIPLE
    flops = 2 * num_products * heads * scores * padded
    return flops / (cluster.peak_half_tflops * 1e12 * cluster.attention_fraction)


def host_seconds(kernel: Kernel, cluster: ClusterSpec) -> float:
    """Return the time of an update on the host, which the memory bandwidth limits; a node's ranks share it equally."""
    return kernel.num_bytes / (cluster.host_memory_rate_of_a_gpu * 1e9)


def _share_of_peak(kernel: Kernel, cluster: ClusterSpec) -> float:
    """Return the share of the half-precision peak that tiles and the type of a matrix product allow."""
    assert kernel.product is not None
    batch, m, n, k = kernel.product
    num_tiles = batch * ceil(m / TILE) * ceil(n / TILE)
    # cuBLAS can divide the sum over k, too: then more multiprocessors have a part of a tile in the last round.
    num_parts = range(1, MOST_PARTS_OF_K + 1) if cluster.splits_products else range(1, 2)
    # A tile is filled before its first product and written after its last, which takes as long as so many more of k.
    rounds = min(
        ceil(num_tiles * parts / cluster.num_multiprocessors) * (k / parts + cluster.tile_overhead)
        for parts in num_parts
    )
    useful = batch * m * n * k / (rounds * cluster.num_multiprocessors * TILE**2)
    if kernel.dtype not in (torch.float16, torch.bfloat16):
        return useful * IN_FULL_PRECISION
    uses_tensor_cores = all(size % TENSOR_CORE_MULTIPLE == 0 for size in (m, n, k))
    return useful * (1.0 if uses_tensor_cores else WITHOUT_TENSOR_CORES)
