"""Training that was reported elsewhere: optimizers, accumulation, ranks that differ, reads and writes of weights."""

import gc
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.distributed.zero.scenarios.reported.reports import (
    Table,
    With,
    adapted,
    as_one_test,
    param,
    trains,
    trains_and,
    trains_parts,
)
from tests.scenarios import WIDTH, Block, Blocks, Model, Run, mean_square
from zero.engine import ZeroDataParallel
from zero.order.agreement import DivergedRanks


def count_tokens_of_all_ranks(run: Run) -> None:
    """The loss is a mean over the elements that have a weight, of which each micro-batch has another number."""
    model, optimizer = run.start(Blocks())
    for step in range(3):
        batches = [run.batch(10 * step + number) for number in range(3)]
        weights = [(batch[:, :1] > 0).double() for batch in batches]
        total = sum(weight.sum() for weight in weights)
        if not run.is_plain:
            dist.all_reduce(total)
            total /= run.num_ranks  # gradients are means over the ranks
        for x, weight in zip(batches, weights, strict=True):
            with model.accumulate():
                (((model(x) - 0.5).square() * weight).sum() / total).backward()
        optimizer.step()
        optimizer.zero_grad()


def freeze_a_group(run: Run) -> None:
    model = run.wrap(Blocks(Block().requires_grad_(False), Block()))
    groups = [{"params": list(block.parameters())} for block in model.module.blocks]
    run.train(model, run.optimizer(model, torch.optim.AdamW, groups))


def change_settings_between_steps(run: Run) -> None:
    model = run.wrap(Blocks())
    groups = [{"params": list(part.parameters())} for part in (model.module.blocks, model.module.head)]
    optimizer = run.optimizer(model, torch.optim.AdamW, groups, lr=torch.tensor(0.01), foreach=False)
    for step in range(4):
        run.train(model, optimizer, steps=[step])
        for number, group in enumerate(optimizer.inner.param_groups):
            group["lr"].mul_(0.7)
            group |= {"weight_decay": 0.2 * (step + number), "betas": (0.9 - 0.1 * number, 0.99 - 0.01 * step)}


def merge_adapters(_run: Run, model: Model, step: int) -> None:
    with torch.no_grad(), model.gathered(modify=step == 1) as module:
        for block in module.blocks:
            block.base.weight += block.up @ block.down
            block.up.zero_()


def repeat(m: nn.Module, x: Tensor) -> Tensor:
    for _ in range(m.times):
        x = m.blocks[0](x)
    return x


def repeating(times: int) -> nn.Module:
    return With(repeat, blocks=nn.ModuleList([Block()]), times=times)


def repeat_by_rank(model: Model, x: Tensor, rank: int) -> Tensor:
    model.module.blocks[1].times = rank + 1
    return mean_square(model, x)


def repeat_units_by_rank(run: Run) -> None:
    model, optimizer = run.start(Blocks())
    run.train(model, optimizer)
    if run.shards_parameters:
        diverging = ZeroDataParallel(repeating(run.data.rank + 1), run.data, run.configuration.zero)
        with pytest.raises(DivergedRanks, match=r"(?s)ranks.*units"):
            mean_square(diverging, run.batch(0)).backward()


def choose_by_rank(model: Model, x: Tensor, rank: int) -> Tensor:
    for block in model.module.blocks:
        block.choice = rank % 2
    return mean_square(model, x)


def choosing() -> nn.Module:
    return With(lambda m, x: x * m.scale.sin() if m.choice else m.block(x), block=Block(), scale=param(WIDTH))


def use_in_the_last_micro_batch(run: Run) -> None:
    """All parameters of the blocks but one are used only there."""
    model, optimizer = run.start(Blocks(choosing(), choosing()))
    for step in range(3):
        for number in range(3):
            for block in model.module.blocks:
                block.choice = number < 2
            with model.accumulate() if number < 2 else nullcontext():
                mean_square(model, run.batch(10 * step + number)).backward()
        optimizer.step()
        optimizer.zero_grad()


