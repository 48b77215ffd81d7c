"""Tests all drivers of the registry by the tests of `driver_suite`."""

import pathlib

import pytest
from absl.testing import absltest

from tests.conformance import driver_suite
from tests.conformance import driver_task
from tests.conformance import registry
from tests.support import stores
from tests.support import trials
from tf_replicas.drivers import base as driver_base

PROGRAM = pathlib.Path(driver_task.__file__)


class InProcess(driver_suite.DriverSuite):
  """A mixin class with the tests of a driver of one process.

  A subclass defines `case`, the driver to test.
  """

  case: driver_suite.DriverCase
  _answers: dict | None = None

  @property
  def num_replicas(self):
    return self.case.num_replicas

  @property
  def answers(self):
    if type(self)._answers is None:
      type(self)._answers = driver_suite.ask_chief(self.case.driver())
    return self._answers

  def test_implements_every_member(self):
    driver = self.case.driver()
    self.assert_implements(driver, driver_base.Driver)
    self.assert_hides_no_method(driver)
    self.assertIsInstance(driver.is_chief, bool)
    driver.close()

  def test_an_error_closes_it_and_is_raised(self):
    answers = driver_suite.ask_chief(self.case.driver(), fails=True)
    error = f"ValueError: {driver_suite.ERROR}"
    self.assertEqual(answers["block_error"], error)
    self.assertLen(answers["closed"], 1)
    self.assertIn(driver_suite.ERROR, answers["closed"][0])


for _name, _case in registry.DRIVERS.items():
  _class = f"Test_{_name}"
  globals()[_class] = type(
    _class,
    (InProcess, stores.TestCase),
    {"case": _case, "__module__": __name__},
  )


class OnACluster(driver_suite.DriverSuite):
  """A mixin class with the tests of a driver of several processes.

  A subclass defines `case`, the driver to test.
  """

  case: driver_suite.ClusterCase
  fails = False
  num_replicas = 2
  _trial: trials.Trial | None = None

  @pytest.fixture(autouse=True)
  def start_once(self, start_trial):
    """Runs one cluster to its end, for all tests of the class."""
    if type(self)._trial is not None:
      return
    trial = type(self)._trial = start_trial(
      "answer",
      trials.document(1, 2, chief=int(self.case.has_chief)),
      program=PROGRAM,
      replication=self.case.replication,
      fails=self.fails,
    )
    if self.fails:
      trial.await_end()
    else:
      trial.await_success()

  @property
  def answers(self):
    return self._trial.report()

  def test_how_it_ended(self):
    if not self.fails:
      self.assertEqual(self.answers["block_error"], "")
      self.assertEqual(self.answers["closed"], ["None"])
      return
    self.assertEqual(
      self.answers["block_error"], f"ValueError: {driver_suite.ERROR}"
    )
    self.assertIn(driver_suite.ERROR, self.answers["closed"][0])
    # The server says it, too.
    self.assertIn(driver_suite.ERROR, self._trial.log("ps"))

  def test_other_clients_run_a_replica_and_make_no_step(self):
    if self.case.has_chief:
      return  # The workers are servers.
    answers = self._trial.report("follower")
    self.assertStartsWith(answers["role_error"], "RuntimeError")
    if self.fails:
      self.assertIn(driver_suite.ERROR, answers["error"])
    else:
      self.assertEqual(answers["returned"], driver_suite.LAST)


def _on_a_cluster(name, case, fails):
  attributes = {"case": case, "fails": fails, "__module__": __name__}
  made = type(name, (OnACluster, absltest.TestCase), attributes)
  globals()[name] = pytest.mark.cluster(made)


for _name, _case in registry.CLUSTER_DRIVERS.items():
  _on_a_cluster(f"Test_{_name}", _case, fails=False)
# How an error is told is a matter of several clients.
_on_a_cluster(
  "Test_between_graph_fails",
  registry.CLUSTER_DRIVERS["between_graph"],
  fails=True,
)


if __name__ == "__main__":
  absltest.main()
