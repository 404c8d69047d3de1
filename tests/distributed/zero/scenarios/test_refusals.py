"""Uses that the engine refuses with an error that says what to do instead, and those that it accepts beside them."""

import copy
import io
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.testing._internal.two_tensor import TwoTensor

from tests.procedures import Act, With, linear, param, refuses, trains_and
from tests.scenarios import STAGES, WIDTH, Block, Blocks, Model, Run, as_test, cases, mean_square
from zero.core.buckets.guard import ShardedParameterError
from zero.data_parallel import ZeroDataParallel
from zero.extensions.agreement import DivergedRanks
from zero.optimizer import ZeroOptimizer

# What reads or writes the values of a parameter, given the model and a parameter of it that was kept.
READS: dict[str, Callable[[nn.Module, nn.Parameter], object]] = {
    "attribute": lambda module, _: module.head.weight + 1,
    "torch function": lambda _, kept: torch.add(kept, 1),
    "functional": lambda _, kept: F.linear(torch.ones(1, WIDTH), kept),
    "state_dict of the module": lambda module, _: [value + 1 for value in module.state_dict().values()],
    "deepcopy": lambda module, _: copy.deepcopy(module),
    "save": lambda module, _: torch.save(module, io.BytesIO()),
    "pickle": lambda _, kept: pickle.dumps(kept),
    "numpy": lambda _, kept: kept.detach().numpy(),
    "asarray": lambda _, kept: np.asarray(kept),
    "tolist": lambda _, kept: kept.tolist(),
    "iteration": lambda _, kept: list(kept),
    "data": lambda _, kept: kept.data + 1,
    "data, then a copy": lambda _, kept: kept.data.clone(),
    "detach": lambda _, kept: kept.detach() + 1,
    "comparison": lambda _, kept: kept == 1,
    "source of a copy": lambda _, kept: torch.zeros(kept.shape).copy_(kept),
    "parameters_to_vector": lambda module, _: nn.utils.parameters_to_vector(module.parameters()),
}
WRITES: dict[str, Callable[[nn.Module, nn.Parameter], object]] = {
    "in place": lambda _, kept: kept.mul_(2),
    "data, in place": lambda _, kept: kept.data.mul_(2),
    "data, replaced": lambda _, kept: setattr(kept, "data", torch.ones(kept.shape)),
    "out": lambda _, kept: torch.add(torch.ones(()), 1, out=kept),
    "init": lambda module, _: nn.init.ones_(module.head.weight),
    "reset_parameters": lambda module, _: module.head.reset_parameters(),
    "vector_to_parameters": lambda module, _: nn.utils.vector_to_parameters(torch.ones(1000), module.parameters()),
}


def of_parameters(routes: dict[str, Callable[[nn.Module, nn.Parameter], object]], grad: bool) -> dict[str, Act]:
    """Return acts on a parameter of the root, with gradients, or on one of a unit, without."""

    def act(route: Callable[[nn.Module, nn.Parameter], object], _run: Run, model: Model) -> None:
        module = model.module
        with torch.set_grad_enabled(grad):
            route(module, module.head.weight if grad else module.blocks[0].up.weight)

    return {name: partial(act, route) for name, route in routes.items()}


def metadata(run: Run) -> None:
    """It can always be read."""
    model, optimizer = run.start(Blocks())
    for step in range(2):
        weight, module = model.module.blocks[0].up.weight, model.module
        assert weight.shape == weight.size() == torch.empty_like(weight).shape == (WIDTH + 2, WIDTH)
        assert (weight.size(0), len(weight), weight.dim(), weight.ndim) == (WIDTH + 2, WIDTH + 2, 2, 2)
        assert weight.numel() == weight.nelement() == torch.numel(weight) == (WIDTH + 2) * WIDTH
        assert (weight.dtype, weight.device, weight.element_size()) == (torch.float64, torch.device("cpu"), 8)
        assert weight.is_floating_point() is torch.is_floating_point(weight) is weight.requires_grad is weight.is_leaf
        assert not any((weight.is_complex(), weight.is_cuda, weight.is_sparse))
        assert isinstance(weight, nn.Parameter)
        assert weight is dict(module.named_parameters())["blocks.0.up.weight"]
        assert all(text for text in (repr(weight), f"{weight}", repr(module)))
        assert weight.new_zeros(3).dtype == torch.float64
        run.train(model, optimizer, steps=[step])


