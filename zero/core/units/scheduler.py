"""When units are unsharded and resharded, if parameters are transient.

forward     unshard the unit, start to unshard the next ones | compute | reshard
backward    the gradient of an output arrives: unshard, start the next ones | compute | an older call begins, or the
            gradient of an input is known: reshard, and mark the unit's parameters ready: their buckets can be reduced

No hook changes a tensor, so that modules may change their inputs and outputs in place.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from parallel.autograd_internals import current_graph_task
from parallel.tensor_tree import find_tensors
from zero.core.buckets.gradients import GradientReducer
from zero.core.protocols.extension import Extensions, Pass
from zero.core.protocols.orders import ExecutionOrder
from zero.core.units.access import FORWARD, UnitAccess
from zero.core.units.hooks import ModuleHooks
from zero.core.units.passes import Passes, is_in_backward
from zero.core.units.unit import Call, Unit

UnitOrders = dict[Pass, ExecutionOrder[Unit]]

NUM_KEPT = 2  # units that stay unsharded from forward to backward


@dataclass
class Residency:
    """The units that are unsharded beside those that run. An extension may write it between passes."""

    prefetch_numel: int
    """The number of elements of the next units that are gathered ahead."""
    may_keep: bool = True
    """Whether units may stay unsharded from forward to backward. See [Note: keeping]."""
    orders: UnitOrders = field(default_factory=lambda: {"forward": ExecutionOrder(), "backward": ExecutionOrder()})
    """The units that the running and the last passes have visited."""


class UnitScheduler:
    """Unshards each unit before its module runs in forward or backward, and reshards it after, by hooks on the module.

    It starts to unshard the units that followed the last time, as far as the residency allows. It listens to the
    passes, and tells them when a forward or a backward begins. `root` is the module that contains all units.
    """

    def __init__(
        self,
        root: nn.Module,
        access: UnitAccess,
        residency: Residency,
        passes: Passes,
        reducer: GradientReducer,
        extensions: Extensions,
    ):
        self._access, self._residency, self._passes, self._reducer = access, residency, passes, reducer
        self._extensions = extensions
        self._device_type = next(root.parameters()).device.type
        self._clock = 0  # counts the calls of units that have begun or ended
        self._begins_forward = False  # the next visit is the first of a forward of the whole model
        self._in_backward: dict[Call, None] = {}  # calls whose backward has begun and not ended
        self.hooks = ModuleHooks(root, access.units, self)
        passes.join(self)

    def begin_forward(self, is_whole: bool) -> None:
        """Record a forward of the whole model from its first visit on."""
        self._begins_forward |= is_whole

    def begin_backward(self) -> None:
        """Begin to record a backward."""
        self._residency.orders["backward"].restart()
        self._in_backward.clear()

    def end_nested_backward(self) -> None:
        """End the calls that a backward inside the running one has run again."""
        for call in [call for call in self._in_backward if call.graph_task == current_graph_task()]:
            self._end(call)

    def end_backward(self) -> None:
        """Reshard the units that do not run; if gradients were accumulated, forget calls whose backward has not run."""
        self._in_backward.clear()
        for unit in self._access.units.values():
            if unit not in self._access.running:  # a backward may be a part of a forward
                unit.reshard()
            if self._passes.accumulates:
                unit.has_left_calls |= unit.num_open_calls > 0
                unit.num_open_calls = 0

    def before_forward(self, unit: Unit, module: nn.Module, args: tuple, kwargs: dict) -> None:
        """Unshard a unit before a call of one of its modules, unless the call is inside another one of the unit."""
        running = self._access.running
        if unit in running:
            running[unit].depth += running[unit].module is module
            return
        is_recomputed = is_in_backward()
        if is_recomputed:  # not recorded: `_before_backward` records the visit
            unit.unshard()
        else:
            if not running:
                self._access.reach(FORWARD)
                self._passes.begin_forward(is_whole=unit is self._access.units[""])
            self._visit(unit, "forward")
        call = Call(unit, module, self._tick(), is_counted=torch.is_grad_enabled() and not is_recomputed)
        unit.num_open_calls += call.is_counted
        running[unit] = call
        for tensor in find_tensors((args, kwargs))[0]:
            if tensor.grad_fn is not None:
                # Autograd runs newer nodes first: when it gets to the gradient of an input, all nodes of the call have
                # run. Leaves are left out, because autograd accumulates into them out of this order. The first input
                # is enough: a cache may pass thousands.
                if not call.inputs:
                    tensor.register_hook(lambda _grad: self._end(call))
                call.inputs[id(tensor)] = tensor._version
        if call.is_counted and not unit.saved_tensors_recorded:  # in the first call only
            call.saved = self._access.record_saved_tensors()
            unit.saved_tensors_recorded = call.saved is not None and module is unit.module

    def after_forward(self, unit: Unit, module: nn.Module, output: Any) -> None:
        """Reshard a unit after the outermost call of one of its modules, and notice when its backward begins."""
        call = self._access.running.get(unit)
        if call is None or call.module is not module:
            return
        call.depth -= 1
        if call.depth:
            return
        del self._access.running[unit]
        call.ended = self._tick()
        tensors, is_complete = find_tensors(output)
        if call.saved is not None:
            call.saved.__exit__()
        # Before the unit is resharded: what is still to be read of it retains it.
        if not is_complete or (unit.has_side_outputs and torch.is_grad_enabled()):
            self._access.keep_until_later(unit)
        for tensor in tensors:
            if (other := self._access.unit_of_tensor(tensor)) is not None:  # a parameter, or a view of one
                self._access.read(other)
        # A unit that is recomputed in its own backward stays: that backward reads it next.
        if not self._is_in_backward(unit) and not self._keeps(unit):
            unit.reshard()
        for tensor in tensors:
            if tensor.grad_fn is not None and call.inputs.get(id(tensor)) != tensor._version:
                tensor.register_hook(lambda _grad: self._before_backward(call))

    def end_abandoned_calls(self) -> None:
        """End the calls that an exception has left without a hook: one that is no `Exception`, as KeyboardInterrupt.

        None of the model may be running, but in a backward or in a registered method, and then nothing is done.
        """
        while self._access.running and not (is_in_backward() or self.hooks.num_methods_running):
            unit, call = next(reversed(self._access.running.items()))
            call.depth = 1
            self.after_forward(unit, call.module, None)

    def is_running(self, unit: Unit) -> bool:
        """Return whether calls of the unit's modules are inside one that has been reported already."""
        return unit in self._access.running

    def _before_backward(self, call: Call) -> None:
        self._passes.enter_backward()
        if call in self._in_backward:
            return
        # What began after this call had ended is newer, and has run by now. See `before_forward`.
        for newer in [other for other in self._in_backward if other.began > call.ended]:
            self._end(newer)
        if not self._is_in_backward(call.unit):
            self._visit(call.unit, "backward")
        self._in_backward[call] = None
        call.graph_task = current_graph_task()
        if torch.is_grad_enabled():  # `create_graph`: another backward will read what this one reads
            self._access.keep_until_later(call.unit)

    def _end(self, call: Call) -> None:
        """End the backward of a call, if it has begun: reshard its unit. See [Note: marking ready]."""
        if call not in self._in_backward:
            return
        del self._in_backward[call]
        unit = call.unit
        if not self._is_in_backward(unit):
            unit.reshard()
        if call.is_counted and self._passes.accumulates:
            unit.num_open_calls -= 1
            if unit.num_open_calls == 0 and not unit.is_shared and not unit.has_left_calls:
                self._reducer.mark_ready(unit.flat_of)

    # [Note: marking ready] Ranks match their collectives by the order in which each launches them. If a parameter was
    # used on some ranks only, its bucket would be complete there now and elsewhere at the very end of backward, with
    # gathers in between: the ranks would wait for each other for ever. So a unit's parameters are marked ready when its
    # backward ends, used or not, on every rank, and never before, whatever gradients have arrived. The root, the first
    # unit if its inputs are not differentiable, what a reentrant checkpoint runs, and units with calls that an earlier
    # backward of the step has not reached are marked ready when the whole backward ends. If parameters persist, nothing
    # is gathered in backward, and a bucket may be reduced as soon as it is complete.

    def _visit(self, unit: Unit, phase: Pass) -> None:
        """Unshard the unit, and start to unshard as many of those that ran next last time as the budget allows."""
        # Autocast keeps casts of weights until its context ends: their memory, and a node older than the next call.
        if phase == "forward" and torch.is_autocast_enabled(self._device_type):
            torch.clear_autocast_cache()
        if unit.is_retained_outside:  # nothing is gathered, maybe on one rank only: so it is not recorded
            unit.unshard()
            return
        if self._begins_forward:
            self._begins_forward = False
            self._residency.orders["forward"].restart()
        self._extensions.on_unit(unit.number, phase)
        unit.unshard()
        # After it: the unit that is needed now goes first on the wire.
        self._extensions.after_unshard(unit.number)
        numel_left = self._residency.prefetch_numel
        for following in self._residency.orders[phase].record(unit):
            numel_left -= following.transient_numel
            if numel_left < 0:
                break
            following.start_unshard()

    def _keeps(self, unit: Unit) -> bool:
        """Return whether the unit stays unsharded from forward to backward. See [Note: keeping].

        In forward, `orders["backward"].current` is the record of the last backward.
        """
        orders = self._residency.orders
        if not self._residency.may_keep or is_in_backward() or not torch.is_grad_enabled():
            return False
        return orders["forward"].is_as_long_as_last and unit in orders["backward"].current[:NUM_KEPT]

    # [Note: keeping] Backward begins with the root and the unit that ran last in forward. They stay unsharded in
    # between, from the second step on, when it is known which they are: to gather them again would cost traffic and
    # save no memory, since backward begins with both of them unsharded.

    def _is_in_backward(self, unit: Unit) -> bool:
        return any(call.unit is unit for call in self._in_backward)

    def _tick(self) -> int:
        self._clock += 1
        return self._clock
