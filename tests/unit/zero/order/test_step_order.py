"""The rounds of a step: those that are predicted, and those that are not."""

import pytest

from zero.core.protocols.orders import Round
from zero.extensions.agreement import StepOrder

LETTERS = {"f": Round.FORWARD, "b": Round.BACKWARD, "a": Round.ACCUMULATION, "r": Round.READ, "s": Round.STEP}


def unexpected(order: StepOrder, rounds: str) -> str:
    """Record the rounds; return those that were not expected."""
    found = ""
    for letter in rounds:
        found += letter if order.expected is not LETTERS[letter] else ""
        order.record(LETTERS[letter])
    return found


@pytest.mark.parametrize("step", ["fbs", "fafafbs", "fbfbfbs", "ffffbs", "fbrsfff", "fbss", "fbsrr", "rfrbs", "bbbs"])
def test_a_step_that_repeats_is_expected(step):
    order = StepOrder()
    unexpected(order, step * 2)
    assert unexpected(order, step * 3) == ""


def test_inference_is_expected_from_its_second_forward_on():
    order = StepOrder()
    assert unexpected(order, "f" * 1000) == "f"
    assert unexpected(order, "bs") == "bs"


def test_numbers_of_micro_batches_that_take_turns_deviate_once_in_a_step():
    order = StepOrder()
    unexpected(order, "fafbs" + "fafafbs" + "fafbs" + "fafafbs")
    assert unexpected(order, "fafbs") == "b"
    assert unexpected(order, "fafafbs") == "a"


def test_micro_batches_are_counted_from_the_optimizers_step():
    order = StepOrder()
    assert order.describe(Round.FORWARD) == "begins a forward after 0 micro-batches"
    assert order.describe(Round.STEP) == "steps the optimizer after 0 micro-batches"
    unexpected(order, "fafb")
    assert order.describe(Round.STEP) == "steps the optimizer after 2 micro-batches"
    unexpected(order, "s")
    assert order.describe(Round.STEP) == "steps the optimizer after 2 micro-batches"
    assert order.describe(Round.READ) == "gathers parameters to read them after 0 micro-batches"
