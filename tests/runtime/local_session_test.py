"""Tests of `runtime.local_session`."""

import threading

import numpy as np
import tensorflow as tf
from absl.testing import absltest

from tf_replicas.runtime import local_session


class LocalSessionTest(absltest.TestCase):
  def test_runs_operations_on_values(self):
    total, text, nothing = local_session.run(
      lambda a, b, c: (a + b, tf.strings.upper(c), tf.no_op()),
      [1.0, 2.0],
      np.ones(2),
      "text",
    )
    np.testing.assert_array_equal(total, [2.0, 3.0])
    self.assertEqual(text, b"TEXT")
    self.assertIsNone(nothing)

  def test_errors_are_those_of_eager_mode(self):
    with self.assertRaises(tf.errors.NotFoundError):
      local_session.run(lambda: tf.io.read_file("/there/is/no/file"))

  def test_leaves_eager_mode_as_it_was(self):
    found = []

    def run():
      found.append(local_session.run(tf.square, 3.0))
      found.append(tf.executing_eagerly())

    def meanwhile():
      self.assertFalse(tf.executing_eagerly())
      thread = threading.Thread(target=run)
      thread.start()
      thread.join()
      return tf.no_op()

    local_session.run(meanwhile)
    self.assertEqual(found, [9.0, True])
    self.assertTrue(tf.executing_eagerly())


if __name__ == "__main__":
  absltest.main()
