"""Tests of `cluster.validation`: every rule, every message."""

import json

import pytest

from tf_replicas.cluster import validation

WORKERS = {"worker": ["a:1", "b:1"]}
PS_AND_WORKERS = {"ps": ["p:1", "q:1"], **WORKERS}
ADDRESS = 'must be "host:port" with a port in [0, 65535]'


def _message(document):
  with pytest.raises(validation.ClusterError) as raised:
    validation.check(document)
  message = str(raised.value)
  assert "\n" not in message
  return message


@pytest.mark.parametrize(
  "document",
  [[], "localhost:1", None, 1, True],
  ids=["list", "string", "null", "number", "true"],
)
def test_document_that_is_no_object(document):
  assert _message(document) == (
    f"must be a JSON object. Received: {document!r}."
  )


@pytest.mark.parametrize(
  "section", ["cluster", "devices", "variables", "layers", "task"]
)
@pytest.mark.parametrize("value", [None, [], "x", 3, True])
def test_section_that_is_no_object(section, value):
  assert _message({section: value}) == (
    f"{section}: must be a JSON object. Received: {value!r}."
  )


@pytest.mark.parametrize(
  ("document", "message"),
  [
    (
      {"varables": {}},
      'keys must be among "cluster", "devices", "variables", "layers" '
      "(did you mean \"variables\"?). Received: 'varables'.",
    ),
    (
      {"zzz": 1},
      'keys must be among "cluster", "devices", "variables", "layers". '
      "Received: 'zzz'.",
    ),
    (
      {"wroker": ["a:1"]},
      'keys must be among "cluster", "devices", "variables", "layers" '
      "(did you mean \"worker\"?). Received: 'wroker'.",
    ),
    (
      {"devices": {}, "worker": ["a:1"]},
      'worker: must be inside "cluster", because there are other top-level '
      "keys. Received: ['a:1'].",
    ),
    (
      {"ps": ["a:1"], "wroker": ["b:1"]},
      'keys must be among "chief", "master", "worker", "ps", "evaluator" '
      "(did you mean \"worker\"?). Received: 'wroker'.",
    ),
    (
      {"cluster": {"server": ["a:1"]}},
      'cluster: keys must be among "chief", "master", "worker", "ps", '
      "\"evaluator\". Received: 'server'.",
    ),
    (
      {3: "x"},
      'keys must be among "cluster", "devices", "variables", "layers". '
      "Received: 3.",
    ),
    ({"rpc_layer": 1}, "rpc_layer: must be a string. Received: 1."),
    ({"environment": {}}, "environment: must be a string. Received: {}."),
    (
      {"session_master": None},
      "session_master: must be a string. Received: None.",
    ),
  ],
  ids=[
    "nearest",
    "far_off",
    "job",
    "job_among_sections",
    "job_in_jobs_map",
    "job_in_cluster",
    "no_string",
    "rpc_layer",
    "environment",
    "session_master",
  ],
)
def test_top_level_mistakes(document, message):
  assert _message(document) == message


@pytest.mark.parametrize(
  "address",
  [
    "localhost",
    "localhost:",
    ":2222",
    "localhost:99999",
    "localhost:-1",
    "localhost:http",
    "localhost:65536",
    "local host:1",
    "grpc://localhost:1",
    "::1:2222",
    "[::1]",
    "[localhost]:1",
    "localhost:1\n",
    "",
    None,
    2222,
    True,
    ["localhost:1"],
  ],
)
def test_bad_address(address):
  document = {"cluster": {"worker": ["localhost:0", address]}}
  assert _message(document) == (
    f"cluster.worker[1]: {ADDRESS}. Received: {address!r}."
  )


def test_bad_address_in_a_jobs_map_is_placed_without_cluster():
  assert _message({"worker": ["localhost"]}) == (
    f"worker[0]: {ADDRESS}. Received: 'localhost'."
  )


