"""A check that an optimizer updates pieces of parameters as it updates whole ones, before it is used.

Shards ignore parameter boundaries, so the update of an element must not depend on other elements, unless the optimizer
declares another granularity (`zero/core/step/update.py`). This is true of Adam and SGD. LAMB, Adafactor and torch's
Muon compute with whole parameters: on shards they would silently train differently. An optimizer that begins to do so
only after `NUM_PROBE_STEPS` steps is not noticed.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from parallel.torch_internals import real_tensors
from parallel.validation.errors import ConfigError, check_type
from zero.core.partition.layout import cut
from zero.core.step.element_wise import ElementWise
from zero.core.step.parameter_groups import settings_of
from zero.core.step.pieces import Piece, WholePlace, locate
from zero.core.step.update import Update

PROBED_ROWS, PROBED_COLUMNS, PROBED_CUT, NUM_PROBE_STEPS = 6, 8, 19, 32
NUMBERS = int, float, Tensor  # the types of settings and states that are compared, if they are 0-dim
PROBED_RATE = 1e-2  # a rate that is tried beside the given one: with one near zero, no two results would differ


@real_tensors()
def probe(
    optimizer: Callable[..., Optimizer],
    settings: Mapping[str, Any],
    device: torch.device,
    groups: Sequence[dict[str, Any]] = ({},),
    alignment: int = 0,
    name: str | None = None,
) -> list[float]:
    """Check that an optimizer gives the same result for a small parameter as a whole and for two flat pieces of it.

    The pieces are stepped by the update of the optimizer, with the settings of each of `groups`: as they are, and with
    another learning rate. Return, for each group, the bytes of state for each element of a parameter in fp32, without
    the states of whole matrices. Raises ConfigError if the results differ, or numbers among settings and states, if the
    optimizer refuses flat pieces, or if pieces that begin at multiples of `alignment` elements may cut its blocks.
    """
    name = name or name_of(optimizer)
    found: dict[str, float] = {}
    keys = []
    for group in map(settings_of, groups):
        for rate in (None, PROBED_RATE):
            keys.append(repr([sorted(_with_rate(rate, values).items(), key=str) for values in (group, settings)]))
            if keys[-1] not in found:
                make = partial(_make_probed, optimizer, group, settings, rate)
                found[keys[-1]] = _probe(name, make, device, alignment)
    return [found[key] for key in keys[1::2]]


def _probe(name: str, make: Callable[[list[nn.Parameter]], Optimizer], device: torch.device, alignment: int) -> float:
    """Check one parameter group; return its bytes of state for each element."""
    try:
        block_numel = _block_numel(make)
    except (AssertionError, RuntimeError, TypeError, ValueError) as error:
        raise ConfigError(
            f"optimizer {name} cannot be made with the settings that ZeroOptimizer passes on to it: {error}"
        ) from error
    try:
        values, *grads = _random(block_numel).to(device)
        param, pieces = nn.Parameter(values.clone()), _halves(values.flatten(), block_numel)
        whole, in_pieces = make([param]), make([piece.param for piece in pieces])
        locate(in_pieces, {piece.param: WholePlace(0, piece.in_param.start) for piece in pieces})
        for inner in (whole, in_pieces):
            if callable(train := getattr(inner, "train", None)):
                train()  # a schedule-free optimizer refuses to step in its other mode
        update = update_class_of(in_pieces)(in_pieces, [0])
        for grad in grads:
            param.grad = grad.clone()
            whole.step()
            update.step_alone(pieces, grad)
    except AssertionError as error:
        raise ConfigError(f"optimizer {name} does not work on {device.type}: {error}; change its settings") from error
    except (RuntimeError, TypeError, ValueError) as error:
        raise ConfigError(
            f"optimizer {name} cannot step flat pieces of parameters: {error}; choose an optimizer such as AdamW, "
            "SGD or zero's Muon"
        ) from error
    joined = torch.cat([piece.param.detach() for piece in pieces])
    numbers = (_different_number(whole, param, in_pieces, piece.param) for piece in pieces)
    differs = next(filter(None, numbers), None)
    if differs is None and not torch.allclose(param.detach().flatten(), joined, rtol=1e-5, atol=1e-7, equal_nan=True):
        differs = "its values"
    if differs is not None:
        raise ConfigError(
            f"optimizer {name} is not element-wise: it updates a {param.shape[0]} x {param.shape[1]} parameter "
            f"differently as a whole and in 2 pieces ({differs}), so its states cannot be partitioned; choose an "
            "optimizer such as AdamW, SGD or zero's Muon"
        )
    if alignment % block_numel:
        raise ConfigError(
            f"{name} updates blocks of {block_numel} elements, and ZeroConfig.alignment={alignment} lets shards cut "
            f"them; choose {block_numel}"
        )
    states = [value for value in whole.state[param].values() if isinstance(value, Tensor) and value.dim() > 0]
    return sum(state.nbytes for state in states) / param.numel()


def name_of(optimizer: Callable[..., Optimizer]) -> str:
    """Return the name of a class of optimizers, or of a function that makes one."""
    return str(getattr(optimizer, "__name__", optimizer))


def _block_numel(make: Callable[[list[nn.Parameter]], Optimizer]) -> int:
    """Return the number of elements that the optimizer declares as its granularity."""
    empty = make([nn.Parameter(torch.zeros(PROBED_ROWS, PROBED_COLUMNS))])
    check_type("what it makes", empty, Optimizer, "give a class of optimizers, or a function that makes one")
    return getattr(empty, "granularity", 1)


def _halves(values: Tensor, block_numel: int) -> list[Piece]:
    """Return two flat pieces of a parameter, each in a shard of its own, which cut no block."""
    cut_at = PROBED_CUT if block_numel == 1 else 2 * block_numel
    parts = range(cut_at), range(cut_at, values.numel())
    return [Piece(nn.Parameter(cut(values, part).clone()), range(len(part)), 0, "", part) for part in parts]


def update_class_of(optimizer: Optimizer) -> type[Update]:
    """Return the class of the update that an optimizer declares."""
    return getattr(optimizer, "update_class", ElementWise)


def _random(block_numel: int) -> Tensor:
    """Return the values of a parameter, and its gradient in each step; it has three blocks and a part of one."""
    generator = torch.Generator().manual_seed(0)
    columns = PROBED_COLUMNS if block_numel == 1 else -(-block_numel // 2) + 1
    return torch.randn(1 + NUM_PROBE_STEPS, PROBED_ROWS, columns, generator=generator, dtype=torch.float32)


def _different_number(whole: Optimizer, param: Tensor, in_pieces: Optimizer, piece: Tensor) -> str:
    """Return the name of a number that depends on how a parameter is divided, or ""; each rank would have its own."""
    numbers: list[dict[str, float]] = []
    for optimizer, own in ((whole, param), (in_pieces, piece)):
        values = {**settings_of(optimizer.param_groups[0]), **optimizer.state[own]}
        scalars = {name: value for name, value in values.items() if not isinstance(value, Tensor) or not value.dim()}
        numbers.append({name: float(value) for name, value in scalars.items() if isinstance(value, NUMBERS)})
    first, second = numbers
    common = [name for name in first if name in second]
    close = {name: math.isclose(first[name], second[name], rel_tol=1e-5, abs_tol=1e-12) for name in common}
    both_nan = {name for name in common if math.isnan(first[name]) and math.isnan(second[name])}
    return next((f"its {name}" for name in common if not close[name] and name not in both_nan), "")


def _make_probed(
    optimizer: Callable[..., Optimizer],
    group: Mapping[str, Any],
    settings: Mapping[str, Any],
    rate: float | None,
    params: list[nn.Parameter],
) -> Optimizer:
    """Return an optimizer of parameters; with another learning rate, if `rate` is given."""
    return optimizer([{**_with_rate(rate, group), "params": params}], **_with_rate(rate, settings))


def _with_rate(rate: float | None, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of the settings, with another learning rate if it is given and they have one."""
    # Copies: an optimizer may advance a tensor among them in place.
    copies = {name: value.clone() if isinstance(value, Tensor) else value for name, value in settings.items()}
    return copies if rate is None or "lr" not in settings else {**copies, "lr": rate}
