"""The examples of docs/zero_library.md and docs/migration.md, which train as they do in plain torch.

Each is the body of a function below.

In one process, `ZeroDataParallel` and `ZeroOptimizer` stand for a plain module and a plain optimizer.
"""

import inspect
import textwrap
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from parallel.mesh import Axis
from tests.pairwise import noting
from tests.scenarios import DEFAULT, HOST, Blocks, Run, scenario
from tests.source_files import ROOT
from zero.state.export import full_state_dict
from zero.uneven import join


def evaluate(model, batches, loss_of, scores):
    model.eval()
    with torch.no_grad(), model.gathered() as module:  # gathered once for all batches; leave it out to save memory
        scores += [loss_of(module(x)) for x in batches]
    model.train()


def train_with_a_loss_that_reads_weights(model, optimizer, batches):
    for x in batches:
        hidden = model.module.encode(x)
        with model.gathered([model.module.head.weight]) as module:
            logits = hidden @ module.head.weight.t()
        F.cross_entropy(logits, (x[:, 0] > 0).long()).backward()
        optimizer.step()
        optimizer.zero_grad()


def train_with_a_regulariser(model, optimizer, batches, loss_of):
    for x in batches:
        loss = loss_of(model(x))
        with model.gathered() as module:  # what is read here stays gathered until the step
            loss = loss + 0.01 * sum(param.square().sum() for param in module.parameters())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def train_a_method(model, optimizer, batches, loss_of):
    model.register_forward_method("encode")
    for x in batches:
        loss_of(model.module.encode(x)).backward()
        optimizer.step()
        optimizer.zero_grad()


def keep_an_average(model, optimizer, batches, loss_of, scores):
    with model.gathered() as module:
        average = AveragedModel(module, multi_avg_fn=get_ema_multi_avg_fn(0.9))  # plain, and complete on each rank
    for x in batches:
        loss_of(model(x)).backward()
        optimizer.step()
        optimizer.zero_grad()
        with model.gathered() as module:
            average.update_parameters(module)
        with torch.no_grad():
            scores.append(loss_of(average(x)))


def schedule_the_learning_rate(model, optimizer, batches, loss_of):
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=3)
    for x in batches:
        loss_of(model(x)).backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()


def train_two_optimizers(model, batches, loss_of, ZeroOptimizer):
    head = list(model.module.head.parameters())
    rest = [param for name, param in model.module.named_parameters() if not name.startswith("head.")]
    optimizers = [
        ZeroOptimizer(model, torch.optim.SGD, [{"params": rest}], lr=0.1),
        ZeroOptimizer(model, torch.optim.AdamW, [{"params": head}], lr=0.01),
    ]
    for x in batches:
        loss_of(model(x)).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def load_and_save(model, optimizer, batches, loss_of, state, full_state_dict):
    with model.gathered(modify=True) as module:  # the first rank's values are kept
        module.load_state_dict(state)
    for x in batches:
        loss_of(model(x)).backward()
        optimizer.step()
        optimizer.zero_grad()
    state = full_state_dict(model)  # called on all ranks; the first one gets all values on its CPU, the others {}


def clip_weights(model, optimizer, batches, loss_of):
    for x in batches:
        loss_of(model(x)).backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad(), model.gathered() as module:
            for param in module.parameters():
                param.clamp_(-0.3, 0.3)  # all ranks write the same


def unfreeze(module, batches, loss_of, data, config, ZeroDataParallel, ZeroOptimizer):
    module.blocks.requires_grad_(False)
    model = ZeroDataParallel(module, data, config)
    optimizer = ZeroOptimizer(model, torch.optim.SGD, lr=0.1)
    for x in batches:
        loss_of(model(x)).backward()
        optimizer.step()
        optimizer.zero_grad()

    module = model.unwrap()  # plain, and complete on every rank
    module.blocks[-1].requires_grad_(True)
    model = ZeroDataParallel(module, data, config)
    optimizer = ZeroOptimizer(model, torch.optim.SGD, lr=0.1)
    for x in batches:
        loss_of(model(x)).backward()
        optimizer.step()
        optimizer.zero_grad()


def train_under_autocast(model, optimizer, batches, loss_of):
    for x in batches:
        with torch.autocast(x.device.type, torch.bfloat16):
            output = model(x)
        loss_of(output.to(x.dtype)).backward()
        optimizer.step()
        optimizer.zero_grad()


def train_in_half_precision(module, batches, loss_of, data, config, ZeroDataParallel, ZeroOptimizer):
    model = ZeroDataParallel(module.bfloat16(), data, config)  # master weights and moments are in fp32
    optimizer = ZeroOptimizer(model, torch.optim.SGD, lr=0.1)
    for x in batches:
        loss_of(model(x.bfloat16()).float()).backward()
        optimizer.step()
        optimizer.zero_grad()


def run_out_of_data(model, optimizer, batches, loss_of, data):
    for x, weight in join(batches, data):  # as often on each rank as on the one with the most batches
        (weight * loss_of(model(x))).backward()
        optimizer.step()
        optimizer.zero_grad()


def train_an_adversary(
    generator, discriminator, optimize_generator, optimize_discriminator, noise, real, real_loss, fake_loss
):
    for z, x in zip(noise, real, strict=True):
        optimize_discriminator.zero_grad()
        (real_loss(discriminator(x)) + fake_loss(discriminator(generator(z).detach()))).backward()
        optimize_discriminator.step()
        optimize_generator.zero_grad()
        real_loss(discriminator(generator(z))).backward()
        optimize_generator.step()
    optimize_discriminator.zero_grad()


