"""Any element-wise torch optimizer, or one that declares another atom, run on the shards that this rank owns.

    grad_norm    the norm of all gradients, a tensor, and from it the clip coefficient, a tensor
    take         parameters that were written in place since the last step: their master weights follow
    update       bucket by bucket: cast the gradient, step the torch optimizer, write the owned parameters; matrices in
                 the steps of zero/step/matrix_updates.py
    publish      bucket by bucket, while the next one is updated: all-gather the updated parameters

Without offload the host waits for the device in `_must_skip` only, if the optimizer cannot skip a step by itself. With
states on the host it also waits for the reduced gradients and the clip coefficient, and under a budget of memory in the
steps that are recorded.
"""

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from parallel.autograd_internals import foreach_copy_, foreach_mul_
from parallel.errors import ConfigError
from parallel.memory_kinds import TensorKind, allocating
from parallel.mesh import Axis, Handle
from parallel.tensor.gradient_sums import GradientSums, set_deferred
from parallel.tensor.layers import split_dims
from zero.buckets.bucket import Bucket
from zero.buckets.flat import FlatParameters
from zero.buckets.written_parameters import WrittenParameters
from zero.engine import ZeroDataParallel
from zero.memory.placement import Placement
from zero.partition.layout import cut
from zero.partition.stage import Lifetime
from zero.step.elementwise import BucketedOptimizer, Piece, as_groups, check_class, number_groups, probe_atoms
from zero.step.grad_norm import GradNorm
from zero.step.loss_scale import LossScale, SkippedSteps
from zero.step.matrix_updates import MatrixUpdates

Scales = dict[Placement, tuple[Tensor, ...]]  # (clip coefficient, flag of a skipped step) in each memory
GROUPED_SHARE = 8  # shards are updated together up to this part of the elements of a bucket


