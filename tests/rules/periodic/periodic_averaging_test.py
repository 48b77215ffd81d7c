"""Tests for rules.periodic.periodic_averaging: whole trainings in one process.

Two variables, `a` of two elements on two PS tasks and the scalar `b`; the loss
of a batch x is ((a - x)^2).sum() / 2 + (b + x)^2, so that the gradients are
a - x and 2 (b + x). What is expected is computed in plain Python.
"""

import threading
import time

import keras
import numpy as np
import tensorflow as tf
from absl.testing import absltest
from absl.testing import parameterized

from tests.support import replicas
from tests.support import stores
from tf_replicas.replica import model_replica
from tf_replicas.rules import base as rule_base
from tf_replicas.rules import results
from tf_replicas.rules.periodic import periodic_averaging
from tf_replicas.rules.sync import sync_replicas
from tf_replicas.store import moving_averages

SGD = keras.optimizers.SGD
VALUES = {"a": np.float32([1.0, 2.0]), "b": np.float32(3.0)}
START = np.array([1.0, 2.0, 3.0])  # The same, as the oracles have it.
# The batches of each replica.
DATA = [
  [0.5, -1.0, 2.0, 0.25, 1.5, -0.5, 3.0, 1.0, -2.0, 0.125],
  [-0.25, 4.0, 1.0, -3.0, 0.75, 2.5, -1.5, 0.5, 1.25, 2.0],
  [1.0, 1.0, -2.0, 0.5, 3.0, -1.0, 0.25, -0.75, 2.0, 1.5],
]
RATE, MOMENTUM = 0.1, 0.5


def gradient(values, x):
  a, b = values[:2], values[2:]
  return np.concatenate([a - x, 2 * (b + x)])


def loss_of(values, x):
  return ((values[:2] - x) ** 2).sum() / 2 + (values[2] + x) ** 2


class Walk:
  """A replica's copy in plain Python: gradient descent with momentum."""

  def __init__(self, data, *, rate=RATE, momentum=0.0, rho=0.0):
    self.values = self.center = START
    self.data, self.rate, self.momentum, self.rho = data, rate, momentum, rho
    self.velocity = np.zeros(3)

  def period(self, count):
    """Takes `count` steps; the gradients and the losses."""
    gradients, losses = [], []
    for x in self.data[:count]:
      losses.append(loss_of(self.values, x))
      gradients.append(gradient(self.values, x))
      force = self.rho * (self.values - self.center)
      self.velocity = self.momentum * self.velocity
      self.velocity = self.velocity - self.rate * (gradients[-1] + force)
      self.values = self.values + self.velocity
    self.data = self.data[count:]
    return gradients, losses


class Training:
  """One store, and a client of its own for every replica."""

  def __init__(self, make_rule, num_replicas, *, data=DATA, values=VALUES):
    specs = [
      stores.spec(path, v.shape, trainable=path != "moving")
      for path, v in values.items()
    ]
    self.rules, self.stores, self.runners = [], [], []
    for index in range(num_replicas):
      rule = make_rule()
      store = stores.attach(specs, 2, stores.cut(2))
      rule.build(store, is_sparse=[False] * len(values))
      if index == 0:
        rule_base.create_or_resume(
          rule, store, [tf.constant(v) for v in values.values()]
        )
      self.rules.append(rule)
      self.stores.append(store)
      self.runners.append(self._runner(rule, store, index, data[index], values))
    self.chief = self.rules[0]

  def _runner(self, rule, store, index, data, values):
    def loss_fn(parameters, x):
      a, b, *others = parameters
      loss = tf.reduce_sum((a - x) ** 2) / 2 + tf.reduce_sum((b + x) ** 2)
      if "moving" not in values:
        return loss
      x = tf.reduce_mean(x)
      return loss, [moving + 0.1 * (x - moving) for moving in others]

    def dataset_fn(num_shards, index, start):
      del num_shards, index, start
      data_set = tf.data.Dataset.from_tensor_slices(np.float32(data))
      return data_set.batch(1).map(lambda x: (x,))

    variables, statistics = (
      [
        tf.Variable(v, name=path, trainable=not is_moving)
        for path, v in values.items()
        if (path == "moving") == is_moving
      ]
      for is_moving in (False, True)
    )
    replica = model_replica.Replica(
      variables, loss_fn, dataset_fn, statistics=statistics
    )
    return replicas.Runner(
      rule, store, replica, iter(dataset_fn(1, 0, 0)), index
    )

  def begin(self, *indices):
    for replica in indices or range(len(self.rules)):
      self.runners[replica].begin()

  def meet(self, replica):
    """One period of `replica`; (whether it counted, the step after it)."""
    token = self.runners[replica].step()
    return bool(token.admitted), token.global_step

  def copy(self, replica):
    """The replica's own values."""
    return _flat(self.runners[replica].state[: len(VALUES)])

  def center(self):
    return _flat(self.stores[0].read())

  def meet_together(self, replicas=(), updates=1):
    """All replicas have a period each; what the chief heard."""
    threads = Threads(self.meet, replicas or range(len(self.rules)))
    heard = [self.chief.apply_updates()[0] for _ in range(updates)]
    return heard[-1], threads.join()


