"""AdamW with moments of 8 bits: block-wise dynamic quantization (Dettmers et al., 2022).

A block of 256 elements has one scale, the largest of its magnitudes, and for each element the number of a value between
-1 and 1 in a table. Blocks are counted from the beginning of the parameter, and shards do not cut them. So the results
do not depend on the sharding.
"""

from functools import cache
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from zero.optimizers.cautious_adamw import decay_cautiously
from zero.optimizers.grouped_adamw import GroupedAdamW
from zero.step.atoms import Atom

BLOCK = 256
CHUNK = 2**14 * BLOCK  # elements that are updated at a time: the temporaries have this length
SCALE = f"scale_per_{BLOCK}"  # the end of the name of a state that has one value for so many elements
LOWEST_POWER = -6  # of 10, of the smallest values of the table
MOMENTS = {"exp_avg": True, "exp_avg_sq": False}  # name: has a sign


class AdamW8bit(GroupedAdamW):
    """AdamW whose moments have 8 bits, and torch's AdamW for groups with update="adamw".

    Moments are quantized after they have been used, so that an update has the exact moments of its step.
    """

    method = "adamw8bit"
    own_defaults: ClassVar = {}
    own_atom = Atom(numel=BLOCK)

    def update_param(self, param: nn.Parameter, grad: Tensor, group: dict[str, Any]) -> None:
        """Update a parameter, or a piece of one that begins with a block."""
        state = self.state[param]
        if not state:
            self._make_states(param, state)
        is_kept = self.is_kept(param)
        state["step"].add_(1.0 if is_kept is None else is_kept.to(torch.float32))
        flat, flat_grad = param.detach().view(-1), grad.reshape(-1)
        for start in range(0, flat.numel(), CHUNK):
            elements, blocks = slice(start, start + CHUNK), slice(start // BLOCK, (start + CHUNK) // BLOCK)
            moments = {name: (state[name][elements], state[f"{name}_{SCALE}"][blocks]) for name in MOMENTS}
            self._update(flat[elements], flat_grad[elements], moments, state["step"], group)

    def requantize(self, param: nn.Parameter, scales: dict[str, Tensor]) -> None:
        """Quantize moments again that were quantized in other blocks; `scales` has the scale of each element.

        Each value then has an error of at most half the distance of two values of the table: 1/140 of the largest
        magnitude in its new block for the first moment, 1/280 for the second.
        """
        state = self.state[param]
        for name, is_signed in MOMENTS.items():
            table, bounds = self._table(is_signed, param.device)
            values = table[state[name].int()] * scales[f"{name}_{SCALE}"]
            state[name], state[f"{name}_{SCALE}"] = quantized(values, bounds)

    def _make_states(self, param: nn.Parameter, state: dict[str, Tensor]) -> None:
        for name, is_signed in MOMENTS.items():
            zero = table_of(is_signed).index(0.0)
            state[name] = torch.full((param.numel(),), zero, dtype=torch.uint8, device=param.device)
            state[f"{name}_{SCALE}"] = torch.zeros(-(-param.numel() // BLOCK), dtype=torch.float32, device=param.device)
        state["step"] = torch.zeros((), dtype=torch.float32, device=param.device)

    def _update(
        self,
        param: Tensor,
        grad: Tensor,
        moments: dict[str, tuple[Tensor, Tensor]],
        step: Tensor,
        group: dict[str, Any],
    ) -> None:
        """Update some blocks; `moments` are numbers and scales."""
        (beta1, beta2), is_kept = group["betas"], self.is_kept(param)
        if is_kept is not None:
            grad = grad.masked_fill(is_kept == 0, 0.0)  # times zero, inf would be NaN
        tables = {name: self._table(is_signed, param.device) for name, is_signed in MOMENTS.items()}
        first, second = (dequantized(*moments[name], tables[name][0]).to(param.dtype) for name in MOMENTS)
        first.lerp_(grad, 1 - beta1)
        second.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        num_steps = step.to(param.dtype).clamp(min=1)  # 0 if all steps so far were skipped
        rate, decay = -group["lr"] / (1 - beta1**num_steps), group["lr"] * group["weight_decay"]
        if is_kept is not None:
            rate, decay = rate * is_kept, decay * is_kept
        update = first / (second.sqrt() / (1 - beta2**num_steps).sqrt()).add_(group["eps"])
        if group["cautious_decay"]:
            decay_cautiously(param, update, 1 - decay)
        else:
            param.mul_(1 - decay)
        param.addcmul_(update, rate)
        for name, moment in zip(MOMENTS, (first, second), strict=True):
            for old, new in zip(moments[name], quantized(moment, tables[name][1]), strict=True):
                old.copy_(new if is_kept is None else torch.where(is_kept == 0, old, new))

    def _table(self, is_signed: bool, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return the table and its bounds on a device; kept, because a copy to an accelerator would block the host."""
        tables: dict[Any, tuple[Tensor, Tensor]] = self.__dict__.setdefault("_tables", {})
        if (is_signed, device) not in tables:
            table = torch.tensor(table_of(is_signed), dtype=torch.float32, device=device)
            tables[is_signed, device] = table, bounds_of(table, is_signed)
        return tables[is_signed, device]


def bounds_of(table: Tensor, is_signed: bool) -> Tensor:
    """Return the bounds between the values of a table: a value is stored as the nearest one.

    Only 0 is stored as 0 without a sign. A small second moment that became 0 would divide the first one by eps: single
    updates of rare words would have hundreds of times the learning rate.
    """
    bounds = (table[1:] + table[:-1]) / 2
    if not is_signed:
        bounds[0] = 0.0
    return bounds


def quantized(values: Tensor, bounds: Tensor) -> tuple[Tensor, Tensor]:
    """Return the numbers (uint8) of flat values in a table, and the scale (fp32) of each block of them."""
    blocks = _in_blocks(values.float())
    scales = blocks.abs().amax(dim=1)
    relative = blocks / scales.clamp(min=torch.finfo(torch.float32).tiny)[:, None]
    numbers = torch.bucketize(relative, bounds)
    return numbers.flatten()[: values.numel()].to(torch.uint8), scales


def dequantized(numbers: Tensor, scales: Tensor, table: Tensor) -> Tensor:
    """Return the flat values for the results of `quantized`, in fp32."""
    blocks = _in_blocks(table[numbers.int()]) * scales[:, None]
    return blocks.flatten()[: numbers.numel()]


def _in_blocks(values: Tensor) -> Tensor:
    """Return flat values as (blocks, elements of a block), with zeros after the last one."""
    return F.pad(values, (0, -values.numel() % BLOCK)).view(-1, BLOCK)


@cache
def table_of(is_signed: bool) -> list[float]:
    """Return the 256 values of the table, in ascending order.

    In each power of ten from 1e-6 on the values are the centers of equal intervals, twice as many as in the one before.
    There are also 0 and 1.
    """
    found = [0.0, 1.0]
    for number in range(-LOWEST_POWER + 1):
        num_intervals = 2 ** (number + (not is_signed))
        centers = [0.1 + 0.9 * (index + 0.5) / num_intervals for index in range(num_intervals)]
        centers = [center * 10.0 ** (number + LOWEST_POWER) for center in centers]
        found += centers + ([-center for center in centers] if is_signed else [])
    return sorted(found)
