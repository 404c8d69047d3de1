"""Saves a model and its optimizer to a folder, and loads them at any stage, on any number of ranks.

FOLDER/layout.json               where each tensor is stored, the optimizer's settings, and `extra`
       rank-00000.safetensors    the flat shards that rank 0 owns, its random states, and what is not sharded
"""

import logging
import math
import re
import secrets
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from zlib import crc32

import torch

from parallel.validation.errors import ConfigError
from parallel.validation.paths import remove
from zero.checkpoint.adam import class_names, is_in_groups
from zero.checkpoint.layout_file import is_complete, no_checkpoint, read_layout
from zero.checkpoint.rank_state import RankState
from zero.checkpoint.schema import Schema
from zero.checkpoint.sealed_file import flush_folder
from zero.checkpoint.writer import CheckpointWriter, Publication, SaveError
from zero.core.step.parameter_groups import IMPLEMENTATION, load_settings
from zero.data_parallel import ZeroDataParallel
from zero.optimizer import ZeroOptimizer

logger = logging.getLogger(__name__)

SCHEMA: dict[str, Schema] = {
    "save": str,  # a random name, by which the files of one save are told from those of another
    "extra": dict,
    # Of each group of the optimizer; "members" are the checksums of its parameters' names, since version 0.2.
    "settings": [{"numbers": {str: float}, "tuples": {str: [float]}}],
}
OWN_FILE = re.compile(r"layout\.json|rank-[0-9]{5,}\.safetensors")
REMEDY = "make room or choose another folder (this save has changed nothing there)"


class Saver(CheckpointWriter):
    """A saver of a model and its optimizer to folders, one at a time, while training goes on.

    All ranks make the same calls. If it is asynchronous, `start` returns when the state is copied to host memory, which
    stays allocated, and training may go on while another thread writes the files.
    """

    def __init__(self, model: ZeroDataParallel, optimizer: ZeroOptimizer | None = None, *, is_async: bool = True):
        super().__init__(RankState(model, optimizer), Publication(REMEDY, _replace), is_async=is_async)

    def start(self, folder: str | Path, extra: Mapping[str, Any] | None = None) -> None:
        """Wait for the save before this one, and begin to save to `folder`; a checkpoint that it holds is replaced.

        `extra` is kept as JSON, the first rank's: the step, the state of a scheduler or a sampler. Raises SaveError on
        all ranks if the save before this one has failed, and ValueError if `extra` would not be the same after loading.
        """
        if self._state.optimizer is not None and self._state.model.guard.holds_gradients:
            warnings.warn(
                "a checkpoint has no gradients: those of the micro-batches before this save are not in it; save after "
                "`optimizer.step()`",
                stacklevel=3,
            )
        extra = dict(extra or {})
        _check_json(extra, "extra")
        self.wait()
        final = Path(folder).expanduser().resolve()
        if self._rank == 0:  # before any rank writes
            _remove_partial(final)
        save = self.agree(final, secrets.token_hex(6))
        content = {"save": save, "extra": extra, "settings": _settings(self._state)}
        self.begin(final, content, f"save {save}", final.name)


def save(
    folder: str | Path,
    model: ZeroDataParallel,
    optimizer: ZeroOptimizer | None = None,
    extra: Mapping[str, Any] | None = None,
) -> Path:
    """Save a model and its optimizer, or the weights alone, and return the folder when it is complete.

    All ranks call it.

    A crash at any moment leaves the checkpoint that the folder held before, or the new one. `extra` and the errors are
    those of `Saver.start`. Raises SaveError on all ranks if a rank cannot write.
    """
    saver = Saver(model, optimizer, is_async=False)
    saver.start(folder, extra)
    saved = saver.wait()
    assert saved is not None
    return saved


def load(folder: str | Path, model: ZeroDataParallel, optimizer: ZeroOptimizer | None = None) -> dict[str, Any]:
    """Load what `save` or a `Saver` has written, and return its `extra`. All ranks call it.

    The stage, the number of ranks, the tensor size, the buckets and the dtypes may be others. The settings of the
    optimizer's groups, such as the learning rate, are loaded too. Without `optimizer`, weights and buffers are loaded,
    and nothing else changes. Raises ConfigError if the folder does not hold a
    complete checkpoint of this model, or if it is damaged; all its files are read and checked first.
    """
    checkpoint = _find(Path(folder).expanduser().resolve())
    layout = read_layout(checkpoint, SCHEMA)
    state = RankState(model, optimizer)
    state.check_fits(checkpoint, layout, "build the model that was saved")
    groups = optimizer.param_groups if optimizer else []
    if optimizer:
        layout |= _in_order_of_groups(state, optimizer, layout, checkpoint)
    state.load(checkpoint, layout, f"save {layout['save']}")
    if optimizer and is_in_groups(layout["optimizer"], class_names(optimizer)):
        logger.warning(
            'checkpoint %s has groups with update="adamw", which may have had another order: the settings of groups, '
            "such as the learning rate, are not loaded",
            checkpoint,
        )
        return layout["extra"]
    for group, settings in zip(groups, layout["settings"], strict=bool(optimizer)):
        saved = settings["numbers"] | settings["tuples"]
        load_settings(group, {name: value for name, value in saved.items() if name in group})
    return layout["extra"]


