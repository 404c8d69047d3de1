"""Data parallelism that keeps only what a rank owns (ZeRO-DP, paper section 5), around any module, unchanged.

Gradients, in every stage

    a gradient    goes into its bucket; a complete bucket starts its reduction while backward goes on
    the end       buckets still open are closed, zeros for what is missing, and reduced in fixed order

Parameters, where they are transient, per unit

    forward       gather, start to gather the next units | compute | release
    backward      an output's gradient arrives: gather, start the next | compute | the input's gradient arrives:
                  release, and close the unit's buckets: what has no gradient by now counts as zero
"""

import logging
import math
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from parallel.errors import ConfigError
from parallel.mesh import Axis
from zero.access import watch_parameters
from zero.agreement import LaunchOrder
from zero.autograd import NO_BACKWARD, call_at_end_of_backward, current_backward, mark_end_of_backward, tensors_in
from zero.flat import FlatParameters, is_absent
from zero.gradients import GradientReducer
from zero.offload.chunks import search_chunk_size
from zero.offload.placement import NO_OFFLOAD, Offload, OffloadConfig
from zero.offload.planner import NUM_KEPT, Residency
from zero.sharded_init import ShardedInit
from zero.stage import STAGES, Lifetime, ShardingPolicy
from zero.unit import Itinerary, Unit, alike, assign_parameters, find_units, named_units

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ZeroConfig:
    """How model states are divided over the data-parallel ranks, and in which portions they are communicated."""

    stage: int = 2
    """0: plain data parallelism; 1: optimizer states partitioned; 2: gradients too; 3: parameters too."""
    bucket_numel: int | None = 2**25
    """C_B: elements communicated, cast or summed at once, whatever the model's size; null: all of them at once."""
    overlap: bool = True
    """Reduce gradients while backward goes on. Off gives the same bits, later."""
    accumulate: Literal["reduce", "local"] = "reduce"
    """Where gradients are partitioned: reduce in every micro-batch, or keep full gradients and reduce in the last."""
    prefetch_numel: int = 2**27
    """Where parameters are partitioned: elements of the units to come that are gathered ahead; 0 for none. Also how
    many are whole at a time while the model is built."""
    resident_numel: int = 0
    """Where parameters are partitioned: smaller ones than this stay gathered, such as norms and biases."""
    defragment: bool = True
    """M_D, where full gradients are transient: what they pass through, and what a rank owns of them, is allocated once;
    false: in backward, until they have passed and until the update. That leaves more memory to activations and more
    work to the allocator."""
    units: tuple[str, ...] | None = None
    """Modules that are gathered at a time, by patterns such as blocks.*; null: the elements of the module lists."""

    def __post_init__(self) -> None:
        if self.stage not in STAGES:
            raise ConfigError(f"zero.stage={self.stage} does not exist; choose {', '.join(map(str, STAGES))}")
        if self.bucket_numel is not None and self.bucket_numel < 1:
            raise ConfigError(
                f"zero.bucket_numel={self.bucket_numel} is below 1; choose 1 or more, or null for one bucket"
            )
        for name in ("prefetch_numel", "resident_numel"):
            if getattr(self, name) < 0:
                raise ConfigError(f"zero.{name}={getattr(self, name)} is below 0; choose 0 for none")

    @property
    def policy(self) -> ShardingPolicy:
        """The stage's row of the table, with what the other settings change of it."""
        return self.at_stage(self.stage)

    def at_stage(self, stage: int) -> ShardingPolicy:
        """What these settings would make of another stage."""
        row = replace(STAGES[stage], owned_grads=Lifetime.PERSISTENT if self.defragment else Lifetime.TRANSIENT)
        return replace(row, full_grads=Lifetime.PERSISTENT) if self.accumulate == "local" else row


