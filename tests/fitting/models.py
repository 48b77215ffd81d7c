"""Compiled models, with data for each, that `fit` and Keras train alike."""

from collections.abc import Callable
from typing import NamedTuple

import keras
import numpy as np
import tensorflow as tf
from keras import layers

from tests.support import optimizers

NUM_EXAMPLES = 44


class Case(NamedTuple):
  """A model and its data.

  Attributes:
    model_fn: Builds and compiles the model, the same every time.
    arguments: `x`, `y` and the like, for `fit`.
    tolerance: Largest difference of weights and metrics.
  """

  model_fn: Callable[[], keras.Model]
  arguments: dict
  tolerance: float = 2e-5


def _numbers(*shape: int) -> np.ndarray:
  generator = np.random.default_rng(sum(shape))
  return generator.normal(size=(NUM_EXAMPLES, *shape)).astype("float32")


def _classes(count: int) -> np.ndarray:
  return np.random.default_rng(count).integers(0, count, NUM_EXAMPLES)


def _compiled(
  build: Callable[[], keras.Model],
  optimizer: str | Callable[[], keras.optimizers.Optimizer] = "sgd",
  **arguments,
) -> Callable[[], keras.Model]:
  def model_fn():
    keras.utils.set_random_seed(7)
    model = build()
    made = {k: v() if callable(v) else v for k, v in arguments.items()}
    own = optimizer() if callable(optimizer) else optimizer
    model.compile(own, **made)
    return model

  return model_fn


def _cross_entropy() -> keras.losses.Loss:
  return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def _sequential(*inner: Callable[[], layers.Layer], inputs) -> Callable:
  return lambda: keras.Sequential([inputs(), *(make() for make in inner)])


def _dense(optimizer, **more) -> Case:
  build = _sequential(
    lambda: layers.Dense(8, activation="relu", **more),
    lambda: layers.Dense(3),
    inputs=lambda: keras.Input([5]),
  )
  model_fn = _compiled(
    build, optimizer, loss=_cross_entropy, metrics=["accuracy"]
  )
  return Case(model_fn, {"x": _numbers(5), "y": _classes(3)})


def _conv() -> Case:
  build = _sequential(
    lambda: layers.Conv2D(4, 3, activation="relu"),
    layers.GlobalAveragePooling2D,
    lambda: layers.Dense(2, activation="softmax"),
    inputs=lambda: keras.Input([8, 8, 3]),
  )
  model_fn = _compiled(
    build,
    lambda: keras.optimizers.Adam(0.01),
    loss="sparse_categorical_crossentropy",
    metrics=lambda: [keras.metrics.SparseTopKCategoricalAccuracy(1)],
  )
  return Case(model_fn, {"x": _numbers(8, 8, 3), "y": _classes(2)})


def _recurrent() -> Case:
  build = _sequential(
    lambda: layers.Embedding(20, 6),
    lambda: layers.LSTM(5),
    lambda: layers.Dense(1, activation="sigmoid"),
    inputs=lambda: keras.Input([7], dtype="int32"),
  )
  model_fn = _compiled(
    build,
    # Linear in the gradient: Keras squares the rows of a word that occurs twice
    # one by one, the library their sum.
    lambda: keras.optimizers.SGD(0.5, momentum=0.9),
    loss="binary_crossentropy",
    metrics=lambda: ["accuracy", keras.metrics.AUC(name="auc")],
  )
  words = np.random.default_rng(3).integers(0, 20, [NUM_EXAMPLES, 7])
  arguments = {"x": words.astype("int32"), "y": _classes(2).astype("float32")}
  return Case(model_fn, arguments)


def _attention() -> Case:
  def build():
    inputs = keras.Input([6, 4])
    # Without biases: the gradient of the keys' bias is rounding errors.
    attention = layers.MultiHeadAttention(2, 4, use_bias=False)
    seen = attention(inputs, inputs)
    seen = layers.LayerNormalization()(inputs + seen)
    outputs = layers.Dense(1)(layers.Flatten()(seen))
    return keras.Model(inputs, outputs)

  model_fn = _compiled(
    build, lambda: keras.optimizers.AdamW(0.01), loss="mse", metrics=["mae"]
  )
  return Case(model_fn, {"x": _numbers(6, 4), "y": _numbers(1)})


