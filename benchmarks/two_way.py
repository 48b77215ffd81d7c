"""Measures what one link carries in one direction, and in both at once.

  python -m benchmarks.two_way [--mbit_per_sec=200] [--rounds=3] [--output=FILE]

A server and 1, 2 or 4 clients are on hosts of a private network, each with a
link of the same rate (`tc … tbf`; needs root). Each client has one TCP
connection to the server. Either the server sends as fast as it can, or both
sides do. It prints what arrives at the clients and at the server, all
connections together, divided by the rate of the server's link.

The simulator of `experiments/` assumes that a link carries its full rate in
both directions at once. This program tells whether links do.
"""

import argparse
import socket
import subprocess
import sys
import threading
import time

from benchmarks import ratios
from benchmarks import stored
from tf_replicas.cluster import private_network

_SECS = 5.0
# In which all processes start and connect.
_START_SECS = 15.0
_PORT = 5000
_CHUNK = 1 << 16
_CLIENTS = (1, 2, 4)


def _peer(
  role: str, address: str, port: str, is_two_way: str, begin: str
) -> None:
  """Runs one end of a connection, and prints the received bits per second.

  Args:
    role: `server` or `client`.
    address: The address of the server.
    port: Its port.
    is_two_way: `1` if both ends send; `0` if only the server does.
    begin: When all ends begin, by `time.monotonic()`.
  """
  connection = _connection(role, (address, int(port)))
  connection.settimeout(_SECS)
  if (wait := float(begin) - time.monotonic()) < 0:
    sys.exit(f"the connection was late by {-wait:.1f} s")
  time.sleep(wait)
  end = float(begin) + _SECS
  received = 0

  def send():
    try:
      while time.monotonic() < end:
        connection.sendall(b"x" * _CHUNK)
    except OSError:
      pass  # The other end has closed the connection, or does not read.

  sender = threading.Thread(target=send, daemon=True)
  if role == "server" or is_two_way == "1":
    sender.start()
  try:
    while time.monotonic() < end and (part := connection.recv(_CHUNK)):
      received += len(part)
  except OSError:
    pass  # Nothing arrives any more.
  print(received * 8 / _SECS, flush=True)


def _connection(role: str, address: tuple[str, int]) -> socket.socket:
  if role == "server":
    listener = socket.create_server(address)
    listener.settimeout(30)
    return listener.accept()[0]
  deadline = time.monotonic() + 30
  while True:
    try:
      return socket.create_connection(address)
    except OSError:
      if time.monotonic() > deadline:
        raise
      time.sleep(0.1)


def measure(
  network: private_network.PrivateNetwork, clients: int, is_two_way: bool
) -> dict[str, float]:
  """Lets a server and clients send.

  Args:
    network: The hosts `server`, `client0`, `client1` and so on.
    clients: The number of clients.
    is_two_way: Whether clients send, too.

  Returns:
    The bits per second that arrive at all clients, and at the server.
  """
  address = network.address("server")
  begin = time.monotonic() + _START_SECS
  ends = []
  for number in range(clients):
    for role, host in (("server", "server"), ("client", f"client{number}")):
      command = [sys.executable, "-m", "benchmarks.two_way", "--peer", role]
      command += [address, str(_PORT + number), str(int(is_two_way))]
      command.append(str(begin))
      process = subprocess.Popen(
        network.command(host, command), stdout=subprocess.PIPE, text=True
      )
      ends.append((role, process))
  found = {"client": 0.0, "server": 0.0}
  for role, process in ends:
    output, _ = process.communicate(timeout=60)
    found[role] += float(output)
  return {"at_clients": found["client"], "at_server": found["server"]}


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--mbit_per_sec", type=float, default=200.0)
  parser.add_argument("--rounds", type=int, default=3)
  parser.add_argument("--output", help="File for the results, as JSON")
  parser.add_argument("--peer", nargs=5, help=argparse.SUPPRESS)
  arguments = parser.parse_args()
  if arguments.peer:
    _peer(*arguments.peer)
    return
  if reason := private_network.obstacle():
    sys.exit(reason)
  hosts = ["server", *(f"client{i}" for i in range(max(_CLIENTS)))]
  shares: dict[str, dict[str, list[float]]] = {}
  with private_network.PrivateNetwork(hosts) as network:
    for host in hosts:
      network.limit(host, arguments.mbit_per_sec)
    for _ in range(arguments.rounds):
      for is_two_way in (False, True):
        for clients in _CLIENTS:
          name = f"{clients} clients, {'two ways' if is_two_way else 'one way'}"
          rates = measure(network, clients, is_two_way)
          of_name = shares.setdefault(name, {"at_clients": [], "at_server": []})
          for where, rate in rates.items():
            of_name[where].append(rate / (arguments.mbit_per_sec * 1e6))
  for name, found in shares.items():
    words = {where: ratios.in_words(values) for where, values in found.items()}
    print(f"{name}: {words}", flush=True)
  stored.write(
    arguments.output,
    {"mbit_per_sec": arguments.mbit_per_sec, "share_of_rate": shares},
  )


if __name__ == "__main__":
  main()
