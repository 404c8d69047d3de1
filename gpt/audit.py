"""Audits of a run's ranks: a rank computes a leaf of another one again, and states at rest are compared with hashes.

With `train.reproducible: layout` the gradient of a leaf has the same bits on every rank, so a difference is a fault. N
groups of ranks compute leaves; a group has one rank, or those of a tensor and a context group.

backward of the step   group q computes its own leaf                 -> own[q]
audit                  group q computes the leaf of group q + 1      -> again[q], which should be own[q + 1]
only if one differs    group q computes the leaf of group q - 1      -> third[q]; third[q + 2] is of the same leaf too

A leaf's gradients are hashed as they leave autograd, before they are added or sent. What rests between two updates, the
master weights, the optimizer's states and the owned parameters of stage 3, has hashes that each update renews and that
are compared before the next one. How many differ is sent with the losses, and read by the host one step later, so that
it waits for no device.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace

import torch
from torch import Tensor

from data.batches import BatchLoader
from data.documents import MicroBatch
from gpt.builder.leaves import Leaves
from gpt.builder.train_state import TrainState
from gpt.replicas import DivergenceError, gathered, optimizer_states
from gpt.train_step import differentiate, loss_dtype, loss_factor, mean_count, num_counted, share_of
from parallel.launch.node_map import span
from zero.buckets.hashes import GradientHashes, bit_sum
from zero.partition.stage import Lifetime

REMEDY = "the machine corrupts data silently: resume from a checkpoint without it"


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
        with self._state.model.hashed_gradients() if is_audited else nullcontext() as hashes:

            def exchange(losses: Tensor) -> Tensor:
                self.raise_found()
                of_ranks = leaves.gather(torch.cat([losses, self._compare_states()]))
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
                    tensors.append(bucket.params.owned)
        tensors += [tensor for _, tensor in optimizer_states(state)]
        return torch.stack([bit_sum(tensor).to(state.device) for tensor in tensors])

    @torch.no_grad()
    def _compare_states(self) -> Tensor:
        """Return how many states differ from their hashes on each rank of the tensor axis, as floats."""
        tensor = self._state.mesh.tensor
        assert self._at_rest is not None
        number = (self._hash_states() != self._at_rest).sum()[None].double()
        of_tensor_ranks = number.new_empty(tensor.size)
        with self._state.mesh.log.during("audit"):
            tensor.all_gather(number, out=of_tensor_ranks).wait()
        return of_tensor_ranks

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
            with model.hashed_gradients(discard=True) as again:
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
        own = own[None]
        for axis in (mesh.tensor, mesh.context):
            axis.all_reduce(own, out=own).wait()
        (of_ranks,) = gathered(own, mesh.data)
        return of_ranks[:: mesh.context.size]

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
