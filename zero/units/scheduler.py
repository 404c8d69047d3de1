"""When units are unsharded and resharded, if parameters are transient.

forward     unshard the unit, start to unshard the next ones | compute | reshard
backward    the gradient of an output arrives: unshard, start the next ones | compute | an older call begins, or the
            gradient of an input is known: reshard, and close the unit's parameters: their buckets can be reduced
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from parallel.autograd_internals import current_graph_task
from parallel.torch_internals import storage_id
from zero.buckets.guarded_parameter import ShardedParameterError
from zero.buckets.tensor_tree import find_tensors
from zero.partition.stage import Lifetime
from zero.units.access import watch_parameters
from zero.units.backward import is_in_backward
from zero.units.hooks import ModuleHooks
from zero.units.residency import NUM_KEPT, Pass, Residency, UnitOrders
from zero.units.saved_reads import SavedReads
from zero.units.unit import Call, Unit

# Holders until the optimizer's step, and until the next forward.
STEP, FORWARD = object(), object()


class UnitScheduler:
    """Unshards each unit before its module runs in forward or backward, and reshards it after, by hooks on the module.

    `start_forward(is_whole)` is called when the whole model, or a unit alone, begins to run; `enter_backward` when a
    unit's backward begins, and returns whether that accumulates gradients; `close(params)` when no more gradients of
    them will arrive. Without `install_hooks`, as for parameters that persist, nothing is unsharded by itself.
    """

    def __init__(
        self,
        units: dict[str, Unit],
        orders: UnitOrders,
        planner: Residency,
        start_forward: Callable[[bool], None],
        enter_backward: Callable[[], bool],
        close: Callable[[Iterable[nn.Parameter]], None],
    ):
        self._units, self._orders, self._planner = units, orders, planner
        self.unit_of = {param: unit for unit in units.values() for param in unit.flat_of}
        self._start_forward, self._enter_backward, self._close = start_forward, enter_backward, close
        self._device_type = next((flat.full.device.type for unit in units.values() for flat in unit.flats), "cpu")
        self._begins_forward = False  # the next visit is the first of a forward of the whole model
        self._clock = 0  # counts the calls of units that have begun or ended
        self._running: list[Call] = []  # in forward, the innermost last
        self._in_backward: dict[Call, None] = {}  # calls whose backward has begun and not ended
        self._held: dict[object, set[Unit]] = {STEP: set(), FORWARD: set()}  # units that stay unsharded until then
        self._modules: dict[Unit, nn.Module] = {}  # whose parameters the units have
        self._unit_of_storage = {
            storage_id(flat.full.untyped_storage()): unit
            for unit in units.values()
            for flat in unit.flats
            if flat.lifetime is Lifetime.TRANSIENT
        }
        self._is_accumulating = False
        self._saved_reads = SavedReads(self._owner_of, self._before_saved_read)

    def install_hooks(self, root: nn.Module) -> ModuleHooks:
        """Install hooks on the modules of all units; `root` is the module that contains them."""
        self._modules = {unit: root.get_submodule(name) for name, unit in self._units.items()}
        watch_parameters(root, self._on_access)
        return ModuleHooks(root, self._units, self._before_forward, self._after_forward, self._is_running)

    def start_recording(self) -> None:
        """Record a forward of the whole model from its first visit on."""
        self._begins_forward = True

    def start_backward(self) -> None:
        """Begin to record a backward."""
        self._orders["backward"].restart()
        self._in_backward.clear()

    def end_nested_backward(self) -> None:
        """End the calls that a backward inside the running one has run again."""
        for call in [call for call in self._in_backward if call.graph_task == current_graph_task()]:
            self._end(call)

    def end_backward(self) -> None:
        """Reshard all units, and forget calls whose backward has not run, if gradients have been accumulated."""
        self._in_backward.clear()
        running = [call.unit for call in self._running]  # a backward may be a part of a forward
        for unit in self._units.values():
            if unit not in running:
                unit.reshard()
            if self._is_accumulating:
                unit.has_left_calls |= unit.num_open_calls > 0
                unit.num_open_calls = 0
        self._is_accumulating = False

    def end_step(self) -> None:
        """Release the units that stay unsharded until the step, and forget calls that a backward has not reached."""
        self._release(STEP)
        for unit in self._units.values():
            unit.has_left_calls = False

    def before_read(self, param: nn.Parameter) -> None:
        """Make values readable that Python is about to read. See [Note: borrowing].

        Raises ShardedParameterError if no module runs: the other ranks may not read them, and would not gather them.
        """
        unit = self.unit_of[param]
        flat = unit.flat_of[param]
        if flat.lifetime is Lifetime.PERSISTENT:  # an update of it may not have been gathered yet
            flat.wait_for_updates([param])
            return
        is_sharded = flat.is_sharded
        if is_sharded and not self._running and not is_in_backward():
            raise ShardedParameterError(
                f"{param!r}, is sharded: no rank has all of its values; read it on all ranks inside `with "
                "model.gathered([parameter]):`, collect all by `full_state_dict` of zero/state/export.py, let "
                "methods other than forward gather them by `model.register_forward_method(name)`, and change the "
                "module after `model.unwrap()`"
            )
        if is_sharded or self._running:
            self._lend(unit)

    def after_saving(self, param: nn.Parameter) -> None:
        """Keep values readable that Python has read, and that autograd may read again."""
        unit = self.unit_of[param]
        if unit.flat_of[param].lifetime is Lifetime.TRANSIENT:
            self._lend(unit)

    def _before_forward(self, unit: Unit, module: nn.Module, args: tuple, kwargs: dict) -> None:
        for call in self._running:
            if call.unit is unit:
                call.depth += call.module is module
                return
        is_recomputed = is_in_backward()
        if is_recomputed:  # not recorded: `_before_backward` records the visit
            unit.unshard()
        else:
            if not self._running:
                self._release(FORWARD)
                self._start_forward(unit is self._units[""])
            self._visit(unit, "forward")
        call = Call(unit, module, self._tick(), is_counted=torch.is_grad_enabled() and not is_recomputed)
        unit.num_open_calls += call.is_counted
        self._running.append(call)
        for tensor in find_tensors((args, kwargs))[0]:
            if tensor.grad_fn is not None:
                # The node of this tensor is older than those of the call, and autograd runs the newest first: when it
                # runs, the call has no node left. The accumulation into a leaf does not wait for its turn. One tensor
                # is enough: a cache may hold those of all earlier calls.
                if not call.inputs:
                    tensor.register_hook(lambda _grad: self._end(call))
                call.inputs[id(tensor)] = tensor._version
        if call.is_counted and not unit.is_known:
            call.saved = self._saved_reads.watch()
            unit.is_known = call.saved is not None and module is self._modules[unit]

    def _after_forward(self, unit: Unit, module: nn.Module, output: Any) -> None:
        call = next((call for call in self._running if call.unit is unit), None)
        if call is None or call.module is not module:
            return
        call.depth -= 1
        if call.depth:
            return
        self._running.remove(call)
        call.ended = self._tick()
        tensors, is_complete = find_tensors(output)
        if call.saved is not None:
            call.saved.__exit__()
        # Before the unit is resharded: what is still to be read of it holds it.
        if not is_complete or (unit.hides_outputs and torch.is_grad_enabled()):
            self._hold(unit)
        for tensor in tensors:
            if (lender := self._owner_of(tensor)) is not None:  # a parameter, or a view of one
                self._lend(lender)
        # A unit that is recomputed in its own backward stays: that backward reads it next.
        if not self._is_in_backward(unit) and not self._is_kept(unit):
            unit.reshard()
        for tensor in tensors:
            if tensor.grad_fn is not None and call.inputs.get(id(tensor)) != tensor._version:
                tensor.register_hook(lambda _grad: self._before_backward(call))

    def _is_kept(self, unit: Unit) -> bool:
        """Return whether the unit stays unsharded from forward to backward. See [Note: keeping]."""
        if not self._planner.may_keep or is_in_backward() or not torch.is_grad_enabled():
            return False
        return self._orders["forward"].is_as_long_as_last and unit in self._orders["backward"].current[:NUM_KEPT]

    # [Note: keeping] Backward begins with the root and the unit that ran last in forward. They stay unsharded in
    # between, from the second step on, when it is known which they are: to gather them again would cost traffic and
    # save no memory, since backward begins with both of them unsharded.

    def _on_access(self, param: nn.Parameter) -> None:
        """Borrow a parameter that a module's attribute returns, if the unit that runs is not its own."""
        lender = self.unit_of.get(param)  # None: a parameter that was added to the module after it was wrapped
        if self._running and lender is not None:
            self._lend(lender)

    def _owner_of(self, tensor: Tensor) -> Unit | None:
        """Return the unit whose transient parameters a tensor is, or is a view of; None if there is none."""
        if tensor in self.unit_of:
            return self.unit_of[tensor]  # type: ignore[index]
        try:
            return self._unit_of_storage.get(storage_id(tensor.untyped_storage()))
        except NotImplementedError:  # a sparse tensor, or one of a transform of `torch.func`
            return None

    def _before_saved_read(self, unit: Unit) -> None:
        """Unshard a unit that backward is about to read, and does not know to run. See [Note: holding]."""
        if not unit.is_held:
            unit.hides_outputs = True
            self._hold(unit)

    def _lend(self, unit: Unit) -> None:
        """Keep a unit readable for the unit that runs; if none runs, for whatever reads it until the step."""
        if not self._running:
            self._hold(unit)
        elif (borrower := self._running[-1].unit) is not unit:
            borrower.borrow(unit)

    # [Note: borrowing] A unit may read a parameter of another one: a parent multiplies with a child's weight, or adds a
    # bias that the child has returned. The borrower then holds the lender unsharded until it is resharded itself, and
    # does so whenever it runs from then on, in backward too, where autograd reads what it has saved. The lender's
    # parameters are closed at the end of backward only, since gradients may arrive from the borrower until then.

    def _hold(self, unit: Unit) -> None:
        """Keep a unit unsharded until the step, or until the next forward without gradients. See [Note: holding]."""
        holder = STEP if torch.is_grad_enabled() or is_in_backward() else FORWARD
        if unit not in self._held[holder]:
            self._held[holder].add(unit)
            unit.is_lent = True
            unit.unshard(holder)

    def _release(self, holder: object) -> None:
        for unit in self._held[holder]:
            unit.reshard(holder)
        self._held[holder].clear()

    # [Note: holding] It cannot be noticed when autograd has read some parameters for the last time: those that were
    # gathered for a regulariser, those that a function or an iterator reads that a module has returned, those of a unit
    # whose outputs leave by other ways, and those of which a backward is differentiated. They stay unsharded until the
    # step, which costs memory; if no gradients are computed, until the next forward.

    def _before_backward(self, call: Call) -> None:
        self._is_accumulating = self._enter_backward()
        if call in self._in_backward:
            return
        # What began after this call had ended is newer, and has run by now. See `_before_forward`.
        for newer in [other for other in self._in_backward if other.began > call.ended]:
            self._end(newer)
        if not self._is_in_backward(call.unit):
            self._visit(call.unit, "backward")
        self._in_backward[call] = None
        call.graph_task = current_graph_task()
        if torch.is_grad_enabled():  # `create_graph`: another backward will read what this one reads
            self._hold(call.unit)

    def _end(self, call: Call) -> None:
        """End the backward of a call, if it has begun: reshard its unit, close its parameters. See [Note: closing]."""
        if call not in self._in_backward:
            return
        del self._in_backward[call]
        unit = call.unit
        if not self._is_in_backward(unit):
            unit.reshard()
        if call.is_counted and self._is_accumulating:
            unit.num_open_calls -= 1
            if unit.num_open_calls == 0 and not unit.is_lent and not unit.has_left_calls:
                self._close(unit.flat_of)

    # [Note: closing] Ranks match their collectives by the order in which each launches them. If a parameter was used on
    # some ranks only, its bucket would be complete there now and elsewhere at the very end of backward, with gathers in
    # between: the ranks would wait for each other for ever. So a unit's parameters are closed when its backward ends,
    # used or not, on every rank, and never before, whatever gradients have arrived. The root, the first unit if its
    # inputs are not differentiable, what a reentrant checkpoint runs, and units with calls that an earlier backward
    # of the step has not reached are closed when the whole backward ends.
    # If parameters persist, nothing is gathered in backward, and a bucket may be reduced as soon as it is complete.

    def _visit(self, unit: Unit, phase: Pass) -> None:
        """Unshard the unit, and start to unshard as many of those that ran next last time as the budget allows."""
        # Autocast keeps casts of weights until its context ends: their memory, and a node older than the next call.
        if phase == "forward" and torch.is_autocast_enabled(self._device_type):
            torch.clear_autocast_cache()
        if unit.is_held_from_outside:  # nothing is gathered, maybe on one rank only: so it is not recorded
            unit.unshard()
            return
        if self._begins_forward:
            self._begins_forward = False
            self._orders["forward"].restart()
            self._planner.start_forward()
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

    def _is_running(self, unit: Unit) -> bool:
        return any(call.unit is unit for call in self._running)

    def _is_in_backward(self, unit: Unit) -> bool:
        return any(call.unit is unit for call in self._in_backward)

    def _tick(self) -> int:
        self._clock += 1
        return self._clock
