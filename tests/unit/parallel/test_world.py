"""The process of a rank: how it starts, and the line and the exit code with which it ends if something fails."""

import io
import os
import re
import sys
from datetime import timedelta
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from parallel import store as store_module
from parallel import world
from parallel.ending import EXIT_LOST
from parallel.store import FAILURE_KEY, shared_store
from parallel.validation.errors import ConfigError, exit_on_config_error
from parallel.world import (
    StartOptions,
    World,
    exit_as_rank,
    exit_with_error,
    imitated_world,
    rank_from_environment,
    start_world,
    stop_world,
)

RESET = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:537] Read error [::1]:4: Connection reset by peer. This"


class Gone:
    """A store whose server has ended."""

    def add(self, _key: str, _number: int) -> int:
        raise dist.DistNetworkError("failed to recv, got 0 bytes")

    def set(self, _key: str, _value: str) -> None:
        raise dist.DistNetworkError("failed to send")


@pytest.fixture
def exit_code_of(monkeypatch):
    """Return a function that lets a rank fail with an error, and returns its exit code and its pauses."""

    def run(error: Exception, store: object) -> tuple[int, list[float]]:
        pauses: list[float] = []

        def leave(code: int) -> None:
            raise SystemExit(code)

        monkeypatch.setattr(dist, "is_initialized", lambda: True)
        for module in (world, store_module):
            monkeypatch.setattr(module, "default_store", lambda: store)
        monkeypatch.setattr(world.time, "sleep", pauses.append)
        monkeypatch.setattr(world.os, "_exit", leave)
        with pytest.raises(SystemExit) as ended, exit_as_rank():
            raise error
        return ended.value.code, pauses

    return run


def test_the_loss_of_a_rank_is_printed_once_with_the_exit_code_of_the_watchdog(exit_code_of, capsys):
    store = dist.HashStore()
    assert [exit_code_of(RuntimeError(RESET), store) for _ in range(2)] == [(EXIT_LOST, [world.LOSS_SECONDS])] * 2
    assert re.fullmatch(r"error: .* lost \(Connection reset by peer\); .*checkpoint\n", capsys.readouterr().err)
    assert exit_code_of(RuntimeError("Connection was likely closed\n details"), Gone())[0] == EXIT_LOST
    assert re.fullmatch(r"error: .* lost \(Connection was likely closed\); .*\n", capsys.readouterr().err)


def test_a_rank_that_has_printed_its_reason_is_not_taken_for_lost(exit_code_of, capsys):
    store = mock.Mock(wraps=dist.HashStore(), wait=mock.Mock(side_effect=dist.DistStoreError("the time is over")))
    store.add(FAILURE_KEY, 1)
    assert exit_code_of(RuntimeError(RESET), store) == (2, [])
    assert capsys.readouterr().err == ""
    store.wait.assert_called_once_with([f"{FAILURE_KEY}/printed"], timedelta(seconds=world.PRINT_SECONDS))


def test_a_rank_that_fails_later_ends_after_the_one_that_prints_has_done_so(exit_code_of, capsys):
    store, happened = mock.Mock(wraps=dist.HashStore()), []
    store.set = lambda key, _value: happened.append((key, capsys.readouterr().err))
    store.wait = lambda keys, _limit: happened.append((*keys, "waits"))
    for _ in range(2):
        assert exit_code_of(ConfigError("steps=0"), store)[0] == 2
    key = f"{FAILURE_KEY}/printed"
    assert happened == [(key, "error: steps=0\n"), (key, "waits")]


def test_an_error_of_the_program_keeps_its_traceback(exit_code_of):
    with pytest.raises(RuntimeError, match="shapes do not agree"):
        exit_code_of(RuntimeError("shapes do not agree"), dist.HashStore())


def test_the_output_of_the_program_is_written_before_it_ends_with_an_error(monkeypatch):
    written, at_end = io.BytesIO(), []
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written))
    monkeypatch.setattr(os, "_exit", lambda code: at_end.append((code, written.getvalue())))
    sys.stdout.write("step 7")
    exit_with_error(ConfigError("steps=0"))
    assert at_end == [(2, b"step 7")]


