"""Runs one task of TF1's `SyncReplicasOptimizer` on a small model.

`benchmarks.small_model` starts it for comparison, one process per task, as TF1
programs were. With `num_tokens=0`, the old class is synchronous from the first
step.
"""

import sys
import time

import numpy as np
import tensorflow as tf

from benchmarks import small_model
from benchmarks import v1_session

v1 = tf.compat.v1


def run_worker(
  server: v1.train.Server, cluster: v1.train.ClusterSpec, index: int
) -> None:
  """Trains the small model; the chief prints the milliseconds of a step.

  Args:
    server: The TensorFlow server of this process.
    cluster: The cluster.
    index: The index of this worker; worker 0 is the chief.
  """
  num_workers = len(cluster.as_dict()["worker"])
  setter = v1.train.replica_device_setter(
    cluster=cluster, worker_device=f"/job:worker/task:{index}"
  )
  with v1.device(setter):
    step = v1.train.get_or_create_global_step()
    x = tf.constant(small_model.batch()[0])
    y = tf.constant(small_model.batch()[1])
    for number, shape in enumerate(small_model.SHAPES):
      w = v1.get_variable(
        f"w{number}",
        initializer=small_model.initial(number, shape),
        use_resource=True,
      )
      b = v1.get_variable(
        f"b{number}",
        initializer=np.zeros(shape[1], np.float32),
        use_resource=True,
      )
      x = x @ w + b
      if number < len(small_model.SHAPES) - 1:
        x = tf.nn.relu(x)
    loss = tf.reduce_mean(
      tf.nn.sparse_softmax_cross_entropy_with_logits(labels=y, logits=x)
    )
    optimizer = v1.train.SyncReplicasOptimizer(
      v1.train.GradientDescentOptimizer(0.01), num_workers, num_workers
    )
    train = optimizer.minimize(loss, global_step=step)
  is_chief = index == 0
  with v1_session.synchronous(server, optimizer, is_chief=is_chief) as session:
    for _ in range(small_model.WARM_UP_STEPS):
      session.run([train, loss])
    start = time.perf_counter()
    for _ in range(small_model.STEPS):
      session.run([train, loss])
    if is_chief:
      seconds = time.perf_counter() - start
      # Closing the session takes two minutes; the launcher ends the task.
      print(f"ms_per_step {seconds / small_model.STEPS * 1e3:.3f}", flush=True)
    time.sleep(600)


def main(argv: list[str]) -> None:
  ps, workers, job, index = argv
  v1.disable_eager_execution()
  cluster = v1.train.ClusterSpec(
    {"ps": ps.split(","), "worker": workers.split(",")}
  )
  server = v1.train.Server(cluster, job_name=job, task_index=int(index))
  if job == "ps":
    server.join()
  else:
    run_worker(server, cluster, int(index))


if __name__ == "__main__":
  main(sys.argv[1:])
