"""Modules that run by a plan: the bits of keeping everything, at most the budget, and the peak that was planned."""

import copy
import json
import random
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import cache, partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile

from gpt.kernels.documents import Documents
from gpt.kernels.norms import NORMS
from gpt.model.rotary import Rotation, tables
from gpt.model.transformer import Block, Sequences
from gpt.shape.config import ModelConfig
from lab.races.simulated_streams import SIDE_STREAM
from lab.races.stream_checker import streams_checked
from parallel.mesh import Axis, Mesh
from parallel.tensor.blocks import run_in_order
from parallel.tensor.token_layout import ReplicatedTokens, SplitTokens, TokenLayout
from parallel.torch_internals import TorchDispatchMode, active_dispatch_modes
from parallel.validation.errors import ConfigError
from parallel.world import imitated_world
from zero.activations import planned
from zero.activations.checkpointed_blocks import ActivationsConfig, checkpointed_blocks
from zero.activations.choice import Hardware
from zero.activations.plans.costs import CostModel
from zero.activations.plans.cut import cut
from zero.activations.plans.execution import Program, Run
from zero.activations.plans.joint import num_bytes
from zero.activations.plans.module import PlannedBlocks
from zero.activations.stores import StoreName
from zero.fp8 import convert
from zero.memory.streams import SideStream

SEQUENCES, SEQ, HIDDEN, BLOCKS = 16, 32, 64, 3
HIDDEN_BYTES = SEQUENCES * SEQ * HIDDEN * 4
PLENTY = 1e3


class OwnBlock(nn.Module):
    """An attention and an MLP as a user may write them."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.mlp = nn.Sequential(
            nn.Linear(HIDDEN, 4 * HIDDEN), nn.Dropout(0.1), nn.SiLU(), nn.Linear(4 * HIDDEN, HIDDEN)
        )

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).view(SEQUENCES, SEQ, 3, 4, -1).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(x.shape)
        return x + self.mlp(F.dropout(self.out(attended), 0.2, self.training))


LLAMA = {"norm": "rms", "positions": "rope", "mlp": "swiglu", "biases": False, "num_kv_heads": 2, "dropout": 0.0}


def shape(**options: Any) -> ModelConfig:
    return ModelConfig(1, HIDDEN, num_heads=4, seq_length=SEQ, vocab_size=97, **options)


def gpt_block(tokens: TokenLayout | None = None, **options: Any) -> Block:
    config = shape(**options)
    return Block(config, tokens or ReplicatedTokens(Axis.trivial("tensor")), NORMS[config.norm])


@pytest.fixture(scope="module", autouse=True)
def two_ranks() -> Iterator[None]:
    with imitated_world(0, 2, 2, "gloo"):
        yield


@cache
def tensor_axis() -> Axis:
    return Mesh.create(2).tensor


def block_of_tensor_rank(layout: Callable[[Axis], TokenLayout], **options: Any) -> Block:
    return gpt_block(layout(tensor_axis()), **options)


def rotation() -> Rotation:
    cosines, sines = tables(shape(**LLAMA), torch.device("cpu"), torch.float32)
    return cosines[None, None], sines[None, None]


def mlp() -> nn.Module:
    return nn.Sequential(nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, 4 * HIDDEN), nn.GELU(), nn.Linear(4 * HIDDEN, HIDDEN))


def fp8_mlp() -> nn.Module:
    module = mlp()
    convert(module)
    return module


def documents(*starts: int) -> Documents:
    """Return documents that begin at these tokens of each sequence."""
    first = torch.tensor(starts)
    positions = torch.arange(SEQ) - first[torch.searchsorted(first, torch.arange(SEQ), right=True) - 1]
    of_all = torch.cat([SEQ * sequence + first for sequence in range(SEQUENCES)] + [torch.tensor([SEQUENCES * SEQ])])
    return Documents(positions.expand(SEQUENCES, -1), of_all.int()).with_mask(torch.float32)


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple]] = {
    "gpt": (partial(gpt_block, dropout=0.1), (Sequences(SEQUENCES, None, documents(0, 5, 20)),)),
    "llama": (partial(gpt_block, **LLAMA), (Sequences(SEQUENCES, rotation()),)),
    "own": (OwnBlock, ()),
    "fp8": (fp8_mlp, ()),
    "tensor ranks": (partial(block_of_tensor_rank, ReplicatedTokens, dropout=0.1), (Sequences(SEQUENCES),)),
    "split tokens": (partial(block_of_tensor_rank, SplitTokens, **LLAMA), (Sequences(2 * SEQUENCES, rotation()),)),
}


def equal_blocks(make: Callable[[], nn.Module], count: int = BLOCKS) -> nn.ModuleList:
    blocks = nn.ModuleList(make() for _ in range(count))
    generator = torch.Generator().manual_seed(1)
    for param in blocks.parameters():
        nn.init.normal_(param, std=0.2, generator=generator)
    return blocks


def x_of(seed: int = 2) -> Tensor:
    return torch.randn(SEQUENCES * SEQ, HIDDEN, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def run(blocks: Iterable[nn.Module], args: tuple = (), run_blocks: Callable = run_in_order) -> list[Tensor]:
    """Return output, next random number, and gradients of the input and of the parameters."""
    torch.manual_seed(3)
    x = x_of()
    y = run_blocks([partial(_call, block, args) for block in blocks], x)
    y.backward(torch.ones_like(y))
    params = [param for block in blocks for param in block.parameters()]
    grads = [param.grad for param in (x, *params)]
    for param in params:
        param.grad = None
    return [y.detach(), torch.rand(1), *(grad for grad in grads if grad is not None)]


def _call(block: nn.Module, args: tuple, x: Tensor) -> Tensor:
    return block(x, *args)


def allocated_peak(function: Callable[[], Any], trace: Path) -> int:
    """Return the bytes that the function allocates at most beside what was allocated before, by torch's allocator."""
    function()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        function()
    profiler.export_chrome_trace(str(trace))
    events = [event for event in json.loads(trace.read_text())["traceEvents"] if event.get("name") == "[memory]"]
    sizes = [event["args"]["Bytes"] for event in sorted(events, key=lambda event: event["ts"])]
    return max(accumulate(sizes))


