"""Tests for runtime.row_files."""

import os
import tempfile

import numpy as np
import tensorflow as tf
from absl.testing import absltest

from tf_replicas.runtime import row_files


def _blocks(name, value, size):
  return [
    row_files.Block(name, value.shape, begin, value[begin : begin + size])
    for begin in range(0, len(value), size)
  ]


class RowFilesTest(absltest.TestCase):
  def test_reads_other_blocks_than_were_written(self):
    prefix = os.path.join(tempfile.mkdtemp(), "tables")
    one = np.random.default_rng(1).normal(size=(10, 3)).astype("float32")
    two = np.arange(7, dtype="float64")[:, None]
    parts = [*_blocks("a/one", one, 4), *_blocks("two", two, 3)]
    row_files.write(prefix, parts)
    entries = row_files.shapes(prefix)
    self.assertEqual(
      entries,
      {
        "a/one": row_files.Entry((10, 3), tf.float32),
        "two": row_files.Entry((7, 1), tf.float64),
      },
    )
    for begin, end in ((0, 10), (3, 5), (9, 10), (2, 9)):
      found = row_files.read(prefix, "a/one", entries["a/one"], begin, end)
      np.testing.assert_array_equal(found, one[begin:end])
    found = row_files.read(prefix, "two", entries["two"], 1, 6)
    np.testing.assert_array_equal(found, two[1:6])

  def test_writes_whole_tensors_too(self):
    prefix = os.path.join(tempfile.mkdtemp(), "tables")
    rows = np.arange(8, dtype="float32").reshape(4, 2)
    whole = {"text": b"words", "number": np.int64(3), "empty": rows[:0]}
    row_files.write(prefix, _blocks("rows", rows, 3), whole)
    reader = tf.train.load_checkpoint(prefix)
    self.assertEqual(reader.get_tensor("text"), b"words")
    self.assertEqual(reader.get_tensor("number"), 3)
    self.assertEqual(reader.get_tensor("empty").shape, (0, 2))
    np.testing.assert_array_equal(reader.get_tensor("rows"), rows)

  def test_leaves_nothing_if_it_fails(self):
    directory = tempfile.mkdtemp()

    def parts():
      yield from _blocks("a", np.zeros([4, 2], "float32"), 2)
      raise ValueError("no more")

    with self.assertRaisesRegex(ValueError, "no more"):
      row_files.write(os.path.join(directory, "tables"), parts())
    self.assertEmpty(os.listdir(directory))

  def test_blocks_cover_all_rows(self):
    found = list(row_files.blocks((3_000_000, 8), tf.float32))
    self.assertEqual(found[0][0], 0)
    self.assertEqual(found[-1][1], 3_000_000)
    for (_, end), (begin, _) in zip(found, found[1:], strict=False):
      self.assertEqual(end, begin)
    self.assertLen(found, 3)


if __name__ == "__main__":
  absltest.main()
