"""`fit` with odd and malformed models, data and arguments.

Either it trains, or it ends in an error that says what is wrong:

1. An error of this library has a documented type and one line, which says what
   was received.
2. What the user's own code raises comes through with its own type: `odd.
   Mistake`.
3. An error of Keras or TensorFlow about the user's model comes through as it is
   while the model is built and traced, in as many lines as it has: its
   traceback and its last lines name the layer or the line of the user's. It is
   allowed only where `keras.Model.fit` raises the same type with the same
   model and data, so that this library cannot be its cause.
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
from tests.fitting import odd
from tests.support import stores
from tf_replicas.fitting import arguments
from tf_replicas.fitting import compiled_model
from tf_replicas.fitting import data

_LIBRARY = str(pathlib.Path(tf_replicas.__file__).parent)
_DOCUMENTED = (
  TypeError,
  ValueError,  # And `cluster.ClusterError`.
  FloatingPointError,
  RuntimeError,  # "the data set has ended".
)
# For more examples, in another order, than CI takes.
_NUM_EXAMPLES = int(os.environ.get("NUM_EXAMPLES", "25"))
_IS_RANDOM = "NUM_EXAMPLES" in os.environ


class _Start(keras.callbacks.Callback):
  """Notes the weights with which the training begins."""

  def on_train_begin(self, logs=None):
    """Notes them."""
    self.weights = [np.asarray(v) for v in self.model.trainable_variables]


def _fit(model: str, data: str, argument: str) -> None:
  """Trains, or refuses as the module's docstring says; else fails."""
  arguments = odd.DATA[data]() | {"verbose": 0} | odd.ARGUMENTS[argument]()
  start = _Start()
  if isinstance(arguments.get("callbacks", []), list):
    arguments["callbacks"] = [*arguments.get("callbacks", []), start]

  def model_fn():
    keras.utils.set_random_seed(1)
    return odd.MODELS[model]()

  try:
    history = tf_replicas.fit(model_fn, **arguments)
  except odd.Mistake:
    return
  except Exception as error:  # Its type is what is tested.
    _check(error, model_fn, arguments)
    return
  values = [np.asarray(v) for v in history.model.trainable_variables]
  assert any(map(np.any, map(np.subtract, values, start.weights)))


def _check(error: Exception, model_fn, arguments: dict) -> None:
  last = traceback.extract_tb(error.__traceback__)[-1]
  if last.filename.startswith(_LIBRARY):
    assert isinstance(error, _DOCUMENTED), repr(error)
    message = str(error)
    assert message and "\n" not in message, message
    # Some errors of a cluster name the file instead.
    others = FloatingPointError | RuntimeError | tf_replicas.ClusterError
    assert isinstance(error, others) or (
      "eceived" in message
      or "failed: " in message
      or "works only with parameter servers" in message
    ), message
    return
  keras_arguments = {
    name: arguments[name]
    for name in ("x", "y", "sample_weight", "class_weight", "batch_size")
    if name in arguments
  }
  try:
    model_fn().fit(**keras_arguments, steps_per_epoch=1, verbose=0)
  except type(error):
    return
  except Exception as theirs:
    raise AssertionError(f"{error!r}, and Keras: {theirs!r}") from error
  raise AssertionError(f"{error!r}, and Keras alone trains") from error


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
    kinds = {"models": odd.MODELS, "data": odd.DATA, "args": odd.ARGUMENTS}
    chosen = dict.fromkeys(kinds, "good")
    for kind in data.draw(st.lists(st.sampled_from(list(kinds)), max_size=3)):
      chosen[kind] = data.draw(st.sampled_from(list(kinds[kind])))
    _fit(chosen["models"], chosen["data"], chosen["args"])


