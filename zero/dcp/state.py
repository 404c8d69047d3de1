"""A model and its optimizer for `torch.distributed.checkpoint` (DCP), whose folders FSDP2 reads and writes too.

    flat shard of a rank -> rectangles of each parameter, in its own shape -> DCP's files -> any layout, FSDP2's too

The names are those of torch's `get_state_dict`: "model.NAME" for the weights, of which the fp32 masters are saved, and
"optim.state.NAME.exp_avg" for the optimizer's states.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from parallel.errors import ConfigError
from parallel.mesh import Axis
from parallel.tensor.split_parameters import split_dims
from zero.buckets.chunked_tensor import Chunk, ChunkedTensor
from zero.engine import ZeroDataParallel
from zero.optimizer import ZeroOptimizer
from zero.partition.layout import rectangles
from zero.step.bucketed_optimizer import settings_of

REMEDY = "use `save` and `load` of zero"


class DistributedState:
    """The state of a model and its optimizer, as DCP saves it and loads it in place (its protocol `Stateful`).

    Example::

        dcp.save({"app": DistributedState(model, optimizer)}, checkpoint_id="folder")  # and dcp.load

    All ranks make the same calls. No rank copies anything: the tensors are views of what it owns. Optimizer states that
    do not exist yet are made, of zeros. Raises ConfigError if the optimizer has states that are not one value for each
    element, as AdamW8bit and Soap have, or if a parameter is complex.
    """

    def __init__(self, model: ZeroDataParallel, optimizer: ZeroOptimizer | None = None):
        self._model, self._optimizer = model, optimizer
        self._tensor = Axis.trivial("tensor") if optimizer is None else optimizer.tensor
        self._split = split_dims(model.module)
        self._names = {param: name for name, param in model.module.named_parameters()}  # of tied ones the first
        self._shapes = {name: param.shape for param, name in self._names.items()}
        if any(param.is_complex() for param in model.module.parameters()):
            raise ConfigError(f"complex parameters cannot be saved by torch.distributed.checkpoint; {REMEDY}")
        if optimizer is not None and optimizer.matrices.states():
            raise ConfigError(
                f"the states of {type(optimizer.inner).__name__} are matrices that torch.distributed.checkpoint cannot "
                f"divide; {REMEDY}"
            )

    def state_dict(self) -> dict[str, Any]:
        """Return {"model": {name: values}, "optim": {"state": ..., "param_groups": ...}}: views of what is owned."""
        content: dict[str, Any] = {"model": self._weights()}
        if self._optimizer is not None:
            content["optim"] = {"state": self._moments(self._optimizer), "param_groups": self._groups(self._optimizer)}
        return content

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Let the model use what was loaded into the tensors of `state_dict`, and take the groups' settings."""
        self._model.wait_for_updates()
        for flat in self._model.flats:
            flat.reshard()
            for bucket in flat.buckets:
                bucket.params.owned.copy_(bucket.master)
            flat.publish_loaded()
        self._model.measure_weights()
        if self._optimizer is not None:
            _repeat_counters(self._optimizer)
            given = state_dict.get("optim", {}).get("param_groups", ())
            for group, settings in zip(self._optimizer.inner.param_groups, given, strict=False):
                for name in group.keys() & settings.keys() - {"params"}:
                    if isinstance(group[name], Tensor):  # a captured step reads this tensor
                        group[name].fill_(settings[name])
                    else:
                        group[name] = settings[name]

    def _weights(self) -> dict[str, Tensor]:
        if self._optimizer is not None:
            self._optimizer.take_changes()
        self._model.wait_for_updates()
        parts: dict[str, list[tuple[range, Tensor]]] = {name: [] for name in self._shapes}
        for flat in self._model.flats:
            for bucket in flat.buckets:
                for span, part in flat.layout.spans_in(bucket.shard):
                    elements = range(part.start - span.elements.start, part.stop - span.elements.start)
                    parts[span.name].append((elements, bucket.owned_part(bucket.master, part)))
        dtypes = {span.name: flat.buckets[0].master.dtype for flat in self._model.flats for span in flat.layout.spans}
        return {
            name: self._whole(own := self._names[value], parts[own], dtypes[own])
            if isinstance(value, nn.Parameter)
            else value
            for name, value in self._model.module.state_dict(keep_vars=True).items()
        }

    def _moments(self, optimizer: ZeroOptimizer) -> dict[str, dict[str, Tensor]]:
        blank = [_state_of_small_parameter(optimizer, number) for number in range(len(optimizer.param_groups))]
        owned: dict[str, list[tuple[range, dict[str, Tensor]]]] = {name: [] for name in self._shapes}
        for piece in (piece for bucket in optimizer.buckets for piece in optimizer.pieces_of(bucket)):
            state = optimizer.inner.state[piece.param]
            for kind, like in {} if state else blank[piece.group].items():
                state[kind] = torch.zeros_like(piece.param, dtype=like.dtype) if like.dim() else torch.zeros_like(like)
            owned[piece.name].append((piece.in_param, state))
        found: dict[str, dict[str, Tensor]] = {}
        for group, kinds in zip(optimizer.param_groups, blank, strict=True):
            for name in (self._names[param] for param in group["params"] if param.requires_grad):
                found[name] = {}
                for kind, like in kinds.items():
                    values = [(elements, state[kind]) for elements, state in owned[name]]
                    if like.dim():
                        found[name][kind] = self._whole(name, values, like.dtype)
                    else:  # a counter, which a rank without a part of the parameter does not have
                        none = ChunkedTensor(like.shape, [], like.dtype, like.device)
                        found[name][kind] = values[0][1] if values else none
        return found

    def _groups(self, optimizer: ZeroOptimizer) -> list[dict[str, Any]]:
        names = [[self._names[param] for param in group["params"]] for group in optimizer.param_groups]
        return [settings_of(group) | {"params": n} for group, n in zip(optimizer.param_groups, names, strict=True)]

    def _whole(self, name: str, parts: Iterable[tuple[range, Tensor]], dtype: torch.dtype) -> ChunkedTensor:
        """Return a parameter, or one of its states, of which this rank has `parts`: elements of its own tensor part."""
        shape, dim = list(self._shapes[name]), self._split.get(name)
        chunks = []
        for elements, values in parts:
            start = 0
            for offsets, sizes in rectangles(shape, elements):
                size = torch.Size(sizes).numel()
                at = [offset + (i == dim) * self._tensor.rank * shape[i] for i, offset in enumerate(offsets)]
                chunks.append(Chunk(torch.Size(at), values[start : start + size].view(sizes)))
                start += size
        if dim is not None:
            shape[dim] *= self._tensor.size
        return ChunkedTensor(torch.Size(shape), chunks, dtype, self._model.offload.device)


