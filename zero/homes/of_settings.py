"""The homes that settings stand for."""

import torch

from zero.buckets.home import Home, Homes
from zero.memory.placement import OffloadConfig


def homes_of(config: OffloadConfig, accelerator: torch.device) -> Homes:
    """Return where states begin; with auto, the planner moves some later."""
    here = Home(accelerator)
    if not (offloaded := config.offloaded_states):
        return Homes(here, here, here)
    from zero.homes.on_host import OnHost

    host = OnHost(accelerator)
    return Homes(here, host if "parameters" in offloaded else here, host if "optimizer" in offloaded else here)
