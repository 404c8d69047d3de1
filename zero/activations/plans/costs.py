"""The bytes and the time of a plan for one block: what it holds, where it peaks, and what it adds to a step.

bytes    of the two graphs, line by line: a tensor is allocated by its kernel and freed after the last one that
         reads it, as the code of the graphs does
time     a kernel takes that of its arithmetic or of its memory traffic, whichever is longer, by the rates of the
         device; a copy to or from the host counts as far as kernels wait for it
"""

import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor, fx
from torch.utils.flop_counter import flop_registry

from parallel.torch_internals import OpOverload
from zero.activations.choice import Hardware
from zero.activations.plans.cut import Cut, Line
from zero.activations.plans.joint import (
    JointGraph,
    is_view,
    kernel_of,
    num_bytes,
    storage_of,
    storages,
    tensors_of,
    value_of,
)
from zero.activations.stores import NUM_IN_TRANSIT, StoreName

# What kernels allocate beside their results, by the first of these: as far as it is as large as they are.
WORKSPACES: dict[str, Callable[[Tensor], int]] = {
    "aten::_safe_softmax": lambda scores: scores.nbytes + scores.numel(),  # rows without a score are masked in a copy
    "aten::native_dropout": lambda x: 0 if x.is_cuda else 4 * x.numel(),  # integers are drawn on a CPU
    "zero::rms_norm": lambda x: 4 * x.numel(),
    "zero::rms_norm_gradients": lambda x: 12 * x.numel(),
}
Placements = Mapping[fx.Node, StoreName]  # the stores of tensors that are not computed again, and no `Placement`


@dataclass(frozen=True)
class Footprint:
    """The bytes of one block on the device, and the seconds that its plan adds to a step."""

    kept: int  # from forward to backward, the input of the block counted if it is kept
    in_transit: int  # of buffers that stay allocated, once for all blocks
    peak: int  # in forward or backward, with what is kept
    peak_of_last: int  # if the output is kept until backward begins
    seconds: float

    @property
    def costs(self) -> tuple[float, ...]:
        """All that a plan should have little of."""
        return self.kept, self.in_transit, self.peak, self.peak_of_last, self.seconds


@dataclass(frozen=True, eq=False)
class CostModel:
    """The device, and the number of ranks that hold the same activations."""

    hardware: Hardware
    num_replicas: int = 1
    _seconds_of: dict[fx.Node, float] = field(default_factory=dict)

    def footprint(self, cut: Cut, x: fx.Node, placements: Placements) -> Footprint:
        """Return what a plan of a block with the input `x` costs."""
        joint = cut.joint
        held = [node for node, kind in cut.held if kind == "held"]
        elsewhere = {node: placements[node] for node in held if placements[node] != "keep"}
        parts = {node: math.ceil(num_bytes(node) / self._num_parts(joint, node)) for node in elsewhere}
        on_device = sum(parts[node] for node, store in elsewhere.items() if store == "partition")
        staged = {node for node, store in elsewhere.items() if store == "partition_host"}
        of_stores = staged & joint.varying, staged - joint.varying  # each of the two has its own buffers
        in_transit = sum(sum(sorted(parts[node] for node in some)[-NUM_IN_TRANSIT:]) for some in of_stores)
        read = [joint.inputs[number] for number in cut.inputs_read], [joint.outputs[n] for n in cut.outputs_read]
        tangents, outputs = _bytes_of(joint.tangents), _bytes_of(joint.outputs)
        forward, end = peak_and_end(cut.forward_lines, {*joint.outputs, *held}, _bytes_of(joint.inputs), {})
        gradients, given = set(filter(None, joint.gradients)), _bytes_of(read[0] + read[1])
        backward, _ = peak_and_end(cut.backward_lines, gradients, given, _bytes_of(held) | tangents, tangents)
        held_bytes = sum(_bytes_of([node for node in held if node not in elsewhere]).values()) + on_device
        x_bytes, is_kept = num_bytes(x), x in read[0]
        forward = x_bytes + max(forward, end + on_device + in_transit)
        backward += x_bytes * is_kept + on_device + sum(_bytes_of(read[1]).values())
        last = backward + sum(outputs.values() if not read[1] else [])
        return Footprint(
            kept=held_bytes + x_bytes * is_kept,
            in_transit=in_transit,
            peak=max(forward, backward),
            peak_of_last=max(forward, last),
            seconds=self._seconds(cut, elsewhere, parts),
        )

    def _seconds(self, cut: Cut, elsewhere: Placements, parts: Mapping[fx.Node, int]) -> float:
        """Return the time of what is computed again, copied and gathered, beside that of the block itself."""
        again = sum(self.kernel_seconds(node) for node in cut.recomputed)
        on_host = {node: parts[node] for node, store in elsewhere.items() if store == "partition_host"}
        rate = self.hardware.host_gb_per_second * 1e9
        waiting = self._waiting_seconds(cut, {node: size / rate for node, size in on_host.items()}) if on_host else 0.0
        waiting += 2 * sum(on_host.values()) / (self.hardware.memory_gb_per_second * 1e9)  # copied to a buffer first
        sent = sum(part * (self._num_parts(cut.joint, node) - 1) for node, part in parts.items())
        return again + waiting + sent / (self.hardware.tensor_gb_per_second * 1e9)

    def _waiting_seconds(self, cut: Cut, copies: Mapping[fx.Node, float]) -> float:
        """Return the time for which kernels wait for copies to and from the host.

        Forward copies at the end of a block, and a copy waits for the one before it: the next block hides only the
        last one. Backward fetches all in the order of use, from its beginning on.
        """
        forward = sum(self.kernel_seconds(node) for node in cut.joint.forward_nodes)
        first = next(iter(copies))  # to be read, and so the last to be copied
        waiting = sum(copies.values()) - min(copies[first], forward)
        now = fetched = 0.0
        for node, kind in cut.backward_lines:
            if kind == "held":
                fetched += copies.get(node, 0.0)
                waiting += max(0.0, fetched - now)
                now = max(now, fetched)
            elif kind == "computed":
                now += self.kernel_seconds(node)
        return waiting

    def _num_parts(self, joint: JointGraph, node: fx.Node) -> int:
        """Return the number of ranks that hold a part each of what is kept elsewhere."""
        return 1 if node in joint.varying else self.num_replicas

    def kernel_seconds(self, node: fx.Node) -> float:
        """Return the time of a kernel."""
        if node not in self._seconds_of:
            self._seconds_of[node] = self._kernel_seconds(node)
        return self._seconds_of[node]

    def _kernel_seconds(self, node: fx.Node) -> float:
        if node.op != "call_function" or is_view(node):
            return 0.0
        num_moved = sum(num_bytes(arg) for arg in node.all_input_nodes if isinstance(value_of(arg), Tensor))
        num_moved += sum(tensor.nbytes for tensor in tensors_of(node))
        moving = num_moved / (self.hardware.memory_gb_per_second * 1e9)
        computing = flops(node) / (self.hardware.tflops * 1e12)
        return max(moving, computing) + sent_bytes(node) / (self.hardware.tensor_gb_per_second * 1e9)


