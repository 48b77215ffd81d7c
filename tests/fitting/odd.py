"""Odd and malformed models, data and arguments for `fit`, by name.

Each value is a function without arguments that makes the object. "good" is one
that trains.
"""

import tempfile
from collections.abc import Callable
from collections.abc import Iterator

import keras
import numpy as np
import tensorflow as tf
from keras import layers

import tf_replicas

X = np.random.default_rng(0).normal(size=[8, 4]).astype("float32")
Y = X.sum(axis=1, keepdims=True)


class Mistake(Exception):
  """What the user's own code raises."""


def raising(*_, **__):
  """Raises `Mistake`."""
  raise Mistake("mine")


def _model(*inner: layers.Layer, shape=(4,), **compiled) -> keras.Model:
  model = keras.Sequential([keras.Input(shape), *inner])
  model.compile(**({"optimizer": "sgd", "loss": "mse"} | compiled))
  return model


def _with(**compiled) -> Callable[[], keras.Model]:
  return lambda: _model(layers.Dense(1), **compiled)


class Subclassed(keras.Model):
  """A model whose `call` and `train_step` are functions that it is given."""

  def __init__(self, call=None, step=None):
    """Keeps them, and compiles itself."""
    super().__init__()
    self.dense = layers.Dense(1)
    self.own_call, self.own_step = call, step
    self.compile("sgd", "mse")

  def call(self, inputs):
    """Calls `own_call`."""
    outputs = self.dense(inputs)
    return self.own_call(self, outputs) if self.own_call else outputs

  def train_step(self, data):
    """Calls `own_step`."""
    return self.own_step(self, data)


class Called(Subclassed):
  """The same with Keras' own `train_step`."""

  train_step = keras.Model.train_step


class TwoInputs(Called):
  """Its `call` needs an argument that nobody gives it."""

  def call(self, inputs, other):
    """Ignores `other`."""
    return self.dense(inputs)


class KeywordsOnly(Called):
  """Its `call` has other arguments than most."""

  def call(self, inputs, *, training=False, mask=None):
    """Ignores all but `inputs`."""
    return self.dense(inputs)


class Raising(layers.Layer):
  """A layer that fails."""

  def call(self, inputs):
    """Fails."""
    raise Mistake("mine")


def _gradients(model, data):
  x, y = data
  with tf.GradientTape() as tape:
    loss = tf.reduce_mean((model(x) - y) ** 2)
  return loss, tape.gradient(loss, model.trainable_variables)


def _step(result, times=1) -> Callable[[], keras.Model]:
  """A model whose `train_step` applies `times` times; returns `result`."""

  def step(model, data):
    loss, gradients = _gradients(model, data)
    for _ in range(times):
      model.optimizer.apply(gradients, model.trainable_variables)
    return result(loss) if callable(result) else result

  return lambda: Subclassed(step=step)


def _applying(gradients, first=0) -> Callable[[], keras.Model]:
  """A model whose `train_step` applies these gradients."""

  def step(model, data):
    loss, _ = _gradients(model, data)
    variables = model.trainable_variables
    model.optimizer.apply(gradients, [variables[first], variables[1]])
    return {"loss": loss}

  return lambda: Subclassed(step=step)


def _conditional(model, data):
  loss, gradients = _gradients(model, data)

  def apply():
    model.optimizer.apply(gradients, model.trainable_variables)
    return loss

  return {"loss": tf.cond(loss > 0, apply, lambda: loss)}


def _assigning(model, data):
  loss, _ = _gradients(model, data)
  for variable in model.trainable_variables:
    variable.assign(variable * 0.9)
  return {"loss": loss}


def _frozen() -> keras.Model:
  model = _with()()
  model.trainable = False
  model.compile("sgd", "mse")
  return model


