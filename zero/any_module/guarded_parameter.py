"""Parameters that report what they cannot show: values while they are sharded, and gradients while the engine has them.

A module's parameters stay the objects that the user knows; only their class changes with the state of their buffer:

guarded     readable. `.grad` raises while the engine holds gradients; a new `.data` gets to the buffer later
watched     sharded, or unsharded for the user: each read of values is reported first; metadata can always be read

Only Python sees the class. What autograd has saved is read in C++, and an operation on a guarded parameter costs what
one on a plain parameter does.
"""

import copy
import warnings
from collections.abc import Callable, Iterable
from functools import cache, partial
from types import new_class
from typing import Any

import torch
from torch import Tensor, nn

from parallel.autograd_internals import DisableTorchFunction, replace_parameter_table, structure_of
from parallel.tensor_tree import changes, find_tensors
from zero.any_module.checks import refuse_scripted
from zero.core.buckets.guard import DATA, GRAD, ParameterGuard, ReadObserver, ShardedParameterError

_PROPERTIES = (
    "device dtype grad grad_fn is_cpu is_cuda is_leaf is_meta is_nested is_quantized is_sparse itemsize layout nbytes "
    " ndim output_nr requires_grad retains_grad shape _backward_hooks _version"
)
_METHODS = (
    "__hash__ __len__ dim element_size get_device is_complex is_floating_point is_same_size is_signed nelement "
    "ndimension new_empty new_full new_ones new_tensor new_zeros numel register_hook "
    "register_post_accumulate_grad_hook requires_grad_ retain_grad size"
)
_FUNCTIONS = (
    "_has_compatible_shallow_copy_type empty_like full_like is_complex is_floating_point is_same_size numel ones_like "
    "rand_like randint_like randn_like result_type zeros_like"
)
METADATA = {
    *(getattr(Tensor, name).__get__ for name in _PROPERTIES.split()),
    *(getattr(Tensor, name).__set__ for name in ("grad", "requires_grad")),
    *(getattr(Tensor, name) for name in _METHODS.split()),
    *(getattr(torch, name) for name in _FUNCTIONS.split()),
    *(torch.autograd.grad, torch.autograd.backward),
}
"""The functions that read no value of their arguments, as torch passes them to `__torch_function__`."""
CONVERSIONS = {
    Tensor.to,
    Tensor.type,
    Tensor.cpu,
    Tensor.cuda,
    Tensor.half,
    Tensor.bfloat16,
    Tensor.float,
    Tensor.double,
}
"""The functions that return the tensor itself if it has the dtype and the device already."""


_REQUIRES_GRAD: Any = Tensor.requires_grad  # the descriptor that a property below replaces


class GradientAccessError(RuntimeError):
    """Raised if `.grad` of a parameter is read or set, whose gradient is in the engine's buckets."""


class AnyModule(ParameterGuard):
    """Gives the parameters of one engine classes that report what is done to them beside the engine."""

    def __init__(self, names: dict[nn.Parameter, str], reads: ReadObserver):
        super().__init__(names, reads)
        self.toggled: dict[nn.Parameter, bool] = {}  # those whose `requires_grad` was set: its value before
        self._original = {param: type(param) for param in names}
        self._structure: Callable[[], list[int]] | None = None
        self._parts: list[int] = []  # what the structure was in the last step
        self._warned: set[nn.Parameter] = set()  # added parameters

    def guard(self, param: nn.Parameter) -> None:
        """Make a parameter readable."""
        self._set_class(param, GuardedParameter)

    def watch(self, param: nn.Parameter) -> None:
        """Have each read of a parameter's values reported."""
        self._set_class(param, WatchedParameter)

    def release(self, param: nn.Parameter) -> None:
        """Give a parameter its own class back."""
        if isinstance(param, GuardedParameter):
            param.__class__ = self._original[param]  # type: ignore[assignment]
            del param.zero_guard

    def end(self, param: nn.Parameter) -> None:
        """Let each read of a parameter raise from now on: its engine ends, and its values are sharded."""
        self.watch(param)
        if isinstance(param, GuardedParameter):
            param.zero_guard = AnyModule(EndedNames(), EndedReads())

    def end_all(self) -> None:
        """Refer to neither the engine's units nor its gradients any more."""
        self.reads, self._structure = EndedReads(), None
        super().end_all()

    def report_attributes(self, root: nn.Module) -> None:
        """Report each parameter from now on before a module's attribute returns it."""
        for module in root.modules():
            replace_parameter_table(module, partial(ReportingTable, self.reads.on_attribute))

    def check(self, module: nn.Module, params: Iterable[nn.Parameter]) -> None:
        """Raise ValueError if parameters have been unfrozen, or some of `params` frozen, since `module` was wrapped.

        ConfigError if a part of it has been scripted. Warn, once for each, of parameters that were added to the module:
        they are not trained.
        """
        if self._structure is None or self._structure() != self._parts:
            refuse_scripted(module)
            self._structure = structure_of(module)
            self._parts = self._structure()
            self._warn_of_added(module)
        given = set(params) if self.toggled else set()
        for param, was_required in self.toggled.items():
            if param.requires_grad is not was_required and (param in given or not was_required):
                raise ValueError(
                    f"requires_grad of {self.names[param]} was {was_required} when the module was wrapped, and "
                    f"is {param.requires_grad} now; call `unwrap()` before such a change, and wrap the module again"
                )

    def _warn_of_added(self, module: nn.Module) -> None:
        for name, param in module.named_parameters():
            if param not in self.names and param not in self._warned and param.requires_grad:
                self._warned.add(param)
                warnings.warn(
                    f"{name} was added after the module was wrapped, and is not trained; call `unwrap()`, and wrap the "
                    "module again",
                    stacklevel=5,
                )

    def _set_class(self, param: nn.Parameter, guarded: type) -> None:
        original = self._original[param]
        # A tensor subclass that only passes for a parameter, such as a fake tensor, depends on its class.
        if issubclass(original, nn.Parameter):
            param.__class__ = guarded_class(original, guarded)
            param.zero_guard = self  # type: ignore[attr-defined]