def flops(node: fx.Node) -> float:
    """Return the floating-point operations of products and attention; 0 for other kernels."""
    args = [value for arg in node.all_input_nodes if isinstance(value := value_of(arg), Tensor)]
    if "on_axis" in node.meta:
        return node.meta["on_axis"].flops(*_arguments_and_results(node))
    kernel = kernel_of(node)
    if not isinstance(kernel, OpOverload):
        return 0.0
    if "scaled_dot_product" in kernel.name():  # causal: half of the scores
        query, key = args[:2]
        return 2.0 * query.numel() * key.shape[-2]
    count = flop_registry.get(kernel.overloadpacket)
    if count is None:
        return 0.0
    return count(*fx.map_arg(node.args, value_of), out_val=value_of(node))


def workspace_bytes(node: fx.Node) -> int:
    """Return the bytes that a kernel allocates and frees itself."""
    target, on_axis = kernel_of(node), node.meta.get("on_axis")
    if on_axis is not None:
        return on_axis.workspace_bytes(*_arguments_and_results(node))
    workspace = WORKSPACES.get(target.name()) if isinstance(target, OpOverload) else None
    return workspace(next(tensors_of(node))) if workspace else 0


def sent_bytes(node: fx.Node) -> float:
    """Return the bytes that a kernel of forward sends along the tensor axis."""
    on_axis = node.meta.get("on_axis")
    return on_axis.sent_bytes(*_arguments_and_results(node)) if on_axis else 0.0


def _arguments_and_results(node: fx.Node) -> tuple[list[Tensor], list[Tensor]]:
    return [value_of(arg) for arg in node.all_input_nodes], list(tensors_of(node))


def _bytes_of(nodes: Collection[fx.Node]) -> dict[int, int]:
    return {storage_of(node): num_bytes(node) for node in nodes if isinstance(value_of(node), Tensor)}


def peak_and_end(
    lines: Sequence[Line],
    results: Collection[fx.Node],
    external: Collection[int],
    present: Mapping[int, int],
    permanent: Collection[int] = (),
) -> tuple[int, int]:
    """Return the bytes of the storages of a graph at the peak and after its last line.

    `external` storages are not counted; `present` ones, {storage: bytes}, exist before the first line, `permanent` ones
    among them to the end. The others are freed when no variable of the graph refers to them; `results` are returned.
    """
    live, references = dict(present), Counter[int](list(permanent))
    total = peak = sum(live.values())
    last_lines = {node: number for number, line in enumerate(lines) for node in (line.node, *line.reads)}
    dying: dict[int, list[fx.Node]] = {}
    for node, number in last_lines.items():
        if node not in results:
            dying.setdefault(number, []).append(node)
    for number, (node, kind) in enumerate(lines):
        if kind == "state":
            continue
        for storage, size in storages(node):
            references[storage] += 1
            if storage not in live and storage not in external:
                live[storage] = size
                total += size
        peak = max(peak, total + (workspace_bytes(node) if kind == "computed" else 0))
        for variable in dying.get(number, ()):
            for storage, _ in storages(variable):
                references[storage] -= 1
                if not references[storage]:
                    total -= live.pop(storage, 0)
    return peak, total
