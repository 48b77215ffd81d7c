"""Tests for drivers.one_machine: towers in one program."""

import contextlib
import functools
import io
import tempfile

import keras
import numpy as np
import tensorflow as tf
from absl.testing import absltest
from absl.testing import parameterized

from tests.support import optimizers
from tests.support import stores
from tests.support import word_model
from tf_replicas.drivers import mirrored
from tf_replicas.drivers import one_machine
from tf_replicas.rules import results as results_lib
from tf_replicas.session import checkpoints
from tf_replicas.session import training

NUM_STEPS = 5
BATCH, WORDS = word_model.BATCH, word_model.WORDS


def _replica(num_towers=0, **functions):
  devices = [stores.device(tower) for tower in range(num_towers)]
  return word_model.replica(devices, **functions)


def _driver(
  num_towers=0,
  optimizer=None,
  *,
  replica=None,
  namespace="",
  device_of_variables=one_machine.CPU,
  **options,
):
  optimizer = optimizer or keras.optimizers.SGD(0.5, momentum=0.9)
  return one_machine.OneMachine(
    lambda: replica or _replica(num_towers),
    lambda: word_model.rule(optimizer, **options),
    device_of_variables=device_of_variables,
    namespace=namespace,
  )


_state = word_model.state_of


@functools.cache
def _trained(num_towers, rule, device_of_variables=one_machine.CPU):
  """The steps of a training, and its state after them."""
  options = {}
  if rule == "all":
    options = {
      "clip_replica_norm": 0.4,
      "clip_mean_norm": 0.3,
      "loss_scale": 64.0,
    }
  optimizer = keras.optimizers.Adam(0.05) if options else None
  driver = _driver(
    num_towers, optimizer, device_of_variables=device_of_variables, **options
  )
  steps = [driver.step() for _ in range(NUM_STEPS)]
  return steps, _state(driver)


