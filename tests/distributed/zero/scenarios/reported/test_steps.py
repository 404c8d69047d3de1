"""Steps of one or two models that were reported elsewhere: several losses, other functions, gradients and groups."""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import LambdaLR

from tests.distributed.zero.scenarios.reported.reports import (
    Table,
    With,
    as_one_test,
    param,
    trains,
    trains_and,
    trains_by,
)
from tests.scenarios import WIDTH, Block, Blocks, Model, Run, mean_square


def train_two_models(run: Run) -> None:
    """The second one changes the output of the first, which the loss reads too."""
    first, second = run.wrap(Blocks()), run.wrap(nn.Sequential(nn.ReLU(inplace=True), nn.Linear(2, 2)))
    optimizers = run.optimizer(first), run.optimizer(second)
    for step in range(3):
        h = first(run.batch(step))
        run.record((second(h) + h * h).square().mean()).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def two_losses(model: Model, x: Tensor) -> None:
    y = model(x)
    with model.accumulate():
        (y - 0.5).square().mean().backward(retain_graph=True)
    y.sin().mean().backward()


def call_forward(model: Model, x: Tensor) -> Tensor:
    forward = model.module.forward
    with torch.no_grad():
        target = forward(x.cos())
    return (forward(x) - target).square().mean()


def redirect(model: Model, x: Tensor) -> Tensor:
    """Call the model to run another function, then the model itself."""
    module = model.module
    module.forward = lambda x: F.linear(module.encode(x), module.head.weight.sin())
    loss = mean_square(model, x)
    del module.forward
    return loss + mean_square(model, x)


def with_root_of_zero() -> nn.Module:
    """Return a model with a parameter whose gradient is not finite."""
    return With(lambda m, x: m.body(x) + m.scale.relu().sqrt(), body=Blocks(), scale=nn.Parameter(torch.zeros(2)))


def change_gradients(run: Run) -> None:
    """Replace gradients that are not finite, and divide all by the largest value, of which a rank may own none."""
    model, optimizer = run.start(with_root_of_zero())

    def change() -> None:
        grads = [grad.nan_to_num_(0.0) for _, grad in optimizer.gradients()]
        largest = max([grad.abs().max() for grad in grads], default=torch.tensor(0.0))
        if not run.is_plain:
            dist.all_reduce(largest, dist.ReduceOp.MAX)
        run.record(largest)
        for grad in grads:
            grad.div_(largest)

    for step in range(3):
        mean_square(model, run.batch(step)).backward()
        run.record(optimizer.step(gradient_hook=change))
        optimizer.zero_grad()


def leave_a_group_empty(run: Run) -> None:
    """Some parameters are in no group."""
    model = run.wrap(Blocks())
    groups = [
        {"params": [param for param in model.module.blocks.parameters() if param.ndim > 1], "weight_decay": 0.1},
        {"params": []},
        {"params": list(model.module.head.parameters()), "momentum": 0.0, "nesterov": False},
    ]
    optimizer = run.optimizer(model, groups=groups)
    scheduler = LambdaLR(optimizer, [lambda step, n=n: 1 / (step + n) for n in (1, 2, 3)])
    for step in range(3):
        run.train(model, optimizer, steps=[step])
        scheduler.step()


def route(m: nn.Module, x: Tensor) -> Tensor:
    scores = (x @ m.router.t()).sigmoid()
    choice = (scores + m.bias).argmax(1)
    m.counts += F.one_hot(choice, 3).sum(0)
    rows = torch.arange(len(x))
    outputs = torch.stack([expert(x) for expert in m.experts], 1)
    return x + outputs[rows, choice] * scores[rows, choice, None]


def routed() -> nn.Module:
    """Return a block whose rows choose an expert by a score and a bias, which is no parameter."""
    block = With(route, router=param(3, WIDTH), experts=nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3)))
    block.register_buffer("bias", torch.zeros(3))
    block.register_buffer("counts", torch.zeros(3))
    return block


def balance_experts(run: Run) -> None:
    model = run.wrap(Blocks(routed(), routed()), units=("blocks.*",))
    optimizer = run.optimizer(model)

    def balance(*_: object) -> None:
        for block in model.module.blocks:
            if not run.is_plain:
                dist.all_reduce(block.counts)
            block.bias += 0.3 * (block.counts.mean() - run.record(block.counts)).sign()
            block.counts.zero_()

    optimizer.register_step_pre_hook(balance)
    run.train(model, optimizer, steps=range(4))


def with_room() -> nn.Module:
    return With(lambda m, x: m.block(x) + (m.adapter(x) if hasattr(m, "adapter") else 0), block=Block())


def attach(run: Run, model: Model, step: int) -> None:
    """Attach frozen adapters after the first step, of which no warning is needed."""
    for block in model.module.blocks if step == 1 else ():
        block.adapter = nn.Linear(WIDTH, WIDTH).requires_grad_(False)


TABLE: Table = {
    "DeepSpeed#7018: two models and one loss": train_two_models,
    "DeepSpeed#8135, DeepSpeed#3539: two losses of one graph": trains_by(Blocks, two_losses),
    "WeatherGenerator#1639: forward is taken from the model": trains(Blocks, call_forward),
    "Model-Optimizer#1150: forward is replaced": trains(Blocks, redirect),
    "LoongForge#152, SimpleTuner#2900: gradients are changed": change_gradients,
    "Soup#336, DeepSpeed#6873: an empty group": leave_a_group_empty,
    "prime-rl#2953, torchtitan#1304: experts are balanced": balance_experts,
    "DeepSpeed#8009, DeepSpeed#6961: adapters are attached": trains_and(
        attach, lambda: Blocks(with_room(), with_room())
    ),
}

test_steps_that_were_reported = as_one_test(__name__, TABLE)
