"""Computes the bytes that each rank sends in a step of data parallelism, in closed form (paper, section 7)."""

from zero.core.partition.stage import Division, Lifetime, ShardingPolicy


def axis_sizes(policy: ShardingPolicy, data_size: int, group_size: int | None = None) -> tuple[int, int]:
    """Return the number of ranks in a group, all of them if `group_size` is None, and the number of groups."""
    inner = (group_size or data_size) if policy.divides_optimizer else 1
    return inner, data_size // inner


def axis_bytes(
    policy: ShardingPolicy,
    parameter_bytes: float | tuple[float, float],
    sizes: tuple[int, int],
    num_micro_batches: int = 1,
    *,
    gradient_bytes: tuple[float, float] | None = None,
    resident_bytes: float = 0.0,
    kept_bytes: float = 0.0,
) -> tuple[float, float]:
    """Return the bytes that one rank sends in a step inside its group and between groups: axes of these sizes.

    Let Psi be `parameter_bytes`, the bytes of all parameters, or a pair: those inside a group, with a byte for each
    that is gathered in FP8 (scales, 4 bytes a block once a step, are left out), and those between groups. Without
    groups, a step with one micro-batch sends 2 Psi (N-1)/N in stages 0 to 2, and 3 Psi (N-1)/N in stage 3. Each further
    micro-batch adds a reduction if full gradients are transient, and two all-gathers if full parameters are transient.
    Between groups only the rank's shard is reduced, and only once a step; it is gathered too if all ranks divide the
    optimizer's states, else it is all-reduced. Stage 0 has groups of one rank.
    `gradient_bytes` are the bytes of all gradients as messages in a group and between groups; None: `parameter_bytes`.
    If full parameters are transient, two parts of `parameter_bytes` are gathered less often. `resident_bytes` persist
    and are gathered once a step. `kept_bytes` (the root and the last unit) stay unsharded from forward to backward, and
    are not gathered again for backward.
    """
    group_size, num_groups = sizes
    given = parameter_bytes
    parameter_bytes, updated_bytes = given if isinstance(given, tuple) else (given, given)
    num_reductions = num_micro_batches if policy.full_grads is Lifetime.TRANSIENT else 1
    gathered_bytes = parameter_bytes
    if policy.full_params is Lifetime.TRANSIENT:
        transient_bytes = parameter_bytes - resident_bytes
        gathered_bytes = num_micro_batches * (2 * transient_bytes - kept_bytes) + resident_bytes
    reduced_bytes, between_bytes = gradient_bytes or (updated_bytes, updated_bytes)
    inside = (num_reductions * reduced_bytes + gathered_bytes) * (group_size - 1) / group_size
    between = between_bytes + (updated_bytes if policy.optimizer is Division.ALL else between_bytes)
    return inside, between / group_size * (num_groups - 1) / num_groups
