"""NVIDIA apex, whose fused kernels are used if it is installed and works.

It is installed from NVIDIA's source. The package called apex on PyPI is unrelated, and written in Python 2.
"""

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from gpt.kernels.norms import NORMS


def find_apex(module: str, name: str, probe: Callable[[Any], object], device: torch.device) -> Any | None:
    """Return the class `name` of apex's `module`, or None if it does not work on the device.

    `probe` constructs it once: without its CUDA extension, apex can be imported and fails only when it is used.
    """
    if device.type != "cuda":
        return None
    try:
        found = getattr(importlib.import_module(module), name)
        probe(found)
    except (ImportError, AttributeError, RuntimeError, SyntaxError):
        return None
    return found


def choose_norm(kind: str, device: torch.device) -> tuple[type[nn.Module], str]:
    """Return apex's fused norm of a kind in NORMS if it works on the device, else torch's, and its name for the log."""
    name = NORMS[kind].__name__
    if fused := find_apex("apex.normalization", f"Fused{name}", lambda norm: norm(1), device):
        return fused, f"apex.normalization.Fused{name}"
    return NORMS[kind], f"torch.nn.{name}"
