"""When units are unsharded and resharded, if parameters are transient.

forward     unshard the unit, start to unshard the next ones | compute | reshard
backward    the gradient of an output arrives: unshard, start the next ones | compute | the gradient of the input
            is known: reshard, and close the unit's parameters, so that their buckets can be reduced
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import nn

from zero.offload.planner import NUM_KEPT, Pass, PlacementPlanner, UnitOrders
from zero.torch_internals import NO_GRAPH_TASK, current_graph_task
from zero.units.access import watch_parameters
from zero.units.autograd import mark_end_of_backward, tensors_in
from zero.units.unit import Unit


class UnitScheduler:
    """Unshards each unit before its module runs in forward or backward, and reshards it after, by hooks on the module.

    `enter_backward` is called when a unit's backward begins; `close(params)` when no more gradients of them will
    arrive. Without `install_hooks`, as for parameters that persist, nothing is unsharded by itself.
    """

    def __init__(
        self,
        units: dict[str, Unit],
        orders: UnitOrders,
        planner: PlacementPlanner,
        enter_backward: Callable[[], None],
        close: Callable[[Iterable[nn.Parameter]], None],
    ):
        self._units, self._orders, self._planner = units, orders, planner
        self.unit_of = {param: unit for unit in units.values() for param in unit.flat_of}
        self._enter_backward, self._close = enter_backward, close
        self._running: list[Unit] = []  # calls of units in forward, the innermost last

    def install_hooks(self, root: nn.Module) -> None:
        """Install hooks on the modules of all units; `root` is the module that contains them."""
        for name, unit in self._units.items():
            module = root.get_submodule(name)
            module.register_forward_pre_hook(partial(self._before_forward, unit), with_kwargs=True)
            module.register_forward_hook(partial(self._after_forward, unit))
        watch_parameters(root, self._on_access)

    def start_forward(self) -> None:
        """Begin to record a forward of the whole model."""
        self._orders["forward"].restart()
        self._planner.start_forward()
        self._running.clear()  # a forward that raised has left its calls here

    def start_backward(self) -> None:
        """Begin to record a backward."""
        self._orders["backward"].restart()

    def end_backward(self) -> None:
        """Reshard every unit; calls whose backward has not run by now are forgotten."""
        for unit in self._units.values():
            unit.reshard()
            unit.num_open_calls = 0

    def _before_forward(self, unit: Unit, _module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        if current_graph_task() == NO_GRAPH_TASK:
            self._visit(unit, "forward")
            self._running.append(unit)
            unit.num_open_calls += torch.is_grad_enabled()
        else:  # a recomputation is not recorded: `_before_backward` records the visit
            unit.unshard()
        return mark_end_of_backward((args, kwargs), partial(self._after_backward, unit))

    def _after_forward(self, unit: Unit, _module: nn.Module, _args: tuple, output: Any) -> None:
        if current_graph_task() == NO_GRAPH_TASK:
            self._running.pop()
        # Before the unit is resharded: a parameter that is returned, such as a bias to be added later, is borrowed.
        for tensor in tensors_in(output):
            if isinstance(tensor, nn.Parameter):
                self._on_access(tensor)
        # A unit that is recomputed in its own backward stays: that backward reads it next.
        if unit.graph_task != current_graph_task() and not self._is_kept(unit):
            unit.reshard()
        for tensor in tensors_in(output):
            if tensor.grad_fn is not None:
                tensor.register_hook(lambda _grad: self._before_backward(unit))

    def _is_kept(self, unit: Unit) -> bool:
        """Return whether the unit stays unsharded from forward to backward. See [Note: keeping]."""
        if not self._planner.may_keep or current_graph_task() != NO_GRAPH_TASK or not torch.is_grad_enabled():
            return False
        return self._orders["forward"].is_as_long_as_last and unit in self._orders["backward"].current[:NUM_KEPT]

    # [Note: keeping] Backward begins with the root and the unit that ran last in forward. They stay unsharded in
    # between, from the second step on, when it is known which they are: to gather them again would cost traffic and
    # save no memory, since backward begins with both of them unsharded.

    def _on_access(self, param: nn.Parameter) -> None:
        """Borrow the parameter, if the unit that runs is not its own. See [Note: borrowing]."""
        lender = self.unit_of[param]
        if self._running and lender is not self._running[-1] and current_graph_task() == NO_GRAPH_TASK:
            self._running[-1].borrow(lender)

    # [Note: borrowing] A unit may read a parameter of another one: a parent multiplies with a child's weight, or adds a
    # bias that the child has returned. The borrower then holds the lender unsharded until it is resharded itself, and
    # does so whenever it runs from then on, in backward too, where autograd reads what it has saved. The lender's
    # parameters are closed at the end of backward only, since gradients may arrive from the borrower until then.

    def _before_backward(self, unit: Unit) -> None:
        self._enter_backward()
        if unit.graph_task != current_graph_task():
            unit.graph_task = current_graph_task()
            self._visit(unit, "backward")

    def _after_backward(self, unit: Unit) -> None:
        """Reshard a unit whose inputs' gradients have been computed, and close its parameters. See [Note: closing]."""
        unit.reshard()
        unit.num_open_calls -= 1
        if unit.num_open_calls == 0 and not unit.is_lent:
            self._close(unit.flat_of)

    # [Note: closing] Ranks match their collectives by the order in which each launches them. If a parameter was used on
    # some ranks only, its bucket would be complete there now and elsewhere at the very end of backward, with gathers in
    # between: the ranks would wait for each other for ever. So a unit's parameters are closed when its backward ends,
    # used or not, on every rank, and never before, whatever gradients have arrived. The root, units that are called
    # without differentiable inputs, and calls left over from another forward are closed when the whole backward ends.
    # If parameters persist, nothing is gathered in backward, and a bucket may be reduced as soon as it is complete.

    def _visit(self, unit: Unit, phase: Pass) -> None:
        """Unshard the unit, and start to unshard as many of those that ran next last time as the budget allows."""
        order = self._orders[phase]
        self._planner.before_visit(unit, phase)
        unit.unshard()
        # After it: the unit that is needed now goes first on the wire.
        self._planner.after_visit(unit)
        numel_left = self._planner.prefetch_numel
        for following in order.record(unit):
            numel_left -= following.transient_numel
            if numel_left < 0:
                break
            following.start_unshard()
