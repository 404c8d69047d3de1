"""The optimizer of a wrapped model, with torch's state dicts."""

from collections.abc import Mapping
from inspect import signature
from typing import TYPE_CHECKING, Any

import torch

from parallel.validation.errors import ConfigError
from zero.core.optimizer import ShardedOptimizer
from zero.data_parallel import ZeroDataParallel

if TYPE_CHECKING:
    from zero.checkpoint.state_dicts.chunked_tensor import ParameterChunks


class ZeroOptimizer(ShardedOptimizer):
    """An optimizer of the model's parameters: on each rank, a torch optimizer of the pieces of them that it owns.

    >>> optimizer = ZeroOptimizer(model, torch.optim.AdamW, lr=3e-4, clip_norm=1.0)
    >>> scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=1000)
    >>> loss_of(model(batch)).backward()
    >>> norm = optimizer.step()
    >>> scheduler.step()

    Its `param_groups` are those of `inner`, and `state` has, for each parameter, what this rank owns, to be read.
    `groups` are parameters or torch's parameter groups, of the model's own parameters; parameters in no group keep
    their values, as in torch. Several optimizers of one model may divide its parameters: gradients stay until each of
    them has stepped or discarded its own, and all need the same `loss_scale`. `tensor` is the axis along which the
    model itself is split: the norm, and the decision to skip a step, are common to all of its ranks, and parameters
    that are replicated along it are counted once. With `clip_norm=None` gradients are not clipped.

    A step with a non-finite gradient changes nothing and counts in `num_skipped`. Torch's fused Adam and AdamW skip it
    on the device; for any other optimizer the host waits for the flag. SkippedStepsError is raised after
    `max_skipped_in_a_row` of them, and unless the loss scale is dynamic, or `warn_skipped` is false, the first one in a
    row warns. Multiply the loss by `loss_scale.scale` before backward. Raises ConfigError if the optimizer does
    not update pieces of parameters as its atom says (zero/core/step/atoms.py): by default, element by element.

    With `skip_unused`, parameters of which no rank got a gradient in a step are not updated, as in torch, and the host
    waits for a message. Without it their gradient is zero, and the first step with such a parameter warns.
    """

    engine_class = ZeroDataParallel
    _model: ZeroDataParallel

    @classmethod
    def like(cls, model: ZeroDataParallel, plain: torch.optim.Optimizer, **settings: Any) -> "ZeroOptimizer":
        """Return an optimizer with the class, groups and settings of a plain one of the same parameters.

        The plain one has not taken a step: its states are left behind.
        """
        known = signature(type(plain)).parameters
        defaults = {name: value for name, value in plain.defaults.items() if name in known}
        return cls(model, type(plain), plain.param_groups, **defaults | settings)

    def state_dict(self) -> dict[str, Any]:
        """Return the states as torch's optimizers do: `torch.distributed.checkpoint` saves and loads them in place.

        Their tensors are this rank's shards, and views. States that do not exist yet are made, of zeros. Raises
        ConfigError for states that are not one value for each element: those of AdamW8bit, Soap, and of NorMuon.
        """
        from zero.checkpoint.state_dicts.optimizer import state_dict

        return state_dict(self.inner, self._pieces, self._chunks())

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a result of `state_dict`, or one with whole tensors; nothing is stepped. All ranks call it.

        The parameters must be in the same groups, in the same order. Raises ConfigError if a tensor does not fit.
        """
        from zero.checkpoint.state_dicts.optimizer import load_state_dict

        load_state_dict(self.inner, self._pieces, self._chunks(), state_dict)

    def _check_others(self) -> None:
        if self._model.reducer.users.params_of and self._model.offload.mode == "auto":
            raise ConfigError(
                "OffloadConfig.mode=auto moves buckets for one optimizer, and this model has two; choose host or "
                "accelerator"
            )
        super()._check_others()

    def _chunks(self) -> "ParameterChunks":
        if self.matrices.state_bytes:  # the same on all ranks
            from zero.checkpoint.state_dicts.optimizer import REMEDY

            raise ConfigError(
                f"the states of {type(self.inner).__name__} are matrices that torch.distributed.checkpoint cannot "
                f"divide; {REMEDY}"
            )
        return self._model.parameter_chunks()
