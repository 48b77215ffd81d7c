"""Runs one task of a test's cluster, which plays a scenario.

  python cluster_task.py SCENARIO ARGUMENTS JOB INDEX

SCENARIO is the name of a function of this file. ARGUMENTS is a JSON document
that `tests.support.trials.Trial`, which starts the tasks, makes. Tasks and test
tell each other that something happened by marks, which are empty files.
"""

import faulthandler
import functools
import json
import os
import pathlib
import signal
import sys
import threading
import time
import traceback
from collections.abc import Mapping

import keras
import numpy as np
import tensorflow as tf
from tensorflow.python.data.experimental.ops import testing

from tests.support import fast_start  # noqa: F401, before what imports TensorFlow
from tf_replicas import cluster
from tf_replicas.drivers import between_graph
from tf_replicas.drivers import heartbeat_table
from tf_replicas.drivers import heartbeats
from tf_replicas.drivers import in_graph
from tf_replicas.drivers import server
from tf_replicas.replica import model_replica
from tf_replicas.rules import protocol
from tf_replicas.rules import switch_conditions
from tf_replicas.rules import switching
from tf_replicas.rules.asynchronous import async_replicas
from tf_replicas.rules.asynchronous import staleness
from tf_replicas.rules.periodic import periodic_averaging
from tf_replicas.rules.sync import sync_replicas
from tf_replicas.runtime import processes
from tf_replicas.runtime import resources
from tf_replicas.runtime import waiting
from tf_replicas.session import checkpoints
from tf_replicas.session import reports
from tf_replicas.session import training
from tf_replicas.store import moving_averages

MARK_TIMEOUT_SECS = 350.0
# Of the constant gradients: plain gradient descent takes steps of twice them.
LEARNING_RATE = 2.0
# A gradient that must never be applied.
POISON = 1000.0


class Here:
  """The task of this process, its cluster, and the options of its scenario."""

  def __init__(self, arguments: dict, job: str, index: int):
    self.spec = cluster.parse(arguments["spec"])
    self.task = cluster.Task(job, index)
    self.options = arguments["options"]
    self.is_in_graph = arguments["replication"] == "in_graph"
    self.directory = pathlib.Path(arguments["directory"])

  @property
  def serves(self) -> bool:
    """Whether this task is a parameter server or an in-graph worker."""
    return self.task.job == "ps" or (
      self.is_in_graph and self.task.job == "worker"
    )

  @property
  def num_replicas(self) -> int:
    """Number of tasks that compute gradients."""
    if self.is_in_graph:
      return self.spec.num_tasks("worker")
    return len(self.spec.replicas)

  def serve(self) -> None:
    """Serves as a parameter server or in-graph worker until training ends.

    If training failed, exits with the error.
    """
    namespaces = self.options.get("namespaces", [""])
    outcome = server.serve(self.spec, self.task, namespaces=namespaces)
    if outcome != heartbeats.FINISHED:
      sys.exit(f"training ended with: {outcome}")

  def driver(self, replica_fn, optimizer_fn, namespace=""):
    """Makes the driver, the object that runs this task's part of a training.

    Args:
      replica_fn: Builds the replica.
      optimizer_fn: Builds the update rule.
      namespace: The name of the training.
    """
    driver = (
      in_graph.InGraph if self.is_in_graph else between_graph.BetweenGraph
    )
    return driver(
      self.spec,
      self.task,
      replica_fn,
      optimizer_fn,
      start_timeout_secs=self.options.get("start_timeout_secs", 60),
      lost_after_secs=self.options.get("lost_after_secs", 20),
      recovery_timeout_secs=self.options.get("recovery_timeout_secs", 0),
      namespace=namespace,
    )

  def mark(self, name: str) -> None:
    """Tells test and tasks that something has happened, by an empty file.

    Args:
      name: What has happened: the name of the file.
    """
    (self.directory / name).touch()

  def await_mark(self, name: str) -> None:
    """Waits until a task, or the test, has said that something has happened.

    Args:
      name: What has to happen, as given to `mark`.
    """
    waiting.await_value(
      (self.directory / name).exists,
      timeout_secs=MARK_TIMEOUT_SECS,
      what=f"waiting for the mark {name}",
      poll_secs=0.01,
    )

  def report(self, values: dict, name: str = "chief") -> None:
    """Writes values to a file of JSON, for the test to read.

    Args:
      values: The values by name.
      name: Name of the report.
    """
    (self.directory / f"{name}.json").write_text(json.dumps(values))

  def count(self, name: str) -> int:
    """Returns how often `count` was called before with the same name.

    Calls of earlier processes of the task, which were killed, are included.
    """
    number = len(list(self.directory.glob(f"{name}_*")))
    self.mark(f"{name}_{number}")
    return number


def train(here: Here, driver, run_chief) -> None:
  """Plays this task's part in a training, and then leaves the training.

  The chief calls `run_chief`, and reports its result with the counts and the
  state at the end. Other tasks contribute gradients.

  Args:
    here: This task.
    driver: The driver of this task.
    run_chief: Makes the updates, and returns values to report.
  """
  try:
    if driver.is_chief:
      values = run_chief()
      values["counts"] = [c[:3] for c in driver.counts()]
      values["refused"] = [c.refused for c in driver.counts()]
      values["state"] = as_lists(driver.store.state())
      values["global_step"] = driver.global_step
      here.report(values)
    else:
      driver.run_replica()
  except Exception as error:
    driver.close(error)
    raise
  if driver.is_chief:
    here.mark("over")
  driver.close()
  left = [t for t in threading.enumerate() if t is not threading.main_thread()]
  print(f"threads that are left: {left}", flush=True)


