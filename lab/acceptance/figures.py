"""The figures of an acceptance run, and what counts as passed."""

import math
from dataclasses import dataclass


class UnreadableResult(Exception):
    """A part has ended without the result that it should have left; the message is one line."""


@dataclass(frozen=True)
class Figure:
    """One measured number or statement. `required` says what counts as passed; empty: it is recorded only."""

    what: str
    value: float | str
    unit: str = ""
    required: str = ""
    passed: bool = True

    @property
    def text(self) -> str:
        if isinstance(self.value, str):
            return f"{self.value} {self.unit}".strip()
        form = ",.0f" if abs(self.value) >= 1000 else ".4g"  # no exponents of large numbers
        return f"{self.value:{form}} {self.unit}".strip()


@dataclass(frozen=True)
class PartResult:
    """The result of one part; `problem` is one line, empty if the part ran to its end."""

    name: str
    seconds: float
    problem: str
    figures: tuple[Figure, ...]

    @property
    def passed(self) -> bool:
        return not self.problem and all(figure.passed for figure in self.figures)


def between(what: str, value: float, limits: tuple[float, float], *, is_judged: bool = True) -> Figure:
    """Return a figure that has to be between two limits. A figure that is not judged is recorded only."""
    low, high = limits
    required = f"at most {high:g}" if low == -math.inf else f"{low:g} to {high:g}"
    return Figure(what, value, required=required, passed=low <= value <= high) if is_judged else Figure(what, value)


def at_most(what: str, value: float, limit: float, *, is_judged: bool = True) -> Figure:
    return between(what, value, (-math.inf, limit), is_judged=is_judged)
