"""The keys of DeepSpeed's JSON configuration, a row each: which settings it is mapped onto here, why it needs nothing,
or which of its values are refused, and what to do instead.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any

from gpt.deepspeed.row import Key, Kind, joins, maps, needless, only, refused, same, section

FOR_NVME = "for NVMe only"
HALF_STATES = "master weights and moments are fp32; set it to false"

BATCH = [
    joins("train_batch_size", Kind.SIZE, "train.global_batch_size"),
    joins("train_micro_batch_size_per_gpu", Kind.SIZE, "train.micro_batch_size"),
    joins("gradient_accumulation_steps", Kind.SIZE, "train.global_batch_size"),
]

ZERO = section(
    "zero_optimization",
    maps("stage", Kind.COUNT, "zero.stage"),
    maps("overlap_comm", Kind.SWITCH, "zero.overlap"),
    maps("reduce_bucket_size", Kind.SIZE, "zero.bucket_numel"),
    maps("stage3_prefetch_bucket_size", Kind.COUNT, "zero.prefetch_numel"),
    maps("stage3_param_persistence_threshold", Kind.COUNT, "zero.resident_numel"),
    maps("stage3_gather_16bit_weights_on_model_save", Kind.SWITCH, "checkpoint.weights"),
    maps("mics_shard_size", Kind.INTEGER, "parallel.shard_size", lambda size: size if size > 0 else None),
    needless(Kind.SWITCH, "gradients always go into buckets, which are contiguous", "contiguous_gradients"),
    needless(Kind.SWITCH, "a bucket is always one reduce-scatter", "reduce_scatter", "use_multi_rank_bucket_allreduce"),
    needless(Kind.SWITCH, "a bucket is always one all-gather", "allgather_partitions"),
    needless(Kind.COUNT, "buckets are gathered in place, without a buffer", "allgather_bucket_size"),
    needless(Kind.SWITCH, "gradients leave during backward where overlap_comm says so", "grad_hooks"),
    needless(Kind.SWITCH, "checkpoints hold the fp32 weights", "load_from_fp32_weights"),
    needless(Kind.SWITCH, "any number of ranks reads any checkpoint", "elastic_checkpoint"),
    needless(Kind.COUNT, "the update goes bucket by bucket", "sub_group_size"),
    needless(
        Kind.COUNT,
        "whole at a time are the units of one checkpoint and prefetch_numel elements ahead",
        "stage3_max_live_parameters",
    ),
    needless(
        Kind.COUNT, "the root and the last unit stay from forward to backward, no other", "stage3_max_reuse_distance"
    ),
    needless(Kind.COUNT, "a unit is a block, or what zero.units says", "stage3_module_granularity_threshold"),
    needless(
        Kind.SWITCH,
        "parameters are gathered where they are used, without copies",
        "stage3_use_all_reduce_for_fetch_params",
        "stage3_allgather_sequential",
        "mics_hierarchical_params_gather",
        "memory_efficient_linear",
    ),
    needless(
        Kind.ANYTHING,
        "models are born in shards, by any constructor",
        "override_module_apply",
        "stage3_partition_stream_chunk_size",
    ),
    needless(Kind.SWITCH, "a parameter without a gradient counts as zero", "ignore_unused_parameters"),
    needless(Kind.SWITCH, "there is one stage 1", "legacy_stage1"),
    needless(Kind.SWITCH, "every rank owns a part of every bucket, so all of them copy", "round_robin_gradients"),
    needless(Kind.SWITCH, "DeepSpeed's own checks", "enable_sanity_checks", "log_trace_cache_warnings"),
    needless(Kind.SWITCH, "there are no pipelines", "pipeline_loading_checkpoint"),
    needless(Kind.SWITCH, "there is no Muon", "save_muon_momentum_buffer_in_memory"),
    refused(
        "stage3_model_persistence_threshold",
        Kind.COUNT,
        "resident parameters are not limited as a whole; lower stage3_param_persistence_threshold",
        2**63 - 1,
    ),
    refused(
        "zero_hpz_partition_size",
        Kind.COUNT,
        "there is no second copy of parameters inside nodes; set 1, or divide all states inside groups by "
        "mics_shard_size",
        0,
        1,
    ),
    *(
        refused(name, Kind.SWITCH, "nothing is quantized; set false, and for slow links mics_shard_size", False)
        for name in ("zero_quantized_weights", "zero_quantized_nontrainable_weights", "zero_quantized_gradients")
    ),
    refused("zeropp_loco_param", Kind.ANYTHING, "nothing is quantized; remove it"),
    refused("leaf_module", Kind.ANYTHING, "name what is gathered together in zero.units; remove it"),
    refused("zenflow", Kind.ANYTHING, "every step updates every parameter; remove it"),
)


def offloaded(name: str, *others: Key | Iterator[Key]) -> Iterator[Key]:
    device = joins("device", Kind.TEXT, "offload.mode", "offload.states")
    return section(
        f"zero_optimization.{name}",
        only(
            device, "cpu", "none", else_say="states are on the accelerator or in host memory, never on NVMe; choose cpu"
        ),
        needless(Kind.SWITCH, "host memory is always pinned where there is an accelerator", "pin_memory"),
        needless(Kind.ANYTHING, FOR_NVME, "nvme_path", "buffer_count"),
        *others,
    )


OFFLOAD = [
    *offloaded(
        "offload_optimizer",
        needless(Kind.SWITCH, FOR_NVME, "fast_init", "pipeline", "pipeline_read", "pipeline_write"),
        needless(
            Kind.SWITCH,
            "copies, update and casts go bucket by bucket, side by side",
            "super_offload",
            "convert_grad_on_cpu",
        ),
        needless(Kind.NUMBER, "OMP_NUM_THREADS is how many threads update", "cpuadam_cores_perc"),
        refused(
            "ratio",
            Kind.NUMBER,
            "no share can be chosen; set 1, or choose offload.mode=auto, which keeps as much as there is room for",
            1,
        ),
    ),
    *offloaded("offload_param", needless(Kind.COUNT, FOR_NVME, "buffer_size", "max_in_cpu")),
]

PRECISION = [
    *section(
        "fp16",
        joins("enabled", Kind.SWITCH, "train.precision"),
        joins("loss_scale", Kind.NUMBER, "train.loss_scale.dynamic", "train.loss_scale.initial", why="0 is dynamic"),
        joins("initial_scale_power", Kind.COUNT, "train.loss_scale.initial"),
        maps("loss_scale_window", Kind.SIZE, "train.loss_scale.growth_interval"),
        maps("hysteresis", Kind.SIZE, "train.loss_scale.hysteresis"),
        maps("min_loss_scale", Kind.NUMBER, "train.loss_scale.minimum"),
        needless(Kind.SWITCH, "a good step always refills it", "consecutive_hysteresis"),
        needless(Kind.SWITCH, "the inputs are token ids", "auto_cast"),
        needless(Kind.SWITCH, "the update is always fused", "fused_mode"),
        refused("fp16_master_weights_and_grads", Kind.SWITCH, HALF_STATES, False),
    ),
    *section(
        "bf16",
        joins("enabled", Kind.SWITCH, "train.precision"),
        needless(Kind.SWITCH, "a gradient goes into its bucket as it comes", "immediate_grad_update"),
        needless(Kind.SWITCH, "a step with a non-finite gradient is always skipped", "check_grad_overflow"),
        refused("bf16_master_weights_and_grads", Kind.SWITCH, HALF_STATES, False),
        refused("bf16_optimizer_states", Kind.SWITCH, HALF_STATES, False),
    ),
    joins("communication_data_type", Kind.TEXT, "train.precision", why="gradients travel in this type"),
    *section(
        "data_types",
        joins("grad_accum_dtype", Kind.TEXT, "train.precision", why="gradients are summed in this type"),
        joins("param_dtype", Kind.TEXT, "train.precision"),
        refused("buffer_dtype", Kind.TEXT, "the model has no buffers; remove it"),
    ),
]

GRADIENTS = [
    maps("gradient_clipping", Kind.NUMBER, "optimizer.clip_norm", lambda norm: norm or math.inf, why="0 is never"),
    *needless(
        Kind.ANYTHING,
        "gradients are divided by the number of ranks before they are reduced",
        "prescale_gradients",
        "gradient_predivide_factor",
    ),
    *needless(Kind.TEXT, "for sequences that are split over ranks of their own", "seq_parallel_comm_data_type"),
    *needless(Kind.SWITCH, "the trainer knows a step's last micro-batch", "managed_gradient_accumulation"),
    refused("sparse_gradients", Kind.SWITCH, "gradients are dense; set it to false", False),
    refused("gradient_allreduce_op", Kind.TEXT, "gradients are means over ranks; choose avg", "avg"),
    refused("disable_allgather", Kind.SWITCH, "updated parameters are gathered; set it to false", False),
]

OPTIMIZER = [
    *section(
        "optimizer",
        only(
            next(needless(Kind.TEXT, "the optimizer is AdamW", "type")),
            "Adam",
            "AdamW",
            else_say="the optimizer is AdamW; choose Adam or AdamW",
        ),
        section(
            "params",
            joins("lr", Kind.NUMBER, "optimizer.lr"),
            maps("betas", Kind.PAIR, "optimizer.betas"),
            maps("eps", Kind.NUMBER, "optimizer.eps"),
            maps("weight_decay", Kind.NUMBER, "optimizer.weight_decay", why="of matrices and embeddings"),
            needless(Kind.SWITCH, "apex's or torch's fused AdamW, whichever works", "torch_adam", "fused"),
            refused("adam_w_mode", Kind.SWITCH, "weight decay is decoupled; set it to true", True),
            refused("bias_correction", Kind.SWITCH, "moments are corrected; set it to true", True),
            refused("amsgrad", Kind.SWITCH, "there is no AMSGrad; set it to false", False),
            refused("fp32_optimizer_states", Kind.SWITCH, "moments are fp32; set it to true", True),
        ),
        needless(Kind.SWITCH, "the update is always fused", "legacy_fusion"),
    ),
    *needless(Kind.SWITCH, "an optimizer is tried out before it is used", "zero_allow_untested_optimizer"),
    *needless(Kind.SWITCH, "torch's fused AdamW updates on the host", "zero_force_ds_cpu_optimizer"),
]

WARM_UP = "the warm-up rises from zero; set it to 0 and shorten it"
SCHEDULER = section(
    "scheduler",
    only(
        joins(
            "type",
            Kind.TEXT,
            "schedule.decay",
            "schedule.min_lr",
            why="the warm-up is a line, not a logarithm",
        ),
        "WarmupLR",
        "WarmupDecayLR",
        "WarmupCosineLR",
        else_say="choose WarmupLR, WarmupDecayLR or WarmupCosineLR, or remove the scheduler and set schedule.*",
    ),
    section(
        "params",
        joins("warmup_max_lr", Kind.NUMBER, "optimizer.lr"),
        maps("warmup_num_steps", Kind.COUNT, "schedule.warmup_steps"),
        maps("total_num_steps", Kind.SIZE, "schedule.decay_steps", why="train.steps is how long the run is"),
        joins("cos_min_ratio", Kind.NUMBER, "schedule.min_lr", why="times optimizer.lr"),
        refused("warmup_min_lr", Kind.NUMBER, WARM_UP, 0),
        refused("warmup_min_ratio", Kind.NUMBER, WARM_UP, 0),
        refused("warmup_type", Kind.TEXT, "the warm-up is a line; choose linear", "linear"),
        refused("last_batch_iteration", Kind.INTEGER, "a run goes on from its checkpoint; set -1", -1),
    ),
)

ACTIVATIONS = section(
    "activation_checkpointing",
    joins("partition_activations", Kind.SWITCH, "activations.store", why="keep, where there are no tensor ranks"),
    joins("cpu_checkpointing", Kind.SWITCH, "activations.store"),
    maps("contiguous_memory_optimization", Kind.SWITCH, "activations.defragment"),
    needless(Kind.COUNT, "slabs take the number that there is", "number_checkpoints"),
    needless(Kind.SWITCH, "one stream waits for another only", "synchronize_checkpoint_boundary"),
    needless(Kind.SWITCH, "dry_run.trace shows each kernel", "profile"),
)

REPORTS = [
    maps("steps_per_print", Kind.SIZE, "train.log_every"),
    maps("wandb.enabled", Kind.SWITCH, "wandb.mode", lambda is_on: "online" if is_on else "disabled"),
    maps("wandb.project", Kind.TEXT, "wandb.project"),
    refused("wandb.team", Kind.TEXT, "set WANDB_ENTITY in the environment; remove it"),
    maps("wandb.group", Kind.TEXT, "wandb.group"),
    maps("tensorboard.enabled", Kind.SWITCH, "run.tensorboard"),
    *section("tensorboard", needless(Kind.TEXT, "event files are in run.dir/tensorboard", "output_path", "job_name")),
    *section(
        "csv_monitor",
        needless(Kind.ANYTHING, "run.dir/metrics.jsonl has the figures", "enabled", "output_path", "job_name"),
    ),
    *needless(Kind.SWITCH, "profile.steps names the steps to time", "wall_clock_breakdown"),
    *needless(Kind.SWITCH, "every run begins with a table of its memory", "memory_breakdown"),
    *needless(Kind.SWITCH, "run.dir/config.yaml has every setting", "dump_state"),
    *needless(Kind.ANYTHING, "every run counts its FLOPs", "flops_profiler"),
    *needless(Kind.ANYTHING, "every run counts its traffic", "comms_logger"),
    *needless(Kind.ANYTHING, "DeepSpeed's own logging", "timers", "log_level"),
]

OTHERS = [
    *needless(Kind.ANYTHING, FOR_NVME, "aio"),
    *needless(Kind.ANYTHING, "checkpoints are written behind the training", "datastates_ckpt"),
    *needless(Kind.SWITCH, "batches have no end and are never short", "dataloader_drop_last"),
    *needless(Kind.SIZE, "model.vocab_size is rounded up to model.vocab_multiple", "vocabulary_size"),
    *section(
        "checkpoint",
        needless(Kind.TEXT, "ranks agree on a checkpoint before it counts", "tag_validation"),
        needless(Kind.SWITCH, "any layout reads any checkpoint", "load_universal"),
        needless(Kind.ANYTHING, "every rank writes what it owns", "parallel_write"),
        refused("use_node_local_storage", Kind.SWITCH, "all nodes share run.dir; set it to false", False),
    ),
    refused("graph_harvesting", Kind.SWITCH, "there are no CUDA graphs; set it to false", False),
    refused("use_data_before_expert_parallelism", Kind.SWITCH, "there are no experts; set it to false", False),
    refused("sequence_parallel_size", Kind.COUNT, "choose parallel.sequence_parallel over tensor ranks; set 1", 1),
]

# Sections of a feature that is not here: accepted where it is switched off, with whatever else they hold.
FEATURES = {
    "amp": "choose fp16 or bf16",
    "torch_autocast": "choose fp16 or bf16",
    "comet": "choose wandb or tensorboard",
    "trackio": "choose wandb or tensorboard",
    "autotuning": "ask the planner, python -m gpt.planner.plan",
    "elasticity": "give batch sizes; a run resumes on any number of ranks",
    "tensor_parallel": "set parallel.tensor_size",
    "pipeline": "there are no pipelines",
    "expert_parallel": "there are no experts",
    "sparse_attention": "attention is dense",
    "curriculum_learning": "sequences have one length",
    "data_efficiency": "sequences have one length",
    "progressive_layer_drop": "every layer runs",
    "compression_training": "nothing is compressed",
    "quantize_training": "nothing is quantized",
    "weight_quantization": "nothing is quantized",
    "eigenvalue": "it serves quantization only",
    "hybrid_engine": "it serves inference only",
    "compile": "nothing is compiled",
    "nebula": "checkpoints are written behind the training, into run.dir",
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
        *(refused(name, Kind.ANYTHING, f"{remedy}; remove it, or switch it off") for name, remedy in FEATURES.items()),
    ]
}

# Sections of which nothing is read but whether they are on.
UNREAD = {name for name, key in KEYS.items() if key.kind is Kind.ANYTHING}


def _cpu_or_none(is_offloaded: bool) -> str:
    return "cpu" if is_offloaded else "none"


# What other versions of DeepSpeed call a key: its name today, and its value.
OTHER_SPELLINGS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "zero_optimization": ("zero_optimization.stage", int),  # true, false
    "allgather_size": ("zero_optimization.allgather_bucket_size", same),
    "zero_optimization.cpu_offload": ("zero_optimization.offload_optimizer.device", _cpu_or_none),
    "zero_optimization.cpu_offload_param": ("zero_optimization.offload_param.device", _cpu_or_none),
    "zero_optimization.cpu_offload_params": ("zero_optimization.offload_param.device", _cpu_or_none),
    "zero_optimization.cpu_offload_use_pin_memory": ("zero_optimization.offload_optimizer.pin_memory", same),
    "zero_optimization.stage3_gather_fp16_weights_on_model_save": (
        "zero_optimization.stage3_gather_16bit_weights_on_model_save",
        same,
    ),
    **{name.replace("stage3_", ""): (name, same) for name in KEYS if name.startswith("zero_optimization.stage3_")},
    **{name.replace("bf16.", "bfloat16.", 1): (name, same) for name in KEYS if name.startswith("bf16.")},
    "fp32_allreduce": ("communication_data_type", lambda is_fp32: "fp32" if is_fp32 else None),
    "optimizer.params.max_grad_norm": ("gradient_clipping", same),
}
