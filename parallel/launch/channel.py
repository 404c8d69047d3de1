"""Questions between the processes of a launch, over the network, with the secret of the job.

    server      NONCE                      a random number: what was said before is worth nothing in this connection
    client      CODE {request}             CODE: of NONCE, the name of who is asked, and the request
    server      CODE ANSWER                CODE: of NONCE, the request and the answer

A CODE is an HMAC with the secret, a file in the job's folder that only its user may read. Without it there is no
answer, and an answer without it counts as silence. A message is one line of limited length, and all share a deadline.
"""

import asyncio
import hashlib
import hmac
import json
import os
import threading
from collections.abc import Callable, Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar
from uuid import uuid4

from parallel.validation.errors import ConfigError

T = TypeVar("T")

SECRET = "launch.secret"  # in the job's folder
SECRET_BYTES = 32
REPLY_SECONDS = 2.0  # from the connection to the last byte of the answer
REQUEST_BYTES, ANSWER_BYTES = 2**12, 2**24  # at most; an answer may have the digests of thousands of files
MOST_CONNECTIONS = 4096  # that are served at once: the others have to ask again


def read_secret(folder: Path) -> bytes:
    """Return the secret that the launches of a job share, and make it if there is none.

    Raises ConfigError if the folder cannot be written, or if others may read the secret or may have written it.
    """
    path, own = folder / SECRET, folder / f".{SECRET}-{uuid4().hex}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.path.lexists(path):
            with os.fdopen(os.open(own, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
                file.write(os.urandom(SECRET_BYTES).hex())
            with suppress(FileExistsError):  # of two nodes that make one the first counts
                os.link(own, path)
            own.unlink()
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
            found, secret = os.fstat(file.fileno()), file.read(2 * SECRET_BYTES)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read or made ({error.strerror}); choose another run.dir") from error
    if found.st_uid != os.getuid() or found.st_mode & 0o077 or len(secret) != 2 * SECRET_BYTES:
        raise ConfigError(f"{path} is no secret of this user alone; delete it, or choose another run.dir")
    return secret


class StrangerError(ValueError):
    """An answer without the secret, or none."""


class Channel:
    """The questions and answers of one process, in a thread of their own."""

    def __init__(self, secret: bytes):
        self._secret, self._num_served = secret, 0
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Return the result of a coroutine, such as several questions at once."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    async def ask(self, address: tuple[str, int], name: str, request: dict[str, Any]) -> str:
        """Return the answer of the process `name`. Raises OSError or ValueError, also a StrangerError."""
        async with asyncio.timeout(REPLY_SECONDS):
            reader, writer = await asyncio.open_connection(*address, limit=ANSWER_BYTES)
            try:
                nonce, text = await _line(reader), json.dumps(request | {"once": uuid4().hex})
                writer.write(f"{self._code('ask', nonce, name, text)} {text}\n".encode())
                code, _, answer = (await reader.readline()).decode().partition(" ")
            finally:
                writer.close()
        answer = answer.removesuffix("\n")
        if not _is_same(code, self._code("answer", nonce, text, answer)):
            raise StrangerError(f"{name} has another secret; all nodes need the same run.dir")
        return answer

    def serve(self, address: tuple[str, int], name: str, answer: Callable[[dict[str, Any]], str]) -> None:
        """Answer the questions to `name` from now on, at this address only. Raises OSError if it is in use."""

        async def reply(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            self._num_served += 1
            with suppress(OSError, ValueError):
                if self._num_served <= MOST_CONNECTIONS:
                    async with asyncio.timeout(REPLY_SECONDS):
                        await self._reply(name, answer, reader, writer)
            self._num_served -= 1
            writer.close()

        self.run(asyncio.start_server(reply, *address, backlog=1024, limit=REQUEST_BYTES))

    async def _reply(
        self,
        name: str,
        answer: Callable[[dict[str, Any]], str],
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        nonce = uuid4().hex
        writer.write(f"{nonce}\n".encode())
        code, _, text = (await _line(reader)).partition(" ")
        if _is_same(code, self._code("ask", nonce, name, text)):
            said = answer(json.loads(text))
            writer.write(f"{self._code('answer', nonce, text, said)} {said}\n".encode())
            await writer.drain()

    def _code(self, *parts: str) -> str:
        return hmac.new(self._secret, "\n".join(parts).encode(), hashlib.sha256).hexdigest()


async def _line(reader: asyncio.StreamReader) -> str:
    """Return a line without its end. Raises ValueError if it is too long, or does not end."""
    line = (await reader.readline()).decode()
    if not line.endswith("\n"):
        raise ValueError("it has not answered")
    return line[:-1]


def _is_same(one: str, other: str) -> bool:
    return hmac.compare_digest(one.encode(), other.encode())
