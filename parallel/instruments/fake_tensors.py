"""Tensors with shapes and types but no values, fast enough for a model of hundreds of layers.

torch's `FakeTensorMode` spends up to several milliseconds on an operation, again and again where parameters lie at
different places of one buffer. Three kinds of operations, nearly all of a training step, take a short way here:

    writes to an argument       return that argument, whose shape cannot change
    views                       the meta kernel says all there is to say
    everything that allocates   has, for arguments of the same shapes, results of the same shapes
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import Enum
from functools import cache
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import (
    FakeTensor,
    FakeTensorMode,
    unset_fake_temporarily,
)

aten = torch.ops.aten
DEVICE_OF = torch.ops.prim.device.default
VIEWS_IN_SPITE_OF_THEIR_SCHEMA = {aten._unsafe_view.default, aten._reshape_alias.default}
RESHAPE_THEIR_ARGUMENT = {"aten::resize_", "aten::resize_as_", "aten::set_"}
NEVER_REPEATED = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output, torch.Tag.inplace_view}

Shape = tuple[tuple[int, ...], tuple[int, ...], torch.dtype, torch.device]  # size, stride
Written = Callable[[Sequence[Any], Mapping[str, Any]], Tensor | None]
Instance = TypeVar("Instance")


class QuickFakeTensorMode(FakeTensorMode):
    """In here tensors are fake, on whatever device they are asked for; reading a value raises."""

    def __init__(self) -> None:
        super().__init__()
        self._results: dict[Any, tuple[bool, list[Shape]]] = {}
        self._attributes: dict[torch.device, dict[str, Any]] = {}  # of a fake tensor there
        self.watchers: list[Any] = []  # see parallel/instruments/watching.py

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # no compiler is near, and its guard costs as much as a view

    def __torch_dispatch__(
        self, func: OpOverload, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is DEVICE_OF:  # autograd asks several times a node
            return args[0].fake_device
        kwargs = kwargs or {}
        output = self._answer(func, types, args, kwargs)
        for watcher in self.watchers:
            watcher.saw(func, args, kwargs, output)
        return output

    def _answer(self, func: OpOverload, types: Sequence[type], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        way, written = _way(func)
        if way is Way.COLLECTIVE:  # a fake process group looks at nothing
            return self._on_meta(func, args, kwargs)
        if way is Way.NO_TENSOR:
            return func(*args, **kwargs)
        if _has_constant(args):  # a value that torch goes on to compute with
            return self._as_torch_does(func, types, args, kwargs)
        if way is Way.VIEW and isinstance(args[0], FakeTensor):
            output = self._on_meta(func, args, kwargs)
            device = args[0].fake_device
            return self._fake(output, device) if isinstance(output, Tensor) else [self._fake(t, device) for t in output]
        if written is not None:
            tensor = written(args, kwargs)
            if tensor is None or tensor.numel():  # an empty `out` grows
                return tensor
        if way is Way.ALLOCATION:
            return self._allocate(func, types, args, kwargs)
        return self._as_torch_does(func, types, args, kwargs)

    def _as_torch_does(self, func: OpOverload, types: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """The long way, on which some operations are made of others, which nobody shall see."""
        watchers, self.watchers = self.watchers, []
        try:
            return self.dispatch(func, types, args, kwargs)
        finally:
            self.watchers = watchers

    def _on_meta(self, func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run the meta kernel: torch's `in_kernel_invocation_manager`, without the cost of a generator."""
        with torch._C._DisableTorchDispatch(), torch._C._PreserveDispatchKeyGuard():
            self.in_kernel_invocation = True
            torch._C._set_meta_in_tls_dispatch_include(True)
            try:
                return func(*args, **kwargs)
            finally:
                self.in_kernel_invocation = False

    def _allocate(self, func: OpOverload, types: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        key = (func, _key(args), _key(tuple(kwargs.items())) if kwargs else ())
        found = self._results.get(key)
        if found is None:
            output = self._as_torch_does(func, types, args, kwargs)
            tensors = [output] if isinstance(output, Tensor) else output
            if isinstance(tensors, (tuple, list)) and _are_new(tensors, (args, tuple(kwargs.values()))):
                self._results[key] = isinstance(output, Tensor), [_shape_of(tensor) for tensor in tensors]
            return output
        is_single, shapes = found
        outputs = []
        for size, stride, dtype, device in shapes:
            meta = torch.empty_strided(size, stride, dtype=dtype, device="meta")
            outputs.append(self._fake(meta, device))
        return outputs[0] if is_single else tuple(outputs)

    def _fake(self, meta: Tensor, device: torch.device) -> FakeTensor:
        """Fake tensors of a device differ in what they wrap only: the first is torch's own, the others are copies."""
        attributes = self._attributes.get(device)
        if attributes is None:
            first = FakeTensor(self, meta, device)
            self._attributes[device] = dict(first.__dict__)
            return first
        fake = Tensor._make_subclass(FakeTensor, meta, False, dispatch_device=True, device_for_backend_keys=device)
        torch._C._set_throw_on_mutable_data_ptr(fake)
        fake.__dict__.update(attributes)
        return fake


@contextmanager
def real_tensors() -> Iterator[None]:
    """For what must look at values: in a dry run too, tensors made in here have some."""
    with unset_fake_temporarily():
        yield


class Way(Enum):
    """How an operation is dispatched."""

    COLLECTIVE = "goes to the process group"
    NO_TENSOR = "neither takes nor gives tensors"
    VIEW = "gives a view of its first argument"
    ALLOCATION = "gives new tensors only"
    OTHER = "whatever torch does with it, unless it only writes to its arguments"


@cache
def _way(func: OpOverload) -> tuple[Way, Written | None]:
    if func.namespace == "c10d":
        return Way.COLLECTIVE, None
    if not any("Tensor" in str(item.type) for item in (*func._schema.arguments, *func._schema.returns)):
        return Way.NO_TENSOR, None
    if _is_view(func):
        return Way.VIEW, None
    return Way.ALLOCATION if _allocates(func) else Way.OTHER, _written_by(func)


def _written_by(func: OpOverload) -> Written | None:
    """For an operation that only writes to its arguments: which of them it returns. None for every other."""
    schema = func._schema
    if func.namespace != "aten" or NEVER_REPEATED & set(func.tags) or schema.name in RESHAPE_THEIR_ARGUMENT:
        return None
    written = [n for n, arg in enumerate(schema.arguments) if arg.alias_info is not None and arg.alias_info.is_write]
    if written and not schema.returns:
        return lambda args, kwargs: None
    if len(written) != 1 or len(schema.returns) != 1:
        return None
    argument = schema.arguments[written[0]]
    if argument.kwarg_only:
        return lambda args, kwargs: kwargs[argument.name]
    return lambda args, kwargs: args[written[0]]


def _is_view(func: OpOverload) -> bool:
    aliases = [result.alias_info for result in func._schema.returns]
    is_view = bool(aliases) and all(alias is not None and not alias.is_write for alias in aliases)
    is_composite = func.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd)
    return func in VIEWS_IN_SPITE_OF_THEIR_SCHEMA or (func.namespace == "aten" and is_view and not is_composite)


