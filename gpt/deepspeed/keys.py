"""The table of the keys of DeepSpeed's JSON configuration.

Each row says which settings the key sets, why it is not needed here, or which of its values are refused and what to do
instead.
"""

import math
from collections.abc import Callable
from typing import Any

from gpt.deepspeed.key import (
    ANY,
    BOOL,
    COUNT,
    INTEGER,
    NUMBER,
    PAIR,
    POSITIVE,
    TEXT,
    flatten,
    needless,
    one_of,
    rule,
    sets,
    unchanged,
    unsupported,
)
from gpt.deepspeed.rules import DECAYS, OPTIMIZER_NAMES
from zero.partition.config import DTYPES

NO_SUCH_TYPE = f"choose {', '.join(DTYPES)}"
HALF_STATES = unsupported(BOOL, "master weights and moments are always fp32; set it to false", False)
WARM_UP = unsupported(NUMBER, "the warm-up rises from zero; set it to 0 and shorten the warm-up", 0)
NVME = "it configures NVMe, which is not used"
QUANTIZED = "quantized communication is not supported; set it to false, and for slow links set mics_shard_size"
HPZ = (
    "gradients are divided over the group too, and take 4/G bytes a parameter in fp32; DeepSpeed divides them over all "
    "ranks, and keeps primary shards of the parameters as well"
)

BATCH = {
    "train_batch_size": rule(POSITIVE, "train.global_batch_size"),
    "train_micro_batch_size_per_gpu": rule(POSITIVE, "train.micro_batch_size"),
    "gradient_accumulation_steps": rule(POSITIVE, "train.global_batch_size"),
}

DEVICE = one_of(
    rule(TEXT, "offload.mode", "offload.states"),
    "cpu",
    "none",
    refusal="states are stored on the accelerator or in host memory, never on NVMe; choose cpu",
)
OFFLOAD = {
    "device": DEVICE,
    "pin_memory": needless(BOOL, "host memory is always pinned if there is an accelerator"),
    ("nvme_path", "buffer_count"): needless(ANY, NVME),
}

