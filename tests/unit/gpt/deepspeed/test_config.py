"""Translation of DeepSpeed's JSON configurations into settings, and the messages for keys that are refused."""

import json
import math
import re
from dataclasses import asdict, replace
from functools import reduce
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from rich.table import Table

from gpt.deepspeed.config import translate
from gpt.deepspeed.keys import KEYS, ONLY_ENABLED_IS_READ, OTHER_NAMES, TYPES
from gpt.settings.optimizer import OptimizerSettings
from gpt.settings.parser import parse_settings
from gpt.settings.schedule import ScheduleConfig
from gpt.settings.settings import Settings
from gpt.settings.training import LossScaleSettings, ParallelSettings
from gpt.settings.tree import dotted
from parallel.validation.errors import ConfigError
from tests.source_files import ROOT
from zero.activations.checkpointed_blocks import ActivationsConfig
from zero.settings.config import OffloadConfig, ZeroConfig

MODEL = {"num_layers": 2, "hidden_size": 32, "num_heads": 4, "seq_length": 16, "vocab_size": 300}
BASE = ["--data.path=nowhere", *(f"--model.{name}={value}" for name, value in MODEL.items())]


@pytest.fixture
def written(tmp_path: Path):
    def written(content: Any) -> Path:
        path = tmp_path / "ds_config.json"
        path.write_text(content if isinstance(content, str) else json.dumps(content))
        return path

    return written


@pytest.fixture
def parse(written):
    """Parse a file's content and options with the whole parser."""

    def parse(content: Any, *options: str, num_ranks: int | None = 4, **others: Any) -> Settings:
        return parse_settings([*BASE, f"--zero.deepspeed_config={written(content)}", *options], num_ranks, **others)

    return parse


@pytest.fixture(scope="module")
def base() -> Settings:
    return parse_settings(BASE)


@pytest.fixture
def translated(written, base):
    """Return the settings that the file alone sets."""

    def translated(content: Any, options: frozenset[str] = frozenset(), settings: Settings = base) -> dict[str, Any]:
        found = translate(written(content), dotted(asdict(settings)), options, 4)
        found.check()
        return found.settings

    return translated


def nested(name: str, value: Any) -> dict[str, Any]:
    return reduce(lambda inner, part: {part: inner}, reversed(name.split(".")), value)


