"""Counts, bytes and seconds as people read them: 36.2K, 1.56B, 12.3 MB, 1.33 ms."""

from collections.abc import Sequence

COUNTS = (1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K"), (1, "")
BYTES = (1e9, " GB"), (1e6, " MB"), (1e3, " kB"), (1, " bytes")
SECONDS = (1, " s"), (1e-3, " ms"), (1e-6, " us")
DURATIONS = (86400, " days"), (3600, " h"), (60, " min"), (1, " s")


def count(number: float) -> str:
    """Return a number of parameters or tokens with three digits and K, M, B or T."""
    return _scaled(number, COUNTS)


def num_bytes(number: float) -> str:
    """Return a number of bytes with three digits and their unit; GB are 1e9 bytes."""
    return _scaled(number, BYTES)


def seconds(number: float) -> str:
    """Return a time with three digits in s, ms or us."""
    return _scaled(number, SECONDS)


def duration(number: float) -> str:
    """Return the time of a long task, given in seconds, with three digits in days, h, min or s."""
    return _scaled(number, DURATIONS)


def unit_of(number: float) -> tuple[float, str]:
    """Return (size, name) of the unit in which a table shows numbers of bytes up to this one."""
    size, unit = _unit(number, BYTES[:-1])
    return size, unit.strip()


def _scaled(number: float, units: Sequence[tuple[float, str]]) -> str:
    size, unit = _unit(number, units)
    value = number / size
    return f"{value:,.0f}{unit}" if value >= 100 else f"{value:.3g}{unit}"


def _unit(number: float, units: Sequence[tuple[float, str]]) -> tuple[float, str]:
    """Return the largest unit in which the number is at least 1, or the smallest one."""
    return next((pair for pair in units if number >= pair[0]), units[-1])
