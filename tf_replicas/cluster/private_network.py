"""Makes a private network of network namespaces on this machine.

A *network namespace* is a part of Linux that has its own network devices,
addresses and ports. `PrivateNetwork` makes one namespace per host, and connects
the hosts by a bridge, as a switch connects machines. The rate of each link can
be limited, and links can be cut and mended while processes use them. Processes
outside cannot reach the hosts, and the hosts cannot reach anything outside.

Nothing is created in the namespace of this machine. Each namespace belongs to a
*holder*, a process that ends when this process ends, for whatever reason. Linux
removes the namespace, with its links, when the holder and the processes that
were started in it have ended.

The module needs root, `unshare` and `nsenter` (package util-linux), and `ip`
and `tc` (package iproute2).
"""

import json
import os
import shutil
import subprocess
from collections.abc import Sequence
from typing import NamedTuple

_TOOLS = {
  "unshare": "util-linux",
  "nsenter": "util-linux",
  "ip": "iproute2",
  "tc": "iproute2",
}
_ADDRESSES = "10.77.0."
_MAX_HOSTS = 200
_UPLINK = "eth0"  # The device of a host.
_BRIDGE = "switch"
# The queue of a limited link holds what the link sends in this time.
_QUEUE_MILLISECS = 50
# What a limited link may send at once: it has to cover the timer of the kernel,
# and a packet.
_BURST_SECS, _MIN_BURST_BYTES = 0.004, 8192


class PrivateNetworkError(RuntimeError):
  """Reports that a private network cannot be made or changed here."""


class Traffic(NamedTuple):
  """The bytes that a host has sent and received over its link.

  Attributes:
    sent: Bytes sent, with the headers of all layers down to Ethernet.
    received: Bytes received, counted in the same way.
  """

  sent: int
  received: int


def obstacle() -> str | None:
  """Finds out why this process cannot make a private network.

  Returns:
    The reason in one line; None if no obstacle was found.
  """
  if os.geteuid() != 0:
    return (
      "a private network needs root, as it consists of network namespaces."
      f" Received: user id {os.geteuid()}."
    )
  for tool, package in _TOOLS.items():
    if shutil.which(tool) is None:
      return (
        f"a private network needs the command `{tool}`: install the package"
        f" {package}."
      )
  result = subprocess.run(
    ["unshare", "--net", "true"], capture_output=True, text=True, check=False
  )
  if result.returncode:
    return (
      "a private network needs network namespaces, which this machine does not"
      f" permit: {result.stderr.strip()}."
    )
  return None