MODELS = {
  "good": _with(),
  "adam": _with(optimizer="adam"),
  "not built": lambda: Called(),
  "not compiled": lambda: keras.Sequential([layers.Dense(1)]),
  "no layers": lambda: _model(),
  "no weights": lambda: _model(layers.Flatten()),
  "frozen": _frozen,
  "cut off": lambda: Called(lambda _, y: tf.stop_gradient(y)),
  "integers": lambda: Called(lambda _, y: tf.cast(y, tf.int32)),
  "a constant": lambda: Called(lambda _, y: tf.ones_like(y)),
  "None": lambda: None,
  "a tuple": lambda: (_with()(),),
  "a class": keras.Model,
  "a module": tf.Module,
  "model_fn raises": raising,
  "call raises": lambda: Called(raising),
  "call gives None": lambda: Called(lambda _, y: None),
  "call gives text": lambda: Called(lambda _, y: "text"),
  "call gives two": lambda: Called(lambda _, y: [y, y]),
  "call with two inputs": TwoInputs,
  "call with keywords": KeywordsOnly,
  "layer raises": lambda: Subclassed(step=lambda m, d: Raising()(d[0])),
  "wide": lambda: _model(layers.Dense(3)),
  "five inputs": lambda: _model(layers.Dense(1), shape=(5,)),
  "images": lambda: _model(layers.Dense(1), shape=(4, 4, 2)),
  "text": lambda: Called(lambda _, y: tf.strings.as_string(y)),
  "asserts": lambda: Called(
    lambda _, y: tf.debugging.assert_less(y, -1e6) or y
  ),
  "fails in Python": lambda: Called(
    lambda _, y: y + tf.py_function(lambda v: v // 0, [1], tf.int32)
  ),
  "optimizer unknown": _with(optimizer="absent"),
  "optimizer Adafactor": _with(optimizer="adafactor"),
  "loss unknown": _with(loss="absent"),
  "loss a number": _with(loss=3),
  "loss a list": _with(loss=["mse", "mse"]),
  "loss of one argument": _with(loss=lambda y: y),
  "loss of three": _with(loss=lambda y, p, z: y),
  "loss per element": _with(loss=lambda y, p: (y - p) ** 2),
  "loss a scalar": _with(loss=lambda y, p: tf.reduce_mean((y - p) ** 2)),
  "loss an int": _with(loss=lambda y, p: 1),
  "loss None": _with(loss=None),
  "loss gives None": _with(loss=lambda y, p: None),
  "loss gives text": _with(loss=lambda y, p: "text"),
  "loss of the labels": _with(loss=lambda y, p: tf.reduce_mean(y)),
  "loss raises": _with(loss=raising),
  "loss not a number": _with(loss=lambda y, p: p * np.nan),
  "loss of classes": _with(loss="sparse_categorical_crossentropy"),
  "metric unknown": _with(metrics=["absent"]),
  "metric gives None": _with(metrics=[lambda y, p: None]),
  "metric gives an int": _with(metrics=[lambda y, p: 1]),
  "metric gives text": _with(metrics=[lambda y, p: "text"]),
  "metric raises": _with(metrics=[raising]),
  "metric a number": _with(metrics=[3]),
  "step gives the loss": _step(lambda loss: loss),
  "step gives a dict": _step(lambda loss: {"loss": loss}),
  "step gives more": _step(lambda loss: {"loss": loss, "twice": 2 * loss}),
  "step gives a float": _step({"loss": 1.0}),
  "step gives None": _step(None),
  "step gives text": _step({"loss": "text"}),
  "step gives a string": _step(lambda loss: {"a": tf.strings.as_string(loss)}),
  "step gives a vector": _step(lambda loss: {"loss": tf.stack([loss, loss])}),
  "step gives nothing": _step({}),
  "step applies twice": _step(lambda loss: {"loss": loss}, times=2),
  "step never applies": _step(lambda loss: {"loss": loss}, times=0),
  "step raises": lambda: Subclassed(step=raising),
  "step assigns": lambda: Subclassed(step=_assigning),
  "step applies in a condition": lambda: Subclassed(step=_conditional),
  "gradients None": _applying([None, None]),
  "gradients too few": _applying([np.zeros([4, 1])]),
  "gradients of text": _applying(["a", "b"]),
  "gradients of integers": _applying(
    [np.zeros([4, 1], "int32"), np.zeros([1], "int32")]
  ),
  "gradients of other shapes": _applying(
    [np.zeros([3, 1], "float32"), np.zeros([1], "float32")]
  ),
  "gradients of one variable twice": _applying(
    [np.ones([1], "float32")] * 2, first=1
  ),
}


def dataset(*arrays: np.ndarray) -> tf.data.Dataset:
  """Batches of 4."""
  return tf.data.Dataset.from_tensor_slices(arrays).batch(4)


def _batches() -> Iterator[tuple[np.ndarray, np.ndarray]]:
  yield X[:4], Y[:4]
  yield X[4:], Y[4:]


def _changing() -> Iterator[tuple[np.ndarray, np.ndarray]]:
  yield X[:4], Y[:4]
  yield X[:4, :3], Y[:4]


def _generated(function, width=4) -> dict:
  signature = (tf.TensorSpec([None, width]), tf.TensorSpec([None, 1]))
  return {
    "x": tf.data.Dataset.from_generator(function, output_signature=signature),
    "steps_per_epoch": 2,
  }


def _arrays(x=X, y=Y, **more) -> Callable[[], dict]:
  return lambda: {"x": x, "y": y, "batch_size": 4, **more}


def _data_set(make, **more) -> Callable[[], dict]:
  return lambda: {"x": make(dataset(X, Y)), **more}


def _function(function, **more) -> Callable[[], dict]:
  return lambda: {"x": function, "steps_per_epoch": 1, **more}


_TEXT = np.array([["a"] * 4] * 8)
_CLASSES = np.ones([8, 1], "int32")

DATA = {
  "good": _arrays(),
  "data set": _data_set(lambda d: d),
  "doubles": _arrays(X.astype("float64")),
  "integers": _arrays(X.astype("int64")),
  "text": _arrays(_TEXT),
  "text labels": _arrays(y=_TEXT[:, :1]),
  "objects": _arrays(X.astype(object)),
  "object labels": _arrays(y=np.array([object()] * 8)),
  "empty": _arrays(X[:0], Y[:0]),
  "no features": _arrays(X[:, :0]),
  "three features": _arrays(X[:, :3]),
  "a vector": _arrays(X[:, 0]),
  "an axis more": _arrays(X[..., None]),
  "two axes more": _arrays(X[..., None, None]),
  "other length": _arrays(y=Y[:3]),
  "no labels": _arrays(y=None),
  "no x": _arrays(None),
  "labels not a number": _arrays(y=Y * np.nan),
  "inputs infinite": _arrays(X * np.inf),
  "wide labels": _arrays(y=np.ones([8, 3], "float32")),
  "a scalar": _arrays(3.0),
  "a scalar array": _arrays(np.float32(3)),
  "a word": _arrays("text"),
  "an object": _arrays(object()),
  "a set": _arrays({1, 2}),
  "a list": _arrays([X, X]),
  "an empty list": _arrays([], []),
  "a dict": _arrays({"a": X}),
  "an empty dict": _arrays({}),
  "labels in a dict": _arrays(y={"a": Y}),
  "ragged": lambda: {"x": tf.ragged.constant([[1.0], [2.0, 3.0]]), "y": Y[:2]},
  "sparse": lambda: {"x": tf.sparse.from_dense(X), "y": Y},
  "a generator": lambda: {"x": _batches()},
  "a generator and steps": lambda: {"x": _batches(), "steps_per_epoch": 2},
  "a changing generator": lambda: {"x": _changing(), "steps_per_epoch": 2},
  "an iterator": lambda: {"x": iter(dataset(X, Y)), "steps_per_epoch": 1},
  "a range": lambda: {"x": range(8), "y": range(8)},
  "generated": lambda: _generated(_batches),
  "generated, changing": lambda: _generated(_changing, None),
  "generated, wrong": lambda: _generated(_changing),
  "generator raises": lambda: _generated(raising),
  "generated empty batch": lambda: _generated(lambda: iter([(X[:0], Y[:0])])),
  "empty data set": _data_set(lambda d: d.take(0)),
  "filtered data set": _data_set(
    lambda d: d.filter(lambda *_: False), steps_per_epoch=1
  ),
  "data set of no examples": lambda: {
    "x": tf.data.Dataset.from_tensors((X[:0], Y[:0]))
  },
  "endless data set": _data_set(lambda d: d.repeat()),
  "data set of examples": _data_set(lambda d: d.unbatch()),
  "data set of scalars": lambda: {"x": tf.data.Dataset.range(8)},
  "data set of inputs": _data_set(lambda d: d.map(lambda x, y: x)),
  "data set of four": _data_set(lambda d: d.map(lambda x, y: (x, y, y, y))),
  "data set of dicts": _data_set(lambda d: d.map(lambda x, y: {"x": x})),
  "data set of None": _data_set(lambda d: d.map(lambda x, y: (x, None))),
  "data set of data sets": _data_set(lambda d: d.window(2)),
  "data set of sparse": _data_set(
    lambda d: d.map(lambda x, y: (tf.sparse.from_dense(x), y))
  ),
  "data set and labels": _data_set(lambda d: d, y=Y),
  "function": _function(lambda _: dataset(X, Y)),
  "function without steps": lambda: {"x": lambda _: dataset(X, Y)},
  "function of nothing": _function(lambda: dataset(X, Y)),
  "function of two": _function(lambda a, b: dataset(X, Y)),
  "function gives None": _function(lambda _: None),
  "function raises": _function(raising),
  "function gives nothing": _function(lambda _: dataset(X, Y).take(0)),
  "weights": _arrays(sample_weight=np.arange(1.0, 9.0)),
  "weights of text": _arrays(sample_weight=_TEXT[:, 0]),
  "weights too few": _arrays(sample_weight=np.ones(3)),
  "weights of two": _arrays(sample_weight=np.ones([8, 2])),
  "weights not a number": _arrays(sample_weight=np.full([8], np.nan)),
  "a weight": _arrays(sample_weight=1.0),
  "weights alone": _arrays(y=None, sample_weight=np.ones(8)),
  "class weights": _arrays(y=_CLASSES, class_weight={0: 1.0, 1: 2.0}),
  "class weights, negative class": _arrays(
    y=-_CLASSES, class_weight={0: 1.0, 1: 2.0}
  ),
  "class weights, huge": _arrays(class_weight={10**12: 1.0}),
  "class weights, negative": _arrays(class_weight={-1: 1.0}),
  "class weights, by name": _arrays(class_weight={"a": 1.0}),
  "class weights, text": _arrays(class_weight={0: "a"}),
  "class weights, a list": _arrays(class_weight=[1.0, 2.0]),
  "class weights, no labels": _arrays(y=None, class_weight={0: 1.0}),
  "class weights, dict": _arrays(y={"a": Y}, class_weight={0: 1.0}),
  "class weights, text labels": _arrays(y=_TEXT[:, :1], class_weight={0: 1.0}),
}


class Failing(keras.callbacks.Callback):
  """Raises `Mistake` in a hook."""

  def __init__(self, hook: str):
    """Names the hook."""
    super().__init__()
    setattr(self, hook, raising)


def _file() -> str:
  with tempfile.NamedTemporaryFile(delete=False) as file:
    return file.name


def _values(name: str, *values: object) -> dict[str, Callable[[], dict]]:
  return {
    f"{name}={value!r:.40}": lambda v=value: {name: v} for value in values
  }


_COUNTS = (0, -1, 1.5, "2")
_WRONG_VALIDATION = {
  "of three features": lambda: (X[:, :3], Y),
  "without labels": lambda: (X,),
  "empty": lambda: (X[:0], Y[:0]),
  "of nothing": lambda: (),
  "of other length": lambda: (X, Y[:3]),
  "of four": lambda: (X, Y, Y, Y),
  "of text": lambda: (X, _TEXT[:, :1]),
  "a dict": lambda: {"x": X},
  "a number": lambda: 3,
  "an empty data set": lambda: dataset(X, Y).take(0),
  "an endless data set": lambda: dataset(X, Y).repeat(),
  "a data set of scalars": lambda: tf.data.Dataset.range(3),
}

ARGUMENTS = {
  "good": dict,
  "validation": lambda: {"validation_data": (X, Y)},
  **_values("epochs", *_COUNTS, None, np.int64(2)),
  **_values("initial_epoch", -1, 1, 0.5, "a", None),
  **_values("steps_per_epoch", *_COUNTS, 99),
  **_values("batch_size", *_COUNTS, np.int64(4), 10**6),
  **_values("validation_steps", *_COUNTS),
  **_values("validation_batch_size", *_COUNTS),
  **_values("validation_freq", *_COUNTS, None, [1], [0]),
  **_values("verbose", 3, -1, "all", None, 0.5),
  **_values("callbacks", 3, "text", [3], [None], [keras.callbacks.Callback]),
  **_values("rule", 3, "sync", tf_replicas.Sync, ()),
  **_values("devices", "/device:CPU:0", 3, [3], [None], [""], ["nonsense"]),
  **_values("devices", ["/device:CPU:99"], ["/device:TPU:0"]),
  **_values("devices", ["/job:worker/task:3/device:CPU:0"]),
  **_values("replication", "other", None, [], 3, "in_graph"),
  **_values("train_dir", 3, "", "a\0b", b"bytes", "/proc/absent"),
  "train_dir a file": lambda: {"train_dir": _file()},
  "train_dir in a file": lambda: {"train_dir": _file() + "/in"},
  **_values("checkpoint_every_secs", 0, -1, "a", None, float("nan")),
  **_values("table_writer", "worker", None, 3),
  **_values("min_table_bytes", 0, "a", 0.5),
  **_values("start_timeout_secs", 0, "a", None),
  **_values("seed", 0.5, "a", None, 2**70),
  **_values("shuffle", "batch", None, 3),
  **_values("cluster", 3, {}, "absent.json", ["a"]),
  **_values("log", 3, None),
  **{
    f"validation {name}": lambda m=make: {"validation_data": m()}
    for name, make in _WRONG_VALIDATION.items()
  },
  **{
    f"callback raises {hook}": lambda h=hook: {"callbacks": [Failing(h)]}
    for hook in (
      "on_train_begin",
      "on_epoch_begin",
      "on_train_batch_end",
      "on_epoch_end",
      "on_train_end",
    )
  },
  "no replicas to aggregate": lambda: {
    "rule": tf_replicas.Sync(replicas_to_aggregate=0)
  },
  "text to aggregate": lambda: {
    "rule": tf_replicas.Sync(replicas_to_aggregate="a")
  },
  "an unknown rule": lambda: {"rule": tf_replicas.Async("absent")},
  "a number as rule": lambda: {"rule": tf_replicas.Async(3)},
  "a periodic rule": lambda: {"rule": tf_replicas.Async("model_average")},
  "no staleness": lambda: {"rule": tf_replicas.Async("bounded_staleness")},
  "asynchronous": lambda: {"rule": tf_replicas.Async()},
}
