"""Tests for drivers.mirrored, in this process and in real ones."""

import functools
import json
import pathlib
import sys
import tempfile
import time

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import absltest
from absl.testing import parameterized

from tests.support import stores
from tests.support import trials
from tests.support import word_model
from tests.tasks import mirrored_task
from tf_replicas import cluster
from tf_replicas.cluster import local_cluster
from tf_replicas.drivers import mirrored
from tf_replicas.drivers import one_machine
from tf_replicas.rules import base as rule_base
from tf_replicas.rules import results
from tf_replicas.session import checkpoints

NUM_STEPS = 5
BATCH = word_model.BATCH
PROGRAM = pathlib.Path(mirrored_task.__file__)
DEADLINE_SECS = 400.0

_state = word_model.state_of


def _mirrored(num_devices=2, optimizer=None, *, functions=None, **options):
  optimizer_fn = optimizer or (lambda: keras.optimizers.SGD(0.5, momentum=0.9))
  return mirrored.Mirrored(
    lambda: word_model.replica(**(functions or {})),
    lambda number: word_model.rule(optimizer_fn(), number, **options),
    [stores.device(number) for number in range(num_devices)],
  )


def _one_machine(optimizer=None, **options):
  optimizer_fn = optimizer or (lambda: keras.optimizers.SGD(0.5, momentum=0.9))
  return one_machine.OneMachine(
    word_model.replica, lambda: word_model.rule(optimizer_fn(), **options)
  )


def _steps(driver, number=NUM_STEPS):
  return [driver.step() for _ in range(number)]


_OPTIMIZERS = {
  "momentum": (None, {}),
  "adam": (
    lambda: keras.optimizers.Adam(0.05),
    {"clip_mean_norm": 0.3, "loss_scale": 64.0},
  ),
  # It has state that belongs to no variable.
  "nadam": (lambda: keras.optimizers.Nadam(0.05), {}),
}


@functools.cache
def _one_device(optimizer):
  """The steps of one device, and its state after them."""
  make, options = _OPTIMIZERS[optimizer]
  driver = _one_machine(make, **options)
  return _steps(driver), _state(driver)


class EquivalenceTest(stores.TestCase):
  """N devices with B examples each are one with N * B."""

  # The optimizer sees the sums alone, of how many devices they may be.
  @parameterized.parameters(
    (1, "nadam"), (2, "adam"), (2, "momentum"), (2, "nadam"), (3, "adam")
  )
  def test_devices(self, num_devices, optimizer):
    make, options = _OPTIMIZERS[optimizer]
    one_steps, one_state = _one_device(optimizer)
    many = _mirrored(num_devices, make, **options)
    many_steps = _steps(many)
    self.assertEqual([s.global_step for s in many_steps], [1, 2, 3, 4, 5])
    self.assertEqual([s.num_examples for s in many_steps], [BATCH] * NUM_STEPS)
    np.testing.assert_allclose(
      [s.loss for s in many_steps], [s.loss for s in one_steps], rtol=1e-5
    )
    word_model.assert_close(_state(many), one_state)
    self.assertEqual(many.global_step, NUM_STEPS)

  def test_copies_are_on_their_devices_and_stay_equal(self):
    driver = _mirrored(3)
    _steps(driver, 3)
    first, *others = driver._stores
    for store in others:
      for name, value in store.state().items():
        np.testing.assert_array_equal(value, first.state()[name], name)
    for number, store in enumerate(driver._stores):
      for index in range(len(store.specs)):
        self.assertEndsWith(store.variables(index)[0].device, f"CPU:{number}")

  def test_a_variable_without_a_gradient_is_skipped(self):
    driver = _mirrored(2, lambda: keras.optimizers.SGD(0.1, weight_decay=0.5))
    driver.step()
    np.testing.assert_array_equal(_state(driver)["variables/unused"], [1, 1])

  def test_the_rate_set_before_a_step_reaches_all_copies(self):
    driver = _mirrored(2)
    driver.set_learning_rate(0.125)
    result = driver.step()
    self.assertEqual(result.scalars["learning_rate"], 0.125)
    first, second = (store.state() for store in driver._stores)
    for name, value in first.items():
      np.testing.assert_array_equal(second[name], value, name)


