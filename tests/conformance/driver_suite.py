"""The tests that every driver (the object that runs a training) must pass.

A driver of one process is tested by a line in `registry.DRIVERS`, a driver of
several by a line in `registry.CLUSTER_DRIVERS`. `ask_chief` uses either kind of
driver in the same way, and notes what the driver does. Its answers are JSON, so
that a task of a cluster can write them to a file for the test. The model and
the data are those of `word_model`.
"""

import dataclasses
import functools
import json
from collections.abc import Callable
from unittest import mock

import keras
import numpy as np

from tests.conformance import rule_suite
from tests.support import word_model
from tf_replicas.drivers import base as driver_base
from tf_replicas.drivers import one_machine
from tf_replicas.replica import model_replica
from tf_replicas.rules import base as rule_base

FIRST_RATE, LATER_RATE = 0.5, 0.25
TAKEN, LAST = 2, 4
ERROR = "the block of the test failed"

MakeReplica = Callable[[], model_replica.Replica]
MakeRule = Callable[[int], rule_base.UpdateRule]


@dataclasses.dataclass(frozen=True)
class DriverCase:
  """A driver of one process, for the tests that every driver must pass.

  Attributes:
    make: Maps a function that builds the replica, and a function that maps the
      number of replicas to a synchronous rule, to a new driver.
    num_replicas: The number of replicas of the driver.
  """

  make: Callable[[MakeReplica, MakeRule], driver_base.Driver]
  num_replicas: int = 1

  def driver(self) -> driver_base.Driver:
    """Makes a new driver, which trains the small model of `word_model`."""
    return self.make(word_model.replica, rule)


@dataclasses.dataclass(frozen=True)
class ClusterCase:
  """A driver of several processes, for the tests that every driver must pass.

  The cluster has one PS task and two workers.

  Attributes:
    replication: The kind of replication: "between_graph" or "in_graph".
    has_chief: Whether there is a `chief` task, which drives the workers.
  """

  replication: str
  has_chief: bool = False


def rule(num_replicas: int) -> rule_base.UpdateRule:
  """Makes the synchronous update rule that the tests give to a driver.

  Args:
    num_replicas: Number of replicas.
  """
  return word_model.rule(keras.optimizers.SGD(FIRST_RATE), num_replicas)


def error_of(call: Callable[[], object]) -> str:
  """Returns the type and the message of what `call` raises; "" if nothing."""
  try:
    call()
  except Exception as error:
    return f"{type(error).__name__}: {error}"
  return ""


def ask_chief(driver: driver_base.Driver, *, fails: bool = False) -> dict:
  """Trains with a chief's driver to the end, and notes what the driver does.

  Args:
    driver: A new driver.
    fails: Whether to end the training by an error.

  Returns:
    What the driver returned or raised, by name, as JSON-like values.
  """
  answers = {
    "is_driver": isinstance(driver, driver_base.Driver),
    "role_error": error_of(driver.run_replica),
    "accepted_fraction": driver.accepted_fraction,
    "replica_names": list(driver.replica_names),
    "step_before": driver.global_step,
  }
  closed = []
  close = type(driver).close

  def noted_close(self, error=None):
    closed.append(repr(error))
    close(self, error)

  def run():
    with driver as entered:
      answers["enters_itself"] = entered is driver
      answers["steps"] = _steps(driver)
      answers["global_step"] = driver.global_step
      answers["examples_seen"] = int(driver.store.examples_seen.read_value())
      answers["state_counts"] = driver.store.counts()
      answers["examples_drawn"] = int(driver.examples_drawn())
      answers["counts"] = [[c.applied, c.refused] for c in driver.counts()]
      answers["values"], answers["averages"] = (
        _as_json(driver.values(averaged=averaged)) for averaged in (False, True)
      )
      answers["table"] = driver.store.table()
      driver.interrupt()  # Nobody waits.
      if fails:
        raise ValueError(ERROR)

  with mock.patch.object(type(driver), "close", noted_close):
    answers["block_error"] = error_of(run)
  answers["closed"] = closed
  return json.loads(json.dumps(answers))


