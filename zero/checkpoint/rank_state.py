"""The state that one rank saves of a model and its optimizer, and loads from a checkpoint of any layout.

"3.master.640"         a shard of the master weights: the part of flat buffer 3 that begins at its element 640
"3.exp_avg.640"        optimizer state of the piece of a parameter that begins at that element; 0-dim if it is a number
"matrix.NAME.0.left"    state of the first matrix of a parameter, on the rank that computes it
"buffer.NAME"          a buffer of the module; this and the following are not sharded
"loss_scale.NAME"      a tensor of the dynamic loss scale
"num_skipped"          the number of steps that were skipped
"random.cpu", "random.cuda"    the states of torch's random generators
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from parallel.mesh import Axis, Mesh
from parallel.store import Decisions
from parallel.tensor.split_parameters import split_dims
from parallel.validation.errors import ConfigError, check_type
from zero.checkpoint.adam import are_alike, class_names, load_counters
from zero.checkpoint.layout_file import FORMAT, describe_layout, verify_file
from zero.checkpoint.saved_state import MASTER, SavedState, TensorRank, elements_per_value, saved_parameters
from zero.checkpoint.schema import shown
from zero.checkpoint.sealed_file import DamageError
from zero.core.step.pieces import Piece
from zero.data_parallel import ZeroDataParallel
from zero.optimizer import ZeroOptimizer

T = TypeVar("T")
NO_OPTIMIZER = ""  # in the place of an optimizer's class


@dataclass(frozen=True)
class RankState:
    """A model and its optimizer as they are saved and loaded; without it, the weights and buffers alone.

    `others` are further tensors, of any name, that every rank saves and loads in place.
    """

    model: ZeroDataParallel
    optimizer: ZeroOptimizer | None
    others: Mapping[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_type("`model` of a checkpoint", self.model, ZeroDataParallel, "give what wrapping the module returned")
        if self.optimizer is not None:
            check_type("`optimizer` of a checkpoint", self.optimizer, ZeroOptimizer, "give None for the weights alone")
        elif split_dims(self.model.module):
            raise ConfigError("a model that is split along a tensor axis needs its optimizer, which knows that axis")

    @property
    def mesh(self) -> Mesh:
        """The ranks that save together."""
        tensor = self.optimizer.tensor if self.optimizer else Axis.trivial("tensor")
        return Mesh(self.model.data, tensor, self.model.data.log)

    @property
    def device(self) -> torch.device:
        """The device on which the model computes."""
        return self.model.homes.device

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors that this rank writes to its file.

        They are its random states, the state that every rank has, and its shards unless they are replicas of another
        rank's. They are not copies: save them before the next step.
        """
        tensors = {"random.cpu": torch.get_rng_state()}
        if self.device.type == "cuda":
            tensors["random.cuda"] = torch.cuda.get_rng_state()
        tensors |= self.common() | dict(self.others)
        return tensors | self.owned() if self.model.replica_axis.rank == 0 else tensors

    def owned(self) -> dict[str, Tensor]:
        """Return this rank's shards of the master weights and its optimizer state, by name."""
        self.model.take_changes()
        numbers = {bucket: number for number, flat in enumerate(self.model.flats) for bucket in flat.buckets}
        state = {f"{number}.{MASTER}.{bucket.ranges.own.start}": bucket.master for bucket, number in numbers.items()}
        if self.optimizer is None:
            return state
        for bucket in self.optimizer.buckets:
            for piece in self.optimizer.pieces_of(bucket):
                for kind, value in self.optimizer.states_of(piece).items():
                    if isinstance(value, Tensor):
                        state[f"{numbers[bucket]}.{kind}.{bucket.ranges.own.start + piece.elements.start}"] = value
        for update in self.optimizer.updates:
            state |= update.states()
        return state

    def common(self) -> dict[str, Tensor]:
        """Return what is not sharded: the module's buffers, the loss scale and the number of skipped steps."""
        buffers = self.model.module.named_buffers()
        # Complex ones, such as tables of rotations, are stored as pairs of real numbers.
        state = {f"buffer.{name}": torch.view_as_real(b) if b.is_complex() else b for name, b in buffers}
        if self.optimizer is None:
            return state
        if self.optimizer.loss_scale.is_dynamic:
            state |= {f"loss_scale.{name}": tensor for name, tensor in self.optimizer.loss_scale.state().items()}
        return state | {"num_skipped": self.optimizer.num_skipped}

    def describe(self, content: Mapping[str, Any]) -> dict[str, Any]:
        """Return the content of layout.json without the seals; `content` is what the program adds to it.

        It is the same on each rank, and its size does not depend on their number.
        """
        return {
            "format": FORMAT,
            **content,
            "optimizer": class_names(self.optimizer) if self.optimizer else NO_OPTIMIZER,
            "optimizer_counters": _counters(self.optimizer) if self.optimizer else [],
            "state": {
                "data_size": self.mesh.data.size,
                "tensor_size": self.mesh.tensor.size,
                "split_dims": split_dims(self.model.module),
                "buffers": [describe_layout(flat.layout) for flat in self.model.flats],
            },
        }

    def check_fits(self, checkpoint: Path, layout: Mapping[str, Any], remedy: str) -> None:
        """Raise ConfigError unless the checkpoint has these parameters and an optimizer of this class."""
        present = self.describe({})
        there, here = (
            {name: list(parameter.shape) for name, parameter in saved_parameters(description["state"]).items()}
            for description in (layout, present)
        )
        for name in [*here, *there]:
            if there.get(name) != here.get(name):
                raise ConfigError(
                    f"checkpoint {checkpoint} is of another model: {shown(name)[1:-1]} is "
                    f"{there.get(name, 'missing')} there and {here.get(name, 'missing')} in this run; {remedy}"
                )
        if self.optimizer is not None and layout["optimizer"] == NO_OPTIMIZER:
            raise ConfigError(f"checkpoint {checkpoint} has weights alone; load it without an optimizer")
        if self.optimizer is not None and not are_alike(layout["optimizer"], present["optimizer"]):
            raise ConfigError(
                f"checkpoint {checkpoint} was saved with the optimizer {shown(layout['optimizer'])[1:-1]}, "
                f"this run has {present['optimizer']}; resume it with the program that wrote it"
            )

    def load(self, checkpoint: Path, layout: Mapping[str, Any], save: str) -> None:
        """Load a checkpoint that fits. The ranks share the verification of all files by checksum.

        `save` names the save, as in the files' origins. Raises DamageError on all ranks if a file is damaged.
        """
        mesh = self.mesh
        check_same(mesh, int(layout["crc32"], 16), checkpoint)

        def verify_own() -> None:
            for number in range(mesh.rank, len(layout["files"]), mesh.size):
                verify_file(checkpoint, layout, number, save, mesh.log.note_progress)

        damaged_on_all(mesh, verify_own)
        self.load_verified(SavedState(checkpoint, layout["state"], lambda *_: mesh.log.note_progress()), layout)

    @torch.no_grad()
    def load_verified(self, saved: SavedState, layout: Mapping[str, Any]) -> None:
        """Load a checkpoint that fits and is undamaged. All ranks call it."""
        self.load_owned(saved)
        if self.optimizer is not None:
            load_counters(self.optimizer, saved, layout["optimizer"], layout["optimizer_counters"])
        self._load_own(saved)

    def load_owned(self, saved: SavedState) -> None:
        """Load this rank's shards from a state of any layout, and all-gather parameters that persist."""
        tensor = TensorRank(self.mesh.tensor.rank, self.mesh.tensor.size, split_dims(self.model.module))
        optimizer, trainable = self.optimizer, set(self.optimizer.buckets) if self.optimizer else ()
        with self.model.loading_masters():
            for flat in self.model.flats:
                for bucket in flat.buckets:
                    if optimizer is not None and bucket in trainable:
                        for piece in optimizer.pieces_of(bucket):
                            _load_state_of(piece, optimizer, saved, tensor)
                    for own in bucket.slices:
                        out = bucket.owned_part(bucket.master, own.elements)
                        saved.read(own.span.name, MASTER, own.in_param, out=out, tensor=tensor)
        if optimizer is not None:
            for update in optimizer.updates:
                saved.load_by_name(update.states(), self.model.shard_axis.rank, self.mesh.tensor.rank)

    def number_of_own(self, saved: SavedState) -> int:
        """Return the number of the file with what is not sharded: that of the saved rank at the same coordinates.

        They are taken modulo the sizes of the saved mesh.
        """
        mesh = self.mesh
        return mesh.data.rank % saved.data_size * saved.tensor_size + mesh.tensor.rank % saved.tensor_size

    def _load_own(self, saved: SavedState) -> None:
        """Load what is not sharded: module buffers, the loss scale, `others`, and this rank's random streams.

        A tensor that the file does not have keeps its value, as that of a loss scale which was not dynamic.
        Data-parallel ranks beyond the saved ones keep the random stream of a new run: with another rank's stream they
        would drop the same activations as that rank.
        """
        file = saved.file(self.number_of_own(saved))
        file.load_present(self.common() | dict(self.others))
        if self.optimizer is None or self.mesh.data.rank >= saved.data_size:
            return
        for name, set_state in (("random.cpu", torch.set_rng_state), ("random.cuda", torch.cuda.set_rng_state)):
            if name == "random.cpu" or (self.device.type == "cuda" and name in file.entries):
                try:
                    set_state(file.tensor(name))
                except (RuntimeError, TypeError) as error:
                    damage = f"{file.path} is damaged: {name} is not the state of a random generator"
                    raise ConfigError(damage) from error


