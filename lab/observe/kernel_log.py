"""A log of the kernels that a rank runs: the floating-point operations of each, and the bytes that it moves."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import ScalingType

from lab.observe.fake_tensors import instances_in
from lab.observe.operation_observer import observe_operations
from parallel.comm_log import CommEvent
from parallel.torch_internals import OpOverload, runs_a_kernel, schema_of

# The position of the first factor among the arguments of a matrix product, in all overloads; the second one follows it.
PRODUCTS = {"mm": 0, "bmm": 0, "addmm": 1, "addmm_": 1, "_addmm_activation": 1, "baddbmm": 1, "baddbmm_": 1}
SCALED_PRODUCT, OF_SCALING = "_scaled_mm_v2", 3  # the position of the kinds of scaling of the first factor
PRODUCTS[SCALED_PRODUCT] = 0
RECIPES_OF_SCALING = {
    ScalingType.TensorWise.value: "tensorwise",
    ScalingType.RowWise.value: "rowwise",
    ScalingType.BlockWise1x128.value: "blockwise",
    ScalingType.BlockWise128x128.value: "blockwise",
    ScalingType.BlockWise1x32.value: "mxfp8",
    ScalingType.BlockWise1x16.value: "nvfp4",
}
# {operation: number of arguments that CUDA reads twice if there are gradients of weights}. One kernel computes the
# gradient of a norm's input and another one those of its weights; both read the output's gradient and the input.
READ_TWICE = {"native_layer_norm_backward": 2, "_fused_rms_norm_backward": 2}
INDEXED = {"gather", "scatter_"}  # read or write the elements that their third argument selects, and no others
EMBEDDINGS = {"embedding"}  # read the rows of their first argument that their second one selects, and write as many
# {fused attention: (positions of q and k among the arguments, products of seq x seq x head_dim per head)}. Backward
# computes the scores again, and the gradients of scores, q, k and v.
FUSED_ATTENTION = {
    f"_scaled_dot_product_{kind}_attention{suffix}": ((1, 2), 5) if "backward" in suffix else ((0, 1), 2)
    for kind in ("flash", "efficient", "cudnn")
    for suffix in ("", "_for_cpu", "_backward", "_for_cpu_backward")
}
# {attention of variable lengths, of tensors (tokens, heads, head_dim): (positions of q and of the first tokens of the
# stretches, products)}
ATTENTION_OF_STRETCHES = {"_varlen_attn": (0, 3, 2), "_varlen_attn_backward": (1, 6, 5)}
OVERWRITES = {"copy_", "fill_", "zero_", "normal_", "bernoulli_"}  # write their argument without reading it


@dataclass(frozen=True)
class Kernel:
    """One kernel of a GPU, or one operation that the host's processors run.

    `product` is (batch, m, n, k) of a matrix product, otherwise None. `is_transfer` is True if the kernel copies
    between device and host memory; `to_host` then is the direction. `is_on_host` is True if it uses host memory only.
    `dtype` is that of a product's factors, otherwise that of the first result. `attention` of a fused attention is
    (heads of all sequences, seq of q, seq of k, head_dim, number of products), otherwise None. `recipe` names that of
    `lab.measure.recipes` by which the factors of a product are quantized; it is empty if they are not.
    """

    name: str
    phase: str
    num_bytes: int
    dtype: torch.dtype
    product: tuple[int, int, int, int] | None = None
    is_transfer: bool = False
    to_host: bool = False
    is_on_host: bool = False
    attention: tuple[int, int, int, int, int] | None = None
    recipe: str = ""

    @property
    def flops(self) -> int:
        """The floating-point operations of a matrix product, 2 per multiply-add; 0 for other kernels."""
        return 2 * prod(self.product) if self.product else 0


class KernelLog:
    """An observer of operations that appends one entry to `kernels` for each that a GPU would run.

    `phase` names the present part of the step, `is_on_host` says which tensors are in host memory.
    """

    def __init__(self, phase: Callable[[], str], is_on_host: Callable[[Tensor], bool]):
        self.kernels: list[Kernel] = []
        self._phase, self._is_on_host = phase, is_on_host

    def count(self) -> int:
        """Return the number of kernels so far, for use as the clock of a `CommLog` that is the same on any machine."""
        return len(self.kernels)

    def extend(self, kernels: Iterable[Kernel]) -> None:
        """Add kernels that were not observed, in the present part of the step."""
        self.kernels += [replace(kernel, phase=self._phase()) for kernel in kernels]

    def on_operation(self, function: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], output: Any) -> None:
        if not runs_a_kernel(function, args):
            return
        name = schema_of(function).name.split("::")[1]
        tensors = list(instances_in((args, _without_outputs(function, kwargs)), Tensor))
        results = list(instances_in((output,), Tensor))
        if tensors or results:
            self.kernels.append(self._kernel(name, args, tensors, results))

    def _kernel(self, name: str, args: Any, tensors: list[Tensor], results: list[Tensor]) -> Kernel:
        # An operation in place reads its argument and writes it: both count.
        moved = tensors if name in OVERWRITES else tensors + (results or tensors)
        if len(results) > 1:
            moved = moved + tensors[: READ_TWICE.get(name, 0)]
        product = product_of(name, args)
        dtype = args[PRODUCTS[name]].dtype if product else (results or tensors)[0].dtype
        if name in INDEXED:
            num_bytes = args[2].nbytes + 2 * args[2].numel() * dtype.itemsize
        elif name in EMBEDDINGS:
            num_bytes = args[1].nbytes + 2 * results[0].nbytes
        else:
            num_bytes = sum(_touched_bytes(tensor) for tensor in moved)
        # Of a copy the destination and the source, otherwise of the first two arguments.
        on_host = [self._is_on_host(tensor) for tensor in (args if name == "copy_" else tensors or results)[:2]]
        return Kernel(
            name,
            self._phase(),
            num_bytes,
            dtype,
            product,
            is_transfer=name == "copy_" and on_host[0] != on_host[1],
            to_host=on_host[0],
            is_on_host=all(on_host),
            attention=attention_of(name, args),
            recipe=recipe_of(name, args),
        )


def events_at_times(events: Iterable[CommEvent], places: Sequence[int]) -> list[CommEvent]:
    """Return events, whose times are counts of kernels, by another clock: `places[n]` where theirs shows n."""
    moved = []
    for event in events:
        own = {name: getattr(event, name) for name in ("launched", "awaited", "completed")}
        times: dict[str, Any] = {name: places[int(time)] for name, time in own.items() if time is not None}
        moved.append(replace(event, **times))
    return moved


def _without_outputs(function: OpOverload, kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return the values of the keyword arguments that the operation reads: `out=` is written only."""
    if not kwargs:
        return ()
    outputs = {argument.name for argument in schema_of(function).arguments if argument.is_out}
    return tuple(value for name, value in kwargs.items() if name not in outputs)


