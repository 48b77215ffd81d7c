r"""Compares the final losses of trainings with a fault and of undisturbed ones.

  python -m benchmarks.equivalence --output=experiments/results [--rounds=10]
    [--kinds=between_graph/async,...]

With `sync` and all replicas, a training with a fault ends with the weights of
an undisturbed one (`benchmarks.fault_matrix` checks this). With other rules, no
two trainings are equal, so this program compares their losses. In each round it
makes two trainings of each kind, a driver with a rule: an undisturbed one, and
one in which a fault of `benchmarks.fault_matrix` hits a random task at a random
step. Both are five times as long as those of the fault matrix, because the
losses of short trainings differ much.

The loss is that of the training (cross entropy and weight decay) on the test
images of the synthetic data set, with the moving averages of the variables, as
in evaluation. (With the variables themselves, the losses of undisturbed
trainings differ more: with a backup, by up to 12%.) What a training has
*learned* is the loss of the untrained network less its own. A kind is
*equivalent* if the 95% interval of the ratio of the means of that, with a fault
divided by without, lies within 0.95 and 1.05. The interval is computed from the
logarithms by Welch's method.
Finished rounds in `equivalence.json` in `--output` are not made again.
"""

import json
import os
import pathlib
import random
import shutil
import sys
import tempfile
from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow as tf
from absl import app
from absl import flags

from benchmarks import fault_matrix
from benchmarks import stored
from benchmarks import tables
from cifar10 import inputs
from cifar10 import model as model_lib
from cifar10 import sources
from tf_replicas.runtime import fork_server
from tf_replicas.session import evaluation

FLAGS = flags.FLAGS
flags.DEFINE_integer("rounds", 10, "Runs of each kind, in all", lower_bound=1)
_RULES = ("backup", "async", "bounded_staleness", "periodic")
flags.DEFINE_list(
  "kinds",
  [f"{d}/{r}" for r in _RULES for d in ("between_graph", "in_graph")],
  "What is trained: each a driver and a rule",
)

_LENGTH = 5
_ROLES = ("worker", "chief", "ps")
_FAULTS = ("kill", "restart", "term", "stop")


class Loss:
  """Computes the loss of a checkpoint's averages on the test images.

  Attributes:
    untrained: The loss of the initial variables.
  """

  def __init__(self):
    self._model = model_lib.build(seed=fault_matrix.TRAINING_SEED)
    source = sources.find("synthetic")
    batches = inputs.eval_batches(source, source.num_test)
    self._images, self._labels = next(iter(batches))
    self.untrained = self._of(
      {v.path: tf.constant(v) for v in self._model.trainable_variables}
    )

  def of(self, values: Mapping[str, np.ndarray]) -> float:
    """Returns the loss.

    Args:
      values: The tensors of a checkpoint by name.
    """
    averaged = evaluation.averaged_variables(values)
    return self._of(
      {
        variable.path: tf.constant(averaged[variable.path])
        for variable in self._model.trainable_variables
      }
    )

  def _of(self, parameters) -> float:
    loss, _ = model_lib.total_loss(
      self._model, parameters, self._images, self._labels, training=False
    )
    return float(loss)


def train(
  kind: str, dice: random.Random | None, server: fork_server.ForkServer
) -> tuple[dict[str, np.ndarray], str]:
  """Trains once.

  Args:
    kind: The driver and the rule, separated by `/`.
    dice: Chooses the fault. None: there is none.
    server: Starts processes.

  Returns:
    The tensors of the last checkpoint by name, and what the fault was.

  Raises:
    fault_matrix.Failed: If the training did not survive the fault, or lost or
      repeated an example.
  """
  driver, rule = kind.split("/")
  cell = fault_matrix.Cell(driver, rule, "none", "none", "step")
  directory = tempfile.mkdtemp(prefix="equivalence")
  training = fault_matrix.Training(cell, directory, server, length=_LENGTH)
  told = ""
  fault = None
  if dice is not None:
    role, what = dice.choice(_ROLES), dice.choice(_FAULTS)
    step = round(training.max_steps * dice.uniform(0.1, 0.8))
    told = f"{what} of {role} at step {step}"

    def inject(training: fault_matrix.Training) -> None:
      training.await_that(
        lambda: max(training.steps(), default=0) >= step, f"step {step}"
      )
      training.inject(what, training.tasks_of(role, dice))

    fault = inject
  try:
    training.run(fault)
  except fault_matrix.Failed as failure:
    raise fault_matrix.Failed(
      f"{kind}, {told}: {failure}; logs: {directory}"
    ) from failure
  values = training.last_checkpoint()
  shutil.rmtree(directory, ignore_errors=True)
  return values, told


def main(argv: list[str]) -> None:
  if len(argv) > 1:
    sys.exit(f"unknown argument: {argv[1]}")
  path = pathlib.Path(FLAGS.output) / "equivalence.json"
  rows: dict[str, list[dict[str, Any]]] = {}
  if path.exists():
    rows = json.loads(path.read_text(encoding="utf-8"))["kinds"]
  loss = Loss()
  environ = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"}
  with fork_server.ForkServer(environ) as server:
    for number in range(FLAGS.rounds):
      for kind in FLAGS.kinds:
        rounds = rows.setdefault(kind, [])
        if len(rounds) > number:
          continue
        dice = random.Random(f"{FLAGS.seed} {kind} {number}")
        plain, _ = train(kind, None, server)
        values, told = train(kind, dice, server)
        rounds.append(
          {
            "undisturbed": loss.of(plain),
            "with_fault": loss.of(values),
            "fault": told,
            "commit": stored.CIRCUMSTANCES["commit"],
            "date": stored.CIRCUMSTANCES["date"],
          }
        )
        print(f"{kind}: {rounds[-1]}", flush=True)
        result = {"untrained": loss.untrained, "kinds": rows}
        stored.write(str(path), result)
  print("\n".join(tables.of_losses(rows, loss.untrained)))


if __name__ == "__main__":
  flags.mark_flag_as_required("output")
  app.run(main)
