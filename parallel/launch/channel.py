"""Questions between the processes of a launch, over the network, with the secret of the job.

    server      NONCE                      a random number: what was said before is worth nothing in this connection
    client      CODE {request}             CODE: of NONCE, the name of who is asked, and the request
    server      CODE ANSWER                CODE: of NONCE, the request and the answer

A CODE is an HMAC with the secret, a file in the job's folder that only its user may read. Without it the answer tells
nothing, and an answer without it counts as silence. A message is one line of limited length, and all share a deadline.
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
REPLY_SECONDS = 2.0  # from the connection to the last byte of the answer
MOST_BYTES = 2**23  # of a message, which may have the digests of thousands of files
STRANGER = "stranger"  # the answer to a question without the secret


def read_secret(folder: Path) -> bytes:
    """Return the secret that the launches of a job share, and make it if there is none.

    Raises ConfigError if the folder cannot be written, or if others may read the secret or may have written it.
    """
    path, own = folder / SECRET, folder / f".{SECRET}-{uuid4().hex}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.path.lexists(path):
            with os.fdopen(os.open(own, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
                file.write(os.urandom(32).hex())
            with suppress(FileExistsError):  # of two nodes that make one the first counts
                os.link(own, path)
            own.unlink()
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
            found, secret = os.fstat(file.fileno()), file.read(64)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read or made ({error.strerror}); choose another folder") from error
    if found.st_uid != os.getuid() or found.st_mode & 0o077 or len(secret) != 64:
        raise ConfigError(f"{path} is no secret of this user alone; delete it, or choose another folder")
    return secret


class Channel:
    """The questions and answers of one process, in a thread of their own."""

    def __init__(self, secret: bytes):
        self._secret, self._loop = secret, asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Return the result of a coroutine, such as several questions at once."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    async def ask(self, address: tuple[str, int], name: str, request: dict[str, Any]) -> str:
        """Return the answer of the process `name`. Raises OSError or ValueError, ConfigError if it is a stranger."""
        async with asyncio.timeout(REPLY_SECONDS):
            reader, writer = await asyncio.open_connection(*address, limit=MOST_BYTES)
            try:
                nonce, text = await _line(reader), json.dumps(request | {"once": uuid4().hex})
                writer.write(f"{self._code('ask', nonce, name, text)} {text}\n".encode())
                code, _, answer = (await _line(reader)).partition(" ")
            finally:
                writer.close()
        if not hmac.compare_digest(code.encode(), self._code("answer", nonce, text, answer).encode()):
            raise ConfigError(f"{name} has another secret; all nodes need the same folder of the run")
        return answer

    def serve(self, address: tuple[str, int], name: str, answer: Callable[[dict[str, Any]], str]) -> None:
        """Answer questions to `name` from now on, at this address only. Raises OSError if it is in use."""

        async def reply(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with suppress(OSError, ValueError):
                async with asyncio.timeout(REPLY_SECONDS):
                    nonce, said, code = uuid4().hex, STRANGER, ""
                    writer.write(f"{nonce}\n".encode())
                    asked_code, _, text = (await _line(reader)).partition(" ")
                    if hmac.compare_digest(asked_code.encode(), self._code("ask", nonce, name, text).encode()):
                        said = answer(json.loads(text))
                        code = self._code("answer", nonce, text, said)
                    writer.write(f"{code} {said}\n".encode())
                    await writer.drain()
            writer.close()

        self.run(asyncio.start_server(reply, *address, backlog=1024, limit=MOST_BYTES))

    def _code(self, *parts: str) -> str:
        return hmac.new(self._secret, "\n".join(parts).encode(), hashlib.sha256).hexdigest()


async def _line(reader: asyncio.StreamReader) -> str:
    """Return a line without its end. Raises ValueError if it is too long, or does not end."""
    line = (await reader.readline()).decode()
    if not line.endswith("\n"):
        raise ValueError("it has ended without an answer")
    return line[:-1]
