"""Runs one task of a cluster of `benchmarks.embedding`.

  python -m benchmarks.embedding_task KIND SPEC JOB INDEX ROWS

KIND is one of `benchmarks.embedding`. The chief prints "ready", then reads
numbers of updates from its standard input. For each number, it makes so many
updates, and prints the seconds that they took.
"""

import json
import sys

import tensorflow as tf

from benchmarks import live_cluster
from benchmarks import v1_session
from tf_replicas import cluster

COLUMNS, BATCH, IDS = 32, 256, 10
RATE = 0.1


def dataset(rows: int, seed: int) -> tf.data.Dataset:
  """Makes random batches: ids of table rows, and the numbers to predict.

  Args:
    rows: The number of rows of the table.
    seed: The seed of the random numbers.
  """

  def batch(number: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    seeds = tf.stack([number, tf.constant(seed, tf.int64)])
    ids = tf.random.stateless_uniform(
      [BATCH, IDS], seeds, 0, rows, dtype=tf.int64
    )
    return ids, tf.random.stateless_normal([BATCH, 1], seeds)

  batches = tf.data.Dataset.range(64).map(batch).cache()
  return batches.repeat().prefetch(2)


def loss_of(rows: tf.Tensor, kernel: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
  """Computes the loss: mean of the rows, a linear layer, and squared error.

  Args:
    rows: The rows that were looked up, [batch, ids, columns].
    kernel: The kernel of the linear layer.
    labels: The numbers to predict, [batch, 1].
  """
  outputs = tf.reduce_mean(rows, axis=1) @ kernel
  return tf.reduce_mean(tf.square(outputs - labels))


def ours(kind: str, spec: cluster.ClusterSpec, task: cluster.Task, rows: int):
  """Runs this task of a between-graph training with this library.

  Args:
    kind: `synchronous` or `asynchronous`.
    spec: The cluster.
    task: The task of this process.
    rows: The number of rows of the table.
  """
  import keras

  import tf_replicas

  if task.job == "ps":
    tf_replicas.serve(spec, task)
    return
  workers = len(spec.replicas)

  def replica_fn():
    table = tf_replicas.Table(rows, COLUMNS, name="table")
    kernel = tf.Variable(tf.ones([COLUMNS, 1]), name="kernel")

    def loss_fn(parameters, ids, labels):
      return loss_of(tf_replicas.lookup(table, ids), parameters[1], labels)

    def dataset_fn(num_shards, index, start):
      del num_shards, start
      return dataset(rows, index)

    return tf_replicas.Replica([table.variable, kernel], loss_fn, dataset_fn)

  def rule_fn():
    optimizer = keras.optimizers.SGD(RATE)
    if kind == "asynchronous":
      return tf_replicas.AsyncReplicasOptimizer(optimizer, workers)
    return tf_replicas.SyncReplicasOptimizer(optimizer, workers)

  driver = tf_replicas.BetweenGraph(spec, task, replica_fn, rule_fn)
  with driver:
    if not driver.is_chief:
      driver.run_replica()
      return

    def make(count: int) -> None:
      step = driver.global_step
      last = step + count
      driver.stop_at(last)
      while step < last:
        step = driver.step(last - step).global_step

    live_cluster.serve_turns(make)


def serve_strategy(spec: cluster.ClusterSpec, task: cluster.Task) -> None:
  """Runs a server of `ParameterServerStrategy` until the process is ended."""
  server = tf.distribute.Server(
    tf.train.ClusterSpec(spec.as_dict()),
    job_name=task.job,
    task_index=task.index,
    protocol="grpc",
  )
  server.join()


def strategy(spec: cluster.ClusterSpec, rows: int) -> None:
  """Runs the coordinator of `ParameterServerStrategy`, with a sharded variable.

  Keras 3.15 cannot train a sharded variable (`tape.gradient` fails). So the
  update is written by hand: plain gradient descent, as with this library.

  Args:
    spec: The cluster.
    rows: The number of rows of the table.
  """
  resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
    tf.train.ClusterSpec(spec.as_dict()), rpc_layer="grpc"
  )
  partitioners = tf.distribute.experimental.partitioners
  scope = tf.distribute.ParameterServerStrategy(
    resolver,
    variable_partitioner=partitioners.MinSizePartitioner(
      max_shards=spec.num_tasks("ps")
    ),
  )
  coordinator = tf.distribute.coordinator.ClusterCoordinator(scope)
  with scope.scope():
    table = tf.Variable(
      lambda: tf.random.stateless_uniform([rows, COLUMNS], [1, 2], -0.05, 0.05),
      shape=[rows, COLUMNS],
      dtype=tf.float32,
    )
    kernel = tf.Variable(tf.ones([COLUMNS, 1]))

  @tf.function
  def step(iterator):
    def replica(ids, labels):
      with tf.GradientTape() as tape:
        found = tf.nn.embedding_lookup(table, ids)
        loss = loss_of(found, tf.convert_to_tensor(kernel), labels)
      parts = [*table.variables, kernel]
      gradients = tape.gradient(loss, parts)
      for variable, gradient in zip(parts, gradients, strict=True):
        if isinstance(gradient, tf.IndexedSlices):
          variable.scatter_sub(
            tf.IndexedSlices(RATE * gradient.values, gradient.indices)
          )
        else:
          variable.assign_sub(RATE * gradient)
      return loss

    return scope.run(replica, args=next(iterator))

  iterators = iter(
    coordinator.create_per_worker_dataset(lambda: dataset(rows, 0))
  )

  def make(count: int) -> None:
    for _ in range(count):
      coordinator.schedule(step, args=(iterators,))
    coordinator.join()

  live_cluster.serve_turns(make)


def tf1(spec: cluster.ClusterSpec, task: cluster.Task, rows: int) -> None:
  """Runs this task of a training with TF1's `SyncReplicasOptimizer`.

  The table is partitioned over the PS tasks, as TF1's guide to embeddings does.
  A replica moves only the rows that its batch looks up.

  Args:
    spec: The cluster.
    task: The task of this process.
    rows: The number of rows of the table.
  """
  v1 = tf.compat.v1
  tf_cluster = v1.train.ClusterSpec(spec.as_dict())
  server = v1.train.Server(tf_cluster, job_name=task.job, task_index=task.index)
  if task.job == "ps":
    server.join()
  workers, is_chief = spec.num_tasks("worker"), task.index == 0
  here = f"/job:worker/task:{task.index}"
  setter = v1.train.replica_device_setter(
    cluster=tf_cluster, worker_device=here
  )
  with tf.Graph().as_default(), v1.device(setter):
    step = v1.train.get_or_create_global_step()
    with v1.device(f"{here}/device:CPU:0"):
      batches = v1.data.make_initializable_iterator(dataset(rows, task.index))
      ids, labels = batches.get_next()
    v1.add_to_collection(v1.GraphKeys.TABLE_INITIALIZERS, batches.initializer)
    table = v1.get_variable(
      "table",
      [rows, COLUMNS],
      initializer=v1.random_uniform_initializer(-0.05, 0.05),
      partitioner=v1.fixed_size_partitioner(spec.num_tasks("ps")),
      use_resource=True,
    )
    kernel = v1.get_variable(
      "kernel",
      [COLUMNS, 1],
      initializer=v1.ones_initializer(),
      use_resource=True,
    )
    found = v1.nn.embedding_lookup(table, ids, partition_strategy="div")
    optimizer = v1.train.SyncReplicasOptimizer(
      v1.train.GradientDescentOptimizer(RATE), workers, workers
    )
    loss = loss_of(found, tf.convert_to_tensor(kernel), labels)
    train = optimizer.minimize(loss, global_step=step)
    with v1_session.synchronous(
      server, optimizer, is_chief=is_chief
    ) as session:

      def make(count: int) -> None:
        for _ in range(count):
          session.run([train, loss])

      if is_chief:
        make(1)
        live_cluster.serve_turns(make)
      while True:  # It waits for the chief in each step, until it is ended.
        make(1)


def one_process(rows: int) -> None:
  """Trains in this process alone, with all cores.

  Args:
    rows: The number of rows of the table.
  """
  import keras

  table = tf.Variable(
    tf.random.stateless_uniform([rows, COLUMNS], [1, 2], -0.05, 0.05)
  )
  kernel = tf.Variable(tf.ones([COLUMNS, 1]))
  optimizer = keras.optimizers.SGD(RATE)
  optimizer.build([table, kernel])

  @tf.function
  def step(ids, labels):
    with tf.GradientTape() as tape:
      found = tf.nn.embedding_lookup(table, ids)
      loss = loss_of(found, tf.convert_to_tensor(kernel), labels)
    gradients = tape.gradient(loss, [table, kernel])
    optimizer.apply(gradients, [table, kernel])
    return loss

  batches = iter(dataset(rows, 0))

  def make(count: int) -> None:
    for _ in range(count):
      loss = step(*next(batches))
    loss.numpy()

  live_cluster.serve_turns(make)


def main(kind: str, document: str, job: str, index: str, rows: str) -> None:
  """Runs the task that the command line describes.

  Args:
    kind: One of `benchmarks.embedding`.
    document: The cluster spec as JSON.
    job: The job of the task.
    index: The index of the task within the job.
    rows: The number of rows of the table.
  """
  spec = cluster.parse(json.loads(document))
  task = cluster.Task(job, int(index))
  if kind == "one process":
    one_process(int(rows))
  elif kind == "TF1":
    tf1(spec, task, int(rows))
  elif kind != "strategy":
    ours(kind, spec, task, int(rows))
  elif job == "chief":
    strategy(spec, int(rows))
  else:
    serve_strategy(spec, task)


if __name__ == "__main__":
  main(*sys.argv[1:])
