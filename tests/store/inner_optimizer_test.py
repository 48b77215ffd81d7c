"""Tests for store.inner_optimizer."""

import tempfile
from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras
from absl.testing import absltest
from absl.testing import parameterized

from tests.support import optimizers as makers
from tests.support import stores
from tf_replicas.runtime import keras_internals
from tf_replicas.session import checkpoints
from tf_replicas.store import inner_optimizer
from tf_replicas.store import placement

optimizers = keras.optimizers
NUM_TASKS = 2
NUM_STEPS = 4
VALUES = {
  "embedding": np.linspace(-1, 1, 12, dtype="float32").reshape(6, 2),
  "dense/kernel": np.linspace(1, 2, 8, dtype="float32").reshape(2, 4),
  "dense/bias": np.zeros([4], "float32"),
  "scale": np.float32(0.5),
}


# Cuts the matrices in two and leaves the others whole.
MIXED = placement.Partitioned(NUM_TASKS, min_shard_bytes=16)
WHOLE = placement.RoundRobin(NUM_TASKS)


def _schedule():
  return optimizers.schedules.PiecewiseConstantDecay([1, 3], [0.5, 0.1, 0.02])


def _gradients(step, *, is_sparse=False):
  """The gradients of VALUES in step `step`, as NumPy arrays or slices."""
  rng = np.random.default_rng(step)
  gradients = [rng.normal(size=v.shape) for v in VALUES.values()]
  gradients = [tf.constant(g, tf.float32) for g in gradients]
  if is_sparse:
    rows = tf.constant(rng.permutation(6)[:3], tf.int64)
    gradients[0] = tf.IndexedSlices(
      tf.gather(gradients[0], rows), rows, tf.constant([6, 2], tf.int64)
    )
  return gradients


class Trained:
  """An inner optimizer, applied task by task as the chief does."""

  def __init__(self, optimizer, *, policy=MIXED, **more):
    self.store = stores.create(VALUES, NUM_TASKS, policy)
    self.inner = inner_optimizer.InnerOptimizer(optimizer, **more)
    self.inner.build(self.store)
    self._apply = tf.function(self._apply_all, autograph=False)

  def _apply_all(self, gradients, step):
    parts = [
      self.store.split_gradient(index, gradient)
      for index, gradient in enumerate(gradients)
    ]
    changed = []
    for task in range(NUM_TASKS):
      shards = self.store.contributed_shards(task)
      changed.append(
        self.inner.apply(
          task,
          [parts[position][number] for position, number in shards],
          [self.store.variables(p)[number] for p, number in shards],
          step,
        )
      )
    self.inner.commit(changed[0])

  def step(self, number, gradients=None):
    gradients = _gradients(number) if gradients is None else gradients
    self.inner.refresh()
    self._apply(gradients, tf.constant(number, tf.int64))

  def values(self):
    return stores.numpy(self.store.read())


def _reference(optimizer, *, is_sparse=False):
  """The same optimizer over ordinary variables, all in one go."""
  variables = [
    keras.Variable(v, name=path.replace("/", "_")) for path, v in VALUES.items()
  ]
  for step in range(NUM_STEPS):
    optimizer.apply(_gradients(step, is_sparse=is_sparse), variables)
  return stores.numpy(variables)


OPTIMIZERS = {
  "sgd": lambda: optimizers.SGD(0.1),
  "momentum": lambda: optimizers.SGD(0.1, momentum=0.9),
  "nesterov": lambda: optimizers.SGD(0.1, momentum=0.9, nesterov=True),
  "schedule": lambda: optimizers.SGD(_schedule(), momentum=0.9),
  "clipvalue": lambda: optimizers.SGD(0.1, clipvalue=0.3),
  "adam": lambda: optimizers.Adam(0.1, amsgrad=True),
  "adam_schedule": lambda: optimizers.Adam(_schedule()),
  "adamw": lambda: optimizers.AdamW(0.1, weight_decay=0.01),
  "nadam": lambda: optimizers.Nadam(0.1),
  "adagrad": lambda: makers.make("Adagrad", 0.1),
  "rmsprop": lambda: optimizers.RMSprop(0.1, momentum=0.9, centered=True),
  "adadelta": lambda: optimizers.Adadelta(1.0),
  "adamax": lambda: optimizers.Adamax(0.1),
  "ftrl": lambda: makers.make("Ftrl", 0.1, l1_regularization_strength=0.01),
  "lion": lambda: optimizers.Lion(0.01),
  "schedule_free": lambda: makers.make("ScheduleFreeAdamW", 0.1),
}
OF_WHOLE_VARIABLES = {
  "clipnorm": lambda: optimizers.SGD(0.1, clipnorm=0.3),
  "lamb": lambda: makers.make("Lamb", 0.1),
  "muon": lambda: makers.make("Muon", 0.1),
}


