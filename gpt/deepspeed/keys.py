"""The table of the keys of DeepSpeed's JSON configuration.

Each row says which settings the key is mapped to, why it is not needed here, or which of its values are refused and
what to do instead. The section zero_optimization is in `gpt/deepspeed/zero_keys.py`.
"""

import math
from collections.abc import Callable
from typing import Any

from gpt.deepspeed.key import (
    ValueType,
    combined,
    mapped,
    not_needed,
    restricted,
    section,
    unchanged,
    unsupported,
)
from gpt.deepspeed.rules import OPTIMIZER_NAMES
from gpt.deepspeed.zero_keys import FOR_NVME, OFFLOAD, ZERO

TYPES = "fp32", "bf16", "fp16"
NO_SUCH_TYPE = f"choose {', '.join(TYPES)}"
HALF_STATES = "master weights and moments are always fp32; set it to false"

BATCH = [
    combined("train_batch_size", ValueType.POSITIVE, "train.global_batch_size"),
    combined("train_micro_batch_size_per_gpu", ValueType.POSITIVE, "train.micro_batch_size"),
    combined("gradient_accumulation_steps", ValueType.POSITIVE, "train.global_batch_size"),
]

PRECISION = [
    *section(
        "fp16",
        combined("enabled", ValueType.BOOLEAN, "train.precision"),
        combined(
            "loss_scale",
            ValueType.NUMBER,
            "train.loss_scale.dynamic",
            "train.loss_scale.initial",
            note="0 means dynamic",
        ),
        combined("initial_scale_power", ValueType.NON_NEGATIVE, "train.loss_scale.initial"),
        mapped("loss_scale_window", ValueType.POSITIVE, "train.loss_scale.growth_interval"),
        mapped("hysteresis", ValueType.POSITIVE, "train.loss_scale.hysteresis"),
        mapped("min_loss_scale", ValueType.NUMBER, "train.loss_scale.minimum"),
        not_needed(
            ValueType.BOOLEAN, "a step without overflow always restores the hysteresis", "consecutive_hysteresis"
        ),
        not_needed(ValueType.BOOLEAN, "the inputs are token ids, which are not cast", "auto_cast"),
        not_needed(ValueType.BOOLEAN, "the update is always fused", "fused_mode"),
        unsupported("fp16_master_weights_and_grads", ValueType.BOOLEAN, HALF_STATES, False),
    ),
    *section(
        "bf16",
        combined("enabled", ValueType.BOOLEAN, "train.precision"),
        not_needed(
            ValueType.BOOLEAN, "a gradient is copied into its bucket as soon as it is computed", "immediate_grad_update"
        ),
        not_needed(ValueType.BOOLEAN, "a step with a non-finite gradient is always skipped", "check_grad_overflow"),
        unsupported("bf16_master_weights_and_grads", ValueType.BOOLEAN, HALF_STATES, False),
        unsupported("bf16_optimizer_states", ValueType.BOOLEAN, HALF_STATES, False),
    ),
    restricted(mapped("communication_data_type", ValueType.STRING, "zero.reduce_dtype"), *TYPES, refusal=NO_SUCH_TYPE),
    *section(
        "data_types",
        restricted(mapped("grad_accum_dtype", ValueType.STRING, "zero.accumulate_dtype"), *TYPES, refusal=NO_SUCH_TYPE),
        combined("param_dtype", ValueType.STRING, "train.precision"),
        unsupported("buffer_dtype", ValueType.STRING, "the model has no buffers; remove it"),
    ),
]

GRADIENTS = [
    mapped(
        "gradient_clipping",
        ValueType.NUMBER,
        "optimizer.clip_norm",
        lambda norm: norm or math.inf,
        note="0 means no clipping",
    ),
    *not_needed(
        ValueType.ANY,
        "gradients are divided by the number of ranks before they are reduced",
        "prescale_gradients",
        "gradient_predivide_factor",
    ),
    *not_needed(
        ValueType.STRING,
        "it is for a sequence-parallel axis of its own, which is not supported",
        "seq_parallel_comm_data_type",
    ),
    *not_needed(ValueType.BOOLEAN, "the trainer marks the last micro-batch of a step", "managed_gradient_accumulation"),
    unsupported("sparse_gradients", ValueType.BOOLEAN, "gradients are dense; set it to false", False),
    unsupported("gradient_allreduce_op", ValueType.STRING, "gradients are averaged over ranks; choose avg", "avg"),
    unsupported(
        "disable_allgather", ValueType.BOOLEAN, "updated parameters are always all-gathered; set it to false", False
    ),
]

