"""The models of matrix products and of fused attention: what their shapes say about their time."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil, exp, log, prod
from statistics import fmean, pstdev

MOST_PARTS_OF_K = 8
HEAD_DIM_MULTIPLE = 32  # for which fused attention has kernels (FlashAttention-2)
# Values of which `fit_overhead` chooses the best one; the step is about 1.4.
OVERHEADS = (0, *(round(2 ** (half / 2)) for half in range(2, 21)))
Product = tuple[int, int, int, int]  # batch, m, n, k
Attention = tuple[int, int, int, int, int]  # heads, queries, keys, head_dim, number of products


@dataclass(frozen=True)
class TileModel:
    """A matrix product in square tiles, of which each multiprocessor computes one at a time.

    The last round of tiles leaves some multiprocessors idle, and tiles at the border are computed in full. A tile is
    filled before its first product and written after its last, which takes as long as `overhead` more of k. If a
    product `splits` its sum over k, more multiprocessors have a part of a tile in the last round.
    """

    tile: int
    num_multiprocessors: int
    overhead: float
    splits: bool

    @functools.cache  # noqa: B019 (models are few, and live as long as their cluster)
    def share_of_peak(self, product: Product) -> float:
        """Return the useful part of the work that all multiprocessors could do until the last tile is done."""
        batch, m, n, k = product
        num_tiles = batch * ceil(m / self.tile) * ceil(n / self.tile)
        num_parts = range(1, MOST_PARTS_OF_K + 1) if self.splits else range(1, 2)
        rounds = min(
            ceil(num_tiles * parts / self.num_multiprocessors) * (k / parts + self.overhead) for parts in num_parts
        )
        return prod(product) / (rounds * self.num_multiprocessors * self.tile**2)


def fit_overhead(model: TileModel, measured: Sequence[tuple[Product, float]]) -> TileModel:
    """Return the model with the overhead that suits measured products best; each is its shape and its seconds."""
    models = [replace(model, overhead=float(overhead)) for overhead in OVERHEADS]
    return min(models, key=lambda candidate: pstdev(_log_peaks(candidate, measured)))


def peak_rate(model: TileModel, measured: Sequence[tuple[Product, float]]) -> float:
    """Return the peak FLOP/s with which the model suits measured products best."""
    return exp(fmean(_log_peaks(model, measured)))


def _log_peaks(model: TileModel, measured: Sequence[tuple[Product, float]]) -> list[float]:
    return [log(2 * prod(shape) / seconds / model.share_of_peak(shape)) for shape, seconds in measured]


def attention_flops(attention: Attention, overhead: float) -> float:
    """Return the floating-point operations of a causal fused attention, as `Kernel.attention` describes it.

    Each query reads half of the keys, and half of `overhead` more.
    """
    heads, queries, keys, head_dim, num_products = attention
    padded = ceil(head_dim / HEAD_DIM_MULTIPLE) * HEAD_DIM_MULTIPLE
    return 2 * num_products * heads * queries * (keys + overhead) / 2 * padded