@pytest.mark.parametrize(
  ("cluster", "message"),
  [
    (
      {"worker": "a:1"},
      'cluster.worker: must be a list of "host:port", or an object from task '
      "index to \"host:port\". Received: 'a:1'.",
    ),
    (
      {"worker": 2},
      'cluster.worker: must be a list of "host:port", or an object from task '
      'index to "host:port". Received: 2.',
    ),
    (
      {"worker": []},
      "cluster.worker: must have at least one task. Received: [].",
    ),
    (
      {"worker": {}},
      "cluster.worker: must have at least one task. Received: {}.",
    ),
    (
      {"worker": {"one": "a:1"}},
      'cluster.worker: keys must be task indices such as "0". '
      "Received: 'one'.",
    ),
    (
      {"worker": {"01": "a:1"}},
      'cluster.worker: keys must be task indices such as "0". '
      "Received: '01'.",
    ),
    (
      {"worker": {True: "a:1"}},
      'cluster.worker: keys must be task indices such as "0". Received: True.',
    ),
    ({"worker": {"1": "a"}}, f"cluster.worker[1]: {ADDRESS}. Received: 'a'."),
    (
      {"worker": {1: "a:1", "1": "b:1"}},
      "cluster.worker: must name every task once. "
      "Received: {1: 'a:1', '1': 'b:1'}.",
    ),
    (
      {"ps": ["a:1"], "worker": ["b:1", "a:1"]},
      "cluster.worker[1]: must not be the address of cluster.ps[0] again. "
      "Received: 'a:1'.",
    ),
    (
      {"worker": ["localhost:7", "127.0.0.1:7"]},
      "cluster.worker[1]: must not be the address of cluster.worker[0] again. "
      "Received: '127.0.0.1:7'.",
    ),
    (
      {"worker": ["A:7"], "evaluator": ["a:07"]},
      "cluster.evaluator[0]: must not be the address of cluster.worker[0] "
      "again. Received: 'a:07'.",
    ),
    (
      {"chief": ["a:1", "b:1"]},
      "cluster.chief: must have exactly one task, index 0. "
      "Received: ['a:1', 'b:1'].",
    ),
    (
      {"chief": {"1": "a:1"}},
      "cluster.chief: must have exactly one task, index 0. "
      "Received: {'1': 'a:1'}.",
    ),
    (
      {"master": ["a:1", "b:1"]},
      "cluster.master: must have exactly one task, index 0. "
      "Received: ['a:1', 'b:1'].",
    ),
    (
      {"chief": ["a:1"], "master": ["b:1"]},
      "cluster.master: must not be given together with its synonym "
      '("chief", "master"). '
      "Received: ['b:1'].",
    ),
    (
      {"ps": ["a:1"]},
      'cluster: must have a "worker" or "chief" job beside "ps". '
      "Received: ['ps'].",
    ),
    (
      {"ps": ["a:1"], "evaluator": ["b:1"]},
      'cluster: must have a "worker" or "chief" job beside "ps". '
      "Received: ['ps', 'evaluator'].",
    ),
  ],
  ids=[
    "string",
    "number",
    "empty_list",
    "empty_map",
    "index_word",
    "index_leading_zero",
    "index_true",
    "sparse_address",
    "index_twice",
    "duplicate",
    "duplicate_loopback",
    "duplicate_evaluator",
    "two_chiefs",
    "chief_1",
    "two_masters",
    "chief_and_master",
    "ps_only",
    "ps_and_evaluator",
  ],
)
def test_cluster_mistakes(cluster, message):
  assert _message({"cluster": cluster}) == message


@pytest.mark.parametrize(
  ("cluster", "jobs"),
  [
    ({}, {}),
    ({"worker": ["a:1"]}, {"worker": {0: "a:1"}}),
    ({"chief": ["a:1"]}, {"chief": {0: "a:1"}}),
    ({"master": ["a:1"]}, {"chief": {0: "a:1"}}),
    (
      {"chief": ["a:1"], "ps": ["b:1"]},
      {"chief": {0: "a:1"}, "ps": {0: "b:1"}},
    ),
    ({"worker": {"3": "c:1", "1": "a:1"}}, {"worker": {1: "a:1", 3: "c:1"}}),
    ({"worker": {1: "a:1"}}, {"worker": {1: "a:1"}}),
    ({"worker": ("a:1", "b:1")}, {"worker": {0: "a:1", 1: "b:1"}}),
    (
      {"worker": ["localhost:0", "localhost:0"]},
      {"worker": {0: "localhost:0", 1: "localhost:0"}},
    ),
    ({"worker": ["a:1", "a:2"]}, {"worker": {0: "a:1", 1: "a:2"}}),
    (
      {"worker": ["[::1]:1", "10.0.0.1:65535"]},
      {"worker": {0: "[::1]:1", 1: "10.0.0.1:65535"}},
    ),
    ({"worker": ["a:1"], "evaluator": ["b:1"]}, {"worker": {0: "a:1"}}),
    ({"evaluator": ["b:1"]}, {}),
  ],
  ids=[
    "empty",
    "worker",
    "chief",
    "master",
    "chief_and_ps",
    "sparse",
    "sparse_int",
    "tuple",
    "port_0_twice",
    "one_host_two_ports",
    "ip",
    "evaluator_is_stripped",
    "evaluator_only",
  ],
)
def test_accepted_clusters(cluster, jobs):
  assert validation.check({"cluster": cluster}).jobs == jobs
  if cluster:
    assert validation.check(cluster).jobs == jobs


