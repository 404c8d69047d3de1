"""Any element-wise torch optimizer, or one that declares another atom, run on the shards that this rank owns.

    sums         the tensor ranks' parts of gradients that are partial along the tensor axis
    grad_norm    the norm of all gradients, a tensor, and from it the clip coefficient, a tensor
    take         parameters that were written in place since the last step: their master weights follow
    update       bucket by bucket: cast the gradient, step the torch optimizer, write the owned parameters; matrices in
                 the steps of zero/updates/matrix_updates.py
    publish      bucket by bucket, while the next one is updated: all-gather the updated parameters

Without offload the host waits for the device in `step` only, where it reads the flag of a skipped step if the optimizer
cannot skip one by itself, and the message of `skip_unused`. With states on the host it also waits for the reduced
gradients and the clip coefficient, and under a budget of memory in the steps that are recorded.
"""

import math
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from parallel.autograd_internals import foreach_mul_
from parallel.memory_kinds import TensorKind
from parallel.mesh import Axis
from parallel.tensor.gradient_sums import GradientSums, set_deferred
from parallel.tensor.split_parameters import split_dims
from parallel.validation.errors import ConfigError, check_type
from zero.core.buckets.bucket import Bucket
from zero.core.engine import Engine
from zero.core.protocols.home import Home
from zero.core.step.assembled_updates import assembled_updates
from zero.core.step.bucket_groups import BucketGroups
from zero.core.step.bucketed_optimizer import BucketedOptimizer
from zero.core.step.grad_norm import GradNorm
from zero.core.step.loss_scale import LossScale, SkippedSteps
from zero.core.step.pieces import OwnedPieces, OwnedState, Piece, UnusedParameters, as_groups, check_class
from zero.core.step.probe import probe_atoms

Scales = dict[Home, tuple[Tensor, ...]]  # (clip coefficient, flag of a skipped step) as each home uses them


