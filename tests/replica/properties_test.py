"""`Replica` with odd and malformed variables, losses and data.

Either a step changes a variable, or there is an error of a documented type in
one line. What the user's own functions raise comes through as it is; so does an
error of TensorFlow about what `loss_fn` computes, as its traceback ends in the
line of the user's that is wrong.
"""

import os
import pathlib
import traceback

import hypothesis
import keras
import numpy as np
import tensorflow as tf
from absl.testing import parameterized
from hypothesis import strategies as st

import tf_replicas
from tests.support import stores

_LIBRARY = str(pathlib.Path(tf_replicas.__file__).parent)
_NUM_EXAMPLES = int(os.environ.get("NUM_EXAMPLES", "60"))
_IS_RANDOM = "NUM_EXAMPLES" in os.environ


class Mistake(Exception):
  """What the user's own code raises."""


def _raising(*_):
  raise Mistake("mine")


def _loss(parameters, x):
  return tf.reduce_mean((parameters[0] * x - 3.0) ** 2)


def _repeated(batch):
  return lambda *_: tf.data.Dataset.from_tensors(batch).repeat()


VARIABLES = {
  "good": lambda: [tf.Variable(1.0)],
  "of Keras": lambda: [keras.Variable(1.0)],
  "two": lambda: [tf.Variable(1.0), tf.Variable(1.0, name="unused")],
  "none": lambda: [],
  "None": lambda: None,
  "a variable": lambda: tf.Variable(1.0),
  "arrays": lambda: [np.ones([])],
  "tensors": lambda: [tf.ones([])],
  "frozen": lambda: [tf.Variable(1.0, trainable=False)],
}

LOSSES = {
  "good": _loss,
  "a name": "mse",
  "None": None,
  "of nothing": lambda: 0.0,
  "of three": lambda p, x, y: p[0],
  "raises": _raising,
  "gives None": lambda p, x: None,
  "gives text": lambda p, x: "text",
  "gives a number": lambda p, x: 1.0,
  "gives an int": lambda p, x: tf.cast(_loss(p, x), tf.int32),
  "gives a vector": lambda p, x: p[0] * x,
  "gives a dict": lambda p, x: {"loss": _loss(p, x)},
  "gives two": lambda p, x: (_loss(p, x), [p[0]]),
  "of the data": lambda p, x: tf.reduce_mean(x),
  "not a number": lambda p, x: p[0] * np.nan,
  "of wrong shapes": lambda p, x: tf.reduce_mean(tf.ones([3]) * x + p[0]),
}

DATA = {
  "good": _repeated(tf.ones([4])),
  "in a tuple": _repeated((tf.ones([4]),)),
  "two": _repeated((tf.ones([4]), tf.ones([4]))),
  "a dict": _repeated({"x": tf.ones([4])}),
  "text": _repeated(tf.constant(["a"] * 4)),
  "integers": _repeated(tf.ones([4], tf.int32)),
  "a scalar": _repeated(tf.ones([])),
  "no examples": _repeated(tf.ones([0])),
  "three examples": _repeated(tf.ones([3])),
  "sparse": _repeated(tf.sparse.from_dense(tf.ones([4]))),
  "an end": lambda *_: tf.data.Dataset.from_tensors(tf.ones([4])).take(0),
  "no function": tf.data.Dataset.from_tensors(tf.ones([4])),
  "None": None,
  "of nothing": lambda: None,
  "of two": lambda a, b: None,
  "gives None": lambda *_: None,
  "gives arrays": lambda *_: np.ones([4]),
  "raises": _raising,
}

MORE = {
  "good": {},
  "micro-batches": {"micro_batches": 2},
  "no micro-batch": {"micro_batches": 0},
  "half a micro-batch": {"micro_batches": 0.5},
  "a wish at the end": {"on_data_end": "sleep"},
  "text of micro-batches": {"micro_batches": "2"},
  "three micro-batches": {"micro_batches": 3},
  "two devices": {"devices": ["/device:CPU:0"] * 2},
  "a name of devices": {"devices": "/device:CPU:0"},
  "numbers of devices": {"devices": [0]},
  "an array of statistics": {"statistics": [np.ones([])]},
}


