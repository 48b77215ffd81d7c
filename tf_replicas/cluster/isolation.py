"""Moves a launcher, and the tasks that it starts, away from all networks.

TensorFlow's servers listen on all network interfaces. A *network namespace* of
Linux has interfaces of its own. In a new one, which has only the loopback
interface, no other user or machine can connect to the tasks.
"""

import ctypes
import fcntl
import os
import pathlib
import socket
import struct

from tf_replicas.cluster import spec as cluster_spec

# Of Linux: <sched.h>, <linux/sockios.h> and <net/if.h>.
_CLONE_NEWUSER, _CLONE_NEWNET = 0x10000000, 0x40000000
_GET_FLAGS, _SET_FLAGS, _IS_UP = 0x8913, 0x8914, 0x1


def leave_networks() -> None:
  """Moves this process into a new network namespace, which has only loopback.

  Processes that it starts from now on are there too. It must be called before
  this process starts threads. Without root, the process also gets a user
  namespace, in which it keeps its user.

  Raises:
    ClusterError: If the system does not permit it.
  """
  user, group = os.geteuid(), os.getegid()
  kinds = _CLONE_NEWNET | (_CLONE_NEWUSER if user else 0)
  try:
    if ctypes.CDLL(None, use_errno=True).unshare(kinds):
      code = ctypes.get_errno()
      raise OSError(code, os.strerror(code))
    if user:
      own = pathlib.Path("/proc/self")
      (own / "setgroups").write_text("deny")
      (own / "uid_map").write_text(f"{user} {user} 1")
      (own / "gid_map").write_text(f"{group} {group} 1")
    _start_loopback()
  except (OSError, AttributeError) as error:  # AttributeError: not on Linux.
    reason = getattr(error, "strerror", None) or error
    raise cluster_spec.ClusterError(
      "`--private_network` needs Linux, and root or the right to make user"
      f" namespaces. Received: {reason}."
    ) from None


def _start_loopback() -> None:
  name = b"lo".ljust(16, b"\0")
  with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
    request = fcntl.ioctl(any_socket, _GET_FLAGS, name + bytes(24))
    (flags,) = struct.unpack_from("h", request, 16)
    request = name + struct.pack("h", flags | _IS_UP) + bytes(22)
    fcntl.ioctl(any_socket, _SET_FLAGS, request)


def is_isolated() -> bool:
  """Returns whether this process can use no interface other than loopback."""
  return [name for _, name in socket.if_nameindex()] == ["lo"]
