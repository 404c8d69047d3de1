"""A dry run whose blocks or loss are compiled has the same products and collectives, and moves fewer bytes."""

from collections import Counter

import pytest

from gpt.settings.parser import parse_settings
from lab.dryrun.dry_run import Recording, dry_run

OPTIONS = """--model.num_layers=2 --model.hidden_size=64 --model.num_heads=8 --model.seq_length=32 --model.dropout=0
    --model.vocab_size=500 --data.path=unread --train.micro_batch_size=2 --train.global_batch_size=8
    --train.precision=bf16 --zero.bucket_numel=5000 --activations.store=none --dry_run.world_size=2"""


def recording(*options: str) -> Recording:
    return dry_run(parse_settings([*OPTIONS.split(), *options]))


@pytest.mark.parametrize(
    ("options", "eager_name", "compiled_names"),
    [
        pytest.param(["--zero.stage=2"], "gelu", ("tanh", "tanh"), marks=pytest.mark.full),
        (
            ["--zero.stage=3", "--config=configs/models/llama.yaml", "--data.mask_documents=true"],
            "silu",
            ("div+exp+neg", "cat+div+exp"),
        ),
    ],
)
def test_every_block_of_every_micro_batch_is_compiled(
    options: list[str], eager_name: str, compiled_names: tuple[str, str]
):
    eager, compiled = (recording(*options, f"--train.compile={part}") for part in ("none", "blocks"))
    assert sum(k.flops for k in compiled.kernels) == sum(k.flops for k in eager.kernels)
    assert sum(k.num_bytes for k in compiled.kernels) < sum(k.num_bytes for k in eager.kernels)
    assert {k.phase for k in compiled.kernels} == {k.phase for k in eager.kernels}
    attentions = [Counter((k.attention, k.dtype) for k in found.kernels if k.attention) for found in (eager, compiled)]
    assert attentions[0] == attentions[1]
    assert attentions[0].total() == 2 * 2 * 2, "layers x micro-batches x (forward, backward)"
    for phase, name in zip(("forward", "backward"), compiled_names, strict=True):
        gates = [k for k in compiled.kernels if k.phase == phase and name in k.name]
        assert len(gates) == 2 * 2, "layers x micro-batches"
    assert not any(eager_name in k.name for k in compiled.kernels)
    assert compiled.events == eager.events, "but for their times"
    for time in ("launched", "awaited"):
        before, after = ([getattr(event, time) for event in found.events] for found in (eager, compiled))
        assert sorted(after) == [place for _, place in sorted(zip(before, after, strict=True))], "in the same order"
        assert max(after) <= len(compiled.kernels)


@pytest.mark.full
def test_blocks_in_fp8_are_compiled_too():
    options = "--train.matmul=fp8", "--train.fp8.recipe=rowwise", "--train.fp8.keep_first=1", "--dry_run.backend=nccl"
    eager, compiled = (recording(*options, f"--train.compile={part}") for part in ("none", "blocks"))
    products = [{(k.product, k.recipe) for k in found.kernels if k.product} for found in (eager, compiled)]
    assert products[0] == products[1]
    assert {recipe for _, recipe in products[0]} == {"", "rowwise"}
    assert sum(k.flops for k in compiled.kernels) == sum(k.flops for k in eager.kernels)
    scales = [k.name for k in compiled.kernels if "amax" in k.name]
    assert scales
    assert all(name.startswith("compiled") for name in scales)


def test_the_loss_is_compiled_on_gpus():
    on_cpus, on_gpus = (recording(f"--dry_run.backend={backend}") for backend in ("gloo", "nccl"))
    assert sum(kernel.name == "amax" for kernel in on_cpus.kernels) == 2, "micro-batches"
    assert not any(kernel.name == "amax" for kernel in on_gpus.kernels)
    assert sum(k.flops for k in on_gpus.kernels) == sum(k.flops for k in on_cpus.kernels)
    assert sum(k.num_bytes for k in on_gpus.kernels) < sum(k.num_bytes for k in on_cpus.kernels)


def test_what_cannot_be_counted_compiled_stays_eager(caplog):
    eager, compiled = (recording("--activations.store=keep", f"--train.compile={part}") for part in ("none", "blocks"))
    assert compiled.kernels == eager.kernels
    assert "counted eager" in caplog.text
