"""AdamW whose moments are stored in fewer bits than the weights have.

Moments are stored after they have been used, so that an update has the exact moments of its step.
"""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from zero.optimizers.cautious_adamw import decay_cautiously
from zero.optimizers.grouped_adamw import GroupedAdamW

CHUNK, CHUNK_OF_CPU = 2**22, 2**18  # elements that are updated at a time: on a CPU, its cache has the temporaries
MOMENTS = ("exp_avg", "exp_avg_sq")


class CompressedAdamW(GroupedAdamW):
    """The base class: a class derived from it stores moments, and torch's AdamW updates groups with update="adamw"."""

    @abstractmethod
    def new_moments(self, param: nn.Parameter) -> dict[str, Tensor]:
        """Return the states of moments of zeros."""

    @abstractmethod
    def stored(self, state: dict[str, Tensor], elements: slice) -> list[Sequence[Tensor]]:
        """Return, for each moment, views of the states that store some elements."""

    @abstractmethod
    def decoded(self, stored: list[Sequence[Tensor]], dtype: torch.dtype) -> list[Tensor]:
        """Return copies of the moments that are stored."""

    @abstractmethod
    def encoded(self, moments: list[Tensor], param: nn.Parameter, elements: slice) -> list[Sequence[Tensor]]:
        """Return what is to be stored for moments of some elements; the states count this step already."""

    def update_param(self, param: nn.Parameter, grad: Tensor, group: dict[str, Any]) -> None:
        """Update a parameter, or a piece of one."""
        state = self.state[param]
        if not state:
            step = torch.zeros((), dtype=torch.float32, device=param.device)
            state.update(self.new_moments(param), step=step)
        is_kept = self.is_kept(param)
        state["step"].add_(self.if_kept(1.0, torch.float32))
        flat, flat_grad = param.detach().view(-1), grad.reshape(-1)
        chunk = CHUNK_OF_CPU if param.device.type == "cpu" else CHUNK
        for start in range(0, flat.numel(), chunk):
            elements = slice(start, min(start + chunk, flat.numel()))
            stored = self.stored(state, elements)
            moments = self.decoded(stored, param.dtype)
            self._update(flat[elements], flat_grad[elements], moments, state["step"], group)
            for olds, news in zip(stored, self.encoded(moments, param, elements), strict=True):
                for old, new in zip(olds, news, strict=True):
                    old.copy_(new if is_kept is None else torch.where(is_kept == 0, old, new))

    def _update(self, param: Tensor, grad: Tensor, moments: list[Tensor], step: Tensor, group: dict[str, Any]) -> None:
        """Update some elements and their moments."""
        (beta1, beta2), (first, second) = group["betas"], moments
        self.clear_if_skipped(grad)
        first.lerp_(grad, 1 - beta1)
        second.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        num_steps = step.to(param.dtype).clamp(min=1)  # 0 if all steps so far were skipped
        rate = -group["lr"] / (1 - beta1**num_steps) * self.if_kept(1.0, param.dtype)
        factor = self.if_kept(1 - group["lr"] * group["weight_decay"], param.dtype, otherwise=1.0)
        update = first / (second.sqrt() / (1 - beta2**num_steps).sqrt()).add_(group["eps"])
        if group["cautious_decay"]:
            decay_cautiously(param, update, factor)
        else:
            param.mul_(factor)
        param.addcmul_(update, rate)
