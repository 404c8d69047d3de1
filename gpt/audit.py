"""Checks for silent data corruption: replicas are compared, leaves computed again, and states at rest hashed.

`compare_replicas` compares what ranks should have alike. An `Auditor` also finds what has no replica: with
`train.reproducible: layout` the gradient of a leaf has the same bits on every rank, so a difference is a fault. N
groups of ranks compute leaves; a group has one rank, or those of a tensor and a context group.

backward of the step   group q computes its own leaf                 -> own[q]
audit                  group q computes the leaf of group q + 1      -> again[q], which should be own[q + 1]
only if one differs    group q computes the leaf of group q - 1      -> third[q]; third[q + 2] is of the same leaf too

A leaf's gradients are hashed as they leave autograd, before they are added or sent. What rests between two updates, the
master weights, the optimizer's states and the owned parameters of stage 3, has hashes that each update renews and that
are compared before the next one. How many differ is sent with the losses, and read by the host one step later, so that
it waits for no device.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace

import torch
from torch import Tensor

from data.batches import BatchLoader
from data.documents import MicroBatch
from gpt.builder.leaves import Leaves
from gpt.builder.train_state import TrainState
from gpt.monitor.node_map import span
from gpt.train_step import differentiate, loss_dtype, loss_factor, mean_count, num_counted, share_of
from parallel.mesh import Axis
from parallel.tensor.split_parameters import split_dims
from parallel.validation.errors import ConfigError
from zero.core.partition.stage import Lifetime
from zero.extensions.hashes import GradientHashes, bit_sum

REMEDY = "the machine corrupts data silently: resume from a checkpoint without it"
REPLICAS_REMEDY = "the machine may corrupt data silently: resume from a checkpoint without it"
MOST_NAMES = 3  # in an error

NamedTensors = Iterable[tuple[str, Tensor]]


class DivergenceError(ConfigError):
    """An error raised if replicas differ, most likely because a machine corrupts data silently."""


class Auditor:
    """The audits of a run."""

    def __init__(self, every: int, state: TrainState, loader: BatchLoader, places: Sequence[str]):
        """`every`: steps between two audits; 0: nothing is ever hashed. `places`: where each rank runs, for errors."""
        self._every, self._state, self._loader, self._places = every, state, loader, places
        self._at_rest: Tensor | None = None  # hashes of the states since the last update
        self._found: tuple[int, Tensor] | None = None  # a step, and how many hashes differ: (data, tensor ranks)

    def restart(self) -> None:
        """Take the states as they are, such as those of a checkpoint that was loaded."""
        self._at_rest = self._found = None

    @contextmanager
    def step(self, step: int, samples: tuple[int, int], micro_batches: Sequence[MicroBatch]) -> Iterator[Leaves | None]:
        """Yield the leaves of a step, whose update is refused by a DivergenceError if an audit finds a fault.

        `samples`: the number of the step's first sample, and how many it has.
        """
        leaves = self._state.leaves and replace(self._state.leaves, step=step)
        if leaves is None or not self._every:
            yield leaves
            return
        if self._at_rest is None:
            self._at_rest = self._hash_states()
        is_audited = step % self._every == 0
        model, device = self._state.model, self._state.device
        with model.extended(GradientHashes(device)) if is_audited else nullcontext() as hashes:

            def exchange(losses: Tensor) -> Tensor:
                self.raise_found()
                of_ranks = leaves.data.gather_by_rank(torch.cat([losses, self._compare_states()]))
                self._found = step, of_ranks[:, len(losses) :]
                if hashes is not None:
                    self._audit(leaves, hashes, samples, micro_batches)
                return of_ranks[:, : len(losses)]

            yield replace(leaves, exchange=exchange)
        self._at_rest = self._hash_states()

    def raise_found(self) -> None:
        """Raise DivergenceError if a state was not that of the update before it when it was compared last.

        Waits for the device. Call it before anything is saved.
        """
        if self._found is None:
            return
        (step, numbers), self._found = self._found, None
        if damaged := [rank for rank, number in enumerate(numbers.flatten().tolist()) if number]:
            names = " and ".join(self._name([rank]) for rank in damaged)
            raise DivergenceError(
                f"step {step}: model states of {names} have changed since the update before, which wrote them; {REMEDY}"
            )

    @torch.no_grad()
    def _hash_states(self) -> Tensor:
        """Return a hash for each tensor that this rank keeps from one update to the next."""
        state = self._state
        tensors = [bucket.master for bucket in state.model.buckets]
        for flat in state.model.flats:
            if flat.lifetime is Lifetime.TRANSIENT:
                for bucket in flat.buckets:
                    bucket.params.wait_for_update()  # it may be on its way to host memory
                    tensors.append(bucket.params.own)
        tensors += [tensor for _, tensor in optimizer_states(state)]
        return torch.stack([bit_sum(tensor).to(state.device) for tensor in tensors])

    @torch.no_grad()
    def _compare_states(self) -> Tensor:
        """Return how many states differ from their hashes on each rank of the tensor axis, as floats."""
        assert self._at_rest is not None
        number = (self._hash_states() != self._at_rest).sum().double()
        with self._state.mesh.log.during("audit"):
            return self._state.mesh.tensor.gather_by_rank(number)

    def _audit(
        self,
        leaves: Leaves,
        hashes: GradientHashes,
        samples: tuple[int, int],
        micro_batches: Sequence[MicroBatch],
    ) -> None:
        """Compute a leaf of another group again, and raise DivergenceError if its gradients are not the same."""
        leaf = (leaves.step // self._every) % len(micro_batches)
        model, mesh, optimizer = self._state.model, self._state.mesh, self._state.optimizer
        dtype, scale = loss_dtype(model), loss_factor(model, optimizer, len(micro_batches))

        def compute_again(shift: int) -> list[int]:
            rank = (mesh.batch_rank + shift) % mesh.num_batch_ranks
            batch = self._loader.read_of(rank, leaf, *samples).to(self._state.device)
            share = share_of(num_counted(batch, mesh), mean, dtype)
            leaves.seed(leaf, len(micro_batches), shift * mesh.context.size)
            with model.extended(GradientHashes(self._state.device, discards=True)) as again:
                differentiate(model, batch, mesh, share, scale)
            return self._gather(again[0])

        with mesh.log.during("audit"):
            mean = mean_count([num_counted(batch, mesh) for batch in micro_batches], mesh)
            own, again = self._gather(hashes[leaf]), compute_again(1)
            if again == own[1:] + own[:1]:
                return
            self.raise_found()  # groups of ranks compute with different weights if a shard of one of them has changed
            faulty, undecided = find_faulty(own, again, compute_again(-1))
        named = [self._name(self._ranks_of(group)) for group in faulty]
        named += [f"{' or '.join(self._name(self._ranks_of(group)) for group in pair)}" for pair in undecided]
        raise DivergenceError(
            f"step {leaves.step}: gradients of micro-batch {leaf} have other bits if another rank computes them; wrong "
            f"{'are those' if faulty else 'may be those'} of {', and of '.join(named)}; {REMEDY}"
        )

    @torch.no_grad()
    def _gather(self, own: Tensor) -> list[int]:
        """Return the hashes of all groups, which are the sums of those of their ranks. Waits for the device."""
        mesh = self._state.mesh
        for axis in (mesh.tensor, mesh.context):
            axis.all_reduce(own, out=own).wait()
        return mesh.data.gather_by_rank(own)[:: mesh.context.size].tolist()

    def _ranks_of(self, group: int) -> list[int]:
        size = self._state.mesh.context.size * self._state.mesh.tensor.size
        return list(range(group * size, (group + 1) * size))

    def _name(self, ranks: list[int]) -> str:
        places = ", ".join(dict.fromkeys(self._places[rank] for rank in ranks))
        return f"rank{'s' if len(ranks) > 1 else ''} {span(ranks)} ({places})"


def find_faulty(own: list[int], again: list[int], third: list[int]) -> tuple[list[int], list[tuple[int, ...]]]:
    """Return the groups whose gradients two others contradict, and pairs of which one is wrong, by hashes.

    Group q has own[q] of its own leaf, again[q] of that of the next group, and third[q] of that of the one before.
    """
    num_groups, faulty, pairs = len(own), set(), []
    for group in range(num_groups):
        following = (group + 1) % num_groups
        if again[group] == own[following]:
            continue
        judge = third[(group + 2) % num_groups]
        if num_groups > 2 and judge == again[group]:
            faulty.add(following)
        elif num_groups > 2 and judge == own[following]:
            faulty.add(group)
        else:
            pairs.append(tuple(sorted({group, following})))
    return sorted(faulty), sorted({pair for pair in pairs if not faulty.intersection(pair)})


def compare_replicas(state: TrainState, step: int) -> None:
    """Compare checksums of the weights and of the optimizer states along every axis that replicates them.

    Waits for the device. Raises DivergenceError if they differ, with the ranks and the parameters.
    """
    model, mesh = state.model, state.mesh
    model.wait_for_updates()
    split = split_dims(model.module)
    not_split = ((name, tensor) for name, tensor in _owned(state) if name not in split)
    for what, axis, tensors in (
        ("parameters", mesh.data, _persistent(state)),
        ("master weights", model.replica_axis, _owned(state)),
        ("optimizer states", model.replica_axis, optimizer_states(state)),
        ("parameters that are not split", mesh.tensor, not_split),
    ):
        _compare(f"step {step}: the {what}", axis, tensors, state.device)


def _persistent(state: TrainState) -> NamedTensors:
    """Yield the full parameters that every data-parallel rank keeps."""
    for flat in state.model.flats:
        if flat.lifetime is Lifetime.PERSISTENT:
            for param in flat.layout.spans:
                yield param.name, flat.as_sent(param.elements)


def _owned(state: TrainState) -> Iterator[tuple[str, Tensor]]:
    """Yield this rank's owned pieces of the master weights."""
    for _, own, values in state.model.slices():
        yield own.span.name, values


