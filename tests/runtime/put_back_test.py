"""Tests for runtime.put_back."""

import numpy as np
import tensorflow as tf
from absl.testing import absltest

from tf_replicas.runtime import put_back


def _various(count):
  return tf.data.Dataset.range(1, count + 1, output_type=tf.int32).map(
    lambda n: {
      "ragged": tf.RaggedTensor.from_row_lengths(tf.range(n), [n]),
      "sparse": tf.sparse.expand_dims(tf.sparse.eye(n), 0),
      "dense": tf.ones([n, 4]),
      "words": tf.fill([n], "word"),
      "nothing": None,
    }
  )


class PutBackTest(absltest.TestCase):
  def test_batches_may_have_any_structure_and_shape(self):
    iterator = iter(_various(3))
    kept = put_back.PutBack(iterator.element_spec, device=None)

    @tf.function(autograph=False)
    def step(is_refused):
      batch = kept.take(iterator)
      self.assertEqual(batch["dense"].shape.as_list(), [None, 4])
      with tf.control_dependencies([kept.put(kept.flatten(batch), is_refused)]):
        return tf.nest.map_structure(
          lambda part: None if part is None else tf.identity(part),
          batch,
          expand_composites=True,
        )

    sizes = []
    for is_refused in (False, True, True, False, False):
      batch = step(tf.constant(is_refused))
      size = batch["dense"].shape[0]
      self.assertIsNone(batch["nothing"])
      self.assertEqual(batch["ragged"].to_list(), [list(range(size))])
      np.testing.assert_array_equal(
        tf.sparse.to_dense(batch["sparse"]), [np.eye(size)]
      )
      sizes.append(size)
    self.assertEqual(sizes, [1, 2, 2, 2, 3])

  def test_a_loop_puts_back_the_batch_of_its_last_step(self):
    data_set = _various(9).map(
      lambda parts: parts | {"inner": tf.data.Dataset.range(3)}
    )
    iterator = iter(data_set)
    kept = put_back.PutBack(iterator.element_spec, device=None)

    @tf.function(autograph=False)
    def run(steps):
      def body(count, tensors):
        del tensors
        return [count + 1, kept.flatten(kept.take(iterator))]

      _, tensors = tf.while_loop(
        lambda count, _: count < steps,
        body,
        [tf.constant(0), kept.no_batch()],
        shape_invariants=[tf.TensorShape([]), kept.loop_shapes],
      )
      return kept.put(tensors, steps > 0)

    for steps in (3, 0, 1):
      run(tf.constant(steps))
    batch = kept.take(iterator)
    self.assertEqual(batch["dense"].shape, [3, 4])
    self.assertEqual(batch["words"].numpy().tolist(), [b"word"] * 3)
    self.assertEqual(batch["ragged"].to_list(), [[0, 1, 2]])
    self.assertLen(list(batch["inner"]), 3)
    self.assertEqual(kept.take(iterator)["dense"].shape, [4, 4])

  def test_an_early_end_leaves_nothing_for_the_next_user(self):
    iterator = iter(tf.data.Dataset.range(3))
    kept = put_back.PutBack(iterator.element_spec, device=None)
    kept.put(kept.flatten(kept.take(iterator)), tf.constant(True))
    kept.clear()
    kept.clear()  # There is none.
    self.assertEqual(int(kept.take(iterator)), 1)

  def test_each_has_a_queue_of_its_own(self):
    iterators = [iter(tf.data.Dataset.range(n, n + 3)) for n in (0, 10)]
    first, second = (
      put_back.PutBack(i.element_spec, device=None) for i in iterators
    )
    batch = first.flatten(first.take(iterators[0]))
    first.put(batch, tf.constant(True))
    self.assertEqual(int(second.take(iterators[1])), 10)
    self.assertEqual(int(first.take(iterators[0])), 0)


if __name__ == "__main__":
  absltest.main()
