"""The memory of a dry run against the events of torch's allocator while the same step runs on real tensors."""

import json
from pathlib import Path

import pytest
from torch.profiler import ProfilerActivity, profile

from gpt.builder.train_state import build, build_mesh
from gpt.settings.parser import parse_settings
from gpt.settings.settings import Settings
from gpt.train_step import train_step
from lab.dryrun.dry_run import DEVICE, blank_micro_batches, record_step
from lab.observe.fake_tensors import QuickFakeTensorMode
from parallel.world import World, imitated_world

NUM_STEPS_BEFORE = 1


def allocated_peak(settings: Settings, world: World, trace: Path) -> int:
    """Return the bytes that a step allocates at most beside those that were allocated before it."""
    mesh = build_mesh(settings, world)
    state = build(settings, mesh, world.device)
    batches = blank_micro_batches(settings.train, settings.model.seq_length, mesh.num_batch_ranks)
    for _ in range(NUM_STEPS_BEFORE):
        train_step(state.model, state.optimizer, batches, mesh, leaves=state.leaves)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        train_step(state.model, state.optimizer, batches, mesh, leaves=state.leaves)
    profiler.export_chrome_trace(str(trace))
    events = [event for event in json.loads(trace.read_text())["traceEvents"] if event.get("name") == "[memory]"]
    allocated = peak = 0
    for event in sorted(events, key=lambda event: event["ts"]):
        allocated += event["args"]["Bytes"]
        peak = max(peak, allocated)
    return peak


@pytest.mark.parametrize(
    ("tensor_size", "precision", "options"),
    [(1, "fp32", ["--zero.stage=1"]), (2, "bf16", ["--zero.stage=3", "--activations.store=none"])],
)
def test_the_peak_is_that_of_the_allocator(tensor_size: int, precision: str, options: list[str], tmp_path: Path):
    shape = "--model.num_layers=3 --model.hidden_size=64 --model.num_heads=4 --model.seq_length=64 --model.dropout=0"
    others = "--model.vocab_size=4096 --data.path=unread --train.micro_batch_size=8 --zero.bucket_numel=20000"
    chosen = parse_settings(
        [
            *shape.split(),
            *others.split(),
            *options,
            f"--train.precision={precision}",
            f"--parallel.tensor_size={tensor_size}",
            f"--train.global_batch_size={16 // tensor_size}",
            "--dry_run.world_size=2",
        ]
    )
    with imitated_world(0, 2, 2, "nccl") as world:
        dry = record_step(chosen, world, QuickFakeTensorMode(), NUM_STEPS_BEFORE)
    with imitated_world(0, 2, 2, "nccl") as world:
        allocated = allocated_peak(chosen, world, tmp_path / "trace.json")
    peak, resident = (sum(memory[DEVICE].values()) for memory in (dry.peak, dry.resident))
    assert allocated == pytest.approx(peak - resident, rel=0.01), "torch copies small vectors to cast them"
