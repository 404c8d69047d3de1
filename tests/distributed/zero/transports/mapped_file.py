"""A home as a third party would write it: states are in memory-mapped files, and the host updates them there."""

import itertools
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor

from parallel.memory_kinds import TensorKind
from zero.homes.on_host import OnHost


class MappedFile(OnHost):
    """`OnHost` with a file for each tensor: the system writes what has not been used for long to the disk.

    A torch optimizer makes its moments in its first step; `ZeroOptimizer.place` moves them here.
    """

    def __init__(self, accelerator: torch.device):
        super().__init__(accelerator)
        self._folder = TemporaryDirectory()
        self._numbers = itertools.count()

    def new(self, kind: TensorKind, numel: int, dtype: torch.dtype) -> Tensor:
        if not numel:
            return super().new(kind, numel, dtype)
        path = Path(self._folder.name) / f"{kind.name.lower()}-{next(self._numbers)}"
        with self.allocating(kind):
            return torch.from_file(str(path), shared=True, size=numel, dtype=dtype)
