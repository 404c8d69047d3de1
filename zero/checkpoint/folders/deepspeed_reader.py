"""A reader of the checkpoints of DeepSpeed's ZeRO, stages 1 to 3, as a storage of `torch.distributed.checkpoint`.

    *_model_states.pt    names, shapes and order of the parameters; the frozen ones, and buffers
    *_optim_states.pt    of one rank each: for each parameter group, one flat tensor of fp32 weights and of each moment

    stages 1, 2    a group's parameters lie one after the other, and ranks have consecutive parts of them together
    stage 3        each rank has ceil(elements / ranks) elements of every parameter, the last ones padded
    universal      a folder for each parameter in zero/, with a file of its fp32 weights and of each moment, whole: what
                   DeepSpeed's `ds_to_universal` makes of the files of any run, also of one with model parallelism

Each rank's part of a parameter becomes rectangles of it, which DCP loads at any layout. Files are mapped to memory, and
only what a rank needs is read. They are unpickled as weights are, and objects of the classes in `IGNORED` do nothing.
The format is that of DeepSpeed 0.14 to 0.19.
"""

import io
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem

from parallel.validation.errors import ConfigError, first_line
from parallel.validation.files import read_limited
from zero.checkpoint.folders.safe_reader import FolderReader, load_plain
from zero.checkpoint.schema import shown
from zero.core.partition.layout import overlap, rectangles

GROWTH_TRACKER = "_growth_tracker"  # in the state of torch's GradScaler: steps since the loss scale has changed
LATEST, MODEL_STATES, OPTIM_STATES = "latest", "*_model_states.pt", "*_optim_states.pt"
UNIVERSAL, WHOLE, COMMON = "zero", "zero/*/*.pt", "zero/optimizer_state.pt"
FLATS, FLATS_OF_STAGE_3 = "single_partition_of_fp32_groups", "fp32_flat_groups"
MAX_NAME_BYTES = 1000  # of the name in `latest`
COUNTERS = ("global_steps", "global_samples")
WEIGHTS, MOMENTS, GROUPS = "model", "optim.state", "optim.param_groups"  # the beginnings of keys
CLASSES = {
    "checkpoint": ("universal_checkpoint.SubparamShape",),
    "runtime.fp16": ("loss_scaler.LossScaler", "loss_scaler.DynamicLossScaler"),
    "runtime.zero": ("config.ZeroStageEnum",),
    "utils.tensor_fragment": ("fragment_address",),
}
IGNORED = [f"deepspeed.{package}.{name}" for package, names in CLASSES.items() for name in names]


class _Inert:
    """An object of a class that is not imported, with the attributes that were pickled."""

    def __init__(self, *values: Any):
        self.values = values


class Fragment(NamedTuple):
    """The part of a parameter that a rank has: its elements, and where they begin in the rank's flat tensor."""

    name: str
    elements: range
    flat: int
    start: int


