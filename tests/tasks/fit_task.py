"""A task of `fit` on a cluster: python fit_task.py CASE ARGUMENTS

CASE is a key of `CASES`, `KINDS` or `PARTS` of `tests.fitting.models`.
ARGUMENTS is a JSON object: `rule` (settings of `Sync`; with `policies`, of
`Async`) and arguments of `fit`. The chief prints one line of JSON.
"""

import json
import sys

import keras
import numpy as np

import tf_replicas
from tests.fitting import models


class Calls(keras.callbacks.Callback):
  """Notes which hooks ran; lowers the rate after the first epoch."""

  def __init__(self):
    """Has seen nothing."""
    super().__init__()
    self.seen = []
    self.examples = []

  def on_epoch_end(self, epoch, logs=None):
    """Notes the epoch and the examples of its loss; assigns the rate."""
    self.seen.append(epoch)
    _, count = self.model.metrics[0].variables
    self.examples.append(float(count))
    if "rate" in ARGUMENTS:
      self.model.optimizer.learning_rate = ARGUMENTS["rate"]


CASE = (models.CASES | models.KINDS | models.PARTS)[sys.argv[1]]
ARGUMENTS = json.loads(sys.argv[2])


def main() -> None:
  """Trains, then saves, evaluates and predicts with the trained model."""
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
  }
  print("RESULT", json.dumps(result))


main()