class ShardedOptimizer(torch.optim.Optimizer):
    """The update of an engine's parameters: on each rank, a torch optimizer of the pieces of them that it owns.

    `ZeroOptimizer` derives from it, and describes it.
    """

    engine_class: ClassVar[type[Engine]] = Engine
    """The class of `model`."""

    def __init__(
        self,
        model: Engine,
        optimizer: type[torch.optim.Optimizer],
        groups: Iterable[Any] | None = None,
        *,
        tensor: Axis | None = None,
        clip_norm: float | None = None,
        loss_scale: LossScale | None = None,
        max_skipped_in_a_row: int | None = 50,
        warn_skipped: bool = True,
        skip_unused: bool = False,
        **settings: Any,
    ):
        remedy = "wrap the module, and give what that returns"
        check_type("`model` of ZeroOptimizer", model, self.engine_class, remedy)
        check_class(optimizer)
        self._model, self.tensor = model, tensor or Axis.trivial("tensor")
        self._clip_norm = math.inf if clip_norm is None else clip_norm
        if not self._clip_norm > 0:
            raise ConfigError(f"clip_norm={clip_norm} of ZeroOptimizer is not above 0; choose None not to clip")
        device = model.homes.device
        self.loss_scale = LossScale(device=device) if loss_scale is None else loss_scale
        check_type("`tensor` of ZeroOptimizer", self.tensor, Axis, "give it `mesh.tensor`")
        check_type("`loss_scale` of ZeroOptimizer", self.loss_scale, LossScale, "such as LossScale(2.0**16)")
        warns = warn_skipped and not self.loss_scale.is_dynamic
        self._skipped_steps = SkippedSteps(device, max_skipped_in_a_row, warns)
        groups = as_groups(model.module.parameters() if groups is None else groups)
        state_bytes = probe_atoms(optimizer, settings, model.homes.optimizer.device, groups, model.config.alignment)
        flats = [flat for flat in model.flats if flat.is_trainable]
        pieces = self._pieces = OwnedPieces(flats, groups, set(model.module.parameters()))
        self._bucketed = BucketedOptimizer(optimizer(pieces.groups(groups), **settings), state_bytes, groups)
        super().__init__(self.inner.param_groups, self.inner.defaults)
        # Never empty: torch's code for checkpoints steps an optimizer that has no state.
        self.state.update({param: OwnedState(of_param, self.inner) for param, of_param in pieces.by_param.items()})
        pieces.locate(self.inner, split_dims(model.module), self.tensor)
        split = {model.module.get_parameter(name) for name in split_dims(model.module)}
        self.matrices = assembled_updates(self.inner, model, pieces, self.tensor)
        assembles = bool(self.matrices.buckets)
        if skip_unused:
            model.check_one_division("skip_unused")
        self._unused = UnusedParameters(pieces, model.module, skips=skip_unused, assembles=assembles)
        self.grad_norm = GradNorm(pieces.owned, pieces.params, self.tensor, split, self.loss_scale.scale)
        self._check_others()
        self._sums = self._deferred_sums()
        self._bucket_groups = BucketGroups(flats, self.buckets, self.matrices.buckets)
        self._take_calls_of_inner()
        model.reducer.users.add(self, pieces.params)

    @property
    def inner(self) -> torch.optim.Optimizer:
        """The torch optimizer, whose states are those of the owned pieces; the `param_groups` of both are the same."""
        return self._bucketed.inner

    @property
    def state_bytes_per_element(self) -> float:
        """The bytes of the optimizer's states for each element in fp32, in the mean over the parameters."""
        numels = {param: param.numel() for param in self._pieces.group_of}
        of_groups = self._bucketed.bytes_per_element
        state_bytes = sum(of_groups[number] * numels[param] for param, number in self._pieces.group_of.items())
        return (state_bytes + self.matrices.state_bytes) / sum(numels.values())

    @property
    def num_skipped(self) -> Tensor:
        """The number of steps that were skipped, a tensor on the device."""
        return self._skipped_steps.num_skipped

    @property
    def cast_buffers(self) -> dict[Home, Tensor]:
        """The buffer of cast gradients in each home that needs one."""
        return self._bucket_groups.cast_buffers

    @property
    def buckets(self) -> list[Bucket]:
        """The buckets of all trainable parameters, in the order of the layout."""
        return list(self._pieces.by_bucket)

    def pieces_of(self, bucket: Bucket) -> list[Piece]:
        """Return the owned pieces of parameters in a bucket: views of its master weights."""
        return self._pieces.by_bucket[bucket]

    @torch.no_grad()
    def step(
        self,
        closure: Callable[[], Any] | None = None,
        *,
        skip: Tensor | None = None,
        gradient_hook: Callable[[], object] = lambda: None,
    ) -> Any:
        """Update the parameters; return the norm of their gradients before clipping, without the loss scale.

        `closure` runs a step's forwards and backwards first, and what it returns is returned instead of the norm.
        `skip`: 0-dim, the same on all ranks; if it is not zero nothing is updated, as after an overflow.
        `gradient_hook` is called while the owned `gradients` are reduced and not yet clipped.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        model = self._model
        axes = model.data, self.tensor
        model.before_step(self._pieces.params)
        model.reducer.complete()
        self._unused.find(model.reducer.used, axes, model.homes.device)
        model.extensions.before_update()
        model.residency.before_update(axes)
        self._bucket_groups.settle()  # gradients that were copied to their homes
        for sums, parts in self._sums:
            sums.sum_at_once([bucket.owned_part(bucket.grads.own, part) for bucket, part in parts])
        with self._bucketed.stepping():
            gradient_hook()
            norm = self.grad_norm.total()
            coefficient = (self._clip_norm / (norm + 1e-6)).clamp(max=1.0) / self.loss_scale.scale
            found_inf = (~norm.isfinite()).float()
            skipped = found_inf if skip is None else torch.maximum(found_inf, skip.float())
            if not self._bucketed.skips_by_itself and bool(skipped):  # the host waits for the device
                self._bucketed.skip_round()
            else:
                with self._publishing():
                    self._update_all(coefficient, skipped)
        self.loss_scale.note(found_inf)
        if self._release():
            model.residency.after_update(axes, self.buckets, self.bytes_to_place, self.place)
        model.extensions.after_update()
        self._skipped_steps.record(found_inf, skipped)  # last: it may raise
        return norm if closure is None else loss

    def gradients(self) -> Iterator[tuple[str, Tensor]]:
        """Iterate over the owned gradients, times the loss scale: a parameter's name and a flat view, for each piece.

        For the `gradient_hook` of `step`; writes change the update and the norm. Raises RuntimeError elsewhere.
        """
        if not self._bucketed.is_stepping:
            raise RuntimeError(
                "ZeroOptimizer.gradients() was called outside a step; call it in `step(gradient_hook=...)`, where the "
                "gradients are reduced"
            )
        for bucket, pieces in self._pieces.by_bucket.items():
            for piece in pieces:
                yield piece.name, bucket.grads.own[piece.elements.start : piece.elements.stop]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuse another group: the pieces are made once, in the constructor, of all groups."""
        if len(self.param_groups) == (given := len(self.inner.param_groups)):
            raise ValueError(
                f"add_param_group: ZeroOptimizer was made with {given} parameter groups; make a new one with all groups"
            )
        super().add_param_group(param_group)

    def __repr__(self) -> str:
        names = f"{type(self.inner).__name__}, clip_norm={self._clip_norm}, loss_scale={self.loss_scale.initial:g}"
        return f"{type(self).__name__}({names})" + super().__repr__().removeprefix(type(self).__name__)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Discard the gradients, as after a backward that failed; `step` does so by itself.

        `set_to_none` has no effect: gradients that were discarded and gradients of zero are the same here.
        """
        self._release()

    @torch.no_grad()
    def take_changes(self) -> None:
        """Let master weights follow parameters that were written in place; `step` and saving the state call this."""
        self._model.wait_for_updates()
        for flat in self._model.flats:
            flat.take_replaced()
        self._bucket_groups.take_written()

    def bytes_to_place(self, bucket: Bucket) -> int:
        """Return the memory that `place` would allocate on the accelerator, without the cast buffer."""
        needs_own_master = bucket.master.dtype != bucket.params.own.dtype or bucket.params.home.is_apart
        # Full gradients that persist have it already.
        gradient = 0 if bucket.grads.path.persists else bucket.grads.total.rest.nbytes
        moments = self._bucketed.state_bytes(self.pieces_of(bucket))
        return moments + bucket.master.nbytes * needs_own_master + gradient

    def place(self, bucket: Bucket, home: Home) -> None:
        """Move a bucket's master weights, moments and owned gradient, between steps. The gradient's values are lost.

        The bucket's all-gather changes its place in the update: all ranks move the same buckets, or those that are on
        the accelerator are the first ones of the layout on each. Raises ValueError if states of this model begin in no
        such home.
        """
        if home not in self._model.homes.all:
            raise ValueError(f"{type(home).__name__} is no home of this model; give it to ZeroDataParallel by `homes`")
        self._model.wait_for_updates()  # gathers read the owned parameters, which may be the master weights
        bucket.place_master(home)
        self._bucketed.move(self.pieces_of(bucket), bucket.master, partial(home.new, TensorKind.MOMENTS))
        bucket.grads.place(home)
        self._bucket_groups.regroup()

    def _take_calls_of_inner(self) -> None:
        """Let calls of `inner` that concern gradients or parameters reach this optimizer."""
        this = weakref.proxy(self)  # a reference from `inner` would keep this optimizer alive
        self.inner.zero_grad = lambda set_to_none=True: this.zero_grad(set_to_none)  # type: ignore[method-assign]
        self.inner.add_param_group = lambda param_group: this.add_param_group(param_group)  # type: ignore[method-assign]
        for name in ("eval", "train"):  # of a schedule-free optimizer, which trains and evaluates with other values
            if callable(method := getattr(self.inner, name, None)):
                setattr(self.inner, name, partial(ShardedOptimizer._set_mode, this, weakref.WeakMethod(method), name))

    def _deferred_sums(self) -> list[tuple[GradientSums, list[tuple[Bucket, range]]]]:
        """Switch off the hooks of gradient sums; return each of these with this rank's parts of its parameters."""
        found: list[tuple[GradientSums, list[tuple[Bucket, range]]]] = []
        # The number of ranks would cut a message of owned shards, and change the order in which its elements are added.
        if self.tensor.size == 1 or self._model.is_exact:
            return found
        for sums in set_deferred(self._model.module, True):
            summed = self._pieces.params.intersection(sums.params)
            owned = ((bucket, part) for bucket, parts in self._pieces.owned.items() for part in parts)
            found.append((sums, [(bucket, part.elements) for bucket, part in owned if part.param in summed]))
        return found

    def _check_others(self) -> None:
        """Check that the model's other optimizers and this one can use the same gradients, buckets and loss scale."""
        for other in self._model.reducer.users.params_of:
            if (self.tensor.group, self.tensor.size) != (other.tensor.group, other.tensor.size):
                raise ConfigError(
                    f"two optimizers of a model have `tensor` axes of their own, of {other.tensor.size} and "
                    f"{self.tensor.size} ranks, and the gradients of one would not be summed over them; give both the "
                    "same axis"
                )
            a, b = self.loss_scale, other.loss_scale
            if a is not b and (a.is_dynamic or b.is_dynamic or a.initial != b.initial):
                raise ValueError(
                    f"two optimizers of a model have loss scales of their own, from {b.initial:g} and {a.initial:g}; "
                    "give both the same LossScale"
                )

    def _release(self) -> bool:
        """Discard the gradients of this optimizer's parameters; return whether no other optimizer awaits its own."""
        is_last = self._model.reducer.release(self)
        if is_last:
            self.loss_scale.update_noted()
        return is_last

    @contextmanager
    def _publishing(self) -> Iterator[None]:
        """Let the owned pieces be written inside this context, in which the gathers of all buckets are launched."""
        # First, on the stream that has used the full buffers: freed on a side stream, their memory would return to that
        # stream's part of the allocator.
        for flat in self._pieces.flats:
            flat.reshard()
        self.take_changes()
        yield
        # A backward whose forward has run before this update must raise, as in torch.
        torch.autograd.graph.increment_version(self._pieces.params)
        self._bucket_groups.expect_equal()
        self._model.after_owned_changed()
        self._bucket_groups.finish_publishing(overlaps=self._model.config.overlap_gather)

    @torch.no_grad()
    def _set_mode(self, method: weakref.WeakMethod[Callable[[], object]], name: str) -> None:
        """Call `train` or `eval` of `inner`, which write its parameters between steps; those of the model follow."""
        call = method()
        assert call is not None
        if all(group.get("train_mode") is (name == "train") for group in self.param_groups):
            return  # the parameters have these values already
        with self._publishing():
            self._bucket_groups.settle()  # it writes what may still be copied
            with self._bucketed.with_pieces():
                call()
            for bucket in self.buckets:
                self._bucket_groups.publish(bucket)

    def _update_all(self, coefficient: Tensor, skip: Tensor) -> None:
        self.matrices.begin()  # before the round, which reads the counters of the groups
        self._bucketed.begin_round()
        scales = {home: home.scalars(coefficient, skip) for home in self._bucket_groups.homes}
        for buckets in self._groups_in_order(scales, with_matrices=True):
            self._update(buckets, scales)
        self.matrices.send()
        for buckets in self._groups_in_order(scales, with_matrices=False):
            self._update(buckets, scales)
            for bucket in buckets:
                self._bucket_groups.publish(bucket)
        self._bucketed.set_flag(skip)
        self.matrices.compute()
        for is_last in self.matrices.returned():
            for buckets in self._groups_in_order(scales, with_matrices=True):
                for bucket in buckets:
                    self.matrices.apply(bucket)
                    if is_last:
                        self._bucket_groups.publish(bucket)
        self.matrices.end()
        self._bucketed.end_round()

    def _groups_in_order(self, scales: Scales, *, with_matrices: bool) -> Iterator[list[Bucket]]:
        """Iterate over the groups of buckets that are updated together, with or without matrices.

        The accelerator's come first: each rank has placed a prefix of the buckets there, perhaps of another length, so
        that all ranks launch their all-gathers in the order of the layout.
        """
        for home, (_, skip) in scales.items():
            self._bucketed.set_flag(skip)
            yield from self._bucket_groups.of(home, with_matrices=with_matrices)

    def _update(self, buckets: list[Bucket], scales: Scales) -> None:
        """Step the torch optimizer for a group of buckets.

        Their gradients are cast to the master weights' dtype first, into one buffer, or are all used as they are.
        """
        home = buckets[0].home
        grads = [bucket.grads.own for bucket in buckets]
        if buckets[0].casts_gradient:
            scaled = grads = self._bucket_groups.cast(grads, home)
        else:
            scaled = [grad for bucket in buckets for grad in self._pieces.own_grads(bucket)]
        if scaled:
            foreach_mul_(scaled, scales[home][0])
        with home.allocating(TensorKind.MOMENTS):  # in the optimizer's first step
            elements = [self._unused.without(self.matrices.other_pieces[bucket]) for bucket in buckets]
            self._bucketed.step(list(zip(elements, grads, strict=True)))
        for bucket, grad in zip(buckets, grads, strict=True):
            self.matrices.prepare(bucket, grad)
