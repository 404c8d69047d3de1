"""Whether partitioned activation checkpoints (P_a) and their offload (P_a+cpu) pay: the paper's sections 6.1 and 8.

Volumes are elements that a rank sends, counted as the paper does: an all-reduce sends twice its message, an all-gather
once. The letters are the paper's: batch b of one replica, sequence s, hidden h, layers L, of which k share a
checkpoint, and N_m ranks that hold the same activations.
"""

import math
from dataclasses import dataclass
from itertools import pairwise

from parallel.errors import ConfigError
from zero.activations.stores import STORES, StoreName

USABLE_SHARE = 0.85  # of a device's memory: the rest goes to contexts, communication libraries and gaps


@dataclass(frozen=True)
class Hardware:
    """A device of the cluster, and its links, one way. By default the paper's: a V100 in a DGX-2."""

    memory_gb: float | None = None
    """Memory of a device, in 1e9 bytes; null: what this one has."""
    tflops: float = 40.0
    """What a device reaches in training."""
    tensor_gb_per_second: float = 150.0
    """Between the ranks of a tensor group."""
    data_gb_per_second: float = 6.25
    """Between data-parallel ranks: one device's part of its node's network."""
    host_gb_per_second: float = 15.75
    """Between a device and its host."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value is not None and value <= 0:
                raise ConfigError(f"activations.hardware.{name}={value} is not above 0; give the cluster's own figure")


@dataclass(frozen=True)
class Workload:
    """One micro-batch on one rank. Activations are replicated along `N_m` of the `tensor_size` ranks: all, or one."""

    b: int
    s: int
    h: int
    L: int
    k: int
    N_m: int
    tensor_size: int
    vocab_size: int
    itemsize: int
    state_bytes: float  # model states, and buffers that stay
    data_bytes: float  # sent along the data axis

    @property
    def checkpoint_bytes(self) -> float:
        """Of a sequence: L/k inputs of this rank's tokens."""
        return partition_volume(1, self.s, self.h, self.L, self.k) * self.itemsize * self.N_m / self.tensor_size


def model_parallel_volume(b: float, s: int, h: int, L: int) -> float:
    """Six all-reduces a block: two in forward, two in recomputation, two in backward."""
    return 12 * b * s * h * L


def partition_volume(b: float, s: int, h: int, L: int, k: int) -> float:
    """One all-gather a checkpoint: 1/12k of the above."""
    return b * s * h * math.ceil(L / k)


def arithmetic_intensity(h: int, k: int, itemsize: int) -> float:
    """Operations a byte of a checkpoint: forward, backward and recomputation of k layers with 12 h^2 parameters each.

    It grows with the model and not with the batch: above 10^5 at h = 8192 (section 6.1).
    """
    return 8 * 12 * h * k / itemsize


def bytes_per_sequence(w: Workload, store: StoreName) -> float:
    """On the device: checkpoints, what is in transit of them, and what one group needs while it runs again.

    That is 12 h elements a token and layer (section 3.2), divided over the tensor ranks, as are the logits and their
    gradient.
    """
    one = w.checkpoint_bytes / math.ceil(w.L / w.k)
    whole_in_transit = 2 * one if w.N_m > 1 else 0
    stored = {
        "keep": w.checkpoint_bytes,
        "partition": w.checkpoint_bytes / w.N_m + whole_in_transit,
        "partition_host": 2 * one / w.N_m + whole_in_transit,
    }
    return stored[store] + w.itemsize * (12 * w.h * w.k + 2 * w.vocab_size) * w.s / w.tensor_size


def largest_batch(w: Workload, store: StoreName, memory_bytes: float) -> int:
    """Sequences that fit; 0 where not even one does."""
    return max(0, int((USABLE_SHARE * memory_bytes - w.state_bytes) // bytes_per_sequence(w, store)))


def exposed_seconds(w: Workload, store: StoreName, b: float, hardware: Hardware) -> float:
    """Of a sequence, what depends on the store: traffic along the data axis, P_a's gathers, and of P_a+cpu's two
    copies what is longer than the computation beside them."""
    seconds = w.data_bytes / b / (hardware.data_gb_per_second * 1e9)
    if store != "keep" and w.N_m > 1:
        seconds += w.checkpoint_bytes / (hardware.tensor_gb_per_second * 1e9)
    if store == "partition_host":
        copies = 2 * w.checkpoint_bytes / w.N_m / (hardware.host_gb_per_second * 1e9)
        operations = arithmetic_intensity(w.h, w.k, w.itemsize) * w.checkpoint_bytes / w.N_m
        seconds += max(0.0, copies - operations / (hardware.tflops * 1e12))
    return seconds


def pays(w: Workload, store: StoreName, instead_of: StoreName, memory_bytes: float, hardware: Hardware) -> bool:
    """Whether a sequence costs less with the largest batch that `store` allows (section 8)."""
    seconds = []
    for each in (store, instead_of):
        b = largest_batch(w, each, memory_bytes)
        seconds.append(exposed_seconds(w, each, b, hardware) if b else math.inf)
    return seconds[0] < seconds[1]


def choose_store(w: Workload, memory_bytes: float, hardware: Hardware) -> tuple[StoreName, str]:
    """(store, the reason). At a given batch P_a and P_a+cpu only cost, so the first store that holds it is chosen;
    whether they would pay by letting the batch grow is part of the reason."""
    stores = [store for store in STORES if store != "partition" or w.N_m > 1]
    largest = {store: largest_batch(w, store, memory_bytes) for store in stores}
    chosen = next((store for store in stores if largest[store] >= w.b), stores[-1])
    holds = "the first that holds" if largest[chosen] >= w.b else "though it is too small for"
    sizes = ", ".join(f"{store} {largest[store]}" for store in stores)
    verdicts = [
        f"{store} {'pays' if pays(w, store, cheaper, memory_bytes, hardware) else 'does not pay'}"
        for cheaper, store in pairwise(stores)
    ]
    return chosen, (
        f"activations.store={chosen}, {holds} a micro-batch of {w.b}; sequences that fit: {sizes}; "
        f"with the batch that it allows, {' and '.join(verdicts)}"
    )
