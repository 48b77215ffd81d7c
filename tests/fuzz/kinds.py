"""The kinds of inputs that are damaged, and how each is read."""

import copy
import dataclasses
import io
import json
import os
import pathlib
import random
import shutil
import tarfile
from collections.abc import Callable
from collections.abc import Iterator
from typing import Any
from unittest import mock

from absl import flags

ROOT = pathlib.Path(__file__).resolve().parents[2]

# Values that are wrong, or surprising, in most places of a JSON document.
_JSON = (
  *(None, True, 0, -1, 1.5, 10**30, float("nan"), "", "x", "a:1", "\u0000"),
  *([], {}, [[]], [None], {"": 0}, {"0": "a:1"}, ["a:1", "a:1"], [{}] * 3),
)
_JSON_KEYS = ("", "x", "worker:7", "0", "on")


@dataclasses.dataclass(frozen=True)
class Kind:
  """A kind of input.

  Attributes:
    draw: Makes a damaged input from random numbers.
    read: Reads a damaged input.
    documented: The types of errors that `read` may raise.
  """

  draw: Callable[[random.Random], Any]
  read: Callable[[Any], object]
  documented: tuple[type[BaseException], ...]


def damaged(content: bytes, rng: random.Random) -> bytes:
  """Damages the content of a file in one to three places."""
  for _ in range(rng.randint(1, 3)):
    at = rng.randrange(len(content) + 1)
    extra = rng.randbytes(rng.randint(1, 8))
    content = rng.choice(
      (
        content[:at] + extra + content[at + len(extra) :],  # Other bytes.
        content[:at] + content[at + len(extra) :],  # Fewer.
        content[:at] + extra + content[at:],  # More.
        content[: at + 64] + content[at:],  # Some twice.
        content[:at],  # Not to the end.
      )
    )
  return content


def _damaged_text(text: str, rng: random.Random) -> str:
  content = damaged(text.encode("utf-8", "surrogateescape"), rng)
  return content.decode("utf-8", "surrogateescape")


def _damaged_json(documents: list[object], rng: random.Random) -> str:
  """Makes a JSON text with values, keys or characters that are wrong."""
  document = copy.deepcopy(rng.choice(documents))
  for _ in range(rng.randint(0, 2)):
    places = list(_places(document))
    if not places:
      break
    owner, key = rng.choice(places)
    if isinstance(owner, dict) and rng.random() < 0.5:
      key = rng.choice(_JSON_KEYS)
    owner[key] = copy.deepcopy(rng.choice(_JSON))
  text = json.dumps(document)
  return text if rng.random() < 0.7 else _damaged_text(text, rng)


def _places(document: object) -> Iterator[tuple[Any, Any]]:
  """Yields (container, key) of all values within a JSON document."""
  if isinstance(document, dict):
    items = list(document.items())
  elif isinstance(document, list):
    items = list(enumerate(document))
  else:
    return
  for key, value in items:
    yield document, key
    yield from _places(value)


def _cluster_spec(folder: pathlib.Path) -> Kind:
  """Cluster specs, as files."""
  from tf_replicas import cluster

  paths = sorted((ROOT / "cluster_specs").glob("*.json"))
  path = folder / "spec.json"

  def read(text):
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    cluster.resolve_ports(cluster.load(str(path)))

  good = [json.loads(each.read_text(encoding="utf-8")) for each in paths]
  return Kind(
    lambda rng: _damaged_json(good, rng), read, (cluster.ClusterError,)
  )


