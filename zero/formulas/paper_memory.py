"""The paper's memory of activations and the largest models that fit (sections 3, 5 and 6), with its letters.

    b, s, h, L, k     sequences of one replica at once, tokens of each, hidden size, layers, layers to a checkpoint
    N_d, N_m          data-parallel ranks, model-parallel (tensor) ranks

Model states are in `zero/formulas/memory.py`, volumes in `zero/formulas/traffic.py` and `zero/activations/choice.py`.
"""

import math

from zero.formulas.memory import formula
from zero.stage import ShardingPolicy

HALF = 2  # bytes of fp16


def transformer_parameters(h: int, L: int) -> float:
    """Section 3.1: 12 L h^2, without embeddings."""
    return 12 * L * h**2


def activation_bytes(b: int, s: int, h: int, L: int) -> float:
    """Section 3.2, footnote 3: about 12 h b s L elements, all kept (GPT-2 1.5B at b = 32, s = 1024: 60 GB)."""
    return 12 * HALF * b * s * h * L


def checkpoint_bytes(b: int, s: int, h: int, L: int, k: int = 1, N_m: int = 1) -> float:
    """Sections 3.2 and 6.1: one input of every k layers; with P_a each rank keeps 1/N_m."""
    return HALF * b * s * h * math.ceil(L / k) / N_m


def fused_buffer_bytes(parameters: float) -> float:
    """Section 3.2: gradients of the whole model in one fp32 buffer (1.5B: 6 GB). C_B makes it a constant."""
    return 4 * parameters


def largest_model(policy: ShardingPolicy, memory_bytes: float, N_d: int, N_m: int = 1) -> float:
    """Section 5 and Table 2: parameters whose model states alone fill `memory_bytes` on every one of the ranks."""
    return N_m * memory_bytes / formula(policy, 1.0, N_d).total