class RefusalTest(stores.TestCase):
  @parameterized.parameters("loss", "gradient")
  def test_what_is_not_finite_is_refused_before_it_does_harm(self, what):
    loss_fn, dataset_fn = word_model.poisoned(what, step=2, shard=1)
    driver = _mirrored(
      2, functions={"loss_fn": loss_fn, "dataset_fn": dataset_fn}
    )
    _steps(driver, 2)
    before = [store.state() for store in driver._stores]
    with self.assertRaises(results.NonFiniteGradientError) as raised:
      driver.step()
    self.assertEqual(
      str(raised.exception),
      "replica 1 computed a loss or a gradient that is not finite, from the"
      " variables of step 2",
    )
    for store, values in zip(driver._stores, before, strict=True):
      for name, value in store.state().items():
        np.testing.assert_array_equal(value, values[name], name)

  def test_towers_in_a_replica(self):
    with self.assertRaisesRegex(ValueError, "without `devices`"):
      mirrored.Mirrored(
        lambda: word_model.replica([stores.device(0)]),
        lambda number: word_model.rule(keras.optimizers.SGD(0.5), number),
      )

  def test_a_rule_that_does_without_a_device(self):
    with self.assertRaisesRegex(ValueError, "number of devices, 2, .*: 1"):
      mirrored.Mirrored(
        word_model.replica,
        lambda number: word_model.rule(keras.optimizers.SGD(0.5), number - 1),
        [stores.device(0), stores.device(1)],
      )


class CheckpointTest(stores.TestCase):
  def test_exchange_with_one_machine_and_parameter_servers(self):
    whole = _one_machine()
    _steps(whole, 6)
    first = _mirrored(2)
    _steps(first, 2)
    directory = self.enter_context(tempfile.TemporaryDirectory())
    path = checkpoints.save(directory, _state(first))

    second = _one_machine()
    checkpoints.restore(path, second.store)
    _steps(second, 2)
    path = checkpoints.save(directory, _state(second))

    cut = stores.attach(second.store.specs, 2, stores.cut(2))
    rule = word_model.rule(mirrored_task.sgd(), 2)
    rule.build(cut, is_sparse=[True, False, False, False])
    values = [tf.zeros(spec.shape) for spec in cut.specs]
    rule_base.create_or_resume(rule, cut, values)
    checkpoints.restore(path, cut)
    state = {name: np.asarray(value) for name, value in cut.state().items()}

    third = _mirrored(3)
    third.store.load_state(state)
    self.assertEqual(third.global_step, 4)
    _steps(third, 2)
    word_model.assert_close(_state(third), _state(whole))

  def test_table_counts_one_copy(self):
    table = _mirrored(3).store.table()
    self.assertIn("Total: 4 variables, 57 parameters, 228 B", table)
    self.assertIn("a copy of all this on each of 3 replicas", table)


# With a process for each worker.


class Trial:
  """A scenario of `mirrored_task` in two real processes."""

  def __init__(self, scenario, directory, num_workers=2, start=(0, 1)):
    self.directory = directory
    spec = cluster.resolve_ports(
      cluster.parse(
        {
          "cluster": {"worker": ["localhost:0"] * num_workers},
          "variables": {"on": "mirrored"},
        }
      )
    )
    path = directory / "spec.json"
    path.write_text(spec.to_json())
    environ = dict(trials.ENVIRON)
    environ["PYTHONPATH"] += f":{PROGRAM.parent}"

    def command(task):
      arguments = [scenario, str(path), str(directory), str(task.index)]
      return [sys.executable, "-u", str(PROGRAM), *arguments]

    self.workers = [cluster.Task("worker", i) for i in start]
    self.tasks = local_cluster.LocalCluster(
      spec, command, log_dir=directory / "logs", environ=environ
    )
    self.tasks.start(*self.workers)

  def await_codes(self, *workers):
    """The exit status of each process, or of some, once they have ended.

    Their logs are complete then.
    """
    workers = workers or self.workers
    deadline = time.monotonic() + DEADLINE_SECS
    while True:
      codes = [self.tasks.returncode(w) for w in workers]
      if None not in codes:
        for worker in workers:
          trials.await_output(self.tasks._processes[worker])
        return codes
      if time.monotonic() > deadline:
        self.tasks.stop(grace_secs=1.0)
        raise TimeoutError(f"{codes} after {DEADLINE_SECS} s\n{self.logs()}")
      time.sleep(0.05)

  def logs(self):
    """What all printed."""
    return "\n".join(
      f"--- {worker}\n{self.tasks.log(worker)}" for worker in self.workers
    )

  def report(self, name="chief"):
    """What the chief, or the follower, left."""
    return json.loads((self.directory / f"{name}.json").read_text())