class EquivalenceTest(stores.TestCase):
  """Task by task the result is that of one plain `apply` to everything."""

  def _check(self, make, policy, **kwargs):
    trained = Trained(make(), policy=policy)
    for step in range(NUM_STEPS):
      trained.step(step, _gradients(step, **kwargs))
    expected = _reference(make(), **kwargs)
    for path, before, ours, theirs in zip(
      VALUES, VALUES.values(), trained.values(), expected, strict=True
    ):
      np.testing.assert_allclose(ours, theirs, rtol=2e-5, err_msg=path)
      self.assertFalse(np.array_equal(ours, before), path)

  @parameterized.named_parameters(OPTIMIZERS.items())
  def test_shards_and_whole_variables(self, make):
    self._check(make, MIXED)

  @parameterized.named_parameters(OF_WHOLE_VARIABLES.items())
  def test_whole_variables(self, make):
    self._check(make, WHOLE)

  @parameterized.parameters("momentum", "adam", "adagrad")
  def test_sparse_gradients(self, name):
    self._check(OPTIMIZERS[name], MIXED, is_sparse=True)

  @parameterized.named_parameters(OF_WHOLE_VARIABLES.items())
  def test_what_needs_whole_variables_refuses_shards(self, make):
    with self.assertRaisesRegex(ValueError, "whole variables.*'embedding'"):
      Trained(make(), policy=MIXED)


class RefusalTest(parameterized.TestCase):
  @parameterized.named_parameters(
    ("global_clipnorm", {"global_clipnorm": 1.0}, "clip_mean_norm"),
    ("use_ema", {"use_ema": True}, "variable_averages"),
    (
      "accumulation",
      {"gradient_accumulation_steps": 2},
      "replicas_to_aggregate",
    ),
    ("loss_scale", {"loss_scale_factor": 2.0}, "loss_scale"),
  )
  def test_option(self, options, instead):
    (name,) = options
    with self.assertRaisesRegex(ValueError, f"`{name}`.*`{instead}`"):
      inner_optimizer.InnerOptimizer(optimizers.SGD(0.1, **options))

  def test_variables_excluded_from_weight_decay(self):
    optimizer = optimizers.AdamW(0.1)
    optimizer.exclude_from_weight_decay(var_names=["bias"])
    inner_optimizer.InnerOptimizer(optimizer)
    optimizer.exclude_from_weight_decay([keras.Variable(0.0)])
    with self.assertRaisesRegex(ValueError, "`var_names`.*of 1 variables"):
      inner_optimizer.InnerOptimizer(optimizer)

  def test_loss_scale_optimizer(self):
    optimizer = optimizers.LossScaleOptimizer(optimizers.SGD(0.1))
    with self.assertRaisesRegex(ValueError, "`loss_scale`"):
      inner_optimizer.InnerOptimizer(optimizer)

  def test_adafactor(self):
    with self.assertRaisesRegex(ValueError, "by variable.*`.*Lion`.*Adafactor"):
      inner_optimizer.InnerOptimizer(optimizers.Adafactor(0.1))

  def test_several_in_one(self):
    makers.require("MultiOptimizer")
    by_path = optimizers.OptimizerMap(optimizers.SGD(0.1))
    optimizer = optimizers.MultiOptimizer(by_path)
    with self.assertRaisesRegex(
      ValueError, "one optimizer.*`train_step`.*Received: MultiOptimizer.$"
    ) as caught:
      inner_optimizer.InnerOptimizer(optimizer)
    self.assertNotIn("\n", str(caught.exception))

  def test_what_is_no_optimizer(self):
    with self.assertRaisesRegex(TypeError, "`optimizer` must have `apply"):
      inner_optimizer.InnerOptimizer("sgd")

  def test_a_class_of_optimizers(self):
    with self.assertRaisesRegex(TypeError, "`optimizer` must have.*class 'ke"):
      inner_optimizer.InnerOptimizer(optimizers.SGD)

  @parameterized.named_parameters(OPTIMIZERS.items())
  def test_none_without_need(self, make):
    inner_optimizer.InnerOptimizer(make())


