"""A codec as a third party would write it: parameters are gathered as whole numbers from -127 to 127."""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor

from parallel.mesh import Axis
from zero.core.partition.layout import Slice

LARGEST = 127


class WholeNumbers:
    """Codes of all parameters of a model, relative to the largest magnitude of all of them."""

    name = "whole numbers"

    def __init__(self) -> None:
        self.step = torch.ones(())

    def measure(self, owned: Iterable[tuple[Slice, Tensor]], owners: Axis) -> None:
        largest = torch.stack([torch.zeros(()), *(values.abs().amax().float() for _, values in owned)]).amax()
        owners.all_reduce(largest, out=largest, op=dist.ReduceOp.MAX).wait()
        self.step = largest / LARGEST

    def encode(self, where: Slice, values: Tensor, out: Tensor) -> None:
        out.copy_((values / self.step).round().to(torch.int8).view(torch.uint8))

    def decode(self, where: Slice, codes: Tensor, out: Tensor) -> None:
        torch.mul(codes.view(torch.int8), self.step, out=out)
