"""Tests for runtime.keras_internals."""

import functools

import keras
import tensorflow as tf
from absl.testing import absltest

from tests.support import optimizers
from tf_replicas.runtime import keras_internals


class KerasInternalsTest(absltest.TestCase):
  def test_classes_that_keras_lacks_are_left_out(self):
    self.assertEqual(
      keras_internals.optimizer_classes("SGD", "NoSuchOptimizer"),
      (keras.optimizers.SGD,),
    )

  def test_a_class_that_keras_lacks_is_refused_when_used(self):
    sgd = keras_internals.optimizer_class("SGD")
    self.assertIs(sgd, keras.optimizers.SGD)
    self.assertIs(keras_internals.optimizer_class("SGD", "momentum"), sgd)
    with self.assertRaisesRegex(ValueError, "SGD needs a newer version"):
      keras_internals.optimizer_class("SGD", "no_such_argument")
    with self.assertRaisesRegex(
      ValueError, "NoSuchOptimizer needs a newer version of Keras. Received: K"
    ):
      keras_internals.optimizer_class("NoSuchOptimizer")

  def test_a_muon_that_fails_with_tensorflow_is_refused(self):
    optimizers.require("Muon")
    muon = keras.optimizers.Muon(0.1)
    vars(muon).pop("rms_rate", None)  # As of Keras 3.10 to 3.12.
    with self.assertRaisesRegex(ValueError, "Muon needs Keras 3.13 or newer"):
      keras_internals.check_works(muon)

  def test_a_rate_is_a_variable_or_a_schedule(self):
    optimizer = keras.optimizers.SGD(0.5)
    rate = keras_internals.learning_rate(optimizer)
    self.assertIsInstance(rate, keras.Variable)
    self.assertEqual(float(rate), 0.5)
    self.assertFalse(keras_internals.has_schedule(optimizer))
    schedule = keras.optimizers.schedules.ExponentialDecay(0.5, 10, 0.9)
    optimizer = keras.optimizers.SGD(schedule)
    self.assertIs(keras_internals.learning_rate(optimizer), schedule)
    self.assertTrue(keras_internals.has_schedule(optimizer))

  def test_variables_have_different_ids(self):
    variables = [tf.Variable(0.0), tf.Variable(0.0)]
    self.assertLen(set(map(keras_internals.variable_id, variables)), 2)

  def test_layers_within_layers_and_their_weights_are_found(self):
    inner = keras.Sequential([keras.layers.Embedding(4, 2)])
    model = keras.Sequential([keras.Input([3]), inner])
    (layer,) = inner.layers
    self.assertIn(layer, keras_internals.layers_of(model))
    weight = keras_internals.embedding_weight(layer)
    self.assertIs(weight, layer.weights[0])
    other = keras.layers.Embedding(4, 2)
    keras_internals.set_embedding_weight(other, weight)
    other.built = True
    self.assertIs(other.embeddings, weight)

  def test_equal_paths_are_numbered(self):
    paths = ["a/b", "a/b_1", "a/b", "c", "a/b"]
    variables = [keras.Variable(0.0, name="v") for _ in paths]
    for variable, path in zip(variables, paths, strict=True):
      variable._path = path
    keras_internals.make_paths_distinct(variables)
    self.assertEqual(
      [variable.path for variable in variables],
      ["a/b", "a/b_1", "a/b_2", "c", "a/b_3"],
    )

  def test_excluded_variables_are_copied(self):
    source = keras.optimizers.AdamW(0.1)
    source.exclude_from_weight_decay(var_names=["bias"])
    variables = [keras.Variable(0.0, name=name) for name in ("kernel", "bias")]
    target = keras_internals.copy_of(source)
    self.assertEqual(
      [target._use_weight_decay(v) for v in variables], [True, False]
    )

  def test_excluded_variables_are_found_by_their_paths(self):
    source = keras.optimizers.AdamW(0.1)
    variables = [keras.Variable(0.0, name=name) for name in ("a", "ab", "bias")]
    source.exclude_from_weight_decay(variables[:1], ["bias"])
    target = keras_internals.copy_of(source, variables)
    names = ["a", "a/part_1", "ab", "b/a", "bias"]
    self.assertEqual(
      [target._use_weight_decay(tf.Variable(0.0, name=n)) for n in names],
      [False, False, True, True, False],
    )

  def test_a_schedule_or_function_of_the_user_is_not_serialized(self):
    class Schedule(keras.optimizers.schedules.LearningRateSchedule):
      def __call__(self, step):
        return 0.25

    for rate in (Schedule(), lambda: 0.5, functools.partial(float, 0.5)):
      source = keras.optimizers.SGD(rate, momentum=0.75)
      target = keras_internals.copy_of(source, nesterov=True)
      self.assertIs(keras_internals.learning_rate(target), rate)
      self.assertIs(keras_internals.learning_rate(source), rate)
      self.assertEqual(target.momentum, 0.75)
      self.assertTrue(target.nesterov)


if __name__ == "__main__":
  absltest.main()