class BuiltTest(stores.TestCase):
  def test_one_built_for_other_variables_is_refused(self):
    optimizer = optimizers.SGD(0.1, momentum=0.9)
    optimizer.build([keras.Variable(1.0)])
    inner = inner_optimizer.InnerOptimizer(optimizer)
    with self.assertRaisesRegex(ValueError, "must not be built yet"):
      inner.build(stores.create(VALUES, NUM_TASKS))


class LearningRateTest(stores.TestCase):
  def test_of_a_number_a_schedule_and_neither(self):
    def rate(optimizer, step):
      return inner_optimizer.InnerOptimizer(optimizer).learning_rate(step)

    self.assertAlmostEqual(rate(optimizers.SGD(0.25), 7), 0.25)
    self.assertAlmostEqual(rate(optimizers.SGD(_schedule()), 1), 0.5)
    self.assertAlmostEqual(rate(optimizers.SGD(_schedule()), 2), 0.1)
    self.assertAlmostEqual(rate(optimizers.SGD(_schedule()), 9), 0.02)
    self.assertTrue(np.isnan(rate(PlainApply(), 0)))

  def test_a_change_by_the_user_is_noticed_on_every_task(self):
    optimizer = optimizers.SGD(0.5)
    trained = Trained(optimizer)
    ones = [tf.ones(v.shape) for v in VALUES.values()]
    trained.step(0, ones)
    optimizer.learning_rate = 0.25
    trained.step(1, ones)
    self.assertEqual(trained.inner.learning_rate(1), 0.25)
    for before, after in zip(VALUES.values(), trained.values(), strict=True):
      np.testing.assert_allclose(after, before - 0.75, atol=1e-6)

  def test_schedules_read_the_global_step(self):
    trained = Trained(optimizers.SGD(_schedule()))
    ones = [tf.ones(v.shape) for v in VALUES.values()]
    trained.step(100, ones)
    for before, after in zip(VALUES.values(), trained.values(), strict=True):
      np.testing.assert_allclose(after, before - 0.02, atol=1e-6)


