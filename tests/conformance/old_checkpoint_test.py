"""Tests that training resumes from checkpoints that commit 0490651 wrote.

The checkpoints were saved after three updates. Each test also trains the same
model from the start. At the last update, the state of the resumed training must
be equal to that of the other training.
"""

import pathlib
import threading

import keras
import numpy as np
import tensorflow as tf
from absl.testing import absltest
from absl.testing import parameterized

from tests.support import replicas
from tests.support import stores
from tf_replicas.drivers import one_machine
from tf_replicas.replica import model_replica
from tf_replicas.rules import base as rule_base
from tf_replicas.rules.sync import sync_replicas
from tf_replicas.session import checkpoints
from tf_replicas.store import moving_averages
from tf_replicas.store import placement

DIRECTORY = pathlib.Path(__file__).parents[1] / "data/checkpoint_0490651"
SAVED, LAST = 3, 5
BATCH = 4
VALUES = {
  "kernel": np.linspace(-1, 1, 12, dtype="float32").reshape(6, 2),
  "bias": np.float32([0.5, -0.5]),
  "moving_mean": np.float32([0.25]),
}
FEATURES = np.linspace(-2, 2, 24, dtype="float32").reshape(BATCH, 6)
LABELS = np.float32([[1, 0], [0, 1], [1, 1], [0, 0]])
NAMES = {
  "global_step",
  "examples_seen",
  "optimizer/began.sgd",
  *(f"variables/{name}" for name in VALUES),
  *(f"averages/{name}" for name in VALUES),
  *(f"slots/sgd/momentum/{name}" for name in ("kernel", "bias")),
}


def _replica():
  def loss_fn(parameters, x, y):
    kernel, bias, mean = parameters
    loss = tf.reduce_mean((x @ kernel + bias - y) ** 2)
    return loss, [mean * 0.9 + 0.1 * tf.reduce_mean(x, keepdims=True)[0]]

  def dataset_fn(num_shards, index, start):
    del num_shards, index, start
    return tf.data.Dataset.from_tensors((FEATURES, LABELS)).repeat()

  kernel, bias, mean = (
    tf.Variable(value, name=name, trainable=name != "moving_mean")
    for name, value in VALUES.items()
  )
  return model_replica.Replica(
    [kernel, bias], loss_fn, dataset_fn, statistics=[mean]
  )


def _rule():
  return sync_replicas.SyncReplicasOptimizer(
    keras.optimizers.SGD(0.1, momentum=0.9),
    1,
    variable_averages=moving_averages.MovingAverages(0.9),
  )


def _numpy(store):
  return {name: np.asarray(value) for name, value in store.state().items()}


def _train_on_one_machine(path):
  """Trains to the last step with `OneMachine`.

  Args:
    path: The checkpoint to resume from; None to train from the start.

  Returns:
    The restored state, None without a checkpoint; and the state at the end.
  """
  driver = one_machine.OneMachine(_replica, _rule)
  restored = None
  if path is not None:
    assert checkpoints.restore(path, driver.store).global_step == SAVED
    restored = _numpy(driver.store)
  while driver.global_step < LAST:
    driver.step()
  return restored, _numpy(driver.store)


def _train_on_two_tasks(path):
  """Resumes from a checkpoint and trains on, with variables on two PS tasks.

  Args:
    path: The checkpoint.

  Returns:
    The restored state, and the state at the end.
  """
  rule, replica = _rule(), _replica()
  specs = placement.from_variables(replica.shared)
  store = stores.attach(specs, 2, stores.cut(2))
  rule.build(store, is_sparse=[False] * len(specs))
  values = [tf.identity(v) for v in replica.shared]
  rule_base.create_or_resume(rule, store, values)
  assert checkpoints.restore(path, store).global_step == SAVED
  restored = _numpy(store)
  rule.start()
  iterator = iter(replica.dataset_fn(1, 0, 0))
  runner = replicas.Runner(rule, store, replica, iterator, 0)

  def contribute():
    runner.begin()
    for _ in range(LAST - SAVED):
      runner.step()

  thread = threading.Thread(target=contribute, daemon=True)
  thread.start()
  for _ in range(LAST - SAVED):
    rule.apply_updates()
  thread.join(60)
  rule.close()
  return restored, _numpy(store)


class OldCheckpointTest(stores.TestCase):
  @parameterized.product(
    written_by=("one_machine", "one_ps_task"),
    train=(_train_on_one_machine, _train_on_two_tasks),
  )
  def test_restores_and_trains_on(self, written_by, train):
    path = checkpoints.latest(DIRECTORY / written_by)
    self.assertEndsWith(path, f"-{SAVED}")
    saved = checkpoints.read(path)
    self.assertEqual(set(saved), NAMES)
    restored, trained = train(path)
    self.assertEqual(set(restored), NAMES)
    for name in NAMES - {"optimizer/began.sgd"}:
      np.testing.assert_array_equal(restored[name], saved[name], name)
    self.assertEqual(restored["examples_seen"], SAVED * BATCH)
    _, expected = _train_on_one_machine(None)
    self.assertEqual(trained["global_step"], LAST)
    self.assertEqual(trained["examples_seen"], LAST * BATCH)
    for name in NAMES - {"optimizer/began.sgd"}:
      np.testing.assert_allclose(
        trained[name], expected[name], rtol=1e-5, atol=1e-6, err_msg=name
      )
    # The test would not see slots or averages that are lost.
    self.assertTrue(np.any(saved["slots/sgd/momentum/kernel"]))
    self.assertTrue(
      np.any(saved["averages/kernel"] != saved["variables/kernel"])
    )


if __name__ == "__main__":
  absltest.main()
