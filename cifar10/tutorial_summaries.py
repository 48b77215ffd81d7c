"""Computes what the summaries of the TF1 tutorial show (`cifar10.py`).

They are computed from one batch of training images and the present values of
the variables: the images; for each layer of the tutorial's `inference`, a
histogram of its activations and their *sparsity*, the share of zeros; a
histogram of the gradient of each variable; and the losses, cross entropy and
weight decay apart, each as it is (`raw`) and averaged over the summaries. One
batch stands for all towers: `cifar10_multi_gpu_train.py` wrote the summaries of
its last tower only.
"""

import itertools
from collections.abc import Callable
from collections.abc import Mapping

import keras
import numpy as np
import tensorflow as tf

from cifar10 import config as config_lib
from cifar10 import inputs
from cifar10 import model as model_lib
from cifar10 import sources
from tf_replicas.programs import run_options
from tf_replicas.runtime import resources

_LAYERS = ("conv1", "conv2", "local3", "local4", "softmax_linear")
_NUM_IMAGES = 3
_DECAY = 0.9  # Of the averages of the losses, as in the tutorial.


def make(
  config: config_lib.Config,
) -> Callable[[Mapping[str, np.ndarray]], run_options.Summary]:
  """Makes a function that computes the summaries.

  Args:
    config: The settings of the training.

  Returns:
    A function that takes the values of the trainable variables by path, and
    returns the summaries.
  """
  device = resources.this_device()
  with tf.device(None), tf.device(device):
    model = model_lib.build(
      seed=config.seed, compute_dtype=config.compute_dtype
    )
    outputs = [model.get_layer(name).output for name in _LAYERS]
    layers = keras.Model(model.inputs, outputs)
    paths = [v.path for v in model.trainable_variables]
    dataset = inputs.train_dataset(
      sources.find(config.dataset, config.data_dir),
      batch_size=config.batch_size,
      seed=config.seed,
      distort_colors=config.distort_colors,
      centered_from=config_lib.centered_from(config),
      crop_sizes=config_lib.crop_sizes(config),
    )
    batches = iter(dataset)
    # Now, as a client that runs a kind of operation for the first time waits
    # for all tasks (TensorFlow 2.21).
    batches = itertools.chain([next(batches)], batches)

  @tf.function(autograph=False)
  def compute(values, images, labels):
    with tf.GradientTape(watch_accessed_variables=False) as tape:
      tape.watch(values)
      activations, _ = layers.stateless_call(values, [], images, training=True)
      entropy = model_lib.loss(
        activations[-1], labels, label_smoothing=config.label_smoothing
      )
      parameters = dict(zip(paths, values, strict=True))
      decay = model_lib.weight_decay(parameters, factor=config.weight_decay)
      total = entropy + decay
    losses = {
      "cross_entropy": entropy,
      "weight_decay": decay,
      "total_loss": total,
    }
    zeros = [tf.math.zero_fraction(a) for a in activations]
    activations = [tf.cast(a, tf.float32) for a in activations]
    return losses, activations, zeros, tape.gradient(total, values)

  # Now, as a client that traces waits for all tasks too.
  compute.get_concrete_function(
    [tf.TensorSpec(v.shape, tf.float32) for v in model.trainable_variables],
    *dataset.element_spec,
  )
  averages: dict[str, float] = {}

  def summarize(values: Mapping[str, np.ndarray]) -> run_options.Summary:
    with tf.device(None), tf.device(device):
      images, labels = next(batches)
      tensors = [tf.constant(values[path]) for path in paths]
      losses, activations, zeros, gradients = compute(tensors, images, labels)
    summary = run_options.Summary({}, {}, {})
    for name, loss in losses.items():
      average = averages.setdefault(name, float(loss))
      averages[name] = _DECAY * average + (1 - _DECAY) * float(loss)
      summary.scalars[f"{name} (raw)"] = float(loss)
      summary.scalars[name] = averages[name]
    for name, values_of_layer, share in zip(
      _LAYERS, activations, zeros, strict=True
    ):
      summary.histograms[f"{name}/activations"] = values_of_layer.numpy()
      summary.scalars[f"{name}/sparsity"] = float(share)
    for path, gradient in zip(paths, gradients, strict=True):
      summary.histograms[f"{path}/gradients"] = gradient.numpy()
    for index, image in enumerate(images.numpy()[:_NUM_IMAGES]):
      summary.images[f"images/{index}"] = _as_picture(image)
    return summary

  return summarize


def _as_picture(image: np.ndarray) -> np.ndarray:
  """Scales a standardized image to uint8, from its darkest to its brightest."""
  low, high = image.min(), image.max()
  scaled = (image - low) / max(float(high - low), 1e-6)
  return np.round(255 * scaled).astype(np.uint8)
