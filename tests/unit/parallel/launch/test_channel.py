"""Agents answer to nobody without the secret of the job, and nobody can block them."""

import json
import os
import re
import runpy
import socket
import threading
import time
from dataclasses import asdict, replace
from unittest import mock

import pytest

from parallel.launch import channel
from parallel.launch.channel import SECRET, Channel, read_secret
from parallel.launch.membership import Record
from parallel.launch.node_facts import NodeFacts
from parallel.launch.peers import Peers
from parallel.validation.errors import ConfigError
from tests.source_files import ROOT

KEY = b"k" * 64
OWN = Record("a", "a1", members={"a": "a1"}, launch="l")
FACTS = NodeFacts("a", "", {}, "", ["train.steps=1"], {}, 0, "/", 0, 0.0)


def free_address() -> tuple[str, int]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()


def peers_of(own: Record, *others: tuple[str, tuple[str, int]], secret: bytes = KEY) -> Peers:
    return Peers(own, {own.node: free_address(), **dict(others)}, secret, FACTS)


@pytest.fixture
def agent() -> tuple[str, int]:
    """The address of an agent."""
    address = free_address()
    Peers(OWN, {"a": address}, KEY, FACTS)
    return address


def told(address: tuple[str, int], *lines: bytes) -> bytes:
    """Return all that an agent says to someone who does not know the secret."""
    with socket.create_connection(address, 10) as connection:
        for line in lines:
            connection.sendall(line)
        connection.shutdown(socket.SHUT_WR)
        return b"".join(iter(lambda: connection.recv(2**16), b""))


def test_records_are_read_with_the_secret_only(agent):
    assert peers_of(Record("b", "b1"), ("a", agent)).read(["a"]) == {"a": OWN}
    assert peers_of(Record("b", "b1"), ("a", agent), secret=b"x" * 64).read(["a"]) == {"a": None}
    with pytest.raises(ValueError, match="a has another secret"):
        peers_of(Record("b", "b1"), ("a", agent), secret=b"x" * 64).facts("a")
    for lines in (
        [b"GET /record HTTP/1.0\r\n\r\n"],
        [b'0 {"known": ""}\n'],
        [b"GET /facts?/etc/passwd HTTP/1.0\r\n\r\n"],
    ):
        said = told(agent, *lines)
        assert re.fullmatch(rb"[0-9a-f]{32}\n stranger\n", said)  # a random number, and no


@pytest.mark.skipif(os.getuid() != 0, reason="needs root, to become another user")
def test_another_user_of_the_node_learns_nothing_from_an_agents_port(agent, tmp_path):
    read_secret(tmp_path)
    for folder in (tmp_path, *tmp_path.parents[:-2]):
        folder.chmod(0o755)
    if not (child := os.fork()):
        code = 1
        try:
            os.setgroups([])
            os.setgid(65534)
            os.setuid(65534)
            for request in (b"GET /record HTTP/1.0\r\n\r\n", b"0 {}\n", b"GET /facts?/etc/passwd HTTP/1.0\r\n\r\n"):
                assert told(agent, request)[32:] == b"\n stranger\n"  # after a random number
            with pytest.raises(PermissionError):
                (tmp_path / SECRET).read_bytes()
            code = 0
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0


def serve(answers: list[bytes], seconds: float = 0.0) -> tuple[str, int]:
    """Return the address of a server that says something else than an agent, piece by piece."""
    listener = socket.create_server(("127.0.0.1", 0))

    def run() -> None:
        while True:
            connection, _ = listener.accept()
            with connection:
                try:
                    for answer in answers:
                        connection.sendall(answer)
                        time.sleep(seconds)
                except OSError:
                    continue

    threading.Thread(target=run, daemon=True).start()
    return listener.getsockname()


