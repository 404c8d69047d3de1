"""Names of parameters that modules list: those that are split along the tensor axis, and how.

A module lists its split parameters in `split_dims`. Every other parameter is replicated. Its gradient is bitwise the
same on all ranks of the axis, unless the module lists it in `shared_dims` or, with sequence parallelism, each rank has
tokens of its own: then each rank computes a part of the gradient, and these have to be summed (`GradientSums`).
"""

from typing import Any

from torch import nn


def split_dims(module: nn.Module) -> dict[str, int]:
    """Return {name: dim} of every parameter of the module that is split along the tensor axis."""
    return _listed(module, "split_dims")


def shared_dims(module: nn.Module) -> dict[str, int | None]:
    """Return {name: dim} of every replicated parameter of which each rank computes a part of the gradient.

    The dim is the one along which a tensor axis of another size splits it, or None.
    """
    return _listed(module, "shared_dims")


def _listed(module: nn.Module, attribute: str) -> dict[str, Any]:
    """Return what submodules list under `attribute`, by the names of the parameters; they may lack some of these."""
    params = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    listed = {
        f"{prefix}.{name}" if prefix else name: dim
        for prefix, submodule in module.named_modules()
        for name, dim in getattr(submodule, attribute, {}).items()
    }
    return {name: dim for name, dim in listed.items() if name in params}


def packed_rows(module: nn.Module) -> dict[str, tuple[int, ...]]:
    """Return {name: numbers of rows} of every parameter of the module that holds several matrices.

    A module lists them in `packed_rows`. The rows of the parameter repeat: so many of the first matrix, so many of the
    second one, and so on, and then again of the first. Each tensor rank has whole repetitions.
    """
    return _listed(module, "packed_rows")