def merged(*contents: dict[str, Any]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for content in contents:
        for name, value in content.items():
            result[name] = merged(result.get(name, {}), value) if isinstance(value, dict) else value
    return result


def zero(**keys: Any) -> dict[str, Any]:
    return {"zero_optimization": keys}


def host(*states: str) -> dict[str, Any]:
    return {"offload.mode": "host", "offload.states": list(states)}


def loss_scale(**settings: Any) -> dict[str, Any]:
    return {f"train.loss_scale.{name}": value for name, value in settings.items()}


ZERO, AUTO = "zero_optimization", {"enabled": "auto"}
CPU_OPTIMIZER, CPU_PARAM = f"{ZERO}.offload_optimizer.device", f"{ZERO}.offload_param.device"
FULL = {"train_batch_size": 32, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4}
OFF = {"fp16": {"enabled": False}}


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"zero_optimization.stage3_param_persistence_threshold": 1e5}, {"zero.resident_numel": 100_000}),
        ({"zero_optimization.stage3_gather_16bit_weights_on_model_save": True}, {"checkpoint.weights": True}),
        ({"zero_optimization.mics_shard_size": -1}, {"parallel.shard_size": None}),
        ({f"{ZERO}.zero_hpz_partition_size": 8}, {"parallel.shard_size": 8, "zero.optimizer_over": "all"}),
        ({"zero_optimization.zero_hpz_partition_size": 1}, {}),
        ({CPU_OPTIMIZER: "cpu"}, host("optimizer")),
        ({f"{ZERO}.stage": 3, CPU_PARAM: "cpu"}, {"zero.stage": 3} | host("parameters")),
        ({CPU_PARAM: "none", CPU_OPTIMIZER: "none"}, {"offload.mode": "accelerator"}),
        ({"fp16.enabled": False, "fp16.loss_scale": 8}, {"train.precision": "fp32"}),
        ({"fp16.enabled": "auto", "bf16.enabled": False}, {}),
        ({"fp16.enabled": False, "bf16.enabled": "auto"}, {}),
        ({"fp16": AUTO | {"loss_scale": 128, "initial_scale_power": 20}}, loss_scale(dynamic=False, initial=128)),
        ({"fp16": AUTO | {"loss_scale": 0, "min_loss_scale": 2}}, loss_scale(dynamic=True, minimum=2)),
        (
            {"bf16.enabled": True, "fp32_allreduce": True, "data_types.grad_accum_dtype": "fp32"},
            {"train.precision": "bf16", "zero.reduce_dtype": "fp32", "zero.accumulate_dtype": "fp32"},
        ),
        (
            {"optimizer.type": "Muon", "optimizer.params": {"adam_lr": 0.001, "muon_lr": 0.02, "momentum": 0.9}},
            {"optimizer.name": "muon", "optimizer.muon.adjust_lr": "original", "optimizer.momentum": 0.9}
            | {"optimizer.lr": 0.001, "optimizer.muon.lr_factor": 20.0},
        ),
        (
            {"optimizer.type": "SGD", "optimizer.params": {"lr": 0.1, "nesterov": False}},
            {"optimizer.name": "sgd", "optimizer.momentum": 0.0, "optimizer.nesterov": False, "optimizer.lr": 0.1},
        ),
        ({"optimizer.params.weight_decay": 3e-7}, {"optimizer.weight_decay": 3e-7}),
        (
            {"optimizer.params.lr": 0.02, "scheduler.type": "WarmupLR", "scheduler.params": {"warmup_max_lr": 0.01}},
            {"optimizer.lr": 0.01, "schedule.decay": "constant", "schedule.min_lr": 0},
        ),
        (
            {"optimizer.params.lr": 1e-2, "scheduler": {"type": "WarmupCosineLR", "params": {"cos_min_ratio": 0.5}}},
            {"optimizer.lr": 1e-2, "schedule.decay": "cosine", "schedule.min_lr": 5e-3},
        ),
        ({"activation_checkpointing.partition_activations": True}, {"activations.store": "keep"}),
        ({"activation_checkpointing.partition_activations": False}, {}),
        ({"amp": {}, "steps_per_print": 25}, {"train.log_every": 25}),
        ({"wandb": {"enabled": "auto", "group": "g"}}, {"wandb.group": "g"}),
        ({"wandb": {"enabled": False, "team": "t", "project": "p"}}, {"wandb.mode": "disabled"}),
    ],
    ids=lambda value: json.dumps(value)[:60],
)
def test_keys_become_settings(translated, keys: dict[str, Any], expected: dict[str, Any]):
    assert translated(merged(*(nested(name, value) for name, value in keys.items()))) == expected


