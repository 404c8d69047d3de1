"""The launches of a rank on its streams, as data.

launches of one rank    computation | communicator | side stream | computation ...      in the order of the host
waits_for               {stream: number of its launch} that must have run before
"""

from dataclasses import dataclass

import torch

COMPUTATION, HOST, COMMUNICATOR, SIDE_STREAM = "the computation", "the host", "the communicator", "side stream"


@dataclass(frozen=True, slots=True)
class Launch:
    """An operation, or a collective, on a stream: its `number`-th.

    `waits_for` are (stream, number) that must have run before it, beside what was launched before it on its own stream.
    `num_bytes` are those of a collective's message, or those that an operation reads and writes. `ranks` are the
    members of a collective's communicator, () of an operation.
    """

    stream: str
    number: int
    name: str
    waits_for: tuple[tuple[str, int], ...]
    ranks: tuple[int, ...] = ()
    num_bytes: int = 0
    dtype: torch.dtype | None = None

    @property
    def is_collective(self) -> bool:
        return bool(self.ranks)

    @property
    def message(self) -> tuple[str, str, int, torch.dtype | None, tuple[int, ...]]:
        """The collective as all of its members must launch it."""
        return self.stream, self.name, self.num_bytes, self.dtype, self.ranks

    def __str__(self) -> str:
        message = f" of {self.num_bytes:,} bytes of {self.dtype}" if self.is_collective else ""
        return f"{self.name}{message} on {self.stream}"