def _several_outputs() -> Case:
  """Dict inputs and outputs, loss weights and weighted metrics."""

  def build():
    left, right = keras.Input([3], name="left"), keras.Input([2], name="right")
    both = layers.Concatenate()([left, layers.Dense(3)(right)])
    outputs = {
      "number": layers.Dense(1, name="number")(both),
      "kind": layers.Dense(3, activation="softmax", name="kind")(both),
    }
    return keras.Model({"left": left, "right": right}, outputs)

  model_fn = _compiled(
    build,
    lambda: keras.optimizers.Nadam(0.01),
    loss={"number": "mse", "kind": "sparse_categorical_crossentropy"},
    loss_weights={"number": 0.3, "kind": 2.0},
    metrics={"kind": ["accuracy"]},
  )
  arguments = {
    "x": {"left": _numbers(3), "right": _numbers(2)},
    "y": {"number": _numbers(1), "kind": _classes(3)},
  }
  return Case(model_fn, arguments)


def _kinds(optimizer: Callable[[], keras.optimizers.Optimizer]) -> Case:
  """Models of four kinds in one, which share nothing but the optimizer."""

  def build():
    inputs = {
      "image": keras.Input([6, 6, 2], name="image"),
      # Each word occurs once, see `_recurrent`.
      "words": keras.Input([3], dtype="int32", name="words"),
      "series": keras.Input([5, 3], name="series"),
      "numbers": keras.Input([4], name="numbers"),
    }
    image = layers.Conv2D(3, 3, activation="relu")(inputs["image"])
    image = layers.GlobalAveragePooling2D()(image)
    words = layers.Embedding(3 * NUM_EXAMPLES, 4)(inputs["words"])
    series = layers.MultiHeadAttention(2, 3, use_bias=False)(
      inputs["series"], inputs["series"]
    )
    series = layers.LayerNormalization()(inputs["series"] + series)
    numbers = layers.Dense(
      5, activation="tanh", kernel_regularizer=keras.regularizers.L2(0.01)
    )(inputs["numbers"])
    outputs = {
      "conv": layers.Dense(1, name="conv")(image),
      "recurrent": layers.Dense(1, name="recurrent")(layers.LSTM(4)(words)),
      "attention": layers.Dense(1, name="attention")(layers.Flatten()(series)),
      "classes": layers.Dense(3, activation="softmax", name="classes")(numbers),
    }
    return keras.Model(inputs, outputs)

  model_fn = _compiled(
    build,
    optimizer,
    loss={
      "conv": "mse",
      "recurrent": keras.losses.MeanSquaredError(),
      "attention": "huber",
      "classes": "sparse_categorical_crossentropy",
    },
    loss_weights={
      "conv": 1.0,
      "recurrent": 0.5,
      "attention": 2.0,
      "classes": 1.5,
    },
    metrics={"classes": ["accuracy"], "conv": ["mae", "mse"]},
    weighted_metrics={"attention": ["mae"]},
  )
  words = np.random.default_rng(5).permutation(3 * NUM_EXAMPLES)
  outputs = {
    "conv": _numbers(1),
    "recurrent": _numbers(1) + 1.0,
    "attention": _numbers(1) - 1.0,
    "classes": _classes(3),
  }
  weights = np.random.default_rng(6).uniform(0.5, 2.0, NUM_EXAMPLES)
  arguments = {
    "x": {
      "image": _numbers(6, 6, 2),
      "words": words.reshape([NUM_EXAMPLES, 3]).astype("int32"),
      "series": _numbers(5, 3),
      "numbers": _numbers(4),
    },
    "y": outputs,
    "sample_weight": {
      name: weights + number for number, name in enumerate(outputs)
    },
  }
  return Case(model_fn, arguments)


class DropsByPosition(layers.Layer):
  """A dropout that can be compared: by the position in the batch."""

  def call(self, inputs, training=False):
    """Doubles every second example, and makes the others 0."""
    if not training:
      return inputs
    number = keras.ops.arange(keras.ops.shape(inputs)[0])
    return inputs * keras.ops.cast(2 * (number % 2), inputs.dtype)[:, None]


