"""Readers of units' parameters beside their own modules, by whatever way, and how long they keep units unsharded.

a module's attribute     its table of parameters reports each access, while a module runs
values, in Python        a watched parameter reports the operation (zero/any_module/guarded_parameter.py)
what autograd has saved  hooks on saved tensors report it in backward
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from parallel.autograd_internals import has_saved_tensors_hooks
from parallel.torch_internals import storage_id
from zero.core.buckets.guard import ShardedParameterError
from zero.core.partition.stage import Lifetime
from zero.core.protocols.extension import Extensions
from zero.core.units.passes import is_in_backward
from zero.core.units.unit import Call, Unit

STEP, FORWARD = object(), object()  # readers of units until the optimizer's step, and until the next forward


class UnitAccess:
    """The units of a model, which join one after another, those that run, and those that others read."""

    def __init__(self, extensions: Extensions) -> None:
        self._extensions = extensions
        self.units: dict[str, Unit] = {}
        self.unit_of: dict[nn.Parameter, Unit] = {}
        self._unit_of_storage: dict[int, Unit] = {}
        self.running: dict[Unit, Call] = {}  # in forward, the innermost last
        self._retained: dict[object, set[Unit]] = {STEP: set(), FORWARD: set()}  # units that stay unsharded until then

    def add(self, name: str, unit: Unit) -> None:
        """Let a unit join."""
        self.units[name] = unit
        self.unit_of |= dict.fromkeys(unit.flat_of, unit)
        for flat in unit.flats:
            if flat.lifetime is Lifetime.TRANSIENT:
                self._unit_of_storage[storage_id(flat.full.untyped_storage())] = unit

    def before_read(self, param: nn.Parameter) -> None:
        """Make values readable that Python is about to read. See [Note: reading from other units].

        Raises ShardedParameterError if no module runs: the other ranks may not read them, and would not gather them.
        """
        unit = self.unit_of[param]
        flat = unit.flat_of[param]
        if flat.lifetime is Lifetime.PERSISTENT:  # an update of it may not have been gathered yet
            self._extensions.before_read([param])
            return
        is_sharded = flat.is_sharded
        if is_sharded and not self.running and not is_in_backward():
            raise ShardedParameterError(
                f"{param!r}, is sharded: no rank has all of its values; read it on all ranks inside `with "
                "model.gathered([parameter]):`, collect all by `full_state_dict` of zero/checkpoint/export.py, let "
                "methods other than forward gather them by `model.register_forward_method(name)`, and change the "
                "module after `model.unwrap()`"
            )
        if is_sharded or self.running:
            self.read(unit)

    def after_saving(self, param: nn.Parameter) -> None:
        """Keep values readable that Python has read, and that autograd may read again."""
        unit = self.unit_of[param]
        if unit.flat_of[param].lifetime is Lifetime.TRANSIENT:
            self.read(unit)

    def replace(self, param: nn.Parameter, values: Tensor) -> None:
        """Let a parameter refer to other values, which are taken over later."""
        self.before_read(param)
        self.unit_of[param].flat_of[param].replace(param, values)

    def on_attribute(self, param: nn.Parameter) -> None:
        """Make a parameter readable that a module's attribute returns, for the unit that runs."""
        unit = self.unit_of.get(param)  # None: a parameter that was added to the module after it was wrapped
        if self.running and unit is not None:
            self.read(unit)

    def unit_of_tensor(self, tensor: Tensor) -> Unit | None:
        """Return the unit whose transient parameters a tensor is, or is a view of; None if there is none."""
        if tensor in self.unit_of:
            return self.unit_of[tensor]  # type: ignore[index]
        try:
            return self._unit_of_storage.get(storage_id(tensor.untyped_storage()))
        except NotImplementedError:  # a sparse tensor, or one of a transform of `torch.func`
            return None

    def read(self, unit: Unit) -> None:
        """Keep a unit readable for the unit that runs; if none runs, for whatever reads it until the step."""
        if not self.running:
            self.keep_until_later(unit)
        elif (reader := next(reversed(self.running))) is not unit:
            reader.read_from(unit)

    # [Note: reading from other units] A unit may read a parameter of another one: a parent multiplies with a child's
    # weight, or adds a bias that the child has returned. The other one then stays unsharded until the reader is
    # resharded, and does so whenever the reader runs from then on, in backward too, where autograd reads what it has
    # saved. Its parameters are marked ready at the end of backward only, since gradients may arrive from the reader
    # until then.

    def keep_until_later(self, unit: Unit) -> None:
        """Keep a unit unsharded until the step, or until the next forward without gradients. See [Note: later]."""
        until = STEP if torch.is_grad_enabled() or is_in_backward() else FORWARD
        if unit not in self._retained[until]:
            self._retained[until].add(unit)
            unit.is_shared = True
            unit.retain(until)

    def reach(self, until: object) -> None:
        """Reshard the units that were kept until the step, or until the next forward."""
        for unit in self._retained[until]:
            unit.release(until)
        self._retained[until].clear()

    def end_step(self) -> None:
        """Release the units that stay unsharded until the step, and forget calls that a backward has not reached."""
        self.reach(STEP)
        for unit in self.units.values():
            unit.has_left_calls = False

    # [Note: later] It cannot be noticed when autograd has read some parameters for the last time: those that were
    # gathered for a regulariser, those that a function or an iterator reads that a module has returned, those of a unit
    # with side outputs, and those of a backward that is differentiated itself. They stay unsharded until the step,
    # which costs memory; if no gradients are computed, until the next forward.

    def record_saved_tensors(self) -> saved_tensors_hooks | None:
        """Notice from now on if autograd reads parameters again that it saves; the result's `__exit__` ends it.

        Each tensor that is saved costs two calls of Python. Return None inside other hooks, such as a checkpoint's,
        since torch would call only the innermost ones, and in transforms of `torch.func`, which refuse such hooks.
        """
        if has_saved_tensors_hooks():
            return None
        hooks = saved_tensors_hooks(self._pack, self._unpack)
        try:
            hooks.__enter__()
        except RuntimeError:
            return None
        return hooks

    # [Note: side outputs] The backward of a call is noticed when a gradient of one of its outputs arrives. A module may
    # also write to an argument, an attribute or a cache, and gradients may arrive through these first. In any case,
    # autograd then reads parameters that it has saved, and they are sharded.

    def _pack(self, tensor: Tensor) -> "Tensor | SavedRead":
        unit = self.unit_of_tensor(tensor)
        # A node may save its own output, whose reference to the node would keep both for ever if no backward runs.
        kept = tensor if tensor.is_leaf else tensor.detach()
        return kept if unit is None else SavedRead(kept, kept._version, unit)

    def _unpack(self, saved: "Tensor | SavedRead") -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        if saved.tensor._version != saved.version:  # torch checks this for tensors that no hook has packed
            raise RuntimeError(
                f"a parameter of shape {tuple(saved.tensor.shape)}, which backward needs, has been modified since "
                "forward by an optimizer's step or another in-place operation; run backward before the step"
            )
        if not saved.unit.is_readable:
            saved.unit.has_side_outputs = True
            self.keep_until_later(saved.unit)
        return saved.tensor


class SavedRead(NamedTuple):
    """A parameter, or a view of one, that autograd has saved."""

    tensor: Tensor
    version: int
    unit: Unit
