"""Methods and submodules that run beside the model's forward, hooks of the user, and weights read in forward."""

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook, saved_tensors_hooks
from torch.nn import functional as F

from parallel.autograd_internals import DisableTorchFunction
from tests.procedures import BlockWith, With, calling, linear, param, trains, trains_by
from tests.scenarios import WIDTH, Block, Blocks, Model, Procedure, Run, as_test, cases, mean_square


class Methods(Blocks):
    """A model whose methods read parameters of the root and of blocks, and call each other."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = param(WIDTH)

    def shifted(self, x: Tensor) -> Tensor:
        return self.encode(x) + self.bias

    def training_step(self, x: Tensor) -> Tensor:
        return (self(x) - 0.5).square().mean() + (self.shifted(x) @ self.head.weight.t()).square().mean()


def registered_methods(run: Run) -> None:
    """One of the model calls its forward and other methods; one of a block runs as its forward does."""
    model = run.wrap(Methods())
    model.register_forward_method("training_step")
    for block in model.module.blocks:
        model.register_forward_method("mlp", block)

    def loss(model: Model, x: Tensor) -> Tensor:
        first, second = model.module.blocks
        return model.module.training_step(x) + second.mlp(first.mlp(x)).square().mean()

    run.train(model, run.optimizer(model), loss, steps=range(3))


def loss_of_parts(model: Model, x: Tensor) -> Tensor:
    module = model.module
    hidden = module.embed(x)  # of the root
    hidden = module.blocks[1](hidden)  # a unit
    return module.head(module.blocks[0].up(hidden)[:, :WIDTH]).square().mean()  # a part of a unit


def redirect(model: Model, x: Tensor) -> Tensor:
    """Call the model to run another function, then the model itself."""
    module = model.module
    module.forward = lambda x: F.linear(module.encode(x), module.head.weight.sin())
    loss = mean_square(model, x)
    del module.forward
    return loss + mean_square(model, x)


class Listed(nn.ModuleList):
    """A list of modules that is called, and has a parameter of its own."""

    def forward(self, x: Tensor) -> Tensor:
        return self[1](self[0](x * self.scale))


def called_containers() -> nn.Module:
    module = Listed([Listed([Block(), Block()]), Block()])
    module.scale, module[0].scale = param(WIDTH), param(WIDTH)
    return Blocks(module, Block())


def with_tail(call: Callable[[nn.Module, Tensor], Tensor]) -> nn.Module:
    """Return a model with a norm and a head in one unit, of which a forward may run one."""
    tail = With(call, norm=nn.LayerNorm(WIDTH), head=nn.Linear(WIDTH, 2))  # which is not called itself
    return With(call, body=Blocks(), tail=tail)


def keep_logits(m: nn.Module, x: Tensor) -> Tensor:
    hidden = m.tail.norm(m.body.encode(x))
    y = m.tail.head(hidden)
    m.tail.logits = m.tail.head(m.tail.norm(m.body.blocks[0](hidden)))
    return y


def with_logits(model: Model, x: Tensor) -> None:
    (mean_square(model, x) + model.module.tail.logits.square().mean()).backward()


def in_threads(model: Model, x: Tensor) -> None:
    losses: list[Tensor] = []
    for target in (lambda: losses.append(mean_square(model, x)), lambda: losses[0].backward()):
        thread = threading.Thread(target=target)
        thread.start()
        thread.join()


def with_hooks(register: Callable[[nn.Module], object], make: Callable[[], nn.Module] = Blocks) -> Procedure:
    """Train a model whose hooks are registered before it is wrapped, then one whose hooks are registered after."""

    def procedure(run: Run) -> None:
        module = make()
        register(module)
        run.train_module(module)
        model, optimizer = run.start(make())
        register(model.module)
        run.train(model, optimizer)

    return procedure


def norm_of_own_weight(module: nn.Module) -> Tensor:
    weight = next(module.parameters(recurse=False)) if isinstance(module, Block) else module.head.weight[0, :1]
    return weight.norm().tanh()


def register_forward_hooks(module: nn.Module) -> None:
    """Change inputs and outputs of blocks and of the root by values of parameters."""
    for part in (module, *module.blocks):
        for prepend in (False, True):
            part.register_forward_pre_hook(lambda m, inputs: (inputs[0] * norm_of_own_weight(m),), prepend=prepend)
            part.register_forward_hook(lambda m, _inputs, y: y * norm_of_own_weight(m), prepend=prepend)
    module.blocks[0].register_forward_hook(lambda m, _inputs, y: y * m.down.weight.norm().tanh())


def register_backward_hooks(module: nn.Module) -> None:
    def scale(module: nn.Module, grads_in: tuple[Any, ...], _grads_out: Any) -> tuple[Any, ...]:
        return tuple(grad if grad is None else grad * norm_of_own_weight(module).detach() for grad in grads_in)

    for part in (module, *module.blocks):
        part.register_full_backward_hook(scale)
        part.register_full_backward_pre_hook(lambda _module, grads_out: (1.2 * grads_out[0],))


def register_hooks_with_keywords(module: nn.Module) -> None:
    module.register_forward_pre_hook(lambda _m, args, kwargs: (args, kwargs | {"factor": 2.0}), with_kwargs=True)
    module.register_forward_hook(lambda _m, _args, kwargs, y: y * kwargs["factor"], with_kwargs=True)
    module.register_forward_hook(lambda _m, _args, y: y.sin(), always_call=True)


def register_hooks_of_parameters(module: nn.Module) -> None:
    """Mask gradients by values: a hook of a tensor runs in backward, where its parameter is gathered."""
    for weight in module.parameters():
        weight.register_hook(lambda grad, weight=weight: 2 * grad * (weight.detach() > 0))


def hooks_of_the_wrapper(run: Run) -> None:
    model = run.wrap(Blocks())
    model.register_forward_pre_hook(lambda _model, inputs: (2 * inputs[0],))
    model.register_forward_hook(lambda _model, _inputs, output: output.sin())
    run.train(model, run.optimizer(model))


def retained_gradients(run: Run) -> None:
    def forward(block: Any, x: Tensor) -> Tensor:
        block.kept = x + block.mlp(x)
        block.kept.retain_grad()
        return block.kept

    model, optimizer = run.start(Blocks(BlockWith(forward), Block()))
    for step in range(2):
        run.train(model, optimizer, steps=[step])
        output = model.module.blocks[0].kept
        run.record((output.grad * len(output)).square().mean())


def wait_for_gradients(run: Run) -> None:
    module, counts = Blocks(), []
    register_multi_grad_hook([*module.blocks.parameters()], lambda grads: counts.append(len(grads)))
    run.train_module(module)
    assert counts == [10, 10]


def saved_as_arrays(module: nn.Module, x: Tensor) -> Tensor:
    with saved_tensors_hooks(lambda tensor: tensor.numpy(force=True).copy(), torch.from_numpy):
        return module(x)


def keeping_weights() -> nn.Module:
    """Return a model that reads its blocks' weights from a plain list, a dictionary and a closure."""
    blocks = nn.ModuleList(linear() for _ in range(3))
    weight = blocks[1].weight

    def forward(m: nn.Module, x: Tensor) -> Tensor:
        for block in m.blocks:
            x = block(x).tanh()
        return x @ weight + x @ m.weights[0] + m.weights[2].square().sum() * m.biases["last"]

    return With(forward, blocks=blocks, weights=[b.weight for b in blocks], biases={"last": blocks[2].bias})


