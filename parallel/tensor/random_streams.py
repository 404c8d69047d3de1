"""Random numbers along the tensor axis: a stream that all ranks share, and one per rank that is derived from it.

Torch's default generators are the shared stream: all ranks of a tensor axis seed them alike and draw the same numbers.
For an activation that is split, a rank draws from a stream that is a function of the shared one's state and the rank.
So there is no second state to save: a recomputation or a resume that restores the default generators repeats both.
"""

import ctypes
import hashlib
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from parallel.mesh import Axis

SEED_BITS = 63


def own_random_stream(axis: Axis) -> AbstractContextManager[None]:
    """Return a context in which the ranks of `axis` draw different numbers; after it their generators agree again.

    Changes the generator of the current CUDA device if CUDA is initialized, otherwise the CPU's. It does not block.
    """
    if axis.size == 1:
        return nullcontext()
    return _own_cuda_stream(axis.rank) if torch.cuda.is_initialized() else _own_cpu_stream(axis.rank)


@contextmanager
def _own_cuda_stream(rank: int) -> Iterator[None]:
    """Draw with another seed from the same offset: a CUDA generator is (seed, offset), both on the host."""
    generator = torch.cuda.default_generators[torch.cuda.current_device()]
    seed, offset = generator.initial_seed(), generator.get_offset()
    generator.manual_seed(derived_seed(f"{seed}", rank))
    generator.set_offset(offset)
    try:
        yield
    finally:
        # The offset is read before the seed is restored, which sets it to 0, and written after. So the shared stream
        # continues after as many numbers as were drawn here.
        offset = generator.get_offset()
        generator.manual_seed(seed)
        generator.set_offset(offset)


@contextmanager
def _own_cpu_stream(rank: int) -> Iterator[None]:
    """Draw with a seed derived from the generator's state, then restore the state and skip one number.

    The CPU's generator has no offset. Without the skip, the next block would draw the same numbers again.
    """
    state = torch.get_rng_state()
    # Read from memory, not by an operation: the tensor is real even in a dry run, where results of operations are not.
    state_bytes = ctypes.string_at(state.data_ptr(), state.nbytes)
    torch.default_generator.manual_seed(derived_seed(hashlib.sha256(state_bytes).hexdigest(), rank))
    try:
        yield
    finally:
        torch.set_rng_state(state)
        torch.rand(1)


def derived_seed(origin: str, rank: int) -> int:
    """Return the seed of stream number `rank` of those that belong to `origin`."""
    digest = hashlib.sha256(f"{origin}/{rank}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> (64 - SEED_BITS)