def with_encoder() -> nn.Module:
    blocks = nn.ModuleList([Block(), Block()])
    return With(
        lambda m, x, images: m.body(x) + m.blocks[1](m.blocks[0](images)).sum() / 9, body=Blocks(), blocks=blocks
    )


def drop_models(run: Run) -> None:
    for step in range(4):
        run.models.clear()
        run.optimizers.clear()
        gc.collect()
        model, optimizer = run.start(Blocks(Block()))
        run.train(model, optimizer, steps=[step])
        with torch.no_grad():
            run.record(mean_square(model, run.batch(9)))
        del model, optimizer


class Limits(Block):
    """A block that writes to its parameters in forward."""

    def forward(self, x: Tensor) -> Tensor:
        self.scale.data.clamp_(-0.5, 0.5)
        with torch.no_grad():
            self.down.bias.clamp_(max=0.1)
        return super().forward(x)


def of_three_types() -> nn.Module:
    """Return a block without float32, whose sums over four ranks are rounded in another order."""
    types = {"low": torch.bfloat16, "half": torch.float16}
    frozen = {name: nn.Parameter(torch.randn(WIDTH, dtype=t), requires_grad=False) for name, t in types.items()}
    return With(lambda m, x: m.block(x * m.low) + x * m.half, block=Block(), **frozen)


def read_before_backward(model: Model, x: Tensor) -> Tensor:
    loss = mean_square(model, x)
    with torch.no_grad(), model.gathered() as module:
        total = sum(value.double().sum() for value in module.state_dict().values())
    return loss * total.sin()


def evaluate_without_optimizer(run: Run) -> None:
    model = run.wrap(Blocks())
    for context in (torch.no_grad, torch.inference_mode, torch.enable_grad):
        with context():
            value = mean_square(model.eval(), run.batch(9))
        run.record(value)
        with model.gathered([model.module.head.weight]) as module:
            run.record(module.head.weight)
    run.train(model.train(), run.optimizer(model))


def freeze_for_evaluation(run: Run, model: Model, _step: int) -> None:
    for part in (model, model.module.blocks):
        part.requires_grad_(False)
        run.record(mean_square(model, run.batch(9)))
        part.requires_grad_(True)


TABLE: Table = {
    "torchtitan#2206, transformers#35438: tokens of all ranks": count_tokens_of_all_ranks,
    "DeepSpeed#7869, mmengine#1441: a frozen group": freeze_a_group,
    "pytorch#106916, slime#962: settings change": change_settings_between_steps,
    "LlamaFactory#10157: adapters are merged": trains_and(merge_adapters, lambda: Blocks(adapted(), adapted())),
    "Qwen3-VL#126: ranks repeat a module inside a unit": trains_parts(
        lambda: Blocks(Block(), repeating(1)), repeat_by_rank
    ),
    "DeepSpeed#7998: ranks repeat a unit": repeat_units_by_rank,
    "pytorch#158719, pytorch#174862: ranks use other parameters": trains_parts(
        lambda: Blocks(choosing(), choosing()), choose_by_rank
    ),
    "pytorch#196996, pytorch#160279: first used in the last micro-batch": use_in_the_last_micro_batch,
    "torchtitan#4777, DeepSpeed#7170: a rank without images": trains_parts(
        with_encoder, lambda model, x, rank: model(x, x[: len(x) * (rank % 2)].cos()).square().mean()
    ),
    "pytorch#176225: models are dropped": drop_models,
    "ICML2024-OT-CLIP#5: writes in forward": trains(lambda: Blocks(Limits(), Limits())),
    "Model-Optimizer#2152: three types": trains_parts(
        lambda: Blocks(of_three_types(), of_three_types()), lambda model, x, _rank: mean_square(model, x)
    ),
    "pytorch#131965: a read before backward": trains(Blocks, read_before_backward),
    "transformers#48841, pytorch#144289: evaluation without an optimizer": evaluate_without_optimizer,
    "pytorch#186998: frozen for an evaluation": trains_and(freeze_for_evaluation),
}

test_training_that_was_reported = as_one_test(__name__, TABLE)