def as_lists(tensors: dict) -> dict:
  """Returns tensors by name as nested lists, which JSON can represent."""
  return {name: np.asarray(t).tolist() for name, t in tensors.items()}


class Recorder:
  """Makes updates in the chief, and records the state after each."""

  def __init__(self, driver):
    self._driver = driver
    self.steps: list[dict] = []

  def step(self, times: int = 1) -> None:
    """Makes `times` updates, and records the results and all variables."""
    for _ in range(times):
      result = self._driver.step()
      self.steps.append(
        {
          "global_step": result.global_step,
          "loss": result.loss,
          "num_examples": result.num_examples,
          "state": as_lists(self._driver.store.state()),
          "bytes_waiting": self._sizes(),
        }
      )

  def _sizes(self) -> list[list[int]]:
    """Returns the number of elements in each queue of gradients.

    Each PS task has one queue for each replica.

    Returns:
      A list for each PS task, with a number for each replica.
    """
    queues = self._driver.rule._contributions._gradients._queues
    return [[int(queue.size()) for queue in row] for row in queues]


def inbox_size(driver) -> int:
  """Returns how many messages of replicas wait for the chief."""
  return int(driver.rule._contributions._inbox.size())


def await_offers(driver, number: int) -> None:
  """Waits until `number` replicas have offered gradients to the chief.

  A replica offers its gradients before it sends them. The chief must not have
  answered any of these offers.
  """
  waiting.await_value(
    lambda: inbox_size(driver) == number,
    timeout_secs=MARK_TIMEOUT_SECS,
    what=f"waiting for {number} offers",
    poll_secs=0.01,
  )


# Gradients that do not depend on the variables, after test2Workers of TF1's
# sync_replicas_optimizer_test.py.


def constant_replica(here: Here, gate=None, is_poisonous=False):
  """Makes a replica whose gradients do not depend on the variables.

  The gradient of worker w is 0.1 + 0.2 w for `v0` and for row w of `v2`, and
  0.9 + 0.2 w for `v1`. No worker has a gradient for `nobody`. Where every
  worker has a program of its own, only worker 1 has a gradient for `only_1`:
  0.7.

  Args:
    here: This task.
    gate: Called with the number of each batch before the batch can be read.
    is_poisonous: Whether all gradients are `POISON` instead, which must never
      be applied.
  """
  is_worker_1 = not here.is_in_graph and here.task == cluster.Task("worker", 1)

  def loss_fn(parameters, g0, g1, row):
    v0, v1, v2, _, only_1 = parameters
    loss = g0 * v0 + g1 * v1 + g0 * tf.gather(v2, row)[:, 0]
    if is_worker_1:
      loss += 0.7 * only_1
    return tf.reduce_mean(loss)

  def dataset_fn(num_shards, index, start):
    del num_shards, start
    row = tf.reshape(tf.cast(index, tf.int64), [1])
    more = 0.2 * tf.cast(row, tf.float32)
    batch = (0.1 + more, 0.9 + more, row)
    if is_poisonous:
      batch = (0 * more + POISON, 0 * more + POISON, row)
    numbers = tf.data.Dataset.range(10**6)
    if gate is not None:
      numbers = numbers.map(
        lambda n: tf.ensure_shape(tf.py_function(gate, [n], tf.int64), [])
      )

    def number_to_batch(number):
      del number
      return batch

    return numbers.map(number_to_batch)

  return model_replica.Replica(
    [
      tf.Variable(0.0, name="v0"),
      tf.Variable(1.0, name="v1"),
      tf.Variable([[3.0], [4.0], [5.0]], name="v2"),
      tf.Variable(6.0, name="nobody"),
      tf.Variable(7.0, name="only_1"),
    ],
    loss_fn,
    dataset_fn,
  )


def constant_optimizer(here: Here):
  """Makes a rule of synchronous updates, with gradient descent.

  The scenario's options say how many gradients make an update.
  """
  replicas = here.num_replicas
  return sync_replicas.SyncReplicasOptimizer(
    keras.optimizers.SGD(LEARNING_RATE),
    here.options.get("aggregate", replicas),
    here.options.get("total", replicas),
    step_timeout_secs=here.options.get("step_timeout_secs"),
    min_contributions=here.options.get("min_contributions"),
    variable_averages=moving_averages.MovingAverages(0.9),
  )


def constant_driver(here: Here, gate=None):
  """Makes a driver of synchronous updates whose gradients are constant.

  Args:
    here: This task.
    gate: Called with the number of each batch before the batch can be read.
  """
  return here.driver(
    lambda: constant_replica(here, gate), lambda: constant_optimizer(here)
  )


def constant_gradients(here: Here) -> None:
  """A scenario: updates with constant gradients, each of which is recorded.

  It goes on until gradients of every replica have been applied.
  """
  driver = constant_driver(here)

  def run_chief():
    recorder = Recorder(driver)
    recorder.step(here.options["steps"])
    while not all(counts.applied for counts in driver.counts()):
      recorder.step()
    return {"steps": recorder.steps}

  train(here, driver, run_chief)