def _train(variables: str, loss: str, data: str, more: str) -> None:
  """Makes a step; or refuses as the module's docstring says; else fails."""
  try:
    with tf_replicas.OneMachine(
      lambda: tf_replicas.Replica(
        VARIABLES[variables](), LOSSES[loss], DATA[data], **MORE[more]
      ),
      lambda: tf_replicas.SyncReplicasOptimizer(keras.optimizers.SGD(0.1), 1),
    ) as driver:
      before = list(driver.values().values())
      driver.step()
      after = list(driver.values().values())
  except Mistake:
    return
  except (TypeError, ValueError, FloatingPointError, RuntimeError) as error:
    last = traceback.extract_tb(error.__traceback__)[-1]
    assert not last.filename.startswith(_LIBRARY) or "\n" not in str(error), (
      error
    )
    return
  assert any(map(np.any, map(np.subtract, before, after)))


class PropertiesTest(stores.TestCase):
  """See the module's docstring."""

  @hypothesis.settings(
    max_examples=_NUM_EXAMPLES,
    derandomize=not _IS_RANDOM,
    database=None,
    deadline=None,
    suppress_health_check=list(hypothesis.HealthCheck),
  )
  @hypothesis.given(st.data())
  def test_trains_or_says_what_is_wrong(self, data):
    kinds = {"variables": VARIABLES, "loss": LOSSES, "data": DATA, "more": MORE}
    chosen = dict.fromkeys(kinds, "good")
    for kind in data.draw(st.lists(st.sampled_from(list(kinds)), max_size=3)):
      chosen[kind] = data.draw(st.sampled_from(list(kinds[kind])))
    _train(**chosen)

  @parameterized.parameters(
    ({"variables": "none"}, "`variables` must have .* Received: none"),
    ({"variables": "arrays"}, "`variables` must be a list of variables"),
    ({"variables": "a variable"}, "`variables` must be a list of variables"),
    ({"loss": "a name"}, "`loss_fn` must be a function. Received: 'mse'"),
    ({"loss": "gives None"}, "`loss_fn` must return a scalar.*: None"),
    ({"loss": "gives text"}, "`loss_fn` must return a scalar.*: 'text'"),
    ({"loss": "gives a dict"}, "`loss_fn` must return a scalar.*: {'loss'"),
    ({"data": "no function"}, "`dataset_fn` must be a function.*Dataset"),
    ({"data": "of two"}, "`dataset_fn` must take .num_shards.*too many"),
    ({"data": "gives None"}, "must return a `tf.data.Dataset`. .*NoneType"),
    ({"data": "an end"}, "it must be endless, and not empty"),
    ({"more": "half a micro-batch"}, "`micro_batches` must be an integer.*0.5"),
    ({"more": "a wish at the end"}, "`on_data_end` must be 'error', 'stop' or"),
    ({"more": "a name of devices"}, "`devices` must be a list of names"),
    ({"more": "numbers of devices"}, r"`devices` must be .* Received: \[0\]"),
    ({"more": "an array of statistics"}, "`statistics` must be a list of var"),
  )
  def test_messages(self, bad, words):
    chosen = dict.fromkeys(("variables", "loss", "data", "more"), "good") | bad
    with self.assertRaisesRegex((TypeError, ValueError, RuntimeError), words):
      with tf_replicas.OneMachine(
        lambda: tf_replicas.Replica(
          VARIABLES[chosen["variables"]](),
          LOSSES[chosen["loss"]],
          DATA[chosen["data"]],
          **MORE[chosen["more"]],
        ),
        lambda: tf_replicas.SyncReplicasOptimizer(keras.optimizers.SGD(0.1), 1),
      ) as driver:
        driver.step()
