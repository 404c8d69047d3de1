"""The choice of an activation store, by the arithmetic of the paper's sections 6.1 and 8.

It decides if partitioned activation checkpoints (P_a) and their offload (P_a+cpu) pay. A volume is the number of
elements that a rank sends, counted as in the paper: twice the message for an all-reduce, once for an all-gather. The
paper's symbols:

    b, s, h, L     sequences in a micro-batch, tokens in a sequence, hidden size, layers
    k              layers that share a checkpoint
    N_m            ranks that hold the same activations
"""

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated

from parallel.validation.fields import Range, checked
from zero.activations.stores import STORES, StoreName, stored_bytes

USABLE_FRACTION = 0.85  # of a device's memory: CUDA, communication libraries and fragmentation take the rest


Rate = Annotated[float, Range(above=0, at_most=1e9)]


@checked
class Hardware:
    """A device of the cluster, and the bandwidths of its links in one direction; by default a V100 in a DGX-2."""

    memory_gb: Rate | None = None
    """Memory of a device, in 1e9 bytes; null: the memory of the device that the run uses."""
    tflops: Rate = 40.0
    """Floating-point operations that a device performs in training, in 1e12 per second."""
    tensor_gb_per_second: Rate = 150.0
    """Bandwidth between the ranks of a tensor group, in 1e9 bytes per second."""
    data_gb_per_second: Rate = 6.25
    """Bandwidth between data-parallel ranks, in 1e9 bytes per second: one device's part of its node's network."""
    host_gb_per_second: Rate = 15.75
    """Bandwidth between a device and its host, in 1e9 bytes per second."""


@dataclass(frozen=True)
class Workload:
    """One micro-batch on one rank.

    `N_m` is `tensor_size` if all tensor ranks hold the same activations, and 1 if each holds its own.
    """

    b: int
    s: int
    h: int
    L: int
    k: int
    N_m: int
    tensor_size: int
    vocab_size: int
    itemsize: int
    state_bytes: float  # of model states, and of buffers that stay allocated
    data_bytes: float  # sent by the rank along the data axis for one micro-batch
    block_weights: int  # elements of the weights of a layer's products: 12 h^2 in GPT-2
    block_width: int  # elements that a layer keeps for each token and that tensor ranks divide: 12 h in GPT-2

    @property
    def checkpoint_bytes(self) -> float:
        """The bytes of one sequence's checkpoints before they are partitioned, for the tokens that this rank has."""
        return partition_volume(1, self.s, self.h, self.L, self.k) * self.itemsize * self.N_m / self.tensor_size


def model_parallel_volume(b: float, s: int, h: int, L: int) -> float:
    """Return the volume of tensor parallelism.

    Each layer has six all-reduces: two each in forward, recomputation and backward.
    """
    return 12 * b * s * h * L


def partition_volume(b: float, s: int, h: int, L: int, k: int) -> float:
    """Return the volume of P_a, one all-gather a checkpoint: 1 / (12 k) of `model_parallel_volume` if k divides L."""
    return b * s * h * math.ceil(L / k)


def arithmetic_intensity(h: int, k: int, itemsize: int, block_weights: int | None = None) -> float:
    """Return the number of floating-point operations per byte of a checkpoint (section 6.1).

    For each token, forward, recomputation and backward take 2 + 2 + 4 operations a parameter, k layers have 12 h^2
    parameters each, or `block_weights`, and a checkpoint has h elements. The intensity grows with the model, and not
    with the batch: it is above 10^5 at h = 8192.
    """
    return 8 * (12 * h**2 if block_weights is None else block_weights) * k / h / itemsize


def bytes_per_sequence(w: Workload, store: StoreName) -> float:
    """Return the bytes that one sequence needs on the device.

    These are its stored checkpoints, the activations of one group while it runs again (in GPT-2 12 h elements for each
    token and layer, section 3.2), the logits, and their gradient. All but the first are divided over the tensor ranks.
    """
    return bytes_on_device(w, store) + w.itemsize * (w.block_width * w.k + 2 * w.vocab_size) * w.s / w.tensor_size


def bytes_on_device(w: Workload, store: StoreName) -> float:
    """Return the bytes on the device of one sequence's checkpoints and of the buffers to fetch them."""
    count = math.ceil(w.L / w.k)
    stored = stored_bytes(store, count, w.checkpoint_bytes / count / w.itemsize, w.itemsize, w.N_m)
    return stored.device + stored.in_transit


def largest_batch(w: Workload, store: StoreName, memory_bytes: float) -> int:
    """Return the largest number of sequences in a micro-batch that fit into `memory_bytes`; 0 if not even one does."""
    return max(0, int((USABLE_FRACTION * memory_bytes - w.state_bytes) // bytes_per_sequence(w, store)))


def exposed_seconds(w: Workload, store: StoreName, b: float, hardware: Hardware) -> float:
    """Return the part of the seconds of one sequence that depends on the store, with `b` sequences in a micro-batch.

    It consists of the traffic along the data axis, the all-gathers of P_a, and the time by which the two copies of
    P_a+cpu are longer than the computation that runs at the same time.
    """
    seconds = w.data_bytes / b / (hardware.data_gb_per_second * 1e9)
    if store != "keep" and w.N_m > 1:
        seconds += w.checkpoint_bytes / (hardware.tensor_gb_per_second * 1e9)
    if store == "partition_host":
        copies = 2 * w.checkpoint_bytes / w.N_m / (hardware.host_gb_per_second * 1e9)
        operations = arithmetic_intensity(w.h, w.k, w.itemsize, w.block_weights) * w.checkpoint_bytes / w.N_m
        seconds += max(0.0, copies - operations / (hardware.tflops * 1e12))
    return seconds


def pays(w: Workload, store: StoreName, instead_of: StoreName, memory_bytes: float, hardware: Hardware) -> bool:
    """Return whether a sequence takes less time with `store` than with `instead_of`, each with its largest batch.

    Section 8 compares the stores in this way.
    """

    def least_seconds(each: StoreName) -> float:
        b = largest_batch(w, each, memory_bytes)
        return exposed_seconds(w, each, b, hardware) if b else math.inf

    return least_seconds(store) < least_seconds(instead_of)


def choose_store(w: Workload, memory_bytes: float, hardware: Hardware) -> tuple[StoreName, str]:
    """Return the store to use, and the reason as lines for the log.

    At a given batch, P_a and P_a+cpu only add cost. Therefore the first store that has room for the batch is chosen.
    The reason also says of each further store if it would pay, because it allows a larger batch.
    """
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
        f"ActivationsConfig.store={chosen}, {holds} a micro-batch of {w.b}; sequences that fit: {sizes};\n"
        f"with the batch that it allows, {' and '.join(verdicts)}"
    )
