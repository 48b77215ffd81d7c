"""Runs one task of the cluster of `experiments.claims.one_node_feeds`.

That experiment starts this program once per task. The PS tasks of the spec are
the workers of the experiment: they hold no variables, and compute what the
client, the only worker of the spec, tells them to.
"""

import json
import os
import pathlib
import sys
import time

from experiments.claims import one_node_feeds
from experiments.support import traffic
from tf_replicas import cluster
from tf_replicas.drivers import server
from tf_replicas.runtime import processes
from tf_replicas.runtime import waiting

_TURNS = 4


def _serve(spec, task, directory: pathlib.Path) -> None:
  """Computes what the client sends, until the client has written its result.

  Args:
    spec: The cluster.
    task: The task of this process.
    directory: The directory where tasks leave files.
  """
  server.connect_server(spec, task)
  (directory / f"ready.{task.index}").touch()
  waiting.await_value(
    (directory / "found.json").exists,
    timeout_secs=600,
    what="waiting for the client",
    poll_secs=0.2,
  )


def _step_fn(devices, place: str):
  """Makes a function that computes a step on all workers.

  Args:
    devices: The devices of the workers.
    place: Where batches are made, one of `one_node_feeds.PLACES`.

  Returns:
    A function of the number of the step.
  """
  import tensorflow as tf

  client = "/job:worker/task:0/device:CPU:0"
  shape = one_node_feeds.BATCH_SHAPE

  @tf.function(autograph=False)
  def step(number):
    norms = []
    for index, device in enumerate(devices):
      with tf.device(client if place == "client" else device):
        seed = tf.stack([number, index])
        images = tf.random.stateless_uniform(shape, seed)
        batch = tf.image.per_image_standardization(images)
      with tf.device(device):
        weights = tf.random.stateless_normal([5, 5, 3, 8], [1, 2])
        with tf.GradientTape() as tape:
          tape.watch(weights)
          loss = tf.reduce_mean(tf.nn.conv2d(batch, weights, 2, "SAME") ** 2)
        norms.append(tf.norm(tape.gradient(loss, weights)))
    with tf.device(client):
      return tf.stack(norms)

  return step


def _drive(spec, task, directory: pathlib.Path, secs: float) -> None:
  """Makes steps with both kinds of graphs, in turns, and writes the numbers.

  Args:
    spec: The cluster.
    task: The task of this process.
    directory: The directory of the file `found.json`.
    secs: For how long to make steps of each kind.
  """
  import tensorflow as tf

  tasks = [t for t in spec.tasks() if t.job == "ps"]
  waiting.await_value(
    lambda: len(list(directory.glob("ready.*"))) == len(tasks),
    timeout_secs=120,
    what="waiting for the workers",
    poll_secs=0.1,
  )
  addresses = {t.index: spec.address(t) for t in tasks}
  tf.config.experimental_connect_to_cluster(
    tf.train.ClusterSpec(
      {"ps": addresses, "worker": {task.index: spec.address(task)}}
    ),
    job_name=task.job,
    task_index=task.index,
  )
  devices = [f"/job:ps/task:{t.index}/device:CPU:0" for t in tasks]
  steps = {p: _step_fn(devices, p) for p in one_node_feeds.PLACES}
  for step in steps.values():
    step(tf.constant(0)).numpy()
  totals = {p: [0, 0.0, 0] for p in steps}
  number = 0
  for _ in range(_TURNS):
    for place, step in steps.items():
      before, start = _sent(), time.monotonic()
      while time.monotonic() < start + secs / _TURNS:
        number += 1
        step(tf.constant(number)).numpy()
        totals[place][0] += 1
      totals[place][1] += time.monotonic() - start
      totals[place][2] += _sent() - before
  found = {
    place: {"steps_per_sec": count / took, "client_bytes": num_bytes / count}
    for place, (count, took, num_bytes) in totals.items()
  }
  part = directory / "found.part"
  part.write_text(json.dumps(found), encoding="utf-8")
  os.replace(part, directory / "found.json")


def _sent() -> int:
  """Returns the bytes that this process has sent so far."""
  return sum(traffic.sent({os.getpid(): "client"}).values())


def main(path: str, job: str, index: str, secs: str) -> None:
  """Runs this task.

  Args:
    path: The path of the cluster spec.
    job: The job of this task.
    index: The index of this task, as text.
    secs: For how long the client makes steps of each kind, as text.
  """
  spec = cluster.load(path)
  task = cluster.Task(job, int(index))
  directory = pathlib.Path(path).parent
  if job == "ps":
    _serve(spec, task, directory)
  else:
    _drive(spec, task, directory, float(secs))
  processes.exit_now(0)


if __name__ == "__main__":
  main(*sys.argv[1:])
