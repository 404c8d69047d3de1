"""Linear layers whose products are computed in FP8, with scales of the present values."""

from typing import TYPE_CHECKING

__all__ = ["convert"]

if TYPE_CHECKING:
    from zero.fp8.layers import convert
else:

    def __getattr__(name: str) -> object:
        """Load the layers when they are asked for: runs without FP8 read the settings of this package only."""
        if name != "convert":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from zero.fp8.layers import convert

        return convert
