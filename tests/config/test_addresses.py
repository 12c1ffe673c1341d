"""Hosts and ports: forms, wildcards in disguise, clashes."""

import pytest

from gateway.config.addresses import (
    Address,
    check_ipc_path,
    is_loopback,
    is_wildcard,
    parse_address,
    parse_host,
    parse_tcp,
)


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("127.0.0.1:50051", ("127.0.0.1", 50051)),
        ("localhost:0", ("127.0.0.1", 0)),
        ("LOCALHOST:1", ("127.0.0.1", 1)),
        ("gate-way_1.example.com:65535", ("gate-way_1.example.com", 65535)),
        ("[::1]:50051", ("::1", 50051)),
        ("[0:0::1]:5", ("::1", 5)),
        ("*:5", ("*", 5)),
    ],
)
def test_parse(text, address):
    assert parse_address(text) == address


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("127.0.0.1", "expected HOST:PORT"),
        ("127.0.0.1:", "expected HOST:PORT"),
        ("host:http", "expected HOST:PORT"),
        ("host:१२", "expected HOST:PORT"),
        ("host:65536", "port 65536 is out of range; the largest is 65535"),
        ("::1:50051", "put the IPv6 address in brackets, [::1]"),
        ("[::g]:1", "[::g] is not an IPv6 address"),
        ("[127.0.0.1]:1", "'[127.0.0.1]' is not a host name"),
        (":50051", "'' is not a host name"),
        ("a b:1", "'a b' is not a host name"),
        ("ipv4:0.0.0.0:1", "put the IPv6 address in brackets"),
        ("dns:///0.0.0.0:1", "put the IPv6 address in brackets"),
        ("unix/x:1", "'unix/x' is not a host name"),
    ],
)
def test_refused(text, message):
    with pytest.raises(ValueError, match="^" + message.replace("[", r"\[").replace("]", r"\]")):
        parse_address(text)


@pytest.mark.parametrize(
    "host", ["*", "0.0.0.0", "[::]", "[0:0::]", "[::ffff:0.0.0.0]", "0", "0.0", "0x0", "00.0.0.0", "[::0]"]
)
def test_every_way_to_write_all_interfaces(host):
    assert is_wildcard(parse_host(host))


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "localhost", "[::1]", "10.0.0.1", "example.com", "1", "[::ffff:10.0.0.1]"]
)
def test_one_address_is_no_wildcard(host):
    assert not is_wildcard(parse_host(host))


def test_loopback():
    assert [is_loopback(parse_host(host)) for host in ("localhost", "127.9.9.9", "[::1]")] == [True] * 3
    assert [is_loopback(parse_host(host)) for host in ("10.0.0.1", "example.com", "*", "0.0.0.0")] == [False] * 4


def test_clashes():
    assert Address("a", 1).clashes(Address("a", 1))
    assert Address("a", 1).clashes(Address("0.0.0.0", 1))
    assert Address("*", 1).clashes(Address("b", 1))
    assert not Address("a", 1).clashes(Address("b", 1))
    assert not Address("a", 1).clashes(Address("a", 2))
    assert not Address("a", 0).clashes(Address("a", 0))


def test_an_endpoint_has_its_scheme_taken_off():
    assert parse_tcp("tcp://[::1]:5570") == Address("::1", 5570)
    with pytest.raises(ValueError, match="expected HOST:PORT"):
        parse_tcp("tcp://127.0.0.1:*")


def test_a_socket_path_counts_in_bytes():
    check_ipc_path("/" + "x" * 106)
    for path in ("/" + "x" * 107, "/" + "ä" * 54):
        with pytest.raises(ValueError, match="longer than 107 bytes"):
            check_ipc_path(path)


@pytest.mark.parametrize(("label", "fits"), [(63, True), (64, False)])
def test_a_label_of_a_host_name_is_at_most_63_characters(label, fits):
    host = f"{'x' * label}.example"
    if fits:
        assert parse_host(host) == host
    else:
        with pytest.raises(ValueError, match="is not a host name"):
            parse_host(host)