OPTIMIZER = [
    *section(
        "optimizer",
        restricted(
            combined("type", ValueType.STRING, "optimizer.name", "optimizer.muon.adjust_lr"),
            *OPTIMIZER_NAMES,
            refusal=f"choose {', '.join(OPTIMIZER_NAMES)}",
        ),
        section(
            "params",
            combined("lr", ValueType.NUMBER, "optimizer.lr"),
            combined("adam_lr", ValueType.NUMBER, "optimizer.lr"),
            combined("muon_lr", ValueType.NUMBER, "optimizer.muon.lr_factor", note="divided by optimizer.lr"),
            combined("momentum", ValueType.NUMBER, "optimizer.momentum", note="SGD without it has none"),
            combined("nesterov", ValueType.BOOLEAN, "optimizer.nesterov"),
            mapped("betas", ValueType.PAIR, "optimizer.betas"),
            mapped("eps", ValueType.NUMBER, "optimizer.eps"),
            mapped("weight_decay", ValueType.NUMBER, "optimizer.weight_decay", note="for matrices and embeddings only"),
            not_needed(ValueType.BOOLEAN, "optimizer.implementation chooses a fused one", "torch_adam", "fused"),
            unsupported("adam_w_mode", ValueType.BOOLEAN, "weight decay is always decoupled; set it to true", True),
            unsupported("bias_correction", ValueType.BOOLEAN, "bias correction is always on; set it to true", True),
            unsupported("amsgrad", ValueType.BOOLEAN, "AMSGrad is not supported; set it to false", False),
            unsupported("fp32_optimizer_states", ValueType.BOOLEAN, "moments are always fp32; set it to true", True),
        ),
        not_needed(ValueType.BOOLEAN, "the update is always fused", "legacy_fusion"),
    ),
    *not_needed(ValueType.BOOLEAN, "every optimizer is tested before it is used", "zero_allow_untested_optimizer"),
    *not_needed(ValueType.BOOLEAN, "torch's fused AdamW updates on the host", "zero_force_ds_cpu_optimizer"),
]

WARM_UP = "the warm-up rises from zero; set it to 0 and shorten the warm-up"
SCHEDULER = section(
    "scheduler",
    restricted(
        combined(
            "type",
            ValueType.STRING,
            "schedule.decay",
            "schedule.min_lr",
            note="the warm-up is linear, not logarithmic",
        ),
        "WarmupLR",
        "WarmupDecayLR",
        "WarmupCosineLR",
        refusal="choose WarmupLR, WarmupDecayLR or WarmupCosineLR, or remove the scheduler and set schedule.*",
    ),
    section(
        "params",
        combined("warmup_max_lr", ValueType.NUMBER, "optimizer.lr"),
        mapped("warmup_num_steps", ValueType.NON_NEGATIVE, "schedule.warmup_steps"),
        mapped(
            "total_num_steps", ValueType.POSITIVE, "schedule.decay_steps", note="train.steps sets the length of the run"
        ),
        combined("cos_min_ratio", ValueType.NUMBER, "schedule.min_lr", note="multiplied by optimizer.lr"),
        unsupported("warmup_min_lr", ValueType.NUMBER, WARM_UP, 0),
        unsupported("warmup_min_ratio", ValueType.NUMBER, WARM_UP, 0),
        unsupported("warmup_type", ValueType.STRING, "the warm-up is always linear; choose linear", "linear"),
        unsupported("last_batch_iteration", ValueType.INTEGER, "a run resumes from its checkpoint; set -1", -1),
    ),
)

ACTIVATIONS = section(
    "activation_checkpointing",
    combined("partition_activations", ValueType.BOOLEAN, "activations.store", note="keep if parallel.tensor_size is 1"),
    combined("cpu_checkpointing", ValueType.BOOLEAN, "activations.store"),
    mapped("contiguous_memory_optimization", ValueType.BOOLEAN, "activations.defragment"),
    not_needed(ValueType.NON_NEGATIVE, "the number of checkpoints follows from the model", "number_checkpoints"),
    not_needed(
        ValueType.BOOLEAN,
        "copies and kernels are ordered by events, without synchronizing the device",
        "synchronize_checkpoint_boundary",
    ),
    not_needed(ValueType.BOOLEAN, "dry_run.trace shows every kernel", "profile"),
)

REPORTS = [
    mapped("steps_per_print", ValueType.POSITIVE, "train.log_every"),
    mapped("wandb.enabled", ValueType.BOOLEAN, "wandb.mode", lambda is_on: "online" if is_on else "disabled"),
    mapped("wandb.project", ValueType.STRING, "wandb.project"),
    unsupported("wandb.team", ValueType.STRING, "set WANDB_ENTITY in the environment instead; remove it"),
    mapped("wandb.group", ValueType.STRING, "wandb.group"),
    mapped("tensorboard.enabled", ValueType.BOOLEAN, "run.tensorboard"),
    *section(
        "tensorboard",
        not_needed(ValueType.STRING, "event files are written to run.dir/tensorboard", "output_path", "job_name"),
    ),
    *section(
        "csv_monitor",
        not_needed(ValueType.ANY, "run.dir/metrics.jsonl holds the metrics", "enabled", "output_path", "job_name"),
    ),
    *not_needed(ValueType.BOOLEAN, "profile.steps selects the steps that are timed", "wall_clock_breakdown"),
    *not_needed(ValueType.BOOLEAN, "every run prints a table of its memory at the start", "memory_breakdown"),
    *not_needed(ValueType.BOOLEAN, "run.dir/config.yaml holds every setting", "dump_state"),
    *not_needed(ValueType.ANY, "every run counts its FLOPs", "flops_profiler"),
    *not_needed(ValueType.ANY, "every run counts its traffic", "comms_logger"),
    *not_needed(ValueType.ANY, "it configures DeepSpeed's own logging", "timers", "log_level"),
]

