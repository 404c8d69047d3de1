"""The engine as users wrap a module in it: with what settings choose, and with torch's state dicts."""

import logging
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, Self

import torch
from torch import Tensor, nn

from parallel.mesh import Axis
from parallel.tensor.split_parameters import split_dims
from parallel.tensor_tree import changes
from parallel.torch_ranks import AxisLike, as_axis
from parallel.validation.errors import ConfigError, check_type
from zero.any_module.checks import check_module
from zero.any_module.guarded_parameter import AnyModule
from zero.chosen import extensions_of, homes_of, transports_of
from zero.core.engine import Engine, InitialValues
from zero.core.partition.stage import Lifetime
from zero.core.protocols.extension import Extension
from zero.core.protocols.home import Homes
from zero.core.protocols.transport import Transport, TransportOf
from zero.core.units.hooks import Hook
from zero.settings.config import NO_OFFLOAD, OffloadConfig, ZeroConfig

if TYPE_CHECKING:
    from zero.checkpoint.state_dicts.chunked_tensor import ChunkedTensor, ParameterChunks

WARNED_NUMEL = 2**20  # elements of a model that is gathered as a whole

logger = logging.getLogger(__name__)


class ZeroDataParallel(Engine):
    """A module whose gradients are averaged over `data`, and whose states are partitioned as the stage says.

    >>> model = ZeroDataParallel(module, init_device_mesh("cuda", (8,)), ZeroConfig(stage=3))

    `data` is an axis, a DeviceMesh of one dim or of replicas x shards, a ProcessGroup, or None: all ranks.
    Run every micro-batch but the last inside `with model.accumulate():`. All ranks start with the parameters and
    buffers of the first rank. `requires_grad` and dtypes are read once, here: to change them later, `unwrap` the module
    first. Pass `init` if the module was built inside a `ShardedInit`. With `device`, the module moves there, a unit at
    a time. With `param_dtype`, floating-point parameters, and inputs of the forward if `cast_forward_inputs`, are cast
    to it; buffers are not, and master weights begin with the values before the cast. `transport` says how buckets are
    communicated, for all parameters or by a function of (name, parameter), and `homes` in which memories states begin;
    by default the settings say both. `extensions` observe what the engine does. Raises
    ValueError if the module cannot be wrapped, TypeError if an argument has another class, and DivergedRanks if another
    rank wraps another one.
    """

    config: ZeroConfig
    guard_class = AnyModule

    def __init__(
        self,
        module: nn.Module,
        data: AxisLike = None,
        config: ZeroConfig | None = None,
        init: InitialValues | None = None,
        device: torch.device | None = None,
        offload: OffloadConfig = NO_OFFLOAD,
        param_dtype: torch.dtype | None = None,
        *,
        cast_forward_inputs: bool = True,
        transport: Transport | TransportOf | None = None,
        homes: Homes | None = None,
        extensions: Sequence[Extension] = (),
    ):
        data, config = as_axis(data), ZeroConfig() if config is None else config
        check_arguments(config, offload, param_dtype, homes, device, is_built=init is None)
        check_module(module, data)  # before anything is chosen for it
        self.offload = offload
        chosen = homes or homes_of(offload, device or next(module.parameters()).device)
        with torch.inference_mode(False):
            super().__init__(
                module,
                data,
                config,
                transports_of(config, data, module, chosen.device, transport),
                chosen,
                init=init,
                device=homes.device if homes else device,
                param_dtype=param_dtype,
                cast_forward_inputs=cast_forward_inputs,
                extensions=[*extensions_of(config, offload, data, chosen.device), *extensions],
            )
        refuse = Hook(_refuse_replacing)
        self.end_with_engine(part.register_load_state_dict_pre_hook(refuse) for part in module.modules())
        transient = sum(unit.transient_numel for unit in self.units.values())
        if config.units is None and len(self.units) == 1 and transient > WARNED_NUMEL:
            warnings.warn(
                f"stage 3 gathers all of a {type(module).__name__} at once, {transient} elements, since it has no "
                "module list; name the modules to gather at a time, as ZeroConfig(3, units=('layers.*',))",
                stacklevel=2,
            )

    def named_modules(self, memo: Any = None, prefix: str = "", remove_duplicate: bool = True) -> Any:
        """Iterate over modules; names of parameters are those that the module inside this one gives them."""
        yield prefix, self
        yield from self.module.named_modules(memo, prefix, remove_duplicate)

    def get_submodule(self, target: str) -> nn.Module:
        """Return a module by the name that `named_modules` gives it."""
        is_own = target.partition(".")[0] in ("", "module")
        return super().get_submodule(target) if is_own else self.module.get_submodule(target)

    def get_parameter(self, target: str) -> nn.Parameter:
        """Return a parameter by the name that `named_parameters` gives it."""
        return self.module.get_parameter(target.removeprefix("module."))

    def parameter_chunks(self) -> "ParameterChunks":
        """Return how torch's state dicts have the parameters, and the optimizer's states of them.

        Raises ConfigError if the model is split along a tensor axis, and no optimizer has said which.
        """
        split = split_dims(self.module)
        tensor = self.optimizer.tensor if self.optimizer else None
        if split and tensor is None:
            raise ConfigError("a model that is split along a tensor axis needs its optimizer, which knows that axis")
        from zero.checkpoint.state_dicts.chunked_tensor import ParameterChunks

        return ParameterChunks(self.module, split, self.shard_axis, tensor or Axis.trivial("tensor"), self.homes.device)

    @torch.no_grad()
    def state_dict(self, *args: Any, destination: Any = None, prefix: str = "", keep_vars: bool = False) -> Any:
        """Return what the module's `state_dict` does, with the rank's shards of the master weights as parameters.

        They are views, which `torch.distributed.checkpoint` saves and loads into; `full_tensor()` gathers one.
        """
        self.take_changes()
        state = self.module.state_dict(*args, destination=destination, prefix=prefix, keep_vars=True)
        state.update(self._shards(state))
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load shards, as `state_dict` returns them, or whole tensors, into parameters, master weights and buffers.

        All ranks call it, with the same keys. Returns keys that are missing and unexpected, and raises RuntimeError for
        these if it is `strict`, and ConfigError if a tensor does not fit.
        """
        from zero.checkpoint.state_dicts.chunked_tensor import ChunkedTensor

        if not any(isinstance(value, ChunkedTensor) for value in state_dict.values()):
            self.take_changes()  # shards may have been loaded in place, and parameters be older than master weights
        shards = self._shards(self.module.state_dict(keep_vars=True))
        others = {name: value for name, value in state_dict.items() if name not in shards}
        # All of them are checked before any is loaded.
        parts = {name: one.parts_of(name, state_dict[name]) for name, one in shards.items() if name in state_dict}
        keys = self.module.load_state_dict(others, strict=False, assign=assign)
        keys.missing_keys[:] = [name for name in keys.missing_keys if name not in state_dict]
        if strict and any(keys):
            raise RuntimeError(
                f"the state dict lacks {keys.missing_keys} and has {keys.unexpected_keys}, which this model has not; "
                "load the state of this model, or choose strict=False"
            )
        with torch.no_grad(), self.loading_masters():
            for name, part in parts.items():
                shards[name].load(part)
        return keys

    def _shards(self, state: Mapping[str, Any]) -> "dict[str, ChunkedTensor]":
        """Return the shards of the parameters in a state of the module, by their keys."""
        chunks = self.parameter_chunks()
        weights = chunks.weights(self.flats, self.slices())
        params = {name: value for name, value in state.items() if isinstance(value, nn.Parameter)}
        return {name: weights[chunks.names[param]] for name, param in params.items() if param in chunks.names}

    def _fqn_modifiers(self) -> dict[str, str]:
        """Return where torch's `get_state_dict` finds the parts of the module by the names that they have in it."""
        return dict.fromkeys(["", *(name for name, _ in self.module.named_children())], "module")

    def __deepcopy__(self, _memo: dict[int, Any]) -> NoReturn:
        self._refuse_copy()

    def __copy__(self) -> NoReturn:
        self._refuse_copy()

    def _replicate_for_data_parallel(self) -> NoReturn:
        self._refuse_copy()

    def _refuse_copy(self) -> NoReturn:
        raise TypeError(
            "a ZeroDataParallel cannot be copied; copy the module inside it, in `with model.gathered() as module:`"
        )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Refuse what `.to`, `.double`, `.cuda` and others would change; torch calls this for all of them."""
        for tensor in (*self.module.parameters(), *self.module.buffers()):
            if changes(fn, tensor):
                raise ValueError(
                    f"a {tensor.dtype} on {tensor.device} inside ZeroDataParallel cannot be converted; convert the "
                    "module before it is wrapped, or `unwrap()` it first"
                )
        return self

    def _chosen_bucket_numel(self, unit_numels: Sequence[int], dtype: torch.dtype) -> int:
        """Return the number of elements of a bucket; with auto, a chunk of which as little as possible is unfilled."""
        if self.offload.mode != "auto":
            return super()._chosen_bucket_numel(unit_numels, dtype)
        from zero.homes.budget.chunks import search_chunk_size

        numel, unfilled_numel = search_chunk_size(unit_numels, self.offload, self._transports.grain)
        logger.info("offload: chunks of %d elements, %d unfilled", numel, unfilled_numel)
        return numel


def check_arguments(
    config: ZeroConfig,
    offload: OffloadConfig,
    param_dtype: torch.dtype | None,
    homes: Homes | None,
    device: torch.device | None,
    *,
    is_built: bool,
) -> None:
    """Raise TypeError for an argument of another class, and ConfigError if one has no effect with the others."""
    check_type("`config` of ZeroDataParallel", config, ZeroConfig, "such as ZeroConfig(stage=2)")
    check_type("`offload` of ZeroDataParallel", offload, OffloadConfig, 'such as OffloadConfig("host")')
    check_type("`param_dtype` of ZeroDataParallel", param_dtype or torch.bfloat16, torch.dtype, "or None not to cast")
    if param_dtype is not None and not param_dtype.is_floating_point:
        raise ConfigError(f"param_dtype={param_dtype} has no fractions; choose torch.bfloat16, or None not to cast")
    if homes is not None:
        check_type("`homes` of ZeroDataParallel", homes, Homes, "such as Homes(Home(device), home, home)")
        if offload.mode != "accelerator":
            raise ConfigError(f"OffloadConfig.mode={offload.mode} with `homes`, which say where states are; give one")
        if device not in (None, homes.device):
            raise ConfigError(f"device={device} with `homes` of {homes.device}; leave `device` out")
        if homes.parameters.is_apart and not is_built:
            raise ConfigError("ShardedInit stores shards where `offload` says, and not in `homes`; give both `offload`")
    if config.policy.full_params is Lifetime.PERSISTENT and offload.offloaded_states == {"parameters"}:
        raise ConfigError(
            f"OffloadConfig.states=[parameters] has no effect at ZeroConfig.stage={config.stage}, which keeps full "
            "parameters on the accelerator; add optimizer, or choose stage 3"
        )


def _refuse_replacing(_module: nn.Module, _state: Any, _prefix: str, metadata: dict[str, Any], *_: Any) -> None:
    """Raise ValueError if `load_state_dict` is to replace parameters, and not to copy values to them."""
    way = None
    if metadata.get("assign_to_params_buffers"):
        way = "load_state_dict(assign=True)", "assign=False"
    elif torch.__future__.get_swap_module_params_on_conversion():
        way = "torch.__future__.set_swap_module_params_on_conversion(True)", "it to False"
    if way is not None:
        raise ValueError(
            f"{way[0]} would replace parameters that ZeroDataParallel has divided into buckets; set {way[1]}, or load "
            "the state before the module is wrapped"
        )
