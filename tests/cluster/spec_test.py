"""Tests of `cluster`."""

import json
import pathlib
import socket
import subprocess
import sys

import pytest

from tf_replicas import cluster

ROOT = pathlib.Path(__file__).resolve().parents[2]
SPEC_FILES = sorted((ROOT / "cluster_specs").glob("*.json"))
ADDRESS = 'must be "host:port" with a port in [0, 65535]'

# One with every section.
EXAMPLE = {
  "cluster": {"ps": ["localhost:0"], "worker": ["localhost:0", "localhost:0"]},
  "devices": {
    "ps": {"gpus": []},
    "worker": {"gpus": [0]},
    "worker:1": {"gpus": [1, 2]},
  },
  "variables": {"on": "ps", "placement": "greedy", "min_shard_bytes": 262144},
  "layers": {"conv*": 0, "local*": 1},
}
JOBS = {"ps": ["p:1", "q:1"], "worker": ["a:1", "b:1", "c:1"]}
SPARSE_JOBS = {"ps": ["p:1", "q:1"], "worker": {"1": "b:1"}}


def _task(text):
  job, index = text.split()
  return cluster.Task(job, int(index))


def _tasks(*texts):
  return tuple(map(_task, texts))


def _message(function, *args):
  with pytest.raises(cluster.ClusterError) as raised:
    function(*args)
  message = str(raised.value)
  assert "\n" not in message
  return message


def _environ(cluster_jobs, job, index, **more):
  task = {"type": job, "index": index}
  return {
    "TF_CONFIG": json.dumps({"cluster": cluster_jobs, "task": task, **more})
  }


def test_import_does_not_import_tensorflow():
  program = (
    "import sys; from tf_replicas import cluster; "
    "sys.exit('tensorflow' in sys.modules or 'keras' in sys.modules)"
  )
  subprocess.run(
    [sys.executable, "-c", program], cwd=ROOT, check=True, timeout=300
  )


def test_example():
  spec = cluster.parse(EXAMPLE, "example.json")
  assert spec.is_distributed
  assert spec.source == "example.json"
  assert spec.tasks() == _tasks("ps 0", "worker 0", "worker 1")
  assert spec.tasks("worker") == _tasks("worker 0", "worker 1")
  assert spec.num_tasks("ps") == 1
  assert spec.num_tasks("chief") == 0
  assert spec.chief == _task("worker 0")
  assert spec.replicas == _tasks("worker 0", "worker 1")
  assert spec.gpus(_task("ps 0")) == ()
  assert spec.gpus(_task("worker 0")) == (0,)
  assert spec.gpus(_task("worker 1")) == (1, 2)
  assert spec.variables == cluster.VariablesSpec(
    on="ps", placement="greedy", min_shard_bytes=262144, num_shards=None
  )
  assert spec.layers == {"conv*": 0, "local*": 1}
  assert spec.local_tasks() == spec.tasks()


def test_jobs_map_and_tf_config_are_specs_too():
  spec = cluster.parse({"cluster": JOBS})
  assert cluster.parse(JOBS) == spec
  assert (
    cluster.parse(
      {
        "cluster": JOBS,
        "task": {"type": "ps", "index": 1},
        "job": {"x": 1},
        "rpc_layer": "grpc",
        "environment": "cloud",
        "session_master": "grpc://",
      }
    )
    == spec
  )


@pytest.mark.parametrize(
  "document",
  [
    {},
    {"cluster": {}},
    {"devices": {"worker": {"gpus": [0, 1]}}},
    {"variables": {"on": "mirrored"}},
    {"layers": {"conv*": 0}},
  ],
)
def test_spec_without_a_cluster_is_one_process(document):
  spec = cluster.parse(document)
  assert not spec.is_distributed
  assert spec.jobs == {}
  assert spec.as_dict() == {}
  assert spec.tasks() == spec.local_tasks() == spec.replicas
  assert spec.tasks() == _tasks("worker 0")
  assert spec.chief == _task("worker 0")
  assert spec.addresses("worker") == []
  assert cluster.resolve_ports(spec) == spec
  assert _message(spec.address, spec.chief) == (
    "`task` must be a task of the cluster. Received: 'worker 0'."
  )


def test_defaults():
  spec = cluster.parse(JOBS)
  assert spec.variables == cluster.VariablesSpec(on="ps")
  assert spec.gpus(_task("ps 1")) == ()
  assert spec.gpus(_task("worker 1")) is None
  assert spec.layers == {}
  assert cluster.parse({"worker": ["a:1"]}).variables.on == "cpu"


