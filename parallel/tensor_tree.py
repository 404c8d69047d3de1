"""The tensors in what a module takes and returns: in containers, dataclasses and objects of any class."""

from collections import deque
from collections.abc import Callable
from copy import copy
from dataclasses import fields, is_dataclass
from enum import Enum
from numbers import Number
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from parallel.torch_internals import tree_map

# Values of these types hold no tensor. Modules and types are not searched: their tensors are not a call's own.
_PLAIN = (
    *(type(None), bool, int, float, complex, str, bytes, range, slice, Enum, type, ModuleType),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Generator, nn.Module),
    *(np.ndarray, np.generic, Number),
)
MAX_OBJECTS = 10_000  # that are searched in one tree: an object may refer to half of a program


def find_tensors(tree: Any) -> tuple[list[Tensor], bool]:
    """Return the tensors in `tree`, each once, and whether these are all.

    The tree is searched through dictionaries, tuples, lists, sets, and the attributes of objects. A function, a
    generator or another iterator may hold tensors that cannot be found, or compute them later.
    """
    if isinstance(tree, Tensor):  # the most frequent tree
        return [tree], True
    tensors: dict[int, Tensor] = {}
    seen: dict[int, Any] = {}  # the objects are kept: the `id` of one that is freed may be used again
    is_complete = True
    left = [tree]
    while left:
        item = left.pop()
        if isinstance(item, Tensor):
            tensors[id(item)] = item
        elif not (isinstance(item, _PLAIN) or type(item) is object or id(item) in seen):
            if len(seen) == MAX_OBJECTS:
                return list(tensors.values()), False
            seen[id(item)] = item
            content = _content(item)
            is_complete &= content is not None
            left.extend(reversed(content or []))
    return list(tensors.values()), is_complete


def cast_floating_point(tree: Any, dtype: torch.dtype) -> Any:
    """Return a tree with its floating-point tensors in `dtype`.

    It is searched through dictionaries, tuples, lists, and dataclasses. Dictionaries of other classes and dataclasses
    stay the same objects if nothing in them changes, and else are copied: what is assigned to a copy is not seen in the
    original.
    """
    changed: list[Tensor] = []
    found: dict[int, Any] = {}  # by `id`: an object may refer to itself

    def cast(item: Any) -> Any:
        if isinstance(item, Tensor):
            if item.is_floating_point() and item.dtype is not dtype:
                changed.append(item := item.to(dtype))
            return item
        if isinstance(item, dict):  # of a class of its own
            return replaced(item, dict(item), type(item).__setitem__)
        if is_dataclass(item) and not isinstance(item, type):
            names = [field.name for field in fields(item) if hasattr(item, field.name)]
            return replaced(item, {name: getattr(item, name) for name in names}, object.__setattr__)
        return item

    def replaced(item: Any, values: dict[Any, Any], assign: Callable[[Any, Any, Any], None]) -> Any:
        if id(item) in found:
            return found[id(item)]
        found[id(item)], num_changed = item, len(changed)
        values = tree_map(cast, dict(values))
        if len(changed) > num_changed:
            found[id(item)] = copied = copy(item)
            for name, value in values.items():
                assign(copied, name, value)
        return found[id(item)]

    return tree_map(cast, tree)


def _content(item: Any) -> list[Any] | None:
    """Return what a container or an object refers to, or None if that is unknown."""
    if isinstance(item, dict):
        return [*item.values(), *getattr(item, "__dict__", {}).values()]
    if isinstance(item, (tuple, list, set, frozenset, deque)):
        return [*item, *getattr(item, "__dict__", {}).values()]
    slots = [getattr(item, name) for cls in type(item).__mro__ for name in _slots(cls) if hasattr(item, name)]
    if callable(item) or hasattr(item, "__next__") or not (slots or hasattr(item, "__dict__")):
        return None
    return [*slots, *getattr(item, "__dict__", {}).values()]


def _slots(cls: type) -> tuple[str, ...]:
    slots = cls.__dict__.get("__slots__", ())
    names = (slots,) if isinstance(slots, str) else tuple(slots)
    # Python renames private ones.
    return tuple(f"_{cls.__name__.lstrip('_')}{n}" if n[:2] == "__" and n[-2:] != "__" else n for n in names)


def changes(conversion: Callable[..., Any], tensor: Tensor, *args: Any, **kwargs: Any) -> bool:
    """Return whether a conversion would change the dtype or the device of a tensor, or return something else."""
    sample = torch.empty((), dtype=tensor.dtype, device=tensor.device)
    return conversion(sample, *args, **kwargs) is not sample
