"""Tests for cifar10.muon."""

import keras
import numpy as np
import tensorflow as tf
from absl.testing import absltest
from absl.testing import parameterized

from tests.support import optimizers
from tests.support import stores
from tf_replicas.store import inner_optimizer
from tf_replicas.store import placement

optimizers.require("Muon", "rms_rate")

from cifar10 import muon  # noqa: E402

RATE = 0.5
VALUES = {
  "conv1/kernel": np.linspace(-1, 1, 36, dtype="float32").reshape(2, 2, 3, 3),
  "conv1/bias": np.zeros([3], "float32"),
  "local3/kernel": np.linspace(1, 2, 8, dtype="float32").reshape(2, 4),
  "softmax_linear/kernel": np.linspace(1, 2, 8, dtype="float32").reshape(4, 2),
}


def _optimizer():
  return muon.Muon(
    RATE,
    momentum=0.5,
    ns_steps=1,
    weight_decay=0.1,
    adam_weight_decay=None,
    adam_lr_ratio=0.1,
    exclude_layers=["softmax_linear"],
  )


def _gradients(step):
  rng = np.random.default_rng(step)
  return [
    tf.constant(rng.normal(size=v.shape), "float32") for v in VALUES.values()
  ]


class CopyTest(absltest.TestCase):
  def test_has_the_same_settings(self):
    """Rules of periodic averaging make one for the local steps."""
    config = _optimizer().get_config()
    self.assertIsNone(config["rms_rate"])
    copied = muon.Muon.from_config(config)
    self.assertEqual(copied.get_config(), config)


class NewtonSchulzTest(parameterized.TestCase):
  @parameterized.parameters([(2, 5)], [(5, 2)], [(2, 3, 4, 3)], [(1, 1, 2, 7)])
  def test_equals_keras_of_the_matrix(self, shape):
    x = np.random.default_rng(0).normal(size=shape).astype("float32")
    ours = muon.Muon(RATE).zeropower_via_newtonschulz5(x, 5)
    matrix = x.reshape(-1, shape[-1])
    theirs = keras.optimizers.Muon(RATE).zeropower_via_newtonschulz5(matrix, 5)
    self.assertEqual(ours.shape, shape)
    np.testing.assert_allclose(
      np.reshape(ours, matrix.shape), theirs, rtol=1e-4, atol=1e-5
    )
    # The steps do not converge; they end between about 0.7 and 1.2.
    singular = np.linalg.svd(np.reshape(ours, matrix.shape), compute_uv=False)
    np.testing.assert_allclose(singular, 1.0, atol=0.35)

  def test_nothing_comes_of_nothing(self):
    zeros = np.zeros([2, 2, 3, 3], "float32")
    result = muon.Muon(RATE).zeropower_via_newtonschulz5(zeros, 5)
    np.testing.assert_array_equal(result, zeros)


class UpdateTest(parameterized.TestCase):
  def test_two_steps_by_hand(self):
    kernel = keras.Variable(np.ones([1, 2, 1, 2], "float32"), name="conv1")
    linear = keras.Variable(np.ones([2, 2], "float32"), name="softmax_linear")
    bias = keras.Variable(np.ones([2], "float32"), name="bias")
    optimizer = _optimizer()
    optimizer.build([kernel, linear, bias])
    gradient = np.float32([[3, 0], [0, 4]])
    optimizer.apply(
      [gradient.reshape(1, 2, 1, 2), gradient, gradient[0]],
      [kernel, linear, bias],
    )
    # Of norm 1 it is diag(0.6, 0.8), whatever the momentum adds to its length;
    # 3.4445 s - 4.775 s^3 + 2.0315 s^5 is 1.193269 and 0.976482 there.
    first = 0.95 - 0.5 * np.diag([1.193269, 0.976482])
    np.testing.assert_allclose(kernel.numpy()[0, :, 0], first, rtol=1e-5)
    # Adam's first step is its rate in the direction of the gradient.
    np.testing.assert_allclose(linear, 1 - 0.05 * np.eye(2), rtol=1e-5)
    np.testing.assert_allclose(bias, [0.95, 1], rtol=1e-5)
    second = np.float32([[0, 0], [0, 2]])
    optimizer.apply(
      [second.reshape(1, 2, 1, 2), second, second[0]], [kernel, linear, bias]
    )
    # The momentum is 0.5 [3, 4] + [0, 2] = [1.5, 4], the sum with half of it
    # and the gradient [0.75, 4]; of norm 1 that is [0.184289, 0.982872].
    expected = 0.95 * first - 0.5 * np.diag([0.605328, 0.715063])
    np.testing.assert_allclose(kernel.numpy()[0, :, 0], expected, rtol=1e-5)


class StoreTest(stores.TestCase):
  """On two PS tasks; the first holds the convolution and `local3`."""

  def _build(self):
    store = stores.create(VALUES, 2, placement.RoundRobin(2))
    inner = inner_optimizer.InnerOptimizer(_optimizer())
    inner.build(store)
    return store, inner

  def _train(self, store, inner, steps):
    for step in steps:
      gradients = _gradients(step)
      inner.refresh()
      for task in range(2):
        shards = store.contributed_shards(task)
        inner.apply(
          task,
          [gradients[position] for position, _ in shards],
          [store.variables(p)[number] for p, number in shards],
          tf.constant(step, tf.int64),
        )

  def test_task_by_task_is_one_apply(self):
    store, inner = self._build()
    self._train(store, inner, range(3))
    reference = _optimizer()
    variables = [
      keras.Variable(v, name=p.replace("/", "_")) for p, v in VALUES.items()
    ]
    for step in range(3):
      reference.apply(_gradients(step), variables)
    for ours, theirs, path in zip(
      stores.numpy(store.read()), stores.numpy(variables), VALUES, strict=True
    ):
      np.testing.assert_allclose(ours, theirs, rtol=2e-5, err_msg=path)

  def test_goes_on_from_its_slots(self):
    store, inner = self._build()
    self._train(store, inner, range(2))
    state = store.state()
    for path in VALUES:
      self.assertIn(f"slots/muon/momentum/{path}", state)
    self._train(store, inner, [2])
    expected = stores.numpy(store.read())
    self.new_cluster()
    store, inner = self._build()
    store.load_state(state)
    self._train(store, inner, [2])
    for ours, theirs in zip(stores.numpy(store.read()), expected, strict=True):
      np.testing.assert_allclose(ours, theirs, rtol=1e-6)

  def test_shards_are_refused(self):
    policy = placement.Partitioned(2, min_shard_bytes=16)
    store = stores.create(VALUES, 2, policy)
    inner = inner_optimizer.InnerOptimizer(_optimizer())
    with self.assertRaisesRegex(ValueError, "whole variables.*Received: Muon"):
      inner.build(store)


if __name__ == "__main__":
  absltest.main()
