"""Learning which modules pass tensors on by other ways than what they return.

The backward of a call is noticed when a gradient of one of its outputs arrives. A module may also write to an argument,
an attribute or a cache, and gradients may arrive through these first. In any case, autograd then reads parameters that
it has saved.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from parallel.autograd_internals import has_saved_tensors_hooks


class SavedRead(NamedTuple):
    """A parameter, or a view of one, that autograd has saved, and who owns its memory."""

    tensor: Tensor
    version: int
    owner: Any


class SavedReads:
    """Calls `before_read(owner)` before autograd reads tensors again that have been saved while this is active.

    `owner_of` returns who owns a tensor's memory, if it is a parameter's. Only the first call of a module is watched:
    each tensor that is saved costs two calls of Python.
    """

    def __init__(self, owner_of: Callable[[Tensor], Any], before_read: Callable[[Any], None]):
        self._owner_of, self._before_read = owner_of, before_read

    def watch(self) -> saved_tensors_hooks | None:
        """Begin to watch what is saved; the result's `__exit__` ends it.

        Return None inside other hooks, such as a checkpoint's, since torch would call only the innermost ones, and in
        transforms of `torch.func`, which refuse such hooks.
        """
        if has_saved_tensors_hooks():
            return None
        hooks = saved_tensors_hooks(self._pack, self._unpack)
        try:
            hooks.__enter__()
        except RuntimeError:
            return None
        return hooks

    def _pack(self, tensor: Tensor) -> Tensor | SavedRead:
        owner = self._owner_of(tensor)
        return tensor if owner is None else SavedRead(tensor, tensor._version, owner)

    def _unpack(self, saved: Tensor | SavedRead) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        if saved.tensor._version != saved.version:  # torch checks this for tensors that no hook has packed
            raise RuntimeError(
                f"a parameter of shape {tuple(saved.tensor.shape)}, which backward needs, has been modified since "
                "forward by an optimizer's step or another in-place operation; run backward before the step"
            )
        self._before_read(saved.owner)
        return saved.tensor
