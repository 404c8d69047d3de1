"""The optimizer of a wrapped model, with torch's state dicts."""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from parallel.mesh import Axis
from parallel.tensor.split_parameters import split_dims
from parallel.validation.errors import ConfigError
from zero.core.optimizer import ShardedOptimizer
from zero.core.step.given import Given, Optimizers
from zero.core.step.grad_norm import GradNorm
from zero.data_parallel import ZeroDataParallel
from zero.extensions.hashes import bit_sum

if TYPE_CHECKING:
    from zero.checkpoint.state_dicts.chunked_tensor import ParameterChunks


class ZeroOptimizer(ShardedOptimizer):
    """An optimizer of the model's parameters: on each rank, torch optimizers of the pieces of them that it owns.

    >>> optimizer = ZeroOptimizer(model, torch.optim.AdamW, lr=3e-4, fused=True, clip_norm=1.0)
    >>> optimizer = ZeroOptimizer(model, [zero.Muon(matrices, lr=0.02), torch.optim.AdamW(rest, fused=True)])
    >>> scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=1000)
    >>> loss_of(model(batch)).backward()
    >>> norm = optimizer.step()
    >>> scheduler.step()

    A list has optimizers of the model's own parameters, which this one takes over: their parameters become the owned
    pieces, their states are cut likewise, and they are stepped by this one alone, all in one step, with one norm and
    one decision to skip. `param_groups` are the groups of all of them. A class is made an optimizer of the pieces, with
    `settings`; `groups` are parameters or torch's parameter groups. Parameters in no group keep their values, as in
    torch. `state` has, for each parameter, what this rank owns, to be read. `tensor` is the axis along which the model
    itself is split: the norm, and the decision to skip a step, are common to all of its ranks, and parameters that are
    replicated along it are counted once. With `clip_norm=None` gradients are not clipped.

    A step with a non-finite gradient changes nothing and counts in `num_skipped`. Torch's fused Adam, AdamW and SGD
    (without dampening) and zero's own skip it on the device; with any other optimizer in the list the host waits for
    the flag. SkippedStepsError is raised after `max_skipped_in_a_row` of them, and unless the loss scale is dynamic, or
    `warn_skipped` is false, the first one in a row warns. Multiply the loss by `loss_scale.scale` before backward.

    With `skip_unused`, parameters of which no rank got a gradient in a step are not updated, as in torch, and the host
    waits for a message. Without it their gradient is zero, and the first step with such a parameter warns.

    Raises ConfigError if an optimizer does not update pieces of parameters as its granularity says
    (zero/core/step/update.py): by default, element by element; if one in the list has states that are not one value for
    each element; and if the model has an optimizer already.
    """

    engine_class = ZeroDataParallel
    _model: ZeroDataParallel

    @classmethod
    def like(cls, model: ZeroDataParallel, plain: torch.optim.Optimizer, **settings: Any) -> "ZeroOptimizer":
        """Return an optimizer that has taken over a plain one, with its states, as `ZeroOptimizer(model, [plain])`."""
        return cls(model, [plain], **settings)

    def _given(self, optimizer: Optimizers, groups: Iterable[Any] | None, settings: Mapping[str, Any]) -> list[Given]:
        check_replicated(self._model, self.tensor)
        given = super()._given(optimizer, groups, settings)
        if any("update" in group for one in given for group in one.groups):
            from zero.updates.adamw_groups import without_adamw_groups

            found: list[Given] = []
            for one in given:
                found += without_adamw_groups(one)
            return found
        return given

    def _norm_class(self) -> type[GradNorm]:
        if not self._model.is_rank_invariant:
            return super()._norm_class()
        from zero.transports.block_norm import BlockNorm

        return BlockNorm

    def state_dict(self) -> dict[str, Any]:
        """Return the states as torch's optimizers do: `torch.distributed.checkpoint` saves and loads them in place.

        Their tensors are this rank's shards, and views. States that do not exist yet are made, of zeros. Raises
        ConfigError for states that are not one value for each element: those of AdamW8bit, Soap, and of NorMuon.
        """
        from zero.checkpoint.state_dicts.optimizer import state_dict

        return state_dict(self, self._chunks())

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a result of `state_dict`, or one with whole tensors; nothing is stepped. All ranks call it.

        The parameters must be in the same groups, in the same order. Raises ConfigError if a tensor does not fit.
        """
        from zero.checkpoint.state_dicts.optimizer import load_state_dict

        load_state_dict(self, self._chunks(), state_dict)

    def _chunks(self) -> "ParameterChunks":
        for update in self.updates:
            if update.assembled_state_bytes:  # the same on all ranks
                from zero.checkpoint.state_dicts.optimizer import REMEDY

                raise ConfigError(
                    f"the states of {type(update.optimizer).__name__} are matrices that torch.distributed.checkpoint "
                    f"cannot divide; {REMEDY}"
                )
        return self._model.parameter_chunks()


def check_replicated(model: ZeroDataParallel, tensor: Axis) -> None:
    """Raise ConfigError on all ranks if a parameter differs along the tensor axis, and no module lists it as split.

    The norm and the decision to skip a step would be those of the first rank's.
    """
    if not tensor.has_peers:
        return
    split = split_dims(model.module)
    numbers = {name: n for n, (name, _) in enumerate(model.module.named_parameters()) if name not in split}
    sums = torch.zeros(1 + max(numbers.values(), default=0), dtype=torch.int64)
    for _, own, master in model.slices():
        if own.span.name in numbers:
            sums[numbers[own.span.name]] += bit_sum(master).to(sums.device)
    sums = sums.to(tensor.communication_device(sums))
    model.data.all_reduce(sums, out=sums).wait()  # over the owners: tensor ranks may divide their buckets differently
    of_ranks = tensor.gather_by_rank(sums)
    differs = of_ranks.ne(of_ranks[0]).any(dim=0)
    found = [name for name, number in numbers.items() if differs[number]]
    if found:
        raise ConfigError(
            f"{len(found)} parameters, such as {found[0]}, differ along the axis `tensor` of ZeroOptimizer and are not "
            "declared; list them in the `split_dims` of their module, or give all ranks the same values"
        )