def backward_peak(blocks: nn.ModuleList, args: tuple, trace: Path, run_blocks: Callable = run_in_order) -> int:
    """Return the peak of the blocks, with parameters whose gradients exist already, as in ZeRO's buckets."""
    for param in blocks.parameters():
        param.grad = torch.zeros_like(param)

    def step() -> None:
        x = x_of()
        loss = run_blocks([partial(_call, block, args) for block in blocks], x).sum()  # the output is freed
        loss.backward()

    return allocated_peak(step, trace)


def least_gb(plans: PlannedBlocks) -> float:
    with pytest.raises(ConfigError, match="less than the least possible, ") as refusal:
        plans.change_budget(1e-9)
    found = re.search(r"least possible, ([0-9.e-]+)", str(refusal.value))
    assert found is not None
    return float(found[1])


@pytest.mark.parametrize("name", MODELS)
def test_bits_are_those_of_keeping_all_and_the_peak_is_that_of_the_plan(name: str, tmp_path: Path):
    make, args = MODELS[name]
    whole, blocks = equal_blocks(make), equal_blocks(make)
    expected = run(whole, args)
    keeping = backward_peak(whole, args, tmp_path / "keeping.json")
    again = checkpointed_blocks(ActivationsConfig("keep", defragment=False))
    recomputing = backward_peak(whole, args, tmp_path / "recomputing.json", again)
    plans = planned(blocks, (x_of(), *args), budget_gb=PLENTY)
    assert plans.plan is not None
    most, least = plans.plan.peak_bytes / 1e9, least_gb(plans)
    assert most * 1e9 <= keeping + HIDDEN_BYTES, "what backward does not need is not kept"
    assert least * 1e9 <= recomputing + HIDDEN_BYTES
    times = []
    for share in (0, 0.5, 1):
        budget_gb = least + share * (most - least)
        plan = plans.change_budget(budget_gb)
        for param in blocks.parameters():
            param.grad = None
        for one, other in zip(run(blocks, args), expected, strict=True):
            assert torch.equal(one, other)
        assert plan.peak_bytes <= round(budget_gb * 1e9)
        allocated = backward_peak(blocks, args, tmp_path / f"{share}.json")
        assert allocated == pytest.approx(plan.peak_bytes, abs=max(HIDDEN_BYTES, plan.peak_bytes / 100))
        times.append(plan.seconds)
    assert times == sorted(times, reverse=True)
    assert times[-1] == 0