class PrivateNetwork:
  """Hosts that are connected by a switch, each a network namespace.

  A context manager: the network exists while the context is entered. Every host
  has its own ports, and an address `10.77.0.<n>`. Processes that still run on
  the hosts when the context is left lose their connections; end them before.

  Attributes:
    hosts: The names of the hosts.
  """

  def __init__(
    self, hosts: Sequence[str], *, mbit_per_sec: float | None = None
  ):
    """Prepares the network; entering the context makes it.

    Args:
      hosts: The names of the hosts, which are only used in calls of this
        object.
      mbit_per_sec: The rate of the link of each host, in each direction, in
        10^6 bits per second, with all headers down to Ethernet. None: no limit.

    Raises:
      ValueError: If a name occurs twice, or there are too many hosts.
    """
    self.hosts = tuple(hosts)
    if len(set(hosts)) < len(hosts) or not 0 < len(hosts) <= _MAX_HOSTS:
      raise ValueError(
        f"`hosts` must be 1 to {_MAX_HOSTS} different names. Received:"
        f" {list(hosts)}."
      )
    self._mbit_per_sec = mbit_per_sec
    self._holders: dict[str | None, subprocess.Popen] = {}

  def __enter__(self) -> "PrivateNetwork":
    """Makes the network.

    Raises:
      PrivateNetworkError: If this machine does not permit it.
    """
    reason = obstacle()
    if reason:
      raise PrivateNetworkError(reason)
    try:
      for name in (None, *self.hosts):
        self._holders[name] = _hold()
      self._run(None, "ip", f"link add name {_BRIDGE} type bridge")
      self._run(None, "ip", f"link set dev {_BRIDGE} up")
      for host in self.hosts:
        port, pid = self._port(host), self._holders[host].pid
        self._run(
          None,
          "ip",
          f"link add name {port} type veth peer name {_UPLINK} netns {pid}",
          f"link set dev {port} master {_BRIDGE} up",
        )
        self._run(
          host,
          "ip",
          "link set dev lo up",
          f"address add {self.address(host)}/24 dev {_UPLINK}",
          f"link set dev {_UPLINK} up",
        )
        if self._mbit_per_sec is not None:
          self.limit(host, self._mbit_per_sec)
    except BaseException:
      self.__exit__()
      raise
    return self

  def __exit__(self, *exc_info: object) -> None:
    """Removes the network."""
    if None in self._holders and self._holders[None].poll() is None:
      # Removing one end of a link removes the other end, even if processes
      # still run on the host.
      for host in self.hosts:
        self._run(None, "ip", f"link del dev {self._port(host)}", check=False)
    for holder in self._holders.values():
      holder.communicate()  # Closes its input, which ends it.
    self._holders.clear()

  def address(self, host: str) -> str:
    """Returns the IPv4 address of a host."""
    return f"{_ADDRESSES}{self.hosts.index(host) + 1}"

  def command(self, host: str, command: Sequence[str]) -> list[str]:
    """Returns a command line that runs another command on a host.

    The process that runs it enters the host's network namespace, and then
    becomes the other command, with the same process id. Only the network is
    that of the host: files and processes are those of this machine.

    Args:
      host: The name of the host.
      command: The command line to run there.
    """
    return self._command(host, command)

  def limit(self, host: str, mbit_per_sec: float | None) -> None:
    """Changes the rate of the link of a host, in both directions.

    Processes that use the link go on. Packets that wait for the link are lost,
    and TCP sends them again.

    Args:
      host: The name of the host.
      mbit_per_sec: The new rate in 10^6 bits per second, with all headers down
        to Ethernet; None for no limit.

    Raises:
      PrivateNetworkError: If the kernel has no token bucket filter (`sch_tbf`).
    """
    for namespace, device in ((host, _UPLINK), (None, self._port(host))):
      # It fails if there is no limit yet, and then there is nothing to remove.
      # A filter must not only be changed: a packet that waits in it and is
      # larger than the new burst would block it for ever.
      self._run(namespace, "tc", f"qdisc del dev {device} root", check=False)
      if mbit_per_sec is None:
        continue
      bits = mbit_per_sec * 1e6
      burst = max(_MIN_BURST_BYTES, int(bits / 8 * _BURST_SECS))
      self._run(
        namespace,
        "tc",
        f"qdisc add dev {device} root tbf rate {bits:.0f}bit burst {burst}"
        f" latency {_QUEUE_MILLISECS}ms",
      )

  def cut(self, host: str) -> None:
    """Cuts a host off: the switch drops all packets from and to it.

    As in a partition of a network, nobody is informed. Connections stay, and
    their packets are sent again after `mend`.
    """
    self._run(None, "ip", f"link set dev {self._port(host)} nomaster")

  def mend(self, host: str) -> None:
    """Connects a host again after `cut`."""
    self._run(None, "ip", f"link set dev {self._port(host)} master {_BRIDGE}")

  def traffic(self, host: str) -> Traffic:
    """Counts what a host has sent and received over its link so far."""
    words = ["ip", "-json", "-statistics", "link", "show", "dev", _UPLINK]
    result = subprocess.run(
      self._command(host, words), capture_output=True, text=True, check=True
    )
    counts = json.loads(result.stdout)[0]["stats64"]
    return Traffic(counts["tx"]["bytes"], counts["rx"]["bytes"])

  def _port(self, host: str) -> str:
    return f"port{self.hosts.index(host)}"

  def _command(self, host: str | None, command: Sequence[str]) -> list[str]:
    pid = self._holders[host].pid
    return ["nsenter", f"--net=/proc/{pid}/ns/net", *command]

  def _run(
    self, host: str | None, tool: str, *lines: str, check: bool = True
  ) -> None:
    """Runs lines of `ip` or `tc` in a namespace.

    Args:
      host: The host, or None for the switch.
      tool: `ip` or `tc`.
      *lines: The arguments of the tool, one call per line.
      check: Whether to raise an error if a line fails.

    Raises:
      PrivateNetworkError: If a line fails and `check` is true.
    """
    result = subprocess.run(
      self._command(host, [tool, "-batch", "-"]),
      input="\n".join(lines),
      capture_output=True,
      text=True,
      check=False,
    )
    if check and result.returncode:
      error = " ".join(result.stderr.split())
      raise PrivateNetworkError(
        f"`{tool} {'; '.join(lines)}` failed in the private network: {error}"
      )


def _hold() -> subprocess.Popen:
  """Starts a process that holds a new network namespace.

  The new process ends when its standard input is closed, so also when this
  process ends for any reason.
  """
  process = subprocess.Popen(
    ["unshare", "--net", "cat"],
    stdin=subprocess.PIPE,
    stdout=subprocess.PIPE,
    text=True,
    # Ctrl-C must not end it before the tasks.
    start_new_session=True,
  )
  # `cat` answers once the namespace is there.
  assert process.stdin is not None and process.stdout is not None
  process.stdin.write("here\n")
  process.stdin.flush()
  if not process.stdout.readline():
    process.communicate()
    raise PrivateNetworkError("`unshare --net cat` failed")
  return process