def _environment(folder: pathlib.Path) -> Kind:
  """Environment variables that say which task this process is."""
  del folder
  from tf_replicas import cluster
  from tf_replicas.cluster import environment

  jobs = {"ps": ["a:1"], "worker": ["b:1", "c:2"]}
  config = {"cluster": jobs, "task": {"type": "worker", "index": 1}}
  slurm = {
    "SLURM_JOB_ID": "17",
    "SLURM_PROCID": "1",
    "SLURM_NTASKS": "4",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_NODELIST": "node[1-2,07]",
    "SLURM_JOB_NODELIST": "node[1-2,07]",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_TASKS_PER_NODE": "2(x2)",
    "SLURM_LOCALID": "1",
  }
  own = {
    "TF_REPLICAS_CLUSTER_SPEC": json.dumps(jobs),
    "TF_REPLICAS_TASK": "worker:1",
  }

  def draw(rng):
    kind = rng.choice(["TF_CONFIG", "slurm", "own"])
    if kind == "TF_CONFIG":
      return {kind: _damaged_json([config], rng)}
    variables = dict(slurm if kind == "slurm" else own)
    for _ in range(rng.randint(1, 2)):
      name = rng.choice(list(variables))
      if rng.random() < 0.1:
        del variables[name]
      else:
        variables[name] = _damaged_text(variables[name], rng)
    return variables

  return Kind(draw, environment.role, (cluster.ClusterError,))


def _flags(folder: pathlib.Path) -> Kind:
  """Flags of the training binary for clusters."""
  from cifar10 import training_flags
  from tf_replicas.programs import command_line

  training_flags.define()
  command_line.define_cluster_flags()
  values = flags.FLAGS
  own = [
    name
    for module, some in values.flags_by_module_dict().items()
    if not module.startswith("absl")
    for name in (flag.name for flag in some)
  ]
  words = ("", "0", "-1", "1", "2.5", "nan", "inf", "1e400", "None", "async")
  words += ("sync", "true", "x", "a,b", "/", "9" * 40, "é", "--", "=1")

  def draw(rng):
    return [
      f"--{rng.choice(own)}={rng.choice(words)}"
      for _ in range(rng.randint(0, 4))
    ]

  first = ["program", f"--train_dir={folder}", "--cluster_spec=two_hosts"]
  first += ["--job_name=worker", "--task_index=0"]

  def read(arguments):
    for name in own:
      values[name].unparse()
    values([*first, *arguments])
    training_flags.config(command_line.cluster_options())

  return Kind(draw, read, (flags.Error, ValueError))


def _cifar10(folder: pathlib.Path) -> Kind:
  """Files of the binary CIFAR-10 layout, with three images each."""
  from cifar10 import sources

  mock.patch.object(sources, "RECORDS_PER_FILE", 3).start()
  good = bytes([3, *[7] * (sources.RECORD_BYTES - 1)]) * 3
  names = sources.TRAIN_FILES + sources.TEST_FILES
  for name in names:
    (folder / name).write_bytes(good)

  def read(case):
    name, content = case
    path = folder / name
    path.write_bytes(content)
    try:
      source = sources.find("cifar10", str(folder))
      for split in ("train", "test"):
        images, labels = source.read(split)
        assert len(images) == len(labels)
        assert labels.numpy().max() < 10
    finally:
      path.write_bytes(good)

  def draw(rng):
    if rng.random() < 0.3:  # Only a label.
      return rng.choice(names), rng.randbytes(1) + good[1:]
    return rng.choice(names), damaged(good, rng)

  return Kind(draw, read, (sources.DataError,))


