"""Files that ranks send to each other and fetch, over TCP, without a collective: only two ranks take part.

    first      token of the job
    request    operation | offset | bytes | length of the name | name
    reply      length of an error | error; without one, the bytes follow, and after those of PUT another reply

A rank listens on one port, and has a connection to another one as long as it sends or fetches: in a world of any size
it has as many as there are ranks from which it needs something.
"""

import hmac
import os
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from mmap import mmap
from pathlib import Path, PurePosixPath
from typing import BinaryIO
from weakref import finalize

from parallel.store import shared_store

TOKEN, REQUEST, REPLY = struct.Struct("<32s"), struct.Struct("<cqqH"), struct.Struct("<H")
GET, PUT = b"G", b"P"
STALL_SECONDS = 300.0  # after which a rank that sends or receives nothing is taken for lost
STRANGER_SECONDS = 10.0  # in which a connection has to show the token
RETRY_SECONDS = 0.1
CHUNK_BYTES = 2**22


class PeerFiles:
    """The files of a rank that others may fetch, all below `folder`, in which they may also put some.

    `address` is one by which other ranks reach this node. All ranks of the job make one, with a token of 32 characters
    that only they know.
    """

    def __init__(self, folder: Path, rank: int, address: str, token: str):
        self._store, self._token = shared_store(), token.encode()
        has_both = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if has_both else socket.AF_INET
        listener = socket.create_server(("", 0), family=family, dualstack_ipv6=has_both)
        self._store.set(self._key(rank), f"{listener.getsockname()[1]} {address}")
        threading.Thread(target=_accept, args=(listener, folder, self._token), daemon=True).start()
        self.close = finalize(self, _close, listener)  # and without a call when it is dropped

    @contextmanager
    def connected(self, rank: int) -> Iterator["Peer"]:
        """Connect to another rank in this block."""
        self._store.wait([self._key(rank)])
        port, _, address = self._store.get(self._key(rank)).decode().partition(" ")
        with socket.create_connection((address, int(port)), STALL_SECONDS) as connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.sendall(TOKEN.pack(self._token))
            yield Peer(connection)

    def _key(self, rank: int) -> str:
        return f"files/{self._token.decode()}/{rank}"


class Peer:
    """Another rank, with its files. All methods raise OSError if it fails, and ConnectionError if it is lost."""

    def __init__(self, connection: socket.socket):
        self._connection = connection

    def put(self, path: Path, name: str) -> None:
        """Send a file, which gets the path `name` below the other's folder."""
        with path.open("rb") as file:
            self._request(PUT, name, 0, path.stat().st_size)
            self._connection.sendfile(file)
        _raise_error(self._connection)

    def get(self, name: str, offset: int, num_bytes: int, path: Path) -> None:
        """Fetch a part of a file into the same place of another file, which exists."""
        self._request(GET, name, offset, num_bytes)
        buffer = memoryview(bytearray(min(num_bytes, CHUNK_BYTES)))
        with path.open("r+b", buffering=0) as file:
            file.seek(offset)
            while num_bytes:
                part = buffer[:num_bytes]
                _receive(self._connection, part)
                file.write(part)
                num_bytes -= len(part)

    def _request(self, operation: bytes, name: str, offset: int, num_bytes: int) -> None:
        encoded = name.encode()
        self._connection.sendall(REQUEST.pack(operation, offset, num_bytes, len(encoded)) + encoded)
        _raise_error(self._connection)


def _close(listener: socket.socket) -> None:
    with suppress(OSError):
        listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
    listener.close()


def _accept(listener: socket.socket, folder: Path, token: bytes) -> None:
    while listener.fileno() >= 0:
        try:
            connection, _ = listener.accept()
        except OSError:  # the listener is closed, or a connection has broken off before it was accepted
            time.sleep(RETRY_SECONDS)
            continue
        threading.Thread(target=_serve, args=(connection, folder, token), daemon=True).start()


def _serve(connection: socket.socket, folder: Path, token: bytes) -> None:
    """Answer the requests of another rank until it closes the connection; a stranger's is closed."""
    with connection, suppress(OSError):
        connection.settimeout(STRANGER_SECONDS)
        if not hmac.compare_digest(_received(connection, TOKEN.size), token):
            return
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while True:
            connection.settimeout(None)
            operation, offset, num_bytes, name_bytes = REQUEST.unpack(_received(connection, REQUEST.size))
            connection.settimeout(STALL_SECONDS)
            name = PurePosixPath(_received(connection, name_bytes).decode(errors="replace"))
            if name.is_absolute() or ".." in name.parts:
                return
            try:
                file = _created(folder / name, num_bytes) if operation == PUT else (folder / name).open("rb")
            except OSError as problem:
                error = (problem.strerror or str(problem)).encode()
                connection.sendall(REPLY.pack(len(error)) + error)
                continue
            # An error from here on closes the connection: the other rank would take a reply for bytes of the file.
            with file:
                connection.sendall(REPLY.pack(0))
                if operation == PUT:
                    with mmap(file.fileno(), num_bytes) as memory, memoryview(memory) as view:
                        _receive(connection, view)
                    connection.sendall(REPLY.pack(0))
                elif connection.sendfile(file, offset, num_bytes) < num_bytes:
                    return


def _created(path: Path, num_bytes: int) -> BinaryIO:
    """Return a new file of this size."""
    path.parent.mkdir(parents=True, exist_ok=True)
    file = path.open("w+b")
    try:
        # Before it is mapped: a page for which there is no room would end the process.
        os.posix_fallocate(file.fileno(), 0, num_bytes)
    except OSError:
        file.close()
        raise
    return file


def _received(connection: socket.socket, num_bytes: int) -> bytes:
    content = bytearray(num_bytes)
    _receive(connection, memoryview(content))
    return bytes(content)


def _receive(connection: socket.socket, out: memoryview) -> None:
    """Fill `out`. Raises OSError if the other rank closes the connection."""
    done = 0
    while done < len(out):
        with out[done:] as left:
            num_bytes = connection.recv_into(left)
        if not num_bytes:
            raise ConnectionResetError("the other rank has closed the connection")
        done += num_bytes


def _raise_error(connection: socket.socket) -> None:
    """Read a reply. Raises OSError with the error of the other rank, if there is one."""
    (error_bytes,) = REPLY.unpack(_received(connection, REPLY.size))
    if error_bytes:
        raise OSError(_received(connection, error_bytes).decode())
