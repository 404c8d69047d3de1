"""Torch optimizers, run on the shards that this rank owns: element-wise, or by updates of their own.

A step consists of these parts:

    complete     the reductions that are still to come; the parameters that no rank has used, if they are skipped
    sums         the tensor ranks' parts of gradients that are partial along the tensor axis
    hook         `gradient_hook` may change the gradients
    norm         the norm of all gradients, a tensor, the same on all ranks; from it the clip coefficient, and the flag
                 of a step that is skipped: [Note: a gradient that is not finite]
    take         parameters that were written in place since the last step: their master weights follow
    update       bucket by bucket: cast the gradient, let each update change its pieces, write the owned parameters
    publish      bucket by bucket, while the next one is updated: all-gather the updated parameters

[Note: a gradient that is not finite] Such a gradient makes the norm infinite or NaN on every rank, which `step`
notices. Nothing has to be restored, because no update is applied: each gets the flag and leaves parameters and states
as they are. If one takes no flag, the host reads it and calls no update. The gradients are discarded, and a dynamic
loss scale counts the overflow. Buffers of the module, and what user code has changed in forward, are not restored.

The host waits for the device in `step` only: for the flag, if an update takes none; for the message of `skip_unused`;
with states on the host, for the reduced gradients and the clip coefficient; and under a budget of memory, in the steps
that are recorded.
"""

