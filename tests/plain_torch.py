"""The interfaces of ZeroDataParallel and ZeroOptimizer around a module and an optimizer of plain torch."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn


class PlainModel(nn.Module):
    """The interface of ZeroDataParallel around a module that plain torch trains."""

    def __init__(self, module: nn.Module):
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def accumulate(self) -> AbstractContextManager[None]:
        return nullcontext()

    @contextmanager
    def gathered(self, params: Iterable[nn.Parameter] | None = None, *, modify: bool = False) -> Iterator[nn.Module]:
        with torch.set_grad_enabled(torch.is_grad_enabled() and not modify):
            yield self.module

    def register_forward_method(self, name: str, module: nn.Module | None = None) -> None:
        assert callable(getattr(module or self.module, name))

    def unwrap(self, device: torch.device | None = None) -> nn.Module:
        return self.module


class PlainOptimizer(torch.optim.Optimizer):
    """A torch optimizer with the interface of ZeroOptimizer.

    A parameter without a gradient has a gradient of zero, unless `skip_unused`.
    """

    def __init__(self, inner: torch.optim.Optimizer, clip_norm: float, *, skip_unused: bool = False):
        super().__init__(inner.param_groups, inner.defaults)
        self.inner, self.clip_norm, self.skip_unused = inner, clip_norm, skip_unused

    def gradients(self) -> Iterator[tuple[str, Tensor]]:
        for group in self.inner.param_groups:
            yield from (("", param.grad) for param in group["params"])

    def step(  # type: ignore[override]
        self, closure: Callable[[], Tensor] | None = None, *, gradient_hook: Callable[[], object] = lambda: None
    ) -> Tensor:
        loss = closure() if closure else None
        params = [param for group in self.inner.param_groups for param in group["params"] if param.requires_grad]
        for param in () if self.skip_unused else params:
            param.grad = torch.zeros_like(param) if param.grad is None else param.grad
        gradient_hook()
        norm = torch.nn.utils.clip_grad_norm_(params, self.clip_norm)
        self.inner.step()
        return norm if loss is None else loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.inner.zero_grad(set_to_none)
