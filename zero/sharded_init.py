"""Building a model straight into shards: parameters are whole only while somebody works on them.

nn.Linear(...)              new parameters are whole
more and more of them       those not touched for longest are cut, and a rank keeps 1/N of each
initialize, tie, cast, load whoever reaches for a module's parameters finds them whole again, as they were left
ZeroDataParallel(...)       unit by unit they are put together once more, into the unit's buffer
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

NUM_JUST_TOUCHED = 4  # modules


class ShardedInit:
    """Inside `with ShardedInit(data, config.policy) as init:` build any model, then give `init` to
    `ZeroDataParallel`.

    The model gets the values that it would have had outside, on the first rank: all ranks draw from its random state.
    Every rank must build the same model. `whole_numel` bounds the elements that are whole at a time, beside those of
    the few modules that were touched last: an expression may hold parameters of several. Where full parameters persist
    there is nothing to cut. Shards wait where `offload` places them.
    """

    def __init__(
        self, data: Axis, policy: ShardingPolicy, whole_numel: int = 2**26, offload: OffloadConfig = NO_OFFLOAD
    ):
        self._data = data
        self._is_on_host = offload.placement_of("parameters") is Placement.HOST
        self._axis, _ = policy.axes(data)
        self._whole_numel = whole_numel if policy.full_params is Lifetime.TRANSIENT else math.inf
        self._whole: dict[nn.Parameter, int] = {}  # elements; the one touched last comes last
        self._just_touched: deque[dict[nn.Parameter, None]] = deque(maxlen=NUM_JUST_TOUCHED)
        self._shards: dict[nn.Parameter, Tensor] = {}
        self._is_open = False

    def __enter__(self) -> Self:
        self._is_open = self._whole_numel != math.inf
        self._hook = register_module_parameter_registration_hook(self._before_registration)
        self._own_random_states = _share_random_states(self._data)
        return self

    def __exit__(self, _type: type | None, _error: BaseException | None, _traceback: TracebackType | None) -> None:
        self._is_open = False
        self._hook.remove()
        for generator, state in self._own_random_states.items():
            generator.set_state(state)
        for param in list(self._whole):
            self._cut(param)

    def touch(self, params: Iterable[nn.Parameter | None]) -> None:
        """Whole they are, until so many others have been touched that memory is needed."""
        if not self._is_open:
            return
        touched = dict.fromkeys(param for param in params if param is not None and not param.is_meta)
        for param in touched:
            self._make_whole(param)
        if touched not in self._just_touched:
            self._just_touched.append(touched)
        too_many = sum(self._whole.values()) - self._whole_numel
        for param, numel in list(self._whole.items()):
            if too_many <= 0:
                break
            if not any(param in params for params in self._just_touched):
                self._cut(param)
                too_many -= numel

    def take(self, param: nn.Parameter) -> Tensor:
        """The values, whole, for the last time."""
        self._make_whole(param)
        del self._whole[param]
        return param.data

    def close(self, module: nn.Module) -> None:
        """All has been taken: the module's tables of parameters are plain ones again."""
        for submodule in module.modules():
            submodule._parameters = dict(submodule._parameters)

    def _before_registration(self, module: nn.Module, _name: str, _param: nn.Parameter) -> None:
        if not isinstance(module._parameters, GatheringParameters):
            module._parameters = GatheringParameters(module._parameters, self)

    def _make_whole(self, param: nn.Parameter) -> None:
        if (shard := self._shards.pop(param, None)) is not None:
            here = shard.to(self._axis.device_to_travel_from(param))
            whole = here.new_empty(self._axis.size * here.numel())
            self._axis.all_gather(here, out=whole).wait()
            param.data = whole[: param.numel()].view(param.shape).to(param.device)
        self._whole.pop(param, None)
        self._whole[param] = param.numel()

    def _cut(self, param: nn.Parameter) -> None:
        """Ranks keep equal stretches of the flat parameter; the last ones are padded."""
        flat = param.data.reshape(-1)
        numel = max(1, math.ceil(flat.numel() / self._axis.size))
        own = overlap(range(self._axis.rank * numel, (self._axis.rank + 1) * numel), range(flat.numel()))
        shard = flat.new_zeros(numel, device="cpu" if self._is_on_host else None)
        if self._is_on_host:
            tagged(TensorKind.PARAMETERS, shard, on_host=True)
        shard[: len(own)].copy_(flat[own.start : own.stop])
        self._shards[param] = shard
        param.data = absent(param.data).expand(param.shape)
        del self._whole[param]


class GatheringParameters(dict[str, Any]):
    """What `nn.Module` keeps in `_parameters` while it is born: all of a module's own come when one is reached for."""

    def __init__(self, params: dict[str, Any], init: ShardedInit):
        super().__init__(params)
        self._init = init
        self._touch()

    def _touch(self) -> None:
        self._init.touch(super().values())

    def __getitem__(self, name: str) -> Any:
        self._touch()
        return super().__getitem__(name)

    def __setitem__(self, name: str, param: Any) -> None:
        super().__setitem__(name, param)
        self._touch()

    def items(self) -> Any:
        self._touch()
        return super().items()

    def values(self) -> Any:
        self._touch()
        return super().values()

    def __deepcopy__(self, memo: dict[int, Any]) -> "GatheringParameters":
        return GatheringParameters({name: copy.deepcopy(param, memo) for name, param in self.items()}, self._init)

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self.items()),)


@real_tensors()
def _share_random_states(data: Axis) -> dict[torch.Generator, Tensor]:
    """Every rank takes over the first one's random states; returns this rank's own, where they were others."""
    generators = [torch.default_generator]
    if torch.cuda.is_initialized():
        generators.append(torch.cuda.default_generators[torch.cuda.current_device()])
    own_states = {}
    for generator in generators:
        own = generator.get_state()
        shared = data.values_of_first(own.clone()).cpu()
        if not shared.equal(own):
            own_states[generator] = own
            generator.set_state(shared)
    return own_states