def optimizer_states(state: TrainState) -> NamedTensors:
    """Yield the optimizer states of this rank's owned pieces, such as both moments of Adam."""
    trainable = set(state.optimizer.buckets)
    for flat in state.model.flats:
        for bucket in trainable.intersection(flat.buckets):
            for piece in state.optimizer.pieces_of(bucket):
                for kind, value in state.optimizer.states_of(piece).items():
                    if isinstance(value, Tensor):
                        yield f"{kind} of {piece.name}", value


def _compare(what: str, axis: Axis, tensors: NamedTensors, device: torch.device) -> None:
    """Raise DivergenceError if the checksums of the tensors differ along the axis.

    The tensors may be in host memory; the sums are sent from `device`. Their names, and how many there are of each, are
    the same on all ranks of the axis. One number is compared; only if it differs, those of all names are.
    """
    zero = torch.zeros((), dtype=torch.int64, device=device)
    sums: defaultdict[str, Tensor] = defaultdict(lambda: zero)
    if axis.size > 1:
        for name, tensor in tensors:
            sums[name] = sums[name] + bit_sum(tensor).to(device)
    own = torch.stack([zero, *(sums[name] for name in sorted(sums))])
    of_all = axis.gather_by_rank(own.sum()).tolist()
    if len(set(of_all)) > 1:
        _, *of_names = axis.gather_by_rank(own).t().tolist()
        differing = [name for name, of_ranks in zip(sorted(sums), of_names, strict=True) if len(set(of_ranks)) > 1]
        raise DivergenceError(_message(what, axis, of_all, differing))


def _message(what: str, axis: Axis, checksums: list[int], names: list[str]) -> str:
    """Return the error for replicas with these checksums, which differ in the tensors of these names."""
    usual, number = Counter(checksums).most_common(1)[0]
    odd = [rank for rank, checksum in enumerate(checksums) if checksum != usual]
    listed = ", ".join(names[:MOST_NAMES]) + (f" and {len(names) - MOST_NAMES} more" if names[MOST_NAMES:] else "")
    if number > len(odd):
        ranks = f"rank{'s' if len(odd) > 1 else ''} {', '.join(map(str, odd))} differ in {listed} from those of the "
        others = f"other {number}, to which they should be equal"
    else:  # such as one of two: none of them is known to be right
        ranks = f"ranks {', '.join(map(str, range(axis.size)))} differ in {listed}, and should be equal; "
        others = "no majority shows which is right"
    return f"{what} of {axis.name} {ranks}{others}; {REPLICAS_REMEDY}"
