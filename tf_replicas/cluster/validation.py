"""Checks a cluster-spec document; each mistake is one `ClusterError`.

The document is the decoded JSON of a cluster spec or of TF_CONFIG. Every
function checks a part of it. If the part may be at several places, the function
takes the place too, such as `cluster.worker`, for the error message. It returns
the part in one *plain form*: jobs as `{job: {index: address}}`, with `master`
renamed to `chief`, and GPU lists as tuples. `tf_replicas.cluster.spec` builds
its objects from that, and puts the name of the file in front of the messages.
"""

import difflib
import json
import re
from collections.abc import Iterable
from collections.abc import Mapping
from typing import NamedTuple

from tf_replicas.cluster import addresses

JOBS = ("chief", "master", "worker", "ps", "evaluator")
SECTIONS = ("cluster", "devices", "variables", "layers")
# What else TensorFlow and the platforms that launch it put into TF_CONFIG.
TF_CONFIG_KEYS = ("task", "rpc_layer", "environment", "session_master", "job")
# Accepts addresses in public networks.
ALLOW_PUBLIC = "allow_public_addresses"
VARIABLES_ON = ("cpu", "gpu", "ps", "mirrored")
PLACEMENTS = ("round_robin", "greedy", "partitioned")

_INDEX = re.compile(r"0|[1-9][0-9]{0,8}", re.ASCII)


class ClusterError(ValueError):
  """Reports a mistake of the user in a cluster spec, a task or an option.

  An example of an option is the update rule. The message is one line with the
  place or the option, the rule that is broken and the value received.
  """


class Parts(NamedTuple):
  """Holds the parts of a document that has passed every check, in plain form.

  Attributes:
    jobs: Maps each job to a map from task index to "host:port".
    devices: Maps "job" or "job:index" to GPU numbers.
    variables: The section `variables`, with "on" filled in.
    layers: Maps patterns of layer names to the number of a device within a
      tower (a copy of the model on its devices).
    task: (job, index) of the process that the document is for, from TF_CONFIG;
      None if the document does not say it.
    allow_public_addresses: Whether the document accepts public addresses.
  """

  jobs: dict[str, dict[int, str]]
  devices: dict[str, tuple[int, ...]]
  variables: dict[str, str | int | None]
  layers: dict[str, int]
  task: tuple[str, int] | None
  allow_public_addresses: bool


class _RepeatedKey(dict):
  """Takes the place of a decoded JSON object in which one key occurs twice.

  Attributes:
    key: The key that occurs twice.
  """

  key: str


def decode(text: str) -> object:
  """Decodes the JSON `text`.

  Raises:
    ClusterError: If `text` is not valid JSON, or an object has a key twice.
  """
  try:
    document = json.loads(text, object_pairs_hook=_object_of_pairs)
    _check_no_repeated_key(document, "")
  except ClusterError:
    raise
  except json.JSONDecodeError as error:
    raise ClusterError(
      f"line {error.lineno} column {error.colno}: must be valid JSON "
      f"({error.msg})"
    ) from None
  except (RecursionError, ValueError) as error:  # Depth, digits of a number.
    raise ClusterError(f"must be valid JSON ({error})") from None
  return document


def check(document: object) -> Parts:
  """Checks a whole document, and returns its parts in plain form.

  Args:
    document: The decoded JSON of a cluster spec or of TF_CONFIG.

  Raises:
    ClusterError: At the first mistake of the document.
  """
  _check_mapping(document, "")
  if _is_jobs_map(document):
    document, prefix = {"cluster": document}, ""
  else:
    _check_top_level(document)
    prefix = "cluster"
  jobs = check_jobs(document.get("cluster", {}), prefix)
  return Parts(
    jobs=jobs,
    devices=_check_devices(document.get("devices", {}), jobs),
    variables=_check_variables(
      document.get("variables", {}), num_ps=len(jobs.get("ps", {}))
    ),
    layers=_check_layers(document.get("layers", {})),
    task=_check_task(document, jobs),
    allow_public_addresses=_check_allow_public(document),
  )