def _tfrecords(folder: pathlib.Path) -> Kind:
  """Shards of TFRecords of `inception_mini`."""
  import tensorflow as tf

  from inception_mini import records
  from inception_mini import sources

  def example(label):
    pixels = tf.zeros([3, 4, 3], tf.uint8) + tf.cast(label, tf.uint8)
    return records.serialize(
      tf.io.encode_png(pixels).numpy(),
      file_format="PNG",
      height=3,
      width=4,
      label=label,
      text="thing",
      filename="a.png",
      boxes=[(0.1, 0.2, 0.5, 0.75)],
    )

  def write(path, contents):
    with tf.io.TFRecordWriter(str(path)) as writer:
      for content in contents:
        writer.write(content)

  paths = {
    subset: folder / records.shard_name(subset, 0, 1)
    for subset in ("train", "validation")
  }
  for path in paths.values():
    write(path, [example(1), example(2)])
  good = paths["train"].read_bytes()
  serialized = example(3)

  def read(case):
    is_whole, content = case
    if is_whole:  # The record is intact, but not what it holds.
      write(paths["train"], [content, example(1)])
    else:
      paths["train"].write_bytes(content)
    source = sources.find("records", str(folder))
    for raw in source.read("train", tf.constant(0, tf.int64)):
      source.decode(raw)

  def draw(rng):
    is_whole = rng.random() < 0.5
    return is_whole, damaged(serialized if is_whole else good, rng)

  return Kind(draw, read, (sources.DataError, tf.errors.OpError))


def _imagenet(folder: pathlib.Path) -> Kind:
  """Annotations, a CSV file with boxes, and a tar file of tar files."""
  from inception_mini import bounding_boxes
  from inception_mini import image_folders
  from inception_mini import imagenet

  (folder / "boxes").mkdir()
  inner = io.BytesIO()
  with tarfile.open(fileobj=inner, mode="w") as tar:
    for i in range(3):
      member = tarfile.TarInfo(f"n01440764_{i}.JPEG")
      member.size = 700
      tar.addfile(member, io.BytesIO(bytes(700)))
  outer = io.BytesIO()
  with tarfile.open(fileobj=outer, mode="w") as tar:
    member = tarfile.TarInfo("n01440764.tar")
    member.size = len(inner.getvalue())
    tar.addfile(member, io.BytesIO(inner.getvalue()))
  good = {
    "boxes/a.xml": b"""<?xml version="1.0"?>
<annotation><size><width>200</width><height>100</height></size>
<object><name>n01440764</name><bndbox><xmin>20</xmin><ymin>10</ymin>
<xmax>100</xmax><ymax>75</ymax></bndbox></object></annotation>""",
    "boxes.csv": b"a.JPEG,0.1,0.1,0.5,0.75\nb.JPEG,0.0,0.0,1.0,1.0\n",
    "train.tar": outer.getvalue(),
  }

  def read(case):
    name, content = case
    (folder / name).write_bytes(content)
    if name == "train.tar":
      for file in imagenet.scan(str(folder / name)):
        file.read()
    else:
      bounding_boxes.read(str(folder / name.removesuffix("/a.xml")))

  def draw(rng):
    name = rng.choice(sorted(good))
    return name, damaged(good[name], rng)

  return Kind(draw, read, (bounding_boxes.DataError, image_folders.FolderError))


def _checkpoint_files(folder: pathlib.Path, save, read, documented) -> Kind:
  """Files of a checkpoint.

  Args:
    folder: A directory of one's own.
    save: Writes a checkpoint in a directory, and returns its path.
    read: Reads the checkpoint at a path.
    documented: The types of errors that `read` may raise.
  """
  good = folder / "good"
  good.mkdir()
  name = pathlib.Path(save(str(good))).name
  contents = {path.name: path.read_bytes() for path in good.iterdir()}

  def draw(rng):
    changed = rng.choice(sorted(contents))
    if rng.random() < 0.05:
      return changed, None
    return changed, damaged(contents[changed], rng)

  def read_case(case):
    changed, content = case
    bad = folder / "bad"
    shutil.rmtree(bad, ignore_errors=True)
    shutil.copytree(good, bad)
    (bad / changed).unlink()
    if content is not None:
      (bad / changed).write_bytes(content)
    read(str(bad / name))

  return Kind(draw, read_case, documented)


