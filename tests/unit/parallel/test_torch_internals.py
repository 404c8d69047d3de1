"""Private parts of torch behave as this project needs: a test for each part of parallel/torch_internals.py.

If one fails after an update of torch, the function that it tests is the place to adapt.
"""

import math
import sys
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._functorch.aot_autograd import aot_function
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.attention import SDPBackend
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from parallel import torch_internals as internals
from tests.programs import start_forked, wait_for_end
from tests.ranks import run_ranks

aten = torch.ops.aten
CPU = torch.device("cpu")


def saved_bytes(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> int:
    """Return the bytes that a function saves for backward beside its argument."""
    saved: list[torch.Tensor] = []
    with saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
        function(x)
    return sum(tensor.nbytes for tensor in saved if tensor.data_ptr() != x.data_ptr())


def test_a_graph_that_is_compiled_within_a_budget_keeps_less_in_all_its_calls():
    def function(x: torch.Tensor) -> torch.Tensor:
        return (x @ x).sin()

    def compiled() -> Callable[[torch.Tensor], torch.Tensor]:
        torch.compiler.reset()
        return torch.compile(function, backend="aot_eager_decomp_partition")

    x = torch.ones(4, 4, requires_grad=True)
    assert saved_bytes(compiled(), x) == x.nbytes
    nothing = compiled()
    with internals.activation_memory_budget(0.0):
        assert saved_bytes(nothing, x) == 0
    assert saved_bytes(nothing, x) == 0, "it is read when a graph is compiled"
    assert saved_bytes(compiled(), x) == x.nbytes, "graphs that are compiled later have none"


def test_a_function_that_aot_autograd_traces_gets_functional_tensors():
    kinds: list[type] = []

    def function(x: torch.Tensor) -> torch.Tensor:
        kinds.append(type(x))
        return x * 2

    aot_function(function, fw_compiler=lambda graph, _inputs: graph)(torch.ones(2))
    assert {*kinds} == {internals.FunctionalTensor}


def word_in_default_store() -> str:
    store = internals.default_store()
    if dist.get_rank() == 0:
        store.set("word", "from rank 0")
    return store.clone().get("word").decode()


def test_the_default_store_is_shared_by_the_ranks_and_can_be_connected_to_again():
    assert run_ranks(2, word_in_default_store) == ["from rank 0"] * 2


def flattened_ranks() -> tuple[list[int], list[int]]:
    """(ranks of the flattened group, values that an all-gather along it finds)."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard"))
    group = internals.flatten_mesh(mesh["replica", "shard"], "data")
    out = torch.empty(4)
    dist.all_gather_into_tensor(out, torch.tensor([float(dist.get_rank())]), group=group)
    return dist.get_process_group_ranks(group), out.tolist()


def test_a_flattened_mesh_has_all_ranks_in_their_order():
    assert run_ranks(4, flattened_ranks) == [([0, 1, 2, 3], [0.0, 1.0, 2.0, 3.0])] * 4


def test_step_hooks_run_around_steps_that_run_none():
    optimizer, calls = torch.optim.SGD([nn.Parameter(torch.ones(1))]), list[str]()
    handles = [
        register(lambda *_, name=name: calls.append(name))
        for register, name in (
            (optimizer.register_step_pre_hook, "before"),
            (register_optimizer_step_pre_hook, "before all"),
            (optimizer.register_step_post_hook, "after"),
            (register_optimizer_step_post_hook, "after all"),
        )
    ]
    optimizer.step()
    of_a_step = list(calls)
    assert sorted(of_a_step) == ["after", "after all", "before", "before all"]
    with internals.step_hooks_run_once(optimizer):
        optimizer.step()
        optimizer.step()
    assert calls == [*of_a_step, "before", "after"]
    for handle in handles:
        handle.remove()
    optimizer.step()
    assert calls == [*of_a_step, "before", "after"]


def test_a_fake_process_group_has_any_size_and_sends_nothing():
    dist.init_process_group("fake", rank=3, world_size=400, store=internals.FakeStore())
    try:
        tensor = torch.ones(2)
        dist.all_reduce(tensor)
        assert (dist.get_rank(), dist.get_world_size(), dist.get_backend()) == (3, 400, "fake")
        assert tensor.tolist() == [1.0, 1.0]
    finally:
        dist.destroy_process_group()


def time_limits() -> list[timedelta]:
    """The time limits of a subgroup, before and after it takes that of the default group."""
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=77))
    group = dist.new_group([0, 1])
    before = group._get_backend(CPU).options._timeout
    internals.take_default_timeout(group)
    return [before, group._get_backend(CPU).options._timeout]


def test_a_subgroup_takes_the_time_limit_of_the_default_group():
    for before, after in run_ranks(2, time_limits):
        assert before != after == timedelta(seconds=77)


def test_a_group_that_sends_nothing_has_no_time_limit():
    dist.init_process_group("fake", rank=0, world_size=2, store=internals.FakeStore())
    try:
        internals.take_default_timeout(dist.new_group([0, 1]))
    finally:
        dist.destroy_process_group()


def test_the_oldest_torch_rounds_all_pinned_memory(monkeypatch: pytest.MonkeyPatch):
    """Torch 2.11 has neither the option nor its getter."""
    monkeypatch.delattr(torch._C, "_accelerator_getAllocatorSettings")
    assert internals.largest_rounded_pinned_bytes() == math.inf


def test_options_of_the_allocators_are_set_and_found_again():
    before = torch._C._accelerator_getAllocatorSettings()
    try:
        assert internals.set_allocator("expandable_segments:True")
        assert internals.largest_rounded_pinned_bytes() == math.inf
        assert internals.set_allocator("expandable_segments:True, pinned_max_round_threshold_mb : 3")
        assert internals.largest_rounded_pinned_bytes() == 3 * 2**20
        assert not internals.set_allocator("expandable_segments:maybe")
    finally:
        internals.set_allocator(before)


def test_the_compiler_has_an_option_for_exact_quotients():
    options = internals.options_of_exact_division()
    assert options == {"eager_numerics.division_rounding": True}
    torch.compile(len, options=options)  # refuses options that it does not know


def test_the_reports_of_cuda_and_nccl_exist_where_these_do():
    assert callable(torch.cuda.memory._dump_snapshot)
    assert hasattr(torch._C._distributed_c10d, "_dump_nccl_trace") == dist.is_nccl_available()
    if not torch.cuda.is_initialized():
        assert internals.flight_record() is None


def test_a_schema_says_what_is_written_and_what_is_a_view():
    def aliases(operation: Any) -> list[bool | None]:
        returns = internals.schema_of(operation).returns
        return [None if item.alias_info is None else item.alias_info.is_write for item in returns]

    assert aliases(aten.add_.Tensor) == [True]
    assert aliases(aten.view.default) == [False]
    assert aliases(aten.mm.default) == [None]
    assert internals.schema_of(aten.add_.Tensor).name == "aten::add_"
    views, others = (aten.view, aten.unbind), (aten.add_, aten.mm, aten._foreach_add_, aten._unpack_dual)
    for are_views, packets in ((True, views), (False, others)):  # of the last one's results, one is a view
        operations = [getattr(packet, packet.overloads()[0]) for packet in packets]
        assert [internals.returns_views(operation) for operation in operations] == [are_views] * len(operations)


@pytest.mark.parametrize("is_fake", [False, True], ids=["real", "fake"])
def test_views_share_a_storage_id_and_other_tensors_have_another(is_fake):
    with FakeTensorMode() if is_fake else nullcontext():
        tensor, other = torch.empty(4), torch.empty(4)
    ids = [internals.storage_id(t.untyped_storage()) for t in (tensor, tensor[2:], tensor.detach(), other)]
    assert ids[0] == ids[1] == ids[2] != ids[3]


class CountingMode(internals.UnguardedDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


def test_active_modes_are_listed_with_the_innermost_last():
    assert internals.active_dispatch_modes() == []
    with CountingMode() as outer, CountingMode() as inner:
        assert internals.active_dispatch_modes() == [outer, inner]
    assert internals.active_dispatch_modes() == []


def test_real_tensors_can_be_made_among_fake_ones():
    with FakeTensorMode():
        with internals.real_tensors():
            assert torch.ones(2).tolist() == [1.0, 1.0]
        assert isinstance(torch.ones(2), internals.FakeTensor)


def test_the_attention_backend_is_the_one_that_runs():
    query = torch.zeros(1, 2, 4, 8, requires_grad=True)
    for dropout, backend, operation in [
        (0.0, SDPBackend.FLASH_ATTENTION, "_scaled_dot_product_flash_attention_for_cpu"),
        (0.5, SDPBackend.MATH, "bmm"),
    ]:
        assert internals.attention_backend(query, query, dropout) == backend
        with CountingMode() as counting:
            torch.nn.functional.scaled_dot_product_attention(query, query, query, dropout_p=dropout, is_causal=True)
        assert any(operation in str(seen) for seen in counting.seen)


def exit_with_products_in_bf16() -> None:
    sys.exit(internals.multiplies_in_bf16(CPU))


def test_a_cpu_without_the_instructions_has_no_products_in_bf16(tmp_path):
    process = start_forked(tmp_path / "said", exit_with_products_in_bf16, ONEDNN_MAX_CPU_ISA="AVX2")
    assert wait_for_end(process) == 0
    assert internals.multiplies_in_bf16(torch.device("cuda"))