class Threads:
  """`function(r)` for several r, each in a thread of its own."""

  def __init__(self, function, arguments):
    self._results, self._errors = {}, []
    self._threads = [
      threading.Thread(target=self._run, args=(function, a), daemon=True)
      for a in arguments
    ]
    for thread in self._threads:
      thread.start()

  def _run(self, function, argument):
    try:
      self._results[argument] = function(argument)
    except Exception as error:  # The test's thread raises it.
      self._errors.append(error)

  def are_alive(self):
    return any(thread.is_alive() for thread in self._threads)

  def join(self):
    for thread in self._threads:
      thread.join(timeout=60)
    assert not self.are_alive()
    if self._errors:
      raise self._errors[0]
    return self._results


def _await(condition):
  deadline = time.monotonic() + 60
  while not condition():
    assert time.monotonic() < deadline
    time.sleep(0.01)


def _flat(tensors):
  return np.concatenate([np.reshape(t, [-1]) for t in stores.numpy(tensors)])


def _close(actual, expected):
  np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)


class StatisticsTest(stores.TestCase):
  """A moving mean goes a tenth of the way to each number."""

  VALUES = {**VALUES, "moving": np.float32([10.0])}

  def _moved(self, start, numbers):
    for x in numbers:
      start += 0.1 * (x - start)
    return start

  def _train(self, make_rule, num_replicas):
    training = Training(make_rule, num_replicas, values=self.VALUES)
    training.begin()
    return training

  def _moving(self, training):
    return float(training.stores[0].read()[2][0])

  @parameterized.parameters(False, True)
  def test_model_average(self, has_chief_statistics):
    training = self._train(
      lambda: periodic_averaging.model_average(
        SGD(RATE), 2, period=3, has_chief_statistics=has_chief_statistics
      ),
      2,
    )
    expected = 10.0
    for begin in (0, 3):
      training.meet_together()
      copies = [self._moved(expected, d[begin : begin + 3]) for d in DATA[:2]]
      expected = copies[0] if has_chief_statistics else np.mean(copies)
      self.assertAlmostEqual(self._moving(training), expected, places=5)

  @parameterized.parameters(False, True)
  def test_elastic_average_one_after_the_other(self, has_chief_statistics):
    training = self._train(
      lambda: periodic_averaging.elastic_average(
        SGD(RATE),
        2,
        period=2,
        moving_rate=0.25,
        rho=0.0,
        has_chief_statistics=has_chief_statistics,
      ),
      2,
    )
    center, copies = 10.0, [10.0, 10.0]
    for replica, begin in ((1, 0), (0, 0), (1, 2)):
      copy = self._moved(copies[replica], DATA[replica][begin : begin + 2])
      copies[replica] = copy + 0.25 * (center - copy)
      if replica == 0 or not has_chief_statistics:
        center += 0.25 * (copy - center)
      training.meet(replica)
      self.assertAlmostEqual(self._moving(training), center, places=5)

  def test_elastic_average_together(self):
    training = self._train(
      lambda: periodic_averaging.elastic_average(
        SGD(RATE), 2, period=2, moving_rate=0.25, rho=0.0, synchronous=True
      ),
      2,
    )
    center, copies = 10.0, [10.0, 10.0]
    for begin in (0, 2):
      training.meet_together()
      copies = [
        self._moved(copy, data[begin : begin + 2])
        for copy, data in zip(copies, DATA, strict=False)
      ]
      distances = [copy - center for copy in copies]
      copies = [
        copy - 0.25 * d for copy, d in zip(copies, distances, strict=True)
      ]
      center += 0.25 * sum(distances)
      self.assertAlmostEqual(self._moving(training), center, places=5)

  @parameterized.parameters((False, [0.5, 0.5]), (True, [1.0, 0.0]))
  def test_accumulated_gradients(self, has_chief_statistics, shares):
    """Half the move of each of both replicas is made, or the chief's."""
    training = self._train(
      lambda: periodic_averaging.accumulated_gradients(
        SGD(RATE),
        2,
        period=3,
        has_chief_statistics=has_chief_statistics,
      ),
      2,
    )
    expected = 10.0
    for replica, share in enumerate(shares):
      expected += share * (self._moved(10.0, DATA[replica][:3]) - 10)
      training.meet(replica)
      self.assertAlmostEqual(self._moving(training), expected, places=5)


