"""Tests for cifar10.tutorial_summaries."""

import numpy as np
import tensorflow as tf
from absl.testing import absltest

from cifar10 import config as config_lib
from cifar10 import inputs
from cifar10 import model as model_lib
from cifar10 import sources
from cifar10 import tutorial_summaries


class TutorialSummariesTest(absltest.TestCase):
  def test_they_are_of_the_given_values_and_the_first_batches(self):
    config = config_lib.Config(
      train_dir="unused", dataset="synthetic", batch_size=4, seed=3
    )
    model = model_lib.build(seed=7)  # Not the first values of the training.
    values = {v.path: v.numpy() for v in model.trainable_variables}
    summarize = tutorial_summaries.make(config)
    first, second = summarize(values), summarize(values)
    images, labels = next(
      iter(
        inputs.train_dataset(
          sources.find("synthetic", None), batch_size=4, seed=3
        )
      )
    )
    parameters = {path: tf.constant(value) for path, value in values.items()}
    with tf.GradientTape(watch_accessed_variables=False) as tape:
      tape.watch(parameters)
      total, _ = model_lib.total_loss(model, parameters, images, labels)
    gradients = tape.gradient(total, parameters)
    for path, gradient in gradients.items():
      np.testing.assert_allclose(
        first.histograms[f"{path}/gradients"], gradient, atol=1e-6
      )
    self.assertAlmostEqual(first.scalars["total_loss (raw)"], float(total), 4)
    self.assertAlmostEqual(
      first.scalars["total_loss (raw)"],
      first.scalars["cross_entropy (raw)"]
      + first.scalars["weight_decay (raw)"],
      places=4,
    )
    # The first average is the first loss; the decay is 0.9.
    self.assertEqual(
      first.scalars["total_loss"], first.scalars["total_loss (raw)"]
    )
    self.assertAlmostEqual(
      second.scalars["total_loss"],
      0.9 * first.scalars["total_loss (raw)"]
      + 0.1 * second.scalars["total_loss (raw)"],
      places=5,
    )
    conv1 = first.histograms["conv1/activations"]
    self.assertEqual(conv1.shape, (4, 24, 24, 64))
    self.assertAlmostEqual(
      first.scalars["conv1/sparsity"], float(np.mean(conv1 == 0)), 5
    )
    self.assertEqual(first.scalars["softmax_linear/sparsity"], 0.0)
    self.assertEqual([*first.images], ["images/0", "images/1", "images/2"])
    picture = first.images["images/0"]
    self.assertEqual((picture.shape, picture.dtype), ((24, 24, 3), np.uint8))
    self.assertEqual((picture.min(), picture.max()), (0, 255))


if __name__ == "__main__":
  absltest.main()
