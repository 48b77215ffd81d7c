"""Trains asynchronously with TensorFlow alone, for comparison.

  python -m benchmarks.plain_async SPEC BATCH_SIZE WARM_UP_STEPS STEPS
    [ours|once|threads]

It uses `tf.distribute.ParameterServerStrategy`, `ClusterCoordinator` and a
Keras optimizer as TensorFlow's tutorial on parameter servers does. It trains
the CIFAR-10 network on synthetic images, which this project's input pipeline
prepares. With `ours`, local response normalization is this project's, not
TensorFlow's. With `once`, moreover, every variable is fetched once a step, and
not wherever it is used. With `threads`, moreover, each server has as few
threads per op as the tasks of this project, whose launcher divides the cores
among the tasks. `benchmarks.throughput` starts this program.
"""

import json
import sys
import tempfile
import time

import keras
import tensorflow as tf

from benchmarks import plain_network
from cifar10 import config as config_lib
from cifar10 import inputs
from cifar10 import model as model_lib
from cifar10 import sources
from tf_replicas import cluster
from tf_replicas.cluster import local_cluster
from tf_replicas.programs import run_options


def serve(
  spec: cluster.ClusterSpec, job: str, index: int, helps: str = ""
) -> None:
  """Runs a TensorFlow server, as a PS or worker, until the process is ended.

  Args:
    spec: The cluster.
    job: The job of this process.
    index: The index of this process within the job.
    helps: "threads" gives the server fewer threads per op.
  """
  if helps == "threads":
    ours = run_options.Options(spec, train_dir=".")
    tf.config.threading.set_intra_op_parallelism_threads(ours.threads)
  server = tf.distribute.Server(
    tf.train.ClusterSpec(spec.as_dict()),
    job_name=job,
    task_index=index,
    protocol="grpc",
  )
  server.join()


def coordinate(
  spec: cluster.ClusterSpec,
  helps: str,
  batch_size: int,
  warm_up_steps: int,
  steps: int,
) -> None:
  """Trains as the coordinator of the cluster, and prints examples/sec.

  Args:
    spec: The cluster.
    helps: "", `ours`, `once` or `threads`: what is improved; see the module.
    batch_size: The number of examples of an update.
    warm_up_steps: The number of updates before the measurement.
    steps: The number of updates that are measured.
  """
  resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
    tf.train.ClusterSpec(spec.as_dict()), rpc_layer="grpc"
  )
  strategy = tf.distribute.ParameterServerStrategy(resolver)
  coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
  config = config_lib.Config(dataset="synthetic", batch_size=batch_size)
  with strategy.scope():
    model = model_lib.build() if helps else plain_network.build()
    optimizer = keras.optimizers.SGD(config.learning_rate)
    optimizer.build(model.trainable_variables)
  variables = model.trainable_variables
  paths = [variable.path for variable in variables]
  source = sources.find("synthetic")

  def dataset_fn():
    return inputs.train_dataset(source, batch_size=batch_size, seed=0)

  @tf.function
  def step(iterator):
    def replica(batch):
      with tf.GradientTape() as tape:
        parameters = [variable.value for variable in variables]
        if helps in ("once", "threads"):
          parameters = [tf.convert_to_tensor(p) for p in parameters]
          tape.watch(parameters)
        loss, _ = model_lib.total_loss(
          model,
          dict(zip(paths, parameters, strict=True)),
          *batch,
          decay_factor=config.weight_decay,
        )
      optimizer.apply(tape.gradient(loss, parameters), variables)
      return loss

    return strategy.run(replica, args=(next(iterator),))

  iterators = iter(coordinator.create_per_worker_dataset(dataset_fn))

  def run(count: int) -> None:
    for _ in range(count):
      coordinator.schedule(step, args=(iterators,))
    coordinator.join()

  run(warm_up_steps)
  start = time.perf_counter()
  run(steps)
  seconds = time.perf_counter() - start
  print(f"examples_per_sec {steps * batch_size / seconds:.1f}", flush=True)


def main(path: str, *numbers: str) -> None:
  """Starts the servers of a cluster on this machine, and coordinates them.

  Args:
    path: The path of the cluster spec.
    *numbers: Batch size, warm-up steps and steps; and optionally what is
      improved.
  """
  *sizes, helps = numbers if len(numbers) == 4 else (*numbers, "")
  spec = cluster.resolve_ports(cluster.load(path))

  def command(task):
    module = [sys.executable, "-m", "benchmarks.plain_async", "serve"]
    return [*module, spec.to_json(), task.job, str(task.index), helps]

  with tempfile.TemporaryDirectory() as log_dir:
    with local_cluster.LocalCluster(spec, command, log_dir=log_dir) as tasks:
      tasks.start()
      coordinate(spec, helps, *map(int, sizes))


if __name__ == "__main__":
  if sys.argv[1] == "serve":
    document, task_job, task_index, lent = sys.argv[2:]
    serve(cluster.parse(json.loads(document)), task_job, int(task_index), lent)
  else:
    main(*sys.argv[1:])