class SlotsTest(stores.TestCase):
  def test_live_beside_their_shard(self):
    optimizer = optimizers.Adam(0.1)
    trained = Trained(optimizer)
    device_of = {
      v.path: v.device
      for index in range(len(VALUES))
      for v in trained.store.variables(index)
    }
    slots = {
      v.value.path: v.value.device
      for v in optimizer.variables
      if hasattr(v.value, "path") and v.value.path.startswith("slots/")
    }
    self.assertEqual(
      slots,
      {
        f"slots/adam/{slot}/{path}": device
        for path, device in device_of.items()
        for slot in ("momentum", "velocity")
      },
    )
    self.assertIn("slots/adam/velocity/embedding/part_1", slots)

  def test_are_saved_whole_under_slot_and_path(self):
    trained = Trained(optimizers.SGD(0.1, momentum=0.9))
    gradients = _gradients(0)
    trained.step(0, gradients)
    state = trained.store.state()
    for path, gradient in zip(VALUES, gradients, strict=True):
      np.testing.assert_allclose(
        state[f"slots/sgd/momentum/{path}"], -0.1 * gradient, rtol=1e-6
      )

  @parameterized.named_parameters(
    ("momentum", OPTIMIZERS["momentum"]),
    ("nadam", OPTIMIZERS["nadam"]),
    ("not_of_keras", lambda: WithSlots()),
  )
  def test_a_restored_training_goes_on_as_if_uninterrupted(self, make):
    whole = Trained(make(), policy=WHOLE)
    for step in range(2):
      whole.step(step)
    state = {k: v.numpy() for k, v in whole.store.state().items()}
    self.new_cluster()
    resumed = Trained(make(), policy=MIXED)
    resumed.store.load_state(state)
    for step in range(2, NUM_STEPS):
      resumed.step(step)
    expected = _reference(make())
    for ours, theirs in zip(resumed.values(), expected, strict=True):
      np.testing.assert_allclose(ours, theirs, rtol=2e-5)

  def _resumed(self, old, new, **more):
    """`new` in place of `old` at step 200, after one update of ones."""
    whole = Trained(old, policy=WHOLE, **more)
    ones = [tf.ones(v.shape) for v in VALUES.values()]
    whole.step(0, ones)
    whole.store.load_state({"global_step": np.int64(200)})
    directory = self.enter_context(tempfile.TemporaryDirectory())
    path = checkpoints.save(directory, whole.store.state())
    self.new_cluster()
    resumed = Trained(new, policy=MIXED, **more)
    optional = ("slots/", "optimizer/")
    checkpoints.restore(
      path, resumed.store, is_optional=lambda name: name.startswith(optional)
    )
    before = resumed.values()
    resumed.step(200, ones)
    return before, resumed

  @parameterized.named_parameters(
    ("of_other_sign", lambda: optimizers.SGD(0.1, momentum=0.9)),
    ("plain", lambda: optimizers.SGD(0.1)),
    ("not_of_keras", lambda: WithSlots()),
  )
  def test_another_optimizer_begins_afresh(self, old):
    """Its first step is one by its learning rate, its moments unbiased."""
    before, resumed = self._resumed(old(), optimizers.Adam(0.01))
    for ours, others in zip(resumed.values(), before, strict=True):
      np.testing.assert_allclose(ours, others - 0.01, rtol=1e-3)
    self.assertEqual(int(resumed.store.state()["optimizer/began.adam"]), 200)

  def test_another_of_several_optimizers_begins_afresh(self):
    before, resumed = self._resumed(
      optimizers.SGD(0.1), optimizers.Adam(0.01), name="first"
    )
    for ours, others in zip(resumed.values(), before, strict=True):
      np.testing.assert_allclose(ours, others - 0.01, rtol=1e-3)

  def test_the_same_one_is_as_old_as_it_was(self):
    _, resumed = self._resumed(optimizers.Adam(0.01), optimizers.Adam(0.01))
    self.assertEqual(int(resumed.store.state()["optimizer/began.adam"]), 0)

  def test_a_schedule_goes_by_the_global_step(self):
    before, resumed = self._resumed(
      optimizers.Adam(0.01), optimizers.SGD(_schedule())
    )
    rate = float(_schedule()(200))
    for ours, others in zip(resumed.values(), before, strict=True):
      np.testing.assert_allclose(ours, others - rate, atol=1e-6)

  def test_a_second_client_finds_their_values(self):
    first = Trained(optimizers.SGD(0.1, momentum=0.9))
    first.step(0)
    second = inner_optimizer.InnerOptimizer(optimizers.SGD(0.1, momentum=0.9))
    second.build(first.store)
    slot = next(
      v.value
      for v in second.optimizer.variables
      if getattr(v.value, "path", "") == "slots/sgd/momentum/dense/bias"
    )
    np.testing.assert_allclose(slot, -0.1 * _gradients(0)[2], rtol=1e-6)


RATES = (0.1, 0.1, 0.4, 0.2, 0.2, 0.01)


