"""Folders that a module is saved to: complete or as before, refused if damaged, never at the cost of other files."""

import shutil
import warnings
from collections import Counter
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from parallel.mesh import Axis
from parallel.validation.errors import ConfigError
from zero import (
    CautiousAdamW,
    SaveError,
    Saver,
    ZeroConfig,
    ZeroDataParallel,
    ZeroOptimizer,
    export,
    has_checkpoint,
    load,
    save,
)
from zero.checkpoint import writer
from zero.checkpoint.export import full_state_dict, write_folder
from zero.checkpoint.tensor_file import DTYPE_NAMES

Wrapped = tuple[ZeroDataParallel, ZeroOptimizer]


def wrap(width: int = 3, optimizer: type[torch.optim.Optimizer] = torch.optim.AdamW, lr: Any = 0.1) -> Wrapped:
    model = ZeroDataParallel(nn.Linear(2, width), Axis.trivial("data"), ZeroConfig(1))
    return model, ZeroOptimizer(model, optimizer, lr=lr)


def train(wrapped: Wrapped) -> Tensor:
    model, optimizer = wrapped
    model(torch.ones(1, 2)).square().mean().backward()
    optimizer.step()
    return model.module.weight.detach().clone()


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, Tensor]:
    wrapped = wrap()
    weight = train(wrapped)
    return save(tmp_path / "saved", *wrapped, {"step": 1}), weight


def test_a_checkpoint_is_replaced_by_that_of_a_later_save(saved: tuple[Path, Tensor]):
    folder, _ = saved
    (folder.parent / ".saved.partial").mkdir()
    (folder.parent / ".saved.partial/rank-00007.safetensors").touch()  # of an interrupted save on more ranks
    wrapped = wrap()
    weight = train(wrapped)
    assert save(folder, *wrapped, {"step": 2}) == folder
    other = wrap()
    assert load(folder, *other) == {"step": 2}
    assert other[0].module.weight.equal(weight)
    assert sorted(path.name for path in folder.iterdir()) == ["layout.json", "rank-00000.safetensors"]
    assert [path.name for path in folder.parent.iterdir()] == ["saved"]


def test_a_run_may_resume_with_cautious_weight_decay_and_without_it(saved: tuple[Path, Tensor]):
    plain, cautious, plain_again = wrap(), wrap(optimizer=CautiousAdamW), wrap()
    load(saved[0], *plain)
    load(saved[0], *cautious)
    load(save(saved[0].parent / "cautious", *cautious), *plain_again)
    assert train(plain_again).equal(train(plain))