ZERO = {
    "stage": sets(COUNT, "zero.stage"),
    "overlap_comm": sets(BOOL, "zero.overlap"),
    "reduce_bucket_size": sets(POSITIVE, "zero.bucket_numel"),
    "stage3_prefetch_bucket_size": sets(COUNT, "zero.prefetch_numel"),
    "stage3_param_persistence_threshold": sets(COUNT, "zero.resident_numel"),
    "stage3_gather_16bit_weights_on_model_save": sets(BOOL, "checkpoint.weights"),
    "mics_shard_size": sets(INTEGER, "parallel.shard_size", lambda size: size if size > 0 else None),
    "contiguous_gradients": needless(BOOL, "gradients are always copied into buckets, which are contiguous"),
    ("reduce_scatter", "use_multi_rank_bucket_allreduce"): needless(
        BOOL, "a bucket is always reduced with one reduce-scatter"
    ),
    "allgather_partitions": needless(BOOL, "a bucket is always gathered with one all-gather"),
    "allgather_bucket_size": needless(COUNT, "buckets are all-gathered in place, without a buffer"),
    "grad_hooks": needless(BOOL, "overlap_comm selects whether gradients are reduced during backward"),
    "load_from_fp32_weights": needless(BOOL, "checkpoints hold the fp32 weights"),
    "elastic_checkpoint": needless(BOOL, "a checkpoint can be loaded on any number of ranks"),
    "sub_group_size": needless(COUNT, "the optimizer updates one bucket at a time"),
    "stage3_max_live_parameters": needless(
        COUNT, "full at any time are the units of one activation checkpoint and zero.prefetch_numel elements ahead"
    ),
    "stage3_max_reuse_distance": needless(
        COUNT, "only the root and the last unit stay unsharded from forward to backward"
    ),
    "stage3_module_granularity_threshold": needless(COUNT, "a unit is a block, or a module that zero.units names"),
    (
        "stage3_use_all_reduce_for_fetch_params",
        "stage3_allgather_sequential",
        "mics_hierarchical_params_gather",
        "memory_efficient_linear",
    ): needless(BOOL, "parameters are all-gathered in place before they are used"),
    ("override_module_apply", "stage3_partition_stream_chunk_size"): needless(
        ANY, "models are initialized in shards, whatever their constructors do"
    ),
    "ignore_unused_parameters": needless(BOOL, "the gradient of an unused parameter counts as zero"),
    "legacy_stage1": needless(BOOL, "there is only one implementation of stage 1"),
    "round_robin_gradients": needless(BOOL, "every rank owns a shard of every bucket, so all ranks copy"),
    ("enable_sanity_checks", "log_trace_cache_warnings"): needless(BOOL, "it configures DeepSpeed's own checks"),
    "pipeline_loading_checkpoint": needless(BOOL, "pipeline parallelism is not supported"),
    "save_muon_momentum_buffer_in_memory": needless(BOOL, "the momentum of Muon is always in memory"),
    "stage3_model_persistence_threshold": unsupported(
        COUNT,
        "the total size of resident parameters cannot be limited; lower stage3_param_persistence_threshold",
        2**63 - 1,
    ),
    "zero_hpz_partition_size": rule(COUNT, "parallel.shard_size", "zero.optimizer_over", note=HPZ),
    ("zero_quantized_weights", "zero_quantized_nontrainable_weights", "zero_quantized_gradients"): unsupported(
        BOOL, QUANTIZED, False
    ),
    "zeropp_loco_param": unsupported(ANY, "quantized communication is not supported; remove it"),
    "leaf_module": unsupported(ANY, "zero.units names the modules that are gathered as one unit; remove it"),
    "zenflow": unsupported(ANY, "every step updates every parameter; remove it"),
    "offload_optimizer": OFFLOAD
    | {
        ("fast_init", "pipeline", "pipeline_read", "pipeline_write"): needless(BOOL, NVME),
        ("super_offload", "convert_grad_on_cpu"): needless(
            BOOL, "copies, casts and the update overlap, one bucket at a time"
        ),
        "cpuadam_cores_perc": needless(NUMBER, "OMP_NUM_THREADS sets the number of threads that update"),
        "ratio": unsupported(
            NUMBER,
            "a fraction cannot be chosen; set 1, or choose offload.mode=auto, which keeps on the accelerator what fits",
            1,
        ),
    },
    "offload_param": OFFLOAD | {("buffer_size", "max_in_cpu"): needless(COUNT, NVME)},
}

PRECISION = {
    "fp16": {
        "enabled": rule(BOOL, "train.precision"),
        "loss_scale": rule(NUMBER, "train.loss_scale.dynamic", "train.loss_scale.initial", note="0 means dynamic"),
        "initial_scale_power": rule(COUNT, "train.loss_scale.initial"),
        "loss_scale_window": sets(POSITIVE, "train.loss_scale.growth_interval"),
        "hysteresis": sets(POSITIVE, "train.loss_scale.hysteresis"),
        "min_loss_scale": sets(NUMBER, "train.loss_scale.minimum"),
        "consecutive_hysteresis": needless(BOOL, "a step without overflow always restores the hysteresis"),
        "auto_cast": needless(BOOL, "the inputs are token ids, which are not cast"),
        "fused_mode": needless(BOOL, "the update is always fused"),
        "fp16_master_weights_and_grads": HALF_STATES,
    },
    "bf16": {
        "enabled": rule(BOOL, "train.precision"),
        "immediate_grad_update": needless(BOOL, "a gradient is copied into its bucket as soon as it is computed"),
        "check_grad_overflow": needless(BOOL, "a step with a non-finite gradient is always skipped"),
        ("bf16_master_weights_and_grads", "bf16_optimizer_states"): HALF_STATES,
    },
    "communication_data_type": one_of(sets(TEXT, "zero.reduce_dtype"), *DTYPES, refusal=NO_SUCH_TYPE),
    "data_types": {
        "grad_accum_dtype": one_of(sets(TEXT, "zero.accumulate_dtype"), *DTYPES, refusal=NO_SUCH_TYPE),
        "param_dtype": rule(TEXT, "train.precision"),
        "buffer_dtype": unsupported(TEXT, "the model has no buffers; remove it"),
    },
}

