"""AdamW whose moments are stored in fewer bits than the weights have.

Moments are stored after they have been used, so that an update has the exact moments of its step.
"""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from zero.updates.cautious_adamw import decay_cautiously
from zero.updates.compiled import compiled_on_gpus, runs_compiled
from zero.updates.skippable import SkippableOptimizer

# Elements that are updated at a time, unless one kernel updates all: on a CPU, its cache has the temporaries.
CHUNK, CHUNK_OF_CPU = 2**22, 2**18
MOMENTS = ("exp_avg", "exp_avg_sq")


class CompressedAdamW(SkippableOptimizer):
    """The base class: a class derived from it stores moments."""

    own_defaults: ClassVar[dict[str, Any]] = {"betas": (0.9, 0.95), "eps": 1e-8}

    @abstractmethod
    def new_moments(self, param: nn.Parameter) -> dict[str, Tensor]:
        """Return the states of moments of zeros."""

    @abstractmethod
    def stored(self, state: dict[str, Tensor], elements: slice) -> list[Sequence[Tensor]]:
        """Return, for each moment, views of the states that store some elements."""

    @abstractmethod
    def context(self, param: nn.Parameter, elements: slice) -> tuple[Any, ...]:
        """Return what `decoded` and `encoded` need beside the states, such as tables or places."""

    @staticmethod
    @abstractmethod
    def decoded(stored: list[Sequence[Tensor]], context: tuple[Any, ...], dtype: torch.dtype) -> list[Tensor]:
        """Return copies of the moments that are stored."""

    @staticmethod
    @abstractmethod
    def encoded(moments: list[Tensor], context: tuple[Any, ...], step: Tensor) -> list[Sequence[Tensor]]:
        """Return what is to be stored for moments of some elements; `step` counts this step already."""

    def update_param(self, param: nn.Parameter, grad: Tensor, group: dict[str, Any]) -> None:
        """Update a parameter, or a piece of one."""
        state = self.state[param]
        if not state:
            step = torch.zeros((), dtype=torch.float32, device=param.device)
            state.update(self.new_moments(param), step=step)
        state["step"].add_(self.if_kept(1.0, torch.float32))
        rate = self.if_kept(-group["lr"], param.dtype)
        factor = self.if_kept(1 - group["lr"] * group["weight_decay"], param.dtype, otherwise=1.0)
        flat, flat_grad = param.detach().view(-1), grad.reshape(-1)
        chunk = CHUNK_OF_CPU if param.device.type == "cpu" else CHUNK
        chunk = max(1, flat.numel()) if runs_compiled(flat) else chunk
        for start in range(0, flat.numel(), chunk):
            elements = slice(start, min(start + chunk, flat.numel()))
            update_elements_(
                flat[elements],
                flat_grad[elements],
                self.stored(state, elements),
                self.context(param, elements),
                (state["step"], rate, factor, self.skip_flag()),
                method=type(self),
                settings=(*group["betas"], group["eps"], group["cautious_decay"]),
            )


@compiled_on_gpus
def update_elements_(
    param: Tensor,
    grad: Tensor,
    stored: list[Sequence[Tensor]],
    context: tuple[Any, ...],
    scalars: tuple[Any, ...],
    *,
    method: type[CompressedAdamW],
    settings: tuple[Any, ...],
) -> None:
    """Update some elements and their moments.

    `scalars` are the step, the negative rate, the factor of the decay, and whether to skip: then the rate is 0, and the
    factor 1.
    """
    (step, rate, factor, skip), (beta1, beta2, eps, is_cautious) = scalars, settings
    first, second = method.decoded(stored, context, param.dtype)
    grad = grad if skip is None else grad.masked_fill(skip, 0.0)  # times a weight of zero, inf would be NaN
    first.lerp_(grad, 1 - beta1)
    second.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
    num_steps = step.to(param.dtype).clamp(min=1)  # 0 if all steps so far were skipped
    update = first / (second.sqrt() / (1 - beta2**num_steps).sqrt()).add_(eps)
    if is_cautious:
        decay_cautiously(param, update, factor)
    else:
        param.mul_(factor)
    param.addcmul_(update, (1 - beta1**num_steps).reciprocal() * rate)
    for olds, news in zip(stored, method.encoded([first, second], context, step), strict=True):
        for old, new in zip(olds, news, strict=True):
            old.copy_(new if skip is None else torch.where(skip, old, new))
