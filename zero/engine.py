"""Data parallelism in which each rank keeps only what it owns (ZeRO-DP, paper section 5), around any unchanged module.

a gradient arrives       it is written into its buckets; a complete bucket is reduced while backward is still running
the end of backward      buckets that are not complete are reduced too, with zeros for what is missing
transient parameters     are unsharded a unit at a time: see zero/units/scheduler.py
"""

import logging
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from parallel.autograd_internals import restore_parameter_tables
from parallel.errors import ConfigError
from parallel.mesh import Axis
from parallel.tensor.gradient_sums import set_deferred
from zero.buckets.bucket import Bucket
from zero.buckets.flat import FlatContext, FlatParameters, is_absent
from zero.buckets.gradients import GradientReducer
from zero.buckets.guarded_parameter import GuardedParameter, ParameterGuard, changes
from zero.gemini.chunks import search_chunk_size
from zero.gemini.planner import PlacementPlanner
from zero.memory.placement import NO_OFFLOAD, Offload, OffloadConfig
from zero.order.agreement import LaunchOrder
from zero.partition.config import ZeroConfig
from zero.partition.stage import Lifetime
from zero.sharded_init import ShardedInit
from zero.units.access import UnitAccess
from zero.units.hooks import Hook, hook_readers
from zero.units.passes import Passes
from zero.units.residency import FixedResidency, Residency
from zero.units.scheduler import UnitScheduler
from zero.units.unit import Unit, assign_parameters, find_units, group_alike, named_units