def read_neighbour(m: nn.Module, x: Tensor) -> Tensor:
    """Read weights of a child, and of a block that this one does not own."""
    return F.linear(x, m.child.weight) + x @ m.others[0].up.weight.t() @ m.others[0].down.weight.t()


def read_unseen(m: nn.Module, x: Tensor) -> Tensor:
    """Read as an extension in C++ does: torch shows its operations to no subclass of a tensor."""
    with DisableTorchFunction():
        return read_neighbour(m, x)


def reading_neighbours() -> nn.Module:
    first = Block()
    ways = (read_neighbour, read_unseen, read_unseen)
    return Blocks(first, *(With(way, child=linear(), others=[first]) for way in ways))


def returning_parameters() -> nn.Module:
    """Return a block that returns a parameter and views of parameters, for its caller to use."""

    def forward(m: nn.Module, x: Tensor) -> tuple[Tensor, ...]:
        weight = m.linear.weight
        return m.linear(x), m.bias, weight[0], weight.t(), m.frozen, m.frozen[1:]

    return With(forward, linear=linear(), bias=param(WIDTH), frozen=param(WIDTH).requires_grad_(False))


def use_returned(m: nn.Module, x: Tensor) -> Tensor:
    biases = []
    for block in m.blocks:
        x, bias, row, transposed, frozen, part = block(x)
        biases.append((bias, row, frozen, part))
        x = (x @ transposed).tanh()
    return sum((b * x + r.sin() * f + p.sum() for b, r, f, p in biases), x)


def loss_of_returned(model: Model, x: Tensor) -> Tensor:
    y, bias, row, transposed, frozen, part = model(x)
    return ((y + bias * row + part.sum()) @ transposed * frozen).square().mean()


TABLE = {
    "calls": cases(
        registered_methods,
        {
            "submodules": trains(Blocks, loss=loss_of_parts),
            "without the wrapper": trains(Blocks, loss=lambda model, x: mean_square(model.module, x)),
            "Model-Optimizer#1150: forward is replaced": trains(Blocks, loss=redirect),
            "Megatron-LM#5789: forward is called": trains(
                lambda: calling(lambda m, h: m.forward(h) + m.up.forward(h)[:, :4], Block())
            ),
            "pytorch#167856: containers that are called": trains(called_containers),
            "pytorch#183702: a part of a unit runs again": trains_by(
                lambda: with_tail(keep_logits), with_logits, units=("body.blocks.*", "tail")
            ),
            "DeepSpeed#7824: threads": trains_by(Blocks, in_threads),
        },
    ),
    "hooks": cases(
        {
            "forward": with_hooks(register_forward_hooks),
            "backward": with_hooks(register_backward_hooks),
            "keywords": with_hooks(
                register_hooks_with_keywords, lambda: With(lambda m, x, factor=1.0: m.body(x) * factor, body=Blocks())
            ),
            "parameters": with_hooks(register_hooks_of_parameters),
            "accelerate#4175: saved as arrays": trains(lambda: calling(saved_as_arrays, Block(), Block())),
            "torchrec#4268: several gradients": wait_for_gradients,
        },
        hooks_of_the_wrapper,
        retained_gradients,
    ),
    "kept-weights": cases(
        {
            "in a list": trains(keeping_weights),
            "of children and of other blocks": trains(reading_neighbours),
            "outputs of blocks": trains(
                lambda: With(use_returned, blocks=nn.ModuleList(returning_parameters() for _ in range(3)))
            ),
            "outputs of the model": trains(returning_parameters, loss=loss_of_returned),
        }
    ),
}

test_scenario = as_test(__name__, TABLE)
