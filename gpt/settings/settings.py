"""All settings of a run: a tree of frozen dataclasses, each of which checks its values when it is made.

`gpt/settings/parser.py` reads them. The types of the fields state the ranges of their values; from these and from the
docstrings the text of `pretrain_gpt.py --help` is made.
"""

import math
from dataclasses import asdict, field, replace
from typing import Any

import zero
from gpt.formats.config_files import to_yaml
from gpt.settings.data import DataSettings
from gpt.settings.optimizer import OptimizerSettings
from gpt.settings.run import (
    CheckpointSettings,
    DryRunSettings,
    GuardSettings,
    ProfileSettings,
    RunSettings,
    WandbSettings,
)
from gpt.settings.schedule import ScheduleConfig
from gpt.settings.training import ParallelSettings, TrainSettings
from gpt.shape.config import ModelConfig
from parallel.validation.errors import ConfigError
from parallel.validation.fields import checked
from zero.activations.checkpointed_blocks import ActivationsConfig
from zero.fp8.scaling import RECIPES
from zero.settings.config import OffloadConfig, ZeroConfig


@checked
class Settings:
    """GPT pretraining with ZeRO. Every option may also be set in a YAML file; options on the command line win."""

    model: ModelConfig
    data: DataSettings
    parallel: ParallelSettings = field(default_factory=ParallelSettings)
    zero: ZeroConfig = field(default_factory=lambda: ZeroConfig(overlap_gather=True))
    offload: OffloadConfig = field(default_factory=OffloadConfig)
    activations: ActivationsConfig = field(default_factory=ActivationsConfig)
    optimizer: OptimizerSettings = field(default_factory=OptimizerSettings)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    train: TrainSettings = field(default_factory=TrainSettings)
    checkpoint: CheckpointSettings = field(default_factory=CheckpointSettings)
    guard: GuardSettings = field(default_factory=GuardSettings)
    run: RunSettings = field(default_factory=RunSettings)
    wandb: WandbSettings = field(default_factory=WandbSettings)
    profile: ProfileSettings = field(default_factory=ProfileSettings)
    dry_run: DryRunSettings = field(default_factory=DryRunSettings)

    def __post_init__(self) -> None:
        if self.train.is_same_on_any_layout:
            blocks = self.train.reproducible_blocks
            parts = self.parallel.context_size
            zero = replace(self.zero, sum_over_ranks="leaves", leaf_blocks=blocks, leaf_parts=parts)
            object.__setattr__(self, "zero", zero)
            if (num_leaves := self.train.smallest_batch // self.train.micro_batch_size) < blocks:
                raise ConfigError(
                    f"train.reproducible_blocks={blocks} is above the {num_leaves} micro-batches of the smallest step; "
                    f"choose at most {num_leaves}, or more sequences in a step"
                )
        elif self.guard.audit_every:
            raise ConfigError(
                f"guard.audit_every={self.guard.audit_every} compares bits of different ranks; set "
                "train.reproducible=layout, or guard.audit_every=0"
            )
        train = self.train
        sends_codes = train.matmul == "fp8" and RECIPES[train.fp8.recipe].same_transposed
        if self.zero.gather_dtype is not None and not sends_codes:
            raise ConfigError(
                f"zero.gather_dtype=fp8 sends codes that products read, and those of train.matmul={train.matmul}, "
                f"train.fp8.recipe={train.fp8.recipe} do not; choose matmul=fp8 with tensorwise or blockwise, or "
                "zero.gather_dtype=null"
            )
        if self.activations.budget is not None:
            self._check_budget()
        if self.model.mup_base_width is not None and not self.optimizer.name.startswith("adamw"):
            raise ConfigError(
                f"model.mup_base_width={self.model.mup_base_width} scales learning rates of AdamW, and "
                f"optimizer.name={self.optimizer.name}; choose adamw, adamw8bit or adamw_bf16, or "
                "model.mup_base_width=null"
            )

    def _check_budget(self) -> None:
        """Raise ConfigError if there are no compiled blocks, or if what is computed again would have other numbers."""
        budget, dropout = f"activations.budget={self.activations.budget}", self.model.dropout
        if not self.train.compiles_blocks:
            raise ConfigError(
                f"{budget} is for compiled blocks, and train.compile={self.train.compile}; choose train.compile=blocks "
                "or activations.budget=null"
            )
        if dropout:
            raise ConfigError(
                f"{budget} does not work with model.dropout={dropout}, for which torch would draw other numbers where "
                "it computes again; choose model.dropout=0, or activations.store=keep with activations.budget=null"
            )

    def audit_share(self, world_size: int) -> float:
        """Return the time of audits, in steps: that of one micro-batch in `guard.audit_every` steps."""
        num_micro_batches = self.train.num_micro_batches(
            world_size // (self.parallel.tensor_size * self.parallel.context_size)
        )
        return 1 / (self.guard.audit_every * num_micro_batches) if self.guard.audit_every else 0.0

    @property
    def order_of_samples(self) -> dict[str, Any]:
        """The settings that determine which samples a step reads and what dropout drops, by their options, for JSON."""
        data, has_dropout = self.data, self.model.dropout > 0
        samples = {
            "train.seed": self.train.seed,
            "data.split": list(data.split),
            "data.path": data.path,
            "data.packing": data.packing,
            "data.mask_documents": data.mask_documents,
        }
        # Inductor draws the random numbers of a graph at once, and the store determines what is in the graph.
        masks = {"train.compile": self.train.compile} if has_dropout else {}
        stores = {"activations.store": self.activations.store} if has_dropout and self.train.compiles_blocks else {}
        return samples | masks | stores

    def with_alignment(self) -> "Settings":
        """Return these settings with shards that do not cut the blocks of the optimizer."""
        if self.optimizer.name != "adamw8bit":
            return self
        block_numel = zero.AdamW8bit.granularity
        return replace(self, zero=replace(self.zero, alignment=math.lcm(self.zero.alignment, block_numel)))

    def with_gradient_types(self, data_size: int) -> "Settings":
        """Return these settings with the types of gradients that null stands for on `data_size` data-parallel ranks."""
        accumulates = self.train.num_micro_batches(data_size // self.parallel.context_size) > 1
        zero = self.zero.with_gradient_types(self.train.dtype, accumulates=accumulates)
        return replace(self, zero=zero)

    def without_initial_weights(self) -> "Settings":
        """Return these settings for a model into which a checkpoint is loaded."""
        return replace(self, train=replace(self.train, initial_weights=None))

    def to_yaml(self) -> str:
        """Return the settings as YAML, which `--config` reads back as the same settings."""
        return to_yaml(asdict(self))  # in which tuples are written as lists
