"""A layer with an integer variable, which replicas do not share."""

import keras


class Counting(keras.layers.Layer):
  """Adds an integer to its inputs, and may count its calls."""

  def __init__(self, counts):
    super().__init__()
    self.counts = counts
    self.count = self.add_weight(
      shape=[], dtype="int32", trainable=False, initializer="ones"
    )

  def call(self, inputs):
    """Adds the count to `inputs`, after counting up if `counts` is true."""
    if self.counts:
      self.count.assign(self.count + 1)
    return inputs + keras.ops.cast(self.count, "float32")
