"""The tutorial's network with another normalization than ours.

For comparisons with what somebody has who uses TensorFlow and nothing of ours.
"""

import operator
from collections.abc import Callable

import keras
import tensorflow as tf

from cifar10 import lrn
from cifar10 import model as model_lib


class Normalization(keras.layers.Layer):
  """The network's normalization as TensorFlow computes it."""

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
  """The network of `cifar10.model.build`.

  Args:
    normalization: Takes the place of ours.
    configure: Returns the settings of the layer that takes a layer's place.
  """

  def clone(layer):
    if isinstance(layer, lrn.LocalResponseNormalization):
      return normalization(name=layer.name)
    return type(layer).from_config(configure(layer))

  return keras.models.clone_model(model_lib.build(), clone_function=clone)