class CountedOperations(TorchDispatchMode):
    """Counts the operations that run, in Python's way."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        self.counts[str(func)] += 1
        return func(*args, **kwargs or {})


@pytest.mark.parametrize("store", ["partition_host", "partition"])
def test_what_is_stored_elsewhere_is_not_computed_again(store: StoreName):
    """Torch's CPU_OFFLOAD policies compute in silence again what they should copy."""
    blocks = equal_blocks(mlp, 2)
    with CountedOperations() as kept:
        expected = run(copy.deepcopy(blocks))
    fast = Hardware(host_gb_per_second=1e9, tflops=0.1)  # products take longer than a copy to a buffer
    plans = planned(blocks, x_of(), budget_gb=PLENTY, stores=(store,), hardware=fast)
    assert plans.plan is not None
    assert set(plans.plan.first.placements.values()) == {store, "keep"}, "small tensors stay on the device"
    with CountedOperations() as elsewhere:
        found = run(blocks)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)
    for product in ("aten.addmm.default", "aten.mm.default", "aten.native_layer_norm.default"):
        assert elsewhere.counts[product] == kept.counts[product]


def test_copies_to_the_host_and_back_run_beside_the_computation():
    fast = Hardware(host_gb_per_second=1e9, tflops=0.1)
    with streams_checked(torch.device("cpu"), records_launches=True) as checker:
        blocks = equal_blocks(mlp, 2)
        plans = planned(blocks, x_of(), budget_gb=PLENTY, stores=("partition_host",), hardware=fast)
        run(blocks)
        names = [launch.name for launch in checker.launches if launch.stream.startswith(SIDE_STREAM)]
    assert plans.plan is not None
    num_stored = [*plans.plan.first.placements.values()].count("partition_host")
    assert names.count("copy_") == 2 * num_stored * len(blocks)


def test_kernels_wait_for_all_copies_of_a_block_but_the_last_one():
    make, args = MODELS["gpt"]
    plans = planned(equal_blocks(make, 1), (x_of(), *args), budget_gb=PLENTY)
    assert plans.plan is not None
    kept, joint = plans.plan.first.placements, plans.plan.first.cut.joint
    (x,) = (node for node in kept if node in joint.inputs)
    placements: dict[Any, StoreName] = {
        node: "partition_host" if num_bytes(node) >= HIDDEN_BYTES else "keep" for node in kept
    }
    graphs = cut(joint, frozenset(kept) - {x}, frozenset({x}))
    copied = sorted(num_bytes(node) for node, store in placements.items() if store == "partition_host")
    fast = CostModel(Hardware(host_gb_per_second=1e9))
    forward_seconds = sum(map(fast.kernel_seconds, joint.forward_nodes))
    slow = CostModel(Hardware(host_gb_per_second=sum(copied) / 1e9 / (0.9 * forward_seconds)))
    waiting = slow.footprint(graphs, x, placements).seconds - fast.footprint(graphs, x, placements).seconds
    assert waiting > 0.9 * forward_seconds * sum(copied[:-1]) / sum(copied)


def test_times_are_added_in_the_order_of_the_graph():
    """Tensor ranks with orders of their own would round in other ways, and could choose plans that differ."""
    make, args = MODELS["gpt"]
    plans = planned(equal_blocks(make, 1), (x_of(), *args), budget_gb=PLENTY)
    assert plans.plan is not None
    joint = plans.plan.first.cut.joint
    assert [*joint.forward_nodes] == [node for node in joint.nodes if node in joint.forward_nodes]


class RandomBlock(nn.Module):
    """Several random operations, whose masks a plan may keep or draw again independently."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(HIDDEN, HIDDEN) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = F.dropout(torch.tanh(layer(x)), 0.3)
        return x * torch.rand_like(x)


def test_a_random_operation_may_be_kept_and_a_later_one_drawn_again():
    """With torch's selective checkpointing this gives other gradients, without an error."""
    block, generator = RandomBlock(), random.Random(5)
    expected = run([copy.deepcopy(block)])
    plans = planned(block, x_of(), budget_gb=PLENTY)
    assert plans.plan is not None
    joint = plans.plan.first.cut.joint
    made = [node for node in joint.candidates if node not in joint.inputs]
    assert len(made) > 6
    for _ in range(20):
        graphs = cut(joint, frozenset(node for node in made if generator.random() < 0.5))
        program = Program(graphs, [None] * len(graphs.held), SideStream(torch.device("cpu")))
        params = list(block.parameters())
        torch.manual_seed(3)
        x = x_of()
        (y,) = Run.apply(program, 1, *params, x)
        of_all = torch.autograd.grad(y, [x, *params], torch.ones_like(y))
        for one, other in zip([y.detach(), torch.rand(1), *of_all], expected, strict=True):
            assert torch.equal(one, other)