class MomentumCorrectionTest(stores.TestCase):
  """Goyal et al. 2017, equations 9 and 10."""

  def _train(self, trained, steps):
    for step in steps:
      trained.inner.optimizer.learning_rate = RATES[step]
      trained.step(step)
    return trained.values()

  def _of_the_paper(self, is_nesterov):
    """u <- m u + g, w <- w - rate u, or w - rate (g + m u) of Nesterov's."""
    values = [np.array(v, np.float64) for v in VALUES.values()]
    sums = [np.zeros_like(v) for v in values]
    for step, rate in enumerate(RATES):
      for index, gradient in enumerate(stores.numpy(_gradients(step))):
        sums[index] = 0.9 * sums[index] + gradient
        change = sums[index]
        if is_nesterov:
          change = gradient + 0.9 * change
        values[index] -= rate * change
    return values

  @parameterized.parameters(False, True)
  def test_is_the_other_form_of_momentum(self, is_nesterov):
    def train(is_corrected):
      self.new_cluster()
      sgd = optimizers.SGD(RATES[0], momentum=0.9, nesterov=is_nesterov)
      trained = Trained(sgd, momentum_correction=is_corrected)
      return self._train(trained, range(len(RATES)))

    expected = self._of_the_paper(is_nesterov)
    for ours, theirs in zip(train(True), expected, strict=True):
      np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)
    difference = max(
      np.max(np.abs(ours - theirs))
      for ours, theirs in zip(train(False), expected, strict=True)
    )
    self.assertGreater(difference, 0.1)

  def test_rmsprops_velocity_follows(self):
    trained = Trained(
      optimizers.RMSprop(0.1, momentum=0.5), momentum_correction=True
    )
    trained.step(0)
    name = "slots/rmsprop/momentum/scale"
    before = float(trained.store.state()[name])
    trained.inner.optimizer.learning_rate = 0.3
    trained.inner.refresh()
    self.assertAlmostEqual(float(trained.store.state()[name]), 3 * before, 5)

  def test_an_update_meanwhile_is_not_lost(self):
    """As of an asynchronous replica, after the velocity was read."""
    trained = Trained(
      optimizers.SGD(0.1, momentum=0.5), momentum_correction=True
    )
    trained.step(0)
    name = "slots/sgd/momentum/scale"
    before = float(trained.store.state()[name])
    (velocity,) = [
      v.value
      for v in keras_internals.velocities(trained.inner.optimizer)
      if v.value.path == name
    ]
    read = velocity.read_value

    def read_and_update():
      value = read()
      velocity.assign_add(tf.ones([]))
      return value

    trained.inner.optimizer.learning_rate = 0.3
    with mock.patch.object(velocity, "read_value", read_and_update):
      trained.inner.refresh()
    after = float(trained.store.state()[name])
    self.assertAlmostEqual(after, 3 * before + 1, 5)

  def test_no_velocity_without_a_rate(self):
    """A rate of 0 empties velocities, and one that follows it is no factor."""
    trained = Trained(
      optimizers.SGD(0.0, momentum=0.9), momentum_correction=True
    )
    trained.step(0)
    trained.inner.optimizer.learning_rate = 0.5
    trained.step(1)
    name = "slots/sgd/momentum/scale"
    velocity = trained.store.state()[name]
    np.testing.assert_allclose(velocity, -0.5 * _gradients(1)[3], rtol=1e-6)

  def test_a_resumed_run_knows_the_rate_of_its_velocities(self):
    def new():
      self.new_cluster()
      sgd = optimizers.SGD(RATES[0], momentum=0.9)
      return Trained(sgd, momentum_correction=True)

    expected = self._train(new(), range(len(RATES)))
    first = new()
    self._train(first, range(2))
    directory = self.enter_context(tempfile.TemporaryDirectory())
    path = checkpoints.save(
      directory, {**first.store.state(), "global_step": np.int64(2)}
    )
    resumed = new()
    checkpoints.restore(path, resumed.store)
    resumed = self._train(resumed, range(2, len(RATES)))
    for ours, theirs in zip(resumed, expected, strict=True):
      np.testing.assert_allclose(ours, theirs, rtol=1e-6)

  @parameterized.named_parameters(
    ("no_momentum", lambda: optimizers.SGD(0.1), "SGD, momentum=0"),
    ("adam", lambda: optimizers.Adam(0.1), "Adam"),
    ("schedule", lambda: optimizers.SGD(_schedule(), 0.9), "not a schedule"),
    ("not_of_keras", lambda: WithSlots(), "WithSlots"),
  )
  def test_refuses(self, new, message):
    with self.assertRaisesRegex(ValueError, f"`momentum_corr.*{message}"):
      inner_optimizer.InnerOptimizer(new(), momentum_correction=True)


class PlainApply:
  """Not of Keras: signed descent that counts on its own."""

  def apply(self, gradients, variables):
    for gradient, variable in zip(gradients, variables, strict=True):
      variable.assign_sub(0.5 * tf.sign(gradient))


class PlainApplyGradients:
  def apply_gradients(self, pairs):
    for gradient, variable in pairs:
      variable.assign_sub(2.0 * gradient)


class WithSlots:
  """Makes its slots when it first meets a variable."""

  def __init__(self):
    self.slots = {}

  def apply(self, gradients, variables):
    for gradient, variable in zip(gradients, variables, strict=True):
      if variable.path not in self.slots:
        self.slots[variable.path] = tf.Variable(
          lambda shape=variable.shape: tf.zeros(shape),
          name=_flat(variable.path) + "_sum",
        )
      variable.assign_sub(self.slots[variable.path].assign_add(gradient))


