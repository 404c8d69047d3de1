"""Linear layers whose products are computed in FP8, with scales of the present values."""

from zero.fp8.convert import convert

__all__ = ["convert"]
