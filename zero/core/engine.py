"""Data parallelism in which each rank keeps only what it owns (ZeRO-DP, paper section 5), around any unchanged module.

a gradient arrives       it is written into its buckets; a complete bucket is reduced while backward is still running
the end of backward      buckets that are not complete are reduced too, with zeros for what is missing
transient parameters     are unsharded a unit at a time: see zero/core/units/scheduler.py
"""

import math
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from parallel.autograd_internals import restore_parameter_tables
from parallel.mesh import Axis
from parallel.tensor.gradient_sums import set_deferred
from parallel.tensor_tree import cast_floating_point
from parallel.validation.errors import ConfigError
from zero.core.buckets.bucket import Bucket, slices_of
from zero.core.buckets.flat import FlatContext, FlatParameters, is_absent
from zero.core.buckets.gradients import GradientReducer
from zero.core.buckets.guard import ParameterGuard
from zero.core.memory.streams import SideStream
from zero.core.partition.config import PartitionConfig
from zero.core.partition.layout import Slice
from zero.core.partition.stage import Lifetime
from zero.core.protocols.extension import Extended, Extension, Extensions
from zero.core.protocols.home import Home, Homes
from zero.core.protocols.transport import Transport, TransportOf
from zero.core.transports import Transports
from zero.core.units.access import UnitAccess
from zero.core.units.hooks import PersistentHooks
from zero.core.units.passes import Passes
from zero.core.units.scheduler import Residency, UnitScheduler
from zero.core.units.unit import Unit, assign_parameters, find_units, group_alike, in_order_of_use, named_units

LEAST_PREFETCHED = 2**20  # elements, of any number of small units: a message of fewer takes the latency of the network


class InitialValues(Protocol):
    """The source of the parameters' initial values: the `ShardedInit` inside which the module was built."""

    def pop_full(self, param: nn.Parameter) -> Tensor:
        """Return the values of a parameter, and keep no reference to them."""


class EngineOptimizer(Protocol):
    """The part of the optimizer of an engine that the engine and its extensions need."""

    tensor: Axis

    @property
    def buckets(self) -> Sequence[Bucket]:
        """The buckets of all trainable parameters, in the order of the layout."""

    def bytes_to_place(self, bucket: Bucket) -> int:
        """Return the memory that `place` would allocate on the accelerator."""

    def place(self, bucket: Bucket, home: Home) -> None:
        """Move a bucket's states to another home, between steps."""

    def take_changes(self) -> None:
        """Let master weights follow parameters that were written in place."""


