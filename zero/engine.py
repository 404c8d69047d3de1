"""Data parallelism in which each rank keeps only what it owns (ZeRO-DP, paper section 5), around any unchanged module.

a gradient arrives       it is written into its buckets; a complete bucket is reduced while backward is still running
the end of backward      buckets that are not complete are reduced too, with zeros for what is missing
transient parameters     are unsharded a unit at a time: see zero/units/scheduler.py
"""

import math
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from parallel.errors import ConfigError
from parallel.mesh import Axis
from zero.bucket import Bucket
from zero.config import ZeroConfig
from zero.flat import FlatParameters, is_absent
from zero.gradients import GradientReducer
from zero.offload.chunks import choose_bucket_numel
from zero.offload.placement import NO_OFFLOAD, Offload, OffloadConfig
from zero.offload.planner import PlacementPlanner, UnitOrders
from zero.sharded_init import ShardedInit
from zero.stage import Lifetime
from zero.torch_internals import NO_GRAPH_TASK, call_at_end_of_backward, current_graph_task
from zero.units.agreement import LaunchOrder
from zero.units.execution_order import ExecutionOrder
from zero.units.scheduler import UnitScheduler
from zero.units.unit import Unit, assign_parameters, find_units, group_alike, named_units


class ZeroDataParallel(nn.Module):
    """A module whose gradients are averaged over `data`, and whose states are partitioned as the stage says.

    Run every micro-batch but the last inside `with model.accumulate():`. All ranks start with the parameters and
    buffers of the first rank. `requires_grad` and dtypes are read once, here: change them before wrapping. Pass `init`
    if the module was built inside a `ShardedInit`. With `device`, the module moves there, a unit at a time.
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
        self.module = module
        self._data, self._policy = data, config.policy
        self._unshards = self._policy.full_params is Lifetime.TRANSIENT
        self.shard_axis, self.replica_axis = axes = self._policy.axes(data)
        if not self._unshards and offload.offloaded_states == {"parameters"}:
            raise ConfigError(
                f"OffloadConfig.states=[parameters] has no effect at ZeroConfig.stage={config.stage}, which keeps full "
                "parameters on the accelerator; add optimizer, or choose stage 3"
            )
        self.offload = Offload(device or next(module.parameters()).device, offload)
        orders: UnitOrders = {"forward": ExecutionOrder(), "backward": ExecutionOrder()}
        self.planner = PlacementPlanner(self.offload, config.prefetch_numel, orders)
        self._units = self._make_units(config, init)
        if init:
            init.finish(module)
        _move_buffers(module, data, device)
        trainable = [bucket for flat in self.flats if flat.is_trainable for bucket in flat.buckets]
        # If parameters persist, the order of launches is fixed, whatever the model does: there is nothing to check.
        before_launch = self._launch_order.before_reduction if self._unshards else lambda _bucket: None
        self.reducer = GradientReducer(trainable, axes, self._policy, config.overlap, before_launch, self.offload)
        self.planner.check_units(self._units.values(), self.reducer.staging.num_bytes)
        self._scheduler = UnitScheduler(self._units, orders, self.planner, self._enter_backward, self.reducer.close)
        self._graph_task = NO_GRAPH_TASK
        self._is_last_microbatch = True
        self._awaits_backward = False  # a forward has run since the last backward
        self._install_hooks()

    @property
    def flats(self) -> list[FlatParameters]:
        """All flat buffers, in the order of the layout."""
        return [flat for unit in self._units.values() for flat in unit.flats]

    @property
    def buckets(self) -> list[Bucket]:
        """All buckets, in the order of the layout."""
        return [bucket for flat in self.flats for bucket in flat.buckets]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module."""
        self._launch_order.restart()
        self._scheduler.start_forward()
        self._awaits_backward |= torch.is_grad_enabled()
        return self.module(*args, **kwargs)

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        """Accumulate gradients over the backwards inside this context; the first one after it completes the step.

        Unlike with DDP's `no_sync`, each backward is still reduced if full gradients are transient.
        """
        self._awaits_backward = self._is_last_microbatch = False
        try:
            yield
            # This rank's micro-batch reached no parameter, but other ranks' may have: take part in their reduction.
            if self._awaits_backward and self.reducer.reduces(is_last=False):
                self.reducer.begin(is_last=False)
                self.reducer.end()
        finally:
            self._is_last_microbatch = True

    @contextmanager
    def gathered(self, params: Iterable[nn.Parameter] | None = None, *, modify: bool = False) -> Iterator[nn.Module]:
        """Yield the module with all of its parameters unsharded, or with `params` and those of the same units.

        With `modify`, what the first rank writes into `params` is their value from then on, on all ranks and for the
        optimizer. Raises ValueError if a parameter is not the module's.
        """
        chosen = list(self._scheduler.unit_of if params is None else params)
        for param in chosen:
            if param not in self._scheduler.unit_of:
                raise ValueError(f"a tensor of shape {tuple(param.shape)} is not a parameter of this model")
        units = dict.fromkeys(self._scheduler.unit_of[param] for param in chosen)
        holder = object()
        for unit in units:
            unit.unshard(holder)
        try:
            with torch.set_grad_enabled(torch.is_grad_enabled() and not modify):
                yield self.module
                for param in chosen if modify else ():
                    self._scheduler.unit_of[param].flat_of[param].assign(param, self._data)
        finally:
            for unit in units:
                unit.reshard(holder)

    def _make_units(self, config: ZeroConfig, init: ShardedInit | None) -> dict[str, Unit]:
        """Create a unit for each module whose parameters are unsharded together; those that persist are the root's."""
        own = assign_parameters(self.module, self._unit_names(config))
        self._launch_order = LaunchOrder(self._data, list(own))
        resident_numel = config.resident_numel if self._unshards else math.inf
        resident = {n: p for params in own.values() for n, p in params.items() if p.numel() < resident_numel}
        unit_numels = [sum(param.numel() for param in params.values()) for params in own.values()]
        numel = choose_bucket_numel(config.bucket_numel, unit_numels, self.offload.config, self.shard_axis.size)

        def values_of(param: nn.Parameter) -> Tensor:
            values = init.pop_full(param) if init else param.data
            if is_absent(values):
                raise ValueError(
                    f"a parameter of shape {tuple(param.shape)} is still sharded; pass `init=` to ZeroDataParallel"
                )
            return self._data.broadcast_copy(values)

        units: dict[str, Unit] = {}
        for name, params in own.items():
            transient = {n: p for n, p in params.items() if n not in resident}
            held = {Lifetime.PERSISTENT: {} if name else resident, Lifetime.TRANSIENT: transient}
            flats = [
                FlatParameters(group, self.shard_axis, lifetime, numel, self._policy, values_of, self.offload)
                for lifetime, params_held in held.items()
                for group in group_alike(params_held)
            ]
            units[name] = Unit(flats, partial(self._launch_order.before_gather, len(units)))
        return units

    def _unit_names(self, config: ZeroConfig) -> list[str]:
        if self._unshards:
            return find_units(self.module) if config.units is None else named_units(self.module, config.units)
        return [""]

    def _install_hooks(self) -> None:
        if self._unshards:
            self._scheduler.install_hooks(self.module)
        # A weak reference: the garbage collector does not follow references of such hooks, and would never free the
        # engine.
        on_gradient = weakref.WeakMethod(self._on_gradient)
        for flat in self.flats:
            for param in flat.params if flat.is_trainable else ():
                param.register_post_accumulate_grad_hook(lambda param: (alive := on_gradient()) and alive(param))

    def _on_gradient(self, param: nn.Parameter) -> None:
        # First: the gradient of a backward that fails must not stay in `param.grad`, or it is added to the next.
        grad, param.grad = param.grad, None
        assert grad is not None
        self._enter_backward()
        # Nothing is resharded here: with frozen weights this runs before the input's gradient has read the parameters.
        self.reducer.accept(param, grad)

    def _enter_backward(self) -> None:
        """Begin a backward, unless it has begun already: every gradient and every unit calls this first."""
        if self._graph_task != current_graph_task():
            self._graph_task, self._awaits_backward = current_graph_task(), False
            self._scheduler.start_backward()
            self.reducer.begin(self._is_last_microbatch)
            call_at_end_of_backward(self._leave_backward)

    def _leave_backward(self) -> None:
        # Units first: their memory is free for the reductions that are still to be launched.
        self._scheduler.end_backward()
        self.reducer.end()


def _move_buffers(module: nn.Module, data: Axis, device: torch.device | None) -> None:
    """Give every rank the first one's buffers, on `device`."""
    for buffer in module.buffers():
        values = data.broadcast_copy(buffer)
        buffer.data = buffer.data.to(device or buffer.device)
        buffer.copy_(values)
