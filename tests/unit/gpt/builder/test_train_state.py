"""The builder sets what holds for the whole process."""

import logging
import shutil
from contextlib import nullcontext
from unittest import mock

import pytest
import torch

from gpt.builder.closed_forms import moment_bytes
from gpt.builder.train_state import build, build_mesh
from gpt.settings.parser import parse_settings
from parallel.mesh import Mesh
from parallel.validation.errors import ConfigError
from parallel.world import imitated_world
from zero.updates.adamw8bit import AdamW8bit
from zero.updates.adamw_bf16 import AdamWBf16
from zero.updates.cautious_adamw import CautiousAdamW
from zero.updates.matrix_update import MatrixUpdate
from zero.updates.muon import Muon
from zero.updates.soap import Soap

BASE = "{data: {path: nowhere}, model: {num_layers: 1, hidden_size: 8, num_heads: 2, seq_length: 4, vocab_size: 64}}"


@pytest.mark.parametrize(
    ("arguments", "kind"),
    [
        ([], torch.optim.AdamW),
        (["--optimizer.cautious_decay=true"], CautiousAdamW),
        (["--optimizer.name=muon", "--optimizer.muon={ns_steps: 3, iterates_on: gram}"], Muon),
        (["--optimizer.name=muon", "--optimizer.muon={per_head: true, row_beta: 0.9}"], Muon),
        (["--optimizer.name=soap", "--optimizer.soap.refresh_every=3"], Soap),
        (["--optimizer.name=sgd"], torch.optim.SGD),
        (["--optimizer.name=adamw8bit"], AdamW8bit),
        (["--optimizer.name=adamw_bf16"], AdamWBf16),
        (["--optimizer.name=sgd", "--optimizer.momentum=0", "--optimizer.nesterov=false"], torch.optim.SGD),
    ],
)
def test_the_optimizer_is_that_of_the_settings(arguments, kind):
    """Its groups decay as they should, and its states have the size that the planner assumes."""
    settings = parse_settings([f"--config={BASE}", *arguments])
    state = build(settings, Mesh.create(1), torch.device("cpu"))
    optimizer, model = state.optimizer, state.model.module
    first = optimizer.updates[0]
    assert type(first.optimizer) is kind
    expected_bytes = moment_bytes(settings.optimizer, settings.model, 1)
    # The probe of 8-bit states ends with an incomplete block, which has scales as others have.
    assert optimizer.state_bytes_per_element == pytest.approx(expected_bytes, rel=0.01)
    names = {param: name for name, param in model.named_parameters()}
    groups = optimizer.param_groups
    assert sorted(names[param] for group in groups for param in group["params"]) == sorted(names.values())
    for group in groups:
        for param in group["params"]:
            assert group["weight_decay"] == (settings.optimizer.weight_decay if param.dim() > 1 else 0)
            is_hidden = names[param].startswith("blocks.") and names[param].endswith("weight") and param.dim() == 2
            is_large = param.dim() > 1
            expected = {Muon: is_hidden, Soap: is_hidden, AdamW8bit: is_large, AdamWBf16: is_large}.get(kind, True)
            assert (group in first.optimizer.param_groups) == expected
    # q, k and v of the only layer, or of its two heads, and its projection, up and down
    num_heads = 2 if settings.optimizer.muon.per_head else 1
    expected = 3 * num_heads + 3 if kind in (Muon, Soap) else 0
    assert (len(first.matrices) if isinstance(first, MatrixUpdate) else 0) == expected


def test_the_precision_of_fp32_products_is_set_and_logged(caplog):
    caplog.set_level(logging.INFO)
    for arguments, expected in [(["--train.float32_matmul_precision=high"], "high"), ([], "highest")]:
        build(parse_settings([f"--config={BASE}", *arguments]), Mesh.create(1), torch.device("cpu"))
        assert torch.get_float32_matmul_precision() == expected
        assert f"products of fp32: {expected} precision" in caplog.messages
    with pytest.raises(ConfigError, match=r"train\.float32_matmul_precision"):
        parse_settings([f"--config={BASE}", "--train.float32_matmul_precision=low"])


def test_compiled_blocks_need_a_compiler(monkeypatch):
    settings = parse_settings([f"--config={BASE}", "--train.compile=blocks"])
    monkeypatch.setattr(shutil, "which", lambda _name: None)
    with pytest.raises(ConfigError, match=r"train\.compile=blocks needs a C\+\+ compiler"):
        build(settings, Mesh.create(1), torch.device("cpu"))


@pytest.mark.parametrize(("matmul", "is_rank_invariant"), [("fp8", True), ("null", False)])
def test_compiled_blocks_that_multiply_in_fp8_divide_exactly(matmul, is_rank_invariant, monkeypatch):
    compiled = mock.Mock(side_effect=torch.compile)
    monkeypatch.setattr(torch, "compile", compiled)
    arguments = ["--train.compile=blocks", f"--train.matmul={matmul}"]
    build(parse_settings([f"--config={BASE}", *arguments]), Mesh.create(1), torch.device("cpu"))
    (call,) = compiled.mock_calls
    assert bool(call.kwargs["options"]) == is_rank_invariant


