"""Tests for the optimizer of rules.periodic.local_steps."""

import keras
import numpy as np
import tensorflow as tf
from absl.testing import absltest
from absl.testing import parameterized

from tests.support import optimizers as makers
from tests.support import stores
from tf_replicas.rules.periodic import local_steps

optimizers = keras.optimizers
VALUES = {
  "embedding": np.linspace(-1, 1, 12, dtype="float32").reshape(6, 2),
  "dense/kernel": np.linspace(1, 2, 8, dtype="float32").reshape(2, 4),
  "dense/bias": np.zeros([4], "float32"),
  "unused": np.float32([3.0]),
  "scale": np.float32(0.5),
}
NUM_STEPS = 4


def _without_bias(optimizer):
  optimizer.exclude_from_weight_decay(var_names=["bias"])
  return optimizer


OPTIMIZERS = {
  "sgd": lambda: optimizers.SGD(0.1),
  "momentum": lambda: optimizers.SGD(0.1, momentum=0.9),
  "nesterov": lambda: optimizers.SGD(0.1, momentum=0.9, nesterov=True),
  "clipvalue": lambda: optimizers.SGD(0.1, clipvalue=0.3),
  "clipnorm": lambda: optimizers.SGD(0.1, clipnorm=0.3),
  "global_clipnorm": lambda: optimizers.SGD(0.1, global_clipnorm=0.3),
  "adam": lambda: optimizers.Adam(0.1, amsgrad=True),
  "adamw": lambda: optimizers.AdamW(0.1, weight_decay=0.01),
  "adamw_not_bias": lambda: _without_bias(optimizers.AdamW(0.1, 0.5)),
  "nadam": lambda: optimizers.Nadam(0.1),
  "adagrad": lambda: optimizers.Adagrad(0.1),
  "rmsprop": lambda: optimizers.RMSprop(0.1, momentum=0.9, centered=True),
  "adadelta": lambda: optimizers.Adadelta(1.0),
  "adamax": lambda: optimizers.Adamax(0.1),
  "ftrl": lambda: optimizers.Ftrl(0.1, l1_regularization_strength=0.01),
  "lamb": lambda: makers.make("Lamb", 0.1),
  "lion": lambda: optimizers.Lion(0.01),
  "muon": lambda: makers.make("Muon", 0.1),
}


def _gradients(step):
  rng = np.random.default_rng(step)
  return [
    None if path == "unused" else tf.constant(rng.normal(size=v.shape), v.dtype)
    for path, v in VALUES.items()
  ]


def _train(optimizer):
  """The values after `NUM_STEPS` of the optimizer on tensors alone."""
  local = local_steps.LocalOptimizer(optimizer)
  specs = [stores.spec(path, v.shape) for path, v in VALUES.items()]
  local.build(stores.attach(specs))
  step_fn = tf.function(local.apply, autograph=False)
  parameters, state = list(map(tf.constant, VALUES.values())), local.new_state()
  for step in range(NUM_STEPS):
    parameters, state = step_fn(
      _gradients(step), parameters, state, tf.constant(local.learning_rate)
    )
  return stores.numpy(parameters)


class LocalOptimizerTest(stores.TestCase):
  @parameterized.named_parameters(OPTIMIZERS.items())
  def test_same_as_over_variables(self, make):
    optimizer = make()
    variables = [
      keras.Variable(v, name=path.replace("/", "_"))
      for path, v in VALUES.items()
    ]
    optimizer.build(variables)
    for step in range(NUM_STEPS):
      pairs = zip(_gradients(step), variables, strict=True)
      optimizer.apply(
        *zip(*[p for p in pairs if p[0] is not None], strict=True)
      )
    for path, actual, expected in zip(
      VALUES, _train(make()), stores.numpy(variables), strict=True
    ):
      np.testing.assert_allclose(
        actual, expected, rtol=1e-5, atol=1e-6, err_msg=path
      )

  def test_copy_has_the_same_settings(self):
    for name in ("nesterov", "adamw_not_bias"):
      local = local_steps.LocalOptimizer(OPTIMIZERS[name]())
      copied = local.copy().optimizer
      self.assertIsNot(copied, local.optimizer)
      for actual, expected in zip(
        _train(copied), _train(local.optimizer), strict=True
      ):
        np.testing.assert_array_equal(actual, expected)

  def test_rate_is_an_argument(self):
    local = local_steps.LocalOptimizer(optimizers.SGD(0.5))
    local.build(stores.attach([stores.spec("v", [2])]))
    (value,), _ = local.apply(
      [tf.constant([1.0, 2.0])],
      [tf.constant([3.0, 3.0])],
      local.new_state(),
      tf.constant(2.0),
    )
    np.testing.assert_allclose(value, [1.0, -1.0])

  def test_nothing_to_apply_changes_nothing(self):
    local = local_steps.LocalOptimizer(optimizers.Adam(0.5))
    local.build(stores.attach([stores.spec("v", [])]))
    values, state = local.apply(
      [None], [tf.constant(3.0)], local.new_state(), tf.constant(1.0)
    )
    self.assertEqual(stores.numpy(values), [3.0])
    np.testing.assert_array_equal(state[0], 0)

  @parameterized.named_parameters(
    ("no_optimizer", lambda: 3, TypeError, "`optimizer` must be a Keras.* 3"),
    (
      "schedule",
      lambda: optimizers.SGD(
        optimizers.schedules.PiecewiseConstantDecay([1], [0.5, 0.1])
      ),
      ValueError,
      "a number as its learning rate",
    ),
    (
      "adafactor",
      lambda: optimizers.Adafactor(0.1),
      ValueError,
      "tensors alone.*Adafactor",
    ),
    (
      "loss_scale",
      lambda: optimizers.LossScaleOptimizer(optimizers.SGD(0.1)),
      ValueError,
      "tensors alone.*LossScale",
    ),
    (
      "ema",
      lambda: optimizers.SGD(0.1, use_ema=True),
      ValueError,
      "`use_ema`; give `variable_averages`",
    ),
    (
      "accumulation",
      lambda: optimizers.SGD(0.1, gradient_accumulation_steps=2),
      ValueError,
      "`gradient_accumulation_steps`; raise `period`",
    ),
  )
  def test_refuses(self, make, error, message):
    with self.assertRaisesRegex(error, message):
      local_steps.LocalOptimizer(make())

  def test_refuses_what_is_built(self):
    optimizer = optimizers.SGD(0.1)
    optimizer.build([keras.Variable(1.0)])
    local = local_steps.LocalOptimizer(optimizer)
    with self.assertRaisesRegex(ValueError, "must not be built yet"):
      local.build(stores.attach([stores.spec("v", [2])]))


if __name__ == "__main__":
  absltest.main()
