"""The transports of an engine, and the parameters of each."""

import math
from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import nn

from parallel.mesh import Axis
from parallel.validation.errors import ConfigError, check_type
from zero.core.partition.config import PartitionConfig
from zero.core.partition.stage import Lifetime
from zero.core.protocols.transport import Transport, TransportOf


class Transports:
    """The transports that are described for the parameters of an engine, opened once each.

    Raises ConfigError if one of them contradicts the settings, or cannot be beside the others.
    """

    def __init__(
        self,
        described: Transport | TransportOf,
        params: Iterable[Mapping[str, nn.Parameter]],
        config: PartitionConfig,
        data: Axis,
        device: torch.device,
    ):
        """Open them; `params`: those of each unit, by name."""
        keeps_full = config.policy.full_grads is Lifetime.PERSISTENT
        opened: dict[Transport, Transport] = {}
        self._of: dict[nn.Parameter, Transport] = {}
        for name, param in [item for of_unit in params for item in of_unit.items()]:
            one = described if isinstance(described, Transport) else described(name, param)
            check_type(f"`transport` of {name}", one, Transport, "such as Direct(axis)")
            if one not in opened:
                _check(one, name, config)
                opened[one] = one.open(device, keeps_full=keeps_full)
            self._of[param] = opened[one]
        self._data, self.opened = data, list(opened.values())
        if sum(one.is_lossy for one in self.opened) > 1:
            raise ConfigError(
                f"gathers that lose digits, in {len(self.opened)} transports: each would need scales of its own; give "
                "one `transport` object to all parameters, or choose ZeroConfig.gather_dtype=null"
            )
        self.grain = math.lcm(*(one.grain(config.alignment) for one in self.opened))
        """The number of elements of which a bucket of any transport has a multiple."""
        kinds = {
            (one.is_rank_invariant, one.counted if one.is_rank_invariant else None): one.name for one in self.opened
        }
        if len(kinds) > 1:
            raise ConfigError(
                f"transports {' and '.join(kinds.values())} in one model: sums in a fixed order and others, or along "
                "other ranks; choose one of them for all parameters"
            )

    def divide(self, params: Mapping[str, nn.Parameter]) -> Iterator[tuple[Transport, dict[str, nn.Parameter]]]:
        """Iterate over (transport, its parameters)."""
        for one in self.opened:
            if own := {name: param for name, param in params.items() if self._of[param] is one}:
                yield one, own

    def only(self, what: str) -> Transport:
        """Return the only transport. Raises ConfigError, for `what`, unless all ranks divide all parameters alike."""
        first = self.opened[0]
        is_whole = first.owners.size * first.replicas.size == self._data.size
        divisions = {(one.owners, one.replicas, one.num_shards) for one in self.opened}
        if not is_whole or len(divisions) > 1:
            raise ConfigError(
                f"parameters are divided over a part of the ranks, by {' and '.join(one.name for one in self.opened)}, "
                f"and {what} needs one division over all; give ZeroDataParallel one `transport`"
            )
        return first


def _check(one: Transport, name: str, config: PartitionConfig) -> None:
    """Raise ConfigError if a transport that is given contradicts the settings."""
    if config.stage not in one.stages:
        allowed = ", ".join(map(str, one.stages))
        raise ConfigError(
            f"ZeroConfig.stage={config.stage} with transport {one.name} of {name}; choose stage {allowed}"
        )
    if one.owners.rank % one.num_shards != one.gathered_along.rank or one.owners.size % one.num_shards:
        raise ValueError(
            f"transport {one.name} of {name}: rank {one.owners.rank} of its {one.owners.size} owners is rank "
            f"{one.gathered_along.rank} of the {one.num_shards} ranks that it gathers along; owner r must be rank "
            f"r % {one.num_shards}"
        )