def _parts() -> Case:
  """Layers and masks for which a batch is not the sum of its parts.

  The output "dropped" has no weights. Its loss has an expected value of 1/64.
  """

  def build():
    inputs = {
      "numbers": keras.Input([4], name="numbers"),
      "words": keras.Input([5], dtype="int32", name="words"),
      "ones": keras.Input([64, 16], name="ones"),
    }
    # The normalization takes a bias away: its gradient is rounding errors.
    hidden = layers.Dense(6, use_bias=False)(inputs["numbers"])
    hidden = layers.BatchNormalization(momentum=0.8)(hidden)
    hidden = layers.Activation("tanh")(hidden)
    hidden = DropsByPosition()(hidden)
    words = layers.Embedding(20, 4, mask_zero=True)(inputs["words"])
    words = layers.GRU(4, return_sequences=True)(words)
    dropped = layers.Dropout(0.5)(inputs["ones"])
    outputs = {
      "normalized": layers.Dense(1, name="normalized")(hidden),
      "masked": layers.Dense(3, activation="softmax", name="masked")(words),
      "dropped": layers.GlobalAveragePooling1D(name="dropped")(dropped),
    }
    return keras.Model(inputs, outputs)

  model_fn = _compiled(
    build,
    lambda: keras.optimizers.SGD(0.1, momentum=0.9),
    loss={
      "normalized": "mse",
      "masked": "sparse_categorical_crossentropy",
      "dropped": "mse",
    },
    loss_weights={"normalized": 1.0, "masked": 1.0, "dropped": 0.0},
    metrics={"normalized": ["mae"]},
  )
  generator = np.random.default_rng(8)
  lengths = generator.integers(1, 6, [NUM_EXAMPLES, 1])
  words = generator.integers(1, 20, [NUM_EXAMPLES, 5])
  arguments = {
    "x": {
      "numbers": _numbers(4) + 1.0,
      "words": np.where(np.arange(5) < lengths, words, 0).astype("int32"),
      "ones": np.ones([NUM_EXAMPLES, 64, 16], np.float32),
    },
    "y": {
      "normalized": _numbers(1),
      "masked": generator.integers(0, 3, [NUM_EXAMPLES, 5]),
      "dropped": np.ones([NUM_EXAMPLES, 16], np.float32),
    },
  }
  return Case(model_fn, arguments)


class Subclassed(keras.Model):
  """Has a loss of its own, and a `call` without `training`."""

  def __init__(self):
    """Makes the layers."""
    super().__init__()
    self.first = layers.Dense(6, activation="tanh")
    self.second = layers.Dense(1)

  def call(self, inputs):
    """Maps [batch, 4] to [batch, 1]."""
    hidden = self.first(inputs)
    self.add_loss(0.01 * tf.reduce_mean(tf.square(hidden)))
    return self.second(hidden)


class Adversaries(keras.Model):
  """A GAN: two updates of the critic, then one of the generator."""

  def __init__(self):
    """Makes both networks, and what shows their losses."""
    super().__init__()
    self.critic = keras.Sequential(
      [keras.Input([4]), layers.Dense(6, activation="tanh"), layers.Dense(1)]
    )
    self.generator = keras.Sequential(
      [
        keras.Input([4]),
        # The normalization takes a bias away: its gradient is rounding errors.
        layers.Dense(4, use_bias=False),
        layers.BatchNormalization(),
      ]
    )
    self.generator_loss = keras.metrics.Mean(name="generator_loss")
    self.seen = keras.metrics.Sum(name="seen")

  def compile(self, critic_optimizer, generator_optimizer):
    """Keeps the optimizers."""
    super().compile()
    self.critic_optimizer = critic_optimizer
    self.generator_optimizer = generator_optimizer

  @property
  def metrics(self):
    """What shows the losses."""
    return [self.generator_loss, self.seen]

  def train_step(self, data):
    """Without random numbers, so that it can be compared."""
    for _ in range(2):
      with tf.GradientTape() as tape:
        made = self.generator(-data, training=True)
        loss = keras.ops.mean(self.critic(made) - self.critic(data))
        loss += 0.1 * keras.ops.mean(self.critic(data) ** 2)
      weights = self.critic.trainable_weights
      self.critic_optimizer.apply_gradients(
        zip(tape.gradient(loss, weights), weights, strict=True)
      )
      self.seen.update_state(keras.ops.ones_like(data[:, 0]))
    with tf.GradientTape() as tape:
      loss = -keras.ops.mean(self.critic(self.generator(-data, training=True)))
    weights = self.generator.trainable_weights
    self.generator_optimizer.apply_gradients(
      zip(tape.gradient(loss, weights), weights, strict=True)
    )
    self.generator_loss.update_state(loss, keras.ops.shape(data)[0])
    return {
      "generator": self.generator_loss.result(),
      "seen": self.seen.result(),
    }


def adversaries() -> Adversaries:
  """Compiled with two optimizers."""
  keras.utils.set_random_seed(7)
  model = Adversaries()
  rate = keras.optimizers.schedules.ExponentialDecay(0.05, 2, 0.9)
  model.compile(keras.optimizers.Adam(0.02), keras.optimizers.Adam(rate))
  return model


