"""Data parallelism in which each rank keeps only what it owns (ZeRO-DP, paper section 5), around any unchanged module.

a gradient arrives       it is written into its buckets; a complete bucket is reduced while backward is still running
the end of backward      buckets that are not complete are reduced too, with zeros for what is missing
transient parameters     are unsharded a unit at a time: see zero/units/scheduler.py
"""

import math
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from parallel.autograd_internals import restore_parameter_tables
from parallel.errors import ConfigError
from parallel.mesh import Axis
from parallel.tensor.gradient_sums import set_deferred
from zero.buckets.bucket import Bucket
from zero.buckets.flat import FlatParameters, is_absent
from zero.buckets.gradients import GradientReducer
from zero.buckets.guarded_parameter import GuardedParameter, ParameterGuard, changes, take_grad
from zero.gemini.chunks import choose_chunk_numel
from zero.gemini.planner import PlacementPlanner
from zero.memory.placement import NO_OFFLOAD, Offload, OffloadConfig
from zero.order.agreement import LaunchOrder
from zero.order.execution_order import ExecutionOrder
from zero.order.step_order import Round
from zero.partition.config import ZeroConfig
from zero.partition.stage import Lifetime
from zero.sharded_init import ShardedInit
from zero.units.backward import RunningBackward, is_in_backward
from zero.units.hooks import Hook, ModuleHooks, hook_readers
from zero.units.residency import UnitOrders
from zero.units.scheduler import UnitScheduler
from zero.units.unit import Unit, assign_parameters, find_units, group_alike, named_units

LEAST_PREFETCHED = 2**20  # elements, of any number of small units: a message of fewer takes the latency of the network


