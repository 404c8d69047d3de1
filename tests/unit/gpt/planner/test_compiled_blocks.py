"""A dry run whose blocks are compiled has the same products and collectives, and moves fewer bytes."""

import pytest

from gpt.planner.compiled_blocks import with_compiled_blocks
from gpt.planner.dry_run import dry_run
from gpt.settings_parser import parse_settings

OPTIONS = """--model.num_layers=2 --model.hidden_size=64 --model.num_heads=8 --model.seq_length=32 --model.dropout=0
    --model.vocab_size=500 --data.path=unread --train.micro_batch_size=2 --train.global_batch_size=8
    --train.precision=bf16 --zero.bucket_numel=5000 --activations.store=none --dry_run.world_size=2"""


@pytest.mark.parametrize("stage", [2, 3])
def test_every_block_of_every_micro_batch_is_compiled(stage: int):
    settings = parse_settings([*OPTIONS.split(), f"--zero.stage={stage}"])
    recording = dry_run(settings)
    kernels, events = with_compiled_blocks(recording.kernels, recording.events, settings, recording.state.activations)
    assert sum(k.flops for k in kernels) == sum(k.flops for k in recording.kernels)
    assert sum(k.num_bytes for k in kernels) < sum(k.num_bytes for k in recording.kernels)
    assert {k.phase for k in kernels} == {k.phase for k in recording.kernels}
    gelus = [k.phase for k in kernels if "tanh" in k.name]
    assert gelus.count("forward") == gelus.count("backward") == 2 * 2, "layers x micro-batches"
    assert not any("gelu" in k.name for k in kernels)
    assert events == recording.events, "but for their times"
    for time in ("launched", "awaited"):
        before, after = ([getattr(event, time) for event in found] for found in (recording.events, events))
        assert sorted(after) == [place for _, place in sorted(zip(before, after, strict=True))], "in the same order"
        assert max(after) <= len(kernels)


def test_what_cannot_be_counted_compiled_stays_eager(caplog):
    settings = parse_settings([*OPTIONS.split(), "--activations.store=keep"])
    recording = dry_run(settings)
    log = with_compiled_blocks(recording.kernels, recording.events, settings, recording.state.activations)
    assert log == (recording.kernels, recording.events)
    assert "counted eager" in caplog.text
