"""The choice of the activation store with `activations.store: auto`, by the arithmetic of the paper's section 8."""

import logging
from dataclasses import replace

import torch

from gpt.builder.closed_forms import coded_parameters_of_rank, moment_bytes, parameters_of_rank
from gpt.settings.option_names import in_option_names
from gpt.settings.settings import Settings
from parallel.host_memory import physical_bytes
from parallel.mesh import Axis, Mesh
from zero.activations.checkpointed_blocks import ActivationsConfig
from zero.activations.choice import Workload, choose_store
from zero.chosen import blocks_of
from zero.formulas import memory, traffic
from zero.settings.config import ZeroConfig

logger = logging.getLogger(__name__)


def chosen_activations(settings: Settings, mesh: Mesh, replicas: Axis, device: torch.device) -> ActivationsConfig:
    """Return the settings of activations with the store that `auto` stands for.

    `settings` have the types of gradients that null stands for. `replicas`: ranks that hold the same activations.
    """
    activations = settings.activations
    if activations.store != "auto":
        return activations
    hardware = activations.hardware
    if hardware.memory_gb:
        memory_bytes = hardware.memory_gb * 1e9
    else:  # the least of all ranks: with other stores their collectives would differ
        memory_bytes = mesh.data.min_over_ranks(mesh.tensor.min_over_ranks(memory_per_rank(device, mesh)))
    store, reason = choose_store(workload(settings, mesh.data.size, replicas.size), memory_bytes, hardware)
    logger.info(in_option_names(reason))
    return replace(activations, store=store)


def sent_bytes(settings: Settings, data_size: int, num_micro_batches: int) -> tuple[float, float]:
    """Return the bytes that a rank sends along the data axis in a step, inside its group and between groups."""
    zero, train, tensor_size = settings.zero, settings.train, settings.parallel.tensor_size
    numel = parameters_of_rank(settings.model, tensor_size)
    in_fp8 = coded_parameters_of_rank(settings.model, train, tensor_size) if zero.gather_dtype else 0
    sizes = traffic.axis_sizes(zero.policy, data_size, settings.parallel.shard_size)
    return sent_bytes_of(zero, train.dtype, (numel, in_fp8), sizes, num_micro_batches)


def sent_bytes_of(
    zero: ZeroConfig, dtype: torch.dtype, numels: tuple[int, int], sizes: tuple[int, int], num_micro_batches: int
) -> tuple[float, float]:
    """Return the bytes of `sent_bytes` for so many parameters of one type, of which some are gathered in FP8.

    `sizes`: ranks of a group, and groups.
    """
    types, (numel, in_fp8) = zero.gradient_types(dtype), numels
    # Between groups go sums of micro-batches, which a fixed order keeps in the type in which they were added.
    between = types.accumulate if zero.fixes_order else types.reduce
    gradient_bytes = numel * types.reduce.itemsize, numel * between.itemsize
    of_all = numel * dtype.itemsize
    parameter_bytes = of_all - in_fp8 * (dtype.itemsize - 1), of_all
    return traffic.axis_bytes(zero.policy, parameter_bytes, sizes, num_micro_batches, gradient_bytes=gradient_bytes)


def block_sum_bytes(settings: Settings, data_size: int) -> float:
    """Return the bytes of a rank's sums of blocks of micro-batches with train.reproducible=layout, else 0."""
    zero, parallel = settings.zero, settings.parallel
    blocks = blocks_of(zero, *traffic.axis_sizes(zero.policy, data_size, parallel.shard_size))
    gradient_bytes = zero.gradient_types(settings.train.dtype).accumulate.itemsize
    return blocks.kept_bytes(gradient_bytes * parameters_of_rank(settings.model, parallel.tensor_size))


def model_states(settings: Settings, data_size: int) -> memory.PlacedStates:
    """Return the bytes of one rank's model states on the accelerator and on the host."""
    zero, dtype, tensor_size = settings.zero, settings.train.dtype, settings.parallel.tensor_size
    num_parameters = parameters_of_rank(settings.model, tensor_size)
    gradient_bytes = zero.gradient_types(dtype).accumulate.itemsize
    moments = moment_bytes(settings.optimizer, settings.model, tensor_size)
    group_size = settings.parallel.shard_size or data_size
    states = memory.formula(zero.policy, num_parameters, data_size, dtype.itemsize, moments, gradient_bytes, group_size)
    return memory.placed(states, zero.policy, group_size, settings.offload.offloaded_states)


def workload(settings: Settings, data_size: int, num_replicas: int) -> Workload:
    """Return the work of one rank on one micro-batch, with the memory and traffic of closed forms."""
    model, train, parallel = settings.model, settings.train, settings.parallel
    num_micro_batches = train.num_micro_batches(data_size // parallel.context_size)
    return Workload(
        b=train.micro_batch_size,
        s=model.seq_length // parallel.context_size,  # the tokens of this rank
        h=model.hidden_size,
        L=model.num_layers,
        k=settings.activations.layers_per_checkpoint,
        N_m=num_replicas,
        tensor_size=parallel.tensor_size,
        vocab_size=model.padded_vocab_size,
        itemsize=train.dtype.itemsize,
        state_bytes=block_sum_bytes(settings, data_size) + model_states(settings, data_size).accelerator.total,
        data_bytes=sum(sent_bytes(settings, data_size, num_micro_batches)) / num_micro_batches,
        block_weights=model.block_weights,
        block_width=model.block_width,
    )


def memory_per_rank(device: torch.device, mesh: Mesh) -> int:
    """Return the memory of one rank in bytes; ranks on CPUs are assumed to share the memory of one machine."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return physical_bytes() // (mesh.data.size * mesh.tensor.size)
