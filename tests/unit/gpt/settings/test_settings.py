"""Facts that follow from several settings together."""

from pathlib import Path

import pytest

from gpt.settings.data import ScheduledWeights
from gpt.settings.parser import parse_settings
from gpt.settings.run import GuardSettings
from gpt.settings.settings import Settings
from parallel.validation.errors import ConfigError

BASE = "{data: {path: nowhere}, model: {num_layers: 2, hidden_size: 32, num_heads: 4, seq_length: 16, vocab_size: 300}}"


def settings_of(*arguments: str) -> Settings:
    return parse_settings([f"--config={BASE}", *arguments])


@pytest.mark.parametrize(("name", "alignment"), [("adamw", 48), ("muon", 48), ("adamw8bit", 768)])
def test_shards_end_between_blocks_of_moments_of_8_bits(name: str, alignment: int):
    aligned = settings_of(f"--optimizer.name={name}", "--zero.alignment=48").with_alignment()
    assert aligned.zero.alignment == alignment  # of 48 and of blocks of 256, the least common multiple
    assert settings_of("--optimizer.name=adamw").with_alignment() == settings_of("--optimizer.name=adamw")


@pytest.mark.parametrize(
    ("data_size", "context_size", "expected"), [(1, 1, "fp32"), (2, 1, "fp32"), (4, 1, "bf16"), (4, 2, "fp32")]
)
def test_gradients_of_several_micro_batches_are_added_in_fp32(data_size: int, context_size: int, expected: str):
    """8 sequences in micro-batches of 2; ranks that divide sequences among them have the same micro-batches."""
    sizes = "--train.micro_batch_size=2", "--train.global_batch_size=8", f"--parallel.context_size={context_size}"
    settings = settings_of(*sizes, "--train.precision=bf16", "--zero.stage=1").with_gradient_types(data_size)
    assert settings.zero.accumulate_dtype == expected


@pytest.mark.parametrize(
    ("guard", "checks"),
    [
        (GuardSettings(), False),
        (GuardSettings(spike_factor=2.0), True),
        (GuardSettings(policy="stop"), True),
        (GuardSettings(policy="roll_back", spike_factor=2.0), True),
    ],
)
def test_losses_are_checked_if_a_bad_one_has_a_consequence(guard: GuardSettings, checks: bool):
    assert guard.checks_losses == checks


def test_a_schedule_of_weights_is_read_from_the_file_of_a_run(tmp_path: Path):
    settings = settings_of("--data.schedule=[{step: 0, weights: [1]}, {step: 9, weights: [2]}]")
    (tmp_path / "config.yaml").write_text(settings.to_yaml())
    assert parse_settings([f"--config={tmp_path}/config.yaml"]) == settings
    assert settings.data.schedule == (ScheduledWeights(0, (1.0,)), ScheduledWeights(9, (2.0,)))


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        (
            "[{step: 2, weights: [1]}, {step: 2, weights: [1]}]",
            r"data.schedule has the steps \[2, 2\], which",
        ),
        ("[{step: 2, weights: [1, 1]}]", r"data.schedule has the weights \[1.0, 1.0\] at step 2, and data.path 1 corp"),
        ("[{step: 2, weights: [0]}]", "give each of them a weight, one of them above 0"),
        ("[{step: -1, weights: [1]}]", "data.schedule.step=-1 is below 0"),
        (
            "[{step: 1, weight: [1]}]",
            "data.schedule=.* contains .*, which has the settings step, weight, and not step, weights",
        ),
        ("[{step: 1}]", "which has the settings step, and not step, weights"),
        ("[1]", "contains 1, an integer; choose a list, each element a group of settings"),
    ],
)
def test_a_wrong_schedule_of_weights_is_refused(schedule: str, message: str):
    with pytest.raises(ConfigError, match=message):
        settings_of(f"--data.schedule={schedule}")


def test_what_a_resume_compares_has_the_store_only_if_dropout_depends_on_it():
    compiled = settings_of("--train.compile=blocks", "--activations.store=keep").order_of_samples
    assert compiled.items() >= {"train.compile": "blocks", "activations.store": "keep"}.items()
    assert "activations.store" not in settings_of("--activations.store=keep").order_of_samples
    assert "train.compile" not in settings_of("--train.compile=blocks", "--model.dropout=0").order_of_samples