@pytest.mark.parametrize(
  ("jobs", "chief", "replicas"),
  [
    ({"worker": ["a:1", "b:1"]}, "worker 0", ("worker 0", "worker 1")),
    ({"worker": ["a:1"], "chief": ["b:1"]}, "chief 0", ("chief 0", "worker 0")),
    ({"ps": ["a:1"], "master": ["b:1"]}, "chief 0", ("chief 0",)),
    ({"worker": {"2": "a:1"}}, "worker 2", ("worker 2",)),
    (SPARSE_JOBS, "worker 0", ("worker 1",)),
  ],
  ids=["worker_0", "chief", "master", "the_only_task", "worker_0_unlisted"],
)
def test_chief_and_replicas(jobs, chief, replicas):
  spec = cluster.parse(jobs)
  assert spec.chief == _task(chief)
  assert spec.replicas == _tasks(*replicas)


def test_addresses():
  spec = cluster.parse(JOBS, "x.json")
  assert spec.address(_task("worker 2")) == "c:1"
  assert spec.addresses("worker") == ["a:1", "b:1", "c:1"]
  assert spec.addresses("chief") == []
  assert _message(spec.address, _task("worker 3")) == (
    "x.json: `task` must be a task of the cluster. Received: 'worker 3'."
  )


def test_as_dict_of_a_sparse_job_keeps_its_indices():
  spec = cluster.parse(SPARSE_JOBS)
  assert spec.as_dict() == {"ps": ["p:1", "q:1"], "worker": {1: "b:1"}}


def test_with_addresses_replaces_some():
  spec = cluster.parse(JOBS, "x.json")
  changed = spec.with_addresses({_task("worker 1"): "d:2"})
  assert changed.addresses("worker") == ["a:1", "d:2", "c:1"]
  assert changed.addresses("ps") == spec.addresses("ps")
  assert spec.addresses("worker") == ["a:1", "b:1", "c:1"]


@pytest.mark.parametrize(
  ("task", "address", "message"),
  [
    (
      "chief 0",
      "d:1",
      "x.json: `task` must be a task of the cluster. Received: 'chief 0'.",
    ),
    ("worker 1", "d", f"x.json: cluster.worker[1]: {ADDRESS}. Received: 'd'."),
    (
      "worker 1",
      "a:1",
      "x.json: cluster.worker[1]: must not be the address "
      "of cluster.worker[0] again. Received: 'a:1'.",
    ),
  ],
)
def test_with_addresses_checks_them(task, address, message):
  spec = cluster.parse(JOBS, "x.json")
  assert _message(spec.with_addresses, {_task(task): address}) == message


@pytest.mark.parametrize(
  "document",
  [
    EXAMPLE,
    JOBS,
    SPARSE_JOBS,
    {},
    {"devices": {"worker:0": {"gpus": [3]}}},
    {"cluster": {"worker": ["a:1"]}, "variables": {"on": "mirrored"}},
    {"cluster": {"master": ["a:1"]}, "devices": {"master:0": {"gpus": [0]}}},
    {
      "cluster": JOBS,
      "variables": {"placement": "partitioned", "num_shards": 2},
    },
  ],
)
def test_json_round_trip(document):
  spec = cluster.parse(document, "somewhere.json")
  assert cluster.parse(json.loads(spec.to_json())) == spec


def test_local_tasks(monkeypatch):
  monkeypatch.setattr(socket, "gethostname", lambda: "node7")
  monkeypatch.setattr(socket, "getfqdn", lambda: "node7.example.com")
  spec = cluster.parse(
    {
      "ps": ["node7.example.com:1", "node8.example.com:1"],
      "worker": ["localhost:2", "[::1]:3", "192.0.2.1:4", "node7:5"],
    }
  )
  assert spec.local_tasks() == _tasks(
    "ps 0", "worker 0", "worker 1", "worker 3"
  )


def test_tasks_with_the_host_of_an_own_task_are_local():
  spec = cluster.parse(
    {"ps": ["Alias.invalid:1"], "worker": ["alias.invalid:2", "b.invalid:2"]}
  )
  assert not spec.local_tasks()
  assert spec.local_tasks(own=_task("worker 0")) == _tasks("ps 0", "worker 0")


@pytest.mark.parametrize("path", SPEC_FILES, ids=lambda path: path.name)
def test_shipped_specs_are_valid(path):
  spec = cluster.load(path)
  assert spec.source == str(path)
  assert cluster.parse(json.loads(spec.to_json())) == spec