def test_the_ranks_of_gpus_meet_by_nccl(monkeypatch):
    variables = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    for name, value in (variables | {"MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}).items():
        monkeypatch.setenv(name, value)
    gpu, store, of_start = torch.device("cuda", 1), dist.HashStore(), dist.HashStore()
    met, started, given, shared = mock.Mock(return_value=iter([(store, 3, 8)])), mock.Mock(), mock.Mock(), mock.Mock()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _device: None)
    monkeypatch.setattr(dist, "rendezvous", met)
    monkeypatch.setattr(dist, "init_process_group", started)
    monkeypatch.setattr(world, "set_variables", given)
    monkeypatch.setattr(world, "share_cores", shared)
    monkeypatch.setattr(world, "_store_of_this_start", lambda *found: of_start if found[0] is store else None)
    options = StartOptions(hang_seconds=300.0, orders_launches=True, record_folder=Path("/runs/1"), fixes_kernels=True)
    assert start_world(options) == World(3, 8, 1, 2, gpu)
    met.assert_called_once_with("env://", timeout=timedelta(seconds=600))
    assert store.timeout == timedelta(seconds=900)
    asked = {"store": of_start, "rank": 3, "world_size": 8, "timeout": timedelta(seconds=900), "device_id": gpu}
    started.assert_called_once_with("nccl", **asked)
    given.assert_called_once_with(os.environ, True, Path("/runs/1"), True)
    shared.assert_called_once_with(os.environ, 2, gpu, True)


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ("RANK=abc", "RANK=abc, a number from 0 to 0"),
        ("RANK=3", "RANK=3, a number from 0 to 0"),
        ("WORLD_SIZE=-1", "WORLD_SIZE=-1, a number from 1 to 1048576"),
        ("WORLD_SIZE=0", "WORLD_SIZE=0, a"),
        ("LOCAL_RANK=x", "LOCAL_RANK=x, a number from 0 to 0"),
        ("LOCAL_WORLD_SIZE=0", "LOCAL_WORLD_SIZE=0, a number from 1 to 1048576"),
        ("WORLD_SIZE=2 RANK=1 LOCAL_RANK=5", "LOCAL_RANK=5, a number from 0 to 1"),
        ("WORLD_SIZE=2 MASTER_ADDR=a MASTER_PORT=1", "WORLD_SIZE=2 and no RANK"),
        ("WORLD_SIZE=2 RANK=0", "WORLD_SIZE=2 and no MASTER_ADDR"),
        ("WORLD_SIZE=2 RANK=0 MASTER_ADDR=a", "WORLD_SIZE=2 and no MASTER_PORT"),
        ("WORLD_SIZE=2 RANK=0 MASTER_ADDR=a MASTER_PORT=x", "MASTER_PORT=x, a number from 0 to 65535"),
    ],
)
def test_variables_of_a_launcher_that_cannot_be_end_the_process_with_a_line(monkeypatch, capfd, variables, message):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for variable in variables.split():
        monkeypatch.setenv(*variable.split("="))
    monkeypatch.setattr(os, "_exit", sys.exit)
    monkeypatch.setattr(world, "share_cores", lambda *_: None)
    with pytest.raises(SystemExit) as ended, exit_as_rank():
        assert rank_from_environment() == start_world(StartOptions(device="cpu")).rank
    assert ended.value.code == 2
    line = rf"error: the environment has {message}.*; start ranks with torchrun, .*\n"
    assert re.fullmatch(line, capfd.readouterr().err)


def test_a_process_alone_starts_no_process_group(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(world, "use_large_pages", mock.Mock())
    monkeypatch.setattr(world, "share_cores", mock.Mock())
    assert start_world(StartOptions(device="cpu")) == World(0, 1, 0, 1, torch.device("cpu"))
    assert not dist.is_initialized()
    first, second = shared_store(), shared_store()
    first.set("word", "")
    assert not second.check(["word"]), "each has its own"


def test_an_imitated_rank_is_one_of_the_ranks():
    with imitated_world(7, 8, 4, "nccl") as found:
        assert found == World(7, 8, 3, 4, torch.device("cpu"), "nccl")
        assert (dist.get_backend(), dist.get_rank(), dist.get_world_size()) == ("fake", 7, 8)
    for rank in (-1, 8):
        with (
            pytest.raises(ConfigError, match=rf"^rank={rank} is not one of the 8 ranks; choose 0 to 7$"),
            imitated_world(rank, 8, 4, "nccl"),
        ):
            pass
    with imitated_world(0, 1, 4, "nccl"):
        assert not dist.is_initialized()


def test_gloo_drops_its_tensors_before_a_rank_ends_and_others_do_not_wait(monkeypatch, tmp_path):
    pauses: list[float] = []
    states = {5: "R", 9: "S", 11: "R", 12: "S"}  # from the pause of that number on

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) in states:
            (tmp_path / "7" / "stat").write_text(f"7 (pt_gloo_runloop) {states[len(pauses)]} 1 7")

    for number, name in (("7", "(pt_gloo_runloop) D"), ("8", "(a b) R")):
        (tmp_path / number).mkdir()
        (tmp_path / number / "stat").write_text(f"{number} {name} 1 7")
    monkeypatch.setattr(world.time, "sleep", pause)
    stop_world()
    with imitated_world(0, 2, 2, "nccl"):
        pass
    assert pauses == []
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    dist.barrier()  # a thread has its name when it has run something
    assert any(world.GLOO_THREAD in path.read_text() for path in world.THREADS.glob("*/stat"))
    monkeypatch.setattr(world, "THREADS", tmp_path)
    stop_world()
    assert len(pauses) == 14, "gloo's thread sleeps in three readings after another"
    assert not dist.is_initialized()


def test_a_command_prints_an_error_that_the_user_can_correct(capsys):
    for error in (ConfigError("steps=0 is below 1"), KeyError("x")):
        with pytest.raises(SystemExit) as ended, exit_on_config_error(KeyError):
            raise error
        assert ended.value.code == 2
        assert capsys.readouterr().err == f"error: {error}\n"
    with pytest.raises(KeyError), exit_on_config_error():
        raise KeyError
