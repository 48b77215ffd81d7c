"""Runs one task of the cluster of `experiments.claims.update_once`.

That experiment starts this program once per task.
"""

import json
import pathlib
import sys
import threading
import time

import numpy as np

from experiments.claims import update_once
from experiments.support import programs

_READS_PER_CALL = 2000


def _replica(gradient: float):
  """Returns a model whose gradient is the same for all parameters.

  Args:
    gradient: The gradient.
  """
  import tensorflow as tf

  from tf_replicas.replica import model_replica

  def batches():
    while True:
      time.sleep(update_once.BATCH_SECS)
      yield ([gradient],)

  signature = (tf.TensorSpec([1], tf.float32),)
  return model_replica.Replica(
    [tf.Variable(tf.zeros([update_once.NUM_ELEMENTS]), name="x")],
    lambda parameters, batch: tf.reduce_sum(parameters[0]) * batch[0],
    lambda *_: tf.data.Dataset.from_generator(
      batches, output_signature=signature
    ),
  )


def _rule(update: str):
  import keras

  import tf_replicas

  sgd = keras.optimizers.SGD(update_once.RATES[update])
  count = len(update_once.GRADIENTS)
  if update == "sync":
    return tf_replicas.SyncReplicasOptimizer(sgd, count)
  return tf_replicas.AsyncReplicasOptimizer(sgd, count)


class _Watch:
  """Reads the variable on its PS task, again and again, in a thread."""

  def __init__(self, store):
    """Starts to read.

    Args:
      store: The parameter store with the variable.
    """
    import tensorflow as tf

    device = store.device_of_task(0)
    (variable,) = store.variables(0)

    @tf.function(autograph=False)
    def read():
      with tf.device(device):

        def body(number, lows, highs, times):
          value = variable.read_value()
          low, high = tf.reduce_min(value), tf.reduce_max(value)
          with tf.control_dependencies([low, high]):
            now = tf.timestamp()
          return (
            number + 1,
            lows.write(number, low),
            highs.write(number, high),
            times.write(number, now),
          )

        arrays = [
          tf.TensorArray(kind, _READS_PER_CALL)
          for kind in (tf.float32, tf.float32, tf.float64)
        ]
        _, *arrays = tf.while_loop(
          lambda number, *_: number < _READS_PER_CALL,
          body,
          [tf.constant(0), *arrays],
          parallel_iterations=1,
        )
        return [array.stack() for array in arrays]

    self._read = read
    self._has_ended = threading.Event()
    self._values, self._secs = [], []
    self._num_reads = self._num_mixed = 0
    self._look()
    self._thread = threading.Thread(target=self._go_on)
    self._thread.start()

  def end(self) -> dict:
    """Looks once more, and returns what was found, for `update_once`."""
    self._has_ended.set()
    self._thread.join()
    self._look()
    return {
      "num_reads": self._num_reads,
      "mixed": self._num_mixed,
      "values": self._values,
      "secs": self._secs,
    }

  def _go_on(self) -> None:
    while not self._has_ended.is_set():
      self._look()

  def _look(self) -> None:
    lows, highs, times = (tensor.numpy() for tensor in self._read())
    # Before the first update there is nothing to see.
    self._num_reads += len(lows) if len(self._values) > 1 else 0
    self._num_mixed += int(np.sum(lows != highs))
    for low, when in zip(lows.tolist(), times.tolist(), strict=True):
      if not self._values or low != self._values[-1]:
        self._values.append(low)
        self._secs.append(round(when, 6))


def run_client(spec, task, directory, update: str, num_updates: str) -> None:
  """Trains in this worker; the chief also watches the variable.

  Args:
    spec: The cluster.
    task: The task of this process.
    directory: The directory of the file `found.json`, which the chief writes.
    update: `sync` or `async`.
    num_updates: The number of updates, as text.
  """
  from tf_replicas.drivers import between_graph

  driver = between_graph.BetweenGraph(
    spec,
    task,
    lambda: _replica(update_once.GRADIENTS[task.index]),
    lambda: _rule(update),
  )
  if driver.is_chief:
    driver.stop_at(int(num_updates))
    watch = _Watch(driver.store)
    while driver.step().global_step < int(num_updates):
      pass
    found = {
      "num_updates": driver.global_step,
      "applied": [count.applied for count in driver.counts()],
      **watch.end(),
    }
    path = pathlib.Path(directory, "found.json")
    path.write_text(json.dumps(found), encoding="utf-8")
  else:
    driver.run_replica()
  driver.close()


if __name__ == "__main__":
  programs.be_task(sys.argv[1:], run_client)
