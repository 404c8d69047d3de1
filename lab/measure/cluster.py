"""The cluster that a projection is made for: rates of its devices and links, and the fractions that programs reach."""

from dataclasses import MISSING, dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from statistics import NormalDist
from typing import Annotated, Literal, Self

from gpt.formats.config_files import read_section
from lab.measure.curves import Curve
from lab.measure.products import TileModel
from lab.measure.recipes import HALF_BITS, RECIPES, Recipe
from parallel.validation.errors import ConfigError
from parallel.validation.fields import Range, check_fields

Rate = Annotated[float, Range(above=0, at_most=1e9)]

RESERVED_BYTES = 10**9  # of a GPU's memory, assumed to be taken by CUDA and NCCL unless a cluster file says otherwise


@dataclass(frozen=True)
class ClusterSpec:
    """A cluster, loaded from a YAML file of these fields.

    Rates are in 1e9 bytes per second in each direction, and those of one GPU unless stated otherwise. A `*_fraction` is
    the part of a peak rate that real programs reach; it may be calibrated.
    """

    name: str
    gpus_per_node: Annotated[int, Range(1, 2**16)]
    gpu_memory_gib: Rate
    host_memory_gb: Rate  # of a node
    peak_half_tflops: Rate  # with tensor cores
    num_multiprocessors: Annotated[int, Range(1, 2**16)]
    memory_gb_per_second: Rate
    intra_node_gb_per_second: Rate
    node_gb_per_second: Rate  # from one whole node to the others
    network_card_gb_per_second: Rate  # of one network card
    host_gb_per_second: Rate  # between the GPU and host memory
    host_memory_gb_per_second: Rate = 200.0  # between the processors of a node and its memory
    gemm_fraction: Rate = 1.0
    memory_fraction: Rate = 1.0
    node_fraction: Rate = 1.0
    kernel_seconds: Rate = 5e-6  # the shortest time of a kernel
    hop_seconds: Rate = 1e-5  # latency of one step of a ring
    dollars_per_gpu_hour: Rate | None = None  # what is paid for one GPU; null: costs are given in GPU hours alone
    # What follows are physical effects, each of which its default leaves out.
    latency: Literal["hops", "nccl"] = "hops"  # of collectives; nccl: by NCCL's own model instead of `hop_seconds`
    rings_use_all_cards: bool = False  # true: each GPU has a network card of its own, and a ring between nodes has all
    peak_fp8_tflops: Rate | None = None  # null: the GPU has no such products
    peak_fp4_tflops: Rate | None = None
    quantized_gemm_fraction: Rate = 1.0  # of these peaks, reached by tensorwise products
    quantizing_fraction: Rate | None = None  # of the memory's rate, reached by casts to FP8; null: `memory_fraction`
    clock_fraction: Rate = 1.0  # of the clock at which products and attention reach their fractions of the peaks
    attention_fraction: Rate | None = None  # of the peak rate, reached by fused attention; null: its bytes alone count
    tile_overhead: Annotated[float, Range(0, at_most=1e9)] = 0.0  # of a product's tile, as a number of its factors' k
    splits_products: bool = False  # true: a product may divide its sum over k, to fill the last round of its tiles
    collective_multiprocessors: Annotated[int, Range(0, 2**16)] = 0  # that a collective takes from kernels beside it
    speed_spread: Annotated[float, Range(0, below=1)] = 0.0  # standard deviation of the speeds of equal GPUs, over mean
    launch_seconds: Annotated[float, Range(0, at_most=1e9)] = 0.0  # for which the host is busy with one kernel
    device: Literal["gpu", "cpu"] = "gpu"  # cpu: the cores that compute also launch kernels, send messages and copy
    reserved_gb: Rate = RESERVED_BYTES / 1e9  # of a GPU's memory, which CUDA and NCCL take
    product_tile: Annotated[int, Range(1, 2**16)] = 128  # rows and columns of the tiles of products
    full_precision_share: Rate = 1 / 8  # of the half-precision rate; V100: 15.7 of 125 TFLOPs
    full_precision_tile_overhead: Annotated[float, Range(0, at_most=1e9)] | None = None  # null: `tile_overhead`
    full_precision_attention_fraction: Rate | None = None  # of the half-precision rate; null: as products differ
    # Keys that fused attention seems to read for each query beside those that are not masked: half-masked tiles and the
    # start of a tile. FlashAttention-2 on an H100 (FlashAttention-3, figure 5: forward, causal, heads of 128) reaches
    # 191, 260, 298, 319, 333 and 335 TFLOPs at 512 to 16k tokens: within 4% of 345 s / (s + 350), 7% at 512.
    attention_overhead: Annotated[float, Range(0, at_most=1e9)] = 350.0
    half_step_factor: Rate = 1.0  # time of a kernel in a step over that by itself, in half precision
    full_step_factor: Rate = 1.0  # the same in full precision
    kernels: tuple[Curve, ...] = ()  # measured times by the bytes that a kernel moves
    collectives: tuple[Curve, ...] = ()  # measured times inside a node, by the bytes that a rank sends
    median_error: Rate | None = None  # of projected times, over measured ones that were not fitted; null: unknown
    calibrated: bool = False  # true: the rates are measured, or the fractions are fitted to measurements

    def __post_init__(self) -> None:
        for name in ("kernels", "collectives"):
            curves = [curve if isinstance(curve, Curve) else Curve.read(name, curve) for curve in getattr(self, name)]
            object.__setattr__(self, name, tuple(curves))
        check_fields(self)
        if self.collective_multiprocessors >= self.num_multiprocessors:
            raise ConfigError(
                f"ClusterSpec.collective_multiprocessors={self.collective_multiprocessors} leaves kernels none of "
                f"num_multiprocessors={self.num_multiprocessors}; choose less"
            )

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Load a cluster file.

        Raises ConfigError if it cannot be read, or if a field is missing, unknown or not a positive number.
        """
        values = read_section(Path(path), f"cluster file {path}")
        known = {field.name for field in fields(cls)}
        required = {field.name for field in fields(cls) if field.default is MISSING}
        if missing := sorted(required - set(values)):
            raise ConfigError(
                f"cluster file {path} lacks {', '.join(missing)}; see configs/clusters/dgx-2.yaml for all fields"
            )
        if unknown := sorted(set(values) - known):
            raise ConfigError(f"cluster file {path} has {', '.join(unknown)}, which is unknown; remove it")
        try:
            return cls(**values)
        except ConfigError as error:
            raise ConfigError(f"cluster file {path}: {str(error).removeprefix('ClusterSpec.')}") from error

    @property
    def host_memory_rate_of_a_gpu(self) -> float:
        """One rank's share of `host_memory_gb_per_second`, in 1e9 bytes per second."""
        return self.host_memory_gb_per_second / self.gpus_per_node

    def ring_gb_per_second(self, num_rings: int, *, uses_all_cards: bool = False) -> float:
        """Return the rate of one of several equal rings between nodes, in 1e9 bytes per second.

        The rings share a node's links. With a network card of its own for each GPU, NCCL lays a ring through all cards
        of its group; otherwise it has one card, unless it `uses_all_cards` in any case.
        """
        rate = self.node_gb_per_second * self.node_fraction / num_rings
        if not (uses_all_cards or self.rings_use_all_cards):
            rate = min(rate, self.network_card_gb_per_second)
        return rate

    @property
    def share_beside_collectives(self) -> float:
        """The part of its rate that a kernel has while a collective runs beside it."""
        return 1 - self.collective_multiprocessors / self.num_multiprocessors

    def slowest_of(self, num_gpus: int) -> float:
        """Return the expected time of the slowest of several GPUs, divided by that of an average one.

        Speeds are taken to be normal; the quantile is Blom's for the largest of a sample.
        """
        return 1 + self.speed_spread * NormalDist().inv_cdf((num_gpus - 0.375) / (num_gpus + 0.25))

    def attention_fraction_of(self, is_half: bool) -> float | None:
        """Return the part of the half-precision peak that fused attention reaches in a type, None if it is unknown."""
        if is_half or self.attention_fraction is None:
            return self.attention_fraction
        return self.full_precision_attention_fraction or self.attention_fraction * self.full_precision_share

    @cached_property
    def kernel_curves(self) -> dict[str, Curve]:
        return {curve.name: curve for curve in self.kernels}

    @cached_property
    def collective_curves(self) -> dict[str, Curve]:
        return {curve.name: curve for curve in self.collectives}

    @cached_property
    def half_products(self) -> TileModel:
        return TileModel(self.product_tile, self.num_multiprocessors, self.tile_overhead, self.splits_products)

    def quantized_rate(self, recipe: Recipe) -> float:
        """Return the FLOP/s of long products of a recipe. Raise ConfigError if the GPU has none."""
        peak = {8: self.peak_fp8_tflops, 4: self.peak_fp4_tflops}[recipe.bits]
        if peak is None:
            raise ConfigError(
                f"cluster file {self.name} has no peak_fp{recipe.bits}_tflops, which products of {recipe.bits} bits "
                "need; add it, or choose another cluster"
            )
        return peak * 1e12 * self.quantized_gemm_fraction * self.clock_fraction * recipe.rate

    @cached_property
    def quantized_products(self) -> dict[int, TileModel]:
        """The tile models of products, by the bits of their factors: a stage holds as many bytes, and so more of k."""
        bits = {recipe.bits for recipe in RECIPES.values()}
        return {n: replace(self.half_products, overhead=self.tile_overhead * HALF_BITS / n) for n in bits}

    @cached_property
    def full_products(self) -> TileModel:
        overhead = self.full_precision_tile_overhead
        return self.half_products if overhead is None else replace(self.half_products, overhead=overhead)

    @property
    def gpu_memory_bytes(self) -> int:
        return int(self.gpu_memory_gib * 2**30)

    @property
    def usable_gpu_bytes(self) -> int:
        """The memory of a GPU that the tensors of a run may fill."""
        return self.gpu_memory_bytes - int(self.reserved_gb * 1e9)

    def holds(self, device_bytes: float, host_bytes: float) -> bool:
        """Return True if the memory of a GPU, and that of the host of a node, is large enough."""
        return device_bytes <= self.usable_gpu_bytes and host_bytes <= self.host_memory_gb * 1e9

    @property
    def remark(self) -> str:
        """A remark on their error to print beside times that are projected on this cluster; empty if it is unknown."""
        if not self.calibrated:
            return " (not calibrated)"
        return "" if self.median_error is None else f" (median error {self.median_error:.0%})"