GRADIENTS = {
    "gradient_clipping": sets(NUMBER, "optimizer.clip_norm", lambda norm: norm or math.inf, note="0 means no clipping"),
    ("prescale_gradients", "gradient_predivide_factor"): needless(
        ANY, "gradients are divided by the number of ranks before they are reduced"
    ),
    "seq_parallel_comm_data_type": needless(
        TEXT, "it is for a sequence-parallel axis of its own, which is not supported"
    ),
    "managed_gradient_accumulation": needless(BOOL, "the trainer marks the last micro-batch of a step"),
    "sparse_gradients": unsupported(BOOL, "gradients are dense; set it to false", False),
    "gradient_allreduce_op": unsupported(TEXT, "gradients are averaged over ranks; choose avg", "avg"),
    "disable_allgather": unsupported(BOOL, "updated parameters are always all-gathered; set it to false", False),
}

OPTIMIZER = {
    "type": one_of(
        rule(TEXT, "optimizer.name", "optimizer.muon.adjust_lr"),
        *OPTIMIZER_NAMES,
        refusal=f"choose {', '.join(OPTIMIZER_NAMES)}",
    ),
    "params": {
        ("lr", "adam_lr"): rule(NUMBER, "optimizer.lr"),
        "muon_lr": rule(NUMBER, "optimizer.muon.lr_factor", note="divided by optimizer.lr"),
        "momentum": rule(NUMBER, "optimizer.momentum", note="SGD without it has none"),
        "nesterov": rule(BOOL, "optimizer.nesterov"),
        "betas": sets(PAIR, "optimizer.betas"),
        "eps": sets(NUMBER, "optimizer.eps"),
        "weight_decay": sets(NUMBER, "optimizer.weight_decay", note="for matrices and embeddings only"),
        ("torch_adam", "fused"): needless(BOOL, "optimizer.implementation chooses a fused one"),
        "adam_w_mode": unsupported(BOOL, "weight decay is always decoupled; set it to true", True),
        "bias_correction": unsupported(BOOL, "bias correction is always on; set it to true", True),
        "amsgrad": unsupported(BOOL, "AMSGrad is not supported; set it to false", False),
        "fp32_optimizer_states": unsupported(BOOL, "moments are always fp32; set it to true", True),
    },
    "legacy_fusion": needless(BOOL, "the update is always fused"),
}

SCHEDULER = {
    "type": one_of(
        rule(TEXT, "schedule.decay", "schedule.min_lr", note="the warm-up is linear, not logarithmic"),
        *DECAYS,
        refusal="choose WarmupLR, WarmupDecayLR or WarmupCosineLR, or remove the scheduler and set schedule.*",
    ),
    "params": {
        "warmup_max_lr": rule(NUMBER, "optimizer.lr"),
        "warmup_num_steps": sets(COUNT, "schedule.warmup_steps"),
        "total_num_steps": sets(POSITIVE, "schedule.decay_steps", note="train.steps sets the length of the run"),
        "cos_min_ratio": rule(NUMBER, "schedule.min_lr", note="multiplied by optimizer.lr"),
        ("warmup_min_lr", "warmup_min_ratio"): WARM_UP,
        "warmup_type": unsupported(TEXT, "the warm-up is always linear; choose linear", "linear"),
        "last_batch_iteration": unsupported(INTEGER, "a run resumes from its checkpoint; set -1", -1),
    },
}

