"""Activations between forward and backward: checkpoints, and where they are stored."""