class DeepSpeedReader(FolderReader):
    """A reader of a folder that DeepSpeed's `save_checkpoint` has written, or of one step in it.

    Keys are those of `get_state_dict` of torch: "model.NAME" are the fp32 weights, "optim.state.NAME.exp_avg" moments.
    `read_metadata` raises ConfigError if the files are damaged, or name a class that no such file has.
    """

    def __init__(self, folder: Path):
        super().__init__(folder)
        self._folder = folder
        self._aliases: dict[str, str] = {}
        self._metadata = Metadata({}, storage_data={})  # of each piece: the tensor itself, mapped to memory, or a value

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return names, shapes and rectangles of what the files have."""
        if not self._metadata.state_dict_metadata:
            try:
                self._read()
            except ConfigError:
                raise
            except Exception as error:  # damaged bytes raise almost anything
                raise ConfigError(
                    f"{self._folder} is not a ZeRO checkpoint of DeepSpeed ({first_line(error)}); choose another folder"
                ) from error
        return self._metadata

    def stored(self, item: ReadItem) -> io.BytesIO | Tensor:
        """Return the piece that an item is a part of."""
        index = MetadataIndex(item.storage_index.fqn, item.storage_index.offset)
        if item.type is not LoadItemType.BYTE_IO:
            return self.storage_data[index]
        content = io.BytesIO()
        torch.save(self.storage_data[index], content)
        content.seek(0)
        return content

    def _read(self) -> None:
        if (latest := self._folder / LATEST).is_file():
            name = Path(read_limited(latest, MAX_NAME_BYTES).decode().strip()).name
            if not (self._folder / name).is_dir():
                raise ConfigError(f"{latest} names {shown(name)}, which is no folder beside it; it is damaged")
            self._folder /= name
        is_universal = (self._folder / UNIVERSAL).is_dir()  # whose other model-parallel ranks have nothing more
        models = list(self._files(f"*mp_rank_00{MODEL_STATES}" if is_universal else MODEL_STATES).values())
        self._aliases = models[0]["shared_params"]
        common = self._add_universal(models[0]["param_shapes"]) if is_universal else self._add_flat(models)
        self._add_untrained(models)
        values = {name: models[0][name] for name in COUNTERS if name in models[0]}
        values |= _loss_scale(common.get("loss_scaler"))
        for number, group in enumerate(common["param_groups"]):
            values |= {f"{GROUPS}.{number}.{name}": value for name, value in group.items()}
        for key, value in values.items():
            self._metadata.state_dict_metadata[key] = BytesStorageMetadata()
            self._metadata.storage_data[MetadataIndex(key)] = value
        self._check_sizes()

    def _add_universal(self, groups: list[Mapping[str, torch.Size]]) -> dict[str, Any]:
        """Add whole tensors; return what the optimizer has beside them. Those of stage 3 are flat, without counters."""
        shapes = {name: shape for group in groups for name, shape in group.items()}
        for path, content in self._files(WHOLE).items():
            name, has_shape = path.parent.name, isinstance(content, dict)
            value = torch.as_tensor(content["param"] if has_shape else content)
            shape = value.shape if has_shape or not value.dim() else shapes[name]
            key = f"{WEIGHTS}.{name}" if path.stem == "fp32" else f"{MOMENTS}.{name}.{path.stem}"
            self._add(key, shape, range(shape.numel()), value.flatten())
        (common,) = self._files(COMMON).values()
        for number, state in common.get("optimizer_state_dict", {}).get("state", {}).items():
            for name in groups[number] if "step" in state else ():
                self._add(f"{MOMENTS}.{name}.step", torch.Size(), range(1), torch.as_tensor(state["step"]).flatten())
        return common

    def _add_flat(self, models: list[dict[str, Any]]) -> dict[str, Any]:
        """Add the parts of all ranks; return what the optimizer has beside them."""
        states, described = [rank["optimizer_state_dict"] for rank in self._files(OPTIM_STATES).values()], models[0]
        sizes = num_data, num_model = described["dp_world_size"], described["mp_world_size"]
        if sizes != (len(states), 1) or len(models) not in (1, len(states)):
            raise ConfigError(
                f"{self._folder} has files of {len(states)} ranks, and was saved by {num_data} data-parallel x "
                f"{num_model} model-parallel ones; copy the files of all ranks; if these are model-parallel, convert "
                "them by ds_to_universal of DeepSpeed, and load its folder"
            )
        shapes = {name: shape for group in described["param_shapes"] for name, shape in group.items()}
        for rank, state in enumerate(states):
            if FLATS_OF_STAGE_3 in state:
                flats, inner = state[FLATS_OF_STAGE_3], state["optimizer_state_dict"]
                fragments = _of_stage_3(shapes, flats, rank, len(states))
            else:
                flats, inner = state[FLATS], state["base_optimizer_state"]
                fragments = _of_stages_1_and_2(described["param_shapes"], states, rank)
            for name, elements, number, start in fragments:
                stop = start + len(elements)
                self._add(f"{WEIGHTS}.{name}", shapes[name], elements, flats[number][start:stop])
                for kind, value in inner["state"][number].items():
                    key, value = f"{MOMENTS}.{name}.{kind}", torch.as_tensor(value)  # its own Adam counts in int
                    if value.dim():
                        self._add(key, shapes[name], elements, value[start:stop])
                    elif key not in self._metadata.state_dict_metadata:  # a counter, which all ranks have
                        self._add(key, torch.Size(), range(1), value.flatten())
        return {**states[0], "param_groups": inner["param_groups"]}

    def _add_untrained(self, models: list[dict[str, Any]]) -> None:
        """Add buffers and frozen parameters, of which each rank has a part in stage 3."""
        known = frozenset(self._metadata.state_dict_metadata)
        for rank, model in enumerate(models):
            for name, shape in (model.get("frozen_param_shapes") or {}).items():
                if f"{WEIGHTS}.{name}" not in known:
                    own = _share(shape.numel(), rank, len(models))
                    values = model["frozen_param_fragments"][name].flatten()
                    self._add(f"{WEIGHTS}.{name}", shape, own, values[: len(own)])
        for name, value in models[0]["module"].items():
            if f"{WEIGHTS}.{name}" not in self._metadata.state_dict_metadata:
                self._add(f"{WEIGHTS}.{name}", value.shape, range(value.numel()), value.flatten())

    def _files(self, pattern: str) -> dict[Path, Any]:
        """Return the contents of the files of all ranks, in their order."""
        paths = sorted(self._folder.glob(pattern), key=_rank_of)
        if not paths:
            raise ConfigError(f"{self._folder} has no file {pattern}; choose the folder that has those of all ranks")
        with torch.serialization.safe_globals([(_Inert, name) for name in IGNORED]):
            for path in paths:
                if foreign := torch.serialization.get_unsafe_globals_in_checkpoint(path):
                    raise ConfigError(f"{path} names {foreign[0]}, which no such file has; choose another folder")
            return {path: load_plain(path, map_location="cpu", mmap=True) for path in paths}

    def _add(self, key: str, shape: torch.Size, elements: range, values: Tensor) -> None:
        """Add consecutive elements of a tensor as rectangles, also under the other names of a tied parameter."""
        for alias, name in self._aliases.items():
            if key == f"{WEIGHTS}.{name}":
                self._add(f"{WEIGHTS}.{alias}", shape, elements, values)
        if values.numel() != len(elements):
            raise ConfigError(
                f"{self._folder} has {values.numel()} of {len(elements)} elements of {key}; it is damaged"
            )
        blank = TensorStorageMetadata(TensorProperties.create_from_tensor(values), shape, [])
        entry, start = self._metadata.state_dict_metadata.setdefault(key, blank), 0
        assert isinstance(entry, TensorStorageMetadata)
        for offsets, sizes in rectangles(shape, elements):
            place, size = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)), torch.Size(sizes).numel()
            entry.chunks.append(place)
            self._metadata.storage_data[MetadataIndex(key, place.offsets)] = values[start : start + size].view(sizes)
            start += size

    def _check_sizes(self) -> None:
        """Raise ConfigError if a tensor has gaps."""
        for key, entry in self._metadata.state_dict_metadata.items():
            if isinstance(entry, TensorStorageMetadata):
                found = sum(chunk.sizes.numel() for chunk in entry.chunks)
                if found != entry.size.numel():
                    raise ConfigError(
                        f"{self._folder} has {found} of {entry.size.numel()} elements of {key}; it is damaged"
                    )


def _rank_of(path: Path) -> int:
    _, _, after = path.name.partition("pp_rank_")
    return int(after.partition("_")[0] or 0)


def _loss_scale(scaler: _Inert | None) -> dict[str, Any]:
    """Return a dynamic loss scale as torch's GradScaler saves it; nothing without one, as of an optimizer for bf16."""
    found = {} if scaler is None else vars(scaler)
    if "last_overflow_iter" not in found:
        return {}
    num_good = (found["cur_iter"] - found["last_overflow_iter"] - 1) % found["scale_window"]
    return {"scaler.scale": found["cur_scale"], f"scaler.{GROWTH_TRACKER}": num_good}


