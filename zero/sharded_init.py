"""Initialization of a model straight into shards: a parameter is unsharded only while something uses it.

nn.Linear(...)              new parameters are unsharded
more and more of them       the least recently used are sharded: each rank keeps 1/N of them
initialize, tie, cast, load reading a module's parameters materializes them again, with the values they had
ZeroDataParallel(...)       each unit's parameters are materialized once more and copied into the unit's buffer
"""

import copy
import math
from collections import deque
from collections.abc import Iterable
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from parallel.instruments.fake_tensors import real_tensors
from parallel.instruments.memory_tracker import TensorKind, tagged
from parallel.mesh import Axis
from zero.flat import absent
from zero.layout import overlap
from zero.offload.placement import NO_OFFLOAD, OffloadConfig, Placement
from zero.stage import Lifetime, ShardingPolicy
from zero.torch_internals import replace_parameter_table

NUM_RECENT_MODULES = 4  # modules whose parameters stay unsharded: an expression may use those of several


class ShardedInit:
    """A context in which any model can be built that is larger than the memory of a device.

    Build the model inside `with ShardedInit(data, config.policy) as init:`, then pass `init` to `ZeroDataParallel`.
    The model gets the values that it would have had outside, on the first rank: all ranks draw from that rank's random
    state. Every rank must build the same model. `unsharded_numel` limits the elements that are unsharded at a time,
    beside those of the `NUM_RECENT_MODULES` modules that were used last. If full parameters persist, none is sharded.
    Shards are stored where `offload` places them.
    """

    def __init__(
        self, data: Axis, policy: ShardingPolicy, unsharded_numel: int = 2**26, offload: OffloadConfig = NO_OFFLOAD
    ):
        self._data = data
        self._is_on_host = offload.initial_placement("parameters") is Placement.HOST
        self._axis, _ = policy.axes(data)
        self._unsharded_numel = unsharded_numel if policy.full_params is Lifetime.TRANSIENT else math.inf
        self._unsharded: dict[nn.Parameter, int] = {}  # numel of each; the most recently used parameter is the last
        self._recent: deque[dict[nn.Parameter, None]] = deque(maxlen=NUM_RECENT_MODULES)
        self._shards: dict[nn.Parameter, Tensor] = {}
        self._is_open = False

    def __enter__(self) -> Self:
        self._is_open = self._unsharded_numel != math.inf
        self._hook = register_module_parameter_registration_hook(self._before_registration)
        self._own_random_states = _share_random_states(self._data)
        return self

    def __exit__(self, _type: type | None, _error: BaseException | None, _traceback: TracebackType | None) -> None:
        # From here on, reading a module's parameters does not materialize them.
        self._is_open = False
        self._hook.remove()
        for generator, state in self._own_random_states.items():
            generator.set_state(state)
        for param in list(self._unsharded):
            self._shard(param)

    def materialize(self, params: Iterable[nn.Parameter | None]) -> None:
        """Unshard the parameters of one module, and shard the least recently used ones if too many are unsharded."""
        if not self._is_open:
            return
        used = dict.fromkeys(param for param in params if param is not None and not param.is_meta)
        for param in used:
            self._unshard(param)
        if used not in self._recent:
            self._recent.append(used)
        excess_numel = sum(self._unsharded.values()) - self._unsharded_numel
        for param, numel in list(self._unsharded.items()):
            if excess_numel <= 0:
                break
            if not any(param in params for params in self._recent):
                self._shard(param)
                excess_numel -= numel

    def pop_full(self, param: nn.Parameter) -> Tensor:
        """Unshard a parameter for the last time and return its values; after that its memory belongs to the caller."""
        self._unshard(param)
        del self._unsharded[param]
        return param.data

    def finish(self, module: nn.Module) -> None:
        """Replace the modules' tables of parameters by plain dictionaries, after all parameters have been taken."""
        for submodule in module.modules():
            replace_parameter_table(submodule, dict)

    def _before_registration(self, module: nn.Module, _name: str, _param: nn.Parameter) -> None:
        replace_parameter_table(
            module,
            lambda table: table if isinstance(table, MaterializingParameters) else MaterializingParameters(table, self),
        )

    def _unshard(self, param: nn.Parameter) -> None:
        """Gather a parameter if it is sharded, and note it as the most recently used."""
        if (shard := self._shards.pop(param, None)) is not None:
            shard = shard.to(self._axis.communication_device(param))
            full = shard.new_empty(self._axis.size * shard.numel())
            self._axis.all_gather(shard, out=full).wait()
            param.data = full[: param.numel()].view(param.shape).to(param.device)
        self._unsharded.pop(param, None)
        self._unsharded[param] = param.numel()

    def _shard(self, param: nn.Parameter) -> None:
        """Keep one of `axis.size` equal stretches of the flat parameter, the last ones padded, and free the rest."""
        flat = param.data.reshape(-1)
        numel = max(1, math.ceil(flat.numel() / self._axis.size))
        own = overlap(range(self._axis.rank * numel, (self._axis.rank + 1) * numel), range(flat.numel()))
        shard = flat.new_zeros(numel, device="cpu" if self._is_on_host else None)
        if self._is_on_host:
            tagged(TensorKind.PARAMETERS, shard, on_host=True)
        shard[: len(own)].copy_(flat[own.start : own.stop])
        self._shards[param] = shard
        param.data = absent(param.data).expand(param.shape)
        del self._unsharded[param]


class MaterializingParameters(dict[str, Any]):
    """The dictionary `_parameters` of a module inside `ShardedInit`: reading it materializes all parameters in it."""

    def __init__(self, params: dict[str, Any], init: ShardedInit):
        super().__init__(params)
        self._init = init
        self._materialize()

    def _materialize(self) -> None:
        self._init.materialize(super().values())

    def __getitem__(self, name: str) -> Any:
        self._materialize()
        return super().__getitem__(name)

    def __setitem__(self, name: str, param: Any) -> None:
        super().__setitem__(name, param)
        self._materialize()

    def items(self) -> Any:
        self._materialize()
        return super().items()

    def values(self) -> Any:
        self._materialize()
        return super().values()

    def __deepcopy__(self, memo: dict[int, Any]) -> "MaterializingParameters":
        return MaterializingParameters({name: copy.deepcopy(param, memo) for name, param in self.items()}, self._init)

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self.items()),)


@real_tensors()
def _share_random_states(data: Axis) -> dict[torch.Generator, Tensor]:
    """Set every rank's random generators to the first rank's states.

    Returns the former states of this rank's generators that were different.
    """
    generators = [torch.default_generator]
    if torch.cuda.is_initialized():
        generators.append(torch.cuda.default_generators[torch.cuda.current_device()])
    own_states = {}
    for generator in generators:
        own = generator.get_state()
        shared = data.broadcast_copy(own.clone()).cpu()
        if not shared.equal(own):
            own_states[generator] = own
            generator.set_state(shared)
    return own_states
