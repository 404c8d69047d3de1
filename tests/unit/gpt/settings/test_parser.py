"""The layers of settings: YAML files, then DeepSpeed's configuration, then options, in any order of arguments."""

from itertools import permutations
from pathlib import Path

import pytest

from gpt.settings.option_names import messages_in_option_names
from gpt.settings.parser import TREE, parse_settings
from gpt.settings.settings import Settings
from gpt.settings.training import RampUpConfig
from gpt.settings.tree import help_text
from parallel.validation.errors import ConfigError
from tests.unit.gpt.settings.test_settings import BASE

BUDGET, COMPILED = "--activations.budget=0.5", "--train.compile=blocks"
FILE = "{optimizer: {lr: 0.5, eps: 0.25, clip_norm: 7.0}}"


def optimizer_of(*arguments: str) -> tuple[float, float, float]:
    settings: Settings = parse_settings([f"--config={BASE}", *arguments])
    return settings.optimizer.lr, settings.optimizer.eps, settings.optimizer.clip_norm


@pytest.fixture
def deepspeed_option(tmp_path: Path) -> str:
    path = tmp_path / "ds_config.json"
    path.write_text('{"gradient_clipping": 2.0, "optimizer": {"params": {"lr": 0.125}}}')
    return f"--zero.deepspeed_config={path}"


def test_a_later_file_wins_over_an_earlier_one():
    assert optimizer_of("--config", FILE, "--config={optimizer: {lr: 0.75}}") == (0.75, 0.25, 7.0)
    assert optimizer_of("--config={optimizer: {lr: 0.75}}", "--config", FILE) == (0.5, 0.25, 7.0)


def test_the_order_of_layers_is_not_that_of_the_command_line(deepspeed_option: str):
    for arguments in permutations([f"--config={FILE}", deepspeed_option, "--optimizer.clip_norm=3"]):
        assert optimizer_of(*arguments) == (0.125, 0.25, 3.0)
    for arguments in permutations([f"--config={FILE}", "--optimizer.clip_norm=3"]):
        assert optimizer_of(*arguments) == (0.5, 0.25, 3.0)


def test_an_option_of_a_group_gives_only_the_settings_that_it_names(deepspeed_option: str, tmp_path: Path):
    file = tmp_path / "group.yaml"
    file.write_text("{clip_norm: 3}")
    for option in (["--optimizer={clip_norm: 3}"], ["--optimizer", "{clip_norm: 3}"], [f"--optimizer={file}"]):
        assert optimizer_of(deepspeed_option, *option) == (0.125, 1e-8, 3.0)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("train: 5", "line 1: train=5 is not a group of settings; write its settings below train"),
        ("train:\n  seed: 1\n  stps: 2", "line 3: train.stps: there is no such setting; did you mean train.steps?"),
        ("trian:\n  steps: 2", "line 1: trian: there is no such setting; did you mean train?"),
        ("train.steps: 2", "line 1: train.steps contains a dot; write the setting below its group"),
        ("train:\n  seed: 1\n  steps: null", "line 3: train.steps=null is no value; choose an integer from 1"),
        ("train:\n  loss_scale:\n    initial: 1\n    minimum: 2", "line 4: train.loss_scale.minimum=2.0 is above init"),
        ("optimizer:\n  class_path: os.system", "line 2: optimizer.class_path: there is no such setting"),
    ],
)
def test_a_mistake_in_a_file_is_explained_with_the_file_and_the_line(tmp_path: Path, content: str, message: str):
    file = tmp_path / "c.yaml"
    file.write_text(content)
    with pytest.raises(ConfigError) as raised:
        parse_settings([f"--config={BASE}", "--config", str(file)])
    assert str(raised.value).startswith(f"{file}, {message}")
    assert str(raised.value).isprintable()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--train=5"], "train=5 is not a group of settings; write its settings below train"),
        (["--train.steps"], "--train.steps has no value; write --train.steps=VALUE"),
        (["--train.steps", "--train.seed=1"], "--train.steps has no value"),
        (["--optimizer.lr=1" + "0" * 400], "optimizer.lr=2**1328... is above 1e+30; choose a number from 0 to"),
        (["steps=3"], "steps=3 is not an option; options are --NAME=VALUE or --NAME VALUE"),
        (["--config={train: {stps: 3}}"], "--config, line 1: train.stps: there is no such setting"),
        (["--config", "{train: {steps: 3}"], "--config, line 1: expected ',' or '}'"),
        (["--train.ramp_up.start=4"], "train.ramp_up.increment, train.ramp_up.samples: not set"),
        (["--" + "x" * 10**5 + "=1"], "x" * 57 + "...: there is no such setting; see pretrain_gpt.py --help"),
    ],
)
def test_a_mistake_in_an_option_is_explained(arguments: list[str], message: str):
    with pytest.raises(ConfigError) as raised:
        parse_settings([f"--config={BASE}", *arguments])
    assert str(raised.value).startswith(message)
    assert str(raised.value).isprintable()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--model.hidden_size=100", "--model.num_heads=12"],
            "model.hidden_size=100 is not divisible by model.num_heads=12; choose a multiple of 12, such as hidden_",
        ),
        (["--model.dropout=1.0"], "model.dropout=1.0 is not below 1; choose a number of 0 or more and below 1"),
        (["--data.packing=best_fit"], "data.packing=best_fit needs data.mask_documents=true, because a packed"),
        (["--model.positions=rope", "--model.head_dim=3"], "model.positions=rope rotates pairs, and heads have an odd"),
        (
            ["--model.positions=rope", "--model.rope_scaling={factor: 8, low_freq_factor: 4, high_freq_factor: 4}"],
            "--model.rope_scaling, line 1: model.rope_scaling.low_freq_factor=4.0 is not below",
        ),
        (["--profile.steps=[5, 4]"], "profile.steps=[5, 4]: the first is after the last; choose ["),
        (["--dry_run.trace=x.json"], "dry_run.trace=x.json needs a cluster to project times on"),
        (["--optimizer.name=muon", "--optimizer.implementation=apex"], "optimizer.implementation=apex has AdamW only"),
        (["--optimizer.name=sgd", "--optimizer.cautious_decay=true"], "optimizer.cautious_decay=true needs decoupled"),
        (["--optimizer.implementation=apex", "--optimizer.cautious_decay=true"], "optimizer.implementation=apex has"),
        (["--optimizer.name=sgd", "--optimizer.momentum=0"], "optimizer.momentum=0.0 has no Nesterov momentum"),
        (["--dry_run.world_size=4", "--dry_run.rank=4"], "dry_run.rank=4 is not one of the 4 ranks; choose 0 to 3"),
        ([BUDGET, "--model.dropout=0"], f"{BUDGET[2:]} is for compiled blocks, and train.compile=none; choose"),
        ([BUDGET, COMPILED, "--model.dropout=0.1"], f"{BUDGET[2:]} does not work with model.dropout=0.1, for which"),
        (
            [BUDGET, COMPILED, "--activations.store=keep"],
            f"{BUDGET[2:]} divides what store=none keeps, and store=keep;",
        ),
    ],
)
def test_settings_that_contradict_each_other_are_explained(arguments: list[str], message: str):
    with pytest.raises(ConfigError) as raised, messages_in_option_names():
        parse_settings([f"--config={BASE}", *arguments])
    assert str(raised.value).startswith(message)


