"""A rank whose collective fails: it prints one line, unless another rank has, and its exit code tells the cause."""

import pytest
import torch.distributed as dist

import pretrain_gpt
from parallel import world
from parallel.watchdog import EXIT_CODE

RESET = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:537] Read error [::1]:4: Connection reset by peer. This"


class Gone:
    """A store whose server has ended."""

    def add(self, _key: str, _number: int) -> int:
        raise dist.DistNetworkError("failed to recv, got 0 bytes")


@pytest.fixture
def exit_code_of(monkeypatch):
    """Return a function that runs the program with an error in its training, and returns its exit code."""

    def run(error: Exception, store: object) -> int:
        def fail(*_arguments: object, **_options: object) -> None:
            raise error

        def leave(code: int) -> None:
            raise SystemExit(code)

        monkeypatch.setattr(pretrain_gpt, "parse_settings", fail)
        monkeypatch.setattr(dist, "is_initialized", lambda: True)
        monkeypatch.setattr(world, "default_store", lambda: store)
        monkeypatch.setattr(world, "PRINT_SECONDS", 0.0)
        monkeypatch.setattr(world.os, "_exit", leave)
        with pytest.raises(SystemExit) as ended:
            pretrain_gpt.main()
        return ended.value.code

    return run


def test_the_loss_of_a_rank_is_printed_once_with_the_exit_code_of_the_watchdog(exit_code_of, capsys):
    store = dist.HashStore()
    assert [exit_code_of(RuntimeError(RESET), store) for _ in range(2)] == [EXIT_CODE] * 2
    assert capsys.readouterr().err == (
        "error: another rank or its node was lost (Connection reset by peer); start again to resume from the newest "
        "checkpoint\n"
    )
    assert exit_code_of(RuntimeError("Connection was likely closed\n details"), Gone()) == EXIT_CODE
    assert "error: another rank or its node was lost (Connection was likely closed); " in capsys.readouterr().err


def test_a_rank_that_has_printed_its_reason_is_not_taken_for_lost(exit_code_of, capsys):
    store = dist.HashStore()
    store.add(world.FAILURE_KEY, 1)
    assert exit_code_of(RuntimeError(RESET), store) == 2
    assert capsys.readouterr().err == ""


def test_an_error_of_the_program_keeps_its_traceback(exit_code_of):
    with pytest.raises(RuntimeError, match="shapes do not agree"):
        exit_code_of(RuntimeError("shapes do not agree"), dist.HashStore())
