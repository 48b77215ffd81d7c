"""Splits `host:port` addresses, recognizes local hosts, finds free ports."""

import ipaddress
import random
import re
import socket
import sys

RULE = 'must be "host:port" with a port in [0, 65535]'

_ADDRESS = re.compile(
  r"(?:\[(?P<ipv6>[^\s\[\]]+)\]|(?P<host>[^\s:/\[\]]+))"
  r":(?P<port>[0-9]{1,5})"
)
# Below the ports that Linux gives to outgoing connections (32768 and above).
_FREE_PORTS = range(15000, 32768)
_dice = random.SystemRandom()  # Not that of the user, who may give it a seed.
# The newest reservations of ports by this process.
_reserved: list[socket.socket] = []
_MAX_RESERVED = 256


def split(address: object) -> tuple[str, int] | None:
  """Splits an address "host:port" into the host and the port.

  Args:
    address: The address. An IPv6 host stands in brackets: "[::1]:2222".

  Returns:
    The host, without brackets, and the port; None if `address` is not a string
    of this form with a port in [0, 65535].
  """
  match = _ADDRESS.fullmatch(address) if isinstance(address, str) else None
  if match is None or int(match["port"]) > 65535:
    return None
  if match["ipv6"] and getattr(_ip(match["ipv6"]), "version", None) != 6:
    return None
  return match["ipv6"] or match["host"], int(match["port"])


def with_port(address: str, port: int) -> str:
  """Returns the address "host:port" with `port` in the place of its port."""
  return f"{address.rpartition(':')[0]}:{port}"


def canonical_host(host: str) -> str:
  """Returns `host` in the form by which addresses of hosts are compared.

  It is "localhost" for every loopback address, and otherwise `host` in lower
  case. All loopback addresses count as one host, since a TensorFlow server
  listens on all interfaces: 127.0.0.1:2222 and 127.0.0.2:2222 are the same
  port.
  """
  ip = _ip(host)
  return "localhost" if ip and ip.is_loopback else host.lower()


def is_local(host: str) -> bool:
  """Returns whether `host` is this machine.

  The result is True for loopback addresses, for IP addresses of this machine's
  interfaces, and for the machine's own name, short or full. Other names are not
  looked up, since a look-up would hang on a machine without a network.
  """
  host = canonical_host(host)
  if host == "localhost":
    return True
  if ip := _ip(host):
    return _can_bind(ip)
  name = socket.gethostname().lower()
  short_name = name.partition(".")[0]
  return host in (name, short_name) or (
    host.startswith(f"{short_name}.") and host == socket.getfqdn().lower()
  )


def host_toward(address: str) -> str:
  """Returns the host by which the task at `address` can reach this machine.

  Args:
    address: The address "host:port" of the task.

  Returns:
    "localhost" if the task is on this machine; else the IP address of the
    interface from which packets to the task leave, or this machine's name if
    the host of `address` is not known.
  """
  host, port = split(address) or ("", 0)
  if is_local(host):
    return "localhost"
  try:
    family, *_, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[
      0
    ]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
      probe.connect(target)  # Sends nothing.
      own = probe.getsockname()[0]
  except OSError:
    return socket.gethostname()
  return f"[{own}]" if ":" in own else own


def bound_socket(port: int) -> socket.socket:
  """Binds a new TCP socket to `port`, as a TensorFlow server does.

  Args:
    port: The port. 0: the operating system chooses any free port.

  Returns:
    The socket, which occupies the port until it is closed.

  Raises:
    OSError: If the port is in use or this user may not use it.
  """
  bound = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
  try:
    # As gRPC does, or else a port whose server has just been killed would
    # count as in use for a minute. A live server still keeps us out.
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    bound.bind(("", port))
  except OSError:
    bound.close()
    raise
  return bound


def free_ports(number: int, *, taken: set[int]) -> list[int]:
  """Chooses free ports of this machine, from a random one on.

  The ports are reserved for this process, as far as this library is concerned:
  other processes that call the function at the same time get other ports. (The
  servers of TensorFlow would not notice that two of them have the same port.)
  The reservation ends with the process, or after some hundred further ports.

  Args:
    number: The number of ports.
    taken: Ports that must not be chosen.

  Returns:
    Distinct ports.

  Raises:
    OSError: If there are too few free ports.
  """
  ports: list[int] = []
  count = len(_FREE_PORTS)
  first = _dice.randrange(count)
  for i in range(count):
    if len(ports) == number:
      break
    port = _FREE_PORTS[(first + i) % count]
    if port not in taken and _reserve(port):
      ports.append(port)
  if len(ports) < number:
    raise OSError(
      f"{number} free ports are needed between {_FREE_PORTS.start} and"
      f" {_FREE_PORTS.stop - 1}. Found: {len(ports)}."
    )
  return ports


def _reserve(port: int) -> bool:
  """Reserves a port; returns False if it is reserved or in use.

  The reservation is a Unix socket whose name contains the port. The name is in
  Linux's abstract namespace, so it is no file, and it vanishes with the
  process. On other systems, nothing is reserved.
  """
  name = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
  try:
    if sys.platform == "linux":
      name.bind(f"\0tf_replicas/port/{port}")
    bound_socket(port).close()
  except OSError:
    name.close()
    return False
  _reserved.append(name)
  if len(_reserved) > _MAX_RESERVED:
    _reserved.pop(0).close()
  return True


def _ip(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
  try:
    return ipaddress.ip_address(host)
  except ValueError:
    return None


def _can_bind(ip: ipaddress.IPv4Address | ipaddress.IPv6Address) -> bool:
  """Returns whether `ip` is the address of an interface of this machine.

  It tries to bind a socket to `ip`, which only works for such an address.
  """
  family = socket.AF_INET if ip.version == 4 else socket.AF_INET6
  try:
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
      probe.bind((str(ip), 0))
  except OSError:
    return False
  return True
