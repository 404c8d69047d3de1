"""How this node reaches the one that all meet at, for scripts/launch: print what torchrun and the collectives need.

python -m parallel.launch.route node0:29500      is_host=0 local_address=10.0.0.2 interface=ib0
"""

import fcntl
import socket
import struct
import sys
from dataclasses import dataclass

from parallel.errors import ConfigError, exit_on_config_error

GET_ADDRESS = 0x8915  # SIOCGIFADDR
ELSEWHERE = "192.0.2.1"  # an address that nobody has (RFC 5737): the way to it is the way out of this node


@dataclass(frozen=True)
class Route:
    """`is_host`: the address is this node's own, so it is the one that serves. `interface`: empty where unknown."""

    is_host: bool
    local_address: str
    interface: str


def find_route(endpoint: str) -> Route:
    """Asks the system's routing table only: nothing is sent. Raises ConfigError."""
    address, _ = resolve(endpoint)
    # Debian lets a node's own name stand for 127.0.1.1, which is of no use to the other nodes.
    is_only_for_itself = address.startswith("127.") and not endpoint.startswith(("localhost:", "127.0.0.1:"))
    local_address = _source_address(ELSEWHERE) or address if is_only_for_itself else _source_address(address)
    if local_address is None:
        node = socket.gethostname()
        raise ConfigError(f"{node}: no way leads from here to {endpoint}; check RDZV and the network")
    return Route(_is_own(address), local_address, _interface_of(local_address))


def resolve(endpoint: str) -> tuple[str, int]:
    """(IPv4 address, port) of HOST:PORT. Raises ConfigError."""
    host, _, port = endpoint.rpartition(":")
    if not host or not port.isdigit():
        raise ConfigError(f"RDZV={endpoint} is no HOST:PORT; name the first node and a free port, as node0:29500")
    try:
        return socket.gethostbyname(host), int(port)
    except OSError as error:
        raise ConfigError(f"RDZV={endpoint}: no host of that name is known; choose one, or an address") from error


def _source_address(destination: str) -> str | None:
    """Of what this node would send there; None where no way leads there."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((destination, 9))
        except OSError:
            return None
        return probe.getsockname()[0]


def _is_own(address: str) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener:
        try:
            listener.bind((address, 0))  # only its owner may
        except OSError:
            return False
    return True


def _interface_of(address: str) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode())
            try:
                answer = fcntl.ioctl(control, GET_ADDRESS, request)
            except OSError:  # it has no address
                continue
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    return ""


def main(endpoint: str) -> None:
    route = find_route(endpoint)
    sys.stdout.write(f"is_host={int(route.is_host)} local_address={route.local_address} interface={route.interface}\n")


if __name__ == "__main__":
    with exit_on_config_error():
        main(sys.argv[1])
