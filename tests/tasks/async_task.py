"""Runs one process of a test of asynchronous updates, whose steps are scripted.

The arguments are those of `cluster_task`, with the scenario `follow_scripts`.
"""

import sys

import keras
import tensorflow as tf

from tests.support import replicas
from tests.tasks import cluster_task
from tf_replicas.drivers import connection
from tf_replicas.drivers import heartbeats
from tf_replicas.replica import model_replica
from tf_replicas.rules import base as rule_base
from tf_replicas.rules import protocol
from tf_replicas.rules.asynchronous import async_replicas
from tf_replicas.rules.asynchronous import staleness
from tf_replicas.runtime import processes
from tf_replicas.runtime import resources
from tf_replicas.runtime import waiting as waiting_lib
from tf_replicas.store import parameter_store

_POLICIES = (
  staleness.drop_stale,
  staleness.staleness_aware,
  staleness.delay_compensated,
  staleness.bounded_staleness,
)
_HELD = "b"


class Held:
  """Gradient descent, except that worker 0 waits before it changes `b`.

  Each call of `Actor.open_training` lets one such change happen.
  """

  def __init__(self, namespace: resources.Namespace, rate: float, worker: int):
    self._namespace = namespace
    self._rate = rate
    self._held = _HELD if worker == 0 else None

  def apply(self, gradients, variables):
    for gradient, variable in zip(gradients, variables, strict=True):
      passed = []
      if variable.path == self._held:
        passed = self._namespace.queue("held", [tf.bool]).dequeue()
      with tf.control_dependencies(passed):
        variable.assign_sub(self._rate * gradient)


def _optimizer(
  namespace: resources.Namespace, rule: dict, worker: int, num_replicas: int
):
  inner = keras.optimizers.SGD(rule["rate"], momentum=rule["momentum"])
  if rule["is_held"]:
    inner = Held(namespace, rule["rate"], worker)
  return async_replicas.AsyncReplicasOptimizer(
    inner,
    num_replicas,
    policies=[
      make(*rule["policies"][make.__name__])
      for make in _POLICIES
      if make.__name__ in rule["policies"]
    ],
    **rule["options"],
  )