def _in_order_of_groups(
    state: RankState, optimizer: ZeroOptimizer, layout: Mapping[str, Any], checkpoint: Path
) -> dict[str, Any]:
    """Return what a layout has of each group in the order of the optimizer's groups, which are known by their members.

    Raises ConfigError if the parameters of a group were in several groups. Earlier versions do not name members.
    """
    settings, counters, groups = layout["settings"], layout["optimizer_counters"], optimizer.param_groups
    if len(groups) != len(settings) or len(counters) != len(settings):
        raise ConfigError(
            f"checkpoint {checkpoint} has {len(settings)} groups of parameters, the optimizer has {len(groups)}; give "
            "it the groups that were saved"
        )
    saved = [set(of_group.get("members", ())) for of_group in settings]
    if len(groups) == 1 or not any(saved):
        return {}
    order = []
    for number, members in enumerate(_members(state, optimizer)):
        found = [group for group, those in enumerate(saved) if those & set(members)] if members else [number]
        if len(found) != 1:
            raise ConfigError(
                f"checkpoint {checkpoint} has the {len(members)} parameters of group {number} of the optimizer in "
                f"{len(found)} groups, whose settings they cannot have together; give it the groups that were saved"
            )
        order += found
    return {"settings": [settings[n] for n in order], "optimizer_counters": [counters[n] for n in order]}


def _members(state: RankState, optimizer: ZeroOptimizer) -> list[list[int]]:
    """Return the checksums of the names of the trainable parameters of each group."""
    found: list[list[int]] = [[] for _ in optimizer.param_groups]
    for name, param in state.model.module.named_parameters():
        if param in optimizer.pieces.group_of:
            found[optimizer.pieces.group_of[param]].append(crc32(name.encode()))
    return found


def has_checkpoint(folder: str | Path) -> bool:
    """Return whether `load` finds a complete checkpoint in the folder."""
    return is_complete(_current(Path(folder).expanduser().resolve()))


def _find(folder: Path) -> Path:
    """Return the checkpoint of a folder. Raises ConfigError if there is none."""
    found = _current(folder)
    if not is_complete(found):
        raise ConfigError(f"{folder} {no_checkpoint(folder)}")
    if found != folder:
        logger.warning("%s was being replaced when the job ended; %s, which it held before, is loaded", folder, found)
    return found


def _current(folder: Path) -> Path:
    """Return the folder, or what it held before, if a crash has interrupted its replacement."""
    before = _name_before(folder)
    return before if not folder.exists() and is_complete(before) else folder


def _name_before(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.before")


def _remove_partial(final: Path) -> None:
    """Remove what interrupted saves to the folder have left. One that another job has under way fails, by name."""
    name = re.compile(rf"\.{re.escape(final.name)}(\.[0-9a-f]{{12}}-[0-9]+)?\.partial")
    for path in final.parent.glob(".*.partial"):
        if name.fullmatch(path.name):
            remove(path)


def _replace(partial: Path, final: Path) -> None:
    """Give a complete checkpoint its final name. Raises SaveError if the folder of this name holds other files."""
    if final.exists():
        for path in final.iterdir():
            if not OWN_FILE.fullmatch(path.name):
                raise SaveError(f"it holds {path.name}, which no checkpoint has, and would be replaced")
        remove(_name_before(final))
        final.rename(_name_before(final))
    partial.rename(final)
    # Before the old one is deleted: a crash must not leave neither of them.
    flush_folder(final.parent)
    remove(_name_before(final))


def _settings(state: RankState) -> list[dict[str, Any]]:
    """Return the numbers, and the tuples of numbers, among the settings of each group, and its members."""
    optimizer = state.optimizer
    if optimizer is None:
        return []
    found = []
    for number, members in enumerate(_members(state, optimizer)):
        group = optimizer.param_groups[number]
        defaults = optimizer.update_of(number).optimizer.defaults
        names = [name for name in defaults if name in group and name not in IMPLEMENTATION]
        values = {name: _plain(group[name]) for name in names}
        found.append(
            {
                "members": members,
                "numbers": {name: value for name, value in values.items() if _is_number(value)},
                "tuples": {
                    name: [_plain(item) for item in value]
                    for name, value in values.items()
                    if isinstance(value, (tuple, list)) and all(_is_number(_plain(item)) for item in value)
                },
            }
        )
    return found


def _plain(value: Any) -> Any:
    """Return a tensor with one element, or a flag such as the mode of a schedule-free optimizer, as a number."""
    value = value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value
    return int(value) if isinstance(value, bool) else value


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def _check_json(value: Any, place: str) -> None:
    """Raise ValueError if JSON would change a value, which is at `place` in `extra`; tuples become lists."""
    if isinstance(value, dict):
        for key, item in value.items():
            if type(key) is not str:
                raise ValueError(f"{place} has the key {key!r}, JSON has only strings; convert it, or leave it out")
            _check_json(item, f"{place}[{key!r}]")
    elif isinstance(value, (list, tuple)):
        for number, item in enumerate(value):
            _check_json(item, f"{place}[{number}]")
    elif type(value) not in (int, float, str, bool, type(None)):
        raise ValueError(f"{place} is a {type(value).__name__}, which JSON does not have; convert it, or leave it out")