def test_a_file_of_all_keys_gives_the_same_settings_as_options(parse, base):
    """Every setting of the rows exists and has the type that the rows give it."""
    content = merged(zero(stage=3, reduce_bucket_size=5e6, mics_shard_size=2, stage3_prefetch_bucket_size=0), FULL)
    content |= {"gradient_clipping": 0, "steps_per_print": 3, "wandb": {"enabled": True, "project": "p"}}
    content |= {"fp16": {"enabled": True, "initial_scale_power": 8, "loss_scale_window": 9, "hysteresis": 1}}
    content |= {"optimizer": {"type": "AdamW", "params": {"lr": 0.01, "betas": [0.8, 0.9], "eps": 1e-5}}}
    content |= {"scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 2, "total_num_steps": 9}}}
    content |= {"activation_checkpointing": {"cpu_checkpointing": True, "contiguous_memory_optimization": False}}
    content["zero_optimization"] |= {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}
    settings = parse(content)
    assert settings.zero == ZeroConfig(3, 5_000_000, overlap_gather=True, prefetch_numel=0)
    assert settings.parallel.shard_size == 2
    assert settings.offload == OffloadConfig("host", ("optimizer", "parameters"))
    assert settings.train.loss_scale == LossScaleSettings(initial=256.0, growth_interval=9, hysteresis=1)
    assert settings.optimizer == OptimizerSettings(0.01, clip_norm=math.inf, betas=(0.8, 0.9), eps=1e-5)
    assert settings.schedule == ScheduleConfig(0.0, 2, "linear", 9)
    assert settings.activations == ActivationsConfig("partition_host", defragment=False)
    assert (settings.wandb.mode, settings.wandb.project) == ("online", "p")
    train = settings.train
    assert (train.micro_batch_size, train.global_batch_size, train.log_every, train.precision) == (2, 32, 3, "fp16")


def test_partitioned_activations_need_tensor_ranks(translated, base):
    content = {"activation_checkpointing": {"partition_activations": True}}
    with_tensor_ranks = replace(base, parallel=ParallelSettings(tensor_size=2))
    assert translated(content, settings=with_tensor_ranks) == {"activations.store": "partition"}


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ({"zero_optimization": True}, zero(stage=1)),
        (zero(cpu_offload=True), zero(offload_optimizer={"device": "cpu"})),
        (zero(stage=3, cpu_offload_params=True), zero(stage=3, offload_param={"device": "cpu"})),
        (zero(stage=3, cpu_offload_param=True), zero(stage=3, offload_param={"device": "cpu"})),
        (zero(cpu_offload_use_pin_memory=True), zero(offload_optimizer={"pin_memory": True})),
        (zero(stage3_gather_fp16_weights_on_model_save=True), zero(stage3_gather_16bit_weights_on_model_save=True)),
        (zero(prefetch_bucket_size=9), zero(stage3_prefetch_bucket_size=9)),
        ({"bfloat16": {"enabled": True}}, {"bf16": {"enabled": True}}),
        ({"optimizer": {"params": {"max_grad_norm": 2.0}}}, {"gradient_clipping": 2.0}),
        (OFF | {"fp32_allreduce": True}, OFF | {"communication_data_type": "fp32"}),
    ],
    ids=lambda value: json.dumps(value)[:60],
)
def test_old_and_new_spellings_are_equal(translated, old: dict[str, Any], new: dict[str, Any]):
    assert translated(old) == translated(new)


def test_every_other_spelling_belongs_to_a_key():
    assert {name for name, _ in OTHER_NAMES.values()} <= set(KEYS)
    assert not set(OTHER_NAMES) & set(KEYS)


EXAMPLES = {"bool": True, "number": 0.5, "pair": [0.5, 0.5], "text": "something"}  # 7 for all others


def test_keys_that_are_not_needed_change_nothing(parse, base):
    not_needed = {name: key for name, key in KEYS.items() if not key.settings and key.accepted is None}
    examples = {type: EXAMPLES.get(name, 7) for name, type in TYPES.items()}
    content = merged(*(nested(name, examples[key.type]) for name, key in not_needed.items()))
    assert len(not_needed) > 40
    assert parse(content) == base


def test_features_that_are_switched_off_change_nothing(translated):
    features = {name: {"enabled": False, "whatever": {"it": 1}} for name in ONLY_ENABLED_IS_READ}
    assert translated(merged(*(nested(name, value) for name, value in features.items()))) == {}


