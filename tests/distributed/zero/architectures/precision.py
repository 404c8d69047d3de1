"""Computing in float64 throughout: modules of transformers that cast to float32 would round differences up to 1e-7."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

LOWER = {torch.float32, torch.float16, torch.bfloat16}


class Float64(TorchFunctionMode):
    """Calls of torch that ask for a narrower floating dtype get float64 instead."""

    def __torch_function__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if function in NARROWING:
            return args[0].double()
        args = tuple(_widened(arg) for arg in args)
        return function(*args, **{name: _widened(arg) for name, arg in (kwargs or {}).items()})


NARROWING = {torch.Tensor.float, torch.Tensor.half, torch.Tensor.bfloat16}


def _widened(arg: Any) -> Any:
    return torch.float64 if isinstance(arg, torch.dtype) and arg in LOWER else arg


@contextmanager
def computing_in_float64() -> Iterator[None]:
    """Run the modules inside in float64."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with Float64():
            yield
    finally:
        torch.set_default_dtype(before)