class EquivalenceTest(stores.TestCase):
  """N towers on N parts of a batch are one device on the whole of it."""

  @parameterized.product(num_towers=[1, 2, 3, 4], rule=["plain", "all"])
  def test_towers(self, num_towers, rule):
    one, one_state = _trained(0, rule)
    many, many_state = _trained(num_towers, rule)
    self.assertEqual([s.global_step for s in many], [1, 2, 3, 4, 5])
    self.assertEqual([s.num_examples for s in many], [BATCH] * NUM_STEPS)
    np.testing.assert_allclose(
      [s.loss for s in many], [s.loss for s in one], rtol=1e-5
    )
    self.assertLess(many[-1].loss, many[0].loss)
    word_model.assert_close(many_state, one_state)

  @parameterized.parameters(1, 2, 3, 4)
  def test_every_gradient(self, num_towers):
    batch = next(iter(word_model.dataset_fn(1, 0, 0)))
    results = []
    for number in (0, num_towers):
      replica = _replica(number)
      parameters = [tf.identity(v) for v in replica.variables]
      results.append(
        tf.function(replica.gradients, autograph=False)(parameters, batch)
      )
    one, many = results
    np.testing.assert_allclose(many.loss, one.loss, rtol=1e-5)
    self.assertIsInstance(many.gradients[0], tf.IndexedSlices)
    for ours, theirs in zip(many.gradients[:3], one.gradients, strict=False):
      np.testing.assert_allclose(
        tf.convert_to_tensor(ours),
        tf.convert_to_tensor(theirs),
        rtol=1e-5,
        atol=1e-6,
      )
    self.assertIsNone(many.gradients[3])

  def test_each_tower_computes_on_its_device(self):
    seen = []

    def loss_fn(parameters, words, labels):
      loss = word_model.loss_fn(parameters, words, labels)
      seen.append((loss.device, words.shape[0]))
      return loss

    _driver(replica=_replica(3, loss_fn=loss_fn)).step()
    self.assertEqual([size for _, size in seen[:3]], [BATCH // 3] * 3)
    for (device, _), number in zip(seen[:3], range(3), strict=True):
      self.assertEndsWith(device, f"CPU:{number}")

  def test_variables_and_slots_are_on_the_first_cpu(self):
    driver = _driver(2)
    driver.step()
    for index in range(len(driver.store.specs)):
      (variable,) = driver.store.variables(index)
      self.assertEndsWith(variable.device, "CPU:0")
    for variable in driver._update.rule.inner.optimizer.variables:
      self.assertEndsWith(variable.value.device, "CPU:0")


class VariablesOnAnotherDeviceTest(stores.TestCase):
  """A second CPU device stands in for the GPU that holds the variables."""

  @parameterized.product(num_towers=[1, 2], rule=["plain", "all"])
  def test_trains_like_variables_on_the_cpu(self, num_towers, rule):
    one, one_state = _trained(0, rule)
    steps, state = _trained(num_towers, rule, stores.device(1))
    np.testing.assert_allclose(
      [s.loss for s in steps], [s.loss for s in one], rtol=1e-5
    )
    word_model.assert_close(state, one_state)

  def test_updates_are_computed_where_the_variables_are(self):
    driver = _driver(2, device_of_variables=stores.device(1))
    driver.step()
    beside = [
      *(variables for variables in driver.store._variables),
      *(made for _, made in driver.store._beside.values()),
    ]
    for variable in sum(beside, []):
      self.assertEndsWith(variable.device, "CPU:1", variable.path)
    self.assertEndsWith(driver.store.global_step.device, "CPU:0")
    self.assertIn("CPU:1", driver.store.table())


class UpdateTest(stores.TestCase):
  def test_names_of_a_checkpoint(self):
    driver = _driver(2)
    driver.step()
    self.assertCountEqual(
      _state(driver),
      [
        "global_step",
        "examples_seen",
        "optimizer/began.sgd",
        *(f"variables/{path}" for path in word_model.PATHS),
        *(f"averages/{path}" for path in word_model.PATHS),
        *(f"slots/sgd/momentum/{path}" for path in word_model.PATHS),
      ],
    )

  def test_a_variable_without_a_gradient_is_skipped(self):
    driver = _driver(2, keras.optimizers.SGD(0.1, weight_decay=0.5))
    driver.step()
    state = _state(driver)
    np.testing.assert_array_equal(state["variables/unused"], [1, 1])
    self.assertFalse(np.allclose(state["variables/bias"], 0.0))

  def test_none_in_some_towers_counts_as_zero(self):
    calls = []

    def loss_fn(parameters, words, labels):
      calls.append(None)
      loss = word_model.loss_fn(parameters, words, labels)
      is_second = len(calls) % 2 == 0
      return loss + (tf.reduce_sum(parameters[3]) if is_second else 0.0)

    optimizer = keras.optimizers.SGD(1.0)
    driver = _driver(optimizer=optimizer, replica=_replica(2, loss_fn=loss_fn))
    driver.step()
    np.testing.assert_allclose(_state(driver)["variables/unused"], [0.5, 0.5])

  def test_rows_that_no_word_names_keep_their_slots(self):
    driver = _driver(2, optimizers.make("Adagrad", 0.5))
    before = _state(driver)
    driver.step()
    state = _state(driver)
    untouched = slice(WORDS // 2, None)
    for name in ("variables/table", "slots/adagrad/accumulator/table"):
      np.testing.assert_array_equal(
        state[name][untouched], before[name][untouched]
      )
    self.assertFalse(
      np.allclose(state["variables/table"], before["variables/table"])
    )

  def test_the_rate_set_before_a_step_is_used(self):
    driver = _driver(optimizer=keras.optimizers.SGD(0.5))
    first = driver.step()
    before = _state(driver)
    driver.set_learning_rate(0.0)
    second = driver.step()
    self.assertEqual(first.scalars["learning_rate"], 0.5)
    self.assertEqual(second.scalars["learning_rate"], 0.0)
    np.testing.assert_array_equal(
      _state(driver)["variables/kernel"], before["variables/kernel"]
    )

  @parameterized.parameters("loss", "gradient")
  def test_what_is_not_finite_is_refused_before_it_does_harm(self, what):
    loss_fn, dataset_fn = word_model.poisoned(what, step=2, shard=0)
    driver = _driver(
      replica=_replica(2, loss_fn=loss_fn, dataset_fn=dataset_fn)
    )
    driver.step()
    driver.step()
    before = _state(driver)
    with self.assertRaises(results_lib.NonFiniteGradientError) as raised:
      driver.step()
    self.assertEqual(
      str(raised.exception),
      "this process computed a loss or a gradient that is not finite, from the"
      " variables of step 2",
    )
    for name, value in _state(driver).items():
      np.testing.assert_array_equal(value, before[name], err_msg=name)

  def test_a_rule_for_several_replicas_is_refused(self):
    with self.assertRaisesRegex(ValueError, "must be 1 when.*Received: 2"):
      one_machine.OneMachine(
        _replica, lambda: word_model.rule(keras.optimizers.SGD(0.5), 2)
      )

  @parameterized.parameters(("", ""), ("same", "same"), ("one", "other"))
  def test_two_trainings_in_one_process_by_turns(self, *namespaces):
    """Each is exactly what it is alone."""

    def drivers():
      rates = zip([0.5, 0.125], namespaces, strict=True)
      return [
        _driver(number, keras.optimizers.Adam(rate), namespace=namespace)
        for number, (rate, namespace) in enumerate(rates, start=1)
      ]

    alone = [
      ([driver.step() for _ in range(NUM_STEPS)], _state(driver))
      for driver in drivers()
    ]
    both = drivers()
    steps = [[driver.step() for driver in both] for _ in range(NUM_STEPS)]
    for driver, made, (steps_alone, state_alone) in zip(
      both, zip(*steps, strict=True), alone, strict=True
    ):
      self.assertEqual(list(made), steps_alone)
      state = _state(driver)
      self.assertEqual(state.keys(), state_alone.keys())
      for name, value in state.items():
        np.testing.assert_array_equal(value, state_alone[name], err_msg=name)

  def test_beside_mirrored_variables(self):
    """Each is exactly what it is alone, though both have one name."""

    def drivers():
      devices = [stores.device(0), stores.device(1)]
      return [
        _driver(namespace="same"),
        mirrored.Mirrored(
          word_model.replica,
          lambda number: word_model.rule(keras.optimizers.SGD(0.125), number),
          devices,
          namespace="same",
        ),
      ]

    alone = [
      ([driver.step().loss for _ in range(3)], _state(driver))
      for driver in drivers()
    ]
    both = drivers()
    losses = [[driver.step().loss for driver in both] for _ in range(3)]
    for driver, made, (losses_alone, state_alone) in zip(
      both, zip(*losses, strict=True), alone, strict=True
    ):
      self.assertEqual(list(made), losses_alone)
      word_model.assert_close(_state(driver), state_alone)

  def test_an_invalid_name_is_refused(self):
    with self.assertRaisesRegex(ValueError, "name of a namespace.*'_'"):
      _driver(namespace="_")

  @parameterized.parameters("sgd", None, keras.optimizers.SGD)
  def test_what_is_no_update_rule_is_refused(self, rule):
    with self.assertRaisesRegex(TypeError, "must return one, such.*Received: "):
      one_machine.OneMachine(word_model.replica, lambda: rule)

  def test_a_data_set_that_ends_is_told(self):
    driver = _driver(
      replica=_replica(dataset_fn=lambda *a: word_model.dataset_fn(*a).take(1))
    )
    driver.step()
    with self.assertRaisesRegex(RuntimeError, "it must be endless"):
      driver.step()

  def test_a_data_set_may_end_the_training(self):
    replica = _replica(
      dataset_fn=lambda *a: word_model.dataset_fn(*a).take(2),
      on_data_end="stop",
    )
    driver = _driver(replica=replica)
    session = training.Session(None, state=None, max_steps=9)
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
      self.assertEqual(session.run(driver.step), 2)
    self.assertIn("the data have ended; training ends", output.getvalue())

  def test_no_data_at_all_is_an_error(self):
    replica = _replica(
      dataset_fn=lambda *a: word_model.dataset_fn(*a).take(0),
      on_data_end="go_on",
    )
    session = training.Session(None, state=None, max_steps=9)
    with self.assertRaisesRegex(RuntimeError, "ended, before the first update"):
      session.run(_driver(replica=replica).step)


class ResumeTest(stores.TestCase):
  def test_resumed_in_the_middle_is_as_never_interrupted(self):
    adam = keras.optimizers.Adam
    whole = _driver(2, adam(0.05))
    for _ in range(NUM_STEPS):
      whole.step()
    first = _driver(2, adam(0.05))
    for _ in range(3):
      first.step()
    directory = self.enter_context(tempfile.TemporaryDirectory())
    path = checkpoints.save(directory, _state(first))
    second = _driver(4, adam(0.05))
    checkpoints.restore(path, second.store)
    self.assertEqual(second.global_step, 3)
    for _ in range(NUM_STEPS - 3):
      second.step()
    expected = _state(whole)
    self.assertEqual(expected["examples_seen"], NUM_STEPS * BATCH)
    word_model.assert_close(_state(second), expected)

  def test_a_store_of_two_tasks_takes_the_checkpoint(self):
    driver = _driver(2)
    driver.step()
    state = _state(driver)
    store = stores.attach(driver.store.specs, 2, stores.cut(2))
    store.load_state(state)
    for name, value in store.state().items():
      np.testing.assert_array_equal(value, state[name], err_msg=name)


if __name__ == "__main__":
  absltest.main()