class ZeroOptimizer:
    """A torch optimizer whose parameters are the pieces of the model's parameters that this rank owns.

    `groups` are parameters or torch's parameter groups, of the model's own parameters; parameters in no group keep
    their values, as in torch. Several optimizers of one model may divide its parameters: gradients stay until each of
    them has stepped or discarded its own, and all need the same `loss_scale`. `tensor` is the axis along which the
    model itself is split: the norm, and the decision to skip a step, are common to all of its ranks, and parameters
    that are replicated along it are counted once.

    A step with a non-finite gradient changes nothing and counts in `num_skipped`. Torch's fused Adam and AdamW skip it
    on the device; for any other optimizer the host waits for the flag. SkippedStepsError is raised after
    `max_skipped_in_a_row` of them, and unless the loss scale is dynamic, or `warn_skipped` is false, the first one in a
    row warns. Multiply the loss by `loss_scale.scale` before backward. Raises ConfigError if the optimizer does
    not update pieces of parameters as its atom says (zero/optimizers/atoms.py): by default, element by element.
    """

    def __init__(
        self,
        model: ZeroDataParallel,
        optimizer: type[torch.optim.Optimizer],
        groups: Iterable[Any] | None = None,
        *,
        tensor: Axis | None = None,
        clip_norm: float = math.inf,
        loss_scale: LossScale | None = None,
        max_skipped_in_a_row: int | None = 50,
        warn_skipped: bool = True,
        **settings: Any,
    ):
        check_class(optimizer)
        self._reducer, self._planner, self._offload = model.reducer, model.planner, model.offload
        self._flats = [flat for flat in model.flats if flat.is_trainable]
        self._overlaps_gathers = model.config.overlap_gather
        tensor, self._clip_norm = tensor or Axis.trivial("tensor"), clip_norm
        self._axes = model.shard_axis, model.replica_axis, tensor
        device = self._offload.device
        self.loss_scale = loss_scale or LossScale(device=device)
        self.num_skipped = torch.zeros((), dtype=torch.int64, device=device)
        warns = warn_skipped and not self.loss_scale.is_dynamic
        self._skipped_steps = SkippedSteps(device, max_skipped_in_a_row, warns)
        first = self._offload.device_of(self._offload.config.initial_placement("optimizer"))
        groups = as_groups(model.module.parameters() if groups is None else groups)
        group_of = number_groups(groups, set(model.module.parameters()))
        self._params = self._trainable(group_of)
        self._state_bytes = probe_atoms(optimizer, settings, first, groups, model.config.alignment)
        self._group_of = {param: group_of[param] for param in self._params}
        owned = self._owned = _owned_parts(self._flats, group_of)
        for bucket in owned:
            bucket.place_master(bucket.optimizer_placement)
        self._wait_for_updates = model.wait_for_updates
        self._before_step = partial(model.before_step, self._params)
        self._is_shared = {bucket: not self._params.issuperset(bucket.grads.parts) for bucket in owned}
        self._pieces = {bucket: _pieces(bucket, owned[bucket], group_of) for bucket in owned}
        pieces = [piece for pieces in self._pieces.values() for piece in pieces]
        groups = [group | {"params": [p.param for p in pieces if p.group == n]} for n, group in enumerate(groups)]
        self._bucketed = BucketedOptimizer(optimizer(groups, **settings))
        self.matrices = MatrixUpdates(
            self.inner, model.module, self._flats, self._pieces, group_of, (model.shard_axis, tensor), self._offload
        )
        split = {model.module.get_parameter(name) for name in split_dims(model.module)}
        self.grad_norm = GradNorm(owned, self._params, (model.shard_axis, tensor), split, self.loss_scale.scale)
        self._sums = self._deferred_sums(model.module) if tensor.size > 1 else []
        self._group_buckets()
        self._written = WrittenParameters(self._flats, self._offload)
        self._check_others()
        self._reducer.register(self, self._params)

    @property
    def inner(self) -> torch.optim.Optimizer:
        """The torch optimizer, whose parameters are the owned pieces; set learning rates in its `param_groups`."""
        return self._bucketed.inner

    @property
    def state_bytes_per_element(self) -> float:
        """The bytes of the optimizer's states for each element in fp32, in the mean over the parameters."""
        # `_state_bytes` are those of an element, by group.
        state_bytes = sum(self._state_bytes[number] * param.numel() for param, number in self._group_of.items())
        return (state_bytes + self.matrices.state_bytes) / sum(param.numel() for param in self._group_of)

    @property
    def tensor(self) -> Axis:
        """The axis along which the model itself is split."""
        return self._axes[2]

    @property
    def buckets(self) -> list[Bucket]:
        """The buckets of all trainable parameters, in the order of the layout."""
        return list(self._pieces)

    def pieces_of(self, bucket: Bucket) -> list[Piece]:
        """Return the owned pieces of parameters in a bucket: views of its master weights."""
        return self._pieces[bucket]

    @torch.no_grad()
    def step(self, *, skip: Tensor | None = None, gradient_hook: Callable[[], object] = lambda: None) -> Tensor:
        """Update the parameters; return the norm of their gradients before clipping, without the loss scale.

        `skip`: 0-dim, the same on all ranks; if it is not zero nothing is updated, as after an overflow.
        `gradient_hook` is called while the owned gradients are reduced and not yet clipped.
        """
        self._before_step()
        self._reducer.complete()
        self._planner.before_update(self._axes)
        if self._buckets_on(Placement.HOST):
            self._offload.synchronize()  # before the host reads gradients that were copied to it
        for sums, parts in self._sums:
            sums.sum_at_once([bucket.owned_part(bucket.grads.owned, part) for bucket, part in parts])
        gradient_hook()
        norm = self.grad_norm.total()
        coefficient = (self._clip_norm / (norm + 1e-6)).clamp(max=1.0) / self.loss_scale.scale
        found_inf = (~norm.isfinite()).float()
        skipped = found_inf if skip is None else torch.maximum(found_inf, skip.float())
        if self._must_skip(skipped):
            self._bucketed.skip_round()
        else:
            self._update_all(coefficient, skipped)
        self.num_skipped.add_(skipped.long())
        self.loss_scale.note(found_inf)
        if self._release():
            self._planner.after_update(self._axes, self.buckets, self.bytes_to_place, self.place)
        self._skipped_steps.record(found_inf)  # last: it may raise
        return norm

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Discard the gradients, as after a backward that failed; `step` does so by itself.

        `set_to_none` has no effect: gradients that were discarded and gradients of zero are the same here.
        """
        self._release()

    @torch.no_grad()
    def take_changes(self) -> None:
        """Let master weights follow parameters that were written in place; `step` and saving the state call this."""
        self._wait_for_updates()
        for placement in Placement:
            self._written.take(placement, self._buckets_on(placement))

    def bytes_to_place(self, bucket: Bucket) -> int:
        """Return the memory that `place` would allocate on the accelerator, without the cast buffer."""
        # An optimizer that has skipped every step so far has not made its moments yet.
        per_byte = ((len(piece.elements), self._state_bytes[piece.group] / 4) for piece in self._pieces[bucket])
        expected = round(sum(numel * bytes_each for numel, bytes_each in per_byte) * bucket.master.itemsize)
        moments = max(self._bucketed.state_bytes(self._pieces[bucket]), expected)
        needs_own_master = bucket.master.dtype != bucket.params.owned.dtype or bucket.params.placement is Placement.HOST
        gradient = 0 if bucket.grads.persists else bucket.grads.owned.nbytes  # else a part of the full gradients
        return moments + bucket.master.nbytes * needs_own_master + gradient

    def place(self, bucket: Bucket, placement: Placement) -> None:
        """Move a bucket's master weights, moments and owned gradient, between steps. The gradient's values are lost."""
        self._wait_for_updates()  # gathers read the owned parameters, which may be the master weights
        bucket.place_master(placement)
        new = partial(self._offload.new, placement, TensorKind.MOMENTS)
        self._bucketed.move(self._pieces[bucket], bucket.master, new)
        bucket.grads.place(placement)
        self._group_buckets()

    def _deferred_sums(self, module: nn.Module) -> list[tuple[GradientSums, list[tuple[Bucket, range]]]]:
        """Switch off the hooks of gradient sums; return each of these with this rank's parts of its parameters."""
        found = []
        for sums in set_deferred(module, True):
            summed = self._params.intersection(sums.params)
            parts = [(bucket, part) for bucket, own in self._owned.items() for param, part in own if param in summed]
            found.append((sums, parts))
        return found

    def _trainable(self, params: Iterable[nn.Parameter]) -> frozenset[nn.Parameter]:
        given = list(params)
        trainable = frozenset(given).intersection(param for flat in self._flats for param in flat.params)
        if not trainable:
            raise ValueError(
                f"none of the {len(given)} parameters of the optimizer is trainable; set `requires_grad` before the "
                "model is wrapped"
            )
        return trainable

    def _check_others(self) -> None:
        """Check that the model's other optimizers and this one can use the same gradients, buckets and loss scale."""
        for other in self._reducer.params_of:
            if self._offload.config.mode == "auto":
                raise ConfigError(
                    "OffloadConfig.mode=auto moves buckets for one optimizer, and this model has two; choose host or "
                    "accelerator"
                )
            a, b = self.loss_scale, other.loss_scale
            if a is not b and (a.is_dynamic or b.is_dynamic or a.initial != b.initial):
                raise ValueError(
                    f"two optimizers of a model have loss scales of their own, from {b.initial:g} and {a.initial:g}; "
                    "give both the same LossScale"
                )

    def _release(self) -> bool:
        """Discard the gradients of this optimizer's parameters; return whether no other optimizer awaits its own."""
        is_last = self._reducer.release(self)
        if is_last:
            self.loss_scale.update_noted()
        return is_last

    def _update_all(self, coefficient: Tensor, skip: Tensor) -> None:
        # First, on the stream that has used the full buffers: freed on a side stream, their memory would return to that
        # stream's part of the allocator.
        for flat in self._flats:
            flat.reshard()
        self.take_changes()
        self.matrices.begin()  # before the round, which reads the counters of the groups
        self._bucketed.begin_round()
        scales = {p: self._offload.scalars_on(p, coefficient, skip) for p in Placement if self._groups[p]}
        for buckets in self._groups_in_order(scales, with_matrices=True):
            self._update(buckets, scales)
        self.matrices.send()
        published: dict[Bucket, Handle] = {}
        for buckets in self._groups_in_order(scales, with_matrices=False):
            self._update(buckets, scales)
            published |= {bucket: self._publish(bucket) for bucket in buckets}
        self._set_flag(skip)
        self.matrices.compute()
        for buckets in self._groups_in_order(scales, with_matrices=True):
            for bucket in buckets:
                self.matrices.apply(bucket)
                published[bucket] = self._publish(bucket)
        self.matrices.end()
        self._bucketed.end_round()
        # A backward whose forward has run before this update must raise, as in torch.
        torch.autograd.graph.increment_version(self._params)
        self._written.restart()
        self._finish_gathers(published)

    def _groups_in_order(self, scales: Scales, *, with_matrices: bool) -> Iterator[list[Bucket]]:
        """Iterate over the groups of buckets that are updated together, with or without matrices.

        The accelerator's come first: each rank has placed a prefix of the buckets there, perhaps of another length, so
        that all ranks launch their all-gathers in the order of the layout.
        """
        for placement, (_, skip) in scales.items():
            self._set_flag(skip)
            yield from (g for g in self._groups[placement] if (g[0] in self.matrices) is with_matrices)

    def _set_flag(self, skip: Tensor) -> None:
        """Let the optimizer skip its updates if `skip` is not zero, if it takes such a flag."""
        if self._takes_found_inf:
            self.inner.found_inf = skip  # type: ignore[attr-defined]

    def _finish_gathers(self, published: dict[Bucket, Handle]) -> None:
        """Wait for the gathers of updated parameters, or let the first module that reads them wait."""
        for flat in self._flats:
            gathers = {bucket: published[bucket] for bucket in flat.buckets if bucket in published}
            if self._overlaps_gathers and flat.lifetime is Lifetime.PERSISTENT:
                flat.let_updates_run(gathers)
            else:
                for gather in gathers.values():
                    gather.wait()

    def _update(self, buckets: Sequence[Bucket], scales: Scales) -> None:
        """Step the torch optimizer for a group of buckets.

        Their gradients are cast to the master weights' dtype first, into one buffer, or are all used as they are.
        """
        placement = buckets[0].optimizer_placement
        grads = [bucket.grads.owned for bucket in buckets]
        scaled = []
        if buckets[0].casts_gradient:
            scaled = grads = _copies(grads, self.cast_buffers[placement])
        else:
            for bucket, grad in zip(buckets, grads, strict=True):
                # Gradients of other optimizers' parameters keep their values.
                is_shared = self._is_shared[bucket]
                scaled += [cut(grad, piece.elements) for piece in self._pieces[bucket]] if is_shared else [grad]
        if scaled:
            foreach_mul_(scaled, scales[placement][0])
        with allocating(TensorKind.MOMENTS, on_host=placement is Placement.HOST):  # in the optimizer's first step
            elements = [self.matrices.other_pieces[bucket] for bucket in buckets]
            self._bucketed.step(list(zip(elements, grads, strict=True)))
        for bucket, grad in zip(buckets, grads, strict=True):
            self.matrices.prepare(bucket, grad)

    def _publish(self, bucket: Bucket) -> Handle:
        """Copy master weights to the owned parameters, wherever either is placed, and all-gather what was updated."""
        params, master = bucket.params, bucket.master
        if bucket.optimizer_placement is params.placement:
            params.owned.copy_(master)  # returns early if both are the same memory
            return params.all_gather_updated()
        if bucket.optimizer_placement is Placement.HOST:
            return self._offload.to_accelerator(master, params.owned, params.all_gather_updated)
        copied = self._offload.to_host(master.to(params.owned.dtype), params.owned)
        return Handle(params.all_gather_updated().wait, copied.wait)

    @property
    def _takes_found_inf(self) -> bool:
        # Fused SGD accepts it too, but a skipped first step leaves it with a momentum buffer that is not initialized.
        return isinstance(self.inner, (torch.optim.Adam, torch.optim.AdamW)) and bool(self.inner.defaults["fused"])

    def _must_skip(self, skip: Tensor) -> bool:
        """Return whether the host must skip the update; False, without a wait, if the optimizer takes the flag."""
        return not self._takes_found_inf and bool(skip)

    def _buckets_on(self, placement: Placement) -> list[Bucket]:
        return [bucket for bucket in self.buckets if bucket.optimizer_placement is placement]

    def _group_buckets(self) -> None:
        """Group the buckets that are updated together, and allocate one buffer for the casts of a group in each memory.

        The shards of many ranks are so small that the launch of a kernel takes longer than the kernel.
        """
        limit = max(len(bucket.elements) for bucket in self.buckets) // GROUPED_SHARE
        self._groups: dict[Placement, list[list[Bucket]]] = {}
        self.cast_buffers: dict[Placement, Tensor] = {}
        for placement in Placement:
            groups = self._groups[placement] = _consecutive(self._buckets_on(placement), limit, self.matrices)
            if cast := [group for group in groups if group[0].casts_gradient]:
                largest = max(cast, key=_owned_numel)
                self.cast_buffers[placement] = self._offload.new(
                    placement, TensorKind.BUFFERS, _owned_numel(largest), largest[0].master.dtype
                )