def product_of(name: str, args: Any) -> tuple[int, int, int, int] | None:
    """Return (batch, m, n, k) of an operation that is a matrix product, None of any other."""
    if (first := PRODUCTS.get(name)) is None:
        return None
    *batch, m, k = args[first].shape
    return prod(batch), m, args[first + 1].shape[-1], k


def recipe_of(name: str, args: Any) -> str:
    """Return what `Kernel.recipe` says of an operation."""
    return RECIPES_OF_SCALING[args[OF_SCALING][0]] if name == SCALED_PRODUCT else ""


def attention_of(name: str, args: Any) -> tuple[int, int, int, int, int] | None:
    """Return what `Kernel.attention` says of a fused attention, None of any other operation.

    Stretches of variable lengths are taken to have equal ones, since tensors without values do not say which.
    """
    if name in ATTENTION_OF_STRETCHES:
        of_query, of_starts, num_products = ATTENTION_OF_STRETCHES[name]
        num_tokens, num_heads, head_dim = args[of_query].shape
        num_stretches = len(args[of_starts]) - 1
        length = num_tokens // num_stretches
        return num_heads * num_stretches, length, length, head_dim, num_products
    if (found := FUSED_ATTENTION.get(name)) is None:
        return None
    (query, key), num_products = found
    *heads, num_queries, head_dim = args[query].shape
    return prod(heads), num_queries, args[key].shape[-2], head_dim, num_products


def _touched_bytes(tensor: Tensor) -> int:
    """Return the bytes of memory that a tensor occupies: an expanded one has more elements than its storage."""
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())


def kernels_of(action: Callable[[], object]) -> list[Kernel]:
    """Run an action on tensors of one device, and return its kernels, whose phase is empty."""
    log = KernelLog(lambda: "", is_on_host=lambda _tensor: False)
    with observe_operations(log):
        action()
    return log.kernels