ACTIVATIONS = {
    "partition_activations": rule(BOOL, "activations.store", note="keep if parallel.tensor_size is 1"),
    "cpu_checkpointing": rule(BOOL, "activations.store"),
    "contiguous_memory_optimization": sets(BOOL, "activations.defragment"),
    "number_checkpoints": needless(COUNT, "the number of checkpoints follows from the model"),
    "synchronize_checkpoint_boundary": needless(
        BOOL, "copies and kernels are ordered by events, without synchronizing the device"
    ),
    "profile": needless(BOOL, "dry_run.trace shows every kernel"),
}

REPORTS = {
    "steps_per_print": sets(POSITIVE, "train.log_every"),
    "wandb": {
        "enabled": sets(BOOL, "wandb.mode", lambda is_on: "online" if is_on else "disabled"),
        "project": sets(TEXT, "wandb.project"),
        "group": sets(TEXT, "wandb.group"),
        "team": unsupported(TEXT, "set WANDB_ENTITY in the environment instead; remove it"),
    },
    "tensorboard": {
        "enabled": sets(BOOL, "run.tensorboard"),
        ("output_path", "job_name"): needless(TEXT, "event files are written to run.dir/tensorboard"),
    },
    "csv_monitor": {("enabled", "output_path", "job_name"): needless(ANY, "run.dir/metrics.jsonl holds the metrics")},
    "wall_clock_breakdown": needless(BOOL, "profile.steps selects the steps that are timed"),
    "memory_breakdown": needless(BOOL, "every run prints a table of its memory at the start"),
    "dump_state": needless(BOOL, "run.dir/config.yaml holds every setting"),
    "flops_profiler": needless(ANY, "every run counts its FLOPs"),
    "comms_logger": needless(ANY, "every run counts its traffic"),
    ("timers", "log_level"): needless(ANY, "it configures DeepSpeed's own logging"),
}

OTHERS = {
    "zero_allow_untested_optimizer": needless(BOOL, "every optimizer is tested before it is used"),
    "zero_force_ds_cpu_optimizer": needless(BOOL, "torch's fused AdamW updates on the host"),
    "aio": needless(ANY, NVME),
    "datastates_ckpt": needless(ANY, "checkpoints are written asynchronously"),
    "dataloader_drop_last": needless(BOOL, "the data never ends, and every batch is full"),
    "vocabulary_size": needless(POSITIVE, "model.vocab_size is rounded up to a multiple of model.vocab_multiple"),
    "checkpoint": {
        "tag_validation": needless(TEXT, "ranks agree on a checkpoint before it is marked as complete"),
        "load_universal": needless(BOOL, "a checkpoint can be loaded with any stage, tensor size and number of ranks"),
        "parallel_write": needless(ANY, "every rank writes the states that it owns"),
        "use_node_local_storage": unsupported(
            BOOL, "run.dir is on storage that all nodes share; set it to false", False
        ),
    },
    "graph_harvesting": unsupported(BOOL, "CUDA graphs are not supported; set it to false", False),
    "use_data_before_expert_parallelism": unsupported(
        BOOL, "mixture of experts is not supported; set it to false", False
    ),
    "sequence_parallel_size": unsupported(
        COUNT, "parallel.sequence_parallel splits sequences over the tensor ranks; set 1", 1
    ),
}

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

KEYS = dict(
    flatten(
        {
            **BATCH,
            "zero_optimization": ZERO,
            **PRECISION,
            **GRADIENTS,
            "optimizer": OPTIMIZER,
            "scheduler": SCHEDULER,
            "activation_checkpointing": ACTIVATIONS,
            **REPORTS,
            **OTHERS,
            **{name: unsupported(ANY, f"{way}; remove it, or switch it off") for name, way in FEATURES.items()},
        }
    )
)

# Sections in which only `enabled` is read.
ONLY_ENABLED_IS_READ = {name for name, key in KEYS.items() if key.type is ANY}


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
