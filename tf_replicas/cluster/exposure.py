"""Refuses addresses in public networks, and warns of the open port of a task.

TensorFlow's servers (2.21) have no authentication, and listen on all network
interfaces, even if the address of the task is 127.0.0.1. Whoever reaches the
port of a task can read and change the training, and run code in the task.
"""

import ipaddress
import socket
from collections.abc import Iterable
from collections.abc import Iterator

from tf_replicas.cluster import addresses
from tf_replicas.cluster import isolation
from tf_replicas.cluster import spec as cluster_spec
from tf_replicas.cluster import validation


def check_private(
  spec: cluster_spec.ClusterSpec, tasks: Iterable[cluster_spec.Task]
) -> None:
  """Checks that no given task has an address in a public network.

  A host name that cannot be resolved now is not checked. Nothing is checked if
  `spec.allow_public_addresses` is True.

  Args:
    spec: The cluster.
    tasks: The tasks to check.

  Raises:
    ClusterError: If a task has a public address.
  """
  if spec.allow_public_addresses:
    return
  for task in tasks:
    address = spec.address(task)
    host, port = addresses.split(address) or (address, 0)
    for ip in _resolved(host, port):
      if ip.is_global:
        raise cluster_spec.ClusterError(
          spec.where
          + str(
            validation.mistake(
              f"cluster.{task.job}[{task.index}]",
              "must be an address of a private network, since TensorFlow's"
              " servers have no authentication;"
              ' `"allow_public_addresses": true` in the cluster spec,'
              " `--allow_public_addresses` or"
              " TF_REPLICAS_ALLOW_PUBLIC_ADDRESSES=1 accepts it",
              address if host == str(ip) else f"{address}, which is {ip}",
            )
          )
        )


def _resolved(
  host: str, port: int
) -> Iterator[ipaddress.IPv4Address | ipaddress.IPv6Address]:
  """Yields the IP addresses of a host; none if its name cannot be resolved."""
  try:
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
  except (OSError, UnicodeError):
    return
  for *_, (ip, *_) in found:
    parsed = ipaddress.ip_address(str(ip).partition("%")[0])
    yield getattr(parsed, "ipv4_mapped", None) or parsed


def warning(task: cluster_spec.Task) -> str:
  """Returns a line for the log that says who can reach the port of `task`."""
  if isolation.is_isolated():
    return (
      f"{task}: only processes in this network namespace can reach the tasks,"
      " since it has no interface but loopback"
    )
  return (
    f"{task}: TensorFlow's servers listen on all network interfaces, without"
    " authentication; whoever can reach their ports can run code in the tasks"
    " (docs/security.md)"
  )