def _steps(driver: driver_base.Driver) -> list[list]:
  """Makes all updates with a driver, and changes the learning rate on the way.

  Returns:
    For each call of `step`: the global step, the loss, the number of examples
    and the learning rate.
  """
  steps = []
  while driver.global_step < LAST:
    is_first = driver.global_step < TAKEN
    driver.stop_at(TAKEN if is_first else LAST)
    if not is_first:
      driver.set_learning_rate(LATER_RATE)
    # It must not make more than is left, and may make fewer.
    left = (TAKEN if is_first else LAST) - driver.global_step
    result = driver.step(max_updates=left)
    rate = float(result.scalars["learning_rate"])
    steps.append(
      [result.global_step, float(result.loss), int(result.num_examples), rate]
    )
  return steps


def _as_json(values) -> dict:
  return {name: np.asarray(v).tolist() for name, v in values.items()}


class DriverSuite(rule_suite.Interface):
  """A mixin class with the tests that every driver must pass.

  A subclass defines `answers` (what `ask_chief` returned for the driver) and
  `num_replicas`, the number of the driver's replicas.
  """

  num_replicas: int

  @property
  def answers(self) -> dict:
    """What `ask_chief` returned for the driver of this test class."""
    raise NotImplementedError

  def test_the_chief_does_not_run_a_replica(self):
    self.assertTrue(self.answers["is_driver"])
    self.assertStartsWith(self.answers["role_error"], "RuntimeError")

  def test_accepted_fraction_and_examples(self):
    self.assertBetween(self.answers["accepted_fraction"], 1e-9, 1.0)
    self.assertGreaterEqual(
      self.answers["examples_drawn"], self.answers["examples_seen"]
    )

  def test_steps_count_the_updates(self):
    steps = [step for step, *_ in self.answers["steps"]]
    self.assertEqual(self.answers["step_before"], 0)
    self.assertEqual(steps, sorted(set(steps)))
    self.assertIn(TAKEN, steps)
    self.assertEqual(steps[-1], LAST)
    self.assertEqual(self.answers["global_step"], LAST)

  def test_steps_tell_all_examples(self):
    examples = [examples for _, _, examples, _ in self.answers["steps"]]
    self.assertEqual(sum(examples), self.answers["examples_seen"])
    self.assertEqual(sum(examples), LAST * word_model.BATCH)
    self.assertEqual(
      self.answers["state_counts"], [LAST, self.answers["examples_seen"]]
    )
    losses = [loss for _, loss, *_ in self.answers["steps"]]
    self.assertTrue(np.isfinite(losses).all())

  def test_learning_rate_from_the_next_update_on(self):
    for step, _, _, rate in self.answers["steps"]:
      self.assertEqual(rate, FIRST_RATE if step <= TAKEN else LATER_RATE)

  def test_counts_match_the_names(self):
    names, counts = self.answers["replica_names"], self.answers["counts"]
    self.assertLen(counts, len(names))
    if names:
      self.assertLen(names, self.num_replicas)
      self.assertEqual(len(set(names)), len(names))
      applied = sum(applied for applied, _ in counts)
      self.assertEqual(applied, LAST * self.num_replicas)

  def test_values_by_path(self):
    self.assertSameElements(self.answers["values"], word_model.PATHS)
    self.assertSameElements(self.answers["averages"], word_model.PATHS)
    values, averages = self.answers["values"], self.answers["averages"]
    self.assertNotEqual(values["kernel"], averages["kernel"])
    for path in word_model.PATHS:
      self.assertIn(path, self.answers["table"])

  def test_equals_one_machine(self):
    """Checks that a driver makes the same updates as `OneMachine`."""
    for name in ("values", "averages"):
      for path, expected in _expected()[name].items():
        np.testing.assert_allclose(
          self.answers[name][path],
          expected,
          rtol=1e-4,
          atol=1e-5,
          err_msg=path,
        )

  def test_the_block_closes_it_once(self):
    self.assertTrue(self.answers["enters_itself"])
    self.assertLen(self.answers["closed"], 1)


@functools.cache
def _expected() -> dict:
  """Returns what `ask_chief` returns for the driver `OneMachine`."""
  return ask_chief(one_machine.OneMachine(word_model.replica, lambda: rule(1)))
