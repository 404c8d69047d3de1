"""A torch optimizer that updates some of its parameters at a time, and a check that this gives the same results.

Shards ignore parameter boundaries, so the update of an element must not depend on other elements, unless the optimizer
declares another atom (`zero/optimizers/atoms.py`). This is true of Adam and SGD. LAMB, Adafactor and torch's Muon
compute with whole parameters: on shards they would silently train differently.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from parallel.errors import ConfigError
from parallel.torch_internals import real_tensors
from zero.optimizers.atoms import atom_of
from zero.optimizers.matrix_optimizer import MatrixOptimizer
from zero.partition.layout import cut

MIN_ALLOCATION_BYTES = 512  # that CUDA's allocator takes for any smaller tensor
PROBED_ROWS, PROBED_COLUMNS, PROBED_CUT, NUM_PROBE_STEPS = 6, 8, 19, 3
PROBED_RATE = 1e-2  # with a learning rate near zero, no two results would differ


@dataclass(frozen=True, eq=False)
class Piece:
    """The elements of one parameter that are in one shard, flattened: the torch optimizer's own parameter."""

    param: nn.Parameter
    """The optimizer's parameter, a view of the bucket's master weights."""
    elements: range
    """The elements of the piece, counted from the beginning of the bucket's shard."""
    group: int
    """The number of the parameter group."""


class BucketedOptimizer:
    """A torch optimizer that is stepped for the pieces of one or a few buckets at a time.

    A round consists of steps for all buckets. Counters that the optimizer keeps for each parameter group, such as
    the step counter of apex's Adam, advance once in a round, because each step starts from the same counters.
    """

    def __init__(self, inner: Optimizer):
        self.inner = inner
        self._all_params = [group["params"] for group in inner.param_groups]

    def begin_round(self) -> None:
        """Begin a round, and read the settings of the groups, such as the learning rate."""
        self._before = [_settings(group) for group in self.inner.param_groups]
        self._after = list(self._before)

    def step(self, shards: Sequence[tuple[Sequence[Piece], Tensor]]) -> None:
        """Step the optimizer for the pieces of some buckets, each with the flat gradient of the bucket's shard."""
        stepped = [piece for pieces, _ in shards for piece in pieces]
        for number, group in enumerate(self.inner.param_groups):
            _replace(group, self._before[number], [piece.param for piece in stepped if piece.group == number])
        for pieces, grad in shards:
            for piece in pieces:
                piece.param.grad = grad[piece.elements.start : piece.elements.stop]
        self.inner.step()
        for number in {piece.group for piece in stepped}:
            self._after[number] = _settings(self.inner.param_groups[number])
        for piece in stepped:
            piece.param.grad = None

    def skip_round(self) -> None:
        """Step without parameters: a schedule of learning rates warns if the optimizer has not stepped before it."""
        self.begin_round()
        for number, group in enumerate(self.inner.param_groups):
            _replace(group, self._before[number], [])
        self.inner.step()
        self.end_round()

    def end_round(self) -> None:
        """End a round: the groups have all pieces, and the counters that the round has advanced."""
        for number, group in enumerate(self.inner.param_groups):
            _replace(group, self._after[number], self._all_params[number])

    def state_bytes(self, pieces: Sequence[Piece]) -> int:
        """Return the bytes that the optimizer's states of some pieces take on an accelerator."""
        states = [value for piece in pieces for value in self.inner.state.get(piece.param, {}).values()]
        return sum(max(value.nbytes, MIN_ALLOCATION_BYTES) for value in states if isinstance(value, Tensor))

    def move(self, pieces: Sequence[Piece], values: Tensor, new: Callable[[int, torch.dtype], Tensor]) -> None:
        """Make the pieces of a bucket views of `values`, and copy their states to memory from `new(numel, dtype)`."""
        for piece in pieces:
            piece.param.data = values[piece.elements.start : piece.elements.stop]
            state = self.inner.state.get(piece.param, {})
            for name, value in state.items():
                if isinstance(value, Tensor) and value.dim() > 0:
                    state[name] = new(value.numel(), value.dtype).copy_(value)
                elif isinstance(value, Tensor) and self.inner.defaults.get("fused"):  # torch's step counters
                    state[name] = value.to(values.device)


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}


def _replace(group: dict[str, Any], settings: dict[str, Any], params: list[nn.Parameter]) -> None:
    """Replace the content of a parameter group, in place since schedulers refer to it.

    Counters that are not in `settings`, because an optimizer made them since these were read, are removed.
    """
    group.clear()
    group.update(settings, params=params)


