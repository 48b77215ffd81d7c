"""Tables under each update rule, in one process."""

import contextlib
import threading

import keras
import numpy as np
import tensorflow as tf
from absl.testing import absltest
from absl.testing import parameterized

from tests.rules import switching_test
from tests.support import stores
from tf_replicas.replica import embeddings
from tf_replicas.replica import model_replica
from tf_replicas.rules import switch_conditions
from tf_replicas.rules import switching
from tf_replicas.rules.asynchronous import async_replicas
from tf_replicas.rules.asynchronous import staleness
from tf_replicas.rules.sync import sync_replicas
from tf_replicas.store import placement
from tf_replicas.store import tables

RATE, STEPS, NUM_SYNC = 0.5, 20, 6
ROWS, COLUMNS = 9, 2
# The rows that each of two replicas looks up in every batch. Rows with an even
# index are on PS task 0, the others on task 1.
IDS = ([0, 1], [1, 4])


def _async(inner, *policies, **options):
  return async_replicas.AsyncReplicasOptimizer(
    inner, 2, policies=policies, **options
  )


def _sync(inner):
  return sync_replicas.SyncReplicasOptimizer(inner, 2, 2)


def _switching(inner):
  return switching.SwitchingOptimizer(
    [_sync(inner), _async(inner)], switch_conditions.at_step(NUM_SYNC)
  )


RULES = {
  "sync": _sync,
  "async": _async,
  "bounded_staleness": lambda o: _async(o, staleness.bounded_staleness(1)),
  "drop_stale": lambda o: _async(o, staleness.drop_stale(1)),
  "staleness_aware": lambda o: _async(o, staleness.staleness_aware()),
  "switching": _switching,
}


class _Together:
  """A gate that lets both replicas compute a batch, then both the next one.

  Otherwise one of them might make all asynchronous updates.
  """

  def __init__(self):
    self._barrier = threading.Barrier(2)

  def acquire(self):
    # Broken by `open`, once the other replica may not come any more.
    with contextlib.suppress(threading.BrokenBarrierError):
      self._barrier.wait(timeout=600)

  def open(self):
    self._barrier.abort()


class Training(switching_test.Training):
  """Trains a table and an ordinary variable.

  The gradient of each row that a replica looks up is 1. So is that of the
  ordinary variable.
  """

  IS_SPARSE = [True, False]

  def _new_store(self):
    home = tables.Home(stores.namespace(), 2, stores.device)
    with tables.home(home):
      self._table = embeddings.Table(
        ROWS, COLUMNS, name="table", initializer="zeros"
      )
    self._variables = [self._table.variable, tf.Variable(0.0, name="own")]
    specs = placement.from_variables(self._variables)
    return stores.attach(specs, 2), [tf.zeros([0, COLUMNS]), tf.zeros([])]

  def _model(self, gradient):
    """A replica that always looks up the same rows."""
    dataset = tf.data.Dataset.from_tensors((tf.constant(gradient),)).repeat()

    def loss_fn(parameters, ids):
      rows = embeddings.lookup(self._table, ids)
      return tf.reduce_sum(rows) + parameters[1]

    return model_replica.Replica(self._variables, loss_fn, lambda *_: dataset)

  def rows(self):
    return self.store.row_tensors()["variables/table"].read(0, ROWS)


def _moved(counts, factor):
  """How far asynchronous updates of one replica have moved each of its rows."""
  return -RATE * sum(
    number * factor(age) for age, number in enumerate(counts.staleness)
  )


class TablesTest(stores.TestCase):
  def _train(self, rule):
    gate = _Together()
    self.addCleanup(gate.open)
    training = Training(rule, IDS, gates=[gate] * 2)
    self.addCleanup(rule.close)
    training.run_to(STEPS)
    gate.open()
    training.stop()
    self.assertEqual(int(training.store.global_step), STEPS)
    return training

  @parameterized.parameters(*RULES)
  def test_the_rows_that_were_looked_up_move_and_no_others(self, name):
    rule = RULES[name](keras.optimizers.SGD(RATE))
    training = self._train(rule)
    num_sync = {"sync": STEPS, "switching": NUM_SYNC}.get(name, 0)
    counts = rule.counts()
    applied = sum(c.applied for c in counts)
    self.assertEqual(applied, 2 * num_sync + STEPS - num_sync)
    self.assertEqual(sum(sum(c.staleness) for c in counts), STEPS - num_sync)
    if name == "drop_stale":
      self.assertTrue(all(len(c.staleness) <= 2 for c in counts))

    def factor(age):
      return 1 / max(age, 1) if name == "staleness_aware" else 1

    expected = np.zeros([ROWS, COLUMNS])
    for ids, own in zip(IDS, counts, strict=True):
      # A synchronous update takes the mean over both replicas.
      expected[ids] += _moved(own, factor) - RATE * num_sync / 2
    rows = training.rows()
    np.testing.assert_allclose(rows, expected, rtol=1e-5)
    looked_up = sorted({row for ids in IDS for row in ids})
    self.assertEqual(np.flatnonzero(rows.any(axis=1)).tolist(), looked_up)

    # A synchronous update changes rows 0, 1 and 4 once each.
    num_async = STEPS - num_sync
    self.assertEqual(
      training.store.row_updates(),
      [num_async + 2 * num_sync, num_async + num_sync],
    )

  @parameterized.parameters(
    (
      lambda o: _async(o, staleness.delay_compensated(0.04)),
      r"^the staleness policy 'delay_compensated\(0.04\)' must not be used",
    ),
    (
      lambda o: _async(o, gradients_per_update=2),
      r"^`softsync` \(`gradients_per_update` > 1\) must not be used",
    ),
    (
      lambda o: _async(o, snapshot_reads=True),
      "^`snapshot_reads` must not be used",
    ),
  )
  def test_other_rules_are_refused(self, make, words):
    with self.assertRaisesRegex(
      ValueError, f"{words} with tables .* Received: the tables table.$"
    ) as caught:
      Training(make(keras.optimizers.SGD(RATE)), IDS)
    self.assertNotIn("\n", str(caught.exception))


if __name__ == "__main__":
  absltest.main()
