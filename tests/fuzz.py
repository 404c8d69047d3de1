"""The examples of the fuzzers: few in the default suite, many behind the marker `full`, the same in every run."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis.strategies import SearchStrategy


def fuzzed(few: int, many: int) -> pytest.MarkDecorator:
    """Give a test its argument `num_examples`: `few`, and `many` under the marker `full`."""
    return pytest.mark.parametrize("num_examples", [few, pytest.param(many, marks=pytest.mark.full)])


def run_examples(num_examples: int, check: Callable[..., None], *strategies: SearchStrategy) -> None:
    """Call `check` with `num_examples` values that the strategies draw."""
    chosen = settings(max_examples=num_examples, suppress_health_check=list(HealthCheck))
    chosen(given(*strategies)(check))()


def result_unless_refused(read: Callable[[], Any], refusal: type[Exception], name: object) -> Any:
    """Return what `read` returns; None if it raises `refusal`, whose message must be one line that contains `name`."""
    try:
        return read()
    except refusal as error:
        message = str(error)
    assert "\n" not in message, message
    assert str(name) in message, message
    return None