def test_auto_everywhere_means_these_settings(parse):
    """The integration of transformers writes "auto" for values that it replaces with its own arguments."""
    content = merged(*(nested(name, "auto") for name, key in KEYS.items() if key.settings))
    given = ["--train.precision=bf16", "--train.micro_batch_size=2", "--train.global_batch_size=16"]
    assert parse(content, *given) == parse_settings([*BASE, *given])
    assert parse(json.dumps(content).replace('"auto"', "null"), *given) == parse_settings([*BASE, *given])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (zero(offload_optimizer={"device": "nvme", "nvme_path": "/x"}), "device=nvme: .* never on NVMe; choose cpu"),
        (zero(offload_optimizer={"device": "cpu", "ratio": 0.3}), "ratio=0.3: .* offload.mode=auto"),
        (zero(zero_hpz_partition_size=8, mics_shard_size=4), "mics_shard_size=4 and zero_hpz_partition_size=8"),
        (zero(stge=1), "zero_optimization.stge=1: there is no such key; did you mean zero_optimization.stage?"),
        ({"tensorbord": {"enabled": True}}, "tensorbord.enabled=true: there is no such key; did you mean tensorboard?"),
        (zero(stage="two"), "zero_optimization.stage=two: is not an integer of 0 or more"),
        (zero(reduce_bucket_size=0), "reduce_bucket_size=0: is not an integer of 1 or more"),
        (zero(cpu_offload="cpu"), "cpu_offload=cpu: is not true or false"),
        ({"optimizer": {"params": {"betas": [0.9, "x"]}}}, r'betas=\[0.9, "x"\]: is not a list of two numbers'),
        ({"optimizer": {"type": "a\nb"}}, r'optimizer.type="a\\nb": choose Adam, AdamW, Muon, SGD'),
        ({"scheduler": {"params": {"warmup_min_lr": 1e-5}}}, "warmup_min_lr=1e-05: the warm-up rises from zero; set"),
        ({"amp": {"enabled": True}}, 'amp={"enabled": true}: choose fp16 or bf16; remove it'),
        ({"comet": {"team": "t"}}, "choose wandb or tensorboard"),
        ('{"a": 1, "a": 2}', "has the key a twice; remove one"),
        ("[1]", r"contains \[1\]; it must be an object"),
        # contradictions within the file
        ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, "fp16.enabled=true and bf16.enabled=true; switch one"),
        (zero(stage=2, offload_param={"device": "cpu"}), "device=cpu needs stage 3 .*zero.stage=2; choose"),
        (zero(stage=0, offload_optimizer={"device": "cpu"}), "device=cpu needs stage 1 .*zero.stage=0"),
        (zero(cpu_offload=True, offload_optimizer={"device": "none"}), "device=none: .*cpu_offload=true; keep one"),
        (FULL | {"train_batch_size": 64}, "train_batch_size=64 .*size_per_gpu=2 x gradient_acc.*=4 x 4 data-.* = 32;"),
        ({"train_batch_size": 30, "train_micro_batch_size_per_gpu": 4}, "size=30 .*per_gpu=4 x 4 data-.* = 16;"),
        ({"train_batch_size": 3}, "train_batch_size=3 is not a multiple of 4 data-parallel ranks = 4;"),
        ({"bf16": {"enabled": True}, "data_types": {"param_dtype": "fp32"}}, "param_dtype=fp32 .*=bf16; .*sion=fp32"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_what_is_refused_is_reported_in_one_line(translated, content: Any, message: str):
    with pytest.raises(ConfigError, match=message) as raised:
        translated(content)
    assert "\n" not in str(raised.value)


def test_all_refused_keys_are_reported_at_once_and_shown(parse):
    tables: list[Table] = []
    with pytest.raises(ConfigError, match=r"quantized.* is not supported.*; amp="):
        parse(merged(zero(stage=1, zero_quantized_weights=True), {"amp": {"enabled": True}}), show=tables.append)
    assert text_of(tables).count("│ refused ") == 2


BATCH, MICRO, ACCUMULATION = FULL


@pytest.mark.parametrize(
    ("content", "options", "expected"),
    [
        ({}, [], (5, 20)),  # nothing is said
        ({ACCUMULATION: 4}, [], (5, 5 * 4 * 4)),  # of this project's micro-batches
        ({MICRO: 2}, [], (2, 2 * 4)),
        ({BATCH: 32}, [], (8, 32)),
        ({BATCH: 32, MICRO: 2}, [], (2, 32)),
        ({BATCH: 32, ACCUMULATION: 4}, [], (2, 32)),
        ({MICRO: 2, ACCUMULATION: 4}, [], (2, 32)),
        (FULL, [], (2, 32)),
        (FULL | {BATCH: "auto"}, [], (2, 32)),
        ({BATCH: 40, MICRO: "auto"}, [], (5, 40)),
        ({}, ["--train.micro_batch_size=1"], (1, 20)),
        ({}, ["--train.global_batch_size=40"], (5, 40)),
        ({MICRO: 2}, ["--train.global_batch_size=40"], (2, 40)),
        ({ACCUMULATION: 2}, ["--train.global_batch_size=40"], (5, 40)),
    ],
)
def test_any_two_batch_sizes_give_the_third(parse, content: Any, options: list[str], expected: tuple[int, int]):
    train = parse(content, "--config", "{train: {micro_batch_size: 5, global_batch_size: 20}}", *options).train
    assert (train.micro_batch_size, train.global_batch_size) == expected


@pytest.mark.parametrize(
    ("tensor_size", "context_size", "data_size"), [(1, 1, 8), (2, 1, 4), (8, 1, 1), (1, 2, 4), (2, 2, 2)]
)
def test_batch_sizes_count_data_parallel_ranks(parse, tensor_size: int, context_size: int, data_size: int):
    content = {"train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": 2}
    sizes = [f"--parallel.tensor_size={tensor_size}", f"--parallel.context_size={context_size}"]
    settings = parse(content, *sizes, num_ranks=8)
    assert settings.train.global_batch_size == 3 * 2 * data_size


def test_the_ranks_of_a_dry_run_are_those_of_the_imitated_world_and_others_those_of_the_launcher(parse, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "16")
    for option, num_ranks in (("--dry_run.world_size=64", 64), ("--dry_run.rank=0", 16)):
        settings = parse({"train_micro_batch_size_per_gpu": 3}, option, num_ranks=None)
        assert settings.train.global_batch_size == 3 * num_ranks


@pytest.mark.parametrize(
    ("content", "option", "message"),
    [
        (FULL, "--train.micro_batch_size=4", "batch_size=32 is not --train.micro_.*=4 x grad.*=4 x 4 .*= 64"),
        (zero(stage=3, offload_param={"device": "cpu"}), "--zero.stage=2", "offload_param.device=cpu needs stage 3"),
    ],
)
def test_an_option_that_contradicts_the_rest_of_the_file_is_reported(parse, content: Any, option: str, message: str):
    with pytest.raises(ConfigError, match=message):
        parse(content, option)


def test_a_yaml_file_may_name_the_json_file(parse, tmp_path: Path):
    by_option = parse(zero(stage=3))
    by_file = parse_settings([*BASE, "--config", f"{{zero: {{deepspeed_config: {tmp_path / 'ds_config.json'}}}}}"])
    assert by_file == by_option


def test_the_written_settings_do_not_need_the_file(parse, tmp_path: Path):
    settings = parse(merged(zero(stage=3, offload_param={"device": "cpu"}), FULL, {"gradient_clipping": 0}))
    written = tmp_path / "config.yaml"
    written.write_text(settings.to_yaml())
    (tmp_path / "ds_config.json").unlink()
    assert parse_settings(["--config", str(written)]) == settings


def test_the_table_has_every_key_once(parse):
    content = merged(zero(stage=1, cpu_offload=True, sub_group_size=1e9), {"gradient_clipping": "auto"})
    tables: list[Table] = []
    parse(content, "--zero.stage=2", show=tables.append)
    text = text_of(tables)
    assert re.search(r"zero_optimization.stage=1 .*mapped .*zero.stage=2 by option", text)
    assert re.search(r"zero_optimization.cpu_offload=true .*mapped .*offload.mode=host", text)
    assert re.search(r"sub_group_size=1000000000 .*not needed .*one bucket at a time", text)
    assert re.search(r"gradient_clipping=auto .*left to the settings .*optimizer.clip_norm=1", text)
    assert all(text.count(name) == 1 for name in ("zero_optimization.stage=", "cpu_offload", "sub_group", "clipping="))


def text_of(tables: list[Table]) -> str:
    console = Console(width=200, file=StringIO())
    for table in tables:
        console.print(table)
    return console.file.getvalue()


def documented() -> str:
    """Return the table of docs/deepspeed.md; keys of a section with the same translation share a line."""
    lines: dict[tuple[str, str, str], list[str]] = {}
    for full_name, key in KEYS.items():
        section, _, name = full_name.rpartition(".")
        settings = ", ".join(f"`{setting}`" for setting in key.settings)
        accepted = ", ".join(f"`{json.dumps(value)}`" for value in key.accepted or ())
        note = "" if key.note == "is off" else key.note
        verdict = "mapped" if settings else "not needed" if note else "refused"
        refused = f"other than {accepted}: {key.refusal}" if accepted else key.refusal
        lines.setdefault((section, verdict, "; ".join(filter(None, [settings, note, refused]))), []).append(name)
    rows = [
        f"| {f'`{section}`: ' if section else ''}{', '.join(f'`{name}`' for name in names)} | {verdict} | {here} |"
        for (section, verdict, here), names in lines.items()
    ]
    return "\n".join(["| key | | here, and what is refused |", "| --- | --- | --- |", *rows])


def test_the_documentation_lists_every_key():
    assert documented() in (ROOT / "docs/deepspeed.md").read_text()
