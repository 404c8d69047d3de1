"""The route to the first node, as sockets report it."""

import socket
from unittest import mock

import pytest

from parallel.launch import route
from parallel.launch.route import Route, find_route, resolve
from parallel.validation.errors import ConfigError


def test_an_endpoint_is_a_host_and_a_port():
    assert resolve("127.0.0.1:29500") == ("127.0.0.1", 29500)
    for endpoint in ("node0", ":29500", "node0:", "node0:port"):
        with pytest.raises(ConfigError, match=rf"^RDZV={endpoint} is not HOST:PORT; name the first node"):
            resolve(endpoint)
    with (
        mock.patch.object(socket, "gethostbyname", side_effect=socket.gaierror("unknown")),
        pytest.raises(ConfigError, match=r"^RDZV=node0:1: the host name is unknown; choose another, or an address$"),
    ):
        resolve("node0:1")


def test_the_node_that_owns_the_address_is_the_host():
    names = [(1, "no-such-interface"), *socket.if_nameindex()]  # the first one has no address
    with mock.patch.object(socket, "if_nameindex", return_value=names):
        assert find_route("localhost:29500") == Route(True, "127.0.0.1", "lo")


def test_a_node_without_a_route_to_the_first_is_named():
    with (
        mock.patch("socket.socket.connect", side_effect=OSError("Network is unreachable")),
        mock.patch("socket.gethostname", return_value="n7"),
        pytest.raises(ConfigError, match=r"^n7: there is no route from this node to 10\.0\.0\.1:29500; check RDZV"),
    ):
        find_route("10.0.0.1:29500")


def test_a_node_is_known_by_the_address_from_which_it_reaches_the_first():
    sources = {"10.0.0.1": "10.0.0.2", route.ELSEWHERE: "192.168.0.2"}
    patches = {"_source_address": sources.get, "_is_own": lambda _address: False}
    patches["_interfaces"] = lambda: [("e0", "10.0.0.2")]
    with mock.patch.multiple(route, **patches):
        assert find_route("10.0.0.1:29500") == Route(False, "10.0.0.2", "e0")


@pytest.mark.parametrize(
    ("elsewhere", "interfaces", "expected"),
    [
        ("10.0.0.7", {"lo": "127.0.0.1", "e0": "10.0.0.6", "e1": "10.0.0.7"}, ("10.0.0.7", "e1")),
        # There is no default route.
        (None, {"lo": "127.0.0.1", "e0": "10.0.0.6", "e1": "10.0.0.7"}, ("10.0.0.6", "e0")),
        (None, {"lo": "127.0.0.1"}, ("127.0.1.1", "")),
    ],
)
def test_a_node_whose_name_is_a_loopback_address_is_known_by_the_one_that_others_use(elsewhere, interfaces, expected):
    sources = {"127.0.1.1": "127.0.0.1", route.ELSEWHERE: elsewhere}
    patches = {"_source_address": sources.get, "_is_own": lambda _address: True, "_interfaces": interfaces.items}
    with mock.patch.object(socket, "gethostbyname", return_value="127.0.1.1"), mock.patch.multiple(route, **patches):
        assert find_route("node0:29500") == Route(True, *expected)
        assert find_route("localhost:29500") == Route(True, "127.0.0.1", "lo"), "all ranks are on one node"


def test_scripts_read_the_route_in_one_line(capsys):
    route.main("localhost:29500")
    assert capsys.readouterr().out == "1 127.0.0.1 lo\n"


def test_an_address_of_another_node_has_no_interface_here():
    documented = "203.0.113.1"  # an address for documents, which no node has
    with mock.patch.object(route, "_source_address", return_value=documented):
        assert find_route(f"{documented}:29500") == Route(False, documented, "")