class ZeroDataParallel(nn.Module):
    """Wrap a module so that its gradients are averaged over `data` and its states are divided as the stage says.

    Put `with model.accumulate():` around every micro-batch but the last. All ranks start with the parameters and
    buffers of the first. `requires_grad` and types are read here, once: change them before wrapping. A module built
    inside a `ShardedInit` comes with its `init`; with `device` it moves there, a unit at a time.
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
        self._data, self._stage = data, config.policy
        self.shard_axis, self.replica_axis = axes = self._stage.axes(data)
        if self._stage.full_params is Lifetime.PERSISTENT and offload.leaves == {"parameters"}:
            raise ConfigError(
                f"offload.states=[parameters] leaves nothing to offload at zero.stage={config.stage}, whose parameters "
                "stay whole; add optimizer, or choose stage 3"
            )
        self.offload = Offload(device or next(module.parameters()).device, offload)
        self.residency = Residency(self.offload, config.prefetch_numel)
        self._units = self._make_units(config, init)
        if init:
            init.close(module)
        _move_buffers(module, data, device)
        self._unit_of = {param: unit for unit in self._units.values() for param in unit.flat_of}
        trainable = [flat for flat in self.flats if flat.is_trainable]
        self.reducer = GradientReducer(
            trainable, axes, self._stage, config.overlap, self._before_reduction, self.offload
        )
        self.residency.check_units(self._units.values(), self.reducer.staging_bytes)
        self._forward_order, self._backward_order = Itinerary(), Itinerary()
        self._running: list[Unit] = []  # calls of units in forward, the innermost last
        self._backward = NO_BACKWARD
        self._is_last_microbatch = True
        self._awaits_backward = False  # a forward has run since the last one
        self._install_hooks()

    @property
    def flats(self) -> list[FlatParameters]:
        return [flat for unit in self._units.values() for flat in unit.flats]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self._launch_order.restart()
        self._forward_order.restart()
        self.residency.restart()
        self._running.clear()  # a forward that raised has left its calls here
        self._awaits_backward |= torch.is_grad_enabled()
        return self.module(*args, **kwargs)

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        """Backwards in here add to the gradients of this step; the first one outside completes them."""
        self._awaits_backward = self._is_last_microbatch = False
        try:
            yield
            if self._awaits_backward and self._reduces_now:
                self._reduce_without_backward()
        finally:
            self._is_last_microbatch = True

    def complete_gradients(self) -> None:
        """For a step without a backward outside `accumulate()`."""
        if not self.reducer.is_complete:
            self._reduce_without_backward()

    def _reduce_without_backward(self) -> None:
        """This rank's micro-batch reached no parameter; others' may have."""
        self.reducer.begin(may_launch=True, completes=self._is_last_microbatch)
        self.reducer.finish()

    @contextmanager
    def gathered(self, params: Iterable[nn.Parameter] | None = None, *, modify: bool = False) -> Iterator[nn.Module]:
        """The module with all of its parameters in place, or with `params` and those of the same units.

        With `modify` what the first rank writes into `params` is theirs from then on, on all ranks and for the
        optimizer. Raises ValueError for a parameter that is not the module's.
        """
        chosen = list(self._unit_of if params is None else params)
        for param in chosen:
            if param not in self._unit_of:
                raise ValueError(f"a tensor of shape {tuple(param.shape)} is not a parameter of this model")
        units = dict.fromkeys(self._unit_of[param] for param in chosen)
        visitor = object()
        for unit in units:
            unit.gather(visitor)
        try:
            with torch.set_grad_enabled(torch.is_grad_enabled() and not modify):
                yield self.module
                for param in chosen if modify else ():
                    self._unit_of[param].flat_of[param].assign(param, self._data)
        finally:
            for unit in units:
                unit.release(visitor)

    def _make_units(self, config: ZeroConfig, init: ShardedInit | None) -> dict[str, Unit]:
        """Each unit holds the buffers of its own parameters; what persists belongs to the root, the whole model."""
        own = assign_parameters(self.module, self._unit_names(config))
        self._launch_order = LaunchOrder(self._data, list(own))
        is_transient = self._stage.full_params is Lifetime.TRANSIENT
        resident_numel = config.resident_numel if is_transient else math.inf
        resident = {n: p for params in own.values() for n, p in params.items() if p.numel() < resident_numel}
        numel = self._bucket_numel(config, own)

        def values_of(param: nn.Parameter) -> Tensor:
            """The first rank's."""
            values = init.take(param) if init else param.data
            if is_absent(values):
                raise ValueError(
                    f"a parameter of shape {tuple(param.shape)} is still sharded; pass `init=` to ZeroDataParallel"
                )
            return self._data.values_of_first(values)

        units: dict[str, Unit] = {}
        for name, params in own.items():
            transient = {n: p for n, p in params.items() if n not in resident}
            held = {Lifetime.PERSISTENT: {} if name else resident, Lifetime.TRANSIENT: transient}
            flats = [
                FlatParameters(group, self.shard_axis, lifetime, numel, values_of, self.offload)
                for lifetime, params_held in held.items()
                for group in alike(params_held)
            ]
            units[name] = Unit(flats, partial(self._launch_order.before_gather, len(units)))
        return units

    def _bucket_numel(self, config: ZeroConfig, own: dict[str, dict[str, nn.Parameter]]) -> int:
        """One bucket for all, where none is configured; chunks of a searched size for Gemini."""
        numels = [sum(param.numel() for param in params.values()) for params in own.values()]
        if self.offload.config.mode == "auto":
            chunk = search_chunk_size(numels, self.offload.config, self.shard_axis.size)
            logger.info("offload: chunks of %d elements, %d unfilled", chunk.numel, chunk.unfilled_numel)
            return chunk.numel
        return config.bucket_numel or sum(numels)

    def _unit_names(self, config: ZeroConfig) -> list[str]:
        if self._stage.full_params is Lifetime.PERSISTENT:
            return [""]
        return find_units(self.module) if config.units is None else named_units(self.module, config.units)

    def _install_hooks(self) -> None:
        if self._stage.full_params is Lifetime.TRANSIENT:
            for name, unit in self._units.items():
                module = self.module.get_submodule(name)
                module.register_forward_pre_hook(partial(self._before_forward, unit), with_kwargs=True)
                module.register_forward_hook(partial(self._after_forward, unit))
            watch_parameters(self.module, self._on_access)
        # Python's collector does not see what torch's hooks of this kind refer to: the engine would never be freed.
        on_gradient = weakref.WeakMethod(self._on_gradient)
        for flat in self.reducer.buckets:
            for param in flat.params:
                param.register_post_accumulate_grad_hook(lambda param: (alive := on_gradient()) and alive(param))

    def _before_forward(self, unit: Unit, _module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        if current_backward() == NO_BACKWARD:
            self._visit(unit, self._forward_order)
            self._running.append(unit)
            unit.num_open_calls += torch.is_grad_enabled()
        else:  # a recomputation: what it visits has its place in the order already
            unit.gather()
        return mark_end_of_backward((args, kwargs), partial(self._after_backward, unit))

    def _after_forward(self, unit: Unit, _module: nn.Module, _args: tuple, output: Any) -> None:
        if current_backward() == NO_BACKWARD:
            self._running.pop()
        for tensor in tensors_in(output):
            if isinstance(tensor, nn.Parameter):  # handed to whoever called: a bias to be added later, say
                self._on_access(tensor)
        # Not in its own backward, which recomputes and is about to read.
        if unit.backward != current_backward() and not self._is_kept(unit):
            unit.release()
        for tensor in tensors_in(output):
            if tensor.grad_fn is not None:
                tensor.register_hook(lambda _grad: self._before_backward(unit))

    def _is_kept(self, unit: Unit) -> bool:
        """[Note: keeping]"""
        if not self.residency.may_keep or current_backward() != NO_BACKWARD or not torch.is_grad_enabled():
            return False
        return self._forward_order.is_complete and unit in self._backward_order.first(NUM_KEPT)

    # [Note: keeping] The root and the unit that runs last are the first that backward reads. They stay in between, from
    # the second step on, when that is known: to gather them again would cost traffic and save no memory, since backward
    # begins with both of them in place.

    def _on_access(self, param: nn.Parameter) -> None:
        """A module's attribute has been read. [Note: borrowing]"""
        lender = self._unit_of[param]
        if self._running and lender is not self._running[-1] and current_backward() == NO_BACKWARD:
            self._running[-1].borrow(lender)

    # [Note: borrowing] A parameter may be read by a unit that is not its own: a parent that multiplies with a child's
    # weight, or adds a bias that the child returned. The reader then holds the owner's parameters until it is released
    # itself, and from then on whenever it runs, in backward too, where autograd reads what it saved. The owner's
    # buckets stay open until the end of backward.

    def _before_backward(self, unit: Unit) -> None:
        self._enter_backward()
        if unit.backward != current_backward():
            unit.backward = current_backward()
            self._visit(unit, self._backward_order)

    def _after_backward(self, unit: Unit) -> None:
        """The gradient of the unit's input is known. [Note: closing]"""
        unit.release()
        unit.num_open_calls -= 1
        if unit.num_open_calls == 0 and not unit.is_lent:  # a borrower's gradients may come later
            self.reducer.close(unit.flat_of, may_launch=self._reduces_now)

    # [Note: closing] Ranks meet in the order in which each launches its collectives. A parameter that only some ranks
    # used would complete its bucket there now and elsewhere at the very end, with gathers in between: ranks would wait
    # for each other for ever. So a unit's buckets are complete when its backward ends, used or not, on every rank, and
    # never before, whatever gradients have come. The root, units called without differentiable inputs and calls left
    # over from another forward end with the backward. Where parameters persist nothing is gathered in backward: there a
    # bucket may go as soon as its gradients have come.

    def _on_gradient(self, param: nn.Parameter) -> None:
        # Releases nothing: with frozen weights this runs before the input's gradient has read the parameters.
        grad, param.grad = param.grad, None  # first of all: what a failed backward leaves would be added to the next
        assert grad is not None
        self._enter_backward()
        closes = self._stage.full_params is Lifetime.PERSISTENT  # else units do [Note: closing]
        self.reducer.accept(param, grad, closes=closes, may_launch=self._reduces_now)

    def _visit(self, unit: Unit, order: Itinerary) -> None:
        """Gather the unit, and start to gather as many of those that followed it last time as the budget allows."""
        self.residency.before_visit(unit, "forward" if order is self._forward_order else "backward")
        unit.gather()
        self.residency.after_visit(unit)
        numel_left = self.residency.prefetch_numel
        for following in order.visit(unit):
            numel_left -= following.transient_numel
            if numel_left < 0:
                break
            following.start_gather()

    def _before_reduction(self, bucket: int) -> None:
        if self._stage.full_params is Lifetime.TRANSIENT:  # elsewhere the order is fixed, whatever the model does
            self._launch_order.before_reduction(bucket)

    @property
    def _reduces_now(self) -> bool:
        return self._stage.full_grads is Lifetime.TRANSIENT or self._is_last_microbatch

    def _enter_backward(self) -> None:
        if self._backward != current_backward():
            self._backward, self._awaits_backward = current_backward(), False
            self._backward_order.restart()
            self.reducer.begin(may_launch=self._reduces_now, completes=self._is_last_microbatch)
            call_at_end_of_backward(self._leave_backward)

    def _leave_backward(self) -> None:
        for unit in self._units.values():
            unit.release()
            unit.num_open_calls = 0
        if self._reduces_now:
            self.reducer.finish()


def _move_buffers(module: nn.Module, data: Axis, device: torch.device | None) -> None:
    """Every rank begins with the first one's buffers."""
    for buffer in module.buffers():
        values = data.values_of_first(buffer)
        buffer.data = buffer.data.to(device or buffer.device)
        buffer.copy_(values)