def test_operations_run_without_python_between_them():
    """Torch's selective checkpointing runs each operation through a dispatch mode, at 35 us each."""
    modes: list[int] = []

    @torch.library.custom_op("tests::observed", mutates_args=())
    def observed(x: Tensor) -> Tensor:
        modes.append(len(active_dispatch_modes()))
        return x * 2

    observed.register_fake(torch.empty_like)
    observed.register_autograd(lambda ctx, grad: observed(grad))

    class Observed(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(super().forward(observed(x)))

    block = Observed(HIDDEN, HIDDEN)
    plans = planned(block, x_of(), budget_gb=PLENTY)
    plans.change_budget(least_gb(plans))
    run([block])
    assert modes
    assert not any(modes)


def test_a_graph_that_is_kept_is_run_backward_twice_and_another_one_once():
    block = OwnBlock().eval()
    whole = copy.deepcopy(block)
    planned(block, x_of(), budget_gb=PLENTY)
    for module in (whole, block):
        x = x_of()
        y = module(x).sum()
        y.backward(retain_graph=True)
        y.backward()
        with pytest.raises(RuntimeError, match="second time"):
            y.backward()
    for param, other in zip(block.parameters(), whole.parameters(), strict=True):
        assert torch.equal(param.grad, other.grad)


def test_other_inputs_modes_and_copies_run_as_the_module_does():
    block = equal_blocks(lambda: nn.Sequential(nn.Linear(HIDDEN, 8), nn.Dropout(0.5), nn.Tanh()), 1)[0]
    whole = copy.deepcopy(block)
    planned(block, x_of(), budget_gb=PLENTY)
    duplicate = copy.deepcopy(block)

    def frozen(module: nn.Module) -> Tensor:
        module[0].weight.requires_grad_(False)
        return module(torch.ones(7, HIDDEN))

    def evaluated(module: nn.Module) -> Tensor:
        return module.eval()(torch.ones(2, 3, HIDDEN).requires_grad_())

    def without_gradients(module: nn.Module) -> Tensor:
        with torch.no_grad():
            return module(torch.ones(4, HIDDEN))

    for call in (frozen, evaluated, without_gradients):
        outputs = []
        for module in (whole, block, duplicate):
            torch.manual_seed(1)
            outputs.append(call(module.train()))
        assert torch.equal(outputs[0], outputs[1])
        assert torch.equal(outputs[0], outputs[2])
    assert not torch.equal(duplicate[0].bias, block[0].bias) or duplicate[0].bias is not block[0].bias


def test_one_plan_serves_all_numbers_of_documents(caplog: pytest.LogCaptureFixture):
    block = gpt_block(dropout=0.0)
    with caplog.at_level("INFO"):
        planned(block, (x_of(), Sequences(SEQUENCES, None, documents(0, 9))), budget_gb=PLENTY)
        block(x_of(), Sequences(SEQUENCES, None, documents(0, 3, 7)))
    assert len(caplog.messages) == 1


class Branches(nn.Linear):
    """A module whose code depends on a value."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if x.sum() > 0 else x * 2


@pytest.mark.parametrize(
    ("modules", "message"),
    [
        ([Branches(HIDDEN, HIDDEN)], "torch cannot trace Branches: .*choose another store"),
        ([nn.BatchNorm1d(HIDDEN)], "BatchNorm1d changes its buffers"),
        ([nn.Dropout(0.1), nn.Dropout(0.2)], "2 modules compute 2 different functions"),
    ],
)
def test_modules_that_cannot_be_planned_are_refused(modules: list[nn.Module], message: str):
    with pytest.raises(ConfigError, match=message):
        planned(modules, x_of(), budget_gb=PLENTY)
