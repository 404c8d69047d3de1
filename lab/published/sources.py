"""The programs and clusters of the sources: what is known of them beside the columns of the rows."""

from lab.dryrun.costs.program import Program
from lab.published.rows import Row

# {beginning of a source's name: the program that it measured}; the first one that applies. An unknown one is this one.
PROGRAMS: dict[str, Program] = {
    # llm-foundry on Composer, whose FSDP has backward_prefetch=BACKWARD_POST by default (Composer's documentation).
    "MosaicML": Program(gathers_ahead_in_backward=False),
    "PyTorch FSDP": Program(),
    # One kernel each for scale, mask and softmax, for bias and GELU, for bias, dropout and residual (its fused_*.py).
    "Megatron": Program(merges_elementwise=True),
    # DeepSpeed's data-parallel rings, as in the ZeRO paper's Figure 4: its rows on V100 and on both A100 clusters are
    # 5 to 240% too fast with rings over all cards. The kernels are Megatron-LM's.
    "ZeRO-3": Program(merges_elementwise=True, one_card_a_ring=True),
    "DeepSpeed": Program(merges_elementwise=True, one_card_a_ring=True),
    # FlashAttention-2 is twice as fast as its predecessor (its abstract), and cuDNN on an H100 1.5 times as fast as it
    # (FlashAttention-3, figure 5: 484 to 539 TFLOPs where FlashAttention-2 has 298 to 335).
    "NVIDIA": Program(merges_elementwise=True, attention_gain=3.0, overlaps_tensor=True),
    "llm.c": Program(merges_elementwise=True, attention_gain=2.0),
}
CLUSTERS = {"a100-40": "dgx-a100-40gb", "p4d": "p4d"}  # {name in a row: cluster file}
CLUSTERS_BY_GPU = {"A100": "dgx-a100", "H100": "dgx-h100", "H200": "dgx-h200", "B200": "dgx-b200", "V100": "dgx-2-nccl"}
FITTED_TYPES = {"dgx-h100": "H100", "dgx-h200": "H100", "dgx-b200": "H100", "dgx-2-nccl": "V100"}


def program_of(row: Row) -> Program:
    """Return the program that a row's source measured."""
    return next((program for name, program in PROGRAMS.items() if row.source.startswith(name)), Program())


def cluster_name(row: Row) -> str:
    """Return the name of the file of a row's cluster: that of its name, or one with its GPU."""
    by_gpu = next((name for gpu, name in CLUSTERS_BY_GPU.items() if row.gpu.startswith(gpu)), "dgx-a100")
    return CLUSTERS.get(row.cluster, by_gpu)


def gpu_type(row: Row) -> str:
    """Return the type of GPU whose fitted constants a row's cluster has."""
    return FITTED_TYPES.get(cluster_name(row), "A100")