def _allocates(func: OpOverload) -> bool:
    """Whether its results are new tensors, if the schema can be believed; composites may return an argument."""
    aliases = [item.alias_info for item in (*func._schema.arguments, *func._schema.returns)]
    is_composite = func.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd)
    is_plain = func.namespace == "aten" and not is_composite and not NEVER_REPEATED & set(func.tags)
    return is_plain and not any(aliases) and bool(func._schema.returns)


def _are_new(tensors: Sequence[Any], arguments: Any) -> bool:
    """Whether each result has a storage of its own, as large as its shape needs: what `empty_strided` gives."""
    if not all(isinstance(tensor, FakeTensor) and tensor.constant is None for tensor in tensors):
        return False
    storages = [tensor.untyped_storage() for tensor in tensors]
    known = {tensor.untyped_storage()._cdata for tensor in instances_in(arguments, FakeTensor)}
    are_apart = len(known | {storage._cdata for storage in storages}) == len(known) + len(storages)
    return are_apart and all(
        storage.nbytes() == _extent(tensor) * tensor.element_size() and tensor.storage_offset() == 0
        for tensor, storage in zip(tensors, storages, strict=True)
    )


def _extent(tensor: Tensor) -> int:
    """Elements from the first to the last."""
    if not tensor.numel():
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _shape_of(tensor: FakeTensor) -> Shape:
    return tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.fake_device


def _key(value: Any) -> Any:
    """Equal for arguments that give results of equal shapes."""
    if isinstance(value, FakeTensor):
        return _shape_of(value)
    if isinstance(value, (tuple, list)):
        return tuple(_key(item) for item in value)
    # 1 and 1.0 and True are equal, and promote to different types; NaN is not even equal to itself.
    return type(value), value if value == value else None


def _has_constant(args: Sequence[Any]) -> bool:
    for arg in args:
        if isinstance(arg, FakeTensor):
            if arg.constant is not None:
                return True
        elif isinstance(arg, (tuple, list)) and _has_constant(arg):
            return True
    return False


def instances_in(tree: Any, kind: type[Instance]) -> Iterator[Instance]:
    """In nested tuples and lists, such as the arguments of an operation."""
    if isinstance(tree, kind):
        yield tree
    elif isinstance(tree, (tuple, list)):
        for branch in tree:
            yield from instances_in(branch, kind)
