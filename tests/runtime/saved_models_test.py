"""Tests for runtime.saved_models."""

import os
import tempfile

import numpy as np
import tensorflow as tf
from absl.testing import absltest

from tf_replicas.runtime import saved_models


class _Rows:
  """A tensor that is read in blocks of rows."""

  dtype = tf.float32

  def __init__(self, value):
    self.value, self.shape = value, value.shape

  def read(self, begin, end):
    return self.value[begin:end]


class _Module(tf.Module):
  def __init__(self):
    super().__init__()
    empty = tf.zeros([0, 2])
    self.rows = tf.Variable(empty, shape=[None, 2], name="mine/rows")
    self.others = [tf.Variable(empty, shape=[None, 2], name="other")]
    self.text = tf.Variable("words", name="text")

  @tf.function(autograph=False, input_signature=[tf.TensorSpec([], tf.int32)])
  def row(self, number):
    return tf.gather(self.rows, number) + tf.gather(self.others[0], number)


class FillTest(absltest.TestCase):
  def setUp(self):
    super().setUp()
    self.directory = tempfile.mkdtemp()
    tf.saved_model.save(_Module(), self.directory)

  def test_replaces_values(self):
    rows = np.arange(6, dtype="float32").reshape(3, 2)
    values = {"other": _Rows(10 * rows), "mine/rows": _Rows(rows)}
    saved_models.fill(self.directory, values)
    loaded = tf.saved_model.load(self.directory)
    np.testing.assert_array_equal(loaded.rows, rows)
    np.testing.assert_array_equal(loaded.row(2), 11 * rows[2])
    self.assertEqual(loaded.text.numpy(), b"words")
    # Nothing of what was there before.
    self.assertContainsSubset(
      os.listdir(self.directory), ["assets", "saved_model.pb", "variables"]
    )
    self.assertLen(os.listdir(f"{self.directory}/variables"), 4)

  def test_refuses_an_unknown_name(self):
    with self.assertRaisesRegex(KeyError, "no_such"):
      saved_models.fill(self.directory, {"no_such": _Rows(np.zeros([1, 2]))})


class NewDirectoryTest(absltest.TestCase):
  def setUp(self):
    super().setUp()
    self.parent = tempfile.mkdtemp()
    self.path = os.path.join(self.parent, "new")

  def _write(self):
    with saved_models.new_directory(self.path, "place") as directory:
      self.assertFalse(os.path.exists(directory))
      os.mkdir(directory)
      open(f"{directory}/file", "w").close()
      open(f"{os.path.dirname(directory)}/temporary", "w").close()

  def test_appears_when_it_is_complete(self):
    self._write()
    self.assertEqual(os.listdir(self.parent), ["new"])
    self.assertEqual(os.listdir(self.path), ["file"])

  def test_replaces_an_empty_directory(self):
    os.mkdir(self.path)
    self._write()
    self.assertEqual(os.listdir(self.path), ["file"])

  def test_leaves_nothing_after_an_error(self):
    with self.assertRaisesRegex(ValueError, "wrong"):
      with saved_models.new_directory(self.path, "place") as directory:
        os.mkdir(directory)
        raise ValueError("wrong")
    self.assertEmpty(os.listdir(self.parent))

  def test_overwrites_nothing(self):
    self._write()
    with self.assertRaisesRegex(FileExistsError, "`place` must not exist"):
      self._write()
    self.path += "/file"
    with self.assertRaisesRegex(FileExistsError, "`place` must be a directory"):
      self._write()


if __name__ == "__main__":
  absltest.main()
