"""Tests that synchronous updates use rows of a table whole, or not at all."""

import keras
import numpy as np
import tensorflow as tf
from absl.testing import absltest
from absl.testing import parameterized

from tests.rules.sync import sync_replicas_test
from tests.support import background
from tests.support import stores
from tf_replicas.rules import base as rule_base
from tf_replicas.rules.sync import sync_replicas
from tf_replicas.runtime import waiting
from tf_replicas.store import parameter_store
from tf_replicas.store import placement
from tf_replicas.store import tables

_ROWS, _STEPS = 1000, 12


class _Training(sync_replicas_test.Training):
  """Replica r contributes, for its batch b, 1 to row 100 r + b and to `own`."""

  def __init__(self, optimizer):
    home = tables.Home(stores.namespace(), 2, stores.device)
    table = tf.Variable(tf.zeros([0, 2]), name="table")
    zeros = keras.initializers.Zeros()
    tables.attach(table, "table", (_ROWS, 2), zeros, "modulo", home)
    self.rows = tables.rows_of(table)
    self.optimizer = optimizer
    specs = placement.from_variables(
      [table, tf.Variable(tf.zeros([1]), name="own")]
    )
    self.store = parameter_store.ParameterStore(
      specs,
      placement.plan(specs, placement.GreedyByBytes(2)),
      num_tasks=2,
      device_of_task=stores.device,
      namespace=stores.namespace(),
    )
    self.errors, self._threads, self._functions = [], [], {}
    self.releases = [[] for _ in range(optimizer.total_num_replicas)]
    self._paths = ["table", "own"]
    optimizer.build(self.store, is_sparse=[True, False])
    values = [tf.zeros([0, 2]), tf.zeros([1])]
    rule_base.create_or_resume(optimizer, self.store, values)

  def _compute(self, replica, step, parameters, number):
    del step, parameters
    ids = 100 * replica + tf.cast(number[None], tf.int64)
    gradient = tf.IndexedSlices(tf.ones([1, 2]), ids)
    return [gradient, tf.ones([1])], tf.constant(1.0), 1


class RowContributionsTest(stores.TestCase):
  @parameterized.parameters((2, 3), (1, 2), (2, 2), (3, 2))
  def test_rows_are_those_of_the_contributions_used(self, needed, replicas):
    optimizer = sync_replicas.SyncReplicasOptimizer(
      keras.optimizers.SGD(1.0), needed, replicas
    )
    training = _Training(optimizer)
    training.start()
    # Otherwise, some replicas could make all updates before the others begin.
    inbox = optimizer._contributions._inbox
    waiting.await_value(
      lambda: int(inbox.size()) == replicas,
      timeout_secs=background.DEADLINE_SECS,
      what="an offer of each replica",
    )
    updates = training.steps(_STEPS)
    training.stop()
    self.assertEqual(updates[-1].global_step, _STEPS)
    counts = optimizer.counts()
    expected = np.zeros([_ROWS, 2])
    used = 0
    for replica, released in enumerate(training.releases):
      for number, (is_used, _) in enumerate(released):
        used += is_used
        expected[100 * replica + number] = -is_used / needed
    self.assertEqual(used, needed * _STEPS)
    self.assertEqual(sum(c.applied for c in counts), used)
    if replicas > needed:
      refused = sum(len(r) for r in training.releases) - used
      self.assertGreater(refused, 0)
    tensor = training.store.row_tensors()["variables/table"]
    np.testing.assert_allclose(tensor.read(0, _ROWS), expected, rtol=1e-6)


if __name__ == "__main__":
  absltest.main()
