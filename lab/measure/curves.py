"""Measured times of an operation by size, as a cluster file holds them."""

from bisect import bisect
from collections.abc import Sequence
from math import exp, log
from typing import Annotated, Self

import torch

from parallel.validation.errors import ConfigError
from parallel.validation.fields import Range, checked

Size = Annotated[float, Range(above=0, at_most=1e18)]
Seconds = Annotated[float, Range(above=0, at_most=1e9)]


@checked
class Curve:
    """The seconds of an operation with several sizes of its data, the smallest one first."""

    name: str
    num_bytes: tuple[Size, ...]
    seconds: tuple[Seconds, ...]

    def __post_init__(self) -> None:
        if not len(self.num_bytes) == len(self.seconds) > 0 or list(self.num_bytes) != sorted(set(self.num_bytes)):
            raise ConfigError(
                f"the curve {self.name!r} has {len(self.num_bytes)} num_bytes and {len(self.seconds)} seconds; give as "
                "many of each, at least one, the smallest size first"
            )

    @classmethod
    def read(cls, field: str, values: object) -> Self:
        """Return the curve that a file describes. Raises ConfigError if it does not."""
        names = {"name", "num_bytes", "seconds"}
        if not isinstance(values, dict) or set(values) != names:
            raise ConfigError(f"an element of {field} is no measured curve; give it {', '.join(sorted(names))}")
        return cls(**values)

    def at(self, num_bytes: float) -> float:
        """Return the seconds with `num_bytes`.

        Between two measured sizes the logarithm of the time is linear in that of the size. Below the smallest size the
        time is constant, and above the largest one the rate.
        """
        after = bisect(self.num_bytes, num_bytes)
        if after == 0:
            return self.seconds[0]
        if after == len(self.num_bytes):
            return self.seconds[-1] * num_bytes / self.num_bytes[-1]
        low, high = self.num_bytes[after - 1 : after + 1]
        share = log(num_bytes / low) / log(high / low)
        return exp((1 - share) * log(self.seconds[after - 1]) + share * log(self.seconds[after]))


def mean_curves(by_rank: Sequence[Sequence[Curve]]) -> tuple[Curve, ...]:
    """Return the curves with the mean times of all ranks, which have measured the same sizes."""
    means = []
    for curves in zip(*by_rank, strict=True):
        seconds = [sum(times) / len(times) for times in zip(*(curve.seconds for curve in curves), strict=True)]
        means.append(Curve(curves[0].name, curves[0].num_bytes, tuple(seconds)))
    return tuple(means)


def curve_name(kernel: str, dtype: torch.dtype) -> str:
    """Return the name of the curve of a kernel, which in place is the same."""
    return f"{kernel.strip('_')} {type_name(dtype)}"


def type_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