def _owned_numel(buckets: Iterable[Bucket]) -> int:
    return sum(bucket.master.numel() for bucket in buckets)


def _consecutive(buckets: Sequence[Bucket], limit: int, matrices: MatrixUpdates) -> list[list[Bucket]]:
    """Group buckets of the same types, in order, with at most `limit` owned elements unless a bucket has more.

    Buckets with matrices are apart from others.
    """

    def kind(bucket: Bucket) -> tuple[object, ...]:
        return bucket.casts_gradient, bucket.master.dtype, bucket in matrices

    groups: list[list[Bucket]] = []
    for bucket in buckets:
        last = groups[-1] if groups else []
        is_alike = bool(last) and kind(last[0]) == kind(bucket)
        if is_alike and _owned_numel([*last, bucket]) <= limit:
            last.append(bucket)
        else:
            groups.append([bucket])
    return groups


def _copies(tensors: list[Tensor], buffer: Tensor) -> list[Tensor]:
    """Return copies of flat tensors, one after the other in the buffer."""
    copies = list(buffer[: sum(map(Tensor.numel, tensors))].split([tensor.numel() for tensor in tensors]))
    foreach_copy_(copies, tensors)
    return copies


def _owned_parts(
    flats: Iterable[FlatParameters], params: Collection[nn.Parameter]
) -> dict[Bucket, list[tuple[nn.Parameter, range]]]:
    """Return the parts of parameters in each shard that this rank owns, for buckets that have some of `params`."""
    return {
        bucket: list(flat.params_in(bucket.shard))
        for flat in flats
        for bucket in flat.buckets
        if any(param in params for param in bucket.grads.parts)
    }


def _pieces(bucket: Bucket, owned: list[tuple[nn.Parameter, range]], group_of: dict[nn.Parameter, int]) -> list[Piece]:
    """Return the optimizer's parameters of one bucket: views of its master weights."""
    return [
        Piece(
            nn.Parameter(bucket.owned_part(bucket.master, part)),
            range(part.start - bucket.shard.start, part.stop - bucket.shard.start),
            group_of[param],
        )
        for param, part in owned
        if param in group_of
    ]
