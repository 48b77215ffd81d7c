"""Tests for runtime.datasets."""

import tensorflow as tf
from absl.testing import absltest

from tf_replicas.runtime import datasets


class ResourcesTest(absltest.TestCase):
  def test_plain_data_sets_use_none(self):
    numbers = tf.data.Dataset.range(4).shuffle(4, seed=1).map(lambda n: n + 1)
    made = tf.data.Dataset.from_generator(
      lambda: iter([1]), output_signature=tf.TensorSpec([], tf.int64)
    )
    both = tf.data.Dataset.zip(numbers.batch(2).prefetch(1), made)
    self.assertEqual(datasets.resources_of(both), [])

  def test_variables_are_found_in_every_part(self):
    variable = tf.Variable(1.0)
    used = tf.data.Dataset.range(4).map(lambda _: variable)
    nested = tf.data.Dataset.range(2).flat_map(
      lambda _: tf.data.Dataset.range(2).map(lambda _: variable)
    )
    both = tf.data.Dataset.zip(used.batch(2), nested).prefetch(1)
    self.assertEqual(datasets.resources_of(both), [variable.handle.device] * 2)


class UntunedTest(absltest.TestCase):
  def test_disables_autotuning(self):
    untuned = datasets.untuned(tf.data.Dataset.range(4))
    self.assertIs(untuned.options().autotune.enabled, False)
    self.assertEqual([*untuned.as_numpy_iterator()], [0, 1, 2, 3])

  def test_leaves_the_choice_of_the_user(self):
    options = tf.data.Options()
    options.autotune.enabled = True
    numbers = tf.data.Dataset.range(4).with_options(options)
    self.assertIs(datasets.untuned(numbers), numbers)


if __name__ == "__main__":
  absltest.main()