OTHERS = [
    *not_needed(ValueType.ANY, FOR_NVME, "aio"),
    *not_needed(ValueType.ANY, "checkpoints are written asynchronously", "datastates_ckpt"),
    *not_needed(ValueType.BOOLEAN, "the data never ends, and every batch is full", "dataloader_drop_last"),
    *not_needed(
        ValueType.POSITIVE, "model.vocab_size is rounded up to a multiple of model.vocab_multiple", "vocabulary_size"
    ),
    *section(
        "checkpoint",
        not_needed(ValueType.STRING, "ranks agree on a checkpoint before it is marked as complete", "tag_validation"),
        not_needed(
            ValueType.BOOLEAN,
            "a checkpoint can be loaded with any stage, tensor size and number of ranks",
            "load_universal",
        ),
        not_needed(ValueType.ANY, "every rank writes the states that it owns", "parallel_write"),
        unsupported(
            "use_node_local_storage",
            ValueType.BOOLEAN,
            "run.dir is on storage that all nodes share; set it to false",
            False,
        ),
    ),
    unsupported("graph_harvesting", ValueType.BOOLEAN, "CUDA graphs are not supported; set it to false", False),
    unsupported(
        "use_data_before_expert_parallelism",
        ValueType.BOOLEAN,
        "mixture of experts is not supported; set it to false",
        False,
    ),
    unsupported(
        "sequence_parallel_size",
        ValueType.NON_NEGATIVE,
        "parallel.sequence_parallel splits sequences over the tensor ranks; set 1",
        1,
    ),
]

# Sections of features that are not supported: {name: remedy}. A section that is switched off is accepted.
FEATURES = {
    "amp": "choose fp16 or bf16",
    "torch_autocast": "choose fp16 or bf16",
    "comet": "choose wandb or tensorboard",
    "trackio": "choose wandb or tensorboard",
    "autotuning": "use the planner, python -m lab.planner.plan",
    "elasticity": "set the batch sizes; a run resumes on any number of ranks",
    "tensor_parallel": "set parallel.tensor_size",
    "pipeline": "pipeline parallelism is not supported",
    "expert_parallel": "expert parallelism is not supported",
    "sparse_attention": "sparse attention is not supported",
    "curriculum_learning": "all sequences have the same length",
    "data_efficiency": "all sequences have the same length",
    "progressive_layer_drop": "every layer runs in every step",
    "compression_training": "compression is not supported",
    "quantize_training": "quantization is not supported",
    "weight_quantization": "quantization is not supported",
    "eigenvalue": "it is used for quantization only",
    "hybrid_engine": "it is used for inference only",
    "compile": "set train.compile",
    "nebula": "checkpoints are written asynchronously to run.dir",
}

KEYS = {
    key.name: key
    for key in [
        *BATCH,
        *ZERO,
        *OFFLOAD,
        *PRECISION,
        *GRADIENTS,
        *OPTIMIZER,
        *SCHEDULER,
        *ACTIVATIONS,
        *REPORTS,
        *OTHERS,
        *(
            unsupported(name, ValueType.ANY, f"{remedy}; remove it, or switch it off")
            for name, remedy in FEATURES.items()
        ),
    ]
}

# Sections in which only `enabled` is read.
ONLY_ENABLED_IS_READ = {name for name, key in KEYS.items() if key.type is ValueType.ANY}


def _cpu_or_none(is_offloaded: bool) -> str:
    return "cpu" if is_offloaded else "none"


# Names in other versions of DeepSpeed: {other name: (current name, conversion of the value)}.
OTHER_NAMES: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "zero_optimization": ("zero_optimization.stage", int),  # true, false
    "allgather_size": ("zero_optimization.allgather_bucket_size", unchanged),
    "zero_optimization.cpu_offload": ("zero_optimization.offload_optimizer.device", _cpu_or_none),
    "zero_optimization.cpu_offload_param": ("zero_optimization.offload_param.device", _cpu_or_none),
    "zero_optimization.cpu_offload_params": ("zero_optimization.offload_param.device", _cpu_or_none),
    "zero_optimization.cpu_offload_use_pin_memory": ("zero_optimization.offload_optimizer.pin_memory", unchanged),
    "zero_optimization.stage3_gather_fp16_weights_on_model_save": (
        "zero_optimization.stage3_gather_16bit_weights_on_model_save",
        unchanged,
    ),
    **{name.replace("stage3_", ""): (name, unchanged) for name in KEYS if name.startswith("zero_optimization.stage3_")},
    **{name.replace("bf16.", "bfloat16.", 1): (name, unchanged) for name in KEYS if name.startswith("bf16.")},
    "fp32_allreduce": ("communication_data_type", lambda is_fp32: "fp32" if is_fp32 else None),
    "optimizer.params.max_grad_norm": ("gradient_clipping", unchanged),
}
