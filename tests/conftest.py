"""Set-up of every test: the same random state and default dtype at its start. The pool of ranks stops at the end."""

import contextlib
import gc
import os
import signal
from collections.abc import Iterator
from types import ModuleType

import pytest
from hypothesis import HealthCheck, settings

if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    # A shell lets a job in the background ignore Ctrl-C, and so would the programs that the tests start.
    signal.signal(signal.SIGINT, signal.default_int_handler)

if hasattr(os, "SCHED_BATCH"):
    # Ranks outnumber the cores. By default, the rank that a message wakes takes the core of the sender, which still
    # holds the lock of gloo's connection. Until the sender runs again, gloo's thread polls that lock: it took a third
    # of the CPU time. Child processes inherit this policy, which lets the sender continue. A container may forbid it.
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))

# Torch asks the name server for the name of each address that connects to a store, also of 127.0.0.1:
# https://github.com/pytorch/pytorch/issues/159007. No test needs names, and each answer that is lost would cost 5 s.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")

# The same examples in every run, however long the machine takes for them.
settings.register_profile(
    "any machine", derandomize=True, database=None, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("any machine")


def pytest_collectstart() -> None:
    gc.disable()


def pytest_collection_finish() -> None:
    # Most objects of this process are modules and tests, which stay: no collection, such as that of a dry run, need
    # visit them.
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session", autouse=True)
def pool_of_ranks() -> Iterator[ModuleType]:
    from tests import ranks  # not above: the process of xdist that runs no test need not import torch

    yield ranks
    ranks.rank_pool().stop()


@pytest.fixture(autouse=True)
def fixed_start(pool_of_ranks: ModuleType) -> None:
    pool_of_ranks.set_fixed_start()
