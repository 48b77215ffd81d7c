"""Tests for cluster.private_network, with real namespaces and links."""

import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import textwrap
import time

import pytest

from tf_replicas.cluster import private_network

ROOT = pathlib.Path(__file__).resolve().parents[2]
OBSTACLE = private_network.obstacle()
PORT = 5000
DEADLINE_SECS = 30.0

# Answers each connection with the number of bytes received.
SINK = f"""
import socket
server = socket.create_server(("", {PORT}))
print("up", flush=True)
while True:
  connection, _ = server.accept()
  count = 0
  while data := connection.recv(1 << 20):
    count += len(data)
  connection.sendall(str(count).encode())
  connection.close()
"""
# Sends bytes, one line of input after the other, and prints the answer. The
# arguments are the address and the number of bytes.
SOURCE = f"""
import socket, sys, time
start = time.monotonic()
connection = socket.create_connection((sys.argv[1], {PORT}))
for count in sys.argv[2:]:
  connection.sendall(bytes(int(count)))
  print("sent", flush=True)
  if len(sys.argv) > 3:
    sys.stdin.readline()
connection.shutdown(socket.SHUT_WR)
print(connection.recv(99).decode(), time.monotonic() - start)
"""
# Makes a network, starts a sink on it, prints the holders, and waits.
OWNER = f"""
import signal, subprocess, sys, time
from tf_replicas.cluster import private_network
if "handles" in sys.argv:
  signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
with private_network.PrivateNetwork(["one", "two"]) as net:
  print(*(h.pid for h in net._holders.values()), flush=True)
  if "fails" in sys.argv:
    raise ValueError("on purpose")
  time.sleep({DEADLINE_SECS})
"""


def _is_running(pid):
  return pathlib.Path(f"/proc/{pid}").exists()


def _devices():
  return {name for _, name in socket.if_nameindex()}


@pytest.fixture(scope="module", name="net")
def fixture_net():
  if OBSTACLE:
    pytest.skip(OBSTACLE)
  with private_network.PrivateNetwork(["ps", "worker"]) as net:
    sink = subprocess.Popen(
      net.command("ps", [sys.executable, "-c", SINK]),
      stdout=subprocess.PIPE,
      text=True,
    )
    assert sink.stdout.readline() == "up\n"
    yield net
    sink.kill()
    sink.communicate()


def _source(net, *counts):
  return subprocess.Popen(
    net.command(
      "worker",
      [sys.executable, "-c", SOURCE, net.address("ps"), *map(str, counts)],
    ),
    stdin=subprocess.PIPE,
    stdout=subprocess.PIPE,
    text=True,
  )


def _send(net, count):
  """Sends so many bytes from `worker` to `ps`, and returns the seconds."""
  output, _ = _source(net, count).communicate(timeout=DEADLINE_SECS)
  received, secs = output.split()[1:]
  assert int(received) == count
  return float(secs)


# First: the fixture's end, after the last test, starts processes.
def test_refuses_equal_names():
  with pytest.raises(ValueError, match="1 to 200 different names"):
    private_network.PrivateNetwork(["ps", "ps"])


def test_the_hosts_reach_each_other_only(net):
  assert _send(net, 10) > 0
  to_outside = "import socket; socket.create_connection(('192.0.2.1', 80))"
  result = subprocess.run(
    net.command("ps", [sys.executable, "-c", to_outside]),
    capture_output=True,
    text=True,
    check=False,
  )
  assert "Network is unreachable" in result.stderr
  answer = b""
  try:
    with socket.create_connection((net.address("ps"), PORT), 0.2) as outside:
      outside.sendall(b"x")
      outside.shutdown(socket.SHUT_WR)
      answer = outside.recv(99)
  except OSError:
    pass  # As it should be, unless another machine has the address.
  assert answer != b"1"


def test_creates_nothing_on_this_machine(net):
  assert net.hosts == ("ps", "worker")
  assert not {"port0", "port1", "switch"} & _devices()


def test_a_link_has_its_rate_in_both_directions(net):
  count = 1_000_000
  net.limit("worker", 40)
  try:
    at_the_worker = _send(net, count)
    net.limit("worker", None)
    net.limit("ps", 40)
    at_the_ps = _send(net, count)
  finally:
    net.limit("worker", None)
    net.limit("ps", None)
  # No noise makes a transfer faster than its link. Without a limit it takes
  # a hundredth of the time.
  least = (count * 8 - 8e6 * 0.05) / 40e6
  assert at_the_worker > least
  assert at_the_ps > least
  # Noise may make a few transfers as slow as a limited one.
  unlimited = min(_send(net, count) for _ in range(5))
  assert unlimited < min(at_the_worker, at_the_ps)


def test_a_busy_link_may_become_slower(net):
  count = 8_000_000
  try:
    net.limit("ps", 1000)
    source = _source(net, count)
    # A packet of 64 KiB that waits is larger than the burst of 20 Mbit/s.
    for rate in (1000, 20) * 5:
      time.sleep(0.01)
      net.limit("ps", rate)
    output, _ = source.communicate(timeout=DEADLINE_SECS)
  finally:
    net.limit("ps", None)
  assert int(output.split()[1]) == count


def test_counts_traffic(net):
  before = net.traffic("worker")
  _send(net, 100_000)
  after = net.traffic("worker")
  assert 100_000 <= after.sent - before.sent < 150_000
  assert 0 < after.received - before.received < 50_000
  assert net.traffic("ps").received >= after.sent - before.sent


def test_a_connection_outlives_a_partition(net):
  source = _source(net, 10, 20)
  assert source.stdout.readline() == "sent\n"
  net.cut("ps")
  before = net.traffic("ps").received
  source.stdin.write("go on\n")
  source.stdin.flush()
  assert source.stdout.readline() == "sent\n"  # Into the socket's buffer.
  assert net.traffic("ps").received == before
  net.mend("ps")
  output, _ = source.communicate("end\n", timeout=DEADLINE_SECS)
  assert int(output.split()[0]) == 30


def _owner(*words):
  return subprocess.Popen(
    [sys.executable, "-c", textwrap.dedent(OWNER), *words],
    cwd=ROOT,
    env={**os.environ, "PYTHONPATH": str(ROOT)},
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    text=True,
  )


@pytest.mark.parametrize(
  "ending", ["SIGTERM", "SIGTERM handled", "SIGKILL", "an exception"]
)
@pytest.mark.skipif(OBSTACLE is not None, reason=str(OBSTACLE))
def test_nothing_is_left(ending):
  words = {"SIGTERM handled": ["handles"], "an exception": ["fails"]}
  owner = _owner(*words.get(ending, []))
  pids = owner.stdout.readline().split()
  assert len(pids) == 3
  name = ending.split()[0]
  if name.startswith("SIG"):
    owner.send_signal(getattr(signal, name))
  _, errors = owner.communicate(timeout=DEADLINE_SECS)
  if ending == "an exception":
    assert errors.endswith("ValueError: on purpose\n")
  deadline = time.monotonic() + DEADLINE_SECS
  while any(_is_running(pid) for pid in pids):
    assert time.monotonic() < deadline, "a namespace is left"
    time.sleep(0.01)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another")
def test_says_that_it_needs_root():
  program = (
    "import os; from tf_replicas.cluster import private_network;"
    "os.setuid(65534); print(private_network.obstacle())"
  )
  result = subprocess.run(
    [sys.executable, "-c", program],
    cwd=ROOT,
    capture_output=True,
    text=True,
    check=True,
  )
  assert re.fullmatch(
    r"a private network needs root, .* Received: user id 65534\.\n",
    result.stdout,
  )