def backward(run: Run, model: Model) -> None:
    mean_square(model, run.batch(7)).backward()


def of_gradients(read: Callable[[nn.Module], object], is_complete: bool) -> Act:
    def act(run: Run, model: Model) -> None:
        assert all(weight.grad is None for weight in model.parameters())
        with model.accumulate():
            backward(run, model)
        if is_complete:
            backward(run, model)
        read(model.module)

    return act


GRADIENT_READS: dict[str, Callable[[nn.Module], object]] = {
    "grad": lambda module: module.head.weight.grad,
    "clip_grad_norm_": lambda module: nn.utils.clip_grad_norm_(module.parameters(), 1.0),
    "clip_grad_norm_, one by one": lambda module: nn.utils.clip_grad_norm_(module.parameters(), 1.0, foreach=False),
    "clip_grad_value_": lambda module: nn.utils.clip_grad_value_(module.parameters(), 1.0),
    "is None": lambda module: [param for param in module.parameters() if param.grad is None],
}


def read_in_a_hook(run: Run, model: Model) -> None:
    """An optimizer that steps inside backward does so, but the engine has taken the gradient."""
    handle = model.module.head.weight.register_post_accumulate_grad_hook(lambda param: param.grad.mul_(2))
    try:
        backward(run, model)
    finally:
        handle.remove()


def assign_a_gradient(run: Run, model: Model) -> None:
    """Assign a gradient, which would be ignored in silence: the optimizer uses those of the engine."""
    weight = model.module.head.weight
    weight.grad = torch.ones(weight.shape)
    backward(run, model)
    run.optimizers[0].step()


CHANGES: dict[str, Act] = {
    "wrapped again": lambda run, model: wrapped(run, model.module),
    "a block is wrapped again": lambda run, model: wrapped(run, model.module.blocks[0]),
    "the model is wrapped": lambda run, model: wrapped(run, model),
    "it is wrapped in another module": lambda run, model: wrapped(run, nn.Sequential(model.module)),
    "half": lambda _, model: model.module.half(),
    "bfloat16": lambda _, model: model.bfloat16(),
    "a block": lambda _, model: model.module.blocks[0].to(torch.float32),
    "to a device": lambda _, model: model.to("meta"),
    "to_empty": lambda _, model: model.to_empty(device="meta"),
}


def switched(choose: Callable[[nn.Module], nn.Module], requires_grad: bool) -> Act:
    """Return an act: freeze or thaw a part of a model, and step."""

    def act(run: Run, model: Model) -> None:
        part = choose(model.module).requires_grad_(requires_grad)
        try:
            loss = mean_square(model, run.batch(2))
            if loss.requires_grad:
                loss.backward()
            run.optimizers[0].step()
        finally:
            part.requires_grad_(not requires_grad)

    return act


def with_frozen_blocks() -> nn.Module:
    module = Blocks()
    module.blocks.requires_grad_(False)
    return module


def changes_that_change_nothing(run: Run, model: Model, step: int) -> None:
    move = (lambda m: m.to("cpu"), nn.Module.double, nn.Module.cpu)[step]
    for part in (model, model.module):
        move(part)
        part.requires_grad_(False)  # for an evaluation
        run.record(mean_square(model, run.batch(9)))
        assert part.requires_grad_(True) is part
        assert all(weight.requires_grad_() is weight for weight in part.parameters())


