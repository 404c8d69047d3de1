"""Which memory the states of a bucket live in, and the copies between the two.

    accelerator     full parameters and gradients while in use | what is placed there
                        | gradients, reduced     ^ weights, cast      each way on a stream of its own,
                        v                        |                    beside the computation
    host (pinned)   what is placed there

On a CPU both are the same memory and copies are copies: the same code, in the same order.
"""

from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Literal, get_args

import torch
from torch import Tensor

from parallel.errors import ConfigError
from parallel.instruments.memory_tracker import TensorKind
from parallel.mesh import Handle
from zero.offload.host_memory import on_device, on_host_of
from zero.offload.streams import SideStream

NUM_CASTS = 2  # buckets on their way to the accelerator in another type: one is filled while the other travels

Mode = Literal["accelerator", "host", "auto"]
State = Literal["optimizer", "parameters"]


class Placement(Enum):
    ACCELERATOR = "the memory of the device that computes"
    HOST = "pinned memory beside it"


@dataclass(frozen=True)
class OffloadConfig:
    """Model states in host memory, where the accelerator's is too small for them."""

    mode: Mode = "accelerator"
    """accelerator: nothing leaves; host: all of `states` does; auto: as much stays as the memory allows (Gemini)."""
    states: tuple[State, ...] = ("optimizer", "parameters")
    """What may leave. optimizer: owned gradients, master weights and moments, updated by the host; parameters: the
    shards of stage 3, which are fetched with every gather."""
    accelerator_memory_gb: float | None = None
    """What the process may occupy on the accelerator, in 1e9 bytes; a run that needs more ends before its first update
    and says by how much. null: no limit, and with auto nine tenths of the device."""
    hidden_dim: int = 1024
    """auto: sizes of chunks are tried in steps of this many elements; the model's hidden size divides blocks best."""
    min_chunk_size_m: float = 32.0
    """auto: the smallest chunk to be tried, in 2**20 elements."""
    search_range_m: float = 32.0
    """auto: how far above the smallest to try, in 2**20 elements."""

    def __post_init__(self) -> None:
        if self.mode not in get_args(Mode):
            raise ConfigError(f"offload.mode={self.mode} is unknown; choose {', '.join(get_args(Mode))}")
        if unknown := set(self.states) - set(get_args(State)):
            raise ConfigError(f"offload.states={sorted(unknown)} is unknown; choose among {', '.join(get_args(State))}")
        for name in ("accelerator_memory_gb", "hidden_dim", "min_chunk_size_m"):
            if (value := getattr(self, name)) is not None and value <= 0:
                raise ConfigError(f"offload.{name}={value} is not above 0")
        if self.search_range_m < 0:
            raise ConfigError(f"offload.search_range_m={self.search_range_m} is below 0; choose 0 or more")

    @property
    def leaves(self) -> set[State]:
        return set() if self.mode == "accelerator" else set(self.states)

    def placement_of(self, state: State) -> Placement:
        """Of every bucket; auto may bring some to the accelerator once it knows how much room there is."""
        return Placement.HOST if state in self.leaves else Placement.ACCELERATOR


NO_OFFLOAD = OffloadConfig()


class Offload:
    """The two memories of a rank: starts copies between them, and says when they have arrived."""

    def __init__(self, device: torch.device, config: OffloadConfig = NO_OFFLOAD):
        self.device, self.config = device, config
        self._to_host, self._to_accelerator = SideStream(device), SideStream(device)
        self._casting: defaultdict[torch.dtype, deque[tuple[Tensor, Handle]]] = defaultdict(deque)

    def new(self, placement: Placement, kind: TensorKind, numel: int, dtype: torch.dtype) -> Tensor:
        """Flat memory, not initialized."""
        allocate = on_host_of if placement is Placement.HOST else on_device
        return allocate(self.device, kind)(numel, dtype)

    def to_host(self, source: Tensor, out: Tensor) -> Handle:
        """Wait before `source` is overwritten, and hold the handle till then; the host calls `arrive` before it reads
        `out`."""
        with self._to_host.beside():
            out.copy_(source, non_blocking=True)
        return Handle(self._to_host.queued().wait, lambda: source)  # held, not freed while it is read

    def to_accelerator(self, source: Tensor, out: Tensor, then: Callable[[], Handle] = Handle) -> Handle:
        """Wait before `out` is read. `then` launches what follows the copy, such as a gather.

        `source` may be on its way to the host still. In another type than `out` it is cast first and may be
        overwritten at once; else the host calls `arrive` before it overwrites it.
        """
        cast = None
        if source.dtype != out.dtype:
            cast = self._place_to_cast(out)
            source = cast[: source.numel()].copy_(source)
        with self._to_accelerator.beside():
            self._to_host.queued().wait()
            out.copy_(source, non_blocking=True)
            followed = then()
        if cast is not None:
            self._casting[cast.dtype].append((cast, self._to_accelerator.landed()))
        return Handle(self._to_accelerator.queued().wait, followed.wait)

    def arrive(self) -> None:
        """The host waits for all copies: it may read what came, and overwrite what went."""
        self._to_host.landed().wait()
        self._to_accelerator.landed().wait()

    def _place_to_cast(self, like: Tensor) -> Tensor:
        """In pinned memory, one of a few; the host waits until it is free."""
        casting = self._casting[like.dtype]
        if len(casting) == NUM_CASTS:
            place, landed = casting.popleft()
            landed.wait()
            if place.numel() >= like.numel():
                return place
        return self.new(Placement.HOST, TensorKind.BUFFERS, like.numel(), like.dtype)
