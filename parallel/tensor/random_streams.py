"""Random numbers along the tensor axis: one stream that all ranks share, and one of each rank's own derived from it.

Torch's default generators are the shared stream: all ranks of a tensor axis seed them alike and draw alike. Where an
activation is split, a rank draws from a stream that is a function of the shared one's state and the rank. So there is
no second state to keep: whoever restores the default generators, as a recomputation or a resume does, replays both.
"""

import ctypes
import hashlib
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from parallel.mesh import Axis

SEED_BITS = 63


def own_random_stream(axis: Axis) -> AbstractContextManager[None]:
    """In here ranks of `axis` draw different numbers; afterwards their default generators agree again.

    Touches the current CUDA device's generator if CUDA is initialised, else the CPU's. Waits for no device.
    """
    if axis.size == 1:
        return nullcontext()
    return _own_cuda_stream(axis.rank) if torch.cuda.is_initialized() else _own_cpu_stream(axis.rank)


@contextmanager
def _own_cuda_stream(rank: int) -> Iterator[None]:
    """A CUDA stream of numbers is (seed, offset), both on the host: the same offset under another seed."""
    generator = torch.cuda.default_generators[torch.cuda.current_device()]
    seed, offset = generator.initial_seed(), generator.get_offset()
    generator.manual_seed(_derived_seed(f"{seed}", rank))
    generator.set_offset(offset)
    try:
        yield
    finally:
        offset = generator.get_offset()
        generator.manual_seed(seed)
        generator.set_offset(offset)


@contextmanager
def _own_cpu_stream(rank: int) -> Iterator[None]:
    """The CPU's generator has no offset: seed another from its state, then let it move on by one number."""
    state = torch.get_rng_state()
    # Past the dispatcher, for in a dry run this is the only tensor with values.
    state_bytes = ctypes.string_at(state.data_ptr(), state.nbytes)
    torch.default_generator.manual_seed(_derived_seed(hashlib.sha256(state_bytes).hexdigest(), rank))
    try:
        yield
    finally:
        torch.set_rng_state(state)
        torch.rand(1)


def _derived_seed(origin: str, rank: int) -> int:
    digest = hashlib.sha256(f"{origin}/{rank}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> (64 - SEED_BITS)