def an_unwrapped_module(run: Run) -> None:
    """It is plain and complete, and may be wrapped again: here, some of it is trained only then."""
    module = with_frozen_blocks()
    module.register_forward_hook(lambda _module, _inputs, output: 2 * output)
    model, optimizer = run.start(module)
    run.train(model, optimizer)
    assert model.unwrap() is module
    for weight in module.parameters():
        run.record(weight)
        assert weight.grad is None or run.is_plain
        assert type(weight) is nn.Parameter
    module.requires_grad_(True).double()
    run.record(mean_square(module, run.batch(2))).backward()
    assert all(weight.grad is not None and weight.isfinite().all() for weight in module.parameters())
    module.zero_grad()
    module.load_state_dict(module.state_dict(), assign=True)
    run.train_module(module)


def with_room() -> nn.Module:
    return With(lambda m, x: m.block(x) + (m.adapter(x) if hasattr(m, "adapter") else 0), block=Block())


def layers_that_are_added_and_replaced(run: Run) -> None:
    model, optimizer = run.start(Blocks(with_room(), Block()))
    run.train(model, optimizer)
    torch.manual_seed(3)
    blocks = model.module.blocks
    kept, blocks[1], blocks[0].adapter = blocks[1], Block(), linear()
    if run.is_plain:
        run.train(model, optimizer, steps=[2])
    else:
        with pytest.warns(UserWarning, match=r"adapter\.weight"), pytest.warns(UserWarning, match=r"blocks\.1\."):
            run.train(model, optimizer, steps=[2])
    blocks[1] = kept
    del blocks[0].adapter


def a_block_is_removed_and_a_weight_is_tied(run: Run) -> None:
    """Layer dropping: the parameters of the block have a gradient of zero."""
    model, optimizer = run.start(Blocks(Block(), Block(), Block()))
    blocks = model.module.blocks
    for step, kept in enumerate((blocks, nn.ModuleList([blocks[0], blocks[2]]), blocks)):
        model.module.blocks = kept
        run.train(model, optimizer, steps=[step])
    blocks[1].up.weight = blocks[0].up.weight
    run.train(model, optimizer, steps=[3, 4])


@contextmanager
def swapped_on_conversion() -> Iterator[None]:
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        yield
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


def load(_run: Run, model: Model, assign: bool = True) -> None:
    model.module.load_state_dict(Blocks().state_dict(), assign=assign)


def load_gathered(run: Run, model: Model, assign: bool = True) -> None:
    with model.gathered(modify=True):
        load(run, model, assign)


def load_swapping(run: Run, model: Model) -> None:
    with swapped_on_conversion():
        load_gathered(run, model, assign=False)


def swap(_run: Run, model: Model) -> None:
    with model.gathered() as module:
        torch.utils.swap_tensors(module.head.weight, nn.Parameter(torch.ones(2, 4)))


def cast_swapping(_run: Run, model: Model) -> None:
    with swapped_on_conversion():
        model.module.head.float()


def with_subclass() -> nn.Module:
    module = Blocks()
    module.head.weight = nn.Parameter(TwoTensor(torch.ones(2, WIDTH), torch.ones(2, WIDTH)))
    return module


def wraps(make: Callable[[], nn.Module]) -> Act:
    return lambda run, _model: wrapped(run, make())


def wrapped(run: Run, module: nn.Module) -> ZeroDataParallel:
    return ZeroDataParallel(module, run.data, run.configuration.zero)


def unwrap_inside_gathered(_run: Run, model: Model) -> None:
    with model.gathered():
        model.unwrap()


def scale_by_torch(run: Run, model: Model) -> None:
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(1))
    backward(run, model)
    scaler.step(run.optimizers[0])


def sparse_gradients(run: Run, _model: Model) -> None:
    model = wrapped(run, nn.Embedding(5, WIDTH, sparse=True))
    model(torch.zeros(1, dtype=torch.int64)).sum().backward()


def repeat(m: nn.Module, x: Tensor) -> Tensor:
    for _ in range(m.times):
        x = m.blocks[0](x)
    return x


def diverge(run: Run, _model: Model) -> None:
    module = With(repeat, blocks=nn.ModuleList([Block()]), times=run.data.rank + 1)
    mean_square(wrapped(run, module), run.batch(0)).backward()


