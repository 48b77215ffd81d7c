"""Tests for the experiments that train a small network: rules and verdicts."""

import copy
import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import absltest
from absl.testing import parameterized

from experiments.claims import linear_scaling
from experiments.claims import staleness_hurts
from experiments.claims import zhang_softsync
from experiments.simulator import compute_times
from experiments.support import claims
from experiments.support import one_thread
from experiments.support import scaling_remarks
from experiments.support import small_network
from tests.support import stores
from tf_replicas.replica import model_replica
from tf_replicas.rules import results as results_lib
from tf_replicas.rules.asynchronous import async_replicas
from tf_replicas.rules.asynchronous import staleness

SGD = keras.optimizers.SGD


def _bowl():
  """A replica whose gradient is its one weight, which begins with 1."""
  return model_replica.Replica(
    variables=[tf.Variable(1.0, name="weight")],
    loss_fn=lambda parameters, batch: parameters[0] ** 2 / 2,
    dataset_fn=lambda *_: tf.data.Dataset.from_tensors(
      (tf.zeros([7]),)
    ).repeat(),
  )


class OneThreadTest(stores.TestCase):
  def test_equal_times_are_turns_in_order(self):
    order = one_thread.finishing_order(
      compute_times.Constant(2.0), 3, 7, seed=0
    )
    self.assertEqual(order, [0, 1, 2, 0, 1, 2, 0])

  def test_order_follows_from_times(self):
    compute = compute_times.Lognormal(1.0, 0.5)
    order = one_thread.finishing_order(compute, 4, 50, seed=1)
    draws = compute_times.Draws(compute, 4, seed=1)
    ends = []
    for replica in range(4):
      times = [draws.next_of(replica) for _ in range(40)]
      ends += [(end, replica) for end in itertools.accumulate(times)]
    self.assertEqual(order, [replica for _, replica in sorted(ends)[:50]])

  def test_rate_by_staleness(self):
    """1 - .5 = .5, - .25 = .25; replica 1 read 1, two updates ago: - .25."""
    rule = async_replicas.AsyncReplicasOptimizer(
      SGD(0.5), 2, policies=[staleness.staleness_aware()]
    )
    losses, (weight,) = one_thread.play(rule, _bowl(), [0, 0, 1], 3)
    np.testing.assert_allclose(losses, [0.5, 0.125, 0.5])
    self.assertAlmostEqual(float(weight), 0.0)
    self.assertEqual([c.staleness for c in rule.counts()], [(2,), (0, 0, 1)])

  def test_several_gradients_per_update(self):
    """1 - .5 * 1 = .5; then, of 1, 1 and .5: - .5 * 2.5 / 3."""
    rule = async_replicas.AsyncReplicasOptimizer(
      SGD(0.5), 3, gradients_per_update=3
    )
    losses, (weight,) = one_thread.play(rule, _bowl(), [0, 1, 2] * 2, 2)
    np.testing.assert_allclose(losses, [0.5, (0.5 + 0.5 + 0.125) / 3])
    self.assertAlmostEqual(float(weight), 0.5 - 1.25 / 3, places=6)
    self.assertEqual(
      [c.staleness for c in rule.counts()], [(1, 1), (1, 1), (2,)]
    )

  def test_every_training_starts_afresh(self):
    """Also if the last one was by another rule."""
    results = []
    for per_update in (1, 2, 1):
      rule = async_replicas.AsyncReplicasOptimizer(
        SGD(0.1, momentum=0.9), 2, gradients_per_update=per_update
      )
      losses, (weight,) = one_thread.play(rule, _bowl(), [0, 1] * 3, 2)
      counts = results_lib.total(rule.counts())
      results.append((losses, float(weight), counts))
    self.assertEqual(results[0], results[2])
    self.assertNotEqual(results[0][1], results[1][1])
    self.assertEqual(results[0][2].applied, 6)

  def test_ends_where_a_number_is_not_finite(self):
    """1 - 1e30 is squared too large for float32."""
    rule = async_replicas.AsyncReplicasOptimizer(SGD(1e30), 1)
    losses, (weight,) = one_thread.play(rule, _bowl(), [0] * 4, 4)
    self.assertEqual(losses, [0.5])
    self.assertAlmostEqual(float(weight) / -1e30, 1, places=5)


