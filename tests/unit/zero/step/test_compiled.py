"""Element-wise functions as inductor compiles them, here to C++, beside the eager ones."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor

from zero.core.step.pieces import WholePlace
from zero.updates import compiled
from zero.updates.adamw_bf16 import AdamWBf16
from zero.updates.compiled import compiled_on_gpus
from zero.updates.compressed_adamw import update_elements_
from zero.updates.matrix_method import add_
from zero.updates.muon import write_direction_

NUMEL, START = 1000, 208  # a piece begins at the element START of its parameter
SETTINGS = (0.9, 0.95, 1e-8, False)

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")


def place_at(start: int) -> WholePlace:
    return WholePlace(torch.tensor(3, dtype=torch.int32), torch.tensor(start), run=16, part=1, num_parts=2)


def randoms(count: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return list(torch.randn(count, NUMEL, generator=generator))


def stored_bits(moments: list[Tensor], place: WholePlace, step: Tensor) -> list[Tensor]:
    return [values for (values,) in AdamWBf16.encoded(moments, (place, 7), step)]


def test_random_bits_are_those_of_the_element():
    moments, step = randoms(2), torch.tensor(5.0)
    expected = stored_bits(moments, replace(place_at(START), param=3, start=START), step)
    for part in (slice(0, NUMEL), slice(0, 37), slice(37, NUMEL)):
        found = stored_bits([moment[part] for moment in moments], place_at(START + part.start), step)
        assert all(torch.equal(values, whole[part]) for values, whole in zip(found, expected, strict=True))
    others = stored_bits(moments, place_at(START + 1), step)
    assert not any(map(torch.equal, others, expected))


@needs_compiler
def test_a_compiled_update_differs_by_roundings_and_reads_a_new_rate_and_place():
    update = partial(update_elements_.__wrapped__, method=AdamWBf16, settings=SETTINGS)
    fast = torch.compile(update, dynamic=True, fullgraph=True)
    for step, is_skipped, rate in ((1.0, False, -0.1), (2.0, True, 0.0), (3.0, False, -0.3)):
        found = []
        for run in (update, fast):
            param, grad, *moments = randoms(4)
            grad = grad * torch.inf if is_skipped else grad
            stored = [(moment.abs().bfloat16(),) for moment in moments]
            numbers = (
                torch.tensor(step),
                torch.tensor(rate),
                torch.tensor(0.9 + is_skipped / 10),
                torch.tensor(is_skipped),
            )
            run(param, grad, stored, (place_at(START + int(step)), 7), numbers)
            found.append([param, *(values for (values,) in stored)])
        (eager, *moments), (param, *compiled_moments) = found
        # A product that is contracted with a sum has one rounding less. A moment that is next to where it is rounded
        # the other way may then be the next value of bf16.
        torch.testing.assert_close(param, eager, rtol=2**-20, atol=2**-20)  # some roundings of 2**-24
        for values, expected in zip(compiled_moments, moments, strict=True):
            torch.testing.assert_close(values, expected, rtol=2**-7, atol=0)
            assert (values != expected).sum() <= NUMEL * 2**-8
        assert eager.equal(randoms(4)[0]) is is_skipped


@needs_compiler
def test_compiled_momentum_and_updates_of_matrices_are_the_eager_ones_but_for_roundings():
    fast = [torch.compile(f.__wrapped__, dynamic=True, fullgraph=True) for f in (write_direction_, add_)]
    for is_skipped, momentum in ((False, 0.9), (True, 0.9), (False, 0.95)):
        found = []
        for write, add in ((write_direction_.__wrapped__, add_.__wrapped__), fast):
            buffer, grad, param = (values.view(20, 50) for values in randoms(3))
            grad = grad * torch.inf if is_skipped else grad
            out = torch.empty(20, 50, dtype=torch.bfloat16)
            weight = torch.tensor(0.0 if is_skipped else 1 - momentum)
            write(buffer, grad, weight, torch.tensor(is_skipped), out, torch.tensor(momentum))
            add(param, out, torch.tensor(-0.1), torch.tensor(0.9), is_cautious=True)
            found.append((buffer, out, param))
        (buffer, out, param), (expected, directions, updated) = found
        torch.testing.assert_close(buffer, expected, rtol=2**-20, atol=2**-20)
        torch.testing.assert_close(out, directions, rtol=2**-7, atol=2**-20)  # the next value of bf16
        torch.testing.assert_close(param, updated, rtol=2**-20, atol=0.1 * 2**-7 * directions.abs().max().item())
        assert found[1][0].equal(randoms(3)[0].view(20, 50)) is is_skipped


def test_no_step_compiles_again_if_rates_or_sizes_are_others(monkeypatch):
    """Run what GPUs run, with a compiler that counts graphs and generates no code."""
    graphs: list[object] = []

    def counted(graph: torch.fx.GraphModule, _inputs: object) -> Callable[..., object]:
        graphs.append(graph)
        return graph.forward

    monkeypatch.setattr(compiled, "runs_compiled", lambda _tensor: True)
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=counted))
    write = compiled_on_gpus(write_direction_.__wrapped__)
    num_graphs, flag = [], torch.tensor(False)
    for step in range(4):
        for rows, width, skip in (
            (1, 12, None),
            (2, 12, None),
            (5, 12, flag),
            (7 + step, 12, flag),
            (9 + step, 24, flag),
        ):
            buffer, grad, expected = (values[:, :12] for values in torch.zeros(3, rows, width))
            grad.fill_(1)
            write(buffer, grad, 0.25 + step / 8, skip, expected, 0.5 + step / 8)
            assert buffer.eq(0.25 + step / 8).all()
        num_graphs.append(len(graphs))
    assert 0 < num_graphs[0] == num_graphs[-1] < 8


def test_a_function_gets_its_arguments_as_they_are_on_a_cpu():
    seen, x = [], torch.ones(2)

    @compiled_on_gpus
    def note(*args: object, **constants: object) -> None:
        seen.append((args, constants))

    note(x, 0.5, name="a")
    assert seen == [((x, 0.5), {"name": "a"})]
