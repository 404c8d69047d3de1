"""Element-wise functions that are one kernel on a GPU, where inductor compiles them; on a CPU they run as they are.

They write their results in place. Compiled code may contract a product and a sum, so that results differ from eager
ones by roundings. Operations on integers, such as those that make random bits, have the same results.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cache, lru_cache, wraps
from typing import Any, Protocol

import torch
from torch import Tensor

from parallel.tensor.softmax import inductor_works
from parallel.torch_internals import active_dispatch_modes, active_observers

_works = cache(inductor_works)
MOST_NUMBERS = 256  # that are kept as tensors: those of a step are few


class ImitatedCompiler(Protocol):
    """An observer of operations that runs compiled functions, as a GPU would, in a dry run."""

    def compiles(self, tensor: Tensor) -> bool:
        """Return whether functions of a tensor are compiled: it imitates one on a GPU."""

    def run_compiled(
        self, function: Callable[..., None], args: Sequence[Any], constants: Mapping[str, Any]
    ) -> None: ...


def compiled_on_gpus(function: Callable[..., None]) -> Callable[..., None]:
    """Return a function that is compiled for tensors on a GPU, and runs as it is elsewhere or while it is observed.

    Its arguments are tensors, and floats, also in tuples, which compiled code gets as tensors of the first one's type:
    they may differ from step to step. Keyword arguments are constants of the code. A few compilations serve all sizes.
    """

    @wraps(function)
    def call(*args: Any, **constants: Any) -> None:
        if imitated := _imitated_compiler(args[0]):
            imitated.run_compiled(function, args, constants)
        elif runs_compiled(args[0]):
            _compiled(function)(*_with_numbers(args, args[0]), **constants)
        else:
            function(*args, **constants)

    return call


def runs_compiled(tensor: Tensor) -> bool:
    """Return whether functions of a tensor run compiled now; while operations are observed, they run eager.

    A preflight compares which compilers nodes have: compiled replicas and eager ones would differ by roundings.
    """
    if tensor.is_cuda and not active_dispatch_modes():
        return _works(tensor.device)
    return _imitated_compiler(tensor) is not None


def _imitated_compiler(tensor: Tensor) -> ImitatedCompiler | None:
    compilers = (one for one in active_observers() if hasattr(one, "compiles"))
    return next((one for one in compilers if one.compiles(tensor)), None)


@cache
def _compiled(function: Callable[..., None]) -> Callable[..., None]:
    return torch.compile(function, dynamic=True)


def _with_numbers(value: Any, like: Tensor) -> Any:
    if isinstance(value, tuple):
        return tuple(_with_numbers(one, like) for one in value)
    return _number(value, like.dtype, like.device) if isinstance(value, float) else value


@lru_cache(MOST_NUMBERS)
def _number(value: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.full((), value, dtype=dtype, device=device)  # a copy from the host would wait for the device
