"""Activations between forward and backward: checkpoints, and plans for each operation."""

from zero.activations.plans.module import planned

__all__ = ["planned"]
