"""The JSON Schema of the cluster spec and the parser accept the same."""

import copy
import json
import pathlib
import re

import hypothesis
import jsonschema
import pytest
from hypothesis import strategies

from tf_replicas import cluster
from tf_replicas.cluster import validation

ROOT = pathlib.Path(__file__).resolve().parents[2]
SCHEMA = json.loads(
  (ROOT / "tf_replicas" / "cluster" / "cluster_spec.schema.json").read_text(
    encoding="utf-8"
  )
)
VALIDATOR = jsonschema.Draft7Validator(SCHEMA)

# What only the parser checks: a part of its message -> a document that breaks
# just this rule. `docs/cluster_spec.md` lists the same rules, in this order.
PARSER_ONLY = {
  "must not be the address of": {"worker": ["a:1", "A:1"]},
  'must be "host:port"': {"worker": ["[::x]:1"]},
  "a key must be a job": {
    "cluster": {"worker": ["a:1"]},
    "devices": {"worker:1": {"gpus": []}},
  },
  "must be a task of the cluster": {
    "cluster": {"worker": ["a:1"]},
    "task": {"type": "worker", "index": 1},
  },
  "must not give GPU": {
    "cluster": {"worker": ["a:1", "a:2"]},
    "devices": {"worker": {"gpus": [0]}},
  },
  "must be at most the number of ps tasks": {
    "cluster": {"ps": ["a:1"], "worker": ["b:1"]},
    "variables": {"placement": "partitioned", "num_shards": 2},
  },
  "must be a device number of the tower": {"layers": {"conv*": 1.0}},
}
# The parser refuses 1.0 where it wants an integer. To a schema, 1 is the same.
_ROUND_FLOAT = re.compile(r"Received: .*\b\d+\.0\b")
# The schema has only the form of a host in brackets.
_IN_BRACKETS = re.compile(r"Received: '\[[^\s\[\]]+\]:\d{1,5}'")


def message(document: object) -> str | None:
  """The parser's message; None if it accepts the document."""
  try:
    cluster.parse(document)
  except cluster.ClusterError as error:
    return str(error)
  return None


def is_left_to_the_parser(message: str) -> bool:
  if _ROUND_FLOAT.search(message):
    return True
  if 'must be "host:port"' in message:
    return bool(_IN_BRACKETS.search(message))
  return any(part in message for part in PARSER_ONLY)


def assert_agree(document: object) -> None:
  found = message(document)
  errors = list(VALIDATOR.iter_errors(document))
  if found is None:
    assert not errors, errors
  elif not is_left_to_the_parser(found):
    assert errors, found


def test_is_a_schema():
  jsonschema.Draft7Validator.check_schema(SCHEMA)


@pytest.mark.parametrize(
  "path", sorted((ROOT / "cluster_specs").glob("*.json")), ids=lambda p: p.name
)
def test_accepts_the_files_of_cluster_specs(path):
  VALIDATOR.validate(json.loads(path.read_text(encoding="utf-8")))


@pytest.mark.parametrize("part", PARSER_ONLY)
def test_what_only_the_parser_checks(part):
  document = PARSER_ONLY[part]
  assert part in message(document)
  VALIDATOR.validate(document)


def test_has_the_parsers_choices():
  definitions = SCHEMA["definitions"]
  document = definitions["document"]["properties"]
  assert set(document) == {
    *validation.SECTIONS,
    *validation.TF_CONFIG_KEYS,
    validation.ALLOW_PUBLIC,
  }
  jobs = definitions["jobs"]["properties"]
  assert set(jobs) == set(validation.JOBS)
  assert definitions["task"]["properties"]["type"]["enum"] == list(
    validation.JOBS
  )
  assert [each["required"] for each in definitions["hasJob"]["anyOf"]] == [
    [job] for job in validation.JOBS
  ]
  variables = definitions["variables"]["properties"]
  assert variables["on"]["enum"] == list(validation.VARIABLES_ON)
  assert variables["placement"]["enum"] == list(validation.PLACEMENTS)