def leave_distributed_data_parallel(module, batches, loss_of, data, config, ZeroDataParallel, ZeroOptimizer):
    model = ZeroDataParallel(module, data, config)  # was DistributedDataParallel(module)
    optimizer = ZeroOptimizer(model, torch.optim.SGD, lr=0.1, clip_norm=1.0)  # was SGD(model.parameters(), lr=0.1)
    for first, last in zip(batches[0::2], batches[1::2], strict=False):
        with model.accumulate():  # was model.no_sync()
            (loss_of(model(first)) / 2).backward()
        (loss_of(model(last)) / 2).backward()
        optimizer.step()  # clips; was clip_grad_norm_ before it
        optimizer.zero_grad()


def leave_fsdp2(model, optimizer, batches, loss_of, state, full_state_dict):
    with model.gathered(modify=True) as module:  # was set_model_state_dict; the first rank's values are kept
        module.load_state_dict(state)
    for x in batches:
        loss_of(model(x)).backward()
        optimizer.step()
        optimizer.zero_grad()
    state = full_state_dict(model)  # was get_model_state_dict(..., full_state_dict=True, cpu_offload=True)


def leave_deepspeed(module, batches, loss_of, data, config, ZeroDataParallel, ZeroOptimizer):
    model = ZeroDataParallel(module, data, config)  # was engine, optimizer, _, _ = deepspeed.initialize(...)
    optimizer = ZeroOptimizer(model, torch.optim.SGD, lr=0.1, clip_norm=1.0)
    weight = model.module.head.weight
    with model.gathered([weight], modify=True):  # was deepspeed.zero.GatheredParameters([weight], modifier_rank=0)
        weight.mul_(0.5)
    for x in batches:
        loss_of(model(x)).backward()  # was engine.backward(loss_of(engine(x)))
        optimizer.step()  # was engine.step()
        optimizer.zero_grad()


def leave_accelerate(module, batches, loss_of, data, config, scores, ZeroDataParallel, ZeroOptimizer):
    model = ZeroDataParallel(module, data, config)  # was accelerator.prepare(module, optimizer)
    optimizer = ZeroOptimizer(model, torch.optim.SGD, lr=0.1)
    for x in batches:
        loss = loss_of(model(x))
        loss.backward()  # was accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach().clone()
        data.all_reduce(total, out=total).wait()  # was accelerator.reduce(loss, "mean")
        scores.append(total / data.size)


EXAMPLES = [
    evaluate,
    train_with_a_loss_that_reads_weights,
    train_with_a_regulariser,
    train_a_method,
    keep_an_average,
    schedule_the_learning_rate,
    train_two_optimizers,
    load_and_save,
    clip_weights,
    unfreeze,
    run_out_of_data,
    train_an_adversary,
]

MIGRATIONS = [leave_distributed_data_parallel, leave_fsdp2, leave_deepspeed, leave_accelerate]

EXAMPLES_IN_HALF_PRECISION = [train_under_autocast, train_in_half_precision]


def loss_of(output: Tensor) -> Tensor:
    return (output - 0.5).square().mean()


def call(run: Run, example: Callable[..., None]) -> None:
    """Call an example with the arguments that it names."""
    torch.manual_seed(0)
    wanted = inspect.signature(example).parameters
    context: dict[str, Any] = {
        "module": Blocks(),
        "batches": [run.batch(step) for step in range(3)],
        "noise": [run.batch(step) for step in range(3)],
        "real": [run.batch(10 + step)[:, :2] for step in range(3)],
        "scores": [],
        "state": Blocks().state_dict(),
        "loss_of": loss_of,
        "real_loss": lambda logits: F.softplus(-logits).mean(),
        "fake_loss": lambda logits: F.softplus(logits).mean(),
        "data": Axis.trivial("data") if run.is_plain else run.data,
        "config": run.configuration,
        "full_state_dict": (lambda model: model.module.state_dict()) if run.is_plain else full_state_dict,
        "ZeroDataParallel": lambda module, data, config: run.wrap(module),
        "ZeroOptimizer": run.optimizer,
    }
    if "model" in wanted:
        context["model"] = run.wrap(context["module"])
    if "optimizer" in wanted:
        context["optimizer"] = run.optimizer(context["model"])
    if "generator" in wanted:
        context |= {
            "generator": run.wrap(Blocks()),
            "discriminator": run.wrap(nn.Sequential(nn.Linear(2, 4), nn.Linear(4, 1))),
        }
        context |= {f"optimize_{name}": run.optimizer(context[name]) for name in ("generator", "discriminator")}
    example(**{name: context[name] for name in wanted})
    if example is evaluate:
        run.train(context["model"], run.optimizer(context["model"]))
    for score in context["scores"]:
        run.record(score)


@scenario(DEFAULT + HOST)
def test_the_examples_train_as_in_plain_torch(run: Run) -> None:
    for example in EXAMPLES + MIGRATIONS:
        with noting(example):
            call(run, example)


# A gradient of at most 1 is summed over other rows than in one process, each time rounded to 2**-8; so is a weight.
@scenario(dtype=torch.float32, tolerance=2**-6)
def test_the_examples_in_half_precision_train_as_in_plain_torch(run: Run) -> None:
    for example in EXAMPLES_IN_HALF_PRECISION:
        call(run, example)


def body(example: Callable[..., None]) -> str:
    source = inspect.getsource(example)
    return textwrap.dedent(source[source.index("):\n") + 3 :]).strip()


@pytest.mark.parametrize("example", EXAMPLES + EXAMPLES_IN_HALF_PRECISION + MIGRATIONS)
def test_the_documentation_has_the_example(example: Callable[..., None]) -> None:
    page = "docs/migration.md" if example in MIGRATIONS else "docs/zero_library.md"
    assert f"```python\n{body(example)}\n```" in (ROOT / page).read_text()
