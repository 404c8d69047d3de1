"""The rows of DeepSpeed's section zero_optimization (see `gpt/deepspeed/keys.py`)."""

from gpt.deepspeed.key import Key, ValueType, combined, mapped, not_needed, restricted, section, unsupported

FOR_NVME = "it configures NVMe, which is not used"

ZERO = section(
    "zero_optimization",
    mapped("stage", ValueType.NON_NEGATIVE, "zero.stage"),
    mapped("overlap_comm", ValueType.BOOLEAN, "zero.overlap"),
    mapped("reduce_bucket_size", ValueType.POSITIVE, "zero.bucket_numel"),
    mapped("stage3_prefetch_bucket_size", ValueType.NON_NEGATIVE, "zero.prefetch_numel"),
    mapped("stage3_param_persistence_threshold", ValueType.NON_NEGATIVE, "zero.resident_numel"),
    mapped("stage3_gather_16bit_weights_on_model_save", ValueType.BOOLEAN, "checkpoint.weights"),
    mapped("mics_shard_size", ValueType.INTEGER, "parallel.shard_size", lambda size: size if size > 0 else None),
    not_needed(
        ValueType.BOOLEAN, "gradients are always copied into buckets, which are contiguous", "contiguous_gradients"
    ),
    not_needed(
        ValueType.BOOLEAN,
        "a bucket is always reduced with one reduce-scatter",
        "reduce_scatter",
        "use_multi_rank_bucket_allreduce",
    ),
    not_needed(ValueType.BOOLEAN, "a bucket is always gathered with one all-gather", "allgather_partitions"),
    not_needed(ValueType.NON_NEGATIVE, "buckets are all-gathered in place, without a buffer", "allgather_bucket_size"),
    not_needed(ValueType.BOOLEAN, "overlap_comm selects whether gradients are reduced during backward", "grad_hooks"),
    not_needed(ValueType.BOOLEAN, "checkpoints hold the fp32 weights", "load_from_fp32_weights"),
    not_needed(ValueType.BOOLEAN, "a checkpoint can be loaded on any number of ranks", "elastic_checkpoint"),
    not_needed(ValueType.NON_NEGATIVE, "the optimizer updates one bucket at a time", "sub_group_size"),
    not_needed(
        ValueType.NON_NEGATIVE,
        "full at any time are the units of one activation checkpoint and zero.prefetch_numel elements ahead",
        "stage3_max_live_parameters",
    ),
    not_needed(
        ValueType.NON_NEGATIVE,
        "only the root and the last unit stay unsharded from forward to backward",
        "stage3_max_reuse_distance",
    ),
    not_needed(
        ValueType.NON_NEGATIVE,
        "a unit is a block, or a module that zero.units names",
        "stage3_module_granularity_threshold",
    ),
    not_needed(
        ValueType.BOOLEAN,
        "parameters are all-gathered in place before they are used",
        "stage3_use_all_reduce_for_fetch_params",
        "stage3_allgather_sequential",
        "mics_hierarchical_params_gather",
        "memory_efficient_linear",
    ),
    not_needed(
        ValueType.ANY,
        "models are initialized in shards, whatever their constructors do",
        "override_module_apply",
        "stage3_partition_stream_chunk_size",
    ),
    not_needed(ValueType.BOOLEAN, "the gradient of an unused parameter counts as zero", "ignore_unused_parameters"),
    not_needed(ValueType.BOOLEAN, "there is only one implementation of stage 1", "legacy_stage1"),
    not_needed(
        ValueType.BOOLEAN, "every rank owns a shard of every bucket, so all ranks copy", "round_robin_gradients"
    ),
    not_needed(
        ValueType.BOOLEAN, "it configures DeepSpeed's own checks", "enable_sanity_checks", "log_trace_cache_warnings"
    ),
    not_needed(ValueType.BOOLEAN, "pipeline parallelism is not supported", "pipeline_loading_checkpoint"),
    not_needed(
        ValueType.BOOLEAN,
        "the momentum of Muon is always in memory",
        "save_muon_momentum_buffer_in_memory",
    ),
    unsupported(
        "stage3_model_persistence_threshold",
        ValueType.NON_NEGATIVE,
        "the total size of resident parameters cannot be limited; lower stage3_param_persistence_threshold",
        2**63 - 1,
    ),
    unsupported(
        "zero_hpz_partition_size",
        ValueType.NON_NEGATIVE,
        "a secondary copy of the parameters inside a node is not supported; set 1, or use mics_shard_size, which "
        "shards all states inside groups",
        0,
        1,
    ),
    *(
        unsupported(
            name,
            ValueType.BOOLEAN,
            "quantized communication is not supported; set it to false, and for slow links set mics_shard_size",
            False,
        )
        for name in ("zero_quantized_weights", "zero_quantized_nontrainable_weights", "zero_quantized_gradients")
    ),
    unsupported("zeropp_loco_param", ValueType.ANY, "quantized communication is not supported; remove it"),
    unsupported("leaf_module", ValueType.ANY, "zero.units names the modules that are gathered as one unit; remove it"),
    unsupported("zenflow", ValueType.ANY, "every step updates every parameter; remove it"),
)


def offload_section(name: str, *others: Key | list[Key]) -> list[Key]:
    """Return the keys that both sections of offloading have, and `others`."""
    device = combined("device", ValueType.STRING, "offload.mode", "offload.states")
    return section(
        f"zero_optimization.{name}",
        restricted(
            device,
            "cpu",
            "none",
            refusal="states are stored on the accelerator or in host memory, never on NVMe; choose cpu",
        ),
        not_needed(ValueType.BOOLEAN, "host memory is always pinned if there is an accelerator", "pin_memory"),
        not_needed(ValueType.ANY, FOR_NVME, "nvme_path", "buffer_count"),
        *others,
    )


OFFLOAD = [
    *offload_section(
        "offload_optimizer",
        not_needed(ValueType.BOOLEAN, FOR_NVME, "fast_init", "pipeline", "pipeline_read", "pipeline_write"),
        not_needed(
            ValueType.BOOLEAN,
            "copies, casts and the update overlap, one bucket at a time",
            "super_offload",
            "convert_grad_on_cpu",
        ),
        not_needed(ValueType.NUMBER, "OMP_NUM_THREADS sets the number of threads that update", "cpuadam_cores_perc"),
        unsupported(
            "ratio",
            ValueType.NUMBER,
            "a fraction cannot be chosen; set 1, or choose offload.mode=auto, which keeps on the accelerator what fits",
            1,
        ),
    ),
    *offload_section("offload_param", not_needed(ValueType.NON_NEGATIVE, FOR_NVME, "buffer_size", "max_in_cpu")),
]