@pytest.mark.parametrize(
    "arguments",
    [
        ["--profile.steps=[5, 5]"],
        ["--dry_run.world_size=4", "--dry_run.rank=3"],
        ["--dry_run.rank=3"],
        ["--train.loss_scale={initial: 8, minimum: 8}"],
        ["--optimizer.name=sgd", "--optimizer.nesterov=false", "--optimizer.momentum=0"],
        ["--optimizer.name=muon", "--optimizer.momentum=0"],
        ["--optimizer.implementation=apex"],
        ["--data.mask_documents=true"],
        ["--model.mup_base_width=32", "--optimizer.name=adamw8bit"],
        [COMPILED, "--model.dropout=0", "--activations.budget=0"],
    ],
    ids=lambda arguments: arguments[-1],
)
def test_settings_that_just_suit_each_other_are_accepted(arguments: list[str]):
    parse_settings([f"--config={BASE}", *arguments])


def test_what_has_no_default_has_to_be_set():
    with pytest.raises(ConfigError, match=r"^model.num_layers, .*, model.vocab_size: not set; give a --config"):
        parse_settings(["--train.steps=3"])


def test_an_empty_group_changes_nothing():
    assert optimizer_of("--config={optimizer: {lr: 0.5}}", "--config={optimizer: }") == (0.5, 1e-8, 1.0)


def test_a_group_that_may_be_null_is_set_in_parts_and_unset():
    def ramp_up_of(*arguments: str) -> RampUpConfig | None:
        return parse_settings([f"--config={BASE}", *arguments]).train.ramp_up

    file = "--config={train: {ramp_up: {start: 2, increment: 2, samples: 9}}}"
    assert ramp_up_of(file, "--train.ramp_up.samples=5") == RampUpConfig(2, 2, 5)
    assert ramp_up_of(file, "--train.ramp_up=null") is None
    assert ramp_up_of("--train.ramp_up=null", "--train.ramp_up={start: 1, increment: 1, samples: 1}") == RampUpConfig(
        1, 1, 1
    )
    assert ramp_up_of() is None


def test_a_text_of_an_option_needs_no_quotes():
    settings = parse_settings([f"--config={BASE}", "--run.dir=5", "--wandb.name=null", "--data.path=[1:a, 2:b]"])
    assert (settings.run.dir, settings.wandb.name, settings.data.path) == ("5", None, ["1:a", "2:b"])


def test_the_config_of_a_run_that_was_moved_or_copied_needs_a_folder(tmp_path: Path):
    old, new = tmp_path / "old", tmp_path / "new"
    for folder in (old, new):
        folder.mkdir()
        (folder / "config.yaml").write_text(f"run:\n  dir: {old}\n")
        assert parse_settings([f"--config={BASE}", f"--config={folder}/config.yaml"]).run.dir == str(
            old
        )  # of no run yet
        (folder / "metrics.jsonl").touch()
    config = f"--config={new}/config.yaml"
    message = f"{new}/config.yaml, line 2: run.dir=.*, but the run is in {new}, .*; give --run.dir={new} to .*={old}$"
    with pytest.raises(ConfigError, match=message):
        parse_settings([f"--config={BASE}", config])
    for folder in (old, new):
        assert parse_settings([f"--config={BASE}", config, f"--run.dir={folder}"]).run.dir == str(folder)
    assert parse_settings([f"--config={BASE}", f"--config={old}/config.yaml"]).run.dir == str(old)


@pytest.mark.parametrize("word", ["-h", "--help"])
def test_the_help_is_printed_and_is_no_error(word, capsys):
    with pytest.raises(SystemExit) as ended:
        parse_settings(["--train.steps=3", word, "--not.read=1"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == help_text(Settings, TREE)