class SmallNetworkTest(absltest.TestCase):
  def test_batches_are_of_one_sequence(self):
    small = small_network.batches(12, 2, 12, seed=3)
    large = small_network.batches(12, 8, 3, seed=3)
    np.testing.assert_array_equal(small.ravel(), large.ravel())
    for epoch in small.reshape([2, 12]):
      self.assertCountEqual(epoch, range(12))
    self.assertNotEqual(*map(list, small.reshape([2, 12])))

  def test_thin(self):
    self.assertEqual(
      small_network.thin([1.0, 3.0, float("inf"), 0.0], 2), [2.0, None]
    )

  def test_stale_step(self):
    """The gradient is of what was seen, the update of what is there."""
    model = small_network.build(seed=0)
    self.assertEqual(model.count_params(), 81_898)
    rng = np.random.default_rng(0)
    pictures = small_network.Pictures(
      tf.constant(rng.normal(size=[4, 16, 16, 3]), tf.float32),
      tf.range(4, dtype=tf.int64),
    )
    seen = small_network.values(model)
    now = [p + 1.0 for p in seen]
    chosen = np.int64([0, 2, 3])
    _, new, velocities = small_network.step_fn(model, pictures)(
      seen, now, [2 * tf.ones_like(p) for p in seen], chosen, tf.constant(0.5)
    )
    _, gradients = small_network.gradients(model, seen, pictures, chosen)
    for before, after, velocity, gradient in zip(
      now, new, velocities, gradients, strict=True
    ):
      np.testing.assert_allclose(velocity, 1.8 - 0.5 * gradient, atol=1e-5)
      np.testing.assert_allclose(after, before + velocity, atol=1e-5)
    found = small_network.evaluate(model, [p * np.nan for p in seen], pictures)
    self.assertIsNone(found["loss"])
    remark = scaling_remarks.scaled_loss(
      model, seen, pictures, tf.range(4), factor=4.0
    )
    self.assertLess(remark["without_decay"], 1e-5)
    self.assertAlmostEqual(remark["with_decay"], 1.0, delta=0.01)


class StalenessHurtsTest(parameterized.TestCase):
  def test_turns(self):
    order, joins = staleness_hurts.turns(2, 5, rises=False)
    self.assertEqual(order, [0, 1, 2, 0, 1])
    self.assertEqual(joins, {0: 0, 1: 0, 2: 0})
    # Over 4 of 16; a replica that joins is the last.
    order, joins = staleness_hurts.turns(2, 16, rises=True)
    self.assertEqual(joins, {0: 0, 1: 2, 2: 4})
    self.assertEqual(order[:9], [0, 0, 0, 1, 0, 1, 2, 0, 1])

  def test_the_rule_counts_the_staleness(self):
    """Replica 1 joins before update 2, and is first stale in update 3."""
    order, joins = staleness_hurts.turns(1, 16, rises=True)
    rule = async_replicas.AsyncReplicasOptimizer(keras.optimizers.SGD(0.1), 2)
    replica = model_replica.Replica(
      [tf.Variable(1.0, name="x")],
      lambda parameters, batch: parameters[0] * batch[0],
      lambda *_: tf.data.Dataset.from_tensors((tf.ones([1]),)).repeat(),
    )
    losses, (x,) = one_thread.play(rule, replica, order, 4, joins)
    self.assertEqual(joins, {0: 0, 1: 4})
    counts = results_lib.total(rule.counts())
    self.assertEqual(list(counts.staleness)[:2], [5, 11])
    self.assertAlmostEqual(float(x), 1 - 16 * 0.1, places=5)
    self.assertLen(losses, 4)

  @parameterized.parameters(
    ([0.95, 0.95, 0.94, 0.9, 0.5, 0.1], claims.HOLDS),
    # No harm at all.
    ([0.95, 0.95, 0.95, 0.95, 0.95, 0.95], claims.FAILS),
    # The middle is the worst.
    ([0.95, 0.95, 0.5, 0.1, 0.6, 0.7], claims.FAILS),
    # Nothing was learned.
    ([0.7, 0.6, 0.5, 0.4, 0.3, 0.2], claims.FAILS),
  )
  def test_verdict(self, precisions, expected):
    findings = staleness_hurts.find([_stale(precisions)])
    self.assertEqual(claims.verdict(findings), expected)

  def test_draws(self):
    pytest.importorskip("matplotlib")
    figure = staleness_hurts.draw([_stale([0.9, 0.9, 0.8, 0.5, 0.3, 0.1])])
    self.assertLen(figure.axes, 3)


def _stale(precisions):
  runs = {
    str(s): {
      "precision": p,
      "loss": None,
      "losses": [2.0, None] + [1.0] * 23,
      "mean_staleness": s,
    }
    for s, p in zip(staleness_hurts.STALENESS, precisions, strict=True)
  }
  names = staleness_hurts.WAYS.values()
  return {"rate": 0.1, "num_updates": 50, **dict.fromkeys(names, runs)}


