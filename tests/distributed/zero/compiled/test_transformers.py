"""Models of transformers that are compiled whole, or by blocks before or after they are wrapped."""

import pytest
from torch import nn

from tests.distributed.zero.compiled.backend import Backend
from tests.models import build
from tests.ranks import run_ranks
from tests.twins import ALL_STAGES, Twins, configs
from zero.partition.config import ZeroConfig
from zero.units.unit import find_units


def compile_units(module: nn.Module, backend: Backend) -> None:
    for name in unit_names(module):
        module.get_submodule(name).compile(backend=backend)


def unit_names(module: nn.Module) -> list[str]:
    return [name for name in find_units(module) if name]


def check_equals_one_process(name: str, way: str, zero_configs: list[ZeroConfig]) -> None:
    """The other process trains a copy of the module, which is not compiled."""
    for config in zero_configs:
        backend, module = Backend("aot_eager"), build(name)
        if way == "blocks before":
            compile_units(module, backend)
        twins = Twins(module, config, lr=0.01)
        if way == "blocks after":
            compile_units(module, backend)
        elif way == "whole":
            twins.model.compile(backend=backend)
        twins.train(num_steps=3)
        if way != "whole":  # a block is one graph, and is compiled once; blocks differ in their number
            assert len(backend.num_operations) == len(unit_names(module))


@pytest.mark.full
@pytest.mark.parametrize("way", ["whole", "blocks before", "blocks after"])
@pytest.mark.parametrize("name", ["transformers_gpt2", "llama", "t5"])
def test_compiled_models_of_transformers_train_as_one_process_does(name: str, way: str):
    run_ranks(2, check_equals_one_process, name, way, configs(*ALL_STAGES))