class OwnStep(Subclassed):
  """Has a `train_step` of its own, with a metric of its own."""

  def __init__(self):
    """Makes the metric."""
    super().__init__()
    self.tracker = keras.metrics.Mean(name="own")

  def train_step(self, data):
    """Minimizes the fourth power of the error."""
    x, y = data
    with tf.GradientTape() as tape:
      loss = tf.reduce_mean((self(x) - y) ** 4)
    gradients = tape.gradient(loss, self.trainable_variables)
    self.optimizer.apply_gradients(
      zip(gradients, self.trainable_variables, strict=True)
    )
    self.tracker.update_state(loss, sample_weight=tf.shape(x)[0])
    return {"loss": self.tracker.result()}

  @property
  def metrics(self):
    """Those that Keras resets before an epoch."""
    return [self.tracker]


def _weights_of_examples() -> Case:
  case = _dense("sgd")
  weights = np.random.default_rng(1).uniform(0.1, 2.0, NUM_EXAMPLES)
  model_fn = _compiled(
    _sequential(lambda: layers.Dense(3), inputs=lambda: keras.Input([5])),
    loss=_cross_entropy,
    weighted_metrics=["accuracy"],
  )
  return Case(model_fn, case.arguments | {"sample_weight": weights})


def _half() -> Case:
  build = _sequential(
    lambda: layers.Dense(8, activation="relu", dtype="mixed_bfloat16"),
    lambda: layers.Dense(1, dtype="float32"),
    inputs=lambda: keras.Input([5]),
  )
  arguments = {"x": _numbers(5), "y": _numbers(1)}
  # bfloat16 has 8 bits: 0.4% of each activation.
  return Case(_compiled(build, loss="mse", metrics=["mae"]), arguments, 0.02)


def optimizer_variables(model: keras.Model) -> list[keras.Variable]:
  """Those of all optimizers that are attributes of `model`."""
  return [
    variable
    for _, value in sorted(vars(model).items())
    if isinstance(value, keras.optimizers.Optimizer)
    for variable in value.variables
  ]


def scaled_model() -> keras.Model:
  """In float16, with a loss scale so large that the first updates are void."""
  keras.utils.set_random_seed(7)
  model = keras.Sequential(
    [
      keras.Input([5]),
      layers.Dense(8, activation="relu", dtype="mixed_float16"),
      layers.Dense(1, dtype="float32"),
    ]
  )
  optimizer = keras.optimizers.LossScaleOptimizer(
    keras.optimizers.Adam(0.01), initial_scale=2.0**19, dynamic_growth_steps=4
  )
  model.compile(optimizer, "mse")
  return model


# Models of which each part of a batch is another: compare with `oracle.train`.
PARTS = {"parts": _parts()}
# Many models in one, for clusters, whose start takes long.
KINDS = {
  "kinds_adam": _kinds(lambda: keras.optimizers.Adam(0.01)),
  "kinds_adamw": _kinds(lambda: keras.optimizers.AdamW(0.01)),
  "kinds_lion": _kinds(lambda: keras.optimizers.Lion(0.002)),
  "kinds_rmsprop": _kinds(lambda: keras.optimizers.RMSprop(0.01)),
}

CASES = {
  "adversaries": Case(adversaries, {"x": _numbers(4)}),
  "adagrad": _dense(lambda: optimizers.make("Adagrad", 0.1)),
  "attention": _attention(),
  "averaged": _dense(
    lambda: keras.optimizers.Adam(0.01, use_ema=True, ema_momentum=0.9)
  ),
  "class_weight": Case(
    _dense("sgd").model_fn,
    _dense("sgd").arguments | {"class_weight": {0: 0.5, 1: 2.0, 2: 1.0}},
  ),
  "clipped": _dense(lambda: keras.optimizers.SGD(0.5, global_clipnorm=0.3)),
  "constrained": _dense(
    lambda: keras.optimizers.Adam(0.1),
    kernel_constraint=keras.constraints.MaxNorm(0.5),
    bias_constraint=keras.constraints.NonNeg(),
  ),
  "conv": _conv(),
  "half": _half(),
  "momentum": _dense(lambda: keras.optimizers.SGD(0.1, 0.9, nesterov=True)),
  "own_step": Case(
    _compiled(OwnStep, lambda: keras.optimizers.SGD(0.01)),
    {"x": _numbers(4), "y": _numbers(1)},
  ),
  "recurrent": _recurrent(),
  "regularizer": _dense("sgd", kernel_regularizer="l2"),
  "sample_weight": _weights_of_examples(),
  "several_outputs": _several_outputs(),
  "subclassed": Case(
    _compiled(Subclassed, "adam", loss="mse", metrics=["mae"]),
    {"x": _numbers(4), "y": _numbers(1)},
  ),
}
