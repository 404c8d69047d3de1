"""The figures of an acceptance run, and what counts as passed."""

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
        """The value and its unit."""
        value = self.value if isinstance(self.value, str) else f"{self.value:,.4g}"
        return f"{value} {self.unit}".strip()


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


def at_most(what: str, value: float, limit: float, unit: str = "", *, is_judged: bool = True) -> Figure:
    """Return a figure that has to be at most `limit`. A figure that is not judged is recorded only."""
    if not is_judged:
        return Figure(what, value, unit)
    return Figure(what, value, unit, f"at most {limit:g}", value <= limit)  # not a number: False


def between(what: str, value: float, limits: tuple[float, float], unit: str = "", *, is_judged: bool = True) -> Figure:
    """Return a figure that has to be between two limits. A figure that is not judged is recorded only."""
    if not is_judged:
        return Figure(what, value, unit)
    low, high = limits
    return Figure(what, value, unit, f"{low:g} to {high:g}", low <= value <= high)
