"""Set-up of every test: the same random state and default dtype at its start. The pool of ranks stops at the end."""

import os
import signal

import pytest
import torch

from tests.ranks import rank_pool

if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    # A shell lets a job in the background ignore Ctrl-C, and so would the programs that the tests start.
    signal.signal(signal.SIGINT, signal.default_int_handler)


# Torch asks the name server for the name of each address that connects to a store, also of 127.0.0.1:
# https://github.com/pytorch/pytorch/issues/159007. No test needs names, and each answer that is lost would cost 5 s.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")


@pytest.fixture(autouse=True)
def fixed_start() -> None:
    torch.set_default_dtype(torch.float32)
    torch.manual_seed(0)


def pytest_unconfigure() -> None:
    rank_pool().stop()