def two_trainings(here: Here) -> None:
  """A scenario: two trainings on one cluster, one after the other or at once.

  The scenario's options give the learning rate and the number of steps of each.
  """
  trainings = here.options["trainings"]

  def new_driver(name):
    def optimizer_fn():
      inner = keras.optimizers.SGD(trainings[name][0])
      return sync_replicas.SyncReplicasOptimizer(inner, here.num_replicas)

    return here.driver(lambda: constant_replica(here), optimizer_fn, name)

  if here.options["at_once"]:
    groups = [list(trainings)]
  else:
    groups = [[name] for name in trainings]
  report = {}
  for names in groups:
    drivers = {name: new_driver(name) for name in names}
    if here.is_in_graph and not report:
      report["refused"] = _error_of(lambda: new_driver(list(trainings)[-1]))
    if here.task == here.spec.chief:
      for step in range(max(trainings[name][1] for name in names)):
        for name, driver in drivers.items():
          if step < trainings[name][1]:
            driver.step()
      for name, driver in drivers.items():
        report[name] = {
          "state": as_lists(driver.store.state()),
          "counts": [c[:3] for c in driver.counts()],
        }
        driver.close()
    else:
      # Each leaves by itself: its chief waits for that.
      threads = [
        waiting.RaisingThread(
          functools.partial(_run_and_leave, driver), on_error=die
        )
        for driver in drivers.values()
      ]
      for thread in threads:
        thread.join()
  if here.task == here.spec.chief:
    here.report(report)
    here.mark("over")


def _run_and_leave(driver) -> None:
  driver.run_replica()
  driver.close()


def _error_of(call) -> str:
  try:
    call()
  except RuntimeError as error:
    return str(error)
  return ""


def built_too_early(here: Here) -> None:
  """A scenario: the model is built before the driver connects to the cluster.

  This must fail.
  """
  replica = constant_replica(here)
  here.driver(lambda: replica, lambda: constant_optimizer(here))


class Scripted:
  """A replica that reads variables and sends gradients when a script says so.

  A replica *offers* its gradients to the chief, and sends them if the chief
  *admits* them to the next update. A *tag* is a number that identifies them.
  """

  def __init__(self, here: Here, driver):
    self._driver = driver
    self._contributions = driver.rule._contributions
    self._replica = here.task.index
    waiting.await_value(
      driver.store.is_initialized,
      timeout_secs=MARK_TIMEOUT_SECS,
      what="waiting for the variables",
    )
    batch = next(iter(driver.replica.dataset_fn(1, self._replica, 0)))

    @tf.function
    def pull():
      return driver.store.pull()

    @tf.function
    def offer(step, values):
      result = driver.replica.gradients(values, batch)
      release = driver.rule.apply_gradients(
        zip(result.gradients, self._paths(), strict=True),
        replica=self._replica,
        local_step=step,
        loss=result.loss,
        num_examples=result.num_examples,
      )
      return release.admitted, release.global_step

    @tf.function
    def ask():
      tag = tf.cast(tf.timestamp() * 1e6, tf.int64)
      step = driver.store.read_global_step()
      sent = self._contributions._send(
        protocol.MessageType.OFFER, self._replica, tag, step=step
      )
      with tf.control_dependencies([sent]):
        verdict, _ = self._contributions._replies.wait(self._replica, tag)
      return tag, verdict

    @tf.function(autograph=False)
    def put(tag, values):
      gradients = driver.replica.gradients(values, batch).gradients
      queues = self._contributions._gradients
      return queues.put(self._replica, tag, queues.pack(gradients))

    self._pull, self._offer, self._ask, self._put = pull, offer, ask, put

  def _paths(self):
    return [
      self._driver.store.specs[i].path for i in self._driver.store.trainable
    ]

  def pull(self):
    """Reads the global step and the variables, and returns them."""
    step, values = self._pull()
    return tf.constant(step.numpy()), [tf.constant(v.numpy()) for v in values]

  def offer(self, step, values) -> list:
    """Offers gradients to the chief, sends them if admitted, and waits.

    Args:
      step: The global step of the variables.
      values: The variables from which the gradients are computed.

    Returns:
      [whether the chief admitted the gradients, the global step to go on from].
    """
    admitted, new_step = self._offer(step, values)
    return [bool(admitted), int(new_step)]

  def be_admitted(self) -> tf.Tensor:
    """Offers gradients to the chief, which admits them, but does not send them.

    Returns:
      The tag, a number that identifies the gradients.
    """
    tag, verdict = self._ask()
    assert int(verdict) == protocol.Verdict.ADMIT
    return tf.constant(tag.numpy())

  def put(self, tag, *, ps_tasks: int) -> None:
    """Sends gradients to some PS tasks, without a message to the chief.

    Args:
      tag: The number that identifies the gradients.
      ps_tasks: The number of PS tasks that get their part of the gradients.
    """
    gradients = self._contributions._gradients
    for task in range(ps_tasks, len(gradients._layouts)):
      gradients._layouts[task] = gradients._layouts[task]._replace(num_shards=0)
    for arrived in self._put(tag, self.pull()[1]):
      arrived.numpy()


def die() -> None:
  """Kills this process at once."""
  os.kill(os.getpid(), signal.SIGKILL)