def check_jobs(jobs: object, prefix: str) -> dict[str, dict[int, str]]:
  """Checks the map from jobs to addresses, and returns it in plain form.

  An evaluator is checked, but left out of the result: it runs no TensorFlow
  server, and `ParameterServerStrategy` would wait for such a server for ever
  (seen with TensorFlow 2.21).

  Args:
    jobs: Maps each job to a list of addresses, or to a map from index to
      address.
    prefix: The place of `jobs` in the document, for error messages.

  Returns:
    A map from each job to a map from task index to "host:port".

  Raises:
    ClusterError: If a job or an address is not valid or occurs twice.
  """
  _check_mapping(jobs, prefix)
  _check_keys(jobs, prefix, JOBS)
  checked: dict[str, dict[int, str]] = {}
  users: dict[tuple[str, int], str] = {}  # (host, port) -> place
  for name, value in jobs.items():
    place = join_place(prefix, name)
    job = canonical_job(name)
    if job in checked:
      raise mistake(
        place,
        'must not be given together with its synonym ("chief", "master")',
        value,
      )
    checked[job] = _check_addresses(value, place)
    for index, address in checked[job].items():
      host, port = addresses.split(address)
      user = users.setdefault(
        (addresses.canonical_host(host), port), f"{place}[{index}]"
      )
      if port and user != f"{place}[{index}]":
        raise mistake(
          f"{place}[{index}]",
          f"must not be the address of {user} again",
          address,
        )
    if job == "chief" and set(checked[job]) != {0}:
      raise mistake(place, "must have exactly one task, index 0", value)
  checked.pop("evaluator", None)
  if "ps" in checked and len(checked) == 1:
    rule = 'must have a "worker" or "chief" job beside "ps"'
    raise mistake(prefix, rule, list(jobs))
  return checked


def mistake(place: str, rule: str, received: object) -> ClusterError:
  """Returns the `ClusterError` that says which value breaks which rule.

  Args:
    place: The place of the value in the document; "" leaves it out.
    rule: What the value must be, such as "must be a string".
    received: The value, of which at most 120 characters are shown.
  """
  shown = repr(received)
  if len(shown) > 120:
    shown = shown[:117] + "..."
  return ClusterError(
    f"{place}{': ' if place else ''}{rule}. Received: {shown}."
  )


def canonical_job(job: str) -> str:
  """Returns the name of a job, with "chief" for "master", its name in TF1."""
  return "chief" if job == "master" else job


def quoted(names: Iterable[str]) -> str:
  """Joins names for an error message, each in double quotes: `"a", "b"`."""
  return ", ".join(f'"{name}"' for name in names)


def join_place(prefix: str, key: str) -> str:
  """Returns the place of a key in the document, for error messages.

  Args:
    prefix: The place of the object that has the key.
    key: The key.

  Returns:
    `prefix.key`, or `prefix["key"]` if `key` is not a plain word.
  """
  if not re.fullmatch(r"\w+(:[0-9]+)?", key, re.ASCII):
    return f"{prefix}[{json.dumps(key)}]"  # Escaped: one line.
  return f"{prefix}.{key}" if prefix else key


def _object_of_pairs(pairs: list[tuple[str, object]]) -> dict[str, object]:
  decoded = dict(pairs)
  if len(decoded) < len(pairs):
    keys = [key for key, _ in pairs]
    decoded = _RepeatedKey(decoded)
    decoded.key = next(key for key in keys if keys.count(key) > 1)
  return decoded


def _check_no_repeated_key(value: object, place: str) -> None:
  if isinstance(value, _RepeatedKey):
    raise mistake(place, "keys must not occur twice in one object", value.key)
  if isinstance(value, dict):
    for key, item in value.items():
      _check_no_repeated_key(item, join_place(place, key))
  elif isinstance(value, list):
    for index, item in enumerate(value):
      _check_no_repeated_key(item, f"{place}[{index}]")


def _is_jobs_map(document: Mapping) -> bool:
  keys = set(document)
  others = (*SECTIONS, *TF_CONFIG_KEYS, ALLOW_PUBLIC)
  return not keys.isdisjoint(JOBS) and keys.isdisjoint(others)


def _check_top_level(document: Mapping) -> None:
  for key, value in document.items():
    if key in JOBS:
      raise mistake(
        key,
        'must be inside "cluster", because there are other top-level keys',
        value,
      )
  also = (*TF_CONFIG_KEYS, *JOBS, ALLOW_PUBLIC)
  _check_keys(document, "", SECTIONS, also=also)
  for key in ("rpc_layer", "environment", "session_master"):
    if not isinstance(document.get(key, ""), str):
      raise mistake(key, "must be a string", document[key])


def _check_allow_public(document: object) -> bool:
  is_mapping = isinstance(document, Mapping)
  value = document.get(ALLOW_PUBLIC, False) if is_mapping else False
  if not isinstance(value, bool):
    raise mistake(ALLOW_PUBLIC, "must be true or false", value)
  return value


def _check_mapping(value: object, place: str) -> None:
  if not isinstance(value, Mapping):
    raise mistake(place, "must be a JSON object", value)


def _check_keys(
  mapping: Mapping,
  place: str,
  known: tuple[str, ...],
  *,
  also: tuple[str, ...] = (),
) -> None:
  """Raises ClusterError for a key that is neither in `known` nor in `also`.

  Args:
    mapping: The object whose keys are checked.
    place: The place of `mapping` in the document, for the message.
    known: The keys that the message lists as allowed.
    also: More keys that are allowed, which the message does not list.
  """
  for key in mapping:
    if key not in known + also:
      nearest = difflib.get_close_matches(str(key), known + also, n=1)
      hint = f' (did you mean "{nearest[0]}"?)' if nearest else ""
      raise mistake(place, f"keys must be among {quoted(known)}{hint}", key)