class ModelAverageTest(stores.TestCase):
  def test_a_chief_that_takes_over_keeps_the_learning_rate(self):
    """Until it makes updates, replicas go on with that of the earlier chief."""

    def make():
      return periodic_averaging.model_average(SGD(RATE), 1, period=1)

    first = Training(make, 1).chief
    first.set_learning_rate(RATE / 2)
    first._steps.refresh()
    second = Training(make, 1).chief
    for rule in first, second:
      self.assertAlmostEqual(float(rule._steps._rate.numpy()), RATE / 2)

  def test_mean_of_copies_by_hand(self):
    """Momentum outlasts the meetings, values do not."""
    training = Training(
      lambda: periodic_averaging.model_average(
        SGD(RATE, momentum=MOMENTUM), 2, period=3
      ),
      2,
    )
    walks = [Walk(DATA[r], momentum=MOMENTUM) for r in range(2)]
    training.begin()
    for step in (1, 2, 3):
      losses = [loss for walk in walks for loss in walk.period(3)[1]]
      mean = (walks[0].values + walks[1].values) / 2
      walks[0].values = walks[1].values = mean
      update, releases = training.meet_together()
      self.assertEqual(releases, {0: (True, step), 1: (True, step)})
      self.assertEqual(update.global_step, step)
      self.assertEqual(update.num_examples, 6)
      self.assertAlmostEqual(update.loss, np.mean(losses), places=4)
      self.assertAlmostEqual(update.learning_rate, RATE)
      _close(training.center(), mean)
      _close(training.copy(0), mean)
      _close(training.copy(1), mean)
    self.assertEqual(int(training.stores[1].examples_seen), 18)
    self.assertEqual([c.applied for c in training.chief.counts()], [3, 3])

  def test_period_of_one_is_synchronous_descent(self):
    values = []
    for make_rule in (
      lambda: periodic_averaging.model_average(SGD(RATE), 2, period=1),
      lambda: sync_replicas.SyncReplicasOptimizer(SGD(RATE), 2),
    ):
      self.new_cluster()
      training = Training(make_rule, 2)
      training.begin()
      for _ in range(4):
        training.meet_together()
      values.append(training.center())
    _close(values[0], values[1])

  def test_one_replica_is_plain_descent(self):
    training = Training(
      lambda: periodic_averaging.model_average(
        keras.optimizers.Adam(RATE), 1, period=5
      ),
      1,
    )
    training.begin()
    for _ in range(2):
      training.meet_together()
    variables = [keras.Variable(v) for v in VALUES.values()]
    optimizer = keras.optimizers.Adam(RATE)
    for x in DATA[0]:
      grads = [variables[0] - x, 2 * (variables[1] + x)]
      optimizer.apply(list(map(tf.convert_to_tensor, grads)), variables)
    _close(training.center(), _flat(variables))

  def test_copy_of_an_older_center_is_refused_whole(self):
    training = Training(
      lambda: periodic_averaging.model_average(SGD(RATE), 1, 2, period=2), 2
    )
    training.begin()
    training.meet_together([0])
    walk = Walk(DATA[0])
    walk.period(2)
    late = Threads(training.meet, [1])
    inbox = training.chief._rule._contributions._inbox
    _await(lambda: int(inbox.size()) == 1)
    training.meet_together([0])
    walk.period(2)
    self.assertFalse(late.join()[1][0])
    _close(training.center(), walk.values)
    counts = training.chief.counts()
    self.assertEqual((counts[1].applied, counts[1].refused), (0, 1))
    self.assertEqual(int(training.stores[0].examples_seen), 4)
    # It goes on from the center.
    training.begin(1)
    walk.data = DATA[1][2:]
    walk.period(2)
    training.meet_together([1])
    _close(training.center(), walk.values)


