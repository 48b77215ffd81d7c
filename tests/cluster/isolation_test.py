"""Tests of `cluster.isolation`: who can connect to the tasks of a launcher."""

import contextlib
import os
import socket
import subprocess
import sys
import time

import pytest

from tests.support import trials

# As the parameter server: listens. As the worker: connects, then waits.
_SCRIPT = """
import os, pathlib, socket, sys, time
directory = pathlib.Path(sys.argv[1])
port = directory / "port"
if os.environ["TF_REPLICAS_TASK"] == "ps:0":
  server = socket.create_server(("", 0))
  port.with_suffix(".new").write_text(str(server.getsockname()[1]))
  port.with_suffix(".new").rename(port)
  server.accept()
else:
  while not port.exists():
    time.sleep(0.05)
  while not (directory / "connect").exists():
    time.sleep(0.05)
  socket.create_connection(("localhost", int(port.read_text())), timeout=9)
  print([name for _, name in socket.if_nameindex()], os.getuid(), flush=True)
"""


def _permitted(*options) -> bool:
  command = ["unshare", *options, "true"]
  with contextlib.suppress(OSError):
    return not subprocess.run(command, capture_output=True).returncode
  return False


_needs_namespaces = pytest.mark.skipif(
  not _permitted("--net")
  and not _permitted("--user", "--map-root-user", "--net"),
  reason="network namespaces are not permitted",
)


def _can_connect(port: int) -> bool:
  with contextlib.suppress(OSError):
    socket.create_connection(("localhost", port), timeout=1).close()
    return True
  return False


@pytest.mark.parametrize(
  "options",
  [[], pytest.param(["--private_network"], marks=_needs_namespaces)],
  ids=["usual", "private"],
)
def test_who_can_connect(tmp_path, options):
  script = tmp_path / "script.py"
  script.write_text(_SCRIPT)
  launch = ["-m", "tf_replicas.launch", *options, "--ps=1", "--workers=1"]
  process = subprocess.Popen(
    [sys.executable, *launch, str(script), str(tmp_path)],
    env=trials.ENVIRON,
    stdout=subprocess.PIPE,
    stderr=subprocess.STDOUT,
    text=True,
  )
  try:
    while not (tmp_path / "port").exists():
      assert process.poll() is None, process.stdout.read()
      time.sleep(0.05)
    is_reached = _can_connect(int((tmp_path / "port").read_text()))
    (tmp_path / "connect").touch()
    output, _ = process.communicate(timeout=60)
  finally:
    process.kill()
  assert is_reached == (not options), output
  if options:
    assert process.returncode == 0, output
    assert f"['lo'] {os.getuid()}" in output