@pytest.mark.parametrize(
  ("devices", "message"),
  [
    (
      {"chief": {"gpus": []}},
      'devices: a key must be a job ("ps", "worker") or a task of the cluster '
      "(such as \"worker:1\"). Received: 'chief'.",
    ),
    (
      {"worker:2": {"gpus": []}},
      'devices: a key must be a job ("ps", "worker") or a task of the cluster '
      "(such as \"worker:1\"). Received: 'worker:2'.",
    ),
    (
      {"worker:x": {"gpus": []}},
      'devices: a key must be a job ("ps", "worker") or a task of the cluster '
      "(such as \"worker:1\"). Received: 'worker:x'.",
    ),
    (
      {"worker:": {"gpus": []}},
      'devices: a key must be a job ("ps", "worker") or a task of the cluster '
      "(such as \"worker:1\"). Received: 'worker:'.",
    ),
    ({"worker": [0]}, "devices.worker: must be a JSON object. Received: [0]."),
    (
      {"worker:1": {"gpu": [0]}},
      'devices.worker:1: keys must be among "gpus" (did you mean "gpus"?). '
      "Received: 'gpu'.",
    ),
    ({"worker": {}}, 'devices.worker: must have the key "gpus". Received: {}.'),
    *(
      (
        {"ps": {"gpus": gpus}},
        "devices.ps.gpus: must be a list of distinct GPU numbers, each >= 0. "
        f"Received: {gpus!r}.",
      )
      for gpus in (1, None, "0", ["0"], [-1], [True], [1.0], [0, 0])
    ),
  ],
  ids=[
    "other_job",
    "other_task",
    "index_word",
    "no_index",
    "list",
    "unknown_key",
    "no_gpus",
    "gpus_number",
    "gpus_null",
    "gpus_string",
    "gpu_string",
    "gpu_negative",
    "gpu_true",
    "gpu_float",
    "gpu_twice",
  ],
)
def test_devices_mistakes(devices, message):
  document = {"cluster": PS_AND_WORKERS, "devices": devices}
  assert _message(document) == message


def test_devices_of_chief_and_its_synonym():
  document = {
    "cluster": {"chief": ["a:1"]},
    "devices": {"chief": {"gpus": []}, "master": {"gpus": [1]}},
  }
  assert _message(document) == (
    "devices.master: must not be given together with its synonym "
    '("chief", "master"). '
    "Received: {'gpus': [1]}."
  )


@pytest.mark.parametrize("key", ["ps", "worker:1", "chief"])
def test_devices_without_cluster_name_worker_0_only(key):
  assert _message({"devices": {key: {"gpus": []}}}) == (
    'devices: a key must be a job ("worker") or a task of the cluster '
    f'(such as "worker:0"). Received: {key!r}.'
  )


@pytest.mark.parametrize("key", ["worker", "worker:0", "evaluator"])
def test_accepted_devices_without_cluster(key):
  parts = validation.check({"devices": {key: {"gpus": [1, 0]}}})
  assert parts.devices == {key: (1, 0)}


def test_gpu_of_one_host_given_to_two_workers_by_job():
  document = {
    "cluster": {"worker": ["localhost:0", "127.0.0.1:0"]},
    "devices": {"worker": {"gpus": [1, 0]}},
  }
  assert _message(document) == (
    "devices.worker.gpus: must not give GPU 1 of localhost to both "
    '"worker:0" and "worker:1"; to share it, say so by task ("worker:0": '
    '..., "worker:1": ...). Received: [1, 0].'
  )


def test_gpu_of_one_host_given_to_two_jobs():
  document = {
    "cluster": {"chief": ["a:1"], "worker": ["a:2"]},
    "devices": {"chief": {"gpus": [0]}, "worker": {"gpus": [0]}},
  }
  assert _message(document).startswith(
    'devices.worker.gpus: must not give GPU 0 of a to both "chief:0" and '
    '"worker:0"'
  )


@pytest.mark.parametrize("key", ["ps", "ps:1"])
def test_gpus_of_a_parameter_server(key):
  document = {"cluster": PS_AND_WORKERS, "devices": {key: {"gpus": [0, 1]}}}
  assert _message(document) == (
    f"devices.{key}.gpus: must have at most one GPU, which holds the ps task's"
    " variables. Received: [0, 1]."
  )
  if key == "ps:1":
    document["devices"] = {key: {"gpus": [3]}}
    assert validation.check(document).devices == {key: (3,)}