logger = logging.getLogger(__name__)

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
        self.module, self.config, self.data = module, config, data
        unshards = config.policy.full_params is Lifetime.TRANSIENT
        if not unshards and offload.offloaded_states == {"parameters"}:
            raise ConfigError(
                f"OffloadConfig.states=[parameters] has no effect at ZeroConfig.stage={config.stage}, which keeps full "
                "parameters on the accelerator; add optimizer, or choose stage 3"
            )
        self.offload = Offload(device or next(module.parameters()).device, offload)
        names = [""]
        if unshards:
            names = find_units(module) if config.units is None else named_units(module, config.units)
        own = assign_parameters(module, names)
        launch_order = LaunchOrder(config.policy.compared_axis(data), list(own))
        self._access = UnitAccess()
        self._guard = ParameterGuard({param: name for name, param in module.named_parameters()}, self._access)
        axes = config.policy.axes(data)
        context = FlatContext(config, axes[0], self._bucket_numel(own), self.offload, self._guard)
        self._make_units(own, context, partial(_initial_values, data, init), launch_order)
        if init:
            restore_parameter_tables(module)  # after the last `pop_full`
        _move_buffers(module, data, device)
        trainable = [bucket for flat in self.flats if flat.is_trainable for bucket in flat.buckets]
        self.reducer = GradientReducer(trainable, axes, config, launch_order, self.offload)
        self.planner = self._residency()
        self._passes = Passes(self.reducer, launch_order)
        self._handles = [part.register_load_state_dict_pre_hook(Hook(refuse_assign)) for part in module.modules()]
        self._handles += self._passes.watch_gradients()
        before_forward: Callable[[], None] = self._passes.begin_forward
        self._scheduler: UnitScheduler | None = None
        if unshards:
            self._scheduler = UnitScheduler(module, self._access, self.planner, self._passes, self.reducer)
            # That of the module itself begins the forward, also without this wrapper.
            before_forward = self._scheduler.hooks.enclose_root
        elif config.overlap_gather:
            self._handles += hook_readers(module, self.wait_for_updates)
        self._before_forward = torch.compiler.disable(before_forward)

    @property
    def shard_axis(self) -> Axis:
        """The axis along which states are divided, and gradients reduce-scattered."""
        return self.reducer.axes[0]

    @property
    def replica_axis(self) -> Axis:
        """The axis of the ranks that own the same states."""
        return self.reducer.axes[1]

    @property
    def flats(self) -> list[FlatParameters]:
        """All flat buffers, in the order of the layout."""
        return [flat for unit in self._access.units.values() for flat in unit.flats]

    def params_by_unit(self) -> list[list[nn.Parameter]]:
        """Return the parameters that are unsharded together, for each unit that has parameters."""
        return [list(unit.flat_of) for unit in self._access.units.values() if unit.flat_of]

    def wait_for_updates(self, params: Iterable[nn.Parameter] | None = None) -> None:
        """Make updated parameters, some or all, readable by what is launched after this.

        They may still be on their way with `overlap_gather`.
        """
        for flat in self.flats:
            flat.wait_for_updates(params)

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
        if self._scheduler is not None:
            self._scheduler.hooks.register_method(owner, name)

    def accumulate(self) -> AbstractContextManager[None]:
        """Accumulate gradients over the backwards inside this context; the first one after it completes the step.

        Unlike with DDP's `no_sync`, each backward is still reduced if full gradients are transient.
        """
        return self._passes.accumulate()

    @contextmanager
    def gathered(self, params: Iterable[nn.Parameter] | None = None, *, modify: bool = False) -> Iterator[nn.Module]:
        """Yield the module with all of its parameters unsharded, or with `params` and those of the same units.

        All ranks must enter together. What all ranks write is kept. With `modify`, what the first rank writes into
        `params` is their value from then on, on all ranks and for the optimizer. A parameter that is read for a loss
        stays unsharded until the optimizer's step. Raises ValueError if a parameter is not the module's.
        """
        unit_of = self._access.unit_of
        chosen = list(unit_of if params is None else params)
        for param in chosen:
            if param not in unit_of:
                raise ValueError(f"a tensor of shape {tuple(param.shape)} is not a parameter of this model")
        # All units, also those without parameters: a forward in here may run on one rank only, and is not recorded.
        units = self._access.units.values() if params is None else {unit_of[param]: None for param in chosen}
        reader = object()
        self._passes.begin_read()
        for unit in units:
            unit.watch(reader)
        try:
            with torch.set_grad_enabled(torch.is_grad_enabled() and not modify):
                yield self.module
                for param in chosen if modify else ():
                    unit_of[param].flat_of[param].assign(param, self.data)
        finally:
            for unit in units:
                unit.stop_watch(reader)

    def unwrap(self, device: torch.device | None = None) -> nn.Module:
        """Return the module without this wrapper, with all of its parameters on every rank, and on `device` if given.

        All ranks must call this. Change the module, then wrap it again and make a new optimizer, whose moments begin at
        zero. This object cannot be used any more.
        """
        self._passes.begin_read()
        for unit in self._access.units.values():
            unit.unwrap(device)
        for handle in self._handles:
            handle.remove()
        if self._scheduler is not None:
            self._scheduler.hooks.remove()
            restore_parameter_tables(self.module)
        module = self.module
        set_deferred(module, False)
        del self.module
        return module

    def before_step(self, params: Iterable[nn.Parameter]) -> None:
        """Prepare for an update of `params`; an optimizer calls this first.

        Raises ValueError if the module is no longer what was wrapped, and warns of parameters that were added to it.
        """
        self._passes.finalize()
        self._guard.check(self.module, params)
        self._access.end_step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Discard all gradients, as after a backward that failed."""
        self.reducer.clear()

    def __deepcopy__(self, _memo: dict[int, Any]) -> NoReturn:
        raise TypeError(
            "a ZeroDataParallel cannot be copied; copy the module inside it, in `with model.gathered() as module:`"
        )

    def _bucket_numel(self, own: dict[str, dict[str, nn.Parameter]]) -> int:
        """Return the number of elements of a bucket, for units with these parameters."""
        unit_numels = [sum(param.numel() for param in params.values()) for params in own.values()]
        axes = self.config.policy.axes(self.data)
        if self.offload.config.mode == "auto":
            chunk = search_chunk_size(unit_numels, self.offload.config, axes[0].size)
            logger.info("offload: chunks of %d elements, %d unfilled", chunk.numel, chunk.unfilled_numel)
            return chunk.numel
        dtype = next(self.module.parameters()).dtype.to_real()
        return self.config.chosen_bucket_numel(sum(unit_numels), self.data.size, dtype)

    def _make_units(
        self,
        own: dict[str, dict[str, nn.Parameter]],
        context: FlatContext,
        values_of: Callable[[nn.Parameter], Tensor],
        launch_order: LaunchOrder,
    ) -> None:
        """Create a unit for each module whose parameters are unsharded together; those that persist are the root's."""
        unshards = self.config.policy.full_params is Lifetime.TRANSIENT
        resident_numel = self.config.resident_numel if unshards else math.inf
        resident = {n: p for params in own.values() for n, p in params.items() if p.numel() < resident_numel}
        for number, (name, params) in enumerate(own.items()):
            transient = {n: p for n, p in params.items() if n not in resident}
            owned = {Lifetime.PERSISTENT: {} if name else resident, Lifetime.TRANSIENT: transient}
            flats = [
                FlatParameters(group, lifetime, values_of, context)
                for lifetime, params_of_lifetime in owned.items()
                for group in group_alike(params_of_lifetime)
            ]
            before_gather = partial(launch_order.before_gather, number)
            self._access.add(name, Unit(self.module.get_submodule(name), flats, before_gather))

    def _residency(self) -> Residency:
        """Return what decides which units are prefetched and kept: Gemini, if there is a budget of memory."""
        units = self._access.units
        prefetch_numel = self.config.prefetch_numel
        if prefetch_numel is None:  # the largest unit, so that the next one is always gathered ahead
            prefetch_numel = max(LEAST_PREFETCHED, *(unit.transient_numel for name, unit in units.items() if name), 0)
        if self.offload.config.mode != "auto" and self.offload.config.accelerator_memory_gb is None:
            return FixedResidency(prefetch_numel)
        planner = PlacementPlanner(self.offload, prefetch_numel)
        planner.check_units(units.values(), self.reducer.staging.num_bytes + self.reducer.host_staging.num_bytes)
        return planner

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