def test_shipped_specs_are_all_there():
  assert {path.name for path in SPEC_FILES} >= {
    "one_device.json",
    "four_towers.json",
    "two_hosts.json",
    "local_1ps_2workers.json",
    "local_1ps_4workers.json",
    "local_2ps_3workers.json",
    "local_chief_1ps_2workers.json",
    "mirrored_2workers.json",
  }


def test_four_towers():
  spec = cluster.load(ROOT / "cluster_specs" / "four_towers.json")
  assert not spec.is_distributed
  assert spec.gpus(spec.chief) == (0, 1, 2, 3)
  assert spec.variables.on == "cpu"


def test_load_names_the_file_and_the_place(tmp_path):
  path = tmp_path / "x.json"
  path.write_text('{"cluster": {"worker": ["a:1", "localhost:99999"]}}')
  assert _message(cluster.load, path) == (
    f"{path}: cluster.worker[1]: {ADDRESS}. Received: 'localhost:99999'."
  )


@pytest.mark.parametrize(
  ("content", "message"),
  [
    (
      b'{"cluster": }',
      "line 1 column 13: must be valid JSON (Expecting value)",
    ),
    (
      b'{"layers": {}, "layers": {}}',
      "keys must not occur twice in one object. Received: 'layers'.",
    ),
    (b"[]", "must be a JSON object. Received: []."),
    (
      b"\xff",
      "must be a readable text file ('utf-8' codec can't decode byte "
      "0xff in position 0: invalid start byte)",
    ),
  ],
  ids=["syntax", "key_twice", "list", "not_utf8"],
)
def test_load_of_a_bad_file(content, message, tmp_path):
  path = tmp_path / "x.json"
  path.write_bytes(content)
  assert _message(cluster.load, str(path)) == f"{path}: {message}"


def test_load_of_no_file(tmp_path):
  path = tmp_path / "x.json"
  assert _message(cluster.load, path) == (
    f"{path}: must be a readable text file (No such file or directory)"
  )
  assert _message(cluster.load, tmp_path) == (
    f"{tmp_path}: must be a readable text file (Is a directory)"
  )


