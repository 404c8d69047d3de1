"""A tiny model under stage 3 and the same model in one process, trained side by side for two steps."""

import copy

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


def why_not_built(model_type: str) -> str | None:
    """Return why no model of this type can be built, or None if one can."""
    try:
        prepare(model_type)
    except Exception as error:  # of the configuration or of an import, too
        return describe(error, max_length=None)
    return None


def compare(model_type: str) -> tuple[dict[str, float], int]:
    """Train on two ranks and in one process, and return on the first rank how they differ, and how much was trained.

    The differences of losses, gradient norms and parameters are relative to the scale of each.
    """
    recipe = prepare(model_type)
    model = recipe.build()
    plain = copy.deepcopy(model)
    initial = {name: param.detach().clone() for name, param in model.named_parameters()}
    data = Mesh.create(tensor_size=1).data
    found = train_on_ranks(model, recipe, data)
    if data.rank:
        return {}, 0
    expected = train_in_one_process(plain, recipe)
    assert found.keys() == expected.keys()
    decay = (1 - ADAM["lr"] * ADAM["weight_decay"]) ** NUM_STEPS
    is_trained = [((expected[name] - param * decay).abs() > 1e-6).any() for name, param in initial.items()]
    return {name: relative(found[name], value) for name, value in expected.items()}, sum(map(bool, is_trained))


def train_on_ranks(module: nn.Module, recipe: Recipe, data: Axis) -> dict[str, Tensor]:
    """Return the losses of each step and rank, gradient norms, and the parameters after the last step."""
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
    return {"losses": torch.tensor(losses), "norms": torch.tensor(norms)} | params_of(model)


def train_in_one_process(model: nn.Module, recipe: Recipe) -> dict[str, Tensor]:
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
    params = {name: param.detach() for name, param in model.named_parameters()}
    return {"losses": torch.tensor(losses), "norms": torch.tensor(norms)} | params


def copies(model: nn.Module) -> dict[str, Tensor]:
    return {name: buffer.clone() for name, buffer in model.named_buffers()}


def put_back(model: nn.Module, buffers: dict[str, Tensor]) -> None:
    """Set the buffers, some of which a forward replaces by longer ones."""
    for name, value in buffers.items():
        owner, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(owner), attribute, value.clone())


def relative(found: Tensor, expected: Tensor) -> float:
    """Return the largest difference, divided by the largest absolute value or 1; infinite if a value is not finite."""
    if not expected.numel():
        return 0.0
    if not (found.isfinite().all() and expected.isfinite().all()):
        return float("inf")
    return ((found - expected).abs().max() / expected.abs().max().clamp(min=1)).item()
