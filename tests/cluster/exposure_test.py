"""Tests of `cluster.exposure`: which addresses are refused."""

import json
import socket

import pytest

from tf_replicas import cluster
from tf_replicas.cluster import environment
from tf_replicas.cluster import exposure
from tf_replicas.programs import run_options

PRIVATE = (
  "localhost",
  "127.0.0.1",
  "10.1.2.3",
  "172.31.0.1",
  "192.168.1.1",
  "169.254.1.1",
  "100.64.0.1",  # Shared address space: not reached from other networks.
  "[::1]",
  "[fd12::1]",
  "[fe80::1]",
)
PUBLIC = ("8.8.8.8", "172.32.0.1", "[2001:4860:4860::8888]", "[::ffff:8.8.8.8]")


def _spec(host, **more):
  jobs = {"ps": ["localhost:1"], "worker": [f"{host}:2222"]}
  return cluster.parse({"cluster": jobs, **more}, "spec.json")


@pytest.fixture(autouse=True)
def _names(monkeypatch):
  """The names that can be resolved; no name is looked up in a network."""
  known = {"inside": "10.0.0.1", "outside": "8.8.8.8"}
  look_up = socket.getaddrinfo

  def getaddrinfo(host, port, **more):
    host = known.get(host, host)
    return look_up(host, port, flags=socket.AI_NUMERICHOST, **more)

  known["localhost"] = "127.0.0.1"
  monkeypatch.setattr(exposure.socket, "getaddrinfo", getaddrinfo)
  return known


@pytest.mark.parametrize("host", [*PRIVATE, "inside", "not.resolved"])
def test_accepts(host):
  spec = _spec(host)
  cluster.check_private(spec, spec.tasks())


@pytest.mark.parametrize("host", PUBLIC)
def test_refuses(host):
  spec = _spec(host)
  cluster.check_private(spec, spec.tasks("ps"))
  with pytest.raises(cluster.ClusterError) as error:
    cluster.check_private(spec, spec.tasks())
  message = str(error.value)
  assert message.startswith("spec.json: cluster.worker[0]: must be an address")
  assert f"{host}:2222" in message
  assert "\n" not in message


def test_refuses_a_name_once_it_resolves(_names):
  spec = _spec("later")
  cluster.check_private(spec, spec.tasks())
  _names["later"] = "8.8.8.8"
  with pytest.raises(
    cluster.ClusterError, match="later:2222, which is 8.8.8.8"
  ):
    cluster.check_private(spec, spec.tasks())


def test_a_spec_accepts_public_addresses():
  spec = _spec("outside", allow_public_addresses=True)
  cluster.check_private(spec, spec.tasks())
  again = cluster.parse(json.loads(spec.to_json()))
  cluster.check_private(again, again.tasks())


def test_the_environment_accepts_public_addresses():
  document = {"cluster": {"ps": ["8.8.8.8:1"], "worker": ["inside:2"]}}
  variables = {
    environment.CLUSTER_SPEC: json.dumps(document),
    environment.TASK: "ps:0",
  }
  spec, task = environment.role(variables) or (None, None)
  assert spec is not None
  assert task is not None
  with pytest.raises(cluster.ClusterError, match="8.8.8.8"):
    cluster.check_private(spec, [task])
  found = environment.role({**variables, environment.ALLOW_PUBLIC: "1"})
  assert found is not None
  cluster.check_private(found[0], [task])


def test_the_variable_is_for_programs_too(tmp_path):
  path = tmp_path / "spec.json"
  path.write_text(json.dumps({"ps": ["8.8.8.8:1"], "worker": ["localhost:2"]}))
  for environ in ({}, {environment.ALLOW_PUBLIC: "1"}):
    spec, task = run_options.choose_task(str(path), "ps", 0, environ)
    assert task is not None
    assert spec.allow_public_addresses == bool(environ)


def test_flags_alone_need_no_environment(tmp_path):
  """Such as that of a Slurm job whose tasks are laid out in another way."""
  path = tmp_path / "spec.json"
  path.write_text(
    json.dumps({"ps": ["localhost:1"], "worker": ["localhost:2"]})
  )
  environ = {"TF_CONFIG": "broken"}
  with pytest.raises(cluster.ClusterError, match="TF_CONFIG"):
    run_options.choose_task(str(path), None, None, environ)
  spec, task = run_options.choose_task(str(path), "worker", 0, environ)
  assert task == spec.chief


@pytest.mark.parametrize("value", ["true", 1, None])
def test_the_key_is_true_or_false(value):
  with pytest.raises(cluster.ClusterError, match="must be true or false"):
    _spec("inside", allow_public_addresses=value)
