"""The transports, homes and extensions that settings stand for; a room is imported when a setting asks for it."""

from collections.abc import Callable
from functools import cache, partial
from typing import TYPE_CHECKING

import torch
from torch import nn

from parallel.mesh import Axis
from parallel.validation.errors import ConfigError
from zero.core.partition.stage import Division, Lifetime, ShardingPolicy
from zero.core.protocols.extension import Extension
from zero.core.protocols.home import Home, Homes
from zero.core.protocols.transport import AllReduce, Direct, Transport, TransportOf
from zero.extensions.agreement import LaunchOrder
from zero.settings.config import OffloadConfig, ZeroConfig

if TYPE_CHECKING:
    from zero.transports.block_sums import Blocks


def transports_of(
    config: ZeroConfig, data: Axis, module: nn.Module, device: torch.device, given: Transport | TransportOf | None
) -> TransportOf:
    """Return the transport of each parameter: what is `given`, or what the settings choose, and FP8 gathers around it.

    Its calls raise ConfigError if a transport that is given contradicts the settings.
    """
    chosen = transport_of(config, data) if given is None else given
    wrap = lossy_gathers(config, module, device)

    def of(name: str, param: nn.Parameter) -> Transport:
        one = chosen if isinstance(chosen, Transport) else chosen(name, param)
        if given is not None and isinstance(one, Transport):
            _check(one, name, config)
        return wrap(param, one) if isinstance(one, Transport) else one  # which the engine refuses

    return of


def transport_of(config: ZeroConfig, data: Axis) -> Transport:
    """Return the transport of all parameters over `data`, whose parts, if it has some, are groups of ranks."""
    inner, outer = levels_of(config.policy, data)
    over_all, in_fp32 = config.policy.optimizer is Division.ALL, config.sum_over_ranks == "fp32"
    if config.fixes_order:
        from zero.transports.fixed_order import FixedOrder

        num_blocks, of_each = config.leaf_blocks, config.leaf_parts
        return FixedOrder(data, inner, outer, num_blocks=num_blocks, num_ranks_of_each=of_each, over_all=over_all)
    if not config.policy.divides_optimizer:
        return AllReduce(data, in_fp32=in_fp32)
    if outer.size == 1:
        return Direct(inner, in_fp32=in_fp32)
    from zero.transports.two_level import TwoLevel

    return TwoLevel(data, inner, outer, over_all=over_all, in_fp32=in_fp32)


def lossy_gathers(
    config: ZeroConfig, module: nn.Module, device: torch.device
) -> Callable[[nn.Parameter, Transport], Transport]:
    """Return what is around the transport of a parameter if some are gathered with fewer digits."""
    if config.gather_dtype is None:
        return lambda _param, transport: transport
    from zero.fp8.weight_codec import weight_codec
    from zero.transports.coded import Coded

    codec = weight_codec(module, device)
    coded = cache(partial(Coded, codec=codec))
    return lambda param, transport: coded(transport) if param in codec else transport


def homes_of(config: OffloadConfig, accelerator: torch.device) -> Homes:
    """Return where states begin; with auto, the planner moves some later."""
    here = Home(accelerator)
    if not (offloaded := config.offloaded_states):
        return Homes(here, here, here)
    from zero.homes.on_host import OnHost

    host = OnHost(accelerator)
    return Homes(here, host if "parameters" in offloaded else here, host if "optimizer" in offloaded else here)


def extensions_of(config: ZeroConfig, offload: OffloadConfig, data: Axis, device: torch.device) -> list[Extension]:
    """Return what observes an engine: the ranks' agreement, late gathers, and a planner if there is a budget."""
    chosen: list[Extension] = [LaunchOrder(data, config.policy.compared_axis(data))]
    if config.overlap_gather:
        from zero.extensions.late_gathers import LateGathers

        chosen.append(LateGathers())
    if offload.mode == "auto" or offload.accelerator_memory_gb is not None:
        from zero.homes.budget.planner import PlacementPlanner

        chosen.append(PlacementPlanner(offload, device))
    return chosen


def levels_of(policy: ShardingPolicy, data: Axis) -> tuple[Axis, Axis]:
    """Return the axis of the ranks of a group, which divide the states, and that of the groups."""
    alone = data.without_peers()
    if not policy.divides_optimizer:
        return alone, data
    return data.parts or (data, alone)


def blocks_of(config: ZeroConfig, group_size: int, num_groups: int) -> "Blocks":
    """Return the blocks of a step's micro-batches if their order is fixed; else a single one, of one unit."""
    from zero.transports.block_sums import Blocks

    if not config.fixes_order:
        return Blocks(1, 1)
    keeps_full = config.policy.full_grads is Lifetime.PERSISTENT
    return Blocks(group_size, num_groups, config.leaf_blocks, config.leaf_parts, keeps_full)


def _check(one: Transport, name: str, config: ZeroConfig) -> None:
    """Raise ConfigError if a transport that is given contradicts the settings that would have chosen another one."""
    if config.optimizer_over == "all":
        raise ConfigError(
            f"ZeroConfig.optimizer_over=all with transport {one.name}, which decides it; choose group, and "
            "TwoLevel(over_all=True)"
        )
    needed = "leaves" if one.is_rank_invariant else "fp32" if one.in_fp32 else "message"
    if config.sum_over_ranks != needed:
        raise ConfigError(
            f"ZeroConfig.sum_over_ranks={config.sum_over_ranks} with transport {one.name} of {name}, which adds "
            f"otherwise; choose {needed}"
        )
