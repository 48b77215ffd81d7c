"""Tests for runtime.row_files."""

import os
import tempfile

import numpy as np
import tensorflow as tf
from absl.testing import absltest

from tf_replicas.runtime import row_files


def _writer(name, place, rows):
  return lambda path: row_files.save(path, name, place, rows)


def _writers(name, value, size):
  """For each block of `size` rows, a function that writes it."""
  for begin in range(0, len(value), size):
    rows = value[begin : begin + size]
    place = row_files.slice_of(value.shape, begin, begin + len(rows))
    yield _writer(name, place, rows)


def _stride_writers(name, value, count, size):
  for number in range(count):
    stored = row_files.stride_name(name, number, count)
    yield from _writers(stored, value[number::count], size)


class RowFilesTest(absltest.TestCase):
  def test_reads_other_blocks_than_were_written(self):
    prefix = os.path.join(tempfile.mkdtemp(), "tables")
    one = np.random.default_rng(1).normal(size=(10, 3)).astype("float32")
    two = np.arange(7, dtype="float64")[:, None]
    writers = [*_writers("a/one", one, 4), *_writers("two", two, 3)]
    row_files.write(prefix, writers)
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

  def test_reads_any_rows_of_strides(self):
    directory = tempfile.mkdtemp()
    value = np.random.default_rng(1).normal(size=(11, 3)).astype("float32")
    for count in (2, 3, 4):
      prefix = os.path.join(directory, f"tables_{count}")
      writers = _stride_writers("a/one", value, count, 2)
      row_files.write(prefix, writers, num_threads=count)
      entries = row_files.shapes(prefix)
      entry = row_files.Entry((11, 3), tf.float32, count)
      self.assertEqual(entries, {"a/one": entry})
      for begin in range(11):
        for end in range(begin, 12):
          found = row_files.read(prefix, "a/one", entry, begin, end)
          np.testing.assert_array_equal(found, value[begin:end])

  def test_a_writer_that_writes_elsewhere_is_an_error(self):
    directory, elsewhere = tempfile.mkdtemp(), tempfile.mkdtemp()
    (writer,) = _writers("a", np.zeros([4, 2], "float32"), 4)

    def astray(path):
      writer(os.path.join(elsewhere, os.path.basename(path)))

    for num_threads in (1, 2):
      with self.assertRaisesRegex(FileNotFoundError, "does not exist"):
        row_files.write(
          os.path.join(directory, "tables"), [astray], num_threads=num_threads
        )
      self.assertEmpty(os.listdir(directory))

  def test_writes_whole_tensors_too(self):
    prefix = os.path.join(tempfile.mkdtemp(), "tables")
    rows = np.arange(8, dtype="float32").reshape(4, 2)
    whole = {"text": b"words", "number": np.int64(3), "empty": rows[:0]}
    writers = [
      *_writers("rows", rows, 3),
      lambda path: row_files.save_whole(path, whole),
    ]
    row_files.write(prefix, writers)
    reader = tf.train.load_checkpoint(prefix)
    self.assertEqual(reader.get_tensor("text"), b"words")
    self.assertEqual(reader.get_tensor("number"), 3)
    self.assertEqual(reader.get_tensor("empty").shape, (0, 2))
    np.testing.assert_array_equal(reader.get_tensor("rows"), rows)

  def test_leaves_nothing_if_it_fails(self):
    directory = tempfile.mkdtemp()

    def writers():
      yield from _writers("a", np.zeros([4, 2], "float32"), 2)
      raise ValueError("no more")

    with self.assertRaisesRegex(ValueError, "no more"):
      row_files.write(os.path.join(directory, "tables"), writers())
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
