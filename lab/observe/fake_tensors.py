"""Fake tensors: shapes, dtypes and devices without values, fast enough for a model of hundreds of layers.

torch's `FakeTensorMode` spends up to several milliseconds on an operation. Its cache misses if the same operation is
called on parameters at another offset of a buffer. Three kinds of operations, nearly all of a training step, take a
shorter path here:

    an operation that writes to an argument     returns that argument, whose shape cannot change
    a view                                      is computed by the meta kernel, from shape and strides alone
    an operation that returns new tensors       is cached by the shapes of its arguments

A dry run of 170B parameters on 400 ranks (configs/paper/figure2/170b-zero-400.yaml, stage 2) takes 7.8 CPU seconds with
it and 41.7 with `FakeTensorMode`, with equal results (2026-11-21, two CPU cores, torch 2.13).

It depends on private parts of torch, all imported from lab/observe/torch_internals.py, and on the attributes
`constant`, `fake_device` and `__dict__` of a `FakeTensor`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import Enum
from functools import cache
from typing import Any, TypeVar

import torch
from torch import Tensor

from lab.observe.torch_internals import (
    DEVICE_OF,
    VIEWS_DESPITE_THEIR_SCHEMA,
    UnguardedFakeTensorMode,
    fake_from_meta,
    is_composite,
    run_meta_kernel,
)
from parallel.torch_internals import FakeTensor, OpOverload, returns_views, schema_of, storage_id

RESHAPE_THEIR_ARGUMENT = {"aten::resize_", "aten::resize_as_", "aten::set_"}
# Operations whose results, or the shape of whose argument, are not a function of the shapes of the arguments.
NOT_CACHEABLE = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output, torch.Tag.inplace_view}

TensorMetadata = tuple[tuple[int, ...], tuple[int, ...], torch.dtype, torch.device]  # size, stride, dtype, device
# (args, kwargs) -> the argument that an operation writes to and returns; None if it returns nothing.
WrittenArgument = Callable[[Sequence[Any], Mapping[str, Any]], Tensor | None]
Instance = TypeVar("Instance")


class QuickFakeTensorMode(UnguardedFakeTensorMode):
    """A context in which new tensors are fake, on whatever device they are created; reading a value raises."""

    def __init__(self) -> None:
        super().__init__()
        # The cache: (operation, arguments) -> (True if it returns one tensor and not several, their metadata).
        self._results: dict[Any, tuple[bool, list[TensorMetadata]]] = {}
        self._attributes: dict[torch.device, dict[str, Any]] = {}  # `__dict__` of a fake tensor on each device
        self.observers: list[Any] = []  # `OperationObserver`s (lab/observe/operation_observer.py)

    def __torch_dispatch__(
        self, func: OpOverload, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is DEVICE_OF:  # autograd asks several times per node
            return args[0].fake_device
        kwargs = kwargs or {}
        output = self._dispatch(func, types, args, kwargs)
        for observer in self.observers:
            observer.on_operation(func, args, kwargs, output)
        return output

    def _dispatch(self, func: OpOverload, types: Sequence[type], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        path, written = _classify(func)
        if path is DispatchPath.COLLECTIVE:
            return run_meta_kernel(self, func, args, kwargs)
        if path is DispatchPath.NO_TENSOR:
            return func(*args, **kwargs)
        # Checked before the shorter paths: a constant has a value, with which torch computes, and which they would
        # lose.
        if _has_constant(args):
            return self._dispatch_as_torch(func, types, args, kwargs)
        if path is DispatchPath.VIEW and isinstance(args[0], FakeTensor):
            output = run_meta_kernel(self, func, args, kwargs)
            device = args[0].fake_device
            return self._fake(output, device) if isinstance(output, Tensor) else [self._fake(t, device) for t in output]
        if written is not None:
            tensor = written(args, kwargs)
            if tensor is None or tensor.numel():  # torch resizes an empty `out=`: it is left to torch
                return tensor
        if path is DispatchPath.ALLOCATION:
            return self._allocate(func, types, args, kwargs)
        return self._dispatch_as_torch(func, types, args, kwargs)

    def _dispatch_as_torch(self, func: OpOverload, types: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Let torch carry out an operation. Observers do not see the operations that torch calls for it."""
        observers, self.observers = self.observers, []
        try:
            return self.dispatch(func, types, args, kwargs)
        finally:
            self.observers = observers

    def _allocate(self, func: OpOverload, types: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        key = (func, _key(args), _key(tuple(kwargs.items())) if kwargs else ())
        if found := self._results.get(key):
            is_single, metadata = found
            outputs = [
                self._fake(torch.empty_strided(size, stride, dtype=dtype, device="meta"), device)
                for size, stride, dtype, device in metadata
            ]
            return outputs[0] if is_single else tuple(outputs)
        output = self._dispatch_as_torch(func, types, args, kwargs)
        tensors = [output] if isinstance(output, Tensor) else output
        if isinstance(tensors, (tuple, list)) and _are_new(tensors, (args, tuple(kwargs.values()))):
            self._results[key] = isinstance(output, Tensor), [_metadata_of(tensor) for tensor in tensors]
        return output

    def _fake(self, meta: Tensor, device: torch.device) -> FakeTensor:
        """Return a fake tensor on `device`. torch creates the first one; others copy its attributes."""
        attributes = self._attributes.get(device)
        if attributes is None:
            first = FakeTensor(self, meta, device)
            self._attributes[device] = dict(first.__dict__)
            return first
        return fake_from_meta(meta, device, attributes)


class DispatchPath(Enum):
    """The way in which `QuickFakeTensorMode` carries out an operation."""

    COLLECTIVE = "call it on meta tensors: a fake process group reads no values"
    NO_TENSOR = "call it: it neither takes nor returns tensors"
    VIEW = "run the meta kernel: it returns views of its first argument"
    ALLOCATION = "look its results up in the cache: it returns new tensors only"
    OTHER = "let torch carry it out, unless it only writes to its arguments"


@cache
def _classify(func: OpOverload) -> tuple[DispatchPath, WrittenArgument | None]:
    """Return the path of an operation, and the function that picks the argument that it writes to, if it has one.

    A schema can be relied on if it is not a composite's.
    """
    schema, is_aten = schema_of(func), func.namespace == "aten"
    items = *schema.arguments, *schema.returns
    if func.namespace == "c10d":
        return DispatchPath.COLLECTIVE, None
    if not any("Tensor" in str(item.type) for item in items):
        return DispatchPath.NO_TENSOR, None
    if func in VIEWS_DESPITE_THEIR_SCHEMA or (is_aten and returns_views(func) and not is_composite(func)):
        return DispatchPath.VIEW, None
    is_cacheable = is_aten and not NOT_CACHEABLE & set(func.tags)
    if is_cacheable and schema.returns and not is_composite(func) and not any(item.alias_info for item in items):
        return DispatchPath.ALLOCATION, None
    keeps_shapes = is_cacheable and schema.name not in RESHAPE_THEIR_ARGUMENT
    return DispatchPath.OTHER, _written_by(func) if keeps_shapes else None


def _written_by(func: OpOverload) -> WrittenArgument | None:
    """Return the `WrittenArgument` of an operation; None if it does more than write to one argument and return it."""
    schema = schema_of(func)
    written = [n for n, arg in enumerate(schema.arguments) if arg.alias_info is not None and arg.alias_info.is_write]
    if written and not schema.returns:
        return lambda args, kwargs: None
    if len(written) != 1 or len(schema.returns) != 1:
        return None
    argument = schema.arguments[written[0]]
    if argument.kwarg_only:
        return lambda args, kwargs: kwargs[argument.name]
    return lambda args, kwargs: args[written[0]]


def _are_new(tensors: Sequence[Any], arguments: Any) -> bool:
    """Return True if each result has a storage of its own, just as large as its shape needs, as of `empty_strided`."""
    if not all(isinstance(tensor, FakeTensor) and tensor.constant is None for tensor in tensors):
        return False
    storages = [tensor.untyped_storage() for tensor in tensors]
    known = {storage_id(tensor.untyped_storage()) for tensor in instances_in(arguments, FakeTensor)}
    are_separate = len(known | {storage_id(storage) for storage in storages}) == len(known) + len(storages)
    return are_separate and all(
        storage.nbytes() == extent(tensor) * tensor.element_size() and tensor.storage_offset() == 0
        for tensor, storage in zip(tensors, storages, strict=True)
    )


def extent(tensor: Tensor) -> int:
    """Return the number of elements from the first to the last one in memory."""
    if not tensor.numel():
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _metadata_of(tensor: FakeTensor) -> TensorMetadata:
    return tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.fake_device


def _key(value: Any) -> Any:
    """Return a cache key of arguments: equal keys mean that the results have equal metadata."""
    if isinstance(value, FakeTensor):
        return _metadata_of(value)
    if isinstance(value, (tuple, list)):
        return tuple(_key(item) for item in value)
    # 1, 1.0 and True are equal but promote to different dtypes, so the type is part of the key. NaN is not equal to
    # itself and would never be found, so None stands for it.
    return type(value), value if value == value else None


def _has_constant(args: Sequence[Any]) -> bool:
    """Return True if a fake tensor among the arguments knows its value, as one does that was made from a number."""
    for arg in args:
        if isinstance(arg, FakeTensor):
            if arg.constant is not None:
                return True
        elif isinstance(arg, (tuple, list)) and _has_constant(arg):
            return True
    return False


def instances_in(tree: Any, kind: type[Instance]) -> Iterator[Instance]:
    """Yield the instances of `kind` in nested tuples and lists, such as the arguments of an operation."""
    if isinstance(tree, kind):
        yield tree
    elif isinstance(tree, (tuple, list)):
        for branch in tree:
            yield from instances_in(branch, kind)
