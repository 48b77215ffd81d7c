"""Runs one task of a cluster of `benchmarks.bandwidth`.

  python benchmarks/bandwidth_task.py KIND MODEL SPEC JOB INDEX

KIND says what trains:

* `<driver>,<rule>,<dtype on the wire>`: the library of the tree that PYTHONPATH
  names, such as `between_graph,sync,float32`;
* `strategy`: TensorFlow's `ParameterServerStrategy`, asynchronously;
* `tf1`: TF1's `SyncReplicasOptimizer`;
* `mirrored`: `MultiWorkerMirroredStrategy`, which has no parameter servers;
* `computing`: one process, which computes gradients and drops them.

MODEL is `cifar10` (the tutorial's network, 64 images per replica),
`inception_mini` (32 images), or one of these with another number of images,
such as `cifar10:1`. All kinds use the same code for the model, this
project's, and plain gradient descent without moving averages. The batches are
constant, so that the input costs nothing. The chief prints "ready". Then it
reads numbers of updates from its standard input. For each, it makes one update
and then so many others, and prints the seconds that these others took.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from collections.abc import Sequence
from typing import NamedTuple

import keras
import numpy as np
import tensorflow as tf

import tf_replicas
from tf_replicas import cluster

RATE = 0.001
BATCH = {"cifar10": 64, "inception_mini": 32}
_CLASSES = 10


class Network(NamedTuple):
  """A network, and how to compute its loss.

  Attributes:
    variables: The trainable variables.
    loss_fn: Maps (values of `variables`, images, labels) to the loss.
    images: A batch, float32 [batch, height, width, 3].
    labels: The classes of the images, int64 [batch].
  """

  variables: list[tf.Variable]
  loss_fn: Callable[..., tf.Tensor]
  images: np.ndarray
  labels: np.ndarray

  def gradients(
    self, values: Sequence[tf.Tensor], images: tf.Tensor, labels: tf.Tensor
  ) -> tuple[tf.Tensor, list[tf.Tensor]]:
    """Computes the loss and its gradients for values of the variables."""
    with tf.GradientTape(watch_accessed_variables=False) as tape:
      tape.watch(values)
      loss = self.loss_fn(values, images, labels)
    return loss, tape.gradient(loss, values)


def build(name: str) -> Network:
  """Builds a network, such as `cifar10` or `cifar10:1`, and makes a batch."""
  name, _, given = name.partition(":")
  batch = int(given or BATCH[name])
  constants = {}
  more = {}
  if name == "cifar10":
    from cifar10 import model as model_lib

    size = 24
    model = model_lib.build()
  else:
    from inception_mini import model as model_lib

    # The recipe "mini".
    size = 32
    model = model_lib.build(_CLASSES, image_size=size, width=0.25, depth=0.5)
    # The network reads the moving means and variances, but does not need them.
    constants = {
      v.path: np.zeros(v.shape, np.float32)
      for v in model.non_trainable_variables
      if model_lib.is_statistic(v.path)
    }
    more = {"dropout_seed": np.array([1, 2])}
  paths = [v.path for v in model.trainable_variables]

  @tf.autograph.experimental.do_not_convert
  def loss_fn(parameters, images, labels):
    values = dict(zip(paths, parameters, strict=True))
    values |= {path: tf.constant(value) for path, value in constants.items()}
    return model_lib.total_loss(model, values, images, labels, **more)[0]

  random = np.random.default_rng(0)
  shape = (batch, size, size, 3)
  return Network(
    model.trainable_variables,
    loss_fn,
    random.uniform(-1, 1, shape).astype(np.float32),
    random.integers(0, _CLASSES, batch),
  )


def serve_turns(make: Callable[[int, int], int | None]) -> None:
  """Makes updates when asked by standard input, and prints the seconds needed.

  One update more is made first, and the clock starts at its end: its gradients
  may have been computed before the turn.

  Args:
    make: Called with a number of updates, and the number of those that the next
      call will ask for at once. Makes the updates, and returns how many it has
      made if there were more.
  """
  make(2, 0)
  print("ready", flush=True)
  for line in sys.stdin:
    count = int(line)
    before = (make(1, count) or 1) - 1
    start = time.perf_counter()
    make(count - before, 0)
    secs = time.perf_counter() - start
    print(secs * count / (count - before), flush=True)


def ours(
  kind: str, model: str, spec: cluster.ClusterSpec, task: cluster.Task
) -> None:
  """Runs a task of the training with the library of the tree.

  Args:
    kind: `<driver>,<rule>,<dtype on the wire>`.
    model: The name of the network.
    spec: The cluster.
    task: The task of this process.
  """
  driver_name, rule, wire = kind.split(",")
  is_in_graph = driver_name == "in_graph"
  workers = spec.num_tasks("worker")
  if task.job == "ps" or (is_in_graph and task.job == "worker"):
    tf_replicas.serve(spec, task, num_clients=1 if is_in_graph else workers)
    return

  def replica_fn():
    network = build(model)

    def dataset_fn(num_shards, index, start):
      del num_shards, index, start
      batch = (network.images, network.labels)
      return tf.data.Dataset.from_tensors(batch).cache().repeat()

    return tf_replicas.Replica(network.variables, network.loss_fn, dataset_fn)

  def rule_fn():
    optimizer = keras.optimizers.SGD(RATE)
    wire_dtype = None if wire == "float32" else wire
    if rule == "async":
      return tf_replicas.AsyncReplicasOptimizer(
        optimizer, workers, wire_dtype=wire_dtype
      )
    return tf_replicas.SyncReplicasOptimizer(
      optimizer, workers, workers, wire_dtype=wire_dtype
    )

  driver_class = (
    tf_replicas.InGraph if is_in_graph else tf_replicas.BetweenGraph
  )
  driver = driver_class(spec, task, replica_fn, rule_fn)
  if not driver.is_chief:
    driver.run_replica()
    driver.close()
    return

  def make(count, more):
    first = step = driver.global_step
    if rule == "async":
      driver.stop_at(first + count + more)
    while step < first + count:
      step = driver.step(first + count - step).global_step
    return step - first

  serve_turns(make)
  driver.close()


def strategy(model: str, spec: cluster.ClusterSpec, task: cluster.Task) -> None:
  """Runs a task of `ParameterServerStrategy`, with this project's model code.

  Each variable is read once in a step, and not wherever it is used.

  Args:
    model: The name of the network.
    spec: The cluster.
    task: The task of this process.
  """
  tf_spec = tf.train.ClusterSpec(spec.as_dict())
  if task.job != "chief":
    tf.distribute.Server(
      tf_spec, job_name=task.job, task_index=task.index, protocol="grpc"
    ).join()
  resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
    tf_spec, rpc_layer="grpc", task_type="chief", task_id=0
  )
  scope = tf.distribute.ParameterServerStrategy(resolver)
  coordinator = tf.distribute.coordinator.ClusterCoordinator(scope)
  with scope.scope():
    network = build(model)
    optimizer = keras.optimizers.SGD(RATE)
    optimizer.build(network.variables)

  @tf.function
  def step(iterator):
    def replica(images, labels):
      values = [tf.convert_to_tensor(v.value) for v in network.variables]
      loss, gradients = network.gradients(values, images, labels)
      optimizer.apply(gradients, network.variables)
      return loss

    return scope.run(replica, args=next(iterator))

  def dataset_fn():
    batch = (network.images, network.labels)
    return tf.data.Dataset.from_tensors(batch).cache().repeat()

  iterators = iter(coordinator.create_per_worker_dataset(dataset_fn))

  def make(count, more):
    del more
    for _ in range(count):
      coordinator.schedule(step, args=(iterators,))
    coordinator.join()

  serve_turns(make)


def tf1(model: str, spec: cluster.ClusterSpec, task: cluster.Task) -> None:
  """Runs a task of a training with TF1's `SyncReplicasOptimizer`.

  Args:
    model: The name of the network.
    spec: The cluster.
    task: The task of this process.
  """
  from benchmarks import v1_session

  v1 = tf.compat.v1
  tf_cluster = v1.train.ClusterSpec(spec.as_dict())
  server = v1.train.Server(tf_cluster, job_name=task.job, task_index=task.index)
  if task.job == "ps":
    server.join()
  network = build(model)  # Eagerly, for its layers and initial values.
  initial = [v.numpy() for v in network.variables]
  workers = spec.num_tasks("worker")
  setter = v1.train.replica_device_setter(
    cluster=tf_cluster, worker_device=f"/job:worker/task:{task.index}"
  )
  is_chief = task.index == 0
  with tf.Graph().as_default(), v1.device(setter):
    step = v1.train.get_or_create_global_step()
    variables = [
      v1.get_variable(f"v{number}", initializer=value, use_resource=True)
      for number, value in enumerate(initial)
    ]
    values = [tf.convert_to_tensor(v) for v in variables]
    loss = network.loss_fn(
      values, tf.constant(network.images), tf.constant(network.labels)
    )
    gradients = v1.gradients(loss, values)
    optimizer = v1.train.SyncReplicasOptimizer(
      v1.train.GradientDescentOptimizer(RATE), workers, workers
    )
    train = optimizer.apply_gradients(
      list(zip(gradients, variables, strict=True)), global_step=step
    )
    with v1_session.synchronous(
      server, optimizer, is_chief=is_chief
    ) as session:

      def make(count, more):
        del more
        for _ in range(count):
          session.run([train, loss])

      _turns_of_one_of_many(make, is_chief=is_chief)


def mirrored(model: str, spec: cluster.ClusterSpec, task: cluster.Task) -> None:
  """Runs a worker of `MultiWorkerMirroredStrategy`.

  Args:
    model: The name of the network.
    spec: The cluster, of workers only.
    task: The task of this process.
  """
  os.environ["TF_CONFIG"] = json.dumps(
    {
      "cluster": {"worker": list(spec.addresses("worker"))},
      "task": {"type": "worker", "index": task.index},
    }
  )
  scope = tf.distribute.MultiWorkerMirroredStrategy()
  with scope.scope():
    network = build(model)
    optimizer = keras.optimizers.SGD(RATE)
    optimizer.build(network.variables)
  images, labels = tf.constant(network.images), tf.constant(network.labels)

  @tf.function
  def step():
    def replica():
      values = [tf.convert_to_tensor(v) for v in network.variables]
      loss, gradients = network.gradients(values, images, labels)
      # Keras' optimizer adds up the gradients of all replicas itself.
      gradients = [g / scope.num_replicas_in_sync for g in gradients]
      optimizer.apply(gradients, network.variables)
      return loss

    return scope.run(replica)

  def make(count, more):
    del more
    for _ in range(count):
      scope.experimental_local_results(step())[0].numpy()

  _turns_of_one_of_many(make, is_chief=task.index == 0)


def _turns_of_one_of_many(
  make: Callable[[int, int], None], *, is_chief: bool
) -> None:
  """Makes updates when the chief is asked; each update waits for all workers.

  The process has to be killed: its training does not end.

  Args:
    make: As for `serve_turns`.
    is_chief: Whether this process is asked. Others make updates for ever.
  """
  if is_chief:
    serve_turns(make)
    time.sleep(600)
  while True:
    make(1, 0)


def computing(model: str) -> None:
  """Computes gradients alone, as much as a replica computes per update."""
  network = build(model)
  values = [tf.convert_to_tensor(v) for v in network.variables]
  images, labels = tf.constant(network.images), tf.constant(network.labels)

  @tf.function
  def step(*values):  # Returns the gradients, or they would not be computed.
    return network.gradients(values, images, labels)

  def make(count, more):
    del more
    for _ in range(count):
      loss, _ = step(*values)
      loss.numpy()

  serve_turns(make)


def main(kind: str, model: str, document: str, job: str, index: str) -> None:
  """Runs the task that the command line describes.

  Args:
    kind: What trains; see the module.
    model: The name of the network.
    document: The cluster spec as JSON.
    job: The job of the task.
    index: The index of the task within the job.
  """
  spec = cluster.parse(json.loads(document))
  task = cluster.Task(job, int(index))
  if kind == "computing":
    computing(model)
  elif "," in kind:
    ours(kind, model, spec, task)
  else:
    {"strategy": strategy, "tf1": tf1, "mirrored": mirrored}[kind](
      model, spec, task
    )


if __name__ == "__main__":
  main(*sys.argv[1:])