def _is_int(value: object, *, minimum: int = 0) -> bool:
  # JSON's true is an int to Python, but no number in the document.
  return (
    isinstance(value, int) and not isinstance(value, bool) and value >= minimum
  )


def _check_addresses(value: object, place: str) -> dict[int, str]:
  """Checks the addresses of a job, and returns them by task index.

  Args:
    value: A list of addresses, or a sparse map such as `{"1": address}`.
    place: The place of `value` in the document, for error messages.

  Raises:
    ClusterError: If there is no address, one is not valid, or an index is not
      valid or occurs twice.
  """
  if isinstance(value, Mapping):
    items = [
      (_sparse_index(key, place), address) for key, address in value.items()
    ]
  elif isinstance(value, list | tuple):
    items = list(enumerate(value))
  else:
    rule = 'must be a list of "host:port", or an object from task index to '
    raise mistake(place, rule + '"host:port"', value)
  if not items:
    raise mistake(place, "must have at least one task", value)
  for index, address in items:
    if addresses.split(address) is None:
      raise mistake(f"{place}[{index}]", addresses.RULE, address)
  if len(dict(items)) < len(items):  # 1 and "1", in a Python mapping.
    raise mistake(place, "must name every task once", value)
  return dict(sorted(items))


def _sparse_index(key: object, place: str) -> int:
  if _is_int(key):
    return key
  if isinstance(key, str) and _INDEX.fullmatch(key):
    return int(key)
  raise mistake(place, 'keys must be task indices such as "0"', key)


def _check_devices(
  devices: object, jobs: Mapping[str, Mapping[int, str]]
) -> dict[str, tuple[int, ...]]:
  _check_mapping(devices, "devices")
  checked: dict[str, tuple[int, ...]] = {}
  for key, entry in devices.items():
    name = _check_device_key(key, jobs)
    place = join_place("devices", key)
    if name in checked:
      raise mistake(
        place,
        'must not be given together with its synonym ("chief", "master")',
        entry,
      )
    _check_mapping(entry, place)
    _check_keys(entry, place, ("gpus",))
    if "gpus" not in entry:
      raise mistake(place, 'must have the key "gpus"', entry)
    checked[name] = _check_gpus(entry["gpus"], f"{place}.gpus")
    if name.partition(":")[0] == "ps" and len(checked[name]) > 1:
      rule = "must have at most one GPU, which holds the ps task's variables"
      raise mistake(f"{place}.gpus", rule, entry["gpus"])
  _check_gpu_sharing(checked, jobs)
  return checked


def _check_device_key(
  key: object, jobs: Mapping[str, Mapping[int, str]]
) -> str:
  """Checks a key of the section `devices`, and returns it in plain form.

  Args:
    key: The key, "job" or "job:index".
    jobs: The checked jobs. The key must name one of them, one of their tasks,
      or an evaluator. If there are none, the key must name worker 0.

  Returns:
    The key, with "chief" for "master".

  Raises:
    ClusterError: If the key names none of these.
  """
  # A spec without a cluster has one process, which is called worker 0.
  jobs = jobs or {"worker": {0: ""}}
  if isinstance(key, str):
    job, colon, index = key.partition(":")
    job = canonical_job(job)
    if not colon or _INDEX.fullmatch(index):
      # An evaluator need not stand in the cluster to exist.
      tasks = jobs.get(job, {})
      if job == "evaluator" or tasks and (not colon or int(index) in tasks):
        return f"{job}{colon}{index}"
  last_job, last_tasks = list(jobs.items())[-1]
  raise mistake(
    "devices",
    f"a key must be a job ({quoted(jobs)}) or a task of the "
    f'cluster (such as "{last_job}:{max(last_tasks)}")',
    key,
  )


def _check_gpus(gpus: object, place: str) -> tuple[int, ...]:
  if (
    not isinstance(gpus, list | tuple)
    or not all(map(_is_int, gpus))
    or len(set(gpus)) < len(gpus)
  ):
    rule = "must be a list of distinct GPU numbers, each >= 0"
    raise mistake(place, rule, gpus)
  return tuple(gpus)


