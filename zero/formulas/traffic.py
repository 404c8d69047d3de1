"""Computes the bytes that each rank sends in a step of data parallelism, in closed form (paper, section 7)."""

from zero.partition.stage import Lifetime, ShardingPolicy


def step_bytes(
    policy: ShardingPolicy,
    parameter_bytes: float,
    data_size: int,
    num_micro_batches: int = 1,
    gradient_bytes: float | None = None,
) -> float:
    """Return the bytes that one rank sends in a step.

    Let Psi be `parameter_bytes`, the bytes of all parameters, and N be `data_size`. A step with one micro-batch sends
    2 Psi (N-1)/N in stages 0 to 2, and 3 Psi (N-1)/N in stage 3. Each further micro-batch adds a reduction if full
    gradients are transient, and two all-gathers if full parameters are transient. `gradient_bytes` are the bytes of all
    gradients in `ZeroConfig.reduce_dtype`; None: Psi.
    """
    sizes = (data_size, 1) if policy.shard_optimizer else (1, data_size)
    return sum(axis_bytes(policy, parameter_bytes, sizes, num_micro_batches, gradient_bytes=gradient_bytes))


def axis_bytes(
    policy: ShardingPolicy,
    parameter_bytes: float,
    sizes: tuple[int, int],
    num_micro_batches: int = 1,
    *,
    gradient_bytes: float | None = None,
    resident_bytes: float = 0.0,
    kept_bytes: float = 0.0,
) -> tuple[float, float]:
    """Return the bytes that one rank sends in a step along the shard axis and along the replica axis, of these sizes.

    `gradient_bytes` are the bytes of one reduction of all gradients; None: `parameter_bytes`.
    If full parameters are transient, two parts of `parameter_bytes` are gathered less often. `resident_bytes` persist
    and are gathered once a step. `kept_bytes` (the root and the last unit) stay unsharded from forward to backward, and
    are not gathered again for backward.
    """
    shard_size, replica_size = sizes
    num_reductions = num_micro_batches if policy.full_grads is Lifetime.TRANSIENT else 1
    gathered_bytes = parameter_bytes
    if policy.full_params is Lifetime.TRANSIENT:
        transient_bytes = parameter_bytes - resident_bytes
        gathered_bytes = num_micro_batches * (2 * transient_bytes - kept_bytes) + resident_bytes
    reduced_bytes = num_reductions * (parameter_bytes if gradient_bytes is None else gradient_bytes)
    along_shards = (reduced_bytes + gathered_bytes) * (shard_size - 1) / shard_size
    return along_shards, 2 * reduced_bytes / shard_size * (replica_size - 1) / replica_size