def _softsync():
  """As published."""

  def run(precision, counts=(1,)):
    return {
      "precision": precision,
      "loss": 1.0,
      "losses": [1.0] * (30 if precision > 0.2 else 2),
      "diverged": precision < 0.2,
      "staleness": list(counts),
    }

  rows = []
  for n, fixed in ((1, 0.82), (15, 0.1), (30, 0.1)):
    for divides, precision in ((False, fixed), (True, 0.81)):
      row = run(precision, [0] * (n - 1) + [1, 2, 1])
      summary = zhang_softsync._summary(row, n)
      rows.append({"n": n, "divides": divides, **row, **summary})
  return {
    "rate": 0.01,
    "num_examples": 100,
    "synchronous": run(0.82),
    "softsync": rows,
  }


class ZhangSoftsyncTest(parameterized.TestCase):
  def test_summary(self):
    row = {"staleness": [4, 12, 2, 2]}
    self.assertEqual(
      zhang_softsync._summary(row, n=1),
      {
        "mean_staleness": (12 + 4 + 6) / 20,
        "staleness_of_95_percent": 3,
        "max_staleness": 3,
        "share_beyond_2n": 0.1,
      },
    )

  @parameterized.named_parameters(
    ("as_published", {}, claims.HOLDS),
    ("one_fails", {(0, "precision"): 0.5}, claims.FAILS),
    ("fifteen_learns", {(2, "precision"): 0.5}, claims.FAILS),
    ("thirty_learns", {(4, "precision"): 0.5}, claims.FAILS),
    ("thirty_does_not_recover", {(5, "precision"): 0.7}, claims.FAILS),
  )
  def test_verdict(self, changes, expected):
    measurement = copy.deepcopy(_softsync())
    for (row, name), value in changes.items():
      measurement["softsync"][row][name] = value
    findings = zhang_softsync.find([measurement])
    self.assertEqual(claims.verdict(findings), expected)

  def test_verdict_of_one_split(self):
    measurement = _softsync()
    measurement["softsync"] = measurement["softsync"][-2:]
    findings = zhang_softsync.find([measurement])
    self.assertLen(findings, 5)
    self.assertEqual(claims.verdict(findings), claims.HOLDS)

  def test_rules(self):
    rule = zhang_softsync.new_rule(2, divides=True)
    self.assertEqual(rule.policy.name, "staleness_aware")
    self.assertEqual(rule.total_num_replicas, 30)
    self.assertEqual(zhang_softsync.new_rule(2, False).policy.name, "none")

  def test_draws(self):
    pytest.importorskip("matplotlib")
    figure = zhang_softsync.draw([_softsync()] * 2)
    self.assertLen(figure.axes, 6)


def _scaling(one=0.9, same=0.7, scaled=0.9, warm=0.895, **changes):
  def run(precision):
    return {"precision": precision, "loss": 1.0, "losses": [1.0] * 24}

  remarks = {
    "scaled_loss": {"without_decay": 1e-7, "with_decay": 1.0},
    "momentum": {"plain": 0.156, "corrected": 1.0},
    "whole_batch": {"mean": 1e-7, "sum": 4.0},
    "shuffle": {"repeated": 0, "missing": 0},
  }
  return {
    "rate": 0.001,
    "epochs": 4,
    "runs": {
      way: {"1": run(one), "4": run(last), "8": run(last)}
      for way, last in zip(
        linear_scaling.WAYS, (same, scaled, warm), strict=True
      )
    },
    "remarks": {**remarks, **changes},
  }


class LinearScalingTest(parameterized.TestCase):
  @parameterized.parameters(
    ({}, claims.HOLDS),
    ({"one": 0.5, "same": 0.3, "scaled": 0.5, "warm": 0.5}, claims.FAILS),
    ({"same": 0.89}, claims.FAILS),
    ({"warm": 0.8}, claims.FAILS),
    ({"warm": 0.875, "scaled": 0.91}, claims.FAILS),
    ({"shuffle": {"repeated": 0, "missing": 1}}, claims.FAILS),
    ({"momentum": {"plain": 0.156, "corrected": 0.9}}, claims.FAILS),
  )
  def test_verdict(self, changes, expected):
    findings = linear_scaling.find([_scaling(**changes)])
    self.assertEqual(claims.verdict(findings), expected)

  def test_momentum_by_hand(self):
    """(0.9 * 10 + 4) / 40."""
    found = scaling_remarks.first_update_of_new_rate(factor=4.0)
    self.assertAlmostEqual(found["plain"], 0.325, places=4)
    self.assertAlmostEqual(found["corrected"], 1.0, places=4)

  def test_one_shuffle(self):
    self.assertEqual(
      scaling_remarks.one_shuffle(seed=1), {"repeated": 0, "missing": 0}
    )

  def test_draws(self):
    pytest.importorskip("matplotlib")
    self.assertLen(linear_scaling.draw([_scaling()]).axes, 2)


if __name__ == "__main__":
  absltest.main()