class ElasticAverageTest(stores.TestCase):
  ALPHA, RHO = 0.25, 0.5

  def _rule(self, **kwargs):
    kwargs = {"moving_rate": self.ALPHA, "rho": self.RHO, "period": 2, **kwargs}
    return lambda: periodic_averaging.elastic_average(
      SGD(RATE, momentum=MOMENTUM), 2, **kwargs
    )

  @parameterized.parameters(0.0, 0.5)
  def test_interleaving_by_hand(self, rho):
    training = Training(self._rule(rho=rho), 2)
    walks = [Walk(DATA[r], momentum=MOMENTUM, rho=rho) for r in range(2)]
    training.begin()
    center = START
    for step, r in enumerate([0, 1, 1, 0, 1], start=1):
      walk = walks[r]
      walk.period(2)
      away = walk.values - center
      walk.values = walk.values - self.ALPHA * away
      center = center + self.ALPHA * away
      walk.center = center
      self.assertEqual(training.meet(r), (True, step))
      _close(training.center(), center)
      _close(training.copy(r), walk.values)
    staleness = [count.staleness for count in training.chief.counts()]
    self.assertEqual(staleness, [(1, 0, 1), (1, 2)])
    self.assertEqual(int(training.stores[0].examples_seen), 10)
    self.assertEqual(training.chief.apply_updates()[0].num_examples, 10)

  def test_synchronous_by_hand(self):
    training = Training(self._rule(synchronous=True), 2)
    walks = [Walk(DATA[r], momentum=MOMENTUM, rho=self.RHO) for r in range(2)]
    training.begin()
    center = START
    for step in (1, 2, 3):
      aways = []
      for walk in walks:
        walk.period(2)
        aways.append(walk.values - center)
        walk.values = walk.values - self.ALPHA * aways[-1]
      center = center + self.ALPHA * (aways[0] + aways[1])
      update, releases = training.meet_together()
      self.assertEqual(releases, {0: (True, step), 1: (True, step)})
      self.assertEqual(update.num_examples, 4)
      _close(training.center(), center)
      for r, walk in enumerate(walks):
        walk.center = center
        _close(training.copy(r), walk.values)

  def test_exchanges_are_of_one_piece(self):
    """With a = 1 copy and center change places, whole or not at all."""
    replicas, times = 3, 40

    def make_rule():
      return periodic_averaging.elastic_average(
        SGD(0.0), replicas, period=1, moving_rate=1.0, rho=0.0
      )

    training = Training(make_rule, replicas, data=[[0.0] * times] * replicas)
    training.begin()
    for r in range(replicas):
      token, a, b, *rest = training.runners[r].carried
      training.runners[r].carried = [token, a + r + 1, b + r + 1, *rest]
      training.meet(r)  # Traced, they will run at the same time.
    Threads(
      lambda r: [training.meet(r) for _ in range(times - 1)], range(replicas)
    ).join()
    found = [training.center(), *map(training.copy, range(replicas))]
    self.assertCountEqual(
      [tuple(values) for values in found],
      [tuple(START + r) for r in range(replicas + 1)],
    )
    self.assertEqual(int(training.stores[0].global_step), replicas * times)
    applied = [count.applied for count in training.chief.counts()]
    self.assertEqual(applied, [times] * replicas)

  def test_defaults_are_those_of_tf1(self):
    rule = periodic_averaging.elastic_average(SGD(0.5), 3, period=4)
    rule.build(stores.attach([stores.spec("v", [2])]))
    moving_rate = 0.9 / 4 / 3
    signature = rule.signature()
    self.assertEqual(signature["period"], 4)
    self.assertEqual(signature["moving_rate"], moving_rate)
    self.assertEqual(signature["rho"], moving_rate / 0.5)


