"""The route from this node to the first one: its address and interface, printed for the scripts in scripts/launch.

python -m parallel.launch.route node0:29500      0 10.0.0.2 ib0      whether it is the first one, address, interface
"""

import fcntl
import socket
import struct
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from parallel.validation.errors import ConfigError, exit_on_config_error

GET_ADDRESS = 0x8915  # SIOCGIFADDR
ANY_PORT, DISCARD_PORT = 0, 9  # one that the system chooses, and one to which a route is asked for
ELSEWHERE = "192.0.2.1"  # an address that is never assigned (RFC 5737): its route leads out of this node


@dataclass(frozen=True)
class Route:
    """A route to the first node. `is_host`: this node is the first one. `interface` is empty if it is unknown."""

    is_host: bool
    local_address: str
    interface: str


def find_route(endpoint: str) -> Route:
    """Look the route up in the system's routing table; nothing is sent. Raises ConfigError if there is none."""
    address, _ = resolve(endpoint)
    local_address = _source_address(address)
    # On Debian a node's own name resolves to 127.0.1.1, which other nodes cannot use.
    if address.startswith("127.") and not endpoint.startswith(("localhost:", "127.0.0.1:")):
        # Nodes of a closed network have routes to each other only.
        found = sorted(_interfaces(), key=lambda one: not Path(f"/sys/class/net/{one[0]}/device").exists())
        others = (own for _, own in found if not own.startswith("127."))  # network cards before bridges
        local_address = _source_address(ELSEWHERE) or next(others, address)
    if local_address is None:
        node = socket.gethostname()
        raise ConfigError(f"{node}: there is no route from this node to {endpoint}; check RDZV and the network")
    interface = next((name for name, own in _interfaces() if own == local_address), "")
    return Route(_is_own(address), local_address, interface)


def resolve(endpoint: str) -> tuple[str, int]:
    """Return (IPv4 address, port) of HOST:PORT. Raises ConfigError."""
    host, _, port = endpoint.rpartition(":")
    if not host or not port.isdigit():
        raise ConfigError(f"RDZV={endpoint} is not HOST:PORT; name the first node and a free port, such as node0:29500")
    try:
        return socket.gethostbyname(host), int(port)
    except OSError as error:
        raise ConfigError(f"RDZV={endpoint}: the host name is unknown; choose another, or an address") from error


def _source_address(destination: str) -> str | None:
    """Return the address of this node from which it would send to `destination`; None if there is no route."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((destination, DISCARD_PORT))
        except OSError:
            return None
        return probe.getsockname()[0]


def _is_own(address: str) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener:
        try:
            listener.bind((address, ANY_PORT))  # fails if the address is not one of this node's
        except OSError:
            return False
    return True


def _interfaces() -> Iterator[tuple[str, str]]:
    """Yield (name, address) of each interface of this node that has an address."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode())
            try:
                reply = fcntl.ioctl(control, GET_ADDRESS, request)
            except OSError:  # the interface has no address
                continue
            yield name, socket.inet_ntoa(reply[20:24])


def main(endpoint: str) -> None:
    route = find_route(endpoint)
    sys.stdout.write(f"{int(route.is_host)} {route.local_address} {route.interface}\n")


if __name__ == "__main__":
    with exit_on_config_error():
        main(sys.argv[1])
