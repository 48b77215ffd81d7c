"""Trains a text classifier with a transformer block.

It follows the Keras example. Instead of film reviews, it has sentences of
numbered words, some of them kind and some unkind. A sentence belongs to class 1
if it has more kind words than unkind words.
"""

import keras
import numpy as np
from keras import layers

VOCABULARY = 200
LENGTH = 24
KIND, UNKIND = 40, 80  # Words below 40 are kind, those from 40 to 79 unkind.


def load_data(num_examples, seed):
  """Makes random sentences of kind, unkind and other words.

  Sentences with as many kind words as unkind words are left out.

  Returns:
    Numbers of words, int32 [at most num_examples, LENGTH], and the class of
    each sentence.
  """
  rng = np.random.default_rng(seed)
  words = rng.integers(0, VOCABULARY, [num_examples, LENGTH]).astype("int32")
  kind = (words < KIND).sum(axis=1)
  unkind = ((words >= KIND) & (words < UNKIND)).sum(axis=1)
  is_clear = kind != unkind
  return words[is_clear], (kind > unkind).astype("int32")[is_clear]


class TransformerBlock(layers.Layer):
  """A layer: attention and a small network, both with residual connections."""

  def __init__(self, embed_dim, num_heads, ff_dim, rate=0.1):
    """Makes the layers of the block."""
    super().__init__()
    self.attention = layers.MultiHeadAttention(num_heads, embed_dim)
    self.network = keras.Sequential(
      [layers.Dense(ff_dim, activation="relu"), layers.Dense(embed_dim)]
    )
    self.norms = [layers.LayerNormalization(epsilon=1e-6) for _ in range(2)]
    self.dropouts = [layers.Dropout(rate) for _ in range(2)]

  def call(self, inputs):
    """Applies the block to tensors [batch, length, embed_dim].

    Returns:
      A tensor of the same shape as `inputs`.
    """
    seen = self.dropouts[0](self.attention(inputs, inputs))
    hidden = self.norms[0](inputs + seen)
    thought = self.dropouts[1](self.network(hidden))
    return self.norms[1](hidden + thought)


class TokenAndPositionEmbedding(layers.Layer):
  """A layer that adds an embedding of each word and one of its position."""

  def __init__(self, length, vocabulary, embed_dim):
    """Makes the embedding of words and the embedding of positions."""
    super().__init__()
    self.words = layers.Embedding(vocabulary, embed_dim)
    self.positions = layers.Embedding(length, embed_dim)

  def call(self, inputs):
    """Maps words [batch, length] to vectors [batch, length, embed_dim]."""
    positions = keras.ops.arange(keras.ops.shape(inputs)[-1])
    return self.words(inputs) + self.positions(positions)


def build_model():
  """Makes a compiled classifier with one transformer block.

  The classifier works on the mean of the block's outputs over the words.
  """
  inputs = keras.Input([LENGTH], dtype="int32")
  hidden = TokenAndPositionEmbedding(LENGTH, VOCABULARY, 16)(inputs)
  hidden = TransformerBlock(embed_dim=16, num_heads=2, ff_dim=16)(hidden)
  hidden = layers.GlobalAveragePooling1D()(hidden)
  hidden = layers.Dropout(0.1)(hidden)
  outputs = layers.Dense(2, activation="softmax")(hidden)
  model = keras.Model(inputs, outputs)
  model.compile(
    keras.optimizers.Adam(0.005),
    "sparse_categorical_crossentropy",
    metrics=["accuracy"],
  )
  return model


x_train, y_train = load_data(2400, seed=1)
x_val, y_val = load_data(600, seed=2)

model = build_model()
history = model.fit(
  x_train,
  y_train,
  batch_size=64,
  epochs=4,
  validation_data=(x_val, y_val),
  verbose=2,
)

print(f"validation accuracy: {history.history['val_accuracy'][-1]:.3f}")