class Engine(nn.Module):
    """A module whose gradients are averaged over `data`, and whose states are partitioned as `config` says.

    `transport` says how buckets are communicated, for all parameters or by a function of (name, parameter), and `homes`
    in which memories states begin; `extensions` observe what the engine does, or do a part of it. `init` is the
    `ShardedInit` inside which the module was built. Buffers move to `device`. With `param_dtype`, floating-point
    parameters, and inputs of the forward if `cast_forward_inputs`, are cast to it; buffers are not, and master weights
    begin with the values before the cast.

    `ZeroDataParallel` derives from it and chooses these by settings, after `check_module`: what it chooses depends on
    the module.
    """

    guard_class: ClassVar[type[ParameterGuard]] = ParameterGuard
    """The class of what notices how parameters are read and written beside the engine."""

    def __init__(
        self,
        module: nn.Module,
        data: Axis,
        config: PartitionConfig,
        transport: Transport | TransportOf,
        homes: Homes,
        *,
        init: InitialValues | None = None,
        device: torch.device | None = None,
        param_dtype: torch.dtype | None = None,
        cast_forward_inputs: bool = True,
        extensions: Sequence[Extension] = (),
    ):
        super().__init__()
        self.module, self.config, self.data, self.homes = module, config, data, homes
        self._cast = None
        if cast_forward_inputs and param_dtype is not None:
            self._cast = partial(cast_floating_point, dtype=param_dtype)
        own = assign_parameters(module, self._unit_names())
        self.extensions = Extensions(extensions)
        self.extensions.on_wrap(module, list(own))
        self._access = UnitAccess(self.extensions)
        self.guard = self.guard_class({param: name for name, param in module.named_parameters()}, self._access)
        self._transports = Transports(transport, own.values(), config, data, homes.device)
        unit_numels = [sum(param.numel() for param in params.values()) for params in own.values()]
        numel = self._chosen_bucket_numel(unit_numels, param_dtype or next(module.parameters()).dtype)
        context = FlatContext(config, numel, homes, self.guard, SideStream(homes.device), param_dtype)
        self._make_units(own, context, init)
        if init:
            restore_parameter_tables(module)  # after the last `pop_full`
        _move_buffers(module, data, device)
        trainable = in_order_of_use(self.units.values(), module)
        self.reducer = GradientReducer(trainable, self.transports, config, self.extensions, homes)
        self.after_owned_changed()
        self.residency = Residency(self._prefetch_numel())
        self._passes = Passes(self.reducer, self.extensions)
        if config.policy.full_params is Lifetime.TRANSIENT:
            self.guard.report_attributes(module)
            scheduler = UnitScheduler(module, self._access, self.residency, self._passes, self.reducer, self.extensions)
            self._hooks: PersistentHooks = scheduler.hooks
        else:
            self._hooks = PersistentHooks(self._passes.begin_forward)
        self._hooks.handles += self._passes.watch_gradients()
        self._optimizer_ref: Callable[[], EngineOptimizer | None] = lambda: None
        self.extensions.on_built(self)

    @property
    def optimizer(self) -> EngineOptimizer | None:
        """The optimizer that uses the gradients; None before there is one, and after it has been deleted."""
        return self._optimizer_ref()

    def attach(self, optimizer: EngineOptimizer) -> None:
        """Let gradients be those of an optimizer."""
        self._optimizer_ref = weakref.ref(optimizer)

    def check_unattached(self) -> None:
        """Raise ConfigError if the model has an optimizer."""
        if self.optimizer is not None:
            raise ConfigError(
                "this model has a ZeroOptimizer already; give all optimizers to one, as in ZeroOptimizer(model, "
                "[torch.optim.SGD(rest, lr=0.1), torch.optim.AdamW(head, lr=0.01)]), or delete the other one first"
            )

    @property
    def transports(self) -> Sequence[Transport]:
        """The transports of this engine; each bucket has a copy of one of them."""
        return self._transports.opened

    @property
    def shard_axis(self) -> Axis:
        """The axis of the ranks that divide the optimizer's states. Raises ConfigError if there are several."""
        return self._transports.only("this").owners

    @property
    def replica_axis(self) -> Axis:
        """The axis of the ranks that own the same states. Raises ConfigError if there are several."""
        return self._transports.only("this").replicas

    def check_one_division(self, what: str) -> None:
        """Raise ConfigError if parameters are divided over different ranks, which `what` does not know."""
        self._transports.only(what)

    @property
    def group_size(self) -> int:
        """The number of ranks that keep all parameters together. Raises ConfigError if there are several divisions."""
        return self._transports.only("this").num_shards

    @property
    def is_rank_invariant(self) -> bool:
        """True if the sums of gradients have the same bits on any number of ranks."""
        return all(transport.is_rank_invariant for transport in self.transports)

    @property
    def units(self) -> Mapping[str, Unit]:
        """The modules whose parameters are unsharded together, by name."""
        return self._access.units

    @property
    def flats(self) -> list[FlatParameters]:
        """All flat buffers, in the order of the layout."""
        return [flat for unit in self.units.values() for flat in unit.flats]

    def wait_for_updates(self, params: Iterable[nn.Parameter] | None = None) -> None:
        """Make updated parameters, some or all, readable by what is launched after this.

        An extension may have let them be on their way. Without `params`, owned parameters and master weights may then
        be written too. Before the host writes them, call `Homes.settle`.
        """
        self.extensions.before_read(params)
        for bucket in self.buckets if params is None else ():
            bucket.params.wait_for_update()

    @property
    def buckets(self) -> list[Bucket]:
        """All buckets, in the order of the layout."""
        return [bucket for flat in self.flats for bucket in flat.buckets]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module."""
        self._hooks.begin()
        if self._cast:
            args, kwargs = self._cast((args, kwargs))
        return self.module(*args, **kwargs)

    @torch.no_grad()
    def after_owned_changed(self) -> None:
        """Tell lossy transports the new values of the owned parameters; all ranks call it.

        They are those of the master weights: copies to or from parameters may still run.
        """
        for transport in self.transports:
            if transport.is_lossy:
                buckets = [bucket for flat in self.flats if flat.transport is transport for bucket in flat.buckets]
                owned = ((own, values.to(bucket.params.own.dtype)) for bucket, own, values in slices_of(buckets))
                transport.own_changed(owned)

    def slices(self) -> Iterator[tuple[Bucket, Slice, Tensor]]:
        """Iterate over what this rank owns: (bucket, part of a parameter, its master weights)."""
        return slices_of(self.buckets)

    def register_forward_method(self, name: str, module: nn.Module | None = None) -> None:
        """Let a method of the module, or of `module` inside it, run by itself, as `forward` does.

        Its parameters are unsharded while it runs and in its backward. Its inputs are cast as those of the forward are,
        also where the forward calls it. Raises ValueError if `module` is not a part of
        this model, or has no such method. Modules that such a method calls need no registration.
        """
        owner = self.module if module is None else module
        if owner not in set(self.module.modules()) or not callable(getattr(owner, name, None)):
            raise ValueError(
                f"{name} is not a method of a module of this model; the module is a {type(owner).__name__}"
            )
        self._hooks.register_method(owner, name, self._cast)

    def accumulate(self, num_micro_batches: int | None = None) -> AbstractContextManager[None]:
        """Accumulate gradients over the backwards inside this context; the first one after it completes the step.

        Unlike with DDP's `no_sync`, each backward is still reduced if full gradients are transient. Some
        transports need the number of all micro-batches of the step, the last one included.
        """
        if num_micro_batches is not None:
            self.reducer.expect(num_micro_batches)
        return self._passes.accumulate()

    def extended(self, extension: Extended) -> AbstractContextManager[Extended]:
        """Let an extension observe the engine inside this context, which yields it."""
        return self.extensions.extended(extension)

    @contextmanager
    def gathered(self, params: Iterable[nn.Parameter] | None = None, *, modify: bool = False) -> Iterator[nn.Module]:
        """Yield the module with all of its parameters unsharded, or with `params` and those of the same units.

        All ranks must enter together. What all ranks write is kept. With `modify`, what the first rank writes into
        `params` is their value from then on, on all ranks and for the optimizer; without `params`, so are its buffers.
        A parameter that is read for a loss stays unsharded until the optimizer's step. Raises ValueError if a
        parameter is not the module's.
        """
        unit_of = self._access.unit_of
        chosen = list(unit_of if params is None else params)
        for param in chosen:
            if param not in unit_of:
                raise ValueError(f"a tensor of shape {tuple(param.shape)} is not a parameter of this model")
        # All units, also those without parameters: a forward in here may run on one rank only, and is not recorded.
        units = self.units.values() if params is None else {unit_of[param]: None for param in chosen}
        reader = object()
        self._passes.begin_read()
        for unit in units:
            unit.watch(reader)
        try:
            with torch.set_grad_enabled(torch.is_grad_enabled() and not modify):
                yield self.module
                for param in chosen if modify else ():
                    unit_of[param].flat_of[param].assign(param)
                if modify and params is None:
                    _move_buffers(self.module, self.data, None)
        finally:
            for unit in units:
                unit.stop_watch(reader)
            self.after_owned_changed()  # of what may have been written; a rank that raises takes part in it too

    @contextmanager
    def loading_masters(self) -> Iterator[None]:
        """Let master weights be written inside this context, and parameters follow them; all ranks enter it."""
        self.wait_for_updates()
        self.homes.settle()  # the host may write what is stored in its memory
        for flat in self.flats:
            flat.reshard()  # before: a transient full buffer that stayed unsharded would keep the old values
            flat.take_replaced()  # so that the parameters read what is loaded
        yield
        for flat in self.flats:
            for bucket in flat.buckets:
                bucket.params.own.copy_(bucket.master)  # returns early if both are the same memory
            flat.publish_loaded()
            # A backward whose forward has run before must raise, as in torch.
            torch.autograd.graph.increment_version(flat.params)
        self.after_owned_changed()

    def take_changes(self) -> None:
        """Let master weights follow parameters that were written in place, and the host read and write its memory."""
        self.wait_for_updates()
        if self.optimizer is not None:
            self.optimizer.take_changes()
        self.homes.settle()

    def unwrap(self, device: torch.device | None = None) -> nn.Module:
        """Return the module without this wrapper, with all of its parameters on every rank, and on `device` if given.

        All ranks must call this. Change the module, then wrap it again and make a new optimizer, whose moments begin at
        zero. This object cannot be used any more. Raises ValueError inside `gathered()`.
        """
        if any(unit.is_watched for unit in self.units.values()):
            raise ValueError("unwrap() was called inside gathered(); leave that context first")
        self._passes.begin_read()
        for unit in self.units.values():
            unit.unwrap(device)
        self._hooks.remove()
        module = self.module
        set_deferred(module, False)
        del self.module
        return module

    def before_step(self, params: Iterable[nn.Parameter]) -> None:
        """Prepare for an update of `params`: end backward, and release the units that are unsharded until a step.

        An optimizer calls this first. Raises ValueError if the module is no longer what was wrapped, and warns of
        parameters that were added to it.
        """
        self._passes.finalize()
        self.guard.check(self.module, params)
        self._access.end_step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Discard all gradients, and what a backward that raised has left.

        All ranks call it after such a backward, whose remaining reductions are launched first.
        """
        self._passes.finalize()
        self.reducer.clear()

    def end_with_engine(self, handles: Iterable[RemovableHandle]) -> None:
        """Remove hooks on the module when the engine ends, or is unwrapped."""
        self._hooks.handles += handles

    def __del__(self) -> None:
        """Let go of the module: hooks, classes of parameters, and what refers to them.

        The parts of an engine refer to each other, and so do parameters: without this, the memory of all of them would
        be freed when Python's collector of cycles runs.
        """
        parts = vars(self)
        # At the end of the process the module `sys` may be None by now; without hooks, the construction has raised.
        if not sys or sys.is_finalizing() or "_hooks" not in parts:
            return
        if "module" in parts["_modules"]:  # not unwrapped: then it may be inside another engine by now
            self._hooks.remove()
            set_deferred(self.module, False)
            self.extensions.before_read(None)  # what is under way is waited for: the memory is freed now
            for unit in self.units.values():
                unit.end()
            self.homes.settle()
        # A graph may still refer to the other parts, and its backward run.
        self.guard.end_all()
        self._passes.end()
        vars(self._hooks).clear()

    def _unit_names(self) -> list[str]:
        """Return the names of the modules whose parameters are unsharded together; "" is the whole module."""
        if self.config.policy.full_params is Lifetime.PERSISTENT:
            return [""]
        units = self.config.units
        return find_units(self.module) if units is None else named_units(self.module, units)

    def _chosen_bucket_numel(self, unit_numels: Sequence[int], dtype: torch.dtype) -> int:
        """Return the number of elements of a bucket, for units with so many elements of mostly one type."""
        return self.config.chosen_bucket_numel(sum(unit_numels), self.data.size, dtype)

    def _make_units(
        self,
        own: dict[str, dict[str, nn.Parameter]],
        context: FlatContext,
        init: InitialValues | None,
    ) -> None:
        """Create a unit for each module whose parameters are unsharded together; those that persist are the root's."""
        if init:
            self.check_one_division("ShardedInit")
        unshards = self.config.policy.full_params is Lifetime.TRANSIENT
        resident_numel = self.config.resident_numel if unshards else math.inf
        resident = {n: p for params in own.values() for n, p in params.items() if p.numel() < resident_numel}
        modules = dict(self.module.named_modules(remove_duplicate=False))
        for number, (name, params) in enumerate(own.items()):
            transient = {n: p for n, p in params.items() if n not in resident}
            owned = {Lifetime.PERSISTENT: {} if name else resident, Lifetime.TRANSIENT: transient}
            flats = [
                FlatParameters(group, lifetime, partial(_initial_values, one.axis, init), one, context)
                for lifetime, params_of_lifetime in owned.items()
                for one, params_alike in self._transports.divide(params_of_lifetime)
                for group in group_alike(params_alike)
            ]
            self._access.add(name, Unit(number, modules[name], flats, self.extensions))

    def _prefetch_numel(self) -> int:
        if self.config.prefetch_numel is not None:
            return self.config.prefetch_numel
        # The largest unit, so that the next one is always gathered ahead.
        return max(LEAST_PREFETCHED, *(unit.transient_numel for name, unit in self.units.items() if name), 0)


def _initial_values(axis: Axis, init: InitialValues | None, param: nn.Parameter) -> Tensor:
    """Return the values that a parameter which is wrapped has on the first rank of an axis."""
    values = init.pop_full(param) if init else param.data
    if is_absent(values):
        raise ValueError(
            f"a parameter of shape {tuple(param.shape)} is still sharded; pass `init=` to ZeroDataParallel"
        )
    return axis.broadcast_copy(values)


def _move_buffers(module: nn.Module, data: Axis, device: torch.device | None) -> None:
    """Give every rank the first one's buffers, on `device` if it is given."""
    for buffer in module.buffers():
        values = data.broadcast_copy(buffer)
        buffer.data = buffer.data.to(device)
        buffer.copy_(values)
