"""Trains on hosts of a private network, one process or launcher on each."""

import contextlib
import json
import pathlib
import subprocess
import sys
import time

import pytest

from tests.support import trials
from tf_replicas.cluster import private_network
from tf_replicas.runtime import waiting

_TASK = pathlib.Path(__file__).parent / "tasks" / "recovery_task.py"
_CUT_SECS = 8.0


def test_a_launcher_on_each_machine(tmp_path):
  """The commands of docs/deployment.md."""
  if obstacle := private_network.obstacle():
    pytest.skip(obstacle)
  with private_network.PrivateNetwork(["a", "b"]) as network:
    a, b = network.address("a"), network.address("b")
    spec = tmp_path / "cluster.json"
    spec.write_text(
      json.dumps({"ps": [f"{a}:2222"], "worker": [f"{a}:2223", f"{b}:2222"]})
    )
    launch = [sys.executable, "-m", "tf_replicas.launch"]
    launch += [f"--cluster_spec={spec}", "examples/keras_fit.py"]
    with (
      trials.running(network.command("a", launch)) as first,
      trials.running(network.command("b", launch)) as second,
    ):
      outputs = [
        p.communicate(timeout=trials.DEADLINE_SECS)[0] for p in (first, second)
      ]
  assert (first.returncode, second.returncode) == (0, 0), outputs
  assert "[ps 0] " in outputs[0] and "[worker 0] accuracy: " in outputs[0]
  assert "[worker 1] " not in outputs[0]
  assert "[ps 0] " not in outputs[1] and "[worker 0] " not in outputs[1]


@pytest.mark.parametrize(
  "host",
  ["chief", pytest.param("worker", marks=pytest.mark.exhaustive)],
)
def test_goes_on_after_the_connections_of_a_host_broke(tmp_path, host):
  """For some seconds it cannot reach the parameter server, which lives on."""
  if obstacle := private_network.obstacle():
    pytest.skip(obstacle)
  hosts = ["ps", "chief", "worker"]
  arguments = {"directory": str(tmp_path), "kill": False}
  arguments["recovery_timeout_secs"] = 60
  command = [sys.executable, _TASK, "run", json.dumps(arguments)]
  with (
    private_network.PrivateNetwork(hosts) as network,
    contextlib.ExitStack() as stack,
  ):
    addresses = {name: [f"{network.address(name)}:2222"] for name in hosts}
    tasks = []
    for name in hosts:
      config = {"cluster": addresses, "task": {"type": name, "index": 0}}
      environ = {**trials.ENVIRON, "TF_CONFIG": json.dumps(config)}
      run = trials.running(network.command(name, command), environ=environ)
      tasks.append(stack.enter_context(run))

    def on_host(line):
      shell = network.command(host, ["sh", "-c", line])
      subprocess.run(shell, check=True, capture_output=True)

    waiting.await_value(
      lambda: list((tmp_path / "train").glob("*.index")),
      timeout_secs=trials.DEADLINE_SECS,
      what="waiting for a checkpoint",
    )
    ps = network.address("ps")
    # Else a client that waits would not find out before TCP gives up.
    on_host(f"ip route add unreachable {ps}/32; ss --kill dst {ps}")
    time.sleep(_CUT_SECS)
    on_host(f"ip route del unreachable {ps}/32")
    outputs = [p.communicate(timeout=trials.DEADLINE_SECS)[0] for p in tasks]
  assert [task.returncode for task in tasks] == [0, 0, 0], outputs
  assert "ps 0 was lost" in outputs[hosts.index(host)]
  assert "finished at step 1500" in outputs[hosts.index("chief")]