def _repeat_counters(optimizer: ZeroOptimizer) -> None:
    """Give all pieces of a parameter the counters of the first one, which alone is saved and loaded."""
    first: dict[str, Mapping[str, Any]] = {}
    for piece in (piece for bucket in optimizer.buckets for piece in optimizer.pieces_of(bucket)):
        state = optimizer.inner.state[piece.param]
        for kind, value in first.setdefault(piece.name, state).items():
            if isinstance(value, Tensor) and not value.dim():
                state[kind].copy_(value)


def _state_of_small_parameter(optimizer: ZeroOptimizer, number: int) -> dict[str, Tensor]:
    """Return the state that a group's optimizer has after a step of a small parameter with as many dims as its own.

    Raises ConfigError if a part of it is neither a number nor one value for each element.
    """
    inner, master = optimizer.inner, optimizer.buckets[0].master
    dims = {param.dim() for param in optimizer.param_groups[number]["params"]}
    param = nn.Parameter(master.new_zeros([2] * max(dims, default=1)))
    param.grad = torch.zeros_like(param)
    probe: Any = type(inner)([{**optimizer.param_groups[number], "params": [param]}])  # type: ignore[call-arg]
    probe.step()
    state = {kind: value for kind, value in probe.state[param].items() if isinstance(value, Tensor)}
    for kind, value in state.items():
        if value.dim() and value.shape != param.shape:
            raise ConfigError(f"{kind} of {type(inner).__name__} is not one value for each element; {REMEDY}")
    return state