def damaged_on_all(mesh: Mesh, read: Callable[[], T]) -> T:
    """Return what `read` does on this rank; raise DamageError on all ranks if it raises that on one. All call it."""
    damage, found = "", None
    try:
        found = read()
    except DamageError as error:
        damage = str(error)
    if mesh.data.min_over_ranks(mesh.tensor.min_over_ranks(-bool(damage))):
        damages = Decisions(mesh.rank, mesh.size, f"{mesh.first_rank}/{mesh.size}").decide(damage, list)
        raise DamageError(next(filter(None, damages)))
    return cast(T, found)


def check_same(mesh: Mesh, number: int, checkpoint: Path) -> None:
    """Raise ConfigError unless all ranks have read the same `number` in the checkpoint of this path."""
    for axis in (mesh.tensor, mesh.data):
        own = torch.tensor(number)
        if axis.has_peers and (axis.gather_by_rank(own.to(axis.communication_device(own))) != number).any():
            raise ConfigError(
                f"the ranks find different checkpoints in {checkpoint}, as on disks of their own or by a stale mount; "
                "put it on a file system that all nodes share"
            )


def _counters(optimizer: ZeroOptimizer) -> list[dict[str, Any]]:
    """Return, for each group, its numbers that are not settings, such as the step counter of apex's Adam."""
    found = []
    for number, group in enumerate(optimizer.param_groups):
        settings = optimizer.update_of(number).optimizer.defaults
        found.append({k: v for k, v in group.items() if k not in settings and isinstance(v, (int, float))})
    return found


