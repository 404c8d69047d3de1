"""The shipped configurations send along the data axis what the formulas of section 7 say, in dry runs of few layers."""

from dataclasses import replace
from pathlib import Path

import pytest

from gpt.settings.parser import parse_settings
from gpt.settings.settings import Settings
from lab.dryrun.dry_run import dry_run
from parallel.validation.errors import ConfigError
from zero.core.partition.stage import STAGES, Lifetime
from zero.formulas.traffic import axis_bytes, axis_sizes

ROOT = Path(__file__).resolve().parents[4]
DATA_SIZE, NUM_LAYERS, NUM_MICRO_BATCHES = 4, 2, 2
LONGEST_SCALARS = 64  # bytes: numbers of the norm


def kind_of(settings: Settings) -> tuple:
    """Return what determines how often parameters and gradients are sent: units and store, at stage 3."""
    zero, parallel = settings.zero, settings.parallel
    is_transient = zero.policy.full_params is Lifetime.TRANSIENT
    units = (zero.units, settings.activations.store) if is_transient else ()
    return zero.stage, parallel.shard_size, zero.optimizer_over, zero.accumulate, zero.gather_dtype, units


def shipped_settings() -> list[tuple[Path, Settings]]:
    """Return the first file of each kind with its settings; files that need others are left out."""
    found = {}
    for path in sorted((ROOT / "configs").rglob("*.yaml")):
        try:
            settings = parse_settings(["--config", str(path)])
        except ConfigError:
            continue
        found.setdefault(kind_of(settings), (path, settings))
    return list(found.values())


def shallow(settings: Settings) -> Settings:
    """Return the settings of a small world with few layers and micro-batches, at the same width."""
    batch = settings.train.micro_batch_size * DATA_SIZE * NUM_MICRO_BATCHES
    train = replace(settings.train, global_batch_size=batch, ramp_up=None, compile="none")
    in_world = replace(settings.dry_run, world_size=DATA_SIZE * settings.parallel.tensor_size)
    model = replace(settings.model, num_layers=NUM_LAYERS)
    return replace(settings, model=model, train=train, dry_run=in_world)


@pytest.mark.parametrize("stage", [pytest.param(stage, marks=[pytest.mark.full] * (stage < 3)) for stage in STAGES])
def test_shipped_configurations_send_what_the_formulas_say(monkeypatch: pytest.MonkeyPatch, stage: int):
    """At stage 3 the root and the last layer stay gathered from forward to backward."""
    monkeypatch.chdir(ROOT)  # files name others
    tried = [(path, settings) for path, settings in shipped_settings() if settings.zero.stage == stage]
    assert tried
    for path, settings in tried:
        recording = dry_run(shallow(settings))
        zero, dtype = shallow(settings).with_gradient_types(DATA_SIZE).zero, settings.train.dtype
        sizes = {flat: flat.layout.numel * dtype.itemsize for flat in recording.state.model.flats}
        transient = [size for flat, size in sizes.items() if flat.lifetime is Lifetime.TRANSIENT]
        all_bytes, reduce_bytes = sum(sizes.values()), zero.gradient_types(dtype).reduce.itemsize
        expected = axis_bytes(
            zero.policy,
            all_bytes,
            axis_sizes(zero.policy, DATA_SIZE, settings.parallel.shard_size),
            NUM_MICRO_BATCHES,
            gradient_bytes=(all_bytes / dtype.itemsize * reduce_bytes,) * 2,
            resident_bytes=all_bytes - sum(transient),
            kept_bytes=transient[0] + transient[-1] if transient else 0,
        )
        messages = [event for event in recording.events if event.axis in ("data", "shard", "replica")]
        sent = sum(event.wire_bytes for event in messages if event.message_bytes > LONGEST_SCALARS)
        assert sent == sum(expected), path
