"""The physical effects of a projection, each of which can be left out: a row of a table with its source."""

from dataclasses import dataclass, field, replace
from typing import Any

from lab.dryrun.costs.program import Program
from lab.measure.cluster import ClusterSpec


@dataclass(frozen=True)
class Effect:
    """One effect: the figures of a cluster or properties of a program that leave it out, and where it comes from."""

    name: str
    source: str
    cluster: dict[str, Any] = field(default_factory=dict)
    program: dict[str, Any] = field(default_factory=dict)

    def without(self, cluster: ClusterSpec, program: Program) -> tuple[ClusterSpec, Program]:
        """Return the cluster and the program without this effect."""
        return replace(cluster, **self.cluster), replace(program, **self.program)


EFFECTS = (
    Effect(
        "arithmetic of fused attention",
        "FLOPs of the causal half at `attention_fraction`, with the loss at short sequences that FlashAttention-3, "
        "figure 5, measured for FlashAttention-2",
        cluster={"attention_fraction": None},
    ),
    Effect(
        "generations of attention kernels",
        "FlashAttention-2 is twice as fast as its predecessor (abstract); cuDNN on an H100 is 1.5 times as fast as "
        "FlashAttention-2 (FlashAttention-3, figure 5)",
        program={"attention_gain": 1.0},
    ),
    Effect("pipeline of a product's tile", "CUTLASS's stages and k of a tile", cluster={"tile_overhead": 0.0}),
    Effect("long products divided along k", "split-K of cuBLAS", cluster={"splits_products": False}),
    Effect("latencies of NCCL's algorithms", "its src/graph/tuning.cc", cluster={"latency": "hops"}),
    Effect("a network card for each GPU", "data sheets of DGX A100 and H100", cluster={"rings_use_all_cards": False}),
    Effect(
        "one network card for a ring of DeepSpeed",
        "the ZeRO paper's Figure 4; chosen for rows with doubt, which are in no sum",
        program={"one_card_a_ring": False},
    ),
    Effect(
        "kernels beside a collective are slower",
        "16 of the multiprocessors run NCCL (NVIDIA's blog on NCCL 2.27)",
        cluster={"collective_multiprocessors": 0},
    ),
    Effect("the slowest of many GPUs", "8% between equal GPUs (Sinha et al., SC 2022)", cluster={"speed_spread": 0.0}),
    Effect("host time of launches", "assumed: 6 us an operation", cluster={"launch_seconds": 0.0}),
    Effect(
        "element-wise kernels merged by hand",
        "Megatron-LM, TransformerEngine, llm.c",
        program={"merges_elementwise": False},
    ),
    Effect(
        "gathers of backward not ahead",
        "FSDP with backward_prefetch=BACKWARD_POST, Composer's default",
        program={"gathers_ahead_in_backward": True},
    ),
    Effect(
        "products in parts beside their collective",
        "TransformerEngine's userbuffers",
        program={"overlaps_tensor": False},
    ),
)
