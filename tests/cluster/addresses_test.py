"""Tests of `cluster.addresses`."""

import socket
import subprocess
import sys

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


def test_free_ports_avoid_those_taken():
  free = addresses.free_ports(1, taken=set())[0]
  addresses._reserved.pop().close()
  taken = {*addresses._FREE_PORTS} - {free}
  assert addresses.free_ports(1, taken=taken) == [free]
  with pytest.raises(OSError, match=r"1 free ports are needed .* Found: 0"):
    addresses.free_ports(1, taken=taken)


def test_other_processes_get_other_ports():
  """They would otherwise all begin with the first port that is free."""
  code = (
    "import sys; from tf_replicas.cluster import addresses;"
    "addresses._dice.randrange = lambda count: 0;"
    "print(*addresses.free_ports(3, taken=set()), flush=True);"
    "sys.stdin.read()"
  )
  processes = [
    subprocess.Popen(
      [sys.executable, "-c", code],
      stdin=subprocess.PIPE,
      stdout=subprocess.PIPE,
      text=True,
    )
    for _ in range(4)
  ]
  try:
    ports = [p for each in processes for p in each.stdout.readline().split()]
    assert len(ports) == len(set(ports)) == 12
  finally:
    for process in processes:
      process.communicate()


def test_a_port_in_use_is_not_free():
  with addresses.bound_socket(0) as bound:
    bound.listen()
    assert not addresses._reserve(bound.getsockname()[1])