def test_a_crash_while_a_checkpoint_is_replaced_leaves_the_old_one(
    saved: tuple[Path, Tensor], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    folder, weight = saved
    rename = Path.rename

    def crash(path: Path, target: Path) -> Path:
        if path.name.endswith(".partial"):
            raise OSError("power failure")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", crash)
    wrapped = wrap()
    train(wrapped)
    with pytest.raises(SaveError, match=r"checkpoint saved cannot be written to .*power failure; make room"):
        save(folder, *wrapped)
    assert not folder.exists()
    assert has_checkpoint(folder)
    other = wrap()
    assert load(folder, *other) == {"step": 1}
    before = folder.parent / ".saved.before"
    warning = f"{folder} was being replaced when the job ended; {before}, which it held before, is loaded"
    assert caplog.messages == [warning]
    assert other[0].module.weight.equal(weight)
    monkeypatch.undo()
    save(folder, *wrapped, {"step": 5})
    assert load(folder, *other) == {"step": 5}
    assert caplog.messages == [warning]


def test_what_a_crash_has_left_of_an_older_checkpoint_does_not_stand_in_the_way(saved: tuple[Path, Tensor]):
    folder, _ = saved
    shutil.copytree(folder, folder.parent / ".saved.before")  # the crash was after the new one had its name
    save(folder, *wrap(), {"step": 2})
    assert load(folder, *wrap()) == {"step": 2}
    assert [path.name for path in folder.parent.iterdir()] == ["saved"]


@pytest.mark.parametrize("link", ["saved", ".saved.partial", ".saved.before"])
def test_a_link_is_never_written_through_unless_it_is_the_folder_that_is_named(tmp_path: Path, link: str):
    disk = tmp_path / "disk" / "archive"
    disk.mkdir(parents=True)
    (tmp_path / link).symlink_to(disk)
    for step in range(3):
        save(tmp_path / "saved", *wrap(), {"step": step})
    assert load(tmp_path / "saved", *wrap()) == {"step": 2}
    is_target = link == "saved"
    assert [path.name for path in tmp_path.iterdir() if path.is_symlink()] == [link] * is_target
    assert len(list(disk.iterdir())) == 2 * is_target
    export(tmp_path / "saved" / "weights", wrap()[0])  # below a link


def test_of_two_jobs_that_save_to_one_folder_one_fails_by_name_and_the_folder_is_whole(
    saved: tuple[Path, Tensor], monkeypatch: pytest.MonkeyPatch
):
    """Let the second job begin and write its file when the first has written its own, and end after it."""
    folder, _ = saved
    first, second = Saver(*wrap()), Saver(*wrap())
    second_has_written, first_has_ended = Event(), Event()
    write_json = writer.write_json

    def wait_and_write(path: Path, content: dict[str, Any]) -> None:
        if content["extra"] == {"step": 2}:
            second.start(folder, {"step": 3})
            assert second_has_written.wait(60)
        else:
            second_has_written.set()
            assert first_has_ended.wait(60)
        write_json(path, content)

    monkeypatch.setattr(writer, "write_json", wait_and_write)
    first.start(folder, {"step": 2})
    with pytest.raises(SaveError, match=r"\.partial is gone: another job saves to this folder; choose"):
        first.wait()
    assert load(folder, *wrap()) == {"step": 1}
    first_has_ended.set()
    assert second.wait() == folder
    assert load(folder, *wrap()) == {"step": 3}
    assert [path.name for path in folder.parent.iterdir()] == ["saved"]


def test_a_folder_with_other_files_is_not_replaced(tmp_path: Path):
    (tmp_path / "work").mkdir()
    (tmp_path / "work/thesis.tex").touch()
    with pytest.raises(SaveError, match=r"it holds thesis\.tex"):
        save(tmp_path / "work", *wrap())
    with pytest.raises(OSError, match="not empty"):
        export(tmp_path / "work", wrap()[0])
    assert [path.name for path in (tmp_path / "work").iterdir()] == ["thesis.tex"]
    (tmp_path / "link").symlink_to(tmp_path / "work")
    with pytest.raises(ConfigError, match="holds the link link, and what it names might be written"):
        write_folder(tmp_path, [])


def test_a_damaged_or_foreign_checkpoint_is_refused(saved: tuple[Path, Tensor]):
    folder, _ = saved
    with pytest.raises(ConfigError, match=r"is of another model: weight is \[3, 2\] there and \[4, 2\] in this run"):
        load(folder, *wrap(width=4))
    with pytest.raises(ConfigError, match="was saved with the optimizer AdamW, this run has SGD"):
        load(folder, *wrap(optimizer=torch.optim.SGD))
    model = wrap()[0]
    groups = [{"params": [param]} for param in model.module.parameters()]
    with pytest.raises(ConfigError, match="has 1 groups of parameters, the optimizer has 2"):
        load(folder, model, ZeroOptimizer(model, torch.optim.AdamW, groups))
    assert not has_checkpoint(folder.parent)
    with pytest.raises(ConfigError, match="holds no complete checkpoint"):
        load(folder.parent, *wrap())
    later = save(folder.parent / "later", *wrap())
    file = "rank-00000.safetensors"
    shutil.copy(later / file, folder / file)
    with pytest.raises(ConfigError, match="belongs to another checkpoint: it is of rank 0 of save"):
        load(folder, *wrap())
    content = bytearray((later / file).read_bytes())
    content[-1] ^= 1
    (later / file).write_bytes(content)
    with pytest.raises(ConfigError, match="is damaged"):
        load(later, *wrap())


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"scheduler": {"milestones": Counter({30: 1})}}, r"extra\['scheduler'\]\['milestones'\] has the key 30"),
        ({"seen": [torch.ones(1)]}, r"extra\['seen'\]\[0\] is a Tensor"),
    ],
)
def test_extra_that_json_would_change_is_refused(tmp_path: Path, extra: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        save(tmp_path / "saved", *wrap(), extra)


def test_the_settings_of_groups_are_loaded_into_what_a_captured_step_reads(tmp_path: Path):
    wrapped = wrap()
    train(wrapped)
    wrapped[1].inner.param_groups[0] |= {"lr": 0.25, "betas": (0.5, 0.75), "initial_lr": 0.5}
    save(tmp_path / "saved", *wrapped)
    rate = torch.tensor(0.1)
    other = wrap()
    other[1].inner.param_groups[0]["lr"] = rate
    load(tmp_path / "saved", *other)
    group = other[1].inner.param_groups[0]
    assert group["lr"] is rate
    assert rate == 0.25
    assert group["betas"] == (0.5, 0.75)
    assert group["initial_lr"] == 0.5  # as a scheduler adds it


def test_a_save_between_micro_batches_warns_that_it_has_no_gradients(tmp_path: Path):
    model, optimizer = wrap()
    with model.accumulate():
        model(torch.ones(1, 2)).sum().backward()
    with pytest.warns(UserWarning, match="those of the micro-batches before this save are not in it"):
        save(tmp_path / "saved", model, optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        save(tmp_path / "saved", model)  # the weights alone
        optimizer.zero_grad()
        save(tmp_path / "saved", model, optimizer)


def wrap_in_groups(*names_and_rates: tuple[str, float]) -> Wrapped:
    model = ZeroDataParallel(nn.Linear(2, 3), Axis.trivial("data"), ZeroConfig(1))
    groups = [{"params": [getattr(model.module, name)], "lr": rate} for name, rate in names_and_rates]
    return model, ZeroOptimizer(model, torch.optim.AdamW, groups)


def test_groups_are_known_by_their_parameters(tmp_path: Path):
    train(saved := wrap_in_groups(("weight", 0.1), ("bias", 0.2)))
    save(tmp_path / "saved", *saved)
    loaded = wrap_in_groups(("bias", 0.3), ("weight", 0.4))
    load(tmp_path / "saved", *loaded)
    assert [group["lr"] for group in loaded[1].param_groups] == [0.2, 0.1]
    assert train(loaded).equal(train(saved))


def test_groups_of_fewer_parameters_keep_their_settings(tmp_path: Path):
    def wrap_layers(freezes: bool) -> Wrapped:
        module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        module[0].bias.requires_grad_(not freezes)
        model = ZeroDataParallel(module, Axis.trivial("data"), ZeroConfig(1))
        groups = [{"params": [getattr(layer, name) for layer in module], "lr": 0.0} for name in ("weight", "bias")]
        return model, ZeroOptimizer(model, torch.optim.SGD, groups)

    saved = wrap_layers(freezes=False)
    for group, rate in zip(saved[1].param_groups, (0.1, 0.2), strict=True):
        group["lr"] = rate
    save(tmp_path / "saved", *saved)
    load(tmp_path / "saved", *(loaded := wrap_layers(freezes=True)))
    assert [group["lr"] for group in loaded[1].param_groups] == [0.1, 0.2]


def test_a_group_of_the_parameters_of_several_groups_is_refused(tmp_path: Path):
    def wrap_blocks(first: int) -> Wrapped:
        model = ZeroDataParallel(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), Axis.trivial("data"), ZeroConfig(1))
        params = list(model.module.parameters())
        return model, ZeroOptimizer(model, torch.optim.SGD, [{"params": params[:first]}, {"params": params[first:]}])

    save(tmp_path / "saved", *wrap_blocks(1))
    with pytest.raises(ConfigError, match=r"has the 2 parameters of group 0 of the optimizer in 2 groups, whose"):
        load(tmp_path / "saved", *wrap_blocks(2))


class Coded(nn.Linear):
    """A layer with a buffer, and its values in a frozen parameter, which are pairs if the buffer is complex."""

    def __init__(self, values: Tensor):
        super().__init__(2, 3)
        codes = torch.view_as_real(values) if values.is_complex() else values
        self.codes = nn.Parameter(codes, requires_grad=False)
        self.register_buffer("table", values.clone())


def wrap_coded(values: Tensor, stage: int) -> Wrapped:
    model = ZeroDataParallel(Coded(values), Axis.trivial("data"), ZeroConfig(stage))
    return model, ZeroOptimizer(model, torch.optim.AdamW, lr=0.1)


@pytest.mark.parametrize("dtype", [*DTYPE_NAMES, torch.complex128], ids=str)
def test_frozen_parameters_and_buffers_of_any_type_are_saved(tmp_path: Path, dtype: torch.dtype):
    values = torch.arange(1.0, 6.0).remainder(2).exp2().to(dtype)
    save(tmp_path / "saved", *wrap_coded(values, 1))
    other = wrap_coded(torch.zeros_like(values), 3)
    load(tmp_path / "saved", *other)
    state = full_state_dict(other[0])
    codes = torch.view_as_complex(state["codes"]) if dtype.is_complex else state["codes"]
    for found in (codes, state["table"]):
        assert found.dtype is dtype
        assert found.cdouble().equal(values.cdouble())


def test_codes_are_not_loaded_as_weights_nor_types_written_that_the_format_lacks(tmp_path: Path):
    codes = torch.arange(5, dtype=torch.int8)
    save(tmp_path / "saved", *wrap_coded(codes, 1))
    with pytest.raises(ConfigError, match=r"master\.0' is torch.int8, torch.float32 is needed"):
        load(tmp_path / "saved", *wrap_coded(codes.float(), 1))
    with pytest.raises(ConfigError, match=r"^table is torch.complex128, which a safetensors file cannot hold"):
        export(tmp_path / "exported", wrap_coded(codes.to(torch.complex128), 1)[0])


def test_a_saver_reports_a_failure_at_the_next_save(tmp_path: Path):
    saver = Saver(*wrap())
    (tmp_path / "file").touch()
    saver.start(tmp_path / "file/saved")
    with pytest.raises(SaveError, match="checkpoint saved cannot be written"):
        saver.start(tmp_path / "saved")
    saver.start(tmp_path / "saved")
    assert saver.wait() == tmp_path / "saved"
    assert saver.wait() is None
