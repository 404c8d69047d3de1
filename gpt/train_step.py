"""One optimizer step, and one evaluation.

The host does not read the value of any tensor during a step, so it runs ahead of the device.
"""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from gpt.loss_guard import LossGuard
from gpt.model.generate import evaluation
from parallel.instruments.memory_tracker import TensorKind, allocating
from parallel.mesh import Mesh
from parallel.streams import raise_races
from zero.engine import ZeroDataParallel
from zero.optimizer import ZeroOptimizer


def train_step(
    model: ZeroDataParallel,
    optimizer: ZeroOptimizer,
    micro_batches: list[Tensor],
    mesh: Mesh,
    guard: LossGuard | None = None,
    gradient_hook: Callable[[], object] = lambda: None,
) -> tuple[Tensor, Tensor]:
    """Run one optimizer step and return (loss, gradient norm), both 0-dim.

    A micro-batch is int64 tokens of shape (micro_batch_size, seq_length + 1). The returned loss is the mean over this
    rank's micro-batches. The gradient is that of the mean loss over all micro-batches of all ranks, and the returned
    norm is its norm before clipping. If the guard finds the loss bad, nothing is updated. `gradient_hook` is called
    when the gradients are complete, before the update. Raises StreamError if streams are checked and would race.
    """
    scale = optimizer.loss_scale.scale / len(micro_batches)
    losses = []

    def run(tokens: Tensor) -> None:
        with allocating(TensorKind.ACTIVATIONS):
            with mesh.log.during("forward"):
                loss = model(tokens[:, :-1], tokens[:, 1:], scale)
            with mesh.log.during("backward"):
                (loss * scale).backward()
        losses.append(loss.detach())

    with model.accumulate():
        for tokens in micro_batches[:-1]:
            run(tokens)
    run(micro_batches[-1])
    loss = torch.stack(losses).mean()
    with mesh.log.during("update"):
        grad_norm = optimizer.step(skip=guard.judge(loss) if guard else None, gradient_hook=gradient_hook)
    raise_races()
    return loss, grad_norm


@torch.no_grad()
def evaluate(model: ZeroDataParallel, micro_batches: Iterable[Tensor], mesh: Mesh) -> float:
    """Return the mean loss over the micro-batches of all ranks, each of which has the same number."""
    with evaluation(model), mesh.log.during("evaluation"):
        loss = torch.stack([model(tokens[:, :-1], tokens[:, 1:]).float() for tokens in micro_batches]).mean()
        return mean_over(mesh, loss)


def mean_over(mesh: Mesh, value: Tensor) -> float:
    """Return the mean of a 0-dim tensor over the data-parallel ranks. Waits for the device."""
    mesh.data.all_reduce(value, out=value).wait()
    return value.item() / mesh.data.size