def backup_in_order(here: Here) -> None:
  """A scenario: updates of two of three workers' gradients, in a forced order.

  Gradients are late if they come from variables of an earlier step, and surplus
  if an update already has two others. Worker 1 is late by one in step 2,
  surplus in step 3, in time in step 4, and then held up for twelve steps.
  Worker 2 is surplus in step 4.
  """
  worker = here.task.index

  def gate(number):
    if worker == 2 and number == 3:
      here.await_mark("worker 1 has offered for step 4")
    return number

  driver = constant_driver(here, gate)

  def run_chief():
    recorder = Recorder(driver)
    here.await_mark("pulled before step 1")
    recorder.step()
    here.mark("step 1 is made")
    await_offers(driver, 3)
    recorder.step()
    here.mark("step 2 is made")
    await_offers(driver, 2)
    here.mark("others have offered for step 3")
    await_offers(driver, 3)
    recorder.step()
    here.mark("step 3 is made")
    await_offers(driver, 2)
    here.mark("worker 1 has offered for step 4")
    await_offers(driver, 3)
    recorder.step()
    here.mark("step 4 is made")
    here.await_mark("pulled before step 5")
    recorder.step(12)
    here.mark("step 16 is made")
    await_offers(driver, 3)
    recorder.step()
    return {"steps": recorder.steps}

  if worker == 1:
    script = Scripted(here, driver)
    releases = []
    pulled = script.pull()
    here.mark("pulled before step 1")
    here.await_mark("step 1 is made")
    releases.append(script.offer(*pulled))
    here.await_mark("step 2 is made")
    pulled = script.pull()
    here.await_mark("others have offered for step 3")
    releases.append(script.offer(*pulled))
    here.await_mark("step 3 is made")
    releases.append(script.offer(*script.pull()))
    here.await_mark("step 4 is made")
    pulled = script.pull()
    here.mark("pulled before step 5")
    here.await_mark("step 16 is made")
    releases.append(script.offer(*pulled))
    here.report({"releases": releases}, "worker_1")
  train(here, driver, run_chief)


def killed_after_delivery(here: Here) -> None:
  """A scenario: the test kills worker 1 after it has sent its gradients.

  The worker is then waiting for the gradients of the others.
  """

  def gate(number):
    if here.task.index == 2 and number == 2:
      here.await_mark("worker 1 is dead")
    return number

  driver = constant_driver(here, gate)

  def tell_when_delivered():
    def is_delivered():
      return (
        driver.rule.status().replicas[1].status == protocol.Status.DELIVERED
      )

    waiting.await_value(
      is_delivered,
      timeout_secs=MARK_TIMEOUT_SECS,
      what="waiting for worker 1 to deliver",
    )
    here.mark("worker 1 has delivered")

  def run_chief():
    recorder = Recorder(driver)
    recorder.step(2)
    threading.Thread(target=tell_when_delivered, daemon=True).start()
    recorder.step(4)
    return {"steps": recorder.steps}

  train(here, driver, run_chief)


