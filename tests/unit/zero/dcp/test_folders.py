"""The rectangles of flat ranges, and folders of `torch.distributed.checkpoint` that are damaged or hostile."""

import io
import pickle
import pickletools
import random
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from parallel.mesh import Axis
from parallel.validation.errors import ConfigError
from tests.fuzz import bounded_work
from tests.oracle.deepspeed_files import write_deepspeed, write_universal
from zero import (
    DistributedState,
    LossScale,
    Muon,
    ZeroConfig,
    ZeroDataParallel,
    ZeroOptimizer,
    load,
    load_distributed,
    save,
)
from zero.checkpoint.folders.folder import DistributedFolder
from zero.checkpoint.folders.safe_reader import METADATA, SafeReader
from zero.core.partition.layout import rectangles

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


class Code:
    """An object that runs a command when it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return print, ("executed",)


def test_a_value_that_would_execute_code_is_refused_without_the_advice_to_execute_it(tmp_path: Path, capsys: Any):
    model = ZeroDataParallel(torch.nn.Linear(2, 2), Axis.trivial("data"), ZeroConfig(1))
    content = DistributedState(model).state_dict()
    dcp.save(content | {"global_steps": Code()}, checkpoint_id=tmp_path, no_dist=True)
    capsys.readouterr()
    with pytest.raises(ConfigError, match=r"could execute code\); choose another folder$") as raised:
        DistributedFolder(tmp_path).count("global_steps")
    assert "weights_only" not in str(raised.value)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("shape", [(), (7,), (3, 4), (2, 3, 4), (2, 1, 3, 2)])
def test_any_range_is_cut_into_rectangles_that_are_consecutive(shape: tuple[int, ...]):
    numbers = torch.arange(torch.Size(shape).numel()).view(shape)
    for start in range(numbers.numel()):
        for stop in range(start, numbers.numel() + 1):
            found = list(rectangles(shape, range(start, stop)))
            assert len(found) <= max(2 * len(shape) - 1, 1)
            cut = [numbers[tuple(slice(o, o + s) for o, s in zip(*both, strict=True))].flatten() for both in found]
            assert torch.cat([torch.arange(0), *cut]).tolist() == list(range(start, stop))


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    losses = []
    for _ in range(2):
        optimizer.zero_grad()
        loss = model(torch.ones(3, 6)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("kind", [Muon, torch.optim.RMSprop, torch.optim.Adagrad])
def test_states_of_any_kind_for_each_element_and_frozen_parameters_are_loaded(tmp_path: Path, kind: Any):
    def run() -> tuple[ZeroDataParallel, ZeroOptimizer]:
        torch.manual_seed(1)
        module = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Linear(5, 4))
        module[1].bias.requires_grad_(False)
        model = ZeroDataParallel(module, Axis.trivial("data"), ZeroConfig(2))
        of_weights = kind([module[0].weight, module[1].weight], lr=0.01)
        of_biases = torch.optim.SGD([module[0].bias, module[1].bias], lr=0.01, momentum=0.9)
        return model, ZeroOptimizer(model, [of_weights, of_biases])

    model, optimizer = run()
    train(model, optimizer)
    dcp.save(DistributedState(model, optimizer).state_dict(), checkpoint_id=tmp_path, no_dist=True)
    expected = train(model, optimizer)
    model, optimizer = run()
    load_distributed(tmp_path, model, optimizer)
    assert train(model, optimizer) == expected


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("write", [partial(write_deepspeed, num_ranks=1), write_universal])
def test_a_run_of_deepspeed_goes_on_from_one_rank_and_from_universal_files(tmp_path: Path, write: Any, stage: int):
    def module() -> torch.nn.Module:
        linears = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.BatchNorm1d(5), torch.nn.Linear(5, 4))
        linears[0].weight.requires_grad_(False)
        return linears

    theirs = module()
    adamw = torch.optim.AdamW(theirs.parameters(), lr=0.01)
    train(theirs, adamw)
    write(tmp_path, stage=stage, module=theirs, optimizer=adamw)
    model = ZeroDataParallel(module(), Axis.trivial("data"))
    optimizer = ZeroOptimizer(model, torch.optim.AdamW)
    load_distributed(tmp_path, model, optimizer)
    assert train(model, optimizer) == pytest.approx(train(theirs, adamw), rel=1e-6)


def saved(folder: Path, module: torch.nn.Module, kind: Any, **settings: Any) -> Path:
    """Save a module, and its optimizer after a step."""
    model = ZeroDataParallel(module, Axis.trivial("data"))
    optimizer = ZeroOptimizer(model, kind, **settings)
    train(model, optimizer)
    dcp.save({"app": DistributedState(model, optimizer)}, checkpoint_id=folder, no_dist=True)
    return folder


def test_names_may_end_in_those_of_others(tmp_path: Path):
    """The first name is 0.weight, and model.1.0.weight ends in it too."""
    first, second = (
        torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.Sequential(torch.nn.Linear(6, 6))) for _ in range(2)
    )
    dcp.save({"model": first.state_dict()}, checkpoint_id=tmp_path, no_dist=True)
    load_distributed(tmp_path, ZeroDataParallel(second, Axis.trivial("data")))
    assert all(map(torch.equal, first.parameters(), second.parameters()))


@pytest.mark.parametrize("is_there", [True, False])
def test_groups_get_the_settings_of_their_parameters(tmp_path: Path, is_there: bool):
    """The groups of the folder have another order, or it has one group of all parameters."""

    def groups_of(module: torch.nn.Module) -> list[dict[str, Any]]:
        return [{"params": [module.weight], "lr": 0.1}, {"params": [module.bias], "lr": 0.2}]

    first, second = torch.nn.Linear(6, 4), torch.nn.Linear(6, 4)
    saved(tmp_path, first, torch.optim.AdamW, groups=groups_of(first) if is_there else None, lr=0.3)
    model = ZeroDataParallel(second, Axis.trivial("data"))
    optimizer = ZeroOptimizer(model, torch.optim.AdamW, groups_of(second)[::-1])
    load_distributed(tmp_path, model, optimizer)
    assert [group["lr"] for group in optimizer.param_groups] == ([0.2, 0.1] if is_there else [0.3, 0.3])


@pytest.mark.parametrize("names", ["ab", "ba"])
def test_settings_are_those_of_the_optimizer_whose_states_are_loaded(tmp_path: Path, names: str):
    """The folder has two models, whose first parameters have the same name."""

    def start(num_layers: int, lr: float) -> tuple[ZeroDataParallel, ZeroOptimizer]:
        layers = (torch.nn.Linear(6, 6) for _ in range(num_layers))
        model = ZeroDataParallel(torch.nn.Sequential(*layers), Axis.trivial("data"))
        return model, ZeroOptimizer(model, torch.optim.AdamW, lr=lr)

    there = {name: start(num_layers, lr) for name, num_layers, lr in zip(names, (2, 1), (0.5, 0.25), strict=True)}
    for model, optimizer in there.values():
        train(model, optimizer)
    dcp.save({name: DistributedState(*there[name]) for name in sorted(there)}, checkpoint_id=tmp_path, no_dist=True)
    model, optimizer = start(2, 1.0)
    load_distributed(tmp_path, model, optimizer)
    assert [group["lr"] for group in optimizer.param_groups] == [0.5]


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_settings_may_be_tensors_and_states_be_none(tmp_path: Path, kind: Any):
    """SGD without momentum has no states."""
    saved(tmp_path, torch.nn.Linear(6, 4), kind, lr=torch.tensor(0.25))
    for lr in (1.0, torch.tensor(1.0)):
        model = ZeroDataParallel(torch.nn.Linear(6, 4), Axis.trivial("data"))
        optimizer = ZeroOptimizer(model, kind, lr=lr)
        load_distributed(tmp_path, model, optimizer)
        (group,) = optimizer.param_groups
        assert group["lr"] == 0.25
        assert type(group["lr"]) is type(lr)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    dcp.save({"model": torch.nn.Linear(5, 4).state_dict()}, checkpoint_id=tmp_path / "saved", no_dist=True)
    return tmp_path / "saved"


def save_by_deepspeed(folder: Path, stage: int | str) -> None:
    module = torch.nn.Linear(5, 4)
    optimizer = torch.optim.AdamW(module.parameters())
    module(torch.ones(5)).sum().backward()
    optimizer.step()
    if stage == "universal":
        write_universal(folder, 2, module, optimizer)
    else:
        write_deepspeed(folder, int(stage), 2, module, optimizer)


def load_into_linear(folder: Path) -> None:
    load_distributed(folder, ZeroDataParallel(torch.nn.Linear(5, 4), Axis.trivial("data")))


def test_a_folder_names_no_files_elsewhere(folder: Path):
    load_into_linear(folder)
    metadata = SafeReader(folder).read_metadata()
    for index, info in metadata.storage_data.items():
        metadata.storage_data[index] = type(info)("../" + info.relative_path, info.offset, info.length)
    (folder / METADATA).write_bytes(pickle.dumps(metadata))
    with pytest.raises(ConfigError, match="does not describe the files of its folder"):
        load_into_linear(folder)


def test_files_of_deepspeed_that_are_missing_or_not_read_are_named(tmp_path: Path):
    save_by_deepspeed(tmp_path, 3)
    _, second = sorted((tmp_path / "global_step3").glob("*optim_states.pt"))
    second.rename(tmp_path / "moved")
    with pytest.raises(ConfigError, match="has files of 1 ranks, and was saved by 2 data-parallel x 1 model-parallel"):
        load_into_linear(tmp_path)
    with pytest.raises(ConfigError, match="is a checkpoint of DeepSpeed; load it by load_distributed"):
        load(
            tmp_path,
            model := ZeroDataParallel(torch.nn.Linear(5, 4)),
            optimizer := ZeroOptimizer(model, torch.optim.SGD),
        )
    save(tmp_path / "here", model, optimizer)
    with pytest.raises(ConfigError, match="load it by `load`"):
        load_distributed(tmp_path / "here", model)


def as_grad_scaler(folder: Path, model: ZeroDataParallel, optimizer: ZeroOptimizer) -> None:
    state = {"app": DistributedState(model, optimizer).state_dict(), "scaler": {"scale": 1024.0, "_growth_tracker": 5}}
    dcp.save(state, checkpoint_id=folder, no_dist=True)


@pytest.mark.parametrize("is_dynamic", [True, False])
@pytest.mark.parametrize(
    "save_scale", [as_grad_scaler, lambda folder, *_: save_by_deepspeed(folder, 2)], ids=["GradScaler", "DeepSpeed"]
)
def test_a_dynamic_loss_scale_is_loaded(tmp_path: Path, save_scale: Any, is_dynamic: bool):
    model = ZeroDataParallel(torch.nn.Linear(5, 4), Axis.trivial("data"))
    scale = LossScale(2.0, is_dynamic=is_dynamic)
    optimizer = ZeroOptimizer(model, torch.optim.AdamW, loss_scale=scale)
    save_scale(tmp_path / "saved", model, optimizer)
    load_distributed(tmp_path / "saved", model, optimizer)
    found = {name: tensor.item() for name, tensor in scale.state().items()}
    assert found == {"scale": 1024, "num_good": 5, "num_overflowed": 0} if is_dynamic else found["scale"] == 2


def assert_one_line_if_damaged(folder: Path, num_cases: int, load: Callable[[Path], object]) -> None:
    """Damage files of a folder, one after the other, and load it.

    A change that no part of the format notices is loaded: its values have no checksums.
    """
    chance = random.Random(1)
    whole = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    errors = []
    for _ in range(num_cases):
        path = chance.choice(sorted(whole))
        content = bytearray(whole[path])
        for _ in range(chance.randint(1, 4)):
            content[chance.randrange(len(content))] = chance.randrange(256)
        path.write_bytes(content[: chance.choice([len(content), chance.randrange(len(content))])])
        try:
            with bounded_work():
                load(folder)
        except ConfigError as error:
            errors.append(str(error))
        path.write_bytes(whole[path])
    assert len(errors) > num_cases / 2
    assert not [error for error in errors if "\n" in error]


def hostile(content: bytes, chance: random.Random, made: Path) -> bytes:
    """Return a pickle, or an archive of one, with a call that makes a folder when it is unpickled, at any place."""
    if not content.startswith(b"PK"):
        _, *places = (place for _, _, place in pickletools.genops(content))
        at, argument = chance.choice(places), str(made).encode()
        call = b"cposix\nmkdir\n(X" + len(argument).to_bytes(4, "little") + argument + b"tR"
        return content[:at] + call + content[at:]
    changed = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(content)) as there, zipfile.ZipFile(changed, "w") as here:
        for name in there.namelist():
            part = there.read(name)
            here.writestr(name, hostile(part, chance, made) if name.endswith("data.pkl") else part)
    return changed.getvalue()


def assert_nothing_is_executed(folder: Path, num_cases: int, load: Callable[[Path], object]) -> None:
    chance, errors = random.Random(1), []
    pickles = [*folder.rglob("*_states.pt"), *folder.rglob(METADATA)]
    for path in (chance.choice(pickles) for _ in range(num_cases)):
        content = path.read_bytes()
        path.write_bytes(hostile(content, chance, folder / "made"))
        with pytest.raises(ConfigError) as error:
            load(folder)
        errors.append(str(error.value))
        path.write_bytes(content)
        assert not (folder / "made").exists()
    assert sum("posix.mkdir" in error for error in errors) > num_cases / 2
    assert not [error for error in errors if "\n" in error]


@pytest.mark.parametrize("num_cases", [15, pytest.param(1000, marks=pytest.mark.full)])
@pytest.mark.parametrize("stage", [None, 2, 3, "universal"])
def test_a_damaged_or_hostile_folder_is_an_error_of_one_line(folder: Path, stage: Any, num_cases: int):
    if stage is not None:
        folder = folder.with_name("deepspeed")
        save_by_deepspeed(folder, stage)
    assert_one_line_if_damaged(folder, num_cases, load_into_linear)
    assert_nothing_is_executed(folder, num_cases, load_into_linear)
