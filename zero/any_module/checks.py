"""The checks of a module before it is wrapped: what would be trained wrongly in silence is refused, by name."""

from collections import defaultdict
from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import torch
from numpy.lib.array_utils import byte_bounds
from torch import Tensor, nn

from parallel.mesh import Axis
from parallel.torch_internals import FakeTensor, storage_id
from parallel.validation.errors import ConfigError

IS_COMPLEX = "is {dtype}; store it as pairs of real numbers (torch.view_as_real), and compute with view_as_complex"
ORIGIN = 2**20  # the address that storages are said to have, which nothing reads: those of fake tensors have none


def has_no_values(param: Tensor) -> bool:
    return isinstance(param, nn.parameter.UninitializedParameter) or param.is_meta


def has_inner_tensors(param: Tensor) -> bool:
    """Return whether operations on a tensor are those of a subclass, which keeps its values in other tensors."""
    is_overridden = type(param).__torch_dispatch__ is not Tensor.__torch_dispatch__
    return is_overridden and not isinstance(param, FakeTensor)


REFUSED_PARAMETERS: dict[Callable[[Tensor], bool], str] = {
    has_no_values: "has no values yet (a lazy or a meta parameter); materialize it before wrapping",
    lambda param: hasattr(param, "zero_guard"): (
        "is inside a ZeroDataParallel already; wrap a module once, or `unwrap()` it first"
    ),
    has_inner_tensors: (
        "is a {kind}, whose values are in other tensors, which cannot be divided; make it a plain parameter, as by "
        "`full_tensor()` of a DTensor or `dequantize()`, or register the inner tensors of a frozen one as buffers"
    ),
    Tensor.is_complex: IS_COMPLEX,
    Tensor.is_inference: "was made in torch.inference_mode, and cannot be trained; build the module outside of it",
    lambda param: param.grad is not None: "has a gradient from before it is wrapped; call `module.zero_grad()` first",
}
"""What a parameter must not be, in the order of the checks, and the reason."""


def check_module(module: nn.Module, data: Axis) -> None:
    """Raise ValueError if the module cannot be wrapped."""
    refuse_scripted(module)
    if next(module.parameters(), None) is None:
        raise ValueError(f"{type(module).__name__} has no parameters; there is nothing to train in parallel")
    for name, param in module.named_parameters():
        for is_refused, reason in REFUSED_PARAMETERS.items():
            if is_refused(param):
                raise ConfigError(f"{name} {reason.format(kind=type(param).__name__, dtype=param.dtype)}")
    _check_storages(dict(module.named_parameters()), {**dict(module.named_buffers()), **_plain_attributes(module)})
    for name, submodule in module.named_modules():
        is_embedding = isinstance(submodule, (nn.Embedding, nn.EmbeddingBag))
        if data.size > 1 and is_embedding and submodule.max_norm is not None:
            raise ValueError(
                f"{name}, a {type(submodule).__name__} with max_norm={submodule.max_norm}, changes its weight in "
                f"forward, and each of the {data.size} ranks would change other rows; set max_norm=None"
            )


def refuse_scripted(module: nn.Module) -> None:
    """Raise ConfigError if a module, or one inside it, is scripted or traced: it keeps its tables in C++, unseen."""
    for name, submodule in module.named_modules():
        if isinstance(submodule, torch.jit.ScriptModule):
            raise ConfigError(
                f"{name or 'the module'} is a {type(submodule).__name__} of torch.jit, which keeps its parameters and "
                "hooks in C++; wrap the module that was scripted or traced, and use torch.compile"
            )


def _plain_attributes(module: nn.Module) -> dict[str, Tensor]:
    """Return the tensors that are attributes of modules, and neither parameters nor buffers.

    Those that `torch.nn.utils.spectral_norm` computes before each forward are left out.
    """
    return {
        f"{prefix}.{name}" if prefix else name: value
        for prefix, submodule in module.named_modules()
        for name, value in vars(submodule).items()
        if isinstance(value, Tensor) and not isinstance(value, nn.Parameter) and not value.is_meta
        if f"{name}_orig" not in submodule._parameters
    }


def _check_storages(params: dict[str, nn.Parameter], others: dict[str, Tensor]) -> None:
    """Raise ValueError if a parameter shares elements with another parameter, or with one of the `others`.

    Its values move to a flat buffer, and the other one would keep the old ones. Parts of one storage, such as the
    columns of a fused matrix, share no element.
    """
    by_storage: defaultdict[int, dict[str, np.ndarray]] = defaultdict(dict)
    for name, tensor in (*params.items(), *others.items()):
        if tensor.layout is torch.strided and tensor.numel():
            by_storage[storage_id(tensor.untyped_storage())][name] = _place(tensor)
    for places in by_storage.values():
        bounds = {name: byte_bounds(place) for name, place in places.items()}
        before: list[str] = []  # those that may reach beyond the first byte of the next one
        for name in sorted(places, key=bounds.__getitem__):
            before = [other for other in before if bounds[other][1] > bounds[name][0]]
            for other in before:
                pair = [found for found in places if found in (name, other)]  # parameters first
                if pair[0] in params and np.shares_memory(places[name], places[other]):
                    raise ValueError(
                        f"{' and '.join(pair)} are views of the same memory, and would be two tensors once they are "
                        "wrapped; assign one Parameter to both modules (`head.weight = embed.weight`), and compute a "
                        "view of a parameter in forward"
                    )
            before.append(name)


def _place(tensor: Tensor) -> np.ndarray:
    """Return an array, not to be read, with the place that a tensor of any device has in its storage."""
    size = tensor.element_size()
    described = {
        "version": 3,
        "typestr": f"|V{size}",
        "shape": tuple(tensor.shape),
        "strides": tuple(stride * size for stride in tensor.stride()),
        "data": (ORIGIN + tensor.storage_offset() * size, True),
    }
    return np.asarray(SimpleNamespace(__array_interface__=described))