class EndedNames(dict[nn.Parameter, str]):
    """The names of parameters whose engine has ended, to which nothing refers."""

    def __missing__(self, param: nn.Parameter) -> str:
        return "a parameter"


class EndedReads:
    """The reads of parameters that were sharded when their engine ended."""

    def before_read(self, param: nn.Parameter) -> None:
        raise ShardedParameterError(
            f"a parameter of shape {tuple(param.shape)} was sharded when its ZeroDataParallel ended, and no rank has "
            "all of its values; call `unwrap()` before the last reference to the model is dropped"
        )

    def after_saving(self, param: nn.Parameter) -> None:
        self.before_read(param)

    def on_attribute(self, param: nn.Parameter) -> None:
        """Do nothing: the read of its values is reported."""

    def replace(self, param: nn.Parameter, values: Tensor) -> None:
        self.before_read(param)


@cache
def guarded_class(original: type[nn.Parameter], guarded: type[nn.Parameter]) -> type[nn.Parameter]:
    """Return the class, derived from both, of parameters of any engine: torch.compile compiles again for another class.

    It gives a function up after a few times, of which several engines in a process would each be one.
    """
    members: dict[str, Any] = {"zero_original": original}
    if issubclass(guarded, WatchedParameter):  # a function that torch.compile does not trace
        members["__torch_function__"] = classmethod(torch.compiler.disable(run_reported))
    return new_class(original.__name__, (guarded, original), exec_body=lambda namespace: namespace.update(members))