def _share(numel: int, rank: int, num_ranks: int) -> range:
    """Return the elements of a parameter that a rank of stage 3 has."""
    part = -(-numel // num_ranks)
    return range(min(rank * part, numel), min((rank + 1) * part, numel))


def _of_stage_3(shapes: Mapping[str, torch.Size], flats: list[Tensor], rank: int, num_ranks: int) -> Iterator[Fragment]:
    flat = start = 0
    for name, shape in shapes.items():
        if start == flats[flat].numel():
            flat, start = flat + 1, 0
        yield Fragment(name, _share(shape.numel(), rank, num_ranks), flat, start)
        start += -(-shape.numel() // num_ranks)


def _of_stages_1_and_2(
    groups: list[Mapping[str, torch.Size]], states: list[dict[str, Any]], rank: int
) -> Iterator[Fragment]:
    for flat, shapes in enumerate(groups):
        lengths = [state[FLATS][flat].numel() for state in states]
        first, at = sum(lengths[:rank]), 0
        paddings = states[0].get("param_alignment_paddings", {flat: [0] * len(shapes)})[flat]
        for (name, shape), padding in zip(shapes.items(), paddings, strict=True):
            if own := overlap(range(at, at + shape.numel()), range(first, first + lengths[rank])):
                yield Fragment(name, range(own.start - at, own.stop - at), flat, own.start - first)
            at += shape.numel() + padding
