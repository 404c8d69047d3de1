"""The transports of an engine, and the parameters of each."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import nn

from parallel.validation.errors import ConfigError, check_type
from zero.buckets.transport import Transport, TransportOf
from zero.partition.config import ZeroConfig


class Transports:
    """The transports that are described for the parameters of an engine, opened once each.

    Raises ConfigError if one of them is not allowed in the stage, or cannot be beside the others.
    """

    def __init__(
        self,
        described: Transport | TransportOf,
        params: Iterable[Mapping[str, nn.Parameter]],
        config: ZeroConfig,
        device: torch.device,
    ):
        """`params`: those of each unit, by name."""
        opened: dict[int, Transport] = {}
        self._of: dict[nn.Parameter, Transport] = {}
        for name, param in [item for of_unit in params for item in of_unit.items()]:
            one = described if isinstance(described, Transport) else described(name, param)
            check_type(f"`transport` of {name}", one, Transport, "such as Direct(axis)")
            if id(one) not in opened:
                if config.stage not in one.stages:
                    allowed = ", ".join(map(str, one.stages))
                    raise ConfigError(
                        f"ZeroConfig.stage={config.stage} with transport {one.name} of {name}; choose stage {allowed}"
                    )
                opened[id(one)] = one.open(device)
            self._of[param] = opened[id(one)]
        self.opened: Sequence[Transport] = list(opened.values())
        self.grain = math.lcm(*(one.grain(math.lcm(config.alignment, one.alignment)) for one in self.opened))
        """The number of elements of which a bucket of any transport has a multiple."""
        kinds = {(one.is_exact, one.counted if one.is_exact else None): one.name for one in self.opened}
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

    def only(self, what: str = "this") -> Transport:
        """Return the only transport. Raises ConfigError, for `what`, if parameters are divided over different ranks."""
        if len({(one.owners, one.replicas) for one in self.opened}) > 1:
            raise ConfigError(
                f"parameters are divided over different ranks, by {' and '.join(one.name for one in self.opened)}, and "
                f"{what} needs one division of all; give ZeroDataParallel one `transport`"
            )
        return self.opened[0]
