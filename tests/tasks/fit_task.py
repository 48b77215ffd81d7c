"""Trains a model with `fit`, as one task: python fit_task.py CASE ARGUMENTS

CASE is a key of `CASES`, `KINDS` or `PARTS` of `tests.fitting.models`.
ARGUMENTS is a JSON object: `rule` (settings of `Sync`; with `policies`, of
`Async`) and arguments of `fit`. The chief prints one line of JSON.

With the argument `then`, a list of [CASE, how], the chief then trains on each
of these cases. `how` is "data set", to train on a `tf.data.Dataset`, or "go
on", to begin with the weights of the training before.
"""

import json
import sys

import keras
import numpy as np
import tensorflow as tf

import tf_replicas
from tests.fitting import models


class Calls(keras.callbacks.Callback):
  """A Keras callback that notes the epochs, and may set the learning rate.

  If there is an argument `rate`, it becomes the learning rate after each epoch.
  """

  def __init__(self):
    """Initializes the callback, which has seen no epoch yet."""
    super().__init__()
    self.seen = []
    self.examples = []

  def on_epoch_end(self, epoch, logs=None):
    """Notes the epoch and the number of its examples, and sets the rate."""
    self.seen.append(epoch)
    _, count = self.model.metrics[0].variables
    self.examples.append(float(count))
    if "rate" in ARGUMENTS:
      self.model.optimizer.learning_rate = ARGUMENTS["rate"]


ALL = models.CASES | models.KINDS | models.PARTS
CASE = ALL[sys.argv[1]]
ARGUMENTS = json.loads(sys.argv[2])
THEN = ARGUMENTS.pop("then", [])


def train_again(name: str, how: str, last: keras.Model) -> keras.Model:
  """Trains another model after a first training, and returns it.

  Args:
    name: Name of the case, which defines model and data.
    how: "data set": train on a `tf.data.Dataset`; "go on": begin with the
      weights of `last`.
    last: The model that was trained before.
  """
  case, weights = ALL[name], last.get_weights()

  def model_fn():
    model = case.model_fn()
    if how == "go on":
      model.set_weights(weights)
    return model

  more = {k: ARGUMENTS[k] for k in ("replication", "epochs")}
  if how == "data set":
    x, y = case.arguments["x"], case.arguments["y"]
    data = tf.data.Dataset.from_tensor_slices((x, y))
    data = data.batch(ARGUMENTS["batch_size"])
    history = tf_replicas.fit(model_fn, data, verbose=0, **more)
  else:
    more |= {"batch_size": ARGUMENTS["batch_size"], "shuffle": False}
    history = tf_replicas.fit(model_fn, **case.arguments, verbose=0, **more)
  return history.model


def main() -> None:
  """Trains a model, evaluates it, predicts with it and prints the results."""
  settings = ARGUMENTS.get("rule", {})
  policies = settings.pop("policies", None)
  if policies is None:
    rule = tf_replicas.Sync(**settings)
  else:
    rule = tf_replicas.Async(*policies, **settings)
  calls = Calls()
  more = {k: v for k, v in ARGUMENTS.items() if k not in ("rule", "rate")}
  history = tf_replicas.fit(
    CASE.model_fn,
    **CASE.arguments,
    callbacks=[calls],
    rule=rule,
    verbose=0,
    **more,
  )
  model = history.model
  evaluated = model.evaluate(
    CASE.arguments["x"], CASE.arguments["y"], verbose=0, return_dict=True
  )
  model.predict(CASE.arguments["x"], verbose=0)
  result = {
    "history": history.history,
    "epochs": calls.seen,
    "examples": calls.examples,
    "weights": [np.asarray(w).tolist() for w in model.get_weights()],
    "slots": [
      np.asarray(v).tolist() for v in models.optimizer_variables(model)
    ],
    "evaluated": evaluated,
    "then": [],
  }
  for name, how in THEN:
    model = train_again(name, how, model)
    model.predict(ALL[name].arguments["x"], verbose=0)
    weights = [np.asarray(w).tolist() for w in model.get_weights()]
    result["then"].append(weights)
  print("RESULT", json.dumps(result))


main()
