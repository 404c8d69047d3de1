"""A tiny model under stage 3 and the same model in one process, trained side by side for two steps."""

import copy
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from parallel.mesh import Axis, Mesh
from tests.distributed.zero.architectures.tiny_model import Recipe, describe, loss_of, prepare
from tests.twins import params_of
from zero.engine import ZeroDataParallel
from zero.optimizer import ZeroOptimizer
from zero.partition.config import ZeroConfig

NUM_STEPS, NUM_RANKS = 2, 2
# A gradient that is zero in exact arithmetic is some 1e-13 (grounding-dino), and differs with the order of additions.
# Adam's step has a slope of at most lr / eps = 10 there.
ADAM = {"lr": 1e-3, "eps": 1e-4, "weight_decay": 0.1}


@dataclass(frozen=True)
class Training:
    """The losses of each step and rank, gradient norms, and the parameters after two steps."""

    losses: list[float]
    norms: list[float]
    params: dict[str, Tensor]


@dataclass(frozen=True)
class Comparison:
    """The largest differences from one process, relative to the scale of what is compared, and how much was trained."""

    recipe: Recipe
    losses: float
    norms: float
    params: float
    worst_param: str
    num_trained: int
    num_params: int


def why_not_built(model_type: str) -> str | None:
    """Return why no model of this type can be built, or None if one can."""
    try:
        prepare(model_type)
    except Exception as error:  # of the configuration or of an import, too
        return describe(error, max_length=None)
    return None


def compare(model_type: str) -> Comparison:
    """Train on two ranks and in one process, and return the differences, on the first rank."""
    recipe = prepare(model_type)
    model = recipe.build()
    plain, initial = copy.deepcopy(model), copy.deepcopy(model)
    data = Mesh.create(tensor_size=1).data
    found = train_on_ranks(model, recipe, data)
    expected = train_in_one_process(plain, recipe) if data.rank == 0 else found
    return differences(recipe, found, expected, initial)


def train_on_ranks(module: nn.Module, recipe: Recipe, data: Axis) -> Training:
    config = module.config
    numel = sum(param.numel() for param in module.parameters())
    zero = ZeroConfig(stage=3, bucket_numel=max(5000, numel // 50))
    model = ZeroDataParallel(module, data, zero)
    optimizer = ZeroOptimizer(model, torch.optim.AdamW, **ADAM)
    losses, norms = [], []
    for step in range(NUM_STEPS):
        loss = loss_of(model, config, recipe.input_names, step=step, rank=data.rank)
        loss.backward()
        norms.append(optimizer.step().item())
        gathered = torch.empty(data.size, dtype=torch.float64)
        data.all_gather(loss.detach().to(torch.float64).reshape(1), out=gathered).wait()
        losses += gathered.tolist()
    return Training(losses, norms, params_of(model))


def train_in_one_process(model: nn.Module, recipe: Recipe) -> Training:
    """Train on the batches of all ranks; each has buffers of its own, as on ranks."""
    trainable = [param for param in model.parameters() if param.requires_grad]
    optimizer = torch.optim.AdamW(trainable, **ADAM)
    buffers = [copies(model) for _ in range(NUM_RANKS)]
    losses, norms = [], []
    for step in range(NUM_STEPS):
        for rank in range(NUM_RANKS):
            put_back(model, buffers[rank])
            loss = loss_of(model, model.config, recipe.input_names, step=step, rank=rank)
            (loss / NUM_RANKS).backward()
            losses.append(loss.item())
            buffers[rank] = copies(model)
        for param in trainable:  # a parameter that no rank used has a gradient of zero, and decays
            if param.grad is None:
                param.grad = torch.zeros_like(param)
        norms.append(torch.nn.utils.get_total_norm([param.grad for param in trainable]).item())
        optimizer.step()
        optimizer.zero_grad()
    return Training(losses, norms, {name: param.detach() for name, param in model.named_parameters()})


def copies(model: nn.Module) -> dict[str, Tensor]:
    return {name: buffer.clone() for name, buffer in model.named_buffers()}


def put_back(model: nn.Module, buffers: dict[str, Tensor]) -> None:
    """Set the buffers, some of which a forward replaces by longer ones."""
    for name, value in buffers.items():
        owner, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(owner), attribute, value.clone())


def differences(recipe: Recipe, found: Training, expected: Training, initial: nn.Module) -> Comparison:
    assert found.params.keys() == expected.params.keys()
    by_param = {name: relative(found.params[name], expected.params[name]) for name in expected.params}
    worst = max(by_param, key=by_param.__getitem__)
    decay = (1 - ADAM["lr"] * ADAM["weight_decay"]) ** NUM_STEPS
    trained = [
        name
        for name, param in initial.named_parameters()
        if ((expected.params[name] - param * decay).abs() > 1e-6).any()
    ]
    return Comparison(
        recipe,
        losses=relative(torch.tensor(found.losses), torch.tensor(expected.losses)),
        norms=relative(torch.tensor(found.norms), torch.tensor(expected.norms)),
        params=by_param[worst],
        worst_param=worst,
        num_trained=len(trained),
        num_params=len(by_param),
    )


def relative(found: Tensor, expected: Tensor) -> float:
    """Return the largest difference, divided by the largest absolute value or 1; infinite if a value is not finite."""
    if not expected.numel():
        return 0.0
    if not (found.isfinite().all() and expected.isfinite().all()):
        return float("inf")
    return ((found - expected).abs().max() / expected.abs().max().clamp(min=1)).item()
