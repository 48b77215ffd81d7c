"""Trains on real processes whose batches take times that are given in advance.

Every task is a process, and parameters and gradients really travel between
them. Only the computation of a gradient is replaced: from the arrival of the
parameters on, a worker sleeps for the time that the batch takes. So a worker is
as fast as a machine of its own, although all of them share the cores of this
machine, and stragglers can be repeated.
"""

import json
import pathlib
import sys
import tempfile
import time
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

import numpy as np

from experiments import simulator
from experiments.simulator import compute_times
from experiments.simulator import recorded_run
from experiments.support import programs

_TIMES = "times.json"


def train(
  times: Sequence[Sequence[float]],
  num_steps: int,
  *,
  update: str = "sync",
  replicas_to_aggregate: int | None = None,
  max_lead: int | None = None,
  num_elements: int = 1,
  num_ps: int = 1,
  mbit_per_sec: float | None = None,
) -> list[recorded_run.Event]:
  """Trains on a cluster of PS tasks (parameter servers) and workers.

  Args:
    times: For each worker, the seconds that the gradient of each of its batches
      takes, in order. When they are used up, they are repeated.
    num_steps: The number of updates.
    update: The update rule, `sync` or `async`.
    replicas_to_aggregate: The number of gradients in a synchronous update; the
      other workers are backups. None: those of all workers.
    max_lead: By how many updates an asynchronous worker may be ahead of the
      slowest one. None: by any number.
    num_elements: The number of parameters, float32.
    num_ps: The number of PS tasks, each of which holds an equal share of the
      parameters.
    mbit_per_sec: The rate of the link of each task, in each direction, in 10^6
      bits per second, in a private network, which needs root. None: all tasks
      are on the loopback device, without a limit.

  Returns:
    The events of the timelines of all tasks, ordered by their start.
  """
  with tempfile.TemporaryDirectory() as directory:
    path = pathlib.Path(directory, _TIMES)
    path.write_text(json.dumps([list(own) for own in times]), encoding="utf-8")
    programs.run_tasks(
      "experiments.support.timed_training",
      [
        update,
        num_steps,
        replicas_to_aggregate or len(times),
        "" if max_lead is None else max_lead,
        num_elements,
      ],
      document={
        "cluster": {
          "ps": ["localhost:0"] * num_ps,
          "worker": ["localhost:0"] * len(times),
        },
        "variables": {
          "on": "ps",
          "placement": "partitioned",
          "min_shard_bytes": 4,  # So that all shards have the same size.
        },
      },
      directory=directory,
      timeout_secs=600,
      mbit_per_sec=mbit_per_sec,
    )
    return recorded_run.read(f"{directory}/timeline")


def train_by(
  rule: simulator.Sync | simulator.Async,
  times: compute_times.Distribution,
  num_workers: int,
  num_steps: int,
  *,
  seed: int,
  slowdown: Mapping[int, float] | None = None,
  **more: Any,
) -> list[recorded_run.Event]:
  """Trains by a rule of the simulator, with compute times from a distribution.

  Args:
    rule: The update rule.
    times: The distribution of the seconds that a gradient takes.
    num_workers: The number of workers.
    num_steps: The number of updates.
    seed: The seed of the times.
    slowdown: Maps the index of a worker to the factor by which it is slower.
    **more: More arguments of `train`.

  Returns:
    The events of the timelines of all tasks, ordered by their start.
  """
  draws = compute_times.Draws(times, num_workers, seed, slowdown or {})
  everyone = np.arange(num_workers)
  # A worker may use more batches than there are updates, if some are refused.
  drawn = np.transpose([draws.next(everyone) for _ in range(3 * num_steps)])
  if isinstance(rule, simulator.Sync):
    how = {"replicas_to_aggregate": rule.replicas_to_aggregate}
  else:
    how = {"update": "async", "max_lead": rule.max_lead}
  return train(drawn.tolist(), num_steps, **how, **more)


def _replica(times: Sequence[float], num_elements: int):
  """Returns a model whose gradients take the given times.

  Args:
    times: The seconds that the gradient of each batch takes.
    num_elements: The number of parameters.
  """
  import tensorflow as tf

  from tf_replicas.replica import model_replica

  def dataset_fn(*_):
    return tf.data.Dataset.from_tensor_slices(list(times)).batch(1).repeat()

  def sleep(_, secs):
    time.sleep(float(secs[0]))
    return np.float32(1)

  def loss_fn(parameters, secs):
    (x,) = parameters
    one = tf.numpy_function(sleep, [tf.stop_gradient(x[0]), secs], tf.float32)
    # The gradient, 1 everywhere, is known only after the sleep.
    return tf.reduce_sum(x) * tf.ensure_shape(one, [])

  return model_replica.Replica(
    [tf.Variable(tf.zeros([num_elements]), name="x")], loss_fn, dataset_fn
  )


def _rule(
  update: str, replicas_to_aggregate: int, max_lead: str, num_replicas: int
):
  import keras

  import tf_replicas
  from tf_replicas.rules.asynchronous import staleness

  sgd = keras.optimizers.SGD(0.1)
  if update == "sync":
    return tf_replicas.SyncReplicasOptimizer(
      sgd, replicas_to_aggregate, num_replicas
    )
  policies = [staleness.bounded_staleness(int(max_lead))] if max_lead else []
  return tf_replicas.AsyncReplicasOptimizer(
    sgd, num_replicas, policies=policies
  )


def run_client(
  spec,
  task,
  directory: pathlib.Path,
  update: str,
  num_steps: str,
  replicas_to_aggregate: str,
  max_lead: str,
  num_elements: str,
) -> None:
  """Trains in this worker; the chief ends it after `num_steps` updates.

  Args:
    spec: The cluster.
    task: The task of this process.
    directory: The directory for the timelines.
    update: `sync` or `async`.
    num_steps: The number of updates, as text.
    replicas_to_aggregate: The number of gradients in a synchronous update, as
      text.
    max_lead: By how many updates an asynchronous worker may be ahead, as text;
      empty: by any number.
    num_elements: The number of parameters, as text.
  """
  from tf_replicas.drivers import between_graph

  times = json.loads((directory / _TIMES).read_text(encoding="utf-8"))
  driver = between_graph.BetweenGraph(
    spec,
    task,
    lambda: _replica(times[task.index], int(num_elements)),
    lambda: _rule(update, int(replicas_to_aggregate), max_lead, len(times)),
    timeline_dir=str(directory / "timeline"),
  )
  if driver.is_chief:
    while driver.step().global_step < int(num_steps):
      pass
  else:
    driver.run_replica()
  driver.close()


if __name__ == "__main__":
  programs.be_task(sys.argv[1:], run_client)