def _checkpoint(folder: pathlib.Path) -> Kind:
  """Checkpoints, and the file that says which is the newest."""
  import numpy as np

  from tf_replicas.session import checkpoints

  def save(directory):
    values = {
      "global_step": np.int64(3),
      "examples_seen": np.int64(6),
      "variables/w": np.arange(300, dtype=np.float32).reshape(30, 10),
      "variables/b": np.zeros([10], np.float16),
    }
    return checkpoints.save(directory, values)

  def read(path):
    checkpoints.latest(os.path.dirname(path))
    checkpoints.read(path)

  return _checkpoint_files(folder, save, read, (checkpoints.CheckpointError,))


class _Rows:
  """A tensor that is restored in blocks of rows."""

  def __init__(self, shape, dtype):
    self.shape, self.dtype = shape, dtype

  def assign(self, begin, rows):
    assert rows.shape[1:] == self.shape[1:]


def _table(folder: pathlib.Path) -> Kind:
  """Checkpoints with tensors that are saved in blocks of rows."""
  import numpy as np
  import tensorflow as tf

  from tf_replicas.runtime import row_files
  from tf_replicas.session import checkpoints

  values = {"global_step": np.int64(3), "examples_seen": np.int64(6)}
  rows = np.arange(60, dtype=np.float32).reshape(20, 3)

  class State:
    def state(self):
      return values

    def load_state(self, loaded):
      assert loaded.keys() == values.keys()

  def save(directory):
    path = checkpoints.save(directory, values)

    def writer(number):
      name = row_files.stride_name("table", number, 2)
      place = row_files.slice_of((10, 3), 0, 10)
      return lambda path: row_files.save(path, name, place, rows[number::2])

    row_files.write(checkpoints.tables_of(path), [writer(0), writer(1)])
    return path

  def read(path):
    table = _Rows(tf.TensorShape([20, 3]), tf.float32)
    checkpoints.restore(path, State(), row_tensors={"table": table})

  return _checkpoint_files(folder, save, read, (checkpoints.CheckpointError,))


def _finished(folder: pathlib.Path) -> Kind:
  """The record that a run leaves when it has ended."""
  from tf_replicas.session import checkpoints

  def save(directory):
    record = checkpoints.Finished(
      7, "model.ckpt-7", "2026-01-31 12:00:00.123456"
    )
    checkpoints.write_finished(directory, record)
    return os.path.join(directory, "any")

  def read(path):
    checkpoints.read_finished(os.path.dirname(path))

  return _checkpoint_files(folder, save, read, (checkpoints.CheckpointError,))


def _timeline(folder: pathlib.Path) -> Kind:
  """Timelines of a run, as the plots and the simulator read them."""
  from experiments import timeline
  from experiments.simulator import recorded_run

  path = folder / "worker_0.jsonl"
  kinds = ["read", "compute", "hand_over", "wait", "apply"] * 4
  lines = [
    {
      "task": "worker:0",
      "kind": kind,
      "start": float(i),
      "end": i + 0.5,
      "step": i // 5,
      "batch": i // 5,
    }
    for i, kind in enumerate(kinds)
  ]
  fields = recorded_run._FIELDS
  good = [{name: line.get(name, 0) for name in fields} for line in lines]

  def draw(rng):
    texts = [json.dumps(line) for line in good]
    for _ in range(rng.randint(1, 3)):
      at = rng.randrange(len(texts))
      texts[at] = _damaged_json([good[at]], rng)
    return "\n".join(texts) + "\n"

  def read(text):
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    events = recorded_run.read(str(folder))
    timeline.window(events, 2, None)
    timeline.to_trace(events)
    timeline.shares(events)
    recorded_run.fit(events, read_bytes=100.0)

  return Kind(draw, read, (ValueError,))


# Makes a kind, given a directory for its files.
KINDS = {
  "cluster_spec": _cluster_spec,
  "environment": _environment,
  "flags": _flags,
  "cifar10": _cifar10,
  "tfrecords": _tfrecords,
  "imagenet": _imagenet,
  "checkpoint": _checkpoint,
  "table": _table,
  "finished": _finished,
  "timeline": _timeline,
}
