"""Trains layers that sleep, and records which versions of weights are used.

`claims.staleness_by_layer` starts this program once per task. Each layer has
one weight. Its gradient is -1 and the learning rate is 1, so every update adds
1 to the weight: its value is the number of updates that it has got, its
*version*. A layer's forward pass sleeps, and its backward pass sleeps twice as
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

from experiments.support import programs
from tf_replicas import cluster
from tf_replicas.runtime import processes

LAYERS = 8
FORWARD_SECS = 0.008
_BACKWARD = 2.0  # So many times the time of the forward pass.
_SPREAD = 0.2
_DONE = "done"
_SECS = 300.0


class Layers:
  """Layers that sleep, and remember which versions of their weights they got.

  Attributes:
    used: For each layer, the versions that its forward passes have used.
  """

  def __init__(self, seed: int):
    """Makes the layers.

    Args:
      seed: Decides how long the layers sleep.
    """
    self.used = [[] for _ in range(LAYERS)]
    self._random = np.random.default_rng(seed)

  def loss(self, weights: list[tf.Tensor], x: tf.Tensor) -> tf.Tensor:
    """Computes all layers, in order.

    Args:
      weights: A scalar per layer.
      x: float32 scalar.

    Returns:
      float32 scalar, whose gradients are -1 for each weight.
    """
    for number, weight in enumerate(weights):
      x = self._layer(number)(x, weight)
    return x

  def _layer(self, number: int):
    def forward(x, weight):
      self.used[number].append(float(weight))
      self._sleep(1.0)
      return x

    def backward(upstream):
      self._sleep(_BACKWARD)
      return upstream

    @tf.custom_gradient
    def layer(x, weight):
      y = tf.numpy_function(forward, [x, weight], tf.float32)
      y.set_shape([])

      def gradient(upstream):
        # Otherwise the top layer's backward pass would not await the forward
        # pass: the derivative of a layer does not depend on its output.
        with tf.control_dependencies([y]):
          slept = tf.numpy_function(backward, [upstream], tf.float32)
        slept.set_shape([])
        with tf.control_dependencies([slept]):
          return slept, tf.constant(-1.0)

      return y, gradient

    return layer

  def _sleep(self, times: float) -> None:
    factor = 1 + _SPREAD * self._random.uniform(-1, 1)
    time.sleep(times * FORWARD_SECS * factor)


def train_tf1(
  server: tf.compat.v1.train.Server,
  jobs: tf.train.ClusterSpec,
  index: int,
  steps: int,
  directory: pathlib.Path,
) -> np.ndarray:
  """Trains as a worker of an asynchronous TF1 program.

  Args:
    server: The TensorFlow server of this process.
    jobs: The cluster.
    index: The index of this worker.
    steps: The number of steps of this worker.
    directory: A directory for files by which workers wait for each other.

  Returns:
    The staleness of every gradient: float64 [steps, layers].
  """
  v1 = tf.compat.v1
  layers = Layers(index)
  setter = v1.train.replica_device_setter(
    cluster=jobs, worker_device=f"/job:worker/task:{index}"
  )
  with v1.device(setter):
    weights = [
      v1.get_variable(f"w{i}", initializer=0.0, use_resource=True)
      for i in range(LAYERS)
    ]
    read = [weight.read_value() for weight in weights]
    loss = layers.loss(read, tf.constant(0.0))
    optimizer = v1.train.GradientDescentOptimizer(1.0)
    staleness = []
    for weight, value, gradient in zip(
      weights, read, tf.gradients(loss, read), strict=True
    ):
      update = optimizer.apply_gradients([(gradient, weight)])
      with tf.control_dependencies([update]):
        staleness.append(weight.read_value() - 1.0 - value)
    start = v1.global_variables_initializer()
  workers = jobs.num_tasks("worker")
  with v1.Session(server.target) as session:
    if index == 0:
      session.run(start)
    programs.barrier(directory, "start", index, workers)
    found = [session.run([loss, staleness])[1] for _ in range(steps)]
    programs.barrier(directory, "end", index, workers)
  return np.array(found, np.float64)


def train_ours(spec, task, steps: int) -> np.ndarray | None:
  """Trains as a worker by the asynchronous rule of this library.

  A worker reads the weights at once after its update, so that between two reads
  a weight gets its own update, and those that make the gradient stale.

  Args:
    spec: The cluster.
    task: The task of this process.
    steps: The number of steps of each worker.

  Returns:
    The staleness of every gradient of this worker: float64 [n, layers].
  """
  import keras

  import tf_replicas
  from tf_replicas.drivers import between_graph

  workers = spec.num_tasks("worker")
  layers = Layers(task.index)

  def new_replica():
    return tf_replicas.Replica(
      [tf.Variable(0.0, name=f"w{i}") for i in range(LAYERS)],
      lambda parameters, x: layers.loss(parameters, tf.reduce_sum(x)),
      lambda *_: tf.data.Dataset.from_tensors(tf.zeros([1])).repeat(),
    )

  def new_rule():
    return tf_replicas.AsyncReplicasOptimizer(
      keras.optimizers.SGD(1.0), workers
    )

  driver = between_graph.BetweenGraph(spec, task, new_replica, new_rule)
  if driver.is_chief:
    while driver.step().global_step < steps * workers:
      pass
  else:
    driver.run_replica()
  driver.close()
  count = min(map(len, layers.used))
  versions = np.array([used[:count] for used in layers.used]).T
  return np.diff(versions, axis=0) - 1.0


def main(argv: list[str]) -> None:
  path, job, index, kind, steps = argv
  spec = cluster.load(path)
  task = cluster.Task(job, int(index))
  directory = pathlib.Path(path).parent
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
      programs.await_condition(
        lambda: (
          len(list(directory.glob("staleness.*"))) == jobs.num_tasks("worker")
        ),
        "the results of all workers",
      )
      processes.exit_now(0)
    found = train_tf1(server, jobs, task.index, int(steps), directory)
  # A whole file appears at once.
  part = directory / f"part.{task.index}"
  part.write_text(json.dumps(found.tolist()), encoding="utf-8")
  part.rename(directory / f"staleness.{task.index}")
  processes.exit_now(0)


if __name__ == "__main__":
  main(sys.argv[1:])
