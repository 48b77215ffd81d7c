"""Builds the CIFAR-10 tutorial's network without this project's normalization.

It is for comparisons with programs that use TensorFlow alone.
"""

import operator
from collections.abc import Callable

import keras
import tensorflow as tf

from cifar10 import lrn
from cifar10 import model as model_lib


class Normalization(keras.layers.Layer):
  """Layer for local response normalization by TensorFlow's own op."""

  def call(self, x):
    return tf.nn.local_response_normalization(
      x, depth_radius=4, bias=1.0, alpha=0.001 / 9.0, beta=0.75
    )


def build(
  normalization: type[keras.layers.Layer] = Normalization,
  configure: Callable[[keras.layers.Layer], dict] = operator.methodcaller(
    "get_config"
  ),
) -> keras.Model:
  """Builds the network of `cifar10.model.build` with another normalization.

  Args:
    normalization: The layer that replaces this project's normalization.
    configure: Maps each other layer to the configuration of the layer that
      replaces it.
  """

  def clone(layer):
    if isinstance(layer, lrn.LocalResponseNormalization):
      return normalization(name=layer.name)
    return type(layer).from_config(configure(layer))

  return keras.models.clone_model(model_lib.build(), clone_function=clone)