@pytest.mark.parametrize(
  ("workers", "devices"),
  [
    (["a:1", "a:2"], {"worker:0": [0], "worker:1": [0]}),
    (["a:1", "b:1"], {"worker": [0, 1]}),
    (["a:1", "a:2"], {"worker": [0], "worker:1": [1]}),
    (["a:1", "a:2"], {"worker": [0], "worker:1": [0]}),
    (["a:1", "a:2"], {"worker": []}),
  ],
  ids=["by_task", "two_hosts", "one_overridden", "one_told_to", "none"],
)
def test_accepted_gpus(workers, devices):
  parts = validation.check(
    {
      "cluster": {"worker": workers},
      "devices": {key: {"gpus": gpus} for key, gpus in devices.items()},
    }
  )
  assert parts.devices == {key: tuple(gpus) for key, gpus in devices.items()}


@pytest.mark.parametrize(
  ("cluster", "variables", "message"),
  [
    (
      WORKERS,
      {"at": "cpu"},
      'variables: keys must be among "on", "placement", "min_shard_bytes", '
      "\"num_shards\". Received: 'at'.",
    ),
    (
      WORKERS,
      {"on": "tpu"},
      'variables.on: must be one of "cpu", "gpu", "ps", "mirrored". '
      "Received: 'tpu'.",
    ),
    (
      WORKERS,
      {"on": ["cpu"]},
      'variables.on: must be one of "cpu", "gpu", "ps", "mirrored". '
      "Received: ['cpu'].",
    ),
    (
      WORKERS,
      {"on": "ps"},
      'variables.on: must not be "ps" without a "ps" job in the cluster. '
      "Received: 'ps'.",
    ),
    (
      {},
      {"on": "ps"},
      'variables.on: must not be "ps" without a "ps" job in the cluster. '
      "Received: 'ps'.",
    ),
    (
      PS_AND_WORKERS,
      {"on": "mirrored"},
      'variables.on: must be "ps" as the cluster has a "ps" job. '
      "Received: 'mirrored'.",
    ),
    (
      PS_AND_WORKERS,
      {"on": "cpu"},
      'variables.on: must be "ps" as the cluster has a "ps" job. '
      "Received: 'cpu'.",
    ),
    (
      PS_AND_WORKERS,
      {"placement": "random"},
      'variables.placement: must be one of "round_robin", "greedy", '
      "\"partitioned\". Received: 'random'.",
    ),
    (
      PS_AND_WORKERS,
      {"placement": None},
      'variables.placement: must be one of "round_robin", "greedy", '
      '"partitioned". Received: None.',
    ),
    *(
      (
        PS_AND_WORKERS,
        {"min_shard_bytes": value},
        "variables.min_shard_bytes: must be an integer >= 1. "
        f"Received: {value!r}.",
      )
      for value in (0, -1, 1.5, "1", True, None)
    ),
    *(
      (
        PS_AND_WORKERS,
        {"num_shards": value},
        f"variables.num_shards: must be an integer >= 1. Received: {value!r}.",
      )
      for value in (0, 2.0, "2", True)
    ),
    (
      PS_AND_WORKERS,
      {"num_shards": 3},
      "variables.num_shards: must be at most the number of ps tasks, 2. "
      "Received: 3.",
    ),
    (
      PS_AND_WORKERS,
      {"num_shards": 2, "placement": "greedy"},
      'variables.num_shards: must be absent unless "placement" is '
      '"partitioned". Received: 2.',
    ),
    *(
      (
        cluster,
        {"on": on, key: value},
        f'variables.{key}: must be absent unless variables are on "ps". '
        f"Received: {value!r}.",
      )
      for cluster, on in ((WORKERS, "mirrored"), ({}, "cpu"))
      for key, value in (
        ("placement", "partitioned"),
        ("min_shard_bytes", 1024),
        ("num_shards", 1),
      )
    ),
  ],
)
def test_variables_mistakes(cluster, variables, message):
  document = {"cluster": cluster, "variables": variables}
  assert _message(document) == message


