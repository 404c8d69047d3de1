"""Initial values that depend neither on how a parameter is split nor on the number of ranks that draw them.

A parameter is divided along its split dim into a fixed number of cells. Each is drawn from a generator of its own, so
that a rank need not draw those before it:

    weight (out, in), split along dim 0     | cell 0 | cell 1 | ...            | cell 959 |
    tensor size 4                         |      rank 0       |   rank 1   | ...
    3 data ranks each                     | draw  | draw | draw| ...                        then gathered
"""

import hashlib
import math

import torch
from torch import Tensor

from parallel.mesh import Axis
from parallel.torch_internals import FakeTensor
from parallel.validation.errors import ConfigError

# A dim has gcd(its size, CELLS) cells: every tensor size that divides both can be used.
CELLS = 2**8 * 3 * 5


def fill_normal(param: Tensor, std: float, name: str, dim: int | None, axis: Axis, data: Axis) -> None:
    """Fill a parameter with this rank's part of N(0, std) values that are a function of `name`.

    `dim` is the dim along which `axis` splits the parameter; None if the parameter is replicated. Values are drawn in
    fp32 on the CPU, so that they are the same on every device and in every dtype, up to rounding. The ranks of `data`
    have the same part: each draws a stretch of it, and the stretches are gathered. Raises ConfigError if the axis does
    not divide the number of cells.
    """
    if dim is None:
        param.copy_(draw(param.shape, std, f"{name}/0"))
        return
    num_cells = math.gcd(param.shape[dim] * axis.size, CELLS)
    if num_cells % axis.size:
        raise ConfigError(
            f"tensor_size={axis.size} does not divide the {num_cells} cells in which initial values are "
            f"drawn; choose a tensor size that divides {num_cells}"
        )
    if isinstance(param, FakeTensor):
        return  # a dry run, in which drawing would take time and have no effect
    own_cells = num_cells // axis.size
    parts = param.chunk(own_cells, dim)
    cell_numel = parts[0].numel()
    stretch_numel = math.ceil(param.numel() / data.size)
    values = param.new_empty(data.size * stretch_numel, device=data.communication_device(param))
    # The last stretches may end beyond the parameter. What is drawn there is not copied to it below.
    first, stop = data.rank * stretch_numel, (data.rank + 1) * stretch_numel
    stretch = values[first:stop]
    for number in range(first // cell_numel, math.ceil(stop / cell_numel)):
        cell = draw(parts[0].shape, std, f"{name}/{axis.rank * own_cells + number}").view(-1)
        start = number * cell_numel
        low, high = max(first, start), min(stop, start + cell_numel)
        stretch[low - first : high - first].copy_(cell[low - start : high - start])
    data.all_gather(stretch, out=values).wait()
    for part, cell in zip(parts, values[: param.numel()].split(cell_numel), strict=True):
        part.copy_(cell.view(part.shape))


def draw(shape: torch.Size, std: float, name: str) -> Tensor:
    """Return normal numbers in fp32 that depend on the name only."""
    digest = hashlib.sha256(name.encode()).digest()
    generator = torch.Generator("cpu").manual_seed(int.from_bytes(digest[:4], "little"))
    return torch.empty(shape, dtype=torch.float32, device="cpu").normal_(0.0, std, generator=generator)
