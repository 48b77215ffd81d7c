"""Manifests of Kubernetes: against its schemas, and as the tasks read them."""

import json
import re

import kubernetes_validate
import pytest
import yaml

from tests.support import trials
from tf_replicas import cluster
from tf_replicas.cluster import environment
from tf_replicas.programs import manifests

SPECS = trials.ROOT / "cluster_specs"
COMMAND = ["python", "train.py", "--rate=0.1"]
# Every Kubernetes from 1.31 on has what is used.
VERSIONS = ("1.31", kubernetes_validate.latest_version())


def _print(capsys, *flags, spec="two_hosts.json", command=COMMAND):
  """The documents that the program prints."""
  with pytest.raises(SystemExit) as ended:
    manifests.main(
      [
        *(f"--cluster_spec={SPECS / spec}", "--image=registry/image:1"),
        *("--name=trial", *flags, "--", *command),
      ]
    )
  assert ended.value.code == 0
  return list(yaml.safe_load_all(capsys.readouterr().out))


def _jobs(documents):
  """The containers of all tasks, by the name of the task's Job."""
  return {
    job["metadata"]["name"]: job["spec"]["template"]["spec"]["containers"][0]
    for job in documents
    if job["kind"] == "Job"
  }


ALL_FLAGS = (
  *("--cpu=4", "--memory=8Gi", "--volume=runs:/runs", "--port=3000"),
  *("--max_restarts=0", "--evaluator=python -m cifar10.eval --run_once"),
)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("flags", [(), ALL_FLAGS])
@pytest.mark.parametrize(
  "spec", ["two_hosts.json", "local_chief_1ps_2workers.json"]
)
def test_the_schemas_allow_them(capsys, spec, flags, version):
  documents = _print(capsys, *flags, spec=spec)
  assert len(documents) > 5
  for document in documents:
    kubernetes_validate.validate(document, version, strict=True)


def test_the_schemas_refuse_what_is_wrong(capsys):
  *_, job = _print(capsys)
  job["spec"]["template"]["spec"]["restart"] = "Never"
  with pytest.raises(kubernetes_validate.ValidationError, match="restart"):
    kubernetes_validate.validate(job, VERSIONS[-1], strict=True)


def test_each_task_finds_its_role(capsys, tmp_path):
  documents = _print(capsys, *ALL_FLAGS)
  (config,) = [d for d in documents if d["kind"] == "ConfigMap"]
  jobs = _jobs(documents)
  for name, job in (("worker-1", ("worker", 1)), ("ps-0", ("ps", 0))):
    variables = {v["name"]: v["value"] for v in jobs[f"trial-{name}"]["env"]}
    directory, _, file = variables[environment.CLUSTER_SPEC].rpartition("/")
    mounts = jobs[f"trial-{name}"]["volumeMounts"]
    assert directory in [mount["mountPath"] for mount in mounts]
    path = tmp_path / file
    path.write_text(config["data"][file])
    variables[environment.CLUSTER_SPEC] = str(path)
    spec, task = environment.role(variables)
    assert task == cluster.Task(*job)
    assert spec.address(task) == f"trial-{name}.trial:3000"
    assert spec.variables == cluster.load(SPECS / "two_hosts.json").variables


def test_pods_have_the_names_of_the_spec(capsys):
  documents = _print(capsys)
  config, service, policy, *jobs = documents
  assert service["spec"]["clusterIP"] == "None"
  # Its labels, which all pods have and no other training has.
  selector = {"podSelector": {"matchLabels": service["spec"]["selector"]}}
  assert policy["spec"] == {
    **selector,
    "policyTypes": ["Ingress"],
    "ingress": [
      {"from": [selector], "ports": [{"protocol": "TCP", "port": 2222}]}
    ],
  }
  names = set()
  for job in jobs:
    template = job["spec"]["template"]
    labels = template["metadata"]["labels"]
    assert service["spec"]["selector"].items() <= labels.items()
    assert template["spec"]["subdomain"] == service["metadata"]["name"]
    assert template["spec"]["shareProcessNamespace"]  # SIGTERM ends a worker.
    names.add(f"{template['spec']['hostname']}.trial:2222")
  spec = cluster.parse(json.loads(config["data"]["cluster.json"]))
  assert names == {spec.address(task) for task in spec.tasks()}


def test_resources_and_commands(capsys, tmp_path):
  path = tmp_path / "spec.json"
  path.write_text(
    json.dumps(
      {
        "cluster": {"ps": ["a:1"], "worker": ["b:1", "b:2"]},
        "devices": {"worker:0": {"gpus": [2, 3]}, "worker:1": {"gpus": []}},
      }
    )
  )
  documents = _print(capsys, *ALL_FLAGS, spec=path)
  spec = cluster.parse(json.loads(documents[0]["data"]["cluster.json"]))
  # A container sees its own GPUs only, and counts them from 0.
  assert spec.gpus(cluster.Task("worker", 0)) == (0, 1)
  jobs = _jobs(documents)
  requests = {"cpu": "4", "memory": "8Gi"}
  assert jobs["trial-worker-0"]["resources"] == {
    "requests": requests,
    "limits": {"nvidia.com/gpu": 2},
  }
  for name in ("ps-0", "worker-1", "evaluator-0"):
    assert jobs[f"trial-{name}"]["resources"] == {"requests": requests}
  assert jobs["trial-worker-1"]["command"] == COMMAND
  evaluator = jobs["trial-evaluator-0"]["command"]
  assert evaluator == ["python", "-m", "cifar10.eval", "--run_once"]


@pytest.mark.parametrize(
  ("flags", "words"),
  [
    (["--name=Trial", "--", "x"], "`--name` must have lower-case letters"),
    ([f"--name={'a' * 60}", "--", "x"], "at most 63 characters"),
    (["--name=a"], "must follow `--`. Received: none."),
    (["--name=a", "--port=0", "--", "x"], "`--port` must be in [1, 65535]"),
    (["--name=a", "--volume=runs", "--", "x"], "must be a claim and a path"),
    (
      ["--name=a", f"--cluster_spec={SPECS / 'one_device.json'}", "--", "x"],
      "`cluster` must have tasks",
    ),
  ],
)
def test_refused(flags, words):
  flags = [f"--cluster_spec={SPECS / 'two_hosts.json'}", "--image=i", *flags]
  with pytest.raises(cluster.ClusterError, match=re.escape(words)):
    manifests.manifests(flags)