class AccumulatedGradientsTest(stores.TestCase):
  def test_interleaving_by_hand(self):
    training = Training(
      lambda: periodic_averaging.accumulated_gradients(
        SGD(RATE, momentum=MOMENTUM), 2, period=3
      ),
      2,
    )
    walks = [Walk(DATA[r], momentum=MOMENTUM) for r in range(2)]
    training.begin()
    center, velocity = START, np.zeros(3)
    for step, r in enumerate([0, 1, 1, 0], start=1):
      gradients, losses = walks[r].period(3)
      velocity = MOMENTUM * velocity - RATE * np.mean(gradients, axis=0)
      walks[r].values = center = center + velocity
      self.assertEqual(training.meet(r), (True, step))
      _close(training.center(), center)
      _close(training.copy(r), center)
      update = training.chief.apply_updates()[0]
      self.assertEqual(update.num_examples, 3)
      self.assertAlmostEqual(update.loss, np.mean(losses), places=4)
    staleness = [count.staleness for count in training.chief.counts()]
    self.assertEqual(staleness, [(1, 0, 1), (1, 1)])

  def test_variable_without_gradient_is_left_alone(self):
    """Weight decay would move it."""
    values = {**VALUES, "unused": np.float32([5.0])}
    training = Training(
      lambda: periodic_averaging.accumulated_gradients(
        SGD(RATE, weight_decay=0.1), 1, period=2
      ),
      1,
      values=values,
    )
    training.begin()
    training.meet(0)
    self.assertEqual(training.center()[-1], 5.0)
    self.assertEqual(float(training.runners[0].state[2][0]), 5.0)

  def test_sparse_gradients_and_a_scaled_loss(self):
    """Rows are summed; the loss scale leaves no trace."""
    rule = periodic_averaging.accumulated_gradients(
      SGD(1.0), 1, period=2, loss_scale=256.0
    )
    table = np.float32([[1.0], [2.0], [3.0]])
    store = stores.attach([stores.spec("table", table.shape)])
    rule.build(store, is_sparse=[True])
    rule_base.create_or_resume(rule, store, [tf.constant(table)])

    def compute(parameters, scale_loss):
      with tf.GradientTape() as tape:
        tape.watch(parameters)
        rows = tf.gather(parameters[0], [2, 0, 2])
        loss = scale_loss(tf.reduce_sum(rows))
      gradients = tape.gradient(loss, parameters)
      self.assertIsInstance(gradients[0], tf.IndexedSlices)
      return model_replica.Gradients(gradients, loss, tf.constant(3, tf.int64))

    @tf.function(autograph=False)
    def meet():
      begun = rule.begin(0)
      rule.contribute(compute, 0, begun.state, token=begun.token)

    meet()
    _close(store.read()[0], [[0.0], [2.0], [1.0]])


KINDS = {
  "model_average": lambda **kwargs: periodic_averaging.model_average(
    SGD(RATE), 1, period=3, **kwargs
  ),
  "elastic": lambda **kwargs: periodic_averaging.elastic_average(
    SGD(RATE), 1, period=3, **kwargs
  ),
  "accumulated": lambda **kwargs: periodic_averaging.accumulated_gradients(
    SGD(RATE), 1, period=3, **kwargs
  ),
}


