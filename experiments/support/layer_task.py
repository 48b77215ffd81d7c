"""Trains layers that sleep, and records how stale their gradients are.

`claims.staleness_by_layer` starts this program once per task. Each layer has
one weight of two elements, the learning rate is 1, and the gradient of a weight
w is (-1, -w[0]). So w[0] is the number of updates that the weight has got, its
*version*, and w[1] is the sum of the versions from which these updates were
computed. The k-th update finds version k; so w[0] and w[1] at two moments tell
the mean staleness of the updates in between, wherever and whenever they are
applied. A layer's forward pass sleeps, and its backward pass sleeps twice as
long.

`tf1` is asynchronous training as TF1 programs had it: each variable is read
when the step begins, and its gradient is applied as soon as it is computed.
`ours` is the asynchronous rule of this library.
"""

import json
import pathlib
import sys
import time

import numpy as np
import tensorflow as tf

from experiments.claims import staleness_by_layer
from experiments.support import programs
from tf_replicas import cluster
from tf_replicas.runtime import processes

FORWARD_SECS = 0.004
_SPREAD = 0.2
_START = [0.0, 0.0]  # Of a weight.
# The shares of the updates between which the staleness is measured.
_FROM, _TO = 0.2, 0.8


class Layers:
  """Layers that sleep."""

  def __init__(self, seed: int):
    """Makes the layers.

    Args:
      seed: Decides how long the layers sleep.
    """
    self._random = np.random.default_rng(seed)

  def loss(self, weights: list[tf.Tensor], x: tf.Tensor) -> tf.Tensor:
    """Computes all layers, in order.

    Args:
      weights: float32 [2] per layer.
      x: float32 scalar.

    Returns:
      float32 scalar, whose gradient for a weight w is (-1, -w[0]).
    """
    for weight in weights:
      x = self._layer(x, weight)
    return x

  @tf.custom_gradient
  def _layer(self, x, weight):
    def forward(x):
      self._sleep(1.0)
      return x

    def backward(upstream):
      self._sleep(staleness_by_layer.BACKWARD)
      return upstream

    y = tf.numpy_function(forward, [x], tf.float32)
    y.set_shape([])

    def gradient(upstream):
      # Otherwise the top layer's backward pass would not await the forward
      # pass: the derivative of a layer does not depend on its output.
      with tf.control_dependencies([y]):
        slept = tf.numpy_function(backward, [upstream], tf.float32)
      slept.set_shape([])
      with tf.control_dependencies([slept]):
        return slept, -tf.stack([1.0, weight[0]])

    return y, gradient

  def _sleep(self, times: float) -> None:
    factor = 1 + _SPREAD * self._random.uniform(-1, 1)
    time.sleep(times * FORWARD_SECS * factor)


def staleness(begin: np.ndarray, end: np.ndarray) -> list[float]:
  """Computes the mean staleness of the updates between two moments.

  Args:
    begin: The weights at the first moment: float32 [layers, 2].
    end: The weights at the second moment.

  Returns:
    For each layer, the mean number of updates between the read of its weight
    and the update.
  """
  found = []
  for (first, before), (last, after) in zip(
    begin.astype(np.float64), end.astype(np.float64), strict=True
  ):
    # The updates found the versions `first`, `first` + 1, ..., `last` - 1.
    mean_found = (first + last - 1) / 2
    found.append(mean_found - (after - before) / (last - first))
  return found


def train_tf1(
  server: tf.compat.v1.train.Server,
  jobs: tf.train.ClusterSpec,
  index: int,
  steps: int,
  directory: pathlib.Path,
) -> list[float] | None:
  """Trains as a worker of an asynchronous TF1 program.

  Args:
    server: The TensorFlow server of this process.
    jobs: The cluster.
    index: The index of this worker.
    steps: The number of steps of this worker.
    directory: A directory for files by which workers wait for each other.

  Returns:
    In worker 0, the mean staleness by layer; in the others None.
  """
  v1 = tf.compat.v1
  layers = Layers(index)
  setter = v1.train.replica_device_setter(
    cluster=jobs, worker_device=f"/job:worker/task:{index}"
  )
  with v1.device(setter):
    weights = [
      v1.get_variable(f"w{i}", initializer=_START, use_resource=True)
      for i in range(staleness_by_layer.LAYERS)
    ]
    read = [weight.read_value() for weight in weights]
    loss = layers.loss(read, tf.constant(0.0))
    optimizer = v1.train.GradientDescentOptimizer(1.0, use_locking=True)
    train = optimizer.apply_gradients(
      list(zip(tf.gradients(loss, read), weights, strict=True))
    )
    start = v1.global_variables_initializer()
  workers = jobs.num_tasks("worker")
  moments = []
  with v1.Session(server.target) as session:
    if index == 0:
      session.run(start)
    programs.barrier(directory, "start", index, workers)
    for step in range(steps):
      if index == 0 and step in (int(_FROM * steps), int(_TO * steps)):
        moments.append(np.array(session.run(weights)))
      session.run(train)
    programs.barrier(directory, "end", index, workers)
  return staleness(*moments) if moments else None


def train_ours(spec, task, steps: int) -> list[float] | None:
  """Trains as a worker by the asynchronous rule of this library.

  Args:
    spec: The cluster.
    task: The task of this process.
    steps: The mean number of steps of a worker.

  Returns:
    In the chief, the mean staleness by layer; in the other workers None.
  """
  import keras

  import tf_replicas
  from tf_replicas.drivers import between_graph

  workers = spec.num_tasks("worker")
  layers = Layers(task.index)

  def new_replica():
    return tf_replicas.Replica(
      [
        tf.Variable(_START, name=f"w{i}")
        for i in range(staleness_by_layer.LAYERS)
      ],
      lambda parameters, x: layers.loss(parameters, tf.reduce_sum(x)),
      lambda *_: tf.data.Dataset.from_tensors(tf.zeros([1])).repeat(),
    )

  def new_rule():
    return tf_replicas.AsyncReplicasOptimizer(
      keras.optimizers.SGD(1.0), workers, use_locking=True
    )

  driver = between_graph.BetweenGraph(spec, task, new_replica, new_rule)
  moments = []
  if driver.is_chief:
    for share in (_FROM, _TO):
      while driver.step().global_step < share * steps * workers:
        pass
      values = driver.values()
      moments.append(
        np.array([values[f"w{i}"] for i in range(staleness_by_layer.LAYERS)])
      )
  else:
    driver.run_replica()
  driver.close()
  return staleness(*moments) if moments else None


def main(argv: list[str]) -> None:
  path, job, index, kind, steps = argv
  spec = cluster.load(path)
  task = cluster.Task(job, int(index))
  result = pathlib.Path(path).with_name("staleness.json")
  if kind == "ours":
    if job == "ps":
      programs.be_task(argv, lambda *_: None)
    found = train_ours(spec, task, int(steps))
  else:
    tf.compat.v1.disable_eager_execution()
    jobs = tf.train.ClusterSpec(spec.as_dict())
    server = tf.compat.v1.train.Server(
      jobs, job_name=job, task_index=task.index
    )
    if job == "ps":
      programs.await_condition(result.exists, "the result")
      processes.exit_now(0)
    found = train_tf1(server, jobs, task.index, int(steps), result.parent)
  if found is not None:
    part = result.with_suffix(".part")  # The whole file appears at once.
    part.write_text(json.dumps(found), encoding="utf-8")
    part.rename(result)
  processes.exit_now(0)


if __name__ == "__main__":
  main(sys.argv[1:])