class ZeroDataParallel(nn.Module):
    """A module whose gradients are averaged over `data`, and whose states are partitioned as the stage says.

    Run every micro-batch but the last inside `with model.accumulate():`. All ranks start with the parameters and
    buffers of the first rank. `requires_grad` and dtypes are read once, here: to change them later, `unwrap` the module
    first. Pass `init` if the module was built inside a `ShardedInit`. With `device`, the module moves there, a unit at
    a time. Raises ValueError if the module cannot be wrapped.
    """

    def __init__(
        self,
        module: nn.Module,
        data: Axis,
        config: ZeroConfig,
        init: ShardedInit | None = None,
        device: torch.device | None = None,
        offload: OffloadConfig = NO_OFFLOAD,
    ):
        super().__init__()
        check_module(module, data)
        self.module = module
        self.config, self.data, self._policy = config, data, config.policy
        self._unshards = self._policy.full_params is Lifetime.TRANSIENT
        self.shard_axis, self.replica_axis = axes = self._policy.axes(data)
        if not self._unshards and offload.offloaded_states == {"parameters"}:
            raise ConfigError(
                f"OffloadConfig.states=[parameters] has no effect at ZeroConfig.stage={config.stage}, which keeps full "
                "parameters on the accelerator; add optimizer, or choose stage 3"
            )
        self.offload = Offload(device or next(module.parameters()).device, offload)
        orders: UnitOrders = {"forward": ExecutionOrder(), "backward": ExecutionOrder()}
        self._guard = ParameterGuard(
            {param: name for name, param in module.named_parameters()},
            before_read=lambda param: self._scheduler.before_read(param),
            after_saving=lambda param: self._scheduler.after_saving(param),
            holds_gradients=lambda: self.reducer.holds_gradients,
        )
        self._units = self._make_units(config, init)
        self.planner = PlacementPlanner(self.offload, self._prefetch_numel(), orders)
        if init:
            restore_parameter_tables(module)  # after the last `pop_full`
        _move_buffers(module, data, device)
        trainable = [bucket for flat in self.flats if flat.is_trainable for bucket in flat.buckets]
        self.reducer = GradientReducer(trainable, axes, self._policy, config.overlap, self._launch_order, self.offload)
        self.planner.check_units(
            self._units.values(), self.reducer.staging.num_bytes + self.reducer.host_staging.num_bytes
        )
        self._scheduler = UnitScheduler(
            self._units, orders, self.planner, self._start_forward, self._enter_backward, self.reducer.close
        )
        self._reduces = False  # the running backward accumulates gradients, and the reducer has begun
        self._is_last_microbatch = True
        self._awaits_backward = False  # a forward has run since the last backward
        self._install_hooks([param for flat in self.flats if flat.is_trainable for param in flat.params])

    @property
    def flats(self) -> list[FlatParameters]:
        """All flat buffers, in the order of the layout."""
        return [flat for unit in self._units.values() for flat in unit.flats]

    def params_by_unit(self) -> list[list[nn.Parameter]]:
        """Return the parameters that are unsharded together, for each unit that has parameters."""
        return [list(unit.flat_of) for unit in self._units.values() if unit.flat_of]

    def wait_for_updates(self) -> None:
        """Make all updated parameters readable by what is launched after this, if `overlap_gather` lets gathers run."""
        for flat in self.flats:
            flat.wait_for_updates()

    @property
    def buckets(self) -> list[Bucket]:
        """All buckets, in the order of the layout."""
        return [bucket for flat in self.flats for bucket in flat.buckets]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module."""
        self._before_forward()
        return self.module(*args, **kwargs)

    def register_forward_method(self, name: str, module: nn.Module | None = None) -> None:
        """Let a method of the module, or of `module` inside it, run by itself, as `forward` does.

        Its parameters are unsharded while it runs and in its backward. Raises ValueError if `module` is not a part of
        this model, or has no such method. Modules that such a method calls need no registration.
        """
        owner = self.module if module is None else module
        if owner not in set(self.module.modules()) or not callable(getattr(owner, name, None)):
            raise ValueError(
                f"{name} is not a method of a module of this model; the module is a {type(owner).__name__}"
            )
        if self._hooks is not None:
            self._hooks.register_method(owner, name)

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        """Accumulate gradients over the backwards inside this context; the first one after it completes the step.

        Unlike with DDP's `no_sync`, each backward is still reduced if full gradients are transient.
        """
        was_last, self._is_last_microbatch = self._is_last_microbatch, False
        self._awaits_backward = False
        try:
            yield
            self._backward.settle()
            # This rank's micro-batch reached no parameter, but other ranks' may have: take part in their reduction.
            if self._awaits_backward and self.reducer.reduces(is_last=False):
                self.reducer.begin(is_last=False)
                self.reducer.end()
        finally:
            self._is_last_microbatch = was_last

    @contextmanager
    def gathered(self, params: Iterable[nn.Parameter] | None = None, *, modify: bool = False) -> Iterator[nn.Module]:
        """Yield the module with all of its parameters unsharded, or with `params` and those of the same units.

        All ranks must enter together. What all ranks write is kept. With `modify`, what the first rank writes into
        `params` is their value from then on, on all ranks and for the optimizer. A parameter that is read for a loss
        stays unsharded until the optimizer's step. Raises ValueError if a parameter is not the module's.
        """
        chosen = list(self._scheduler.unit_of if params is None else params)
        for param in chosen:
            if param not in self._scheduler.unit_of:
                raise ValueError(f"a tensor of shape {tuple(param.shape)} is not a parameter of this model")
        # All units, also those without parameters: a forward in here may run on one rank only, and is not recorded.
        units = self._units.values() if params is None else {self._scheduler.unit_of[p]: None for p in chosen}
        holder = object()
        self._launch_order.start(Round.READ)
        for unit in units:
            unit.unshard(holder)
            unit.start_watch(holder)
        try:
            with torch.set_grad_enabled(torch.is_grad_enabled() and not modify):
                yield self.module
                for param in chosen if modify else ():
                    self._scheduler.unit_of[param].flat_of[param].assign(param, self.data)
        finally:
            for unit in units:
                unit.stop_watch(holder)
                unit.reshard(holder)

    def unwrap(self, device: torch.device | None = None) -> nn.Module:
        """Return the module without this wrapper, with all of its parameters on every rank, and on `device` if given.

        All ranks must call this. Change the module, then wrap it again and make a new optimizer, whose moments begin at
        zero. This object cannot be used any more.
        """
        self._launch_order.start(Round.READ)
        for unit in self._units.values():
            unit.unwrap(device)
        for handle in self._handles:
            handle.remove()
        if self._hooks is not None:
            self._hooks.remove()
            restore_parameter_tables(self.module)
        module = self.module
        set_deferred(module, False)
        del self.module
        return module

    def before_step(self, params: Iterable[nn.Parameter]) -> None:
        """Prepare for an update of `params`; an optimizer calls this first.

        Raises ValueError if the module is no longer what was wrapped, and warns of parameters that were added to it.
        """
        self._backward.settle()
        self._guard.check(self.module, params)
        self._scheduler.end_step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Discard all gradients, as after a backward that failed."""
        self.reducer.clear()

    def __deepcopy__(self, _memo: dict[int, Any]) -> NoReturn:
        raise TypeError(
            "a ZeroDataParallel cannot be copied; copy the module inside it, in `with model.gathered() as module:`"
        )

    def _make_units(self, config: ZeroConfig, init: ShardedInit | None) -> dict[str, Unit]:
        """Create a unit for each module whose parameters are unsharded together; those that persist are the root's."""
        own = assign_parameters(self.module, self._unit_names(config))
        self._launch_order = LaunchOrder(self._policy.compared_axis(self.data), list(own))
        resident_numel = config.resident_numel if self._unshards else math.inf
        resident = {n: p for params in own.values() for n, p in params.items() if p.numel() < resident_numel}
        unit_numels = [sum(param.numel() for param in params.values()) for params in own.values()]
        if self.offload.config.mode == "auto":
            numel = choose_chunk_numel(unit_numels, self.offload.config, self.shard_axis.size)
        else:
            dtype = next(self.module.parameters()).dtype.to_real()
            numel = config.chosen_bucket_numel(sum(unit_numels), self.data.size, dtype)
        values_of = partial(_initial_values, self.data, init)
        units: dict[str, Unit] = {}
        for name, params in own.items():
            transient = {n: p for n, p in params.items() if n not in resident}
            held = {Lifetime.PERSISTENT: {} if name else resident, Lifetime.TRANSIENT: transient}
            flats = [
                FlatParameters(group, self.shard_axis, lifetime, numel, config, values_of, self.offload, self._guard)
                for lifetime, params_held in held.items()
                for group in group_alike(params_held)
            ]
            units[name] = Unit(flats, partial(self._launch_order.before_gather, len(units)))
        return units

    def _unit_names(self, config: ZeroConfig) -> list[str]:
        if self._unshards:
            return find_units(self.module) if config.units is None else named_units(self.module, config.units)
        return [""]

    def _prefetch_numel(self) -> int:
        """Return the number of elements that are gathered ahead."""
        if self.config.prefetch_numel is not None:
            return self.config.prefetch_numel
        return max(LEAST_PREFETCHED, *(unit.transient_numel for name, unit in self._units.items() if name), 0)

    def _install_hooks(self, trainable: list[nn.Parameter]) -> None:
        self._backward = RunningBackward(
            trainable,
            on_begin=self._begin_backward,
            on_nested_begin=self.reducer.close_at_end,
            on_nested_end=self._scheduler.end_nested_backward,
            on_end=self._end_backward,
        )
        parts = list(self.module.modules())
        self._handles = [part.register_load_state_dict_pre_hook(Hook(refuse_assign)) for part in parts]
        self._handles += [self._register_gradient_hook(param) for param in trainable]
        if self.config.overlap_gather and not self._unshards:
            self._handles += hook_readers(self.module, self._updates_waiter)
        self._hooks: ModuleHooks | None = self._scheduler.install_hooks(self.module) if self._unshards else None
        # With hooks, that of the module itself starts the forward, also without this wrapper.
        before_forward = partial(self._hooks.enclose, self.module) if self._hooks else self._start_forward
        self._before_forward = torch.compiler.disable(before_forward)

    def _updates_waiter(self, params: list[nn.Parameter]) -> Callable[[], None]:
        """Return a function that waits for the updated values of `params`."""
        params_of: dict[FlatParameters, list[nn.Parameter]] = {}
        for param in params:
            params_of.setdefault(self._scheduler.unit_of[param].flat_of[param], []).append(param)

        def wait() -> None:
            for flat, own in params_of.items():
                flat.wait_for_updates(own)

        return wait

    def _register_gradient_hook(self, param: nn.Parameter) -> RemovableHandle:
        # A weak reference: the garbage collector does not follow references of such hooks, and would never free the
        # engine.
        on_gradient = weakref.WeakMethod(self._on_gradient)
        return param.register_post_accumulate_grad_hook(lambda param: (alive := on_gradient()) and alive(param))

    def _start_forward(self, is_whole: bool = True) -> None:
        """Begin a forward of the whole model or of a part, unless a backward is running it again."""
        if is_in_backward():
            return
        self._backward.settle()
        self._launch_order.start(Round.FORWARD)
        if is_whole:
            self._scheduler.start_recording()
        self._awaits_backward |= torch.is_grad_enabled()

    def _on_gradient(self, param: nn.Parameter) -> None:
        # First: the gradient of a backward that fails must not stay in `param.grad`, or it is added to the next.
        grad = take_grad(param)
        self._enter_backward()
        if not self._reduces:  # only a backward inside the running one accumulates gradients
            self._begin_reductions()
        # Nothing is resharded here: with frozen weights this runs before the input's gradient has read the parameters.
        self.reducer.accept(param, grad)

    def _enter_backward(self) -> bool:
        """Begin a backward, unless it has begun already; return whether it accumulates gradients, as far as is known.

        Every gradient and every unit calls this first.
        """
        self._backward.enter()
        return self._reduces

    def _begin_backward(self) -> None:
        self._reduces = False
        self._scheduler.start_backward()
        if self._backward.accumulates():
            self._begin_reductions()

    def _begin_reductions(self) -> None:
        self._reduces, self._awaits_backward = True, False
        self.reducer.begin(self._is_last_microbatch)

    def _end_backward(self) -> None:
        # Units first: their memory is free for the reductions that are still to be launched.
        self._scheduler.end_backward()
        if self._reduces:
            self._reduces = False
            self.reducer.end()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "ZeroDataParallel":
        """Refuse what `.to`, `.double`, `.cuda` and others would change; torch calls this for all of them."""
        for tensor in (*self.module.parameters(), *self.module.buffers()):
            if changes(fn, tensor):
                raise ValueError(
                    f"a {tensor.dtype} on {tensor.device} inside ZeroDataParallel cannot be converted; convert the "
                    "module before it is wrapped, or `unwrap()` it first"
                )
        return self