@pytest.fixture
def start(tmp_path):
  started = []

  def start_one(scenario, **options):
    started.append(Trial(scenario, tmp_path, **options))
    return started[-1]

  yield start_one
  for trial in started:
    trial.tasks.stop(grace_secs=1.0)


def _expected(num_steps, state=None):
  """What one process with the double batch would do: losses and state."""
  case = stores.TestCase()
  case.setUp()
  try:
    driver = _one_machine(mirrored_task.sgd, clip_mean_norm=0.3)
    if state is not None:
      driver.store.load_state(state)
    losses = []
    for _ in range(num_steps):
      driver.set_learning_rate(mirrored_task.RATE)
      losses.append(driver.step().loss)
    return losses, _state(driver)
  finally:
    case.doCleanups()


def _check(trial, losses, state):
  report = trial.report()
  np.testing.assert_allclose(report["losses"], losses, rtol=1e-5)
  arrays = {k: np.asarray(v) for k, v in report["state"].items()}
  word_model.assert_close(arrays, state)
  # Everyone has the same, to the last bit.
  assert trial.report("follower") == report["state"]


class TestProcesses:
  def test_two_are_one_with_the_double_batch(self, start):
    trial = start("fresh")
    assert trial.await_codes() == [0, 0], trial.logs()
    losses, state = _expected(mirrored_task.NUM_STEPS)
    assert state["global_step"] == mirrored_task.NUM_STEPS
    assert state["examples_seen"] == mirrored_task.NUM_STEPS * BATCH
    _check(trial, losses, state)

  @pytest.mark.exhaustive
  def test_they_go_on_from_a_checkpoint_of_one_process(self, start, tmp_path):
    _, middle = _expected(2)
    checkpoints.save(str(tmp_path), middle)
    trial = start("resume")
    assert trial.await_codes() == [0, 0], trial.logs()
    losses, state = _expected(2 + mirrored_task.NUM_STEPS)
    _check(trial, losses[2:], state)

  def test_all_refuse_what_one_found_not_finite(self, start):
    trial = start("not_finite")
    assert trial.await_codes() == [0, 0], trial.logs()
    words = "worker 1, replica 0 computed a loss or a gradient that is not"
    for worker in trial.workers:
      assert words in trial.tasks.log(worker), trial.logs()

  @pytest.mark.exhaustive
  @pytest.mark.parametrize("scenario", ["failing_chief", "unfit_chief"])
  def test_the_others_end_when_the_chief_fails(self, start, scenario):
    trial = start(scenario)
    assert trial.await_codes() == [0, 1], trial.logs()
    words = "error: the chief ended the training early, at step"
    assert words in trial.tasks.log(trial.workers[1])

  def test_who_differs_is_refused(self, start):
    trial = start("differing")
    assert trial.await_codes() == [1, 1], trial.logs()
    for worker in trial.workers:
      assert "the workers differ in their variables" in trial.tasks.log(worker)

  def test_who_does_not_come_is_named(self, start):
    trial = start("missing", start=[0])
    assert trial.await_codes() == [1], trial.logs()
    assert "error: waiting for worker 1 at localhost:" in trial.logs()
    assert "gave up after" in trial.logs()

  def test_a_process_that_stands_still_ends_the_training(self, start):
    trial = start("stopped")
    left, still = trial.workers
    assert trial.await_codes(left) == [3], trial.logs()
    assert trial.tasks.returncode(still) is None
    assert "unhealthy (stopped sending heartbeats)" in trial.tasks.log(left)

  @pytest.mark.parametrize(
    ("scenario", "dead"),
    [
      pytest.param("killed", 1, marks=pytest.mark.exhaustive),
      ("killed_chief", 0),
    ],
  )
  def test_a_killed_process_ends_the_training(self, start, scenario, dead):
    trial = start(scenario)
    codes = trial.await_codes()
    assert codes[dead] == -9, trial.logs()
    assert codes[1 - dead] not in (0, -9), trial.logs()


if __name__ == "__main__":
  absltest.main()
