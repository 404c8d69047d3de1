"""ZeRO-DP for any module: wrap it in `ZeroDataParallel`, and update it by a `ZeroOptimizer`.

The names in `__all__` are the public interface, which docs/zero_library.md describes. `import zero` loads none of
them: each loads its module when it is first used.
"""

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

__version__ = "0.2.0"

_MODULES = {
    "parallel.mesh": "Axis Mesh",
    "parallel.validation.errors": "ConfigError",
    "parallel.world": "start_world stop_world",
    "zero.activations.checkpointed_blocks": "ActivationsConfig checkpointed_blocks",
    "zero.checkpoint.checkpoint": "Saver has_checkpoint load save",
    "zero.checkpoint.export": "export full_state_dict",
    "zero.checkpoint.folders.folder": "load_distributed",
    "zero.checkpoint.folders.state": "DistributedState",
    "zero.checkpoint.writer": "SaveError",
    "zero.settings.config": "OffloadConfig ZeroConfig",
    "zero.any_module.guarded_parameter": "GradientAccessError",
    "zero.core.buckets.guard": "ShardedParameterError",
    "zero.core.protocols.extension": "Extension",
    "zero.core.protocols.home": "Home Homes",
    "zero.core.protocols.transport": "AllReduce Direct Transport",
    "zero.core.step.loss_scale": "LossScale SkippedStepsError",
    "zero.data_parallel": "ZeroDataParallel",
    "zero.extensions.agreement": "DivergedRanks",
    "zero.homes.on_host": "OnHost",
    "zero.optimizer": "ZeroOptimizer",
    "zero.sharded_init": "ShardedInit",
    "zero.transports.two_level": "TwoLevel",
    "zero.uneven": "join",
    "zero.updates.adamw8bit": "AdamW8bit",
    "zero.updates.adamw_bf16": "AdamWBf16",
    "zero.updates.cautious_adamw": "CautiousAdamW",
    "zero.updates.muon": "Muon",
    "zero.updates.soap": "Soap",
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names.split()}

_REMOVED = {"Dion": "zero.Dion is removed; use zero.Muon"}

__all__ = sorted({"fp8", *_MODULE_OF})

if TYPE_CHECKING:  # the same names, for type checkers and editors
    from parallel.mesh import Axis as Axis
    from parallel.mesh import Mesh as Mesh
    from parallel.validation.errors import ConfigError as ConfigError
    from parallel.world import start_world as start_world
    from parallel.world import stop_world as stop_world
    from zero import fp8 as fp8
    from zero.activations.checkpointed_blocks import ActivationsConfig as ActivationsConfig
    from zero.activations.checkpointed_blocks import checkpointed_blocks as checkpointed_blocks
    from zero.any_module.guarded_parameter import GradientAccessError as GradientAccessError
    from zero.checkpoint.checkpoint import Saver as Saver
    from zero.checkpoint.checkpoint import has_checkpoint as has_checkpoint
    from zero.checkpoint.checkpoint import load as load
    from zero.checkpoint.checkpoint import save as save
    from zero.checkpoint.export import export as export
    from zero.checkpoint.export import full_state_dict as full_state_dict
    from zero.checkpoint.folders.folder import load_distributed as load_distributed
    from zero.checkpoint.folders.state import DistributedState as DistributedState
    from zero.checkpoint.writer import SaveError as SaveError
    from zero.core.buckets.guard import ShardedParameterError as ShardedParameterError
    from zero.core.protocols.extension import Extension as Extension
    from zero.core.protocols.home import Home as Home
    from zero.core.protocols.home import Homes as Homes
    from zero.core.protocols.transport import AllReduce as AllReduce
    from zero.core.protocols.transport import Direct as Direct
    from zero.core.protocols.transport import Transport as Transport
    from zero.core.step.loss_scale import LossScale as LossScale
    from zero.core.step.loss_scale import SkippedStepsError as SkippedStepsError
    from zero.data_parallel import ZeroDataParallel as ZeroDataParallel
    from zero.extensions.agreement import DivergedRanks as DivergedRanks
    from zero.homes.on_host import OnHost as OnHost
    from zero.optimizer import ZeroOptimizer as ZeroOptimizer
    from zero.settings.config import OffloadConfig as OffloadConfig
    from zero.settings.config import ZeroConfig as ZeroConfig
    from zero.sharded_init import ShardedInit as ShardedInit
    from zero.transports.two_level import TwoLevel as TwoLevel
    from zero.uneven import join as join
    from zero.updates.adamw8bit import AdamW8bit as AdamW8bit
    from zero.updates.adamw_bf16 import AdamWBf16 as AdamWBf16
    from zero.updates.cautious_adamw import CautiousAdamW as CautiousAdamW
    from zero.updates.muon import Muon as Muon
    from zero.updates.soap import Soap as Soap


def require_siblings(package: str, *names: str) -> None:
    """Raise ImportError if one of `names` is not that of the package beside this one.

    `data` and `parallel` are common names: Python would import a file data.py beside the user's program instead.
    """
    root = Path(__file__).resolve().parents[1]
    for name in names:
        spec = find_spec(name)
        found = Path(spec.origin).resolve() if spec is not None and spec.origin is not None else None
        if found is not None and found != root / name / "__init__.py":
            raise ImportError(
                f"{package} needs {root / name}, but Python imports {found} by the name {name}; rename that file"
            )


if not TYPE_CHECKING:  # to a type checker, every name would exist

    def __getattr__(name: str) -> object:
        if name == "fp8":
            return import_module("zero.fp8")
        if name not in _MODULE_OF:
            raise AttributeError(_REMOVED.get(name, f"module {__name__!r} has no attribute {name!r}"))
        value = globals()[name] = getattr(import_module(_MODULE_OF[name]), name)
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


require_siblings("zero", "parallel")  # before anything of it is imported