class MessagesTest(stores.TestCase):
  """Errors that name the argument, the rule and what was received."""

  @parameterized.parameters(
    ("a scalar array", r"examples along axis 0. Received: shape \(\)"),
    ("class weights, by name", "`class_weight` must be a dict from class numb"),
    ("class weights, dict", "needs `y` to be one array, .*Received: {'a': "),
    ("class weights, huge", None),
    ("class weights, negative", "from 0 on, to finite num.*Received: {-1: 1"),
    (
      "class weights, no labels",
      "needs `y` to be one array.* Received: no labels",
    ),
    ("class weights, text labels", "labels that are numbers. Rec.*: string"),
    ("data set of None", "dense or ragged tensors .*NoneTensorSpec"),
    ("data set of data sets", "dense or ragged tensors .*DatasetSpec"),
    ("data set of examples", r"equally many examples.*Received: \[1, 4\]"),
    ("data set of four", r"`x` must yield \(x,\), .*elements of 4 parts"),
    ("data set of no examples", r"at least one. Received: \[0\]"),
    ("data set of scalars", "`Dataset.batch` makes them. Received: a scalar"),
    ("data set of sparse", "`tf.sparse.to_dense`.*SparseTensorSpec"),
    ("function of nothing", "`x` must be a function of 1 arg.*too many posit"),
    ("function of two", "`x` must be a function of 1 arg.*missing .*'b'"),
    ("weights of text", "weights of the exam.* must be numbers. Rec.*: string"),
  )
  def test_data(self, name, words):
    if words is None:
      data.make(**odd.DATA[name]())
      return
    with self.assertRaisesRegex((TypeError, ValueError), words):
      data.make(**odd.DATA[name]())

  @parameterized.parameters(
    ("epochs=0", "`epochs` must be an integer of at least 1. Rec.*: 0"),
    ("epochs=1.5", "`epochs` must be an integer of at .*ed: 1.5"),
    ("initial_epoch=1", "`initial_epoch` must be less than `epochs`, 1: noth"),
    ("validation_freq=0", "`validation_freq` must be an integer of.*ed: 0"),
    ("validation_steps=-1", "`validation_steps` must be an integer .*ed: -1"),
    ("verbose='all'", "`verbose` must be one of 'auto', 0, 1, 2. .*: 'all'"),
    ("callbacks=[3]", "`callbacks` must be a list of .*ed: .3."),
    ("callbacks=3", "`callbacks` must be a list of .*Received: 3"),
    ("devices=['nonsense']", "`devices` must have names such as .*'nonsense'"),
    (
      "devices=['/device:CPU:99']",
      "`devices` must exist: .*device:CPU:0, .*99",
    ),
    ("devices=3", "`devices` must be a list of names, .*Received: 3"),
    ("replication=[]", r"must be one of between_graph.*Received: \[\]"),
    (
      "train_dir=''",
      "`train_dir` must be a path that is not empty.*: ''",
    ),
    ("train_dir=3", "`train_dir` must be a path .*Received: 3"),
    ("checkpoint_every_secs=-1", "of seconds above 0. Received: -1"),
    ("seed=0.5", "`seed` must be an integer of 64 bits. Received: 0.5"),
    ("shuffle='batch'", "`shuffle` must be True or False. Received: 'batch'"),
    ("cluster=3", "`cluster` must be a `tf_replicas.ClusterSpec` or the path"),
    ("log=3", "`log` must be a function. Received: 3"),
    ("text to aggregate", "must be a number of at least 1, .*Received: 'a'"),
  )
  def test_arguments(self, name, words):
    given = odd.DATA["good"]() | odd.ARGUMENTS[name]()
    with self.assertRaisesRegex((TypeError, ValueError), words):
      tf_replicas.fit(odd.MODELS["good"], **given)

  @parameterized.parameters(
    ("cut off", "must depend on the trainable weights.*dense/kernel, .*bias"),
    ("no weights", "must return a model with trainable weights"),
    ("frozen", "must return a model with trainable weights"),
    ("five inputs", r"`x` must fit .* \(None, 5\) .*float32. .*\(4, 4\)"),
    ("images", r"`x` must fit the input of the model, of shape \(None, 4, 4"),
    ("step applies in a condition", "outside of `tf.cond`.*by 'optimizer'"),
    ("step gives a string", "that are numbers. Received: 'a': <tf.Tensor"),
    ("gradients None", "must depend on the trainable weights"),
    ("gradients too few", "one gradient for each var.*: 1 gradients, 2 vari"),
    ("gradients of text", "floating dtype to '.*kernel'. Received: 'a'"),
    ("gradients of integers", "floating dtype to '.*kernel'. Received: arr"),
    ("gradients of other shapes", r"gradient of shape \(4, 1\) and floating"),
    ("gradients of one variable twice", "each variable once. Rec.*, .*bias"),
  )
  def test_models(self, name, words):
    self._refused(words, model=name)

  @parameterized.parameters(
    ("no labels", "`y` must be given, as `model_fn` compiles .* with a loss"),
    ("text labels", "`y` must be numbers, as .* a loss. Received: strings"),
    ("text", "`x` must fit the input .* dtype float32. .* dtype string"),
    ("three features", r"`x` must fit the input .* Received: .*\(4, 3\)"),
  )
  def test_models_and_data(self, name, words):
    self._refused(words, data=name)

  def _refused(self, words, model="good", data="good"):
    with self.assertRaisesRegex(ValueError, words):
      tf_replicas.fit(odd.MODELS[model], **odd.DATA[data](), verbose=0)

  @parameterized.parameters(
    ("of three features", r"validation_data: `x` must fit .*\(None, 3\)"),
    ("without labels", "validation_data: `y` must be given"),
    ("empty", r"`validation_data` must yield tensors.*Received: \[0\]"),
    ("of nothing", "`validation_data` must be .x, y.* Received: 0 parts"),
    ("of other length", r"equally many examples, .*Received: \[3, 8\]"),
    ("of text", "validation_data: `y` must be numbers"),
    ("a dict", "`validation_data` must be .x, y.* Received: a dict"),
    ("an empty data set", "`validation_data` must have batches"),
    ("an endless data set", "`validation_steps` must be given .*endless"),
    ("a data set of scalars", "`validation_data` must yield batches"),
  )
  def test_validation_data(self, name, words):
    """Before the first epoch, not after it."""
    validation = odd.ARGUMENTS[f"validation {name}"]()["validation_data"]
    with self.assertRaisesRegex((TypeError, ValueError), words):
      spec = data.check_validation(validation)
      compiled_model.check_data(odd.MODELS["good"](), spec, "validation_data: ")

  @parameterized.parameters("train_dir a file", "train_dir in a file")
  def test_a_directory_that_cannot_be_made(self, name):
    """Before the training, not when the first checkpoint is due."""
    with self.assertRaisesRegex(ValueError, "can be written .*Received: '"):
      arguments.make_directory(odd.ARGUMENTS[name]()["train_dir"])

  def test_a_failed_op_is_one_line(self):
    """TensorFlow's own message has 50."""
    labels = np.arange(8)
    with self.assertRaisesRegex(
      ValueError, r"^an op .*failed: Received a label value of 7 .*\(node .*\)$"
    ):
      tf_replicas.fit(odd.MODELS["loss of classes"], odd.X, labels, verbose=0)

  def test_what_a_step_returns_is_what_is_logged(self):
    """Under the name of Keras' own metric too, which it does not update.

    Keras does the same, unless all names are those of its metrics.
    """
    given = odd.DATA["good"]() | {"shuffle": False, "verbose": 0}
    keras.utils.set_random_seed(1)
    ours = tf_replicas.fit(odd.MODELS["step gives more"], **given).history
    self.assertGreater(ours["loss"][0], 0.0)
    self.assertAlmostEqual(ours["twice"][0], 2 * ours["loss"][0], places=4)

  def test_a_sequential_takes_other_sizes_that_its_layers_take(self):
    model = keras.Sequential(
      [
        keras.Input([8, 8, 3]),
        keras.layers.Conv2D(2, 3),
        keras.layers.GlobalAveragePooling2D(),
      ]
    )
    model.compile("sgd", "mse")
    spec = tf.TensorSpec([None, 6, 6, 3]), tf.TensorSpec([None, 2])
    compiled_model.check_data(model, spec)
    with self.assertRaisesRegex(ValueError, "`x` must fit the input"):
      compiled_model.check_data(model, (tf.TensorSpec([None, 6, 6, 4]), spec))


if __name__ == "__main__":
  import sys
  import time

  kind, names = sys.argv[1], sys.argv[2:]
  table = {"models": odd.MODELS, "data": odd.DATA, "args": odd.ARGUMENTS}[kind]
  for name in names or table:
    chosen = {k: "good" for k in ("models", "data", "args")} | {kind: name}
    begin = time.time()
    try:
      _fit(chosen["models"], chosen["data"], chosen["args"])
      print("PASS", name, round(time.time() - begin, 1), flush=True)
    except BaseException as error:
      print("FAIL", name, repr(error)[:600], flush=True)
      if not isinstance(error, AssertionError):
        traceback.print_exc()