_HOSTS = strategies.sampled_from(
  ["localhost", "a", "A", "127.0.0.1", "a.example.com", "[::1]", "[x]", "a b"]
)
_PORTS = strategies.sampled_from(
  ["0", "1", "07", "2222", "59999", "60000", "65535", "65536", "99999", "x", ""]
)
_ADDRESSES = strategies.one_of(
  strategies.builds(
    "h{}.example.com:{}".format,
    strategies.integers(0, 99),
    strategies.integers(1, 65535),
  ),
  strategies.builds("{}:{}".format, _HOSTS, _PORTS),
)
_INDICES = strategies.sampled_from(["0", "1", "2", "01", "x", "", "1\n"])
_GOOD_ADDRESSES = strategies.builds(
  "h{}.example.com:{}".format,
  strategies.integers(0, 10**6),
  strategies.integers(1, 65535),
)
_JSON = strategies.sampled_from(
  [
    None,
    True,
    False,
    0,
    1,
    -1,
    2,
    1.0,
    1.5,
    "",
    "x",
    "ps",
    "cpu",
    "gpu",
    "mirrored",
  ]
  + ["partitioned", "a:1", [], {}, [0], [0, 0], ["a:1"], {"0": "a:1"}]
  + [{"gpus": []}, {"gpus": [0, 1]}, {"gpus": [1.0]}, {"on": "ps"}]
)
_KEYS = strategies.sampled_from(
  [*validation.JOBS, *validation.SECTIONS, *validation.TF_CONFIG_KEYS]
  + ["worker:0", "worker:1", "ps:0", "chief:0", "master:0", "worker:", "gpus"]
  + ["on", "placement", "min_shard_bytes", "num_shards", "type", "index", ""]
  + ["0", "1", "x", "evaluator:7", "chief:1", "worker:0\n"]
)


@strategies.composite
def _jobs(draw) -> dict:
  """Jobs that go together."""
  chief = draw(strategies.sampled_from([None, "chief", "master"]))
  jobs = {}
  if chief or draw(strategies.booleans()):
    names = ["ps", "worker"] if draw(strategies.booleans()) else ["worker"]
    if chief and draw(strategies.booleans()):
      names.remove("worker")
    for name in names:
      tasks = draw(strategies.lists(_GOOD_ADDRESSES, min_size=1, max_size=3))
      if draw(strategies.booleans()):
        jobs[name] = tasks
      else:
        jobs[name] = {str(2 * i): task for i, task in enumerate(tasks)}
  if chief:
    address = draw(_GOOD_ADDRESSES)
    jobs[chief] = draw(strategies.sampled_from([[address], {"0": address}]))
  if draw(strategies.booleans()):
    jobs["evaluator"] = [draw(_GOOD_ADDRESSES)]
  return jobs


@strategies.composite
def _documents(draw) -> dict:
  """Documents that the parser accepts, but for a few chances."""
  jobs = draw(_jobs())
  if jobs and draw(strategies.booleans()):
    return jobs
  document = {"cluster": jobs} if jobs or draw(strategies.booleans()) else {}
  numbers = strategies.lists(strategies.integers(0, 7), unique=True, max_size=3)
  names = [name for name in jobs if name != "evaluator"] or ["worker"]
  if draw(strategies.booleans()):
    document["devices"] = {
      name: {"gpus": draw(numbers)[: 1 if name.startswith("ps") else 3]}
      for name in draw(
        strategies.lists(
          strategies.sampled_from([*names, *(f"{n}:0" for n in names)])
        )
      )
    }
  if draw(strategies.booleans()):
    variables = document["variables"] = {}
    if "ps" in jobs:
      placement = draw(strategies.sampled_from(validation.PLACEMENTS))
      variables |= {"on": "ps", "placement": placement}
      if draw(strategies.booleans()):
        variables["min_shard_bytes"] = draw(strategies.integers(1, 10**9))
      if placement == "partitioned":
        variables["num_shards"] = draw(strategies.sampled_from([1, 2, None]))
    else:
      variables["on"] = draw(
        strategies.sampled_from(["cpu", "gpu", "mirrored"])
      )
  if draw(strategies.booleans()):
    document["layers"] = draw(
      strategies.dictionaries(
        strategies.sampled_from(["conv*", "local*", "a"]),
        strategies.integers(0, 3),
      )
    )
  if draw(strategies.booleans()):
    document["task"] = {
      "type": draw(strategies.sampled_from(names)),
      "index": draw(strategies.sampled_from([0, 0, 1])),
    }
    document |= draw(
      strategies.sampled_from([{}, {"rpc_layer": "grpc"}, {"job": {"x": 1}}])
    )
  return document


def _places(value: object) -> list[dict | list]:
  """The containers in a document."""
  inner = []
  if isinstance(value, dict):
    inner = list(value.values())
  elif isinstance(value, list):
    inner = value
  else:
    return []
  return [value, *(each for part in inner for each in _places(part))]