@pytest.mark.parametrize(
  ("cluster", "variables", "on"),
  [
    (PS_AND_WORKERS, {}, "ps"),
    (
      PS_AND_WORKERS,
      {"placement": "partitioned", "num_shards": 2, "min_shard_bytes": 1},
      "ps",
    ),
    (PS_AND_WORKERS, {"on": "ps", "min_shard_bytes": 1}, "ps"),
    (PS_AND_WORKERS, {"placement": "partitioned", "num_shards": None}, "ps"),
    (PS_AND_WORKERS, {"placement": "round_robin"}, "ps"),
    (WORKERS, {}, "cpu"),
    (WORKERS, {"on": "mirrored"}, "mirrored"),
    ({}, {}, "cpu"),
    ({}, {"on": "mirrored"}, "mirrored"),
  ],
)
def test_accepted_variables(cluster, variables, on):
  parts = validation.check({"cluster": cluster, "variables": variables})
  assert parts.variables == {**variables, "on": on}


@pytest.mark.parametrize(
  ("layers", "message"),
  [
    (
      {"": 0},
      "layers: keys must be layer-name patterns, not empty. Received: ''.",
    ),
    (
      {3: 0},
      "layers: keys must be layer-name patterns, not empty. Received: 3.",
    ),
    *(
      (
        {"conv*": value},
        'layers["conv*"]: must be a device number of the tower, >= 0. '
        f"Received: {value!r}.",
      )
      for value in (-1, "0", True, None, [0])
    ),
    (
      {"a\nb": -1},
      'layers["a\\nb"]: must be a device number of the tower, >= 0. '
      "Received: -1.",
    ),
  ],
)
def test_layers_mistakes(layers, message):
  assert _message({"layers": layers}) == message


def test_accepted_layers_keep_their_order():
  layers = {"local*": 1, "conv*": 0}
  checked = validation.check({"layers": layers}).layers
  assert list(checked.items()) == [("local*", 1), ("conv*", 0)]


@pytest.mark.parametrize(
  ("task", "message"),
  [
    ({"index": 0}, "task: must have the key \"type\". Received: {'index': 0}."),
    (
      {"type": "worker"},
      "task: must have the key \"index\". Received: {'type': 'worker'}.",
    ),
    (
      {"type": "server", "index": 0},
      'task.type: must be one of "chief", "master", "worker", "ps", '
      "\"evaluator\". Received: 'server'.",
    ),
    *(
      (
        {"type": "worker", "index": index},
        f"task.index: must be an integer >= 0. Received: {index!r}.",
      )
      for index in ("0", -1, 0.0, True, None)
    ),
    (
      {"type": "worker", "index": 2},
      "task: must be a task of the cluster. "
      "Received: {'type': 'worker', 'index': 2}.",
    ),
    (
      {"type": "ps", "index": 0},
      "task: must be a task of the cluster. "
      "Received: {'type': 'ps', 'index': 0}.",
    ),
    (
      {"type": "worker", "index": 0, "id": 0},
      'task: keys must be among "type", "index". Received: \'id\'.',
    ),
  ],
)
def test_task_mistakes(task, message):
  assert _message({"cluster": WORKERS, "task": task}) == message


def test_long_values_are_cut():
  message = _message({"cluster": "x" * 1000})
  assert message.endswith("xxx....")
  assert len(message) < 200


@pytest.mark.parametrize(
  ("text", "message"),
  [
    ("", "line 1 column 1: must be valid JSON (Expecting value)"),
    (
      '{"cluster":\n {"ps": [}}',
      "line 2 column 10: must be valid JSON (Expecting value)",
    ),
    (
      '{"cluster": {}, "cluster": {}}',
      "keys must not occur twice in one object. Received: 'cluster'.",
    ),
    (
      '{"cluster": {"ps": ["a:1"], "worker": [], "ps": []}}',
      "cluster: keys must not occur twice in one object. Received: 'ps'.",
    ),
    (
      '{"layers": {"a": [{"b": 1, "b": 2}]}}',
      "layers.a[0]: keys must not occur twice in one object. Received: 'b'.",
    ),
  ],
  ids=["empty", "syntax", "twice_at_top", "twice_in_cluster", "twice_in_list"],
)
def test_text_that_is_no_document(text, message):
  with pytest.raises(validation.ClusterError) as raised:
    validation.decode(text)
  assert str(raised.value) == message


@pytest.mark.parametrize("text", ["[" * 100_000, "1" * 5000])
def test_text_beyond_the_limits_of_the_decoder(text):
  with pytest.raises(
    validation.ClusterError, match=r"must be valid JSON \(.+\)"
  ):
    validation.decode(text)


def test_decode_keeps_the_order_of_keys():
  text = '{"layers": {"b": 1, "a": 0}}'
  assert json.dumps(validation.decode(text)) == text
