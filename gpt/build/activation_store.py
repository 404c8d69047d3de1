"""The choice of the activation store with `activations.store: auto`, by the arithmetic of the paper's section 8."""

import logging
from dataclasses import replace
from functools import cache

import torch

from gpt.model.hidden_matrices import is_hidden_matrix
from gpt.model.transformer import GPT
from gpt.settings.option_names import in_option_names
from gpt.settings.training import TrainSettings
from gpt.shape.config import ModelConfig
from parallel.host_memory import physical_bytes
from parallel.comm_log import CommLog
from parallel.mesh import Axis, Mesh
from parallel.tensor.layers import packed_rows, split_dims
from parallel.tensor.token_layout import ReplicatedTokens, TokenLayout
from zero.activations.checkpointed_blocks import ActivationsConfig
from zero.activations.choice import Workload, choose_store
from zero.partition.config import ZeroConfig
from zero.formulas import memory, traffic
from zero.optimizers.matrices import matrices_of
from zero.optimizers.soap import Soap

logger = logging.getLogger(__name__)


def chosen_activations(
    activations: ActivationsConfig,
    model: ModelConfig,
    train: TrainSettings,
    zero: ZeroConfig,
    mesh: Mesh,
    tokens: TokenLayout,
    device: torch.device,
    moment_bytes: float = 8,
) -> ActivationsConfig:
    """Return the settings with the store that `auto` stands for, and log the reason; other settings are unchanged."""
    if activations.store != "auto":
        return activations
    hardware = activations.hardware
    memory_bytes = hardware.memory_gb * 1e9 if hardware.memory_gb else memory_per_rank(device, mesh)
    work = workload(model, train, zero, activations.layers_per_checkpoint, mesh, tokens, moment_bytes)
    store, reason = choose_store(work, memory_bytes, hardware)
    logger.info(in_option_names(reason))
    return replace(activations, store=store)


def workload(
    model: ModelConfig,
    train: TrainSettings,
    zero: ZeroConfig,
    layers_per_checkpoint: int,
    mesh: Mesh,
    tokens: TokenLayout,
    moment_bytes: float = 8,
) -> Workload:
    """Return the work of one rank of this run on one micro-batch, with the memory and traffic of closed forms."""
    policy, itemsize, data_size = zero.policy, train.dtype.itemsize, mesh.data.size
    num_parameters = parameters_of_rank(model, mesh.tensor.size)
    shard_size = policy.axes(mesh.data)[0].size
    num_micro_batches = train.num_micro_batches(mesh.num_batch_ranks)
    accumulate, reduce = (dtype.itemsize for dtype in zero.gradient_types(train.dtype))
    sent = traffic.step_bytes(policy, num_parameters * itemsize, data_size, num_micro_batches, num_parameters * reduce)
    return workload_of(
        replace(model, seq_length=model.seq_length // mesh.context.size),  # the tokens of this rank
        b=train.micro_batch_size,
        k=layers_per_checkpoint,
        N_m=tokens.replicas.size,
        tensor_size=mesh.tensor.size,
        itemsize=itemsize,
        state_bytes=memory.formula(policy, num_parameters, shard_size, itemsize, moment_bytes, accumulate).total,
        data_bytes=sent / num_micro_batches,
    )


def workload_of(
    model: ModelConfig,
    *,
    b: int,
    k: int,
    N_m: int,
    tensor_size: int,
    itemsize: int,
    state_bytes: float,
    data_bytes: float,
) -> Workload:
    """Return the work of one rank on one micro-batch of `b` sequences, with the other symbols as in `Workload`."""
    return Workload(
        b=b,
        s=model.seq_length,
        h=model.hidden_size,
        L=model.num_layers,
        k=k,
        N_m=N_m,
        tensor_size=tensor_size,
        vocab_size=model.padded_vocab_size,
        itemsize=itemsize,
        state_bytes=state_bytes,
        data_bytes=data_bytes,
        block_weights=model.block_weights,
        block_width=model.block_width,
    )


def parameters_of_rank(model: ModelConfig, tensor_size: int) -> int:
    """Return the number of parameters on one tensor rank."""
    return _of_all_layers(model, tensor_size)[0]


def hidden_matrices_of_rank(model: ModelConfig, tensor_size: int) -> int:
    """Return how many of these parameters are in matrices inside of the blocks."""
    return _of_all_layers(model, tensor_size)[1]


def matrices_of_rank(model: ModelConfig, tensor_size: int) -> int:
    """Return how many of these parameters are in matrices, embeddings included."""
    return _of_all_layers(model, tensor_size)[2]


def soap_states_of_rank(model: ModelConfig, tensor_size: int) -> float:
    """Return the number of elements of SOAP's states, of which the ranks along the shard axis have a part each."""
    return _of_all_layers(model, tensor_size)[3] / tensor_size


@cache
def _of_all_layers(model: ModelConfig, tensor_size: int) -> tuple[int, ...]:
    """Return what `_count_parameters` does.

    It is extrapolated from models of one and two layers, because a deep model takes long to build, even on the meta
    device.
    """
    one_layer, two_layers = (_count_parameters(replace(model, num_layers=n), tensor_size) for n in (1, 2))
    return tuple(one + (model.num_layers - 1) * (two - one) for one, two in zip(one_layer, two_layers, strict=True))


@cache
def _count_parameters(model: ModelConfig, tensor_size: int) -> tuple[int, int, int, int]:
    """Return the number of parameters on one tensor rank, counted in a model on the meta device.

    The second number is that of parameters in matrices inside of the blocks, the third of those in all matrices;
    the fourth one is that of elements of SOAP's states on all tensor ranks.
    """
    with torch.device("meta"):
        tokens = ReplicatedTokens(Axis("tensor", tensor_size, 0, CommLog()))
        gpt = GPT(model, tokens)
    named, split, packed = list(gpt.named_parameters()), split_dims(gpt), packed_rows(gpt)
    hidden_matrices = [
        matrix
        for name, param in named
        if is_hidden_matrix(name, param)
        for matrix in matrices_of(name, param.shape, 0, packed.get(name), split.get(name), tensor_size)
    ]
    hidden = sum(param.numel() for name, param in named if is_hidden_matrix(name, param))
    in_matrices = sum(param.numel() for _, param in named if param.dim() > 1)
    soap = sum(Soap.matrix_state_numel(matrix.whole_shape) for matrix in hidden_matrices)
    return sum(param.numel() for _, param in named), hidden, in_matrices, soap


def memory_per_rank(device: torch.device, mesh: Mesh) -> float:
    """Return the memory of one rank in bytes; ranks on CPUs are assumed to share the memory of one machine."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return physical_bytes() / (mesh.data.size * mesh.tensor.size)