def _flat(path):
  return path.replace("/", "_")


NOT_OF_KERAS_3 = {
  "sgd": lambda: tf_keras.optimizers.SGD(0.1, momentum=0.9),
  "adam": lambda: tf_keras.optimizers.Adam(0.1),
  "schedule": lambda: tf_keras.optimizers.SGD(
    tf_keras.optimizers.schedules.PiecewiseConstantDecay(
      [1, 3], [0.5, 0.1, 0.02]
    )
  ),
  "legacy_adam": lambda: tf_keras.optimizers.legacy.Adam(0.1),
  "tf1_adam": lambda: tf.compat.v1.train.AdamOptimizer(0.1),
}


def _plain_reference(optimizer):
  """The result of an optimizer that Keras 3 does not know, in one go."""
  variables = [tf.Variable(v, name=_flat(path)) for path, v in VALUES.items()]
  for step in range(NUM_STEPS):
    gradients = _gradients(step)
    if hasattr(optimizer, "apply_gradients"):
      optimizer.apply_gradients(list(zip(gradients, variables, strict=True)))
    else:
      optimizer.apply(gradients, variables)
  return stores.numpy(variables)


class OtherLibrariesTest(stores.TestCase):
  """Task by task, with counters of their own, as one plain update."""

  def _check(self, make):
    trained = Trained(make(), policy=MIXED)
    for step in range(NUM_STEPS):
      trained.step(step)
    expected = _plain_reference(make())
    for path, ours, theirs in zip(
      VALUES, trained.values(), expected, strict=True
    ):
      np.testing.assert_allclose(ours, theirs, rtol=2e-5, err_msg=path)
    return trained

  @parameterized.named_parameters(NOT_OF_KERAS_3.items())
  def test_shards_and_whole_variables(self, make):
    self._check(make)

  def test_slots_are_saved_whole(self):
    state = self._check(NOT_OF_KERAS_3["adam"]).store.state()
    self.assertEqual(state["slots/adam/v/embedding"].shape, [6, 2])

  @parameterized.parameters("Adam", "Momentum")
  def test_sonnet(self, name):
    snt = pytest.importorskip("sonnet", reason="needs dm-sonnet")
    arguments = {"momentum": 0.9} if name == "Momentum" else {}
    self._check(lambda: getattr(snt.optimizers, name)(0.1, **arguments))

  def test_a_rate_that_is_set_counts_on_every_task(self):
    trained = Trained(tf_keras.optimizers.SGD(0.5))
    trained.inner.set_learning_rate(0.25)
    trained.step(0, [tf.ones(v.shape) for v in VALUES.values()])
    for before, after in zip(VALUES.values(), trained.values(), strict=True):
      np.testing.assert_allclose(after, before - 0.25, atol=1e-6)

  def test_a_rate_that_cannot_be_set_is_refused(self):
    with self.assertRaisesRegex(ValueError, "Keras 3 or `tf_keras`.*Plain"):
      Trained(PlainApply()).inner.set_learning_rate(0.1)


class NotKerasTest(stores.TestCase):
  def _check_one_step(self, optimizer, update):
    trained = Trained(optimizer)
    gradients = _gradients(0)
    trained.step(0, gradients)
    for before, gradient, after in zip(
      VALUES.values(), gradients, trained.values(), strict=True
    ):
      np.testing.assert_allclose(after, before - update(gradient), rtol=1e-6)
    return trained

  def test_apply(self):
    self._check_one_step(PlainApply(), lambda g: 0.5 * np.sign(g))

  def test_apply_gradients(self):
    self._check_one_step(PlainApplyGradients(), lambda g: 2.0 * g)

  def test_slots_made_in_the_first_step(self):
    trained = self._check_one_step(WithSlots(), lambda g: g)
    gradients = _gradients(0)
    trained.step(1, gradients)
    for path, before, gradient, after in zip(
      VALUES, VALUES.values(), gradients, trained.values(), strict=True
    ):
      np.testing.assert_allclose(after, before - 3 * gradient, rtol=1e-5)
      slot = trained.store.state()[f"slots/withslots/sum/{path}"]
      np.testing.assert_allclose(slot, 2 * gradient, rtol=1e-6)


if __name__ == "__main__":
  absltest.main()
