"""Functions that run on several ranks while a checker of streams follows them."""

from collections.abc import Callable
from typing import Any

import torch

from lab.races.stream_checker import streams_checked
from tests.ranks import run_ranks


def run_checked(num_ranks: int, function: Callable[..., Any], *args: Any, **options: Any) -> list[Any]:
    """Call a function on several ranks as `run_ranks` does. Raises RankError if its operations would race on a GPU."""
    return run_ranks(num_ranks, _checked, function, *args, **options)


def _checked(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    with streams_checked(torch.device("cpu")):
        return function(*args, **options)