@pytest.mark.parametrize("file", SPEC_FILES, ids=lambda file: file.stem)
def test_load_finds_a_packaged_spec_by_name(file, tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  assert cluster.load(file.stem) == cluster.load(file)


def test_a_file_precedes_a_packaged_spec(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  pathlib.Path("one_device").write_text(json.dumps(EXAMPLE), encoding="utf-8")
  assert cluster.load("one_device") == cluster.parse(EXAMPLE)


def test_load_names_the_packaged_specs(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  names = ", ".join(file.stem for file in SPEC_FILES)
  assert _message(cluster.load, "no_such_spec") == (
    f"a cluster spec must be a file, or one of {names}. Received: no_such_spec."
  )


def test_load_accepts_a_byte_order_mark(tmp_path):
  path = tmp_path / "x.json"
  path.write_text(json.dumps(EXAMPLE), encoding="utf-8-sig")
  assert cluster.load(path) == cluster.parse(EXAMPLE)


@pytest.mark.parametrize(
  "environ",
  [
    {},
    {"TF_CONFIG": ""},
    {"TF_CONFIG": " \n"},
    {"TF_CONFIG": "{}"},
    _environ({}, "worker", 0),
  ],
)
def test_tf_config_of_a_single_process(environ):
  assert cluster.from_tf_config(environ) is None


@pytest.mark.parametrize(
  "jobs",
  [
    JOBS,
    SPARSE_JOBS,
    {"chief": ["a:1"], **SPARSE_JOBS},
    {"worker": ["a:1", "[::1]:1"]},
  ],
)
def test_tf_config_round_trip(jobs):
  spec = cluster.parse(jobs)
  for task in spec.tasks():
    environ = {"TF_CONFIG": spec.tf_config(task)}
    assert cluster.from_tf_config(environ) == (spec, task)


def test_tf_config_is_what_tensorflow_documents():
  spec = cluster.parse({"ps": ["p:1"], "worker": ["a:1"], "evaluator": ["e:1"]})
  assert json.loads(spec.tf_config(_task("worker 0"))) == {
    "cluster": {"ps": ["p:1"], "worker": ["a:1"]},
    "task": {"type": "worker", "index": 0},
  }


def test_tf_config_for_no_such_task():
  spec = cluster.parse(JOBS)
  assert _message(spec.tf_config, _task("worker 3")) == (
    "`task` must be a task of the cluster. Received: 'worker 3'."
  )


def test_tf_config_of_kubeflow_with_master_and_evaluator():
  jobs = {"master": ["m:2222"], "worker": ["w:2222"], "evaluator": ["e:2222"]}
  spec, task = cluster.from_tf_config(
    _environ(jobs, "master", 0, environment="cloud")
  )
  assert task == _task("chief 0")
  assert spec.as_dict() == {"chief": ["m:2222"], "worker": ["w:2222"]}
  assert spec.source == "TF_CONFIG"


@pytest.mark.parametrize(
  "jobs",
  [{**JOBS, "evaluator": ["e:1"]}, JOBS, {"evaluator": ["e:1"]}, {}],
  ids=["listed", "not_listed", "alone", "no_cluster"],
)
def test_tf_config_of_an_evaluator(jobs):
  spec, task = cluster.from_tf_config(_environ(jobs, "evaluator", 0))
  assert task == _task("evaluator 0")
  assert "evaluator" not in spec.as_dict()
  assert spec.gpus(task) is None
  assert "evaluator" not in json.loads(spec.tf_config(task))["cluster"]
  assert cluster.from_tf_config({"TF_CONFIG": spec.tf_config(task)}) == (
    spec,
    task,
  )


@pytest.mark.parametrize(
  ("environ", "message"),
  [
    (
      {"TF_CONFIG": "{"},
      "TF_CONFIG: line 1 column 2: must be valid JSON "
      "(Expecting property name enclosed in double quotes)",
    ),
    (
      {"TF_CONFIG": json.dumps({"cluster": JOBS})},
      'TF_CONFIG: must have the key "task", with the "type" and the "index" of '
      "this process",
    ),
    (
      _environ(JOBS, "worker", 3),
      "TF_CONFIG: task: must be a task of the "
      "cluster. Received: {'type': 'worker', 'index': 3}.",
    ),
    (
      _environ({"worker": ["a:1", "b:0"]}, "worker", 0),
      "TF_CONFIG: cluster.worker[1]: must have a port other than 0 when tasks "
      "are started one by one. Received: 'b:0'.",
    ),
  ],
  ids=["syntax", "no_task", "no_such_task", "port_0"],
)
def test_tf_config_mistakes(environ, message):
  # The wording of JSON's own mistakes differs between Python versions.
  received = _message(cluster.from_tf_config, environ)
  assert (
    received.partition(" (Expecting")[0]
    == (message.partition(" (Expecting")[0])
  )


@pytest.mark.parametrize(
  ("jobs", "job_name", "task_index", "task"),
  [
    (JOBS, "worker", 2, "worker 2"),
    (JOBS, "ps", 0, "ps 0"),
    (JOBS, "evaluator", None, "evaluator 0"),
    (JOBS, "evaluator", 4, "evaluator 4"),
    (SPARSE_JOBS, "worker", None, "worker 1"),
    ({"chief": ["a:1"], "worker": ["b:1"]}, "master", None, "chief 0"),
    ({"worker": ["localhost:0"]}, "worker", 0, "worker 0"),
    ({}, "worker", None, "worker 0"),
  ],
  ids=[
    "index",
    "index_0",
    "evaluator",
    "evaluator_4",
    "only_one",
    "master",
    "port_0_alone",
    "no_cluster",
  ],
)
def test_task_from_flags(jobs, job_name, task_index, task):
  spec = cluster.parse(jobs)
  assert cluster.task_from_flags(spec, job_name, task_index) == _task(task)


@pytest.mark.parametrize(
  ("jobs", "job_name", "task_index", "message"),
  [
    (
      JOBS,
      "chief",
      0,
      '`job_name` must be one of "ps", "worker". Received: \'chief\'.',
    ),
    (
      JOBS,
      "",
      None,
      '`job_name` must be one of "ps", "worker". Received: \'\'.',
    ),
    ({}, "ps", 0, "`job_name` must be one of \"worker\". Received: 'ps'."),
    (
      JOBS,
      "worker",
      3,
      '`task_index` must be one of 0, 1, 2 for job "worker". Received: 3.',
    ),
    (
      JOBS,
      "worker",
      -1,
      '`task_index` must be one of 0, 1, 2 for job "worker". Received: -1.',
    ),
    (
      JOBS,
      "worker",
      None,
      '`task_index` must be one of 0, 1, 2 for job "worker". Received: None.',
    ),
    (
      SPARSE_JOBS,
      "worker",
      0,
      '`task_index` must be one of 1 for job "worker". Received: 0.',
    ),
    (JOBS, "evaluator", -1, "`task_index` must be >= 0. Received: -1."),
    (
      EXAMPLE,
      "worker",
      0,
      "cluster.ps[0]: must have a port other than 0 when tasks are started one "
      "by one. Received: 'localhost:0'.",
    ),
  ],
  ids=[
    "unknown_job",
    "empty_job",
    "no_cluster",
    "index_too_large",
    "index_negative",
    "index_missing",
    "sparse",
    "evaluator",
    "port_0",
  ],
)
def test_task_from_flags_mistakes(jobs, job_name, task_index, message):
  spec = cluster.parse(jobs, "x.json")
  assert _message(cluster.task_from_flags, spec, job_name, task_index) == (
    f"x.json: {message}"
  )


def test_resolve_ports_chooses_distinct_free_ports():
  spec = cluster.parse(
    {
      "cluster": {
        "ps": ["localhost:0", "127.0.0.1:0"],
        "worker": ["localhost:0"] * 5 + ["[::1]:0", "other:7"],
      },
      "layers": {"conv*": 1},
    }
  )
  resolved = cluster.resolve_ports(spec)
  addresses = [resolved.address(task) for task in resolved.tasks()]
  hosts, _, ports = zip(
    *(text.rpartition(":") for text in addresses), strict=True
  )
  assert hosts == (
    "localhost",
    "127.0.0.1",
    *["localhost"] * 5,
    "[::1]",
    "other",
  )
  assert len(set(ports)) == len(ports)
  assert "0" not in ports
  assert ports[-1] == "7"
  assert resolved.layers == spec.layers
  for address in addresses[:-1]:
    cluster.check_port_free(address)


def test_resolve_ports_leaves_a_resolved_spec_alone():
  spec = cluster.parse(JOBS)
  assert cluster.resolve_ports(spec) == spec


def test_resolve_ports_on_another_machine():
  spec = cluster.parse({"worker": ["localhost:0", "a.example.com:0"]}, "x.json")
  assert _message(cluster.resolve_ports, spec) == (
    "x.json: cluster.worker[1]: must have a port other than 0, as its host "
    "is another machine. Received: 'a.example.com:0'."
  )


def test_check_port_free_names_the_address_in_use():
  with socket.socket() as server:
    server.bind(("127.0.0.1", 0))
    server.listen()
    address = f"localhost:{server.getsockname()[1]}"
    assert _message(cluster.check_port_free, address) == (
      "`address` must have a port that is free (Address already in use). "
      f"Received: '{address}'."
    )
  cluster.check_port_free(address)


def test_check_port_free_of_no_address():
  assert _message(cluster.check_port_free, "localhost") == (
    f"`address` {ADDRESS}. Received: 'localhost'."
  )


def test_task_reads_as_words():
  assert str(_task("worker 1")) == "worker 1"


def test_workers_that_may_join():
  spec = cluster.parse({"cluster": {"ps": ["localhost:1"], **_TWO}})
  assert spec.replicas == _tasks("worker 0", "worker 1")
  assert spec.admit(None) is spec
  admitting = spec.admit(4)
  assert admitting.joining == _tasks("worker 2", "worker 3")
  assert admitting.replicas == _tasks(
    "worker 0", "worker 1", "worker 2", "worker 3"
  )
  # Only the process that joins knows an address.
  assert admitting.tasks() == spec.tasks()
  task = cluster.task_from_flags(admitting, "worker", 3)
  joined = admitting.with_joined(task)
  assert joined.replicas == admitting.replicas
  host, port = joined.address(task).split(":")
  assert host == "localhost" and int(port) > 0
  assert admitting.with_joined(cluster.Task("worker", 0)) is admitting


_TWO = {"worker": ["localhost:2", "localhost:3"]}


@pytest.mark.parametrize(
  "jobs, number, words",
  [
    ({"ps": ["a:1"], **_TWO}, 1, "at least the 2 workers of the cluster"),
    ({"ps": ["a:1"], **_TWO}, "3", "at least the 2 workers of the cluster"),
    (_TWO, 3, "needs variables on parameter servers"),
  ],
)
def test_refuses_numbers_of_workers(jobs, number, words):
  with pytest.raises(cluster.ClusterError, match=f"`max_workers`.*{words}"):
    cluster.parse({"cluster": jobs}).admit(number)


def test_only_a_listed_number_may_join():
  spec = cluster.parse({"cluster": {"ps": ["localhost:1"], **_TWO}}).admit(3)
  with pytest.raises(cluster.ClusterError, match="must be one of 0, 1, 2 for"):
    cluster.task_from_flags(spec, "worker", 3)
