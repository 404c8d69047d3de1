"""One optimizer step, and one evaluation.

The host does not read the value of any tensor during a step, so it runs ahead of the device.
"""

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from data.documents import DocumentBatch, MicroBatch
from gpt.builder.leaves import Leaves
from gpt.builder.loss_guard import LossGuard
from gpt.generate import evaluation
from gpt.kernels.documents import Documents
from parallel.memory_kinds import TensorKind, allocating
from parallel.mesh import Mesh
from parallel.streams import raise_races
from parallel.tensor.context import own_stretch
from zero.data_parallel import ZeroDataParallel
from zero.optimizer import ZeroOptimizer


def train_step(
    model: ZeroDataParallel,
    optimizer: ZeroOptimizer,
    micro_batches: Sequence[MicroBatch],
    mesh: Mesh,
    guard: LossGuard | None = None,
    gradient_hook: Callable[[], object] = lambda: None,
    leaves: Leaves | None = None,
) -> tuple[Tensor, Tensor]:
    """Run one optimizer step and return (loss, gradient norm), both 0-dim.

    The mean of the returned loss over the ranks is the mean over the counted tokens of all their micro-batches. The
    gradient is that of this mean, and the returned norm is its norm before clipping. If the guard finds the loss bad,
    nothing is updated. `gradient_hook` is called when the gradients are complete, before the update. With `leaves` the
    returned loss is the same on all ranks. Raises StreamError if streams are checked and would race.
    """
    scale = loss_factor(model, optimizer, len(micro_batches))
    shares = shares_of_tokens([num_counted(batch, mesh) for batch in micro_batches], mesh, loss_dtype(model))
    losses: list[Tensor] = []

    def run(micro_batch: MicroBatch, share: Tensor | None) -> None:
        if leaves is not None:
            leaves.seed(len(losses), len(micro_batches))
        losses.append(differentiate(model, micro_batch, mesh, share, scale))

    with model.accumulate(len(micro_batches)):
        for micro_batch, share in zip(micro_batches[:-1], shares[:-1], strict=True):
            run(micro_batch, share)
    run(micro_batches[-1], shares[-1])
    loss = torch.stack(losses).mean() if leaves is None else leaves.mean(torch.stack(losses))
    with mesh.log.during("update"):
        grad_norm = optimizer.step(skip=guard.judge(loss) if guard else None, gradient_hook=gradient_hook)
    raise_races()
    return loss, grad_norm


def differentiate(
    model: ZeroDataParallel, micro_batch: MicroBatch, mesh: Mesh, share: Tensor | None, scale: Tensor
) -> Tensor:
    """Run forward and backward of a micro-batch, whose loss is multiplied by `scale` first; return the loss, 0-dim."""
    with allocating(TensorKind.ACTIVATIONS):
        with mesh.log.during("forward"):
            loss = loss_of(model, micro_batch, mesh, share, scale)
        with mesh.log.during("backward"):
            (loss * scale).backward()
    return loss.detach()


@torch.no_grad()
def evaluate(
    model: ZeroDataParallel, micro_batches: Iterable[MicroBatch], mesh: Mesh, leaves: Leaves | None = None
) -> float:
    """Return the mean loss over the counted tokens of all ranks, each of which has as many micro-batches."""
    losses, counts = [], []
    with evaluation(model):
        for batch in micro_batches:
            with mesh.log.during("evaluation"):  # a phase each, which the watchdog takes for progress
                losses.append(loss_of(model, batch, mesh))
                counts.append(num_counted(batch, mesh))
    with mesh.log.during("evaluation"):
        shares = shares_of_tokens(counts, mesh, loss_dtype(model))
        parts = [loss if share is None else loss * share for loss, share in zip(losses, shares, strict=True)]
        values = torch.stack(parts)
        return mean_over(mesh, values.mean()) if leaves is None else leaves.mean(values).item()


def loss_of(
    model: ZeroDataParallel,
    micro_batch: MicroBatch,
    mesh: Mesh,
    share: Tensor | None = None,
    scale: Tensor | None = None,
) -> Tensor:
    """Return the mean loss of this rank's tokens, 0-dim, times their share if there is one.

    `scale` multiplies it before backward.
    """
    if isinstance(micro_batch, Tensor):
        loss = model(micro_batch[:, :-1], micro_batch[:, 1:], scale)
    else:
        documents = Documents(micro_batch.positions, micro_batch.starts)
        scale = scale if scale is None or share is None else scale * share
        loss = model(micro_batch.tokens, micro_batch.targets, scale, documents)
        # Without a counted token the mean is not a number, and its gradient is zero.
        loss = torch.where(is_counted(micro_batch, mesh).any(), loss, 0)
    return loss if share is None else loss * share


def shares_of_tokens(counts: Sequence[Tensor | None], mesh: Mesh, dtype: torch.dtype) -> list[Tensor | None]:
    """Return each micro-batch's number of counted tokens, divided by the mean over the micro-batches of all ranks.

    `counts` are what `num_counted` returns. The mean of losses that are multiplied by these shares is the mean over all
    counted tokens. None stands for a share of 1.
    """
    mean = mean_count(counts, mesh)
    return [share_of(count, mean, dtype) for count in counts]


def mean_count(counts: Sequence[Tensor | None], mesh: Mesh) -> Tensor | None:
    """Return the mean of counts over the micro-batches of all ranks, 0-dim in fp64; None if all tokens are counted."""
    of_documents = [count for count in counts if count is not None]
    if not of_documents:
        return None
    total = torch.stack(of_documents).sum()
    mesh.data.all_reduce(total, out=total).wait()
    return total.clamp(min=1).double() / (len(counts) * mesh.data.size)


def share_of(count: Tensor | None, mean: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Return a count divided by the mean of all."""
    if count is None or mean is None:
        return None
    # Backward divides by the share, which therefore is not 0 if no token is counted.
    return (count.clamp(min=1) / mean).to(dtype)


def num_counted(micro_batch: MicroBatch, mesh: Mesh) -> Tensor | None:
    """Return the number of this rank's tokens that are counted, 0-dim; None, which is all, without documents."""
    return None if isinstance(micro_batch, Tensor) else is_counted(micro_batch, mesh).sum()


def is_counted(micro_batch: DocumentBatch, mesh: Mesh) -> Tensor:
    """Return which of this rank's tokens are counted in the loss, those of its stretch with context parallelism."""
    return own_stretch(micro_batch.targets, mesh.context) >= 0


def loss_factor(model: ZeroDataParallel, optimizer: ZeroOptimizer, num_micro_batches: int) -> Tensor:
    """Return what the loss of each micro-batch of a step is multiplied by before backward."""
    # In the type of the loss: a third in fp32 would be wrong by 1e-8. The mean over leaves is that of the engine.
    num_summed = 1 if model.is_rank_invariant else num_micro_batches
    return optimizer.loss_scale.scale.to(loss_dtype(model)) / num_summed


def loss_dtype(model: ZeroDataParallel) -> torch.dtype:
    """Return the type of the model's loss."""
    return torch.promote_types(next(model.module.parameters()).dtype, torch.float32)


def mean_over(mesh: Mesh, value: Tensor) -> float:
    """Return the mean of a 0-dim tensor over the data-parallel ranks. Waits for the device."""
    mesh.data.all_reduce(value, out=value).wait()
    return value.item() / mesh.data.size
