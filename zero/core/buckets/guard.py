"""Reads, writes and new values of parameters, beside the engine.

The parameters are the objects that the user knows. The guard of this file notices nothing of it, which is right for
modules that only compute with their own parameters. That of `zero.any_module` notices all that Python can see.
"""

from collections.abc import Iterable
from typing import Any, Protocol

from torch import Tensor, nn

from zero.core.buckets.bucket_gradient import BucketGradient

GRAD: Any = Tensor.grad  # the descriptors, which classes of parameters may replace
DATA: Any = Tensor.data


class ShardedParameterError(RuntimeError):
    """Raised if values of a sharded parameter are read while no module runs that could gather them."""


class ReadObserver(Protocol):
    """An observer of the reads of watched parameters."""

    def before_read(self, param: nn.Parameter) -> None:
        """Make the values of a parameter readable, or raise."""

    def after_saving(self, param: nn.Parameter) -> None:
        """Keep the values readable: autograd may read them again in backward."""

    def on_attribute(self, param: nn.Parameter) -> None:
        """Make a parameter readable that a module's attribute returns."""

    def replace(self, param: nn.Parameter, values: Tensor) -> None:
        """Let a parameter refer to other values, of its shape, dtype and device."""


class ParameterGuard:
    """Is told of the states of an engine's parameters; one that notices more derives from it."""

    def __init__(self, names: dict[nn.Parameter, str], reads: ReadObserver):
        self.names, self.reads = names, reads
        self.gradients: list[BucketGradient] = []  # of all parameters
        self.exposed: set[nn.Parameter] = set()  # those whose `.data` has been read
        self.replaced: set[nn.Parameter] = set()  # those that refer to memory of their own: [Note: replacing] in flat

    @property
    def holds_gradients(self) -> bool:
        """True if gradients have arrived since the last update, reduced or not."""
        return not all(gradients.is_empty for gradients in self.gradients)

    def guard(self, param: nn.Parameter) -> None:
        """Note that a parameter is readable."""

    def watch(self, param: nn.Parameter) -> None:
        """Note that a parameter is sharded, or unsharded for the user: each read of its values is to be reported."""

    def release(self, param: nn.Parameter) -> None:
        """Note that a parameter leaves the engine."""

    def end(self, param: nn.Parameter) -> None:
        """Note that the engine of a sharded parameter ends."""

    def end_all(self) -> None:
        """Refer to neither the engine's gradients nor its parameters any more."""
        self.gradients.clear()
        self.names.clear()

    def report_attributes(self, root: nn.Module) -> None:
        """Report parameters to `reads` from now on before a module's attribute returns them."""

    def check(self, module: nn.Module, params: Iterable[nn.Parameter]) -> None:
        """Raise ValueError if the module, or one of `params`, is no longer what was wrapped."""


def take_grad(param: nn.Parameter) -> Tensor:
    """Remove the gradient that autograd has stored in a parameter, and return it without its graph."""
    grad = GRAD.__get__(param)
    GRAD.__set__(param, None)
    return grad.detach() if grad.requires_grad else grad  # it does if a backward is to be differentiated


def set_raw_data(param: Any, values: Tensor) -> None:
    """Make a parameter, which must not be watched, refer to other memory."""
    DATA.__set__(param, values)
