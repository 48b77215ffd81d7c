"""Tests of `cluster.addresses`."""

import socket

import pytest

from tf_replicas.cluster import addresses


@pytest.mark.parametrize(
  ("address", "parts"),
  [
    ("localhost:0", ("localhost", 0)),
    ("worker0.example.com:65535", ("worker0.example.com", 65535)),
    ("job_worker-0.ns.svc:2222", ("job_worker-0.ns.svc", 2222)),
    ("10.0.0.1:80", ("10.0.0.1", 80)),
    ("[::1]:2222", ("::1", 2222)),
    ("[fe80::1%eth0]:2222", ("fe80::1%eth0", 2222)),
    ("localhost", None),
    ("localhost:65536", None),
    ("::1:2222", None),
    ("[127.0.0.1]:2222", None),
    (b"localhost:1", None),
  ],
)
def test_split(address, parts):
  assert addresses.split(address) == parts


def test_with_port_keeps_the_host():
  assert addresses.with_port("a.example.com:0", 7) == "a.example.com:7"
  assert addresses.with_port("[::1]:0", 7) == "[::1]:7"


@pytest.mark.parametrize(
  ("host", "canonical"),
  [
    ("LocalHost", "localhost"),
    ("127.0.0.1", "localhost"),
    ("127.3.2.1", "localhost"),
    ("::1", "localhost"),
    ("10.0.0.1", "10.0.0.1"),
    ("PS0.Example.com", "ps0.example.com"),
  ],
)
def test_canonical_host(host, canonical):
  assert addresses.canonical_host(host) == canonical


@pytest.mark.parametrize(
  ("host", "is_local"),
  [
    ("localhost", True),
    ("127.0.0.1", True),
    ("127.1.2.3", True),
    ("::1", True),
    ("Node7", True),
    ("node7.example.com", True),
    ("node7.other.com", False),
    ("node70", False),
    ("node8.example.com", False),
    ("192.0.2.1", False),
    ("2001:db8::1", False),
  ],
)
def test_is_local(host, is_local, monkeypatch):
  monkeypatch.setattr(socket, "gethostname", lambda: "node7")
  monkeypatch.setattr(socket, "getfqdn", lambda: "node7.example.com")
  assert addresses.is_local(host) == is_local


def test_address_of_an_interface_is_local():
  with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
    try:
      probe.connect(("192.0.2.1", 9))  # Sends nothing: picks the interface.
    except OSError:
      pytest.skip("no network interface beside the loopback one")
    assert addresses.is_local(probe.getsockname()[0])


def test_other_names_are_not_looked_up(monkeypatch):
  def fail(*args):
    raise AssertionError(f"looked up: {args}")

  monkeypatch.setattr(socket, "getfqdn", fail)
  monkeypatch.setattr(socket, "getaddrinfo", fail)
  assert not addresses.is_local("worker0.example.com")


def test_free_ports_are_distinct_and_can_be_bound():
  ports = addresses.free_ports(50, taken=set())
  assert len(set(ports)) == 50
  for port in ports[:5]:
    addresses.bound_socket(port).close()


def test_free_ports_avoid_those_taken(monkeypatch):
  real = addresses.bound_socket
  first = []

  def bound_socket(port):
    bound = real(port)
    first.append(bound.getsockname()[1])
    return bound

  monkeypatch.setattr(addresses, "bound_socket", bound_socket)
  taken = _SetWithFirst(first)
  assert addresses.free_ports(1, taken=taken) == first[1:]


class _SetWithFirst:
  """Contains the first element of a list that is still to be filled."""

  def __init__(self, elements):
    self._elements = elements

  def __contains__(self, element):
    return element == self._elements[0]


def test_port_of_a_listening_server_cannot_be_bound():
  with socket.socket() as server:
    server.bind(("127.0.0.1", 0))
    server.listen()
    with pytest.raises(OSError, match="in use"):
      addresses.bound_socket(server.getsockname()[1])


def test_port_of_a_server_that_has_ended_can_be_bound_at_once():
  with socket.socket() as server:
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    server.bind(("127.0.0.1", 0))
    server.listen()
    port = server.getsockname()[1]
    client = socket.create_connection(("127.0.0.1", port))
    accepted, _ = server.accept()
    accepted.close()  # The side that closes first waits in TIME_WAIT.
    client.close()
  addresses.bound_socket(port).close()
