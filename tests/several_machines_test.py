"""Trains on two hosts of a private network, with a launcher on each."""

import json
import sys

import pytest

from tests.support import trials
from tf_replicas.cluster import private_network


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