import math
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
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
from zero.core.step.bucket_groups import BucketGroups
from zero.core.step.given import Given, Optimizers, bind, given_optimizers, unchanged_if_refused
from zero.core.step.grad_norm import GradNorm
from zero.core.step.loss_scale import LossScale, SkippedSteps
from zero.core.step.parameter_groups import as_groups
from zero.core.step.pieces import OwnedPieces, OwnedState, Piece, UnusedParameters
from zero.core.step.probe import name_of, probe, update_class_of
from zero.core.step.update import Update, UpdateContext

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
        optimizer: Optimizers,
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
        self._model, self.tensor = model, tensor or Axis.trivial("tensor")
        self._clip_norm = math.inf if clip_norm is None else clip_norm
        if not self._clip_norm > 0:
            raise ConfigError(f"clip_norm={clip_norm} of ZeroOptimizer is not above 0; choose None not to clip")
        device = model.homes.device
        self.loss_scale = LossScale(device=device) if loss_scale is None else loss_scale
        check_type("`tensor` of ZeroOptimizer", self.tensor, Axis, "give it `mesh.tensor`")
        check_type("`loss_scale` of ZeroOptimizer", self.loss_scale, LossScale, "such as LossScale(2.0**16)")
        self.loss_scale.move(device)
        warns = warn_skipped and not self.loss_scale.is_dynamic
        self._skipped_steps = SkippedSteps(device, max_skipped_in_a_row, warns)
        given = self._given(optimizer, groups, settings)
        model.check_unattached()
        with unchanged_if_refused(given):
            self._make_updates(given, skip_unused)
        pieces = self.pieces
        self._update_of = {number: update for update in self.updates for number in update.groups}
        param_groups = [self._update_of[number].groups[number] for number in range(len(self._update_of))]
        super().__init__(param_groups, self._common_defaults())
        # Never empty: torch's code for checkpoints steps an optimizer that has no state.
        for param, of_param in pieces.by_param.items():
            self.state[param] = OwnedState(of_param, self.update_of(pieces.group_of[param]).optimizer)
        split = {model.module.get_parameter(name) for name in split_dims(model.module)}
        self.grad_norm = self._norm_class()(pieces.owned, pieces.params, self.tensor, split, self.loss_scale.scale)
        self._sums = self._deferred_sums()
        self._bucket_groups = BucketGroups(pieces.flats, self.buckets, self._assembled)
        for update in self.updates:
            self._take_calls_of(update)
        model.attach(self)

    def _given(self, optimizer: Optimizers, groups: Iterable[Any] | None, settings: Mapping[str, Any]) -> list[Given]:
        """Return the torch optimizers that the arguments of the constructor describe."""
        return given_optimizers(optimizer, groups, settings, self._model.module.parameters())

    def _norm_class(self) -> type[GradNorm]:
        """Return the class of the norm of the gradients."""
        return GradNorm

    def _make_context(self, given: Sequence[Given]) -> UpdateContext:
        """Check the optimizers, and find the owned pieces of their parameters."""
        model, tensor, by_number = self._model, self.tensor, dict[int, tuple[dict[str, Any], float]]()
        for one in given:
            device, alignment = model.homes.optimizer.device, model.config.alignment
            if one.instance is not None:
                update_class_of(one.instance).check_states(one.instance)
            state_bytes = probe(one.make, one.settings, device, one.groups, alignment, name_of(one.optimizer_class))
            by_number |= zip(one.numbers, zip(one.groups, state_bytes, strict=True), strict=True)
        groups, all_bytes = zip(*(by_number[number] for number in range(len(by_number))), strict=True)
        groups = as_groups(groups)  # checks that no parameter is in two of them
        trainable = [flat for flat in model.flats if flat.is_trainable]
        pieces = OwnedPieces(trainable, groups, set(model.module.parameters()))
        return UpdateContext(
            groups=groups,
            bytes_per_element=all_bytes,
            module=model.module,
            pieces=pieces,
            find_axes=lambda: (model.shard_axis, model.replica_axis, tensor),
            homes=model.homes,
            is_rank_invariant=model.is_rank_invariant,
        )

    def _make_updates(self, given: Sequence[Given], skip_unused: bool) -> None:
        """Give all optimizers their owned pieces, and each an update. All that refuses an optimizer is in here."""
        self._context = self._make_context(given)
        self.pieces = self._context.pieces
        of_pieces, split = self.pieces.groups(self._context.groups), split_dims(self._model.module)
        self.updates = []
        for one in given:
            optimizer = one.of_pieces([of_pieces[number] for number in one.numbers], self.pieces.by_param)
            self.pieces.locate(optimizer, split, self.tensor)
            self.updates.append(update_class_of(optimizer)(optimizer, one.numbers, self._context))
        self._assembled = Counter(bucket for update in self.updates for bucket in update.assembled)
        assembles = bool(self._assembled)
        if skip_unused:
            self._model.check_one_division("skip_unused")
        self._unused = UnusedParameters(self.pieces, self._model.module, skips=skip_unused, assembles=assembles)

    def _common_defaults(self) -> dict[str, Any]:
        """Return the defaults of the only optimizer, or those that all have."""
        first, *others = (update.optimizer.defaults for update in self.updates)
        if not others:
            return first  # itself: schedules read and write it
        return {name: value for name, value in first.items() if all(name in other for other in others)}

    @property
    def inner(self) -> torch.optim.Optimizer:
        """The torch optimizer, whose states are those of the owned pieces. Raises ValueError if there are several."""
        if len(self.updates) > 1:
            raise ValueError("this ZeroOptimizer has several optimizers; read the `optimizer` of each of its `updates`")
        return self.updates[0].optimizer

    @property
    def state_bytes_per_element(self) -> float:
        """The bytes of the optimizer's states for each element in fp32, in the mean over the parameters."""
        numels = {param: param.numel() for param in self.pieces.group_of}
        found = sum(
            self._context.bytes_per_element[number] * numels[param] for param, number in self.pieces.group_of.items()
        )
        return (found + self.assembled_state_bytes) / sum(numels.values())

    @property
    def assembled_state_bytes(self) -> float:
        """The bytes of states of what is put together, such as whole matrices, of all ranks along the shard axis."""
        return sum(update.assembled_state_bytes for update in self.updates)

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
        return list(self.pieces.by_bucket)

    def update_of(self, group: int) -> Update:
        """Return the update of the parameter group with this number."""
        return self._update_of[group]

    def states_of(self, piece: Piece) -> dict[str, Any]:
        """Return the states of a piece in its torch optimizer; {} before its first step."""
        return self.update_of(piece.group).optimizer.state[piece.param]

    def pieces_of(self, bucket: Bucket) -> list[Piece]:
        """Return the owned pieces of parameters in a bucket: views of its master weights."""
        return self.pieces.by_bucket[bucket]

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
        `skip`: 0-dim, the same on all ranks; if it is not zero nothing is updated. The loss scale does not change.
        `gradient_hook` is called while the owned `gradients` are reduced and not yet clipped.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        model = self._model
        axes = model.data, self.tensor
        model.before_step(self.pieces.params)
        model.reducer.complete()
        self._unused.find(model.reducer.used, axes, model.homes.device)
        model.extensions.before_update()
        self._bucket_groups.settle()  # gradients that were copied to their homes
        for sums, parts in self._sums:
            sums.sum_at_once([bucket.owned_part(bucket.grads.own, part) for bucket, part in parts])
        with ExitStack() as steps:
            for update in self.updates:
                steps.enter_context(update.stepping())
            gradient_hook()
            norm = self.grad_norm.total()
            coefficient = (self._clip_norm / (norm + 1e-6)).clamp(max=1.0) / self.loss_scale.scale
            found_inf = (~norm.isfinite()).float()
            skipped = found_inf if skip is None else torch.maximum(found_inf, skip.float())
            # If an optimizer takes no flag, the host waits for the device.
            if all(update.skips_by_itself for update in self.updates) or not bool(skipped):
                with self._publishing():
                    self._update_all(coefficient, skipped)
        self.loss_scale.update(found_inf)
        self.zero_grad()
        model.extensions.after_update()
        self._skipped_steps.record(found_inf, skipped)  # last: it may raise
        return norm if closure is None else loss

    def gradients(self) -> Iterator[tuple[str, Tensor]]:
        """Iterate over the owned gradients, times the loss scale: a parameter's name and a flat view, for each piece.

        For the `gradient_hook` of `step`; writes change the update and the norm. Raises RuntimeError elsewhere.
        """
        if not self.updates[0].is_stepping:
            raise RuntimeError(
                "ZeroOptimizer.gradients() was called outside a step; call it in `step(gradient_hook=...)`, where the "
                "gradients are reduced"
            )
        for bucket, pieces in self.pieces.by_bucket.items():
            for piece in pieces:
                yield piece.name, bucket.grads.own[piece.elements.start : piece.elements.stop]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuse another group: the pieces are made once, in the constructor, of all groups."""
        if len(self.param_groups) == (given := sum(len(update.groups) for update in self.updates)):
            raise ValueError(
                f"add_param_group: ZeroOptimizer was made with {given} parameter groups; make a new one with all groups"
            )
        super().add_param_group(param_group)

    def __repr__(self) -> str:
        classes = " and ".join(type(update.optimizer).__name__ for update in self.updates)
        names = f"{classes}, clip_norm={self._clip_norm}, loss_scale={self.loss_scale.initial:g}"
        return f"{type(self).__name__}({names})" + super().__repr__().removeprefix(type(self).__name__)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Discard the gradients, and what a backward that raised has left; `step` does so by itself.

        `set_to_none` has no effect: gradients that were discarded and gradients of zero are the same here.
        """
        self._model.zero_grad()

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
        moments = sum(update.state_bytes(self.pieces_of(bucket)) for update in self.updates)
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
        for update in self.updates:
            update.move(self.pieces_of(bucket), bucket.master, partial(home.new, TensorKind.MOMENTS))
        bucket.grads.place(home)
        self._bucket_groups.regroup()

    def _take_calls_of(self, update: Update) -> None:
        """Let calls of a torch optimizer that concern gradients, parameters or states reach this one, or be refused."""
        this = weakref.proxy(self)
        bind(update.optimizer, this)
        update.refuse_other_steps()
        for name in ("eval", "train"):  # of a schedule-free optimizer, which trains and evaluates with other values
            if callable(method := getattr(update.optimizer, name, None)):
                switch = partial(ShardedOptimizer._set_mode, this, weakref.ref(update), weakref.WeakMethod(method))
                setattr(update.optimizer, name, partial(switch, name))

    def _deferred_sums(self) -> list[tuple[GradientSums, list[tuple[Bucket, range]]]]:
        """Return the gradient sums that `step` makes, whose hooks are off, each with parts of parameters."""
        found: list[tuple[GradientSums, list[tuple[Bucket, range]]]] = []
        # The number of ranks would cut a message of owned shards, and change the order in which its elements are added.
        is_deferred = self.tensor.size > 1 and not self._model.is_rank_invariant
        for sums in set_deferred(self._model.module, is_deferred):
            if not is_deferred:
                continue
            summed = self.pieces.params.intersection(sums.params)
            owned = ((bucket, part) for bucket, parts in self.pieces.owned.items() for part in parts)
            found.append((sums, [(bucket, part.elements) for bucket, part in owned if part.param in summed]))
        return found

    @contextmanager
    def _publishing(self) -> Iterator[None]:
        """Let the owned pieces be written inside this context, in which the gathers of all buckets are launched."""
        # First, on the stream that has used the full buffers: freed on a side stream, their memory would return to that
        # stream's part of the allocator.
        for flat in self.pieces.flats:
            flat.reshard()
        self.take_changes()
        yield
        # A backward whose forward has run before this update must raise, as in torch.
        torch.autograd.graph.increment_version(self.pieces.params)
        self._bucket_groups.expect_equal()
        self._model.after_owned_changed()
        self._bucket_groups.finish_publishing(self._model.extensions)

    @torch.no_grad()
    def _set_mode(
        self, update_ref: weakref.ref[Update], method: weakref.WeakMethod[Callable[[], object]], name: str
    ) -> None:
        """Call `train` or `eval` of an optimizer, which write its parameters between steps; the model's follow."""
        update, call = update_ref(), method()
        assert update is not None
        assert call is not None
        if all(group.get("train_mode") is (name == "train") for group in update.groups.values()):
            return  # the parameters have these values already
        with self._publishing():
            self._bucket_groups.settle()  # it writes what may still be copied
            with update.with_pieces():
                call()
            for bucket in self.buckets:
                self._bucket_groups.publish(bucket)

    def _update_all(self, coefficient: Tensor, skip: Tensor) -> None:
        for update in self.updates:
            update.begin()
        scales = {home: home.scalars(coefficient, skip) for home in self._bucket_groups.homes}
        for buckets in self._groups_in_order(scales, assembled=True):
            self._update(buckets, scales)
        for update in self.updates:
            update.send()
        for buckets in self._groups_in_order(scales, assembled=False):
            self._update(buckets, scales)
            for bucket in buckets:
                self._bucket_groups.publish(bucket)
        for update in self.updates:
            update.set_flag(skip)
            update.compute()
        awaited = self._assembled.copy()  # updates that a bucket waits for
        for update in self.updates:
            for is_last in update.returned():
                awaited.subtract(update.assembled if is_last else ())
                for bucket in (one for buckets in self._groups_in_order(scales, assembled=True) for one in buckets):
                    if bucket in update.assembled:
                        update.apply(bucket)
                        if not awaited[bucket]:
                            self._bucket_groups.publish(bucket)
        for update in self.updates:
            update.end()

    def _groups_in_order(self, scales: Scales, *, assembled: bool) -> Iterator[list[Bucket]]:
        """Iterate over the groups of buckets that are updated together, those with assembled pieces or the others.

        The accelerator's come first: each rank has placed a prefix of the buckets there, perhaps of another length, so
        that all ranks launch their all-gathers in the order of the layout.
        """
        for home, (_, skip) in scales.items():
            for update in self.updates:
                update.set_flag(skip)
            yield from self._bucket_groups.of(home, assembled=assembled)

    def _update(self, buckets: list[Bucket], scales: Scales) -> None:
        """Update a group of buckets.

        Their gradients are cast to the master weights' dtype first, into one buffer, or are all used as they are.
        """
        home = buckets[0].home
        grads = [bucket.grads.own for bucket in buckets]
        if buckets[0].casts_gradient:
            scaled = grads = self._bucket_groups.cast(grads, home)
        else:
            scaled = [grad for bucket in buckets for grad in self.pieces.own_grads(bucket)]
        if scaled:
            foreach_mul_(scaled, scales[home][0])
        for update in self.updates:
            update.update(list(zip(buckets, grads, strict=True)), self._unused.pieces)
