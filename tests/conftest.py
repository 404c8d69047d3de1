"""Set-up of every test: the same random state and default dtype at its start. The pool of ranks stops at the end."""

import signal

import pytest
import torch

from tests.ranks import rank_pool

if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    # A shell lets a job in the background ignore Ctrl-C, and so would the programs that the tests start.
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def fixed_start() -> None:
    torch.set_default_dtype(torch.float32)
    torch.manual_seed(0)


def pytest_unconfigure() -> None:
    rank_pool().stop()