def _load_state_of(piece: Piece, optimizer: ZeroOptimizer, saved: SavedState, tensor: TensorRank) -> None:
    """Load the states of a piece. They take the dtype of the piece if they were saved in that of the master weights.

    Any other state, such as 8-bit moments, keeps the dtype in which it was saved.
    """
    state, name, update = optimizer.states_of(piece), piece.name, optimizer.update_of(piece.group)
    state.clear()  # the checkpoint may be older than the parameter's first update
    of_elements: dict[str, Tensor] = {}  # values of blocks that are not those of this run
    for kind in saved.state_kinds(name):
        scalar, dtype, numel = saved.scalar(name, kind), saved.dtype(name, kind), elements_per_value(kind)
        if scalar is not None:
            # A fused optimizer of torch expects step counters on the device, any other one on the host.
            state[kind] = scalar.to(piece.param.device if update.counts_on_device else "cpu")
        elif numel == 1:
            dtype = piece.param.dtype if dtype == saved.dtype(name) else dtype
            state[kind] = torch.empty_like(piece.param, dtype=dtype)
            saved.read(name, kind, piece.in_param, out=state[kind], tensor=tensor)
        elif saved.has_blocks_of(name, tensor):
            state[kind] = piece.param.new_empty(-(-len(piece.in_param) // numel), dtype=dtype)
            saved.read_blocks(name, kind, piece.in_param, out=state[kind], tensor=tensor)
        else:
            of_elements[kind] = piece.param.new_empty(len(piece.in_param), dtype=dtype)
            saved.read(name, kind, piece.in_param, out=of_elements[kind], tensor=tensor)
    if of_elements:
        from zero.updates.adamw8bit import AdamW8bit

        assert isinstance(update.optimizer, AdamW8bit)
        update.optimizer.requantize(piece.param, of_elements)