class Actor:
  """A replica that reads variables and applies gradients by a script."""

  def __init__(self, here: cluster_task.Here, name: str, rule: dict):
    # A namespace takes no underscore.
    namespace = resources.Namespace(name.replace("_", "-"))
    index = self._index = here.task.index
    optimizer = self._optimizer = _optimizer(
      namespace, rule, index, len(here.spec.replicas)
    )
    replica = self._replica(here.options)
    store = self._store = parameter_store.build(
      here.spec,
      replica.variables,
      wire_dtype=optimizer.wire_dtype,
      namespace=namespace,
    )
    optimizer.build(store)
    if index == 0:
      values = [tf.identity(v) for v in replica.variables]
      rule_base.create_or_resume(optimizer, store, values)
    else:
      waiting_lib.await_value(
        store.is_initialized,
        timeout_secs=cluster_task.MARK_TIMEOUT_SECS,
        what="waiting for the variables",
      )
    paths = [spec.path for spec in store.specs]
    batches = iter(replica.dataset_fn())

    @tf.function
    def apply(step, parameters):
      result = replica.gradients(parameters, next(batches))
      return optimizer.apply_gradients(
        zip(result.gradients, paths, strict=True),
        replica=index,
        local_step=step,
        loss=result.loss,
        num_examples=result.num_examples,
      ).admitted

    @tf.function
    def open_training():
      with tf.device(store.device_of_task(1)):
        namespace.queue("held", [tf.bool]).enqueue([tf.constant(True)])

    # Makes the slots known to this client as well.
    apply.get_concrete_function(
      tf.TensorSpec([], tf.int64), [tf.TensorSpec([])] * len(paths)
    )
    self._apply = apply
    self._let_go = open_training
    self._runner = replicas.Runner(optimizer, store, replica, batches, index)
    self._step, self._parameters = 0, []
    self._thread: waiting_lib.RaisingThread | None = None

  def _replica(self, options: dict) -> model_replica.Replica:
    """Makes the replica. Its loss sums slope / 2 * (value - target) ** 2.

    The sum is over the variables. Each has a slope and a target in `options`.
    """
    slopes = options["slopes"][self._index]
    targets = options["targets"][self._index]

    def loss_fn(parameters, x):
      losses = [
        slope / 2 * tf.square(value - target)
        for value, slope, target in zip(
          parameters, slopes, targets, strict=True
        )
      ]
      return tf.add_n(losses) * x[0]

    return model_replica.Replica(
      [tf.Variable(v, name=k) for k, v in options["values"].items()],
      loss_fn,
      lambda *_: tf.data.Dataset.from_tensors((tf.ones([1]),)).repeat(),
    )

  def act(self, action: str) -> dict:
    """Calls the method `action`, and returns what is known after it.

    Args:
      action: Name of a method of this class, such as "pull".

    Returns:
      The variables and counters on the parameter servers, and what this replica
      read last: the global step and the variables. The former are None if they
      can be read only after what this replica is doing in a thread.
    """
    getattr(self, action)()
    is_busy = self._thread is not None and self._thread.is_alive()
    waits = is_busy and self._store.lock is not None
    state = None if waits else cluster_task.as_lists(self._store.state())
    return {
      "state": state,
      "read": [int(self._step), *map(float, self._parameters)],
    }

  def pull(self) -> None:
    """Reads the global step and the variables from the parameter servers."""
    self._note(self._runner.begin())

  def apply(self) -> None:
    """Applies a gradient, computed from the values that were read last."""
    self._apply(self._step, self._parameters).numpy()

  def step(self) -> None:
    """Makes one whole step: computes and applies gradients, and reads again."""
    self._note(self._runner.step())

  def _note(self, token) -> None:
    """Keeps the global step and the variables that a step has read.

    Args:
      token: The answer of the update rule to this replica, with the global
        step.
    """
    self._step = tf.constant(token.global_step, tf.int64)
    self._parameters = self._runner.state[: len(self._store.contributed)]

  def begin_pull(self) -> None:
    """Begins to read the variables in a thread, which `join` joins."""
    self._begin(self.pull)

  def apply_to_gate(self) -> None:
    """Begins to apply gradients in a thread, which bounded staleness holds up.

    The thread has to wait until slower replicas have caught up. This method
    returns once the thread waits.
    """
    self._begin(self.apply)

    def waits():
      return self._optimizer.status().replicas[self._index].status == waiting

    waiting = protocol.Status.WAITING
    self._await(waits, "waiting to see this replica wait")

  def apply_half(self) -> None:
    """Begins to apply gradients in a thread, which is held up before `b`.

    Returns when the first variable has changed.
    """
    (first,) = self._store.variables(0)
    before = first.numpy()
    self._begin(self.apply)
    self._await(lambda: first.numpy() != before, "waiting for half an update")

  def open_training(self) -> None:
    """Lets one update that waits go on and change variable `b`."""
    self._let_go()

  def join(self) -> None:
    """Waits until the thread that another action has begun has ended."""
    self._thread.join()

  def _begin(self, run) -> None:
    self._thread = waiting_lib.RaisingThread(run, on_error=lambda: None)

  def _await(self, condition, what: str) -> None:
    waiting_lib.await_value(
      condition, timeout_secs=cluster_task.MARK_TIMEOUT_SECS, what=what
    )

  def overtaken(self, times: int) -> list[int]:
    """Checks that a read sees the values that were assigned before it.

    Args:
      times: How often to assign new values and read them.

    Returns:
      The numbers of the assignments that the next read did not see.
    """
    inner, store = self._optimizer.inner, self._store
    (rates,) = [copies.variables for _, copies in inner._copies]

    @tf.function
    def read():
      return [
        *[rate.read_value() for rate in rates],
        *store.read(),
        store.read_global_step(),
      ]

    lost = []
    for number in range(times):
      inner.optimizer.learning_rate = number
      inner.refresh()
      state = {"variables/a": number, "variables/b": number}
      store.load_state({**state, "global_step": number})
      if {int(value) for value in read()} != {number}:
        lost.append(number)
    return lost

  def counts(self) -> list[list]:
    """Returns how old the gradients of each replica were, in updates.

    Returns:
      For each replica, two lists: the numbers of applied gradients, and of
      refused gradients, by their age.
    """
    return [[c.staleness, c.late] for c in self._optimizer.counts()]


def follow_scripts(here: cluster_task.Here) -> None:
  """Follows the script of each rule, as one of the workers.

  A script is a list of (worker, action). Each worker waits for its turn.

  Args:
    here: This task, and the scripts.
  """
  spec, index = here.spec, here.task.index
  members = heartbeats.Heartbeats(
    index,
    devices=connection.connect_client(spec, here.task, timeout_secs=60),
  )
  report = {}
  for name, rule in here.options["rules"].items():
    actor = Actor(here, name, rule)
    done = {}
    for turn, (worker, action) in enumerate(rule["script"]):
      if worker == index:
        if turn:
          here.await_mark(f"{name} {turn}")
        done[turn] = actor.act(action)
        here.mark(f"{name} {turn + 1}")
    here.await_mark(f"{name} {len(rule['script'])}")
    report[name] = {"done": done, "counts": actor.counts()}
  if index == 0:
    rule = here.options["rules"]["plain"]
    report["overtaken"] = Actor(here, "assignments", rule).overtaken(100)
  here.report(report, f"worker_{index}")
  here.mark(f"{index} is done")
  if index == 0:
    here.await_mark("1 is done")
    here.mark("over")
    members.end(heartbeats.FINISHED)
  members.leave()
  if index == 0:
    members.shut_down_servers(timeout_secs=10)
  processes.exit_now(0)


if __name__ == "__main__":
  cluster_task.main(sys.argv[1:], globals())