@strategies.composite
def _mutated(draw) -> dict:
  """A document with one to three changes somewhere."""
  document = copy.deepcopy(draw(_documents()))
  for _ in range(draw(strategies.integers(1, 3))):
    place = draw(strategies.sampled_from(_places(document)))
    values = strategies.one_of(_JSON, _ADDRESSES).map(copy.deepcopy)
    if isinstance(place, list):
      if place and draw(strategies.booleans()):
        place[draw(strategies.integers(0, len(place) - 1))] = draw(values)
      else:
        place.append(draw(values))
      continue
    key = draw(strategies.sampled_from(sorted(place))) if place else ""
    change = draw(strategies.sampled_from(["drop", "set", "add", "rename"]))
    if change == "add" or not place:
      place[draw(strategies.one_of(_KEYS, _INDICES))] = draw(values)
    elif change == "set":
      place[key] = draw(values)
    else:
      value = place.pop(key)
      if change == "rename":
        place[draw(_KEYS)] = value
  return document


_SETTINGS = hypothesis.settings(
  deadline=None,
  max_examples=300,
  derandomize=True,
  suppress_health_check=[hypothesis.HealthCheck.too_slow],
)


@_SETTINGS
@hypothesis.given(_documents())
def test_agrees_on_documents_as_users_write_them(document):
  assert_agree(document)


@_SETTINGS
@hypothesis.given(_mutated())
def test_agrees_on_documents_with_mistakes(document):
  assert_agree(document)


def _kinds(strategy) -> dict[str, int]:
  """How many of the generated documents the parser accepts, and so on."""
  counts = {"accepted": 0, "refused": 0, "left": 0}

  @_SETTINGS
  @hypothesis.given(strategy)
  def count(document):
    found = message(document)
    kind = "accepted" if found is None else "refused"
    is_left = found is not None and is_left_to_the_parser(found)
    counts["left" if is_left else kind] += 1

  count()
  return counts


def test_the_generated_documents_are_of_both_kinds():
  """Or else the tests above would prove little."""
  assert _kinds(_documents())["accepted"] > 150
  kinds = _kinds(_mutated())
  assert kinds["refused"] > 100 and kinds["accepted"] > 15, kinds


# With every key that there is, and every shape of a cluster.
_WHOLE = [
  {
    "cluster": {"ps": ["a:1", "a:2"], "worker": ["b:1", "c:1"]},
    "devices": {"ps": {"gpus": []}, "worker:1": {"gpus": [0, 1]}},
    "variables": {
      "on": "ps",
      "placement": "partitioned",
      "min_shard_bytes": 1,
      "num_shards": 2,
    },
    "layers": {"conv*": 0},
    "task": {"type": "worker", "index": 0, "trial": "1", "cloud": {}},
    "rpc_layer": "grpc",
    "environment": "cloud",
    "session_master": "grpc://",
    "job": {},
  },
  {"ps": ["a:1"], "master": {"0": "b:1"}, "evaluator": {"3": "c:1"}},
  {
    "cluster": {"chief": ["a:1"], "evaluator": ["b:1"]},
    "devices": {"chief": {"gpus": [0]}, "evaluator:1": {"gpus": [0]}},
    "variables": {"on": "mirrored"},
    "task": {"type": "chief", "index": 0},
  },
  {"devices": {"worker:0": {"gpus": [0]}}, "variables": {"on": "cpu"}},
]
_VALUES = [None, True, -1, 0, 1, 1.5, "", "x", "ps", "cpu", "a:65536", "d:9"]
_VALUES += [[], {}, [0, 0], [-1], ["x"], ["d:9"], ["d:8", "d:9"]]
_VALUES += [{"gpus": [0]}, {"x": 0}, {"0": "d:9"}, {"1": "d:9"}, {"01": "d:9"}]


def _changed(value: object):
  """Yields the value with each single change of a part."""
  yield from map(copy.deepcopy, _VALUES)
  if isinstance(value, list):
    for index, part in enumerate(value):
      for changed in _changed(part):
        yield [*value[:index], changed, *value[index + 1 :]]
  elif isinstance(value, dict):
    for key, part in value.items():
      rest = {k: v for k, v in value.items() if k != key}
      yield rest
      for changed in _changed(part):
        yield {**value, key: changed}
    for key in ("x", "", *validation.JOBS, "worker:01", "master:0", "ps:0"):
      if key not in value:
        for part in (["d:9"], {"gpus": []}, 0):
          yield {**value, key: part}


@pytest.mark.parametrize("document", _WHOLE)
def test_agrees_on_each_single_change(document):
  assert message(document) is None
  for changed in _changed(document):
    assert_agree(changed)
