"""ZeRO-DP for any module: wrap it in `ZeroDataParallel`, and update it by a `ZeroOptimizer`.

The names below are the public interface; docs/zero_library.md describes it.
"""

from importlib.util import find_spec
from pathlib import Path


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


require_siblings("zero", "parallel")  # before anything of it is imported

from zero.activations.checkpointed_blocks import ActivationsConfig, checkpointed_blocks
from zero.buckets.guarded_parameter import GradientAccessError, ShardedParameterError
from zero.dcp.folder import load_distributed
from zero.dcp.state import DistributedState
from zero.engine import ZeroDataParallel
from zero.memory.placement import OffloadConfig
from zero.optimizer import ZeroOptimizer
from zero.optimizers.adamw8bit import AdamW8bit
from zero.optimizers.adamw_bf16 import AdamWBf16
from zero.optimizers.cautious_adamw import CautiousAdamW
from zero.optimizers.muon import Muon
from zero.optimizers.soap import Soap
from zero.order.agreement import DivergedRanks
from zero.partition.config import ConfigError, ZeroConfig
from zero.sharded_init import ShardedInit
from zero.state.checkpoint import Saver, has_checkpoint, load, save
from zero.state.export import export, full_state_dict
from zero.state.writer import SaveError
from zero.step.loss_scale import LossScale, SkippedStepsError
from zero.uneven import join

__all__ = [
    "ActivationsConfig",
    "AdamW8bit",
    "AdamWBf16",
    "CautiousAdamW",
    "ConfigError",
    "DistributedState",
    "DivergedRanks",
    "GradientAccessError",
    "LossScale",
    "Muon",
    "OffloadConfig",
    "SaveError",
    "Saver",
    "ShardedInit",
    "ShardedParameterError",
    "SkippedStepsError",
    "Soap",
    "ZeroConfig",
    "ZeroDataParallel",
    "ZeroOptimizer",
    "checkpointed_blocks",
    "export",
    "full_state_dict",
    "has_checkpoint",
    "join",
    "load",
    "load_distributed",
    "save",
]
