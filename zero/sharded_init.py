"""Builds a model whose parameters are sharded from the start, so that they are never all unsharded at the same time.

nn.Linear(...)                    new parameters are unsharded
a limit of elements is reached    the least recently used parameters are sharded: each rank keeps 1/N of each
initialize, tie, cast, load       reading a module's parameters materializes them: unshards them, with their values
ZeroDataParallel(...)             each unit's parameters are unsharded one last time and copied into the unit's buffers
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

from parallel.autograd_internals import replace_parameter_table
from parallel.memory_kinds import TensorKind, tagged
from parallel.mesh import Axis
from parallel.torch_internals import real_tensors
from parallel.torch_ranks import AxisLike, as_axis
from parallel.validation.errors import ConfigError
from zero.any_module.checks import IS_COMPLEX
from zero.chosen import levels_of
from zero.core.buckets.flat import absent
from zero.core.partition.layout import overlap
from zero.core.partition.stage import Lifetime, ShardingPolicy
from zero.settings.config import NO_OFFLOAD, OffloadConfig

UNSHARDED_NUMEL = 2**26
NUM_RECENT_MODULES = 4  # the last modules used, whose parameters stay unsharded: an expression may read several modules


class ShardedInit:
    """A context manager inside which a model can be built that is larger than the memory of a device.

    Build the model inside `with ShardedInit(data, config.policy) as init:`, then pass `init` to `ZeroDataParallel`. All
    ranks must build the same model. It gets the values that the first rank would have given it without this context,
    because all ranks draw from the first rank's random state.

    `unsharded_numel` limits the elements that are unsharded at the same time, None: to 2**26; those of the
    `NUM_RECENT_MODULES` modules that were used last stay unsharded even above the limit. Shards are stored in the
    memory in which `offload` places parameters. If full parameters persist, nothing is sharded. Raises ConfigError for
    a complex parameter.
    """

    def __init__(
        self,
        data: AxisLike,
        policy: ShardingPolicy,
        unsharded_numel: int | None = None,
        offload: OffloadConfig = NO_OFFLOAD,
    ):
        self._data = as_axis(data)
        self._is_on_host = "parameters" in offload.offloaded_states
        self._axis = levels_of(policy, self._data)[0]
        limit = UNSHARDED_NUMEL if unsharded_numel is None else unsharded_numel
        self._unsharded_numel = limit if policy.full_params is Lifetime.TRANSIENT else math.inf
        self._unsharded: dict[nn.Parameter, int] = {}  # the numel of each, ordered from the least recently used
        self._recent: deque[dict[nn.Parameter, None]] = deque(maxlen=NUM_RECENT_MODULES)  # each module's parameters
        self._shards: dict[nn.Parameter, Tensor] = {}
        self._is_active = False

    def __enter__(self) -> Self:
        self._is_active = self._unsharded_numel != math.inf
        self._hook = register_module_parameter_registration_hook(self._before_registration)
        self._own_random_states = _share_random_states(self._data)
        return self

    def __exit__(self, _type: type | None, _error: BaseException | None, _traceback: TracebackType | None) -> None:
        # First: from here on, reading a module's parameters must not materialize them.
        self._is_active = False
        self._hook.remove()
        for generator, state in self._own_random_states.items():
            generator.set_state(state)
        for param in list(self._unsharded):
            self._shard(param)

    def materialize(self, params: Iterable[nn.Parameter | None]) -> None:
        """Unshard the parameters of one module, and shard the least recently used ones if too many are unsharded."""
        if not self._is_active:
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
        """Unshard a parameter for the last time, return its values, and keep no reference to them."""
        self._unshard(param)
        del self._unsharded[param]
        return param.data

    def _before_registration(self, module: nn.Module, name: str, param: nn.Parameter) -> None:
        """Replace the module's table of parameters by one that materializes them when it is read."""
        if param.is_complex():
            raise ConfigError(f"{name} of {type(module).__name__} {IS_COMPLEX.format(dtype=param.dtype)}")
        replace_parameter_table(
            module,
            lambda table: table if isinstance(table, MaterializingParameters) else MaterializingParameters(table, self),
        )

    def _unshard(self, param: nn.Parameter) -> None:
        """Gather a parameter if it is sharded, and record it as the most recently used."""
        if (shard := self._shards.pop(param, None)) is not None:
            shard = shard.to(self._axis.communication_device(param))
            full = self._axis.gather_by_rank(shard).flatten()
            param.data = full[: param.numel()].view(param.shape).to(param.device)
        self._unsharded.pop(param, None)
        self._unsharded[param] = param.numel()

    def _shard(self, param: nn.Parameter) -> None:
        """Keep this rank's shard of a parameter and free the rest. All shards have one size; the last are padded."""
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
    """A module's table of parameters inside `ShardedInit`. Reading or changing it materializes all parameters in it.

    Tables are replaced, and not constructors, so that any constructor, cast, tie or copy works, and initial values are
    drawn from the same random numbers in the same order.
    """

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
    """Set the random generators of every rank to the first rank's states.

    Return the earlier state of each generator of this rank that was different.
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