def _check_gpu_sharing(
  devices: Mapping[str, tuple[int, ...]], jobs: Mapping[str, Mapping[int, str]]
) -> None:
  """Raises ClusterError if tasks on one host would share a GPU by mistake.

  An entry for a whole job, such as "worker", gives the same GPU numbers to all
  its tasks. So it is refused if two of these tasks are on one host. Entries for
  single tasks, such as "worker:1", may share a GPU.

  Args:
    devices: The checked section `devices`.
    jobs: The checked jobs.
  """
  users: dict[tuple[str, int], str] = {}  # (host, GPU) -> task
  for job, tasks in jobs.items():
    for index, address in tasks.items():
      task = f"{job}:{index}"
      if task in devices:
        continue
      host = addresses.canonical_host(addresses.split(address)[0])
      for gpu in devices.get(job, ()):
        user = users.setdefault((host, gpu), task)
        if user != task:
          raise mistake(
            f"devices.{job}.gpus",
            f"must not give GPU {gpu} of {host} to "
            f'both "{user}" and "{task}"; to share it, say so by task '
            f'("{user}": ..., "{task}": ...)',
            list(devices[job]),
          )


def _check_variables(
  variables: object, *, num_ps: int
) -> dict[str, str | int | None]:
  """Checks the section `variables`, and returns it with "on" filled in.

  Without "on", the variables are on "ps" if the cluster has parameter servers,
  and on "cpu" otherwise.

  Args:
    variables: The section.
    num_ps: The number of parameter servers of the cluster.

  Raises:
    ClusterError: If an entry is not valid, or does not suit the cluster.
  """
  _check_mapping(variables, "variables")
  _check_keys(
    variables, "variables", ("on", "placement", "min_shard_bytes", "num_shards")
  )
  checked = {"on": "ps" if num_ps else "cpu", **variables}
  for key, choices in (("on", VARIABLES_ON), ("placement", PLACEMENTS)):
    if key in checked and checked[key] not in choices:
      raise mistake(
        f"variables.{key}", f"must be one of {quoted(choices)}", checked[key]
      )
  if checked["on"] == "ps" and not num_ps:
    rule = 'must not be "ps" without a "ps" job in the cluster'
    raise mistake("variables.on", rule, checked["on"])
  if checked["on"] != "ps" and num_ps:
    rule = 'must be "ps" as the cluster has a "ps" job'
    raise mistake("variables.on", rule, checked["on"])
  for key in ("placement", "min_shard_bytes", "num_shards"):
    if key in variables and not num_ps:
      rule = 'must be absent unless variables are on "ps"'
      raise mistake(f"variables.{key}", rule, checked[key])
  if not _is_int(checked.get("min_shard_bytes", 1), minimum=1):
    value = checked["min_shard_bytes"]
    raise mistake("variables.min_shard_bytes", "must be an integer >= 1", value)
  _check_num_shards(checked, num_ps)
  return checked


def _check_num_shards(variables: Mapping[str, object], num_ps: int) -> None:
  num_shards = variables.get("num_shards")
  if num_shards is None:
    return
  place = "variables.num_shards"
  if not _is_int(num_shards, minimum=1):
    raise mistake(place, "must be an integer >= 1", num_shards)
  if num_shards > num_ps:
    rule = f"must be at most the number of ps tasks, {num_ps}"
    raise mistake(place, rule, num_shards)
  if variables.get("placement") != "partitioned":
    rule = 'must be absent unless "placement" is "partitioned"'
    raise mistake(place, rule, num_shards)


def _check_layers(layers: object) -> dict[str, int]:
  _check_mapping(layers, "layers")
  for pattern, device in layers.items():
    if not isinstance(pattern, str) or not pattern:
      rule = "keys must be layer-name patterns, not empty"
      raise mistake("layers", rule, pattern)
    if not _is_int(device):
      place = join_place("layers", pattern)
      raise mistake(place, "must be a device number of the tower, >= 0", device)
  return dict(layers)


def _check_task(
  document: Mapping, jobs: Mapping[str, Mapping[int, str]]
) -> tuple[str, int] | None:
  """Checks the entry `task` of TF_CONFIG, and returns it as (job, index).

  Args:
    document: The whole document. Its entry `task` has the keys "type", the job,
      and "index".
    jobs: The checked jobs, which must include the task unless it is an
      evaluator. If there are none, every task is accepted.

  Returns:
    The task, with "chief" for "master"; None if there is no such entry.

  Raises:
    ClusterError: If the entry is not valid, or not a task of `jobs`.
  """
  if "task" not in document:
    return None
  task = document["task"]
  _check_mapping(task, "task")
  # Platforms add "trial" and "cloud" (Google's AI Platform and Vertex AI).
  _check_keys(task, "task", ("type", "index"), also=("trial", "cloud"))
  for key in ("type", "index"):
    if key not in task:
      raise mistake("task", f'must have the key "{key}"', task)
  job, index = task["type"], task["index"]
  if job not in JOBS:
    raise mistake("task.type", f"must be one of {quoted(JOBS)}", job)
  if not _is_int(index):
    raise mistake("task.index", "must be an integer >= 0", index)
  job = canonical_job(job)
  if jobs and job != "evaluator" and index not in jobs.get(job, {}):
    raise mistake("task", "must be a task of the cluster", task)
  return job, index