def check_class(optimizer: object) -> None:
    """Raise TypeError if `optimizer` is neither a class of torch optimizers nor a function that makes one."""
    if not callable(optimizer) or (isinstance(optimizer, type) and not issubclass(optimizer, Optimizer)):
        given = optimizer.__name__ if isinstance(optimizer, type) else f"an object of class {type(optimizer).__name__}"
        raise TypeError(
            f"ZeroOptimizer takes a class of optimizers, such as torch.optim.AdamW, and its settings, not {given}"
        )


def as_groups(params: Iterable[Any]) -> list[dict[str, Any]]:
    """Return parameter groups with lists of parameters, from any form that torch's optimizers take.

    Raises ValueError if there is no parameter, or something that is not one.
    """
    given = list(params)
    groups: list[dict[str, Any]] = given if given and isinstance(given[0], dict) else [{"params": given}]
    groups = [group | {"params": _as_list(group["params"])} for group in groups]
    for param in (param for group in groups for param in group["params"]):
        if not isinstance(param, Tensor):
            raise ValueError(f"`groups` has a {type(param).__name__} where a parameter belongs; see torch.optim")
    if not any(group["params"] for group in groups):
        raise ValueError("`groups` has no parameters; leave it out to train all parameters of the model")
    return groups


def _as_list(params: Any) -> list[Any]:
    """Return a parameter, several, or pairs of a name and a parameter as a list of parameters."""
    params = [params] if isinstance(params, Tensor) else list(params)
    return [param[1] if isinstance(param, tuple) else param for param in params]


def number_groups(groups: list[dict[str, Any]], known: set[nn.Parameter]) -> dict[nn.Parameter, int]:
    """Return the number of the group of each parameter.

    Raises ValueError if a parameter is in two groups, or not one of `known`, the parameters of the model.
    """
    group_of: dict[nn.Parameter, int] = {}
    for number, group in enumerate(groups):
        for param in group["params"]:
            if param not in known:
                raise ValueError(
                    f"parameter group {number} has a tensor of shape {tuple(param.shape)} not of this model; give "
                    "parameters of the module inside ZeroDataParallel"
                )
            if param in group_of:
                raise ValueError(
                    f"a parameter of shape {tuple(param.shape)} is in groups {group_of[param]} and {number}; leave it "
                    "in one of them"
                )
            group_of[param] = number
    return group_of


@real_tensors()
def probe_atoms(
    optimizer: type[Optimizer],
    settings: dict[str, Any],
    device: torch.device,
    groups: Sequence[dict[str, Any]] = ({},),
    alignment: int = 0,
) -> list[float]:
    """Check that an optimizer gives the same result for small parameters as a whole and for two flat pieces of each.

    The pieces are stepped as the atom requires that the optimizer declares for each of `groups`, whose settings a
    parameter has. Return, for each group, the bytes of state for each element of a parameter in fp32, without those of
    whole matrices. Raises ConfigError if the results differ, if the optimizer refuses flat pieces, or if pieces that
    begin at multiples of `alignment` elements may cut its blocks.
    """
    probed, numbers = _distinct_settings(groups)
    settings = _with_large_rate(settings)
    name = getattr(optimizer, "__name__", str(optimizer))
    try:
        block_numel = _largest_block(optimizer, settings, probed)
        values = [_random(number, block_numel).to(device) for number in range(len(probed))]
        params = [nn.Parameter(of_steps[0].clone()) for of_steps in values]
        pieces = [piece for n, of_steps in enumerate(values) for piece in _halves(of_steps[0], n, block_numel)]
        inner = optimizer([group | {"params": [p]} for group, p in zip(probed, params, strict=True)], **settings)
        in_pieces = [g | {"params": [p.param for p in pieces if p.group == n]} for n, g in enumerate(probed)]
        bucketed = BucketedOptimizer(optimizer(in_pieces, **settings))
        for step in range(1, NUM_PROBE_STEPS + 1):
            for param, of_steps in zip(params, values, strict=True):
                param.grad = of_steps[step].clone()
            inner.step()
            _step_pieces(bucketed, pieces, [of_steps[step] for of_steps in values])
    except AssertionError as error:
        raise ConfigError(f"optimizer {name} does not work on {device.type}: {error}; change its settings") from error
    except (RuntimeError, TypeError, ValueError) as error:
        raise ConfigError(
            f"optimizer {name} cannot step flat pieces of parameters: {error}; choose an optimizer such as AdamW, "
            "SGD or zero's Muon"
        ) from error
    _check_equal(name, params, pieces)
    if alignment % block_numel:
        raise ConfigError(
            f"{name} updates blocks of {block_numel} elements, and ZeroConfig.alignment={alignment} lets shards cut "
            f"them; choose {block_numel}"
        )
    states = [[v for v in inner.state[p].values() if isinstance(v, Tensor) and v.dim() > 0] for p in params]
    return [sum(state.nbytes for state in states[number]) / params[number].numel() for number in numbers]