MISUSE: dict[str, Act] = {  # what the error says, and what raises it
    r"^unwrap\(\) was called inside gathered": unwrap_inside_gathered,
    "add_param_group": lambda run, _: run.optimizers[0].add_param_group({"params": [param(3)]}),
    "LossScale .*GradScaler": scale_by_torch,
    "clip_norm=0.0": lambda run, model: run.optimizer(model, clip_norm=0.0),
    "is not element-wise": lambda run, _: ZeroOptimizer(wrapped(run, linear()), torch.optim.Adafactor),
    "sparse": sparse_gradients,
}
TABLE = {
    "sharded-reads": cases(
        {
            "reads": refuses(of_parameters(READS, True), "gathered", ShardedParameterError),
            "reads without gradients": refuses(of_parameters(READS, False), "gathered", ShardedParameterError),
            "writes": refuses(of_parameters(WRITES, False), "gathered", ShardedParameterError),
        },
        stages=[3],
    )
    | cases(metadata),
    "gradient-reads": cases(
        {
            f"reads while {name}": refuses({n: of_gradients(r, done) for n, r in GRADIENT_READS.items()}, "clip_norm")
            for name, done in (("accumulating", False), ("complete", True))
        }
        | {
            "a hook after accumulation": refuses({"clip_norm": read_in_a_hook}),
            "an assignment": refuses({"cannot be set": assign_a_gradient}),
        }
    ),
    "changes-after-wrapping": cases(
        {
            "casts and moves, and wrapping twice": refuses(CHANGES, r"unwrap|before .*wrap"),
            "freezing": refuses(
                {"head": switched(lambda m: m.head, False), "all": switched(lambda m: m, False)},
                r"requires_grad of \S+ was True when the .* wrapped, and is False now.*unwrap",
            ),
            "unfreezing": refuses(
                {r"blocks\.1.*unwrap": switched(lambda m: m.blocks[1], True)}, make=with_frozen_blocks
            ),
            "pytorch#186998: moves to the same place, frozen to evaluate": trains_and(changes_that_change_nothing),
        },
        a_block_is_removed_and_a_weight_is_tied,
    )
    | cases(an_unwrapped_module, few=STAGES[1::2]),
    "added-layers": cases(layers_that_are_added_and_replaced),
    "assigned-states": cases(
        {
            "loads and swaps": refuses(
                {
                    "assign=": load,
                    "assign": load_gathered,
                    r"head\.weight .* swapped.*unwrap": swap,
                    "set_swap_module": load_swapping,
                    r"swap Linear|unwrap": cast_swapping,
                }
            )
        }
    ),
    "refused-modules": cases(
        {
            "when they are wrapped": refuses(
                {
                    "max_norm": wraps(lambda: nn.Sequential(nn.Embedding(5, WIDTH, max_norm=1.0))),
                    "max_norm=": wraps(lambda: nn.Sequential(nn.EmbeddingBag(5, WIDTH, max_norm=1.0))),
                    "(?i)parameter": wraps(nn.ReLU),
                    "(?i)lazy|uninitialized|materializ": wraps(lambda: nn.Sequential(nn.LazyLinear(4))),
                    "meta": wraps(lambda: nn.Linear(4, 4, device="meta")),
                    r"^head\.weight is a TwoTensor, .*full_tensor\(\)": wraps(with_subclass),
                    "view_as_real": wraps(lambda: nn.Linear(4, 4, dtype=torch.complex64)),
                    "of torch.jit": wraps(lambda: torch.jit.script(nn.Linear(4, 4))),
                }
            )
        }
    ),
    "misuse": cases({"errors": refuses(MISUSE)}),
    "diverging-ranks": cases(
        {"DeepSpeed#7998: ranks repeat a unit": refuses({r"(?s)ranks.*units": diverge}, error=DivergedRanks)},
        stages=[3],
    ),
}

test_scenario = as_test(__name__, TABLE)