def counting_replica():
  """Makes a replica whose loss is the number of the update's batch.

  Each replica's batch has one example.
  """

  def dataset_fn(num_shards, index, start):
    del index
    numbers = tf.data.Dataset.counter(tf.cast(start // num_shards, tf.int64))
    return numbers.map(lambda n: (tf.reshape(tf.cast(n, tf.float32), [1]),))

  def loss_fn(parameters, number):
    return tf.reduce_mean(0 * parameters[0] + number)

  return model_replica.Replica(
    [tf.Variable(1.0, name="v")], loss_fn, dataset_fn
  )


def killed_between_steps(here: Here) -> None:
  """A scenario: the test kills a worker after two updates and restarts it."""
  driver = constant_driver(here)
  _be_killed_between_steps(here, driver)


def exceeds_deadline(here: Here) -> None:
  """A scenario: the test stops a worker, and lets it go on two updates later.

  At least the second of these updates is made without the worker.
  """
  driver = constant_driver(here)

  def run_chief():
    recorder = Recorder(driver)
    recorder.step(2)
    here.mark("step 2 is made")
    here.await_mark("worker 1 stands still")
    recorder.step(2)
    here.mark("step 4 is made")
    here.await_mark("worker 1 goes on")
    recorder.step(2)
    return {"steps": recorder.steps}

  train(here, driver, run_chief)


def come_and_go(here: Here) -> None:
  """A scenario: workers join, die and come back while updates are made.

  The chief marks when updates have the number of contributions of the workers
  that are there.
  """
  driver = constant_driver(here)

  def run_chief():
    steps = []
    for moment, count in enumerate([2, 3, 2, 3]):
      done = 0
      while done < 3:  # Three such updates after each other.
        result = driver.step()
        value = float(driver.values()["v0"])
        steps.append((result.global_step, result.num_examples, value))
        done = done + 1 if result.num_examples == count else 0
      here.mark(f"moment {moment}")
    return {"steps": steps}

  train(here, driver, run_chief)


def asynchronous_driver(here: Here, gate=None):
  """Makes a driver of asynchronous updates whose gradients are constant.

  Args:
    here: This task.
    gate: Called with the number of each batch before the batch can be read.
  """
  return here.driver(
    lambda: constant_replica(here, gate),
    lambda: async_replicas.AsyncReplicasOptimizer(
      keras.optimizers.SGD(LEARNING_RATE), here.num_replicas
    ),
  )


def killed_chief(here: Here) -> None:
  """A scenario: the test kills the chief of asynchronous updates at step 3.

  The restarted chief goes on to step 6, once the restarted worker is there.
  """
  driver = asynchronous_driver(here)
  here.count(f"{here.task} has joined")

  def run_chief():
    is_first = here.count("chief") == 0
    if not is_first:  # Alone, it might end before the worker has joined.
      here.await_mark("worker 0 has joined_1")
    last = 3 if is_first else 6
    driver.stop_at(last)
    while driver.step().global_step < last:
      pass
    if is_first:
      here.mark("step 3 is made")
      here.await_mark("the chief is killed")
    return {}

  train(here, driver, run_chief)


def killed_chief_while_counting(here: Here) -> None:
  """A scenario: the test kills the chief of synchronous updates at step 3.

  The worker has then delivered its gradients for the next update. The restarted
  chief goes on to step 6. The losses are the numbers of the batches, and so
  show which batches are used.
  """
  driver = here.driver(counting_replica, lambda: constant_optimizer(here))

  def run_chief():
    recorder = Recorder(driver)
    if driver.global_step == 0:
      recorder.step(3)
      await_offers(driver, 2)
      here.mark("step 3 is made")
      here.await_mark("the chief is killed")
    recorder.step(3)
    return {"steps": recorder.steps}

  train(here, driver, run_chief)


def stands_still_early(here: Here) -> None:
  """A scenario: the test freezes worker 1 early in the training.

  No process has asked by then which workers are computing. The updates are
  asynchronous with bounded staleness, or synchronous at first and asynchronous
  after a switch.
  """
  was_told = here.directory / "that was told"

  def optimizer_fn():
    inner = keras.optimizers.SGD(LEARNING_RATE)
    is_gated = here.options["is_gated"]
    policies = [staleness.bounded_staleness(1)] if is_gated else []
    asynchronous = async_replicas.AsyncReplicasOptimizer(
      inner, here.num_replicas, policies=policies
    )
    if is_gated:
      return asynchronous
    synchronous = sync_replicas.SyncReplicasOptimizer(
      inner, 1, here.num_replicas
    )
    return switching.SwitchingOptimizer(
      [synchronous, asynchronous],
      lambda _: switch_conditions.Choice(int(was_told.exists())),
    )

  driver = here.driver(lambda: constant_replica(here), optimizer_fn)

  def run_chief():
    driver.step()
    here.mark("it has begun")
    here.await_mark("worker 1 stands still")
    while not was_told.exists():
      driver.step()
    for _ in range(3):  # By another rule, if there is one.
      driver.step()
    # The first files of this process: no other task may have to answer.
    directory = here.directory / "train"
    checkpoints.save(directory, driver.store.state())
    summaries = reports.Summaries(directory)
    summaries.write(
      driver.global_step,
      scalars={"one": 1.0},
      histograms={"ones": np.ones(3)},
      images={"black": np.zeros([2, 2, 3], np.uint8)},
    )
    summaries.close()
    return {}

  train(here, driver, run_chief)


def replaced(here: Here) -> None:
  """A scenario: the test starts a second process of a task.

  The first process of the task then has to end. Updates are synchronous.
  """
  gate = None if here.is_in_graph else _take_a_moment
  _be_replaced(here, constant_driver(here, gate))


def replaced_asynchronous(here: Here) -> None:
  """A scenario: the test starts a second process of a task.

  The first process of the task then has to end. Updates are asynchronous.
  """
  _be_replaced(here, asynchronous_driver(here, _take_a_moment))


def _take_a_moment(number):
  time.sleep(0.02)  # Others want to start.
  return number


def _be_replaced(here: Here, driver) -> None:
  number = here.count(f"{here.task} has joined")
  steps = []

  def step():
    made = driver.step().global_step
    steps.append((made, float(driver.store.read()[0])))

  def run_chief():
    step()
    here.mark(f"chief {number} has made steps")
    while not (here.directory / "the first has ended").exists():
      step()
    step()
    return {"steps": steps}

  train(here, driver, run_chief)


def chief_cannot_begin(here: Here) -> None:
  """A scenario: the chief fails before it publishes its variables.

  The worker has joined by then, and so is told about the failure.
  """

  def new_optimizer():
    if here.task == here.spec.chief:
      if not here.is_in_graph:  # Otherwise, the chief connects to the worker.
        here.await_mark("worker 0 has joined")
      raise ValueError("no such optimizer")
    here.mark(f"{here.task} has joined")
    return constant_optimizer(here)

  train(here, here.driver(lambda: constant_replica(here), new_optimizer), dict)


class Sleepy:
  """An optimizer that can be told to sleep in the middle of an update.

  It makes plain gradient descent. It sleeps if the variable `is_tired` is True.
  """

  def __init__(self):
    with tf.device("/job:ps/task:0"):
      self.is_tired = resources.DEFAULT_NAMESPACE.variable(
        "is_tired", [], tf.bool
      )

  def __deepcopy__(self, memo):
    """Returns this object, so that all PS tasks share its variable."""
    return self

  def apply(self, gradients, variables):
    def nap():
      naps = tf.data.Dataset.range(1).apply(testing.sleep(60_000_000))
      return naps.reduce(tf.constant(0, tf.int64), lambda _, n: n)

    for gradient, variable in zip(gradients, variables, strict=True):
      with tf.device(variable.device):
        half = LEARNING_RATE / 2 * tf.convert_to_tensor(gradient)
        before = [variable.assign_sub(half)]
        if variable.path == "v1":
          with tf.control_dependencies(before):
            is_tired = self.is_tired.read_value()
            before = [tf.cond(is_tired, nap, lambda: tf.constant(0, tf.int64))]
        with tf.control_dependencies(before):
          variable.assign_sub(half)


def killed_while_updating(here: Here) -> None:
  """A scenario: the test kills a task in the middle of the third update.

  It is the chief, or a parameter server. The task is started again.
  """
  made = []  # The last one belongs to the present update rule.
  runs = []  # The global step at the begin of each call of `run`.
  steps = []
  train_dir = here.directory / "train"

  def new_optimizer():
    made.append(Sleepy())
    return sync_replicas.SyncReplicasOptimizer(made[-1], here.num_replicas)

  driver = here.driver(lambda: constant_replica(here), new_optimizer)

  def v1():
    index = [spec.path for spec in driver.store.specs].index("v1")
    return float(driver.store.variables(index)[0].read_value())

  def tell_when_torn(before):
    waiting.await_value(
      lambda: v1() != before,
      timeout_secs=MARK_TIMEOUT_SECS,
      what="waiting for half of the update",
    )
    if here.options["saves"]:  # In another thread.
      waiting.await_value(
        lambda: (checkpoints.latest(train_dir) or "").endswith("-2"),
        timeout_secs=MARK_TIMEOUT_SECS,
        what="waiting for the checkpoint of step 2",
      )
    here.mark("half of step 3 is made")

  def make_tired(is_tired):
    variable = made[-1].is_tired
    variable.assign(is_tired)
    resources.flush_assignments([variable])

  def step():
    if is_first and driver.global_step == 2 and not runs[1:]:
      make_tired(True)
      threading.Thread(target=tell_when_torn, args=[v1()], daemon=True).start()
    result = driver.step()
    steps.append(result.global_step)
    return result

  def run():
    runs.append(driver.global_step)
    session = training.Session(
      train_dir if here.options["saves"] else None,
      state=driver.store,
      max_steps=6,
      checkpoint_every_steps=1,
    )
    session.restore_or_initialize()
    make_tired(False)
    session.run(step)

  def run_chief():
    driver.recovering(run)
    return {"steps": steps, "recoveries": driver.recoveries()}

  is_first = driver.is_chief and here.count("chief") == 0
  train(here, driver, run_chief)


class StateOfStep2:
  """Passes on the variables of a driver, but holds up the reading at step 2.

  The test uses the time to kill the parameter server.
  """

  def __init__(self, here: Here, store):
    self._here = here
    self._store = store
    self.load_state = store.load_state

  def state(self) -> dict[str, np.ndarray]:
    """Reads all variables from the parameter servers, and waits at step 2.

    The wait ends when the test has killed the parameter server.
    """
    state = {name: np.asarray(v) for name, v in self._store.state().items()}
    if state["global_step"] == 2:
      self._here.mark("step 2 is read")
      self._here.await_mark("ps 0 is dead")
    return state


def killed_while_saving(here: Here) -> None:
  """A scenario: the test kills the parameter server during a checkpoint.

  All values have been read by then, and the checkpoint is not written yet.
  """
  driver = here.driver(
    lambda: constant_replica(here), lambda: constant_optimizer(here)
  )

  def run_chief():
    session = training.Session(
      here.directory / "train",
      state=StateOfStep2(here, driver.store),
      max_steps=6,
      checkpoint_every_steps=2,
    )
    session.run(driver.step)
    return {}

  train(here, driver, run_chief)


def parameter_server_lost(here: Here) -> None:
  """A scenario: the test kills a parameter server after step 6 of 12.

  There is a checkpoint of step 4.
  """
  is_async = here.options["is_async"]
  driver = (asynchronous_driver if is_async else constant_driver)(here)
  here.mark(f"{here.task} has joined")
  steps = []

  def step():
    result = driver.step()
    steps.append(result.global_step)
    if result.global_step == 6 and not driver.recoveries():
      if not here.is_in_graph:  # Asynchronous updates may do without it.
        here.await_mark("worker 1 has joined")
      here.mark("step 6 is made")
      here.await_mark("it is dead")
    return result

  def run():
    # Asynchronous updates go on while the chief waits.
    driver.stop_at(6 if is_async and not steps else 12)
    session = training.Session(
      here.directory / "train",
      state=driver.store,
      max_steps=12,
      checkpoint_every_steps=4,
    )
    session.run(step)

  def run_chief():
    driver.recovering(run)
    return {"steps": steps, "recoveries": driver.recoveries()}

  train(here, driver, run_chief)


def killed_while_counting(here: Here) -> None:
  """A scenario: the test kills a worker after two updates and restarts it.

  The losses are the numbers of the batches, and so show which batches are used.
  """
  driver = here.driver(counting_replica, lambda: constant_optimizer(here))
  _be_killed_between_steps(here, driver)


def _be_killed_between_steps(here: Here, driver) -> None:
  def run_chief():
    recorder = Recorder(driver)
    recorder.step(2)
    here.mark("step 2 is made")
    here.await_mark("worker 1 is dead")
    recorder.step(4)
    if here.is_in_graph:
      _await_sign("/job:worker/task:1/device:CPU:0")
    return {"steps": recorder.steps}

  train(here, driver, run_chief)


def _await_sign(device: str) -> None:
  """Waits until a restarted in-graph worker has received a heartbeat.

  A worker without a heartbeat would end after some minutes, with an error.

  Args:
    device: The device of the worker.
  """
  table = heartbeat_table.HeartbeatTable(device)
  waiting.await_value(
    lambda: table.ages()[0] > 0,
    timeout_secs=MARK_TIMEOUT_SECS,
    what=f"waiting for a beat at {device}",
  )


def killed_after_admission(here: Here) -> None:
  """A scenario: worker 2 dies when it may send its gradients, and stays dead.

  An update needs the gradients of two of three workers.
  """
  driver = constant_driver(here)

  def run_chief():
    recorder = Recorder(driver)
    await_offers(driver, 1)
    recorder.step(8)
    return {"steps": recorder.steps}

  if here.task.index == 2:
    Scripted(here, driver).be_admitted()
    die()
  train(here, driver, run_chief)


def killed_while_handing_over(here: Here) -> None:
  """A scenario: worker 1 dies three times while it sends its gradients.

  It dies before it sends them, then when one of two PS tasks has them, then
  when both have them and the chief does not know. It is restarted each time.
  """
  is_worker_1 = here.task == cluster.Task("worker", 1)
  incarnation = here.count("incarnation") if is_worker_1 else 0
  is_mortal = is_worker_1 and incarnation < 3
  driver = here.driver(
    lambda: constant_replica(here, is_poisonous=is_mortal),
    lambda: constant_optimizer(here),
  )

  def run_chief():
    recorder = Recorder(driver)
    recorder.step(3)
    return {"steps": recorder.steps}

  if is_mortal:
    script = Scripted(here, driver)
    tag = script.be_admitted()
    if incarnation:
      script.put(tag, ps_tasks=incarnation)
    die()
  train(here, driver, run_chief)


def not_a_number(here: Here) -> None:
  """A scenario: the third batch of worker 1 makes loss and gradient NaN."""

  def replica_fn():
    def loss_fn(parameters, x):
      return tf.reduce_mean(parameters[0] * x)

    def dataset_fn(num_shards, index, start):
      del num_shards, start

      def batch(number):
        is_bad = (number == 2) & (tf.cast(index, tf.int64) == 1)
        return (tf.reshape(tf.where(is_bad, np.float32("nan"), 1.0), [1]),)

      return tf.data.Dataset.range(10**6).map(batch)

    return model_replica.Replica(
      [tf.Variable(1.0, name="v")], loss_fn, dataset_fn
    )

  driver = here.driver(replica_fn, lambda: constant_optimizer(here))

  def run_chief():
    for number in range(10):
      driver.step()
      here.mark(f"step {number + 1} is made")
    return {}

  train(here, driver, run_chief)


def other_versions(here: Here) -> None:
  """A scenario: workers pretend to have other versions of TensorFlow.

  The scenario's options say which workers, and which versions. Worker 1 cannot
  join.
  """
  version = here.options["versions"].get(str(here.task))
  if version:
    tf.__version__ = version
  try:
    driver = constant_driver(here)
  finally:
    here.mark(f"{here.task} knows whether it joins")

  def run_chief():
    recorder = Recorder(driver)
    while not (driver.counts()[0].applied and driver.counts()[2].applied):
      recorder.step()
    # Afterwards there is no parameter server that it could ask.
    here.await_mark("worker 1 knows whether it joins")
    return {"steps": recorder.steps}

  train(here, driver, run_chief)


def other_variables(here: Here) -> None:
  """A scenario: three workers' variables differ from the chief's.

  They differ in a shape in worker 1, a name in worker 2 and the order in worker
  3. All three have found that out before the first of them ends the training.
  """

  def replica_fn():
    worker = here.task.index
    shape = [4] if worker == 1 else [3]
    first = "other" if worker == 2 else "first"
    variables = [
      tf.Variable(tf.zeros(shape), name=first),
      tf.Variable(tf.zeros([3]), name="second"),
    ]
    if worker == 3:
      variables.reverse()

    def loss_fn(parameters, x):
      return tf.reduce_mean(x) * tf.add_n(
        [tf.reduce_sum(p) for p in parameters]
      )

    def dataset_fn(num_shards, index, start):
      del num_shards, index, start
      return tf.data.Dataset.from_tensors((tf.ones([1]),)).repeat()

    return model_replica.Replica(variables, loss_fn, dataset_fn)

  try:
    driver = here.driver(replica_fn, lambda: constant_optimizer(here))
  finally:
    here.mark(f"{here.task} has compared")

  def run_chief():
    # The first error ends the training, and then the parameter server.
    for index in (1, 2, 3):
      here.await_mark(f"worker {index} has compared")
    driver.step()
    return {}

  train(here, driver, run_chief)


# N replicas with B examples each against one with N * B.

BATCH = 4
WORDS = 30
WORDS_PER_EXAMPLE = 3
CLASSES = 5


def equivalence_data(steps: int, replicas: int):
  """Makes random data for a test that several replicas train as one would.

  Returns:
    Words [steps, replicas, BATCH, WORDS_PER_EXAMPLE], and labels [steps,
    replicas, BATCH].
  """
  rng = np.random.default_rng(0)
  shape = (steps, replicas, BATCH)
  # Few words, so that replicas touch the same rows of the table.
  words = rng.integers(0, WORDS // 3, (*shape, WORDS_PER_EXAMPLE))
  return words.astype(np.int32), rng.integers(0, CLASSES, shape)


def equivalence_model() -> tuple[list, object]:
  """Makes a small model for a test that several replicas train as one would.

  Its initial values are always equal.

  Returns:
    The variables, and a function that maps variables and batch to the loss.
  """
  keras.utils.set_random_seed(7)
  model = keras.Sequential(
    [
      keras.layers.Input((WORDS_PER_EXAMPLE,), dtype="int32"),
      keras.layers.Embedding(WORDS, 6, name="embedding"),
      keras.layers.Flatten(),
      keras.layers.Dense(16, activation="tanh", name="hidden"),
      keras.layers.Dense(CLASSES, name="logits"),
    ],
    name="model",
  )
  unused = tf.Variable(tf.ones([40]), name="unused")

  def loss_fn(parameters, words, labels):
    logits, _ = model.stateless_call(parameters[:-1], [], words)
    return tf.reduce_mean(
      tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
    )

  return [*model.trainable_variables, unused], loss_fn


def equivalence_optimizer(name: str):
  """Makes the Keras optimizer with the given name: "momentum", or else Adam."""
  if name == "momentum":
    return keras.optimizers.SGD(0.1, momentum=0.9)
  return keras.optimizers.Adam(0.01)


def equivalence(here: Here) -> None:
  """A scenario: each worker trains the small model on its share of the data.

  The test compares the result with that of one replica on all data.
  """
  steps = here.options["steps"]
  replicas = here.spec.num_tasks("worker")

  def be_slow(number):
    time.sleep(0.05)
    return number

  def replica_fn():
    variables, loss_fn = equivalence_model()
    words, labels = equivalence_data(steps + 5, replicas)

    def dataset_fn(num_shards, index, start):
      del num_shards, start
      index = tf.cast(index, tf.int64)
      numbers = tf.data.Dataset.range(steps + 5)
      if not here.is_in_graph and here.task.index == 2:
        numbers = numbers.map(
          lambda n: tf.ensure_shape(tf.py_function(be_slow, [n], tf.int64), [])
        )
      return numbers.map(
        lambda n: (tf.constant(words)[n, index], tf.constant(labels)[n, index])
      )

    return model_replica.Replica(variables, loss_fn, dataset_fn)

  driver = here.driver(
    replica_fn,
    lambda: sync_replicas.SyncReplicasOptimizer(
      equivalence_optimizer(here.options["optimizer"]),
      replicas,
      variable_averages=moving_averages.MovingAverages(0.9),
      clip_mean_norm=here.options["clip_mean_norm"],
    ),
  )

  def run_chief():
    losses = [driver.step().loss for _ in range(steps)]
    return {
      "losses": losses,
      "is_sparse": model_replica.sparsity(driver.replica),
      "num_shards": [len(s) for s in driver.store.shards],
    }

  train(here, driver, run_chief)


# Replicas that train copies of their own.

PERIOD = 3
PERIODIC_RATE, PERIODIC_MOMENTUM = 0.1, 0.5
# The batches of each worker, one example each, again and again.
PERIODIC_DATA = ((0.5, -1.0, 2.0, 0.25, 1.5), (-0.25, 4.0, 1.0, -3.0, 0.75))


def periodic(here: Here) -> None:
  """A scenario: replicas train copies of the variables, and exchange them.

  The options name the kind of periodic averaging. The loss of an example x is
  the sum of (v - x)^2 / 2 over three numbers v.
  """

  def replica_fn():
    def loss_fn(parameters, x):
      squares = [tf.reduce_sum((p - x) ** 2) / 2 for p in parameters]
      return tf.add_n(squares)

    def dataset_fn(num_shards, index, start):
      del num_shards, start
      data = tf.gather(tf.constant(PERIODIC_DATA), index)
      return tf.data.Dataset.from_tensor_slices((data,)).batch(1).repeat()

    variables = [
      tf.Variable([1.0, 2.0], name="a"),
      tf.Variable(3.0, name="b"),
    ]
    return model_replica.Replica(variables, loss_fn, dataset_fn)

  def optimizer_fn():
    make = getattr(periodic_averaging, here.options["kind"])
    inner = keras.optimizers.SGD(PERIODIC_RATE, momentum=PERIODIC_MOMENTUM)
    return make(inner, here.spec.num_tasks("worker"), period=PERIOD)

  driver = here.driver(replica_fn, optimizer_fn)

  def run_chief():
    results = [driver.step() for _ in range(here.options["steps"])]
    return {"steps": [list(result[:3]) for result in results]}

  train(here, driver, run_chief)


def main(argv: list[str], scenarios: Mapping[str, object]) -> None:
  """Runs one task of a test's cluster, and ends the process.

  Args:
    argv: The scenario's name, the arguments as JSON, the job and the index.
    scenarios: Functions by name. A task that does not only serve calls the one
      named by the scenario.
  """
  # A test that gives up ends the tasks, and wants to know where they were.
  faulthandler.register(signal.SIGTERM, chain=True)
  scenario, arguments, job, index = argv
  here = Here(json.loads(arguments), job, int(index))
  status = 0
  try:
    if here.serves:
      here.serve()
    else:
      scenarios[scenario](here)
  except Exception:
    traceback.print_exc()
    status = 1
  processes.exit_now(status)


if __name__ == "__main__":
  main(sys.argv[1:], globals())