def _largest_block(optimizer: type[Optimizer], settings: dict[str, Any], groups: Sequence[dict[str, Any]]) -> int:
    """Return the number of elements of the largest blocks that the optimizer declares as the atom of a group."""
    empty = [group | {"params": [nn.Parameter(torch.zeros(PROBED_ROWS, PROBED_COLUMNS))]} for group in groups]
    inner = optimizer(empty, **settings)
    return max(atom_of(inner, group).numel for group in inner.param_groups)


def _halves(values: Tensor, number: int, block_numel: int) -> list[Piece]:
    """Return two flat pieces of a parameter, which cut no block."""
    cut_at = PROBED_CUT if block_numel == 1 else 2 * block_numel
    parts = range(cut_at), range(cut_at, values.numel())
    return [Piece(nn.Parameter(cut(values.flatten(), part).clone()), part, number) for part in parts]


def _check_equal(name: str, params: Sequence[nn.Parameter], pieces: Sequence[Piece]) -> None:
    for number, param in enumerate(params):
        joined = torch.cat([piece.param.detach() for piece in pieces if piece.group == number])
        if not torch.allclose(param.detach().flatten(), joined, rtol=1e-5, atol=1e-7):
            raise ConfigError(
                f"optimizer {name} is not element-wise: it updates a {param.shape[0]} x {param.shape[1]} parameter "
                "differently as a whole and in 2 pieces, so its states cannot be partitioned; choose an optimizer such "
                "as AdamW, SGD or zero's Muon"
            )


def _step_pieces(bucketed: BucketedOptimizer, pieces: Sequence[Piece], grads: Sequence[Tensor]) -> None:
    """Step pieces of whole parameters: element by element one after the other, those of a matrix in its steps."""
    inner = bucketed.inner
    for group in inner.param_groups:
        if isinstance(inner, MatrixOptimizer) and atom_of(inner, group).is_matrix:
            inner.start_round(group)
    bucketed.begin_round()
    for number, grad in enumerate(grads):
        group, own = inner.param_groups[number], [piece for piece in pieces if piece.group == number]
        if atom_of(inner, group).is_matrix:
            _step_matrix(inner, group, own, grad)
        else:
            for piece in own:
                bucketed.step([([piece], grad.flatten().clone())])
    bucketed.end_round()


@torch.no_grad()
def _step_matrix(inner: Optimizer, group: dict[str, Any], pieces: Sequence[Piece], grad: Tensor) -> None:
    assert isinstance(inner, MatrixOptimizer)
    for piece in pieces:
        inner.prepare(piece.param)
    sent = [inner.direction(piece.param, cut(grad.flatten(), piece.elements).clone(), group) for piece in pieces]
    matrix, shape = torch.cat(sent).to(inner.message_dtype).view(grad.shape), (grad.shape[0], grad.shape[1])
    update = inner.transform(matrix, group, inner.state_of_matrix(pieces[0], shape, grad.device)).flatten()
    for piece in pieces:
        inner.decay(piece.param, group)
        inner.add(piece.param, cut(update, piece.elements), group, shape)


def _random(seed: int, block_numel: int) -> Tensor:
    """Return the values of a parameter, and its gradient in each step; it has three blocks and a part of one."""
    generator = torch.Generator().manual_seed(seed)
    columns = PROBED_COLUMNS if block_numel == 1 else -(-block_numel // 2) + 1
    return torch.randn(1 + NUM_PROBE_STEPS, PROBED_ROWS, columns, generator=generator, dtype=torch.float32)


def _with_large_rate(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the settings with `PROBED_RATE` in place of their learning rate, if they have one."""
    return settings | {"lr": PROBED_RATE} if "lr" in settings else settings


def _distinct_settings(groups: Sequence[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[int]]:
    """Return the settings of parameter groups, each only once, and for each group the number of its settings."""
    found = [_with_large_rate(_settings(group)) for group in groups]
    keys = [repr(sorted(settings.items(), key=str)) for settings in found]
    distinct = dict(zip(keys, found, strict=True))
    return list(distinct.values()), [list(distinct).index(key) for key in keys]
