"""Hooks on the modules that read parameters: each runs before its module, with the parameters that the module reads."""

import torch
from torch import nn

from zero.units.hooks import hook_readers


def test_a_block_waits_for_all_of_its_parameters_and_another_module_for_its_own():
    shared = nn.Linear(2, 2)
    blocks = nn.ModuleList([nn.Sequential(shared, nn.Linear(2, 2)), nn.Sequential(nn.Tanh(), shared)])
    root = nn.ModuleDict({"blocks": blocks, "outer": nn.Sequential(nn.Linear(2, 2), nn.PReLU())})
    waited: list[list[nn.Parameter]] = []
    handles = hook_readers(root, waited.append)
    x = torch.ones(1, 2)
    for module, expected in [
        (blocks[0], [[*blocks[0].parameters()]]),
        (blocks[1], [[*shared.parameters()]]),  # in whichever order the blocks run
        (root["outer"], [[*root["outer"][0].parameters()], [*root["outer"][1].parameters()]]),
        (shared, []),
    ]:
        waited.clear()
        module(x)
        assert [list(map(id, params)) for params in waited] == [list(map(id, params)) for params in expected]
    assert len(handles) == 4
    for handle in handles:
        handle.remove()
    waited.clear()
    blocks[0](x)
    assert waited == []