@parameterized.named_parameters(KINDS.items())
class EveryKindTest(stores.TestCase):
  def test_not_finite_never_reaches_the_center(self, kind):
    training = Training(kind, 1, data=[[1.0, 2.0, float("nan"), 1.0, 2.0, 3.0]])
    training.begin()
    meeting = Threads(training.meet, [0])
    with self.assertRaises(results.NonFiniteGradientError) as caught:
      training.chief.apply_updates()[0]
    self.assertEqual(caught.exception.replica, 0)
    _close(training.center(), START)
    self.assertFalse(meeting.join()[0][0])

  def test_ends_in_the_midst_of_a_period(self, kind):
    training = Training(kind, 1, data=[[1.0]])  # There is no second batch.
    training.begin()
    meeting = Threads(lambda _: training.chief.end_replicas(), [0])
    _await(lambda: bool(training.chief._steps._has_ended))
    self.assertEqual(training.meet(0), (False, -1))
    # Again and again: `end_replicas` ignores interrupts from before it began.
    _await(lambda: training.chief.interrupt() or not meeting.are_alive())
    meeting.join()
    _close(training.center(), START)

  def test_averages_and_checkpoints_are_of_the_center(self, kind):
    def make_rule():
      return kind(
        variable_averages=moving_averages.MovingAverages(
          0.75, num_updates_aware=False
        )
      )

    training = Training(make_rule, 1)
    training.begin()
    training.meet_together()
    state = {k: np.asarray(v) for k, v in training.stores[0].state().items()}
    self.assertEqual(int(state["global_step"]), 1)
    self.assertEqual(int(state["examples_seen"]), 3)
    _close(state["averages/b"], 0.75 * 3.0 + 0.25 * training.center()[2])
    self.new_cluster()
    resumed = Training(make_rule, 1)
    resumed.stores[0].load_state(state)
    resumed.begin()
    _close(resumed.copy(0), training.center())
    # The rate is the chief's from the next period on. At rate 0 an elastic
    # replica still moves, but only as far as the center comes to meet it.
    resumed.chief.set_learning_rate(0.0)
    update, _ = resumed.meet_together()
    self.assertEqual((update.global_step, update.learning_rate), (2, 0.0))
    before = resumed.copy(0) + resumed.center()
    resumed.meet_together()
    _close(resumed.copy(0) + resumed.center(), before)


class RefusalTest(stores.TestCase):
  @parameterized.named_parameters(
    ("period", {"period": 0}, ValueError, "`period`.*at least 1.*: 0"),
    ("period_type", {"period": 2.5}, TypeError, "`period`.*integer.*: 2.5"),
    ("optimizer", {"optimizer": "sgd"}, TypeError, "`optimizer`.*'sgd'"),
    ("scale", {"loss_scale": 0.0}, ValueError, "`loss_scale`.*positive.*0.0"),
    (
      "average_what",
      {"variables_to_average": ["a"]},
      ValueError,
      "needs `variable_averages`",
    ),
  )
  def test_every_kind(self, arguments, error, message):
    arguments = {"optimizer": SGD(RATE), **arguments}
    optimizer = arguments.pop("optimizer")
    for make in (
      periodic_averaging.model_average,
      periodic_averaging.elastic_average,
      periodic_averaging.accumulated_gradients,
    ):
      with self.assertRaisesRegex(error, message):
        make(optimizer, 2, **arguments)

  def test_replicas(self):
    for number in (0, True, 1.5):
      for make in (
        periodic_averaging.elastic_average,
        periodic_averaging.accumulated_gradients,
      ):
        with self.assertRaisesRegex(
          (TypeError, ValueError), f"total_num_replicas.*{number}"
        ):
          make(SGD(RATE), number)
    with self.assertRaisesRegex(ValueError, "one copy.*: 3 of 2"):
      periodic_averaging.model_average(SGD(RATE), 3, 2)

  @parameterized.parameters(
    ({"moving_rate": 0.0}, "`moving_rate`.*0.0"),
    ({"moving_rate": 1.5}, "`moving_rate`.*1.5"),
    ({"moving_rate": float("nan")}, "`moving_rate`.*nan"),
    ({"rho": -1.0}, "`rho`.*-1.0"),
  )
  def test_elastic(self, arguments, message):
    with self.assertRaisesRegex(ValueError, message):
      periodic_averaging.elastic_average(SGD(RATE), 2, **arguments)

  def test_rho_where_the_rate_is_0(self):
    with self.assertRaisesRegex(ValueError, "`rho` must be given"):
      periodic_averaging.elastic_average(SGD(0.0), 2)


if __name__ == "__main__":
  absltest.main()