@pytest.mark.parametrize(
    "answers", [[b"x"] * 100, [b"x" * 2**20] * 100, [b"nonce\n", b"x " + b"{" * 2**20], [b"\xff\n"]]
)
def test_an_answer_that_drips_or_does_not_end_is_silence(answers, monkeypatch):
    monkeypatch.setattr(channel, "REPLY_SECONDS", 0.3)
    monkeypatch.setattr(channel, "MOST_BYTES", 2**20)
    address = serve(answers, 0.05 if len(answers[0]) == 1 else 0.0)
    assert peers_of(Record("b", "b1"), ("a", address)).read(["a"]) == {"a": None}


@pytest.mark.parametrize(
    "wrong",
    [
        {"code": 300},
        {"code": "0"},
        {"start": -1},
        {"start": 2**70},
        {"state": "over"},
        {"members": ["a"]},
        {"members": {"a": 1}},
        {"failures": {"a": "b"}},
        {"num_restarts": 0.5},
        {"unknown": 1},
        {"node": None},
    ],
    ids=str,
)
def test_records_of_other_types_codes_and_states_are_ignored(wrong):
    address = free_address()
    Channel(KEY).serve(address, "a", lambda _request: json.dumps(asdict(OWN) | wrong))
    assert peers_of(Record("b", "b1"), ("a", address)).read(["a"]) == {"a": None}


@pytest.mark.parametrize("text", ["7", "[]", "", "{" * 5000, "[" * 100_000, '"x"'])
def test_what_is_no_record_is_ignored(text):
    address = free_address()
    Channel(KEY).serve(address, "a", lambda _request: text)
    assert peers_of(Record("b", "b1"), ("a", address)).read(["a"]) == {"a": None}


def test_a_record_is_sent_again_only_when_it_has_changed(agent):
    reader = peers_of(Record("b", "b1"), ("a", agent))
    with mock.patch.object(channel.Channel, "_code", autospec=True, side_effect=channel.Channel._code) as code:
        assert reader.read(["a"]) == reader.read(["a"]) == {"a": OWN}
    answers = [call.args[-1] for call in code.call_args_list if call.args[1] == "answer"]
    assert json.loads(answers[0]) == asdict(OWN)
    assert {len(answer) for answer in answers[2:]} == {64}


@pytest.mark.parametrize(("there", "ahead"), [(103.5, 3.0), (96.5, -4.0), (101.2, 0.0)])
def test_facts_have_the_difference_of_clocks_unless_the_reply_took_longer(there: float, ahead: float):
    # The clock: when it is asked, there, and when the reply has come.
    clock = mock.Mock(time=mock.Mock(side_effect=[100.0, there, 101.0]), monotonic=lambda: 0.0)
    with mock.patch("parallel.launch.peers.time", clock):
        assert peers_of(OWN).facts("a") == replace(FACTS, clock_seconds=ahead)


def test_the_secret_is_the_same_for_all_nodes_and_of_this_user_alone(tmp_path):
    secret = read_secret(tmp_path / "run")
    path = tmp_path / "run" / SECRET
    assert read_secret(tmp_path / "run") == secret
    assert (path.stat().st_mode & 0o777, [each.name for each in path.parent.iterdir()]) == (0o600, [SECRET])
    path.chmod(0o640)
    with pytest.raises(ConfigError, match="is no secret of this user alone"):
        read_secret(tmp_path / "run")
    path.unlink()
    path.symlink_to("/etc/passwd")
    with pytest.raises(ConfigError, match="cannot be read or made"):
        read_secret(tmp_path / "run")


def test_an_arbiter_grants_a_start_once():
    address = free_address()
    arbitrate = runpy.run_path(str(ROOT / "scripts" / "launch" / "arbiter.py"))["arbitrate"]
    threading.Thread(target=arbitrate, args=(address, KEY), daemon=True).start()
    one, other = peers_of(OWN), peers_of(Record("b", "b1"))
    while True:
        try:
            assert one.is_granted(address, 2)
            break
        except ConnectionRefusedError:
            time.sleep(0.01)
    assert [one.is_granted(address, 2), other.is_granted(address, 2), other.is_granted(address, 1)] == [
        True,
        False,
        False,
    ]
    assert [other.is_granted(address, 3), one.is_granted(address, 3)] == [True, False]