class GuardedParameter(nn.Parameter):
    """A parameter of a wrapped module. Its copies are parameters of the original class."""

    zero_guard: AnyModule  # of this parameter
    zero_original: type[nn.Parameter]

    @property
    def grad(self) -> Tensor | None:
        """The gradient of a backward that is running; None if there is no gradient."""
        grad = GRAD.__get__(self)
        if grad is None and self.zero_guard.holds_gradients and not torch.compiler.is_compiling():
            raise GradientAccessError(
                f"the gradient of {self.zero_name} is in the buckets of ZeroDataParallel, not in `.grad`; update by a "
                "ZeroOptimizer, clip by its clip_norm, scale by its LossScale and not by a GradScaler, read and change "
                "`optimizer.gradients()` in `optimizer.step(gradient_hook=...)`, discard them by `model.zero_grad()`"
            )
        return grad

    @grad.setter
    def grad(self, grad: Tensor | None) -> None:
        if grad is not None or self.zero_guard.holds_gradients:
            raise GradientAccessError(
                f"the gradient of {self.zero_name} cannot be set: ZeroOptimizer reads the buckets of ZeroDataParallel, "
                "not `.grad`; call `model.zero_grad()` to discard gradients, or add a term to the loss to change them"
            )

    @property
    def data(self) -> Tensor:
        """The values, without a gradient; a write to them does not change the parameter's version."""
        self.zero_guard.exposed.add(self)  # it may be written at any time from now on
        return DATA.__get__(self)

    @data.setter
    def data(self, values: Tensor) -> None:
        if values is self:  # a conversion of the module that changes nothing
            return
        shape, dtype, device = self.shape, self.dtype, self.device
        if (values.shape, values.dtype, values.device) != (shape, dtype, device):
            raise ValueError(
                f"{self.zero_name} is a {dtype} of shape {tuple(shape)} on {device} inside ZeroDataParallel, and "
                f"cannot become a {values.dtype} of shape {tuple(values.shape)} on {values.device}; "
                "`model.unwrap()` it, change the module, and wrap it again"
            )
        self.zero_guard.reads.replace(self, values)

    def set_(self, source: Any = None, *others: Any) -> Any:
        """Replace the values by those of another tensor; return the parameter."""
        if not isinstance(source, Tensor) or others:
            raise ValueError(
                f"{self.zero_name} is inside ZeroDataParallel and cannot be set to a storage; copy values to it, or "
                "`model.unwrap()` it first"
            )
        self.data = source.detach()
        return self

    @property
    def requires_grad(self) -> bool:
        """True if gradients are computed."""
        return _REQUIRES_GRAD.__get__(self)

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        self.zero_guard.toggled.setdefault(self, self.requires_grad)
        _REQUIRES_GRAD.__set__(self, value)

    def requires_grad_(self, requires_grad: bool = True) -> Any:
        """Set `requires_grad`; return the parameter."""
        self.requires_grad = requires_grad
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        if id(self) not in memo:
            memo[id(self)] = self.zero_original(DATA.__get__(self).clone(), self.requires_grad)
            memo[id(self)].__dict__.update(copy.deepcopy(self.__getstate__() or {}, memo))
        return memo[id(self)]

    def __getstate__(self) -> dict[str, Any] | None:
        """Return the user's attributes, which copies and files have too; None if there are none."""
        return {name: value for name, value in self.__dict__.items() if name != "zero_guard"} or None

    def _use_count(self) -> int:
        """Refuse `torch.utils.swap_tensors`, which calls this: another object would have the parameter's gradients."""
        raise ValueError(
            f"{self.zero_name} is inside ZeroDataParallel and cannot be swapped; write its values in place inside "
            "`with model.gathered(modify=True):`, or call `model.unwrap()` first"
        )

    @property
    def zero_name(self) -> str:
        """The parameter's name in the module that is wrapped."""
        return self.zero_guard.names[self]


class WatchedParameter(GuardedParameter):
    """A parameter whose reads are reported before they happen."""

    def __repr__(self) -> str:  # type: ignore[override]
        return f"{self.zero_name}, a {self.dtype} of shape {tuple(self.shape)} inside ZeroDataParallel"

    def __format__(self, spec: str) -> str:
        return format(repr(self), spec)


def run_reported(
    _cls: type, func: Callable[..., Any], _types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
) -> Any:
    """Run a torch function; first report the watched parameters in its arguments, unless it reads no values."""
    kwargs = kwargs or {}
    if func in CONVERSIONS and not changes(func, *args, **kwargs):
        return args[0]
    reads_values = func not in METADATA and not torch.compiler.is_compiling()  # the compiler itself reads metadata
    found = find_tensors((args, kwargs))[0] if reads_values else []
    watched = [tensor for tensor in found if isinstance(tensor, WatchedParameter)]
    for param in watched:
        param.zero_guard.reads.before_read(param)
    with DisableTorchFunction():
        result = func(*args, **kwargs)
    if watched and any(tensor.grad_fn is not None for tensor in find_tensors(result)[0]):
        for param in watched:
            param.zero_guard.reads.after_saving(param)
    return result


class ReportingTable(dict[str, Any]):
    """The dictionary of a module's parameters, which calls `on_access(param)` before it returns a parameter.

    Reading an attribute looks the name up here; iterating over all parameters does not. What torch.compile traces is
    not reported: see `WatchedParameter` for the parameters that a compiled function cannot read.
    """

    def __init__(self, on_access: Callable[[nn.Parameter], None], params: dict[str, Any]):
        super().__init__(params)
        self._on_access = on_access

    def __getitem__(self, name: str) -> Any:
        param = super().__getitem__(name)
        if param is not None and not torch.compiler.is_compiling():
            self._on_access(param)
        return param

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self),)  # copies of a module are not watched