def test_bits_that_no_number_of_ranks_changes_need_torchs_deterministic_kernels_on_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    chosen = mock.Mock(side_effect=InterruptedError)  # nothing is built for a GPU
    monkeypatch.setattr(torch, "use_deterministic_algorithms", chosen)
    settings = parse_settings([f"--config={BASE}", "--train.reproducible=layout"])
    build(settings, Mesh.create(1), torch.device("cpu"))
    with pytest.raises(InterruptedError):
        build(settings, Mesh.create(1), torch.device("cuda"))
    chosen.assert_called_once_with(True)
    assert settings.zero.alignment % 256 == 0, "no kernel is chosen by where a parameter begins"


def test_a_context_that_does_not_divide_the_heads_of_a_tensor_rank_is_refused():
    model = "--model.num_heads=8", "--model.num_kv_heads=4", "--model.hidden_size=32", "--model.seq_length=8"
    mesh = "--parallel.tensor_size=2", "--train.micro_batch_size=1", "--train.global_batch_size=8"
    with imitated_world(0, 8, 8, "gloo") as world:
        build_mesh(parse_settings([f"--config={BASE}", *model, *mesh, "--parallel.context_size=2"]), world)
        refused = parse_settings([f"--config={BASE}", *model, *mesh, "--parallel.context_size=4"])
        with pytest.raises(ConfigError, match="context_size=4 does not divide the 2 heads of keys and values"):
            build_mesh(refused, world)


@pytest.mark.parametrize(
    ("options", "num_tokens"),
    [
        (["--model.seq_length=10", "--parallel.sequence_parallel=false"], None),
        (["--model.seq_length=12", "--parallel.sequence_parallel=true"], None),
        (["--model.seq_length=10", "--parallel.sequence_parallel=true"], 10),
        (["--model.seq_length=10", "--parallel.sequence_parallel=true", "--train.micro_batch_size=2"], None),
        # Two context ranks have half of the tokens each.
        (["--model.seq_length=12", "--parallel.sequence_parallel=true", "--parallel.context_size=2"], 6),
    ],
)
def test_tensor_ranks_that_divide_the_tokens_need_a_number_that_they_divide(options: list[str], num_tokens: int | None):
    model = "--model.num_heads=8", "--model.hidden_size=32", "--parallel.tensor_size=4"
    batch = "--train.micro_batch_size=1", "--train.global_batch_size=8"
    settings = parse_settings([f"--config={BASE}", *model, *batch, *options])
    refused = pytest.raises(ConfigError, match=f"the tokens of a micro-batch={num_tokens} ") if num_tokens else None
    with imitated_world(0, 8, 8, "gloo") as world, refused or nullcontext():
        build_mesh(settings, world)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--train.matmul=fp8", "--train.precision=fp16"], "train.matmul=fp8.*train.precision=fp16"),
        (["--zero.gather_dtype=fp8"], "zero.gather_dtype=fp8.*train.matmul=None"),
        (["--zero.gather_dtype=fp8", "--train.matmul=fp8", "--train.fp8.recipe=rowwise"], "recipe=rowwise"),
        (["--train.matmul=fp8", "--train.fp8.keep_first=1"], "keep_first=1 .*none of 1 blocks"),
    ],
)
def test_products_in_fp8_are_refused_where_they_would_not_be_used(options: list[str], named: str):
    with pytest.raises(ConfigError, match=named):
        build(parse_settings([f"--config={BASE}", *options]), Mesh.create(1), torch.device("cpu"))


@pytest.mark.parametrize(
    ("tensor_size", "options", "named"),
    [
        (1, [], r"N=24 .*blocks\.0"),
        # Two ranks share each head of keys and values, of which they apply 2 x 4 rows.
        (
            4,
            ["hidden_size=64", "num_heads=16", "num_kv_heads=2", "head_dim=4", "seq_length=16"],
            r"N=8 .*blocks\.0\.attention\.qkv\.kv_weight",
        ),
    ],
)
def test_a_layer_without_a_kernel_is_named(tensor_size: int, options: list[str], named: str):
    """A dry run imitates a GPU; 8 features are no multiple of 16."""
    model = [f"--model.{option}" for option in options]
    tensor = f"--parallel.tensor_size={tensor_size}"
    settings = parse_settings(
        [f"--config={BASE}", "--train.matmul=fp8", "--train.global_batch_size=16", *model, tensor]
    )
    with imitated_world(0, 4, 4, "nccl") as world, pytest.raises(ConfigError, match=rf"recipe=tensorwise.*{named}"):
        build(settings, build_mesh(settings, world), world.device)
