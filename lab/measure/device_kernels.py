"""Measurements of a device's kernels by size and type: what a training step runs, without a model.

Each measured operation is run once under a log of kernels, which says how many bytes it moves. So a curve has the bytes
that a dry run counts.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, cycle, product
from statistics import median
from typing import Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lab.measure.bandwidth import measured_seconds
from lab.measure.curves import Curve, curve_name
from lab.measure.reference_step import measure_reference_step
from lab.observe.kernel_log import Kernel, kernels_of

WIDTH = 512  # of the rows of element-wise kernels, and of norms
# Elements of a tensor: on a CPU from well inside of its caches to far outside of them.
NUMELS = {"cpu": (2**13, 2**16, 2**19, 2**22), "cuda": (2**16, 2**20, 2**24, 2**27)}
# Of the inputs that a kernel takes in turn: a step rarely finds them in the fastest cache.
ROTATED_BYTES, MOST_ROTATED = 2**25, 8
BUDGET_SECONDS = 0.015  # for which one kernel of one size is repeated
DTYPES = torch.float32, torch.bfloat16
# (tokens, columns of the input, columns of the output) of linear layers, each with its two products of backward.
LAYERS = {
    "cpu": ((256, 128, 128), (256, 256, 1024), (512, 512, 512), (1024, 768, 256), (256, 256, 4096)),
    "cuda": ((2048, 1024, 1024), (4096, 2048, 2048), (4096, 2048, 8192), (8192, 4096, 4096), (8192, 8192, 8192)),
}
# (sequences x heads, seq, head_dim) of fused attention.
ATTENTIONS = {"cpu": ((16, 128, 64), (8, 512, 64)), "cuda": ((64, 1024, 128), (32, 2048, 128), (16, 4096, 128))}
NUM_TINY_LAYERS, NUM_TINY_STEPS = 24, 20
# Launches of a kernel before the clock is read: a GPU is launched several kernels in advance, as in a step.
LAUNCHES_TOGETHER = {"cpu": 1, "cuda": 10}

Action = Callable[[], object]


@dataclass(frozen=True)
class MeasuredKernel:
    """A kernel as a log has it, with the type of its inputs, and its time."""

    kernel: Kernel
    seconds: float


def _backward_of(function: Callable[..., Tensor], *inputs: Tensor) -> Action:
    needing = [tensor.detach().requires_grad_() for tensor in inputs]
    out = function(*needing)
    gradient = torch.ones_like(out)
    return lambda: torch.autograd.grad(out, needing, gradient, retain_graph=True)


def _norm(x: Tensor) -> Tensor:
    return F.layer_norm(x, (WIDTH,), torch.ones(WIDTH, dtype=x.dtype, device=x.device), x.new_zeros(WIDTH))


def _norm_backward(x: Tensor) -> Action:
    return _backward_of(lambda *a: F.layer_norm(a[0], (WIDTH,), *a[1:]), x, x.new_ones(WIDTH), x.new_zeros(WIDTH))


def _ids(x: Tensor) -> Tensor:
    return torch.randint(len(x), (len(x),), device=x.device)


def _with_gradient(x: Tensor) -> nn.Parameter:
    param = nn.Parameter(x)
    param.grad = torch.ones_like(x)
    return param


# The kernels of a training step that move the most bytes. A curve is named by the kernel in the log.
KERNELS: tuple[Callable[[Tensor], Action], ...] = (
    lambda x: partial(torch.add, x, torch.ones_like(x)),
    lambda x: partial(torch.mul, x, 0.5),
    lambda x: partial(torch.empty_like(x).copy_, x),
    lambda x: partial(x.to, torch.bfloat16 if x.dtype == torch.float32 else torch.float32),
    lambda x: partial(x.exp),
    lambda x: partial(x.sum, 0),
    lambda x: partial(x.logsumexp, -1),
    lambda x: partial(x.amax, -1),
    lambda x: partial(F.gelu, x, approximate="tanh"),
    lambda x: _backward_of(lambda y: F.gelu(y, approximate="tanh"), x),
    lambda x: partial(_norm, x),
    _norm_backward,
    lambda x: partial(torch.stack, [x, x]),
    lambda x: partial(F.embedding, _ids(x), x),
    lambda x: _backward_of(partial(F.embedding, _ids(x)), x),
    lambda x: torch.optim.AdamW([_with_gradient(x)], lr=1e-3, fused=True).step,
    lambda x: partial(nn.utils.get_total_norm, [x]),
    lambda x: partial(nn.utils.clip_grads_with_norm_, [_with_gradient(x)], 0.5, torch.ones((), device=x.device)),
)


@dataclass(frozen=True)
class DeviceKernels:
    """The measured kernels of one device, and the seconds for which its host is busy with one of them."""

    kernels: list[MeasuredKernel]
    launch_seconds: float
    step_seconds: dict[torch.dtype, float]  # of the reference step

    @classmethod
    def measure(cls, device: torch.device) -> Self:
        """Measure the device. All ranks of a node should do it at the same time, as they compute in a run."""
        return cls(
            # First, while all ranks begin together.
            step_seconds={dtype: measure_reference_step(device, dtype) for dtype in DTYPES},
            kernels=measure_kernels(device),
            launch_seconds=measure_launch(device),
        )

    @property
    def curves(self) -> list[Curve]:
        """The times of the kernels that the memory bounds on a GPU, over the bytes that they move."""
        points = defaultdict[str, list[tuple[float, float]]](list)
        for one in self.kernels:
            if one.kernel.product is None and one.kernel.attention is None:
                points[curve_name(one.kernel.name, one.kernel.dtype)].append((one.kernel.num_bytes, one.seconds))
        return [Curve(name, *zip(*found, strict=True)) for name, found in points.items()]


def measure_kernels(device: torch.device) -> list[MeasuredKernel]:
    """Measure the kernels of a training step by size and type."""
    found = []
    for dtype in DTYPES:
        # One after the other: the inputs of all actions together do not fit the memory of a device.
        for actions in chain(_moving(device, dtype), _products(device, dtype), _attentions(device, dtype)):
            turn = cycle(actions)
            seconds = _seconds_each(lambda turn=turn: next(turn)(), device)  # type: ignore[misc]
            found.append(MeasuredKernel(replace(largest_kernel(actions[0]), dtype=dtype), seconds))
    return found


def _moving(device: torch.device, dtype: torch.dtype) -> Iterator[list[Action]]:
    """Yield actions that run one of `KERNELS` on tensors of one size, to be done in turn."""
    for build, numel in product(KERNELS, NUMELS[device.type]):
        copies = max(1, min(MOST_ROTATED, ROTATED_BYTES // (numel * dtype.itemsize)))
        values = torch.rand(numel // WIDTH, WIDTH, device=device).to(dtype)
        yield [build(values.clone()) for _ in range(copies)]


def _products(device: torch.device, dtype: torch.dtype) -> Iterator[list[Action]]:
    """Yield the products of the forward and the backward of linear layers, from small to large."""
    for tokens, num_inputs, num_outputs in LAYERS[device.type]:
        shapes = (tokens, num_inputs), (num_outputs, num_inputs), (tokens, num_outputs)
        x, weight, gradient = (torch.rand(*shape, device=device).to(dtype) for shape in shapes)
        for one, other in ((x, weight.t()), (gradient, weight), (gradient.t(), x)):
            yield [partial(torch.mm, one, other)]


def _attentions(device: torch.device, dtype: torch.dtype) -> Iterator[list[Action]]:
    """Yield forward and backward of causal attention, as far as they are fused kernels."""
    attend = partial(F.scaled_dot_product_attention, is_causal=True)
    for heads, seq, head_dim in ATTENTIONS[device.type]:
        inputs = [torch.rand(1, heads, seq, head_dim, device=device).to(dtype) for _ in range(3)]
        for action in (partial(attend, *inputs), _backward_of(attend, *inputs)):
            if largest_kernel(action).attention is not None:
                yield [action]


def largest_kernel(action: Action) -> Kernel:
    """Run an action, and return its kernel that moves the most bytes."""
    return max(kernels_of(action), key=lambda kernel: (kernel.attention is not None, kernel.num_bytes))


def _seconds_each(action: Action, device: torch.device) -> float:
    times = LAUNCHES_TOGETHER[device.type]

    def repeated() -> None:
        for _ in range(times):
            action()

    return measured_seconds(repeated, device, budget=BUDGET_SECONDS) / times


def measure_launch(device: torch.device) -> float:
    """Measure for how many seconds the host is busy with one kernel of a module's forward and backward.

    The tensors are so small that on a CPU the kernels themselves take next to nothing.
    """
    layers = [nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8)) for _ in range(NUM_TINY_LAYERS)]
    module, x = nn.Sequential(*layers).to(device), torch.ones(1, 8, device=device)

    def step() -> None:
        module(x).sum().backward()

    step()
    num_kernels = len(kernels_of(step))
    # On a GPU the clock is read before the device is done: the host's time is what counts.
    clock = time.thread_time if device.type == "cpu" else time.perf_counter
    times = []
    for _ in range(NUM_TINY_STEPS):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        start = clock()
        step()
        times.append(clock() - start)
    return median(times) / num_kernels