def check_module(module: nn.Module, data: Axis) -> None:
    """Raise TypeError if `data` is not an axis, and ValueError if the module cannot be wrapped."""
    given: object = data
    if not isinstance(given, Axis):
        raise TypeError(
            f"ZeroDataParallel takes an axis, such as `mesh.data`, not an object of class {type(given).__name__}"
        )
    if next(module.parameters(), None) is None:
        raise ValueError(f"{type(module).__name__} has no parameters; there is nothing to train in parallel")
    for name, param in module.named_parameters():
        if isinstance(param, nn.parameter.UninitializedParameter) or param.is_meta:
            raise ValueError(f"{name} has no values yet (a lazy or a meta parameter); materialize it before wrapping")
        if isinstance(param, GuardedParameter):
            raise ValueError(f"{name} is inside a ZeroDataParallel already; wrap a module once, or `unwrap()` it first")
        if param.grad is not None:
            raise ValueError(f"{name} has a gradient from before it is wrapped; call `module.zero_grad()` first")
    for name, submodule in module.named_modules():
        is_embedding = isinstance(submodule, (nn.Embedding, nn.EmbeddingBag))
        if data.size > 1 and is_embedding and submodule.max_norm is not None:
            raise ValueError(
                f"{name}, a {type(submodule).__name__} with max_norm={submodule.max_norm}, changes its weight in "
                f"forward, and each of the {data.size} ranks would change other rows; set max_norm=None"
            )


def refuse_assign(_module: nn.Module, _state: Any, _prefix: str, metadata: dict[str, Any], *_: Any) -> None:
    """Raise ValueError if `load_state_dict` is to replace parameters, and not to copy values to them."""
    if metadata.get("assign_to_params_buffers"):
        raise ValueError(
            "load_state_dict(assign=True) would replace parameters that ZeroDataParallel has divided into buckets; set "
            "assign=False, or load the state before the module is wrapped"
        )


def _initial_values(data: Axis, init: ShardedInit | None, param: nn.Parameter) -> Tensor:
    """Return the first rank's values of a parameter that is wrapped."""
    values = init.pop_full(param) if init else param.data
    if is_absent(values):
        raise ValueError(
            f"a parameter of shape {tuple(param.shape)} is still sharded; pass `init=` to ZeroDataParallel"
        )
    return data.broadcast_copy(values)


def _move_buffers(module: nn.Module, data: Axis, device: torch.device | None) -> None:
    """Give every rank the first one's buffers, on `device` if it is given."""
    for buffer in module.buffers():
        values = data.broadcast_copy(buffer)
        buffer.data = buffer.data.to(device)
        buffer.copy_(values)
