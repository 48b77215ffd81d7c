"""Implements mirrored variables: every device has a copy of all of them.

There may be one process with several devices, or several processes (one per
worker), each with one or more devices. Every device is one replica. The engine
is `tf.distribute.MirroredStrategy` with one process, and
`tf.distribute.MultiWorkerMirroredStrategy` with several. A step:

1. With several processes, the chief broadcasts a command to make a step, with
   the learning rate. The other processes wait for the command. If the chief has
   assigned variables, it first broadcasts another command and all variables.
2. Each device computes the gradient of its own batch from its own copy.
3. The gradients, the losses and the flags of values that are not finite are
   summed over all devices (all-reduce).
4. Each device applies the mean gradient to its own copy. As all devices do the
   same, the copies stay equal.

Before the first step, the chief sends its variables, which may come from a
checkpoint, to every process. At the end, it broadcasts a command to finish.

Each device has a `ParameterStore` of one task, with variables, optimizer slots,
moving averages and global step. A checkpoint holds the copy of the chief's
first device.
"""

import contextlib
from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Annotated
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from tf_replicas import cluster
from tf_replicas.drivers import base as driver_base
from tf_replicas.drivers import one_machine
from tf_replicas.drivers import process_group
from tf_replicas.drivers import versions
from tf_replicas.replica import model_replica
from tf_replicas.rules import base as rule_base
from tf_replicas.runtime import control_flow
from tf_replicas.runtime import datasets
from tf_replicas.runtime import devices as runtime_devices
from tf_replicas.runtime import processes
from tf_replicas.runtime import records
from tf_replicas.runtime import resources
from tf_replicas.session import training
from tf_replicas.store import gradient_math
from tf_replicas.store import parameter_store

# The kinds of commands.
_STEP, _STATE, _FINISHED, _FAILED = 1, 2, 3, 4


class MirroredStore:
  """Reads and assigns the copies of the variables on this process's devices.

  All copies are equal. So a read takes the copy of the first device, and an
  assignment changes all copies of this process.

  Attributes:
    examples_seen: int64 scalar variable: the number of examples in all updates.
    is_changed: Whether this process has assigned values that the other
      processes do not have yet.
  """

  def __init__(
    self, stores: Sequence[parameter_store.ParameterStore], num_replicas: int
  ):
    """Takes the stores, which hold the copies.

    Args:
      stores: One store per device of this process.
      num_replicas: The number of devices in all processes.
    """
    self._stores = list(stores)
    self._num_replicas = num_replicas
    self.examples_seen = stores[0].examples_seen
    self.is_changed = False

  def table(self) -> str:
    """Returns a readable table of the variables and their devices."""
    table, number = self._stores[0].table(), self._num_replicas
    return f"{table}\nMirrored: a copy of all this on each of {number} replicas"

  def read_global_step(self) -> tf.Tensor:
    """Returns the number of updates made so far, an int64 scalar."""
    return self._stores[0].read_global_step()

  def counts(self) -> tuple[int, int]:
    """Reads the global step and `examples_seen`, both as of the same update."""
    return self._stores[0].counts()

  def state(self) -> dict[str, tf.Tensor]:
    """Returns the values of the first device's copy by name, for a checkpoint.

    These are the variables, optimizer slots, moving averages and counters.
    """
    return self._stores[0].state()

  def load_state(self, state: Mapping[str, np.ndarray]) -> None:
    """Assigns values on every device of this process.

    Args:
      state: Values by name, such as a result of `state`.
    """
    self.is_changed = True
    for store in self._stores:
      store.load_state(state)

  def assign(self, index: int, value: parameter_store.Value) -> None:
    """Assigns `value` to a variable on every device of this process.

    Args:
      index: The position of the variable in `Replica.shared`.
      value: The new value.
    """
    self.is_changed = True
    for store in self._stores:
      store.assign(index, value)

  def subtract(self, index: int, value: parameter_store.Value) -> None:
    """Subtracts `value` from a variable on every device of this process.

    Args:
      index: The position of the variable in `Replica.shared`.
      value: The value to subtract.
    """
    self.is_changed = True
    for store in self._stores:
      store.subtract(index, value)

  def reader(self, indices: Sequence[int]) -> Callable[[], list[tf.Tensor]]:
    """Returns a function that reads variables from the first device's copy.

    Args:
      indices: The positions of the variables in `Replica.shared`.

    Returns:
      A function without arguments. Each call returns the present values of
      these variables, in the order of `indices`.
    """
    return self._stores[0].reader(indices)


class _DeviceReport(NamedTuple):
  """What one device reports about a step, to be summed over all devices.

  Attributes:
    loss: The mean loss of the device's batch.
    examples: The number of examples in that batch.
    is_bad: float64 [number of devices in all processes]: 1 at the position of
      this device if its loss or a gradient is not finite, 0 everywhere else.
  """

  loss: Annotated[tf.Tensor, tf.float64]
  examples: Annotated[tf.Tensor, tf.float64]
  is_bad: Annotated[tf.Tensor, tf.float64]


class _Command(NamedTuple):
  """A command that the chief sends to the other processes.

  Attributes:
    kind: `_STEP` (make a step), `_STATE` (receive all variables), `_FINISHED`
      or `_FAILED` (training has ended). A broadcast is a sum over all
      processes, so the other processes contribute 0.
    rate: The learning rate to set; NaN: keep the present one. The other
      processes contribute 0.
  """

  kind: float
  rate: float


def _strategy_of_one_process(
  devices: Sequence[str],
) -> tf.distribute.MirroredStrategy:
  """Returns a strategy that mirrors variables on devices of this process."""
  runtime_devices.start_quietly()
  # Collectives between CPUs bind a process to one set of them (TensorFlow
  # 2.21: "joining a group with size 3, but that group has size 2").
  is_on_gpus = ":GPU:" in devices[0]
  reduction = None if is_on_gpus else tf.distribute.ReductionToOneDevice()
  return tf.distribute.MirroredStrategy(devices, cross_device_ops=reduction)


class Mirrored(driver_base.Driver):
  """The driver that runs one process's part of a mirrored training.

  Every device of every process has a copy of the variables, and all devices
  make the same updates.

  Attributes:
    store: The copies of the variables on this process's devices.
  """

  store: MirroredStore

  def __init__(
    self,
    replica_fn: Callable[[], model_replica.Replica],
    optimizer_fn: Callable[[int], rule_base.UpdateRule],
    devices: Sequence[str] = (),
    *,
    spec: cluster.ClusterSpec | None = None,
    task: cluster.Task | None = None,
    start_timeout_secs: float = 120.0,
    namespace: str = "",
    log: Callable[[str], None] = print,
  ):
    """Connects to the other processes, if any, and creates the variables.

    Args:
      replica_fn: Builds the replica of one device. The replica must have no
        `devices`. Called once; all devices use this replica.
      optimizer_fn: A function of N, the number of devices in all processes. It
        returns an update rule for N replicas. Called once for each device of
        this process.
      devices: The devices of this process, such as `/device:GPU:0`. If empty,
        the first CPU. With several processes, each must have the same number of
        devices: its first GPUs, or one CPU.
      spec: The cluster, if there are several processes. No port may be 0. None:
        there is one process.
      task: The task of this process, one of `spec.replicas`; None if there is
        one process.
      start_timeout_secs: Seconds to wait for the other processes.
      namespace: The name of the training, for the names of its variables. Two
        drivers never share variables, even if they have the same namespace.
      log: Receives each line of the log.

    Raises:
      cluster.ClusterError: If the port of `task` is in use.
      TimeoutError: If another process does not start in time.
      RuntimeError: If another process has other variables, another update rule
        or incompatible versions; or if there are several processes, and
        TensorFlow was used in this process before.
      ValueError: If the replica has `devices`, the rule is for another number
        of replicas or needs parameter servers, or `namespace` is invalid.
    """
    processes.print_stacks_on_request()
    tasks = spec.replicas if spec is not None and spec.is_distributed else ()
    self._log = log
    self.is_chief = not tasks or task == spec.chief
    devices = tuple(devices) or ("/device:CPU:0",)
    if len(tasks) > 1:
      self._strategy = process_group.connect(
        spec, task, devices, timeout_secs=start_timeout_secs, log=log
      )
    else:
      self._strategy = _strategy_of_one_process(devices)
    self._devices = self._strategy.extended.worker_devices
    self._num_replicas = self._strategy.num_replicas_in_sync
    # The number of this process's first replica.
    self._first_replica = tasks.index(task) * len(self._devices) if tasks else 0
    self._names = [
      f"{owner}, replica {r}" if owner else f"replica {r}"
      for owner in (tasks or [""])
      for r in range(len(self._devices))
    ]
    self.replica = replica_fn()
    if self.replica.devices:
      raise ValueError(
        "`replica_fn` must build a replica of one device, without `devices`."
        f" Received: {list(self.replica.devices)}."
      )
    driver_base.check_endless(self.replica, "training with mirrored variables")
    self._create(optimizer_fn, resources.new_namespace(namespace))
    self._step_fn: Callable[[], tf.Tensor] | None = None
    # Whether all processes wait for the chief's next command.
    self._is_between_steps = True
    self._group: process_group.ProcessGroup | None = None
    if len(tasks) > 1:
      self._group = process_group.ProcessGroup(
        self._strategy,
        [spec.address(other) for other in tasks if other != task],
        is_chief=self.is_chief,
        log=log,
      )
      self._group.agree(
        [
          self._updates[0].rule.signature(),
          self._stores[0].signature(),
          model_replica.sparsity(self.replica),
          versions.required(versions.here()),
        ],
        timeout_secs=start_timeout_secs,
      )

  def _create(self, optimizer_fn, namespace: resources.Namespace) -> None:
    """Creates the copies of the variables on this process's devices.

    Args:
      optimizer_fn: Returns an update rule for a number of devices (in all
        processes).
      namespace: A prefix of the names of the variables.

    Raises:
      ValueError: If the update rule does not use the gradients of all devices.
    """
    values = [tf.identity(v) for v in self.replica.shared]
    self._stores, self._updates = [], []
    for device in self._devices:
      rule = optimizer_fn(self._num_replicas)
      if rule.replicas_to_aggregate != self._num_replicas:
        raise ValueError(
          "`replicas_to_aggregate` must be the number of devices,"
          f" {self._num_replicas}, where variables are mirrored. Received:"
          f" {rule.replicas_to_aggregate}."
        )
      store = one_machine.single_store(self.replica.shared, device, namespace)
      update = rule.in_lockstep(store)
      update.create(values)
      self._stores.append(store)
      self._updates.append(update)
    self.store = MirroredStore(self._stores, self._num_replicas)
    self._learning_rate: float | None = None
    self._report_layout = records.Layout(
      _DeviceReport, tf.float64, is_bad=self._num_replicas
    )

  def set_learning_rate(self, rate: float) -> None:
    """Sets the learning rate of all later updates. Called by the chief only.

    The chief sends the rate to the other processes with the next step.
    """
    self._learning_rate = rate
    for update in self._updates:
      update.rule.set_learning_rate(rate)

  def step(self, max_updates: int = 1) -> training.StepResult:
    """Makes one update of the variables in all processes.

    Only the chief calls this method. The other processes take part by
    `run_replica`.

    Args:
      max_updates: Ignored: the number of updates is always 1.

    Returns:
      A `StepResult`: the global step after the update, the mean loss, the
      number of examples of all devices, and the means of the model's metrics.

    Raises:
      NonFiniteGradientError: If a loss or a gradient of any device is not
        finite. No variable was changed then. Every process raises it.
      RuntimeError: If this task is not the chief, or the data set has ended.
      tf.errors.OpError: If another process is lost.
    """
    self._check_role(needs_chief=True)
    del max_updates
    self._is_between_steps = False
    if self._group is not None:
      # Before the first step every process receives all variables anyway.
      if self.store.is_changed and self._step_fn is not None:
        self._broadcast(_STATE)
        self._share_state()
      self._broadcast(_STEP)
    # Before the first step, the chief's variables are all processes'.
    metrics = self._metrics
    result = self._make_step()
    return result._replace(metrics=metrics.means())

  def run_replica(self) -> int:
    """Makes the updates that the chief commands, until training ends.

    Returns:
      The global step when training ended.

    Raises:
      NonFiniteGradientError: If a loss or a gradient of any device is not
        finite.
      RuntimeError: If this task is the chief, if training ended with an error,
        or if the data set has ended.
      tf.errors.OpError: If another process is lost.
    """
    self._check_role(needs_chief=False)
    while (kind := self._broadcast(0)) in (_STEP, _STATE):
      if kind == _STATE:
        self._share_state()
      else:
        self._make_step()
    if kind != _FINISHED:
      raise RuntimeError(
        f"the chief ended the training early, at step {self.global_step}; its"
        " log has the reason"
      )
    return self.global_step

  def _make_step(self) -> training.StepResult:
    if self._step_fn is None:
      self._start()
    for update in self._updates[1:]:
      update.rule.inner.refresh()
    waiting = contextlib.nullcontext()
    if self._group is not None:
      waiting = self._group.log_wait(
        "waiting until all workers have made the step (a slow one delays all;"
        " a dead one ends this wait with an error)"
      )
    with waiting:
      result = one_machine.run_step(
        self._updates[0], self._step_fn, self._names
      )
    self._is_between_steps = True
    return result

  def _start(self) -> None:
    """Prepares the first step of this process.

    It receives the chief's variables, opens the data sets and traces the step.
    """
    if self._group is not None:
      self._share_state()
    start = int(self.store.examples_seen.read_value())
    self._iterators = []
    for number in range(len(self._devices)):
      dataset = self.replica.dataset_fn(
        self._num_replicas, self._first_replica + number, start
      )
      self._iterators.append(iter(datasets.untuned(dataset)))
    self._step_fn = tf.function(
      self._step, autograph=False
    ).get_concrete_function()

  def _share_state(self) -> None:
    """Copies the chief's variables to the devices of every process.

    All processes have to call it at the same time.
    """
    assert self._group is not None
    self.store.load_state(self._group.broadcast(self.store.state()))
    self.store.is_changed = False

  def _step(self) -> tf.Tensor:
    """Makes a whole update: computes, sums and applies the gradients.

    It is traced as one `tf.function`.

    Returns:
      A `one_machine.StepReport`, packed into one vector.
    """
    step = self.store.read_global_step()
    sums, report = self._strategy.run(self._replica_step)
    local = self._strategy.experimental_local_results
    sums = [local(total) for total in sums]
    with tf.device("/device:CPU:0"):
      total = self._report_layout.unpack(tf.identity(local(report)[0]))
      loss = total.loss / self._num_replicas
      bad = tf.argmax(total.is_bad)
      bad = tf.where(tf.reduce_any(total.is_bad > 0), bad, -1)
      updated = control_flow.run_if(
        bad < 0, lambda: self._apply(step, sums, total.examples)
      )
      with tf.control_dependencies([updated]):
        report = one_machine.StepReport(bad, step, total.examples, loss)
        return one_machine.REPORT.pack(report)

  def _replica_step(self):
    """Computes one device's gradients, and sums them over all devices.

    It also sums the `_DeviceReport` of each device, which has the loss and the
    number of examples.

    Returns:
      A list and a vector. The list has, for each gradient that is not None, its
      sum over all devices. The vector is the sum of the reports, packed.
    """
    number = process_group.local_number(self._strategy)
    store, update = self._stores[number], self._updates[number]
    values = store.read()
    result = self.replica.gradients(
      [values[i] for i in store.contributed],
      next(self._iterators[number]),
      update.rule.scale_loss,
    )
    gradients = update.finish_gradients(
      result.gradients, self._first_replica + number
    )
    # The same on every device, and known once this is traced.
    self._present = [gradient is not None for gradient in gradients]
    is_sound = tf.math.is_finite(result.loss)
    is_sound &= gradient_math.all_finite(gradients)
    bad = tf.one_hot(
      tf.where(is_sound, -1, self._first_replica + number),
      self._num_replicas,
      dtype=tf.float64,
    )
    report = self._report_layout.pack(
      _DeviceReport(result.loss, result.num_examples, bad)
    )
    kept = [gradient for gradient in gradients if gradient is not None]
    *sums, report = process_group.all_reduce([*kept, report])
    return sums, report

  def _apply(self, step, sums, examples) -> tf.Tensor:
    """Applies the mean gradients to the copy of the variables on every device.

    Args:
      step: The global step before the update.
      sums: For each gradient that is not None, a tuple with one tensor per
        device of this process. Each tensor is the sum of this gradient over all
        devices.
      examples: The total number of examples of all devices.

    Returns:
      A tensor that is True once all copies are updated.
    """
    steps = []
    for number, update in enumerate(self._updates):
      mine = iter([total[number] for total in sums])
      mine = [next(mine) if has_one else None for has_one in self._present]
      with tf.device(self._devices[number]):
        steps.append(update.apply(mine, step, examples))
    return control_flow.done(*steps)

  def _broadcast(self, kind: int) -> int:
    """Sends a command from the chief to the other processes.

    All processes call it. It also sends the learning rate, which the other
    processes set.

    Args:
      kind: In the chief, the kind of the command, a `_Command.kind`. In the
        other processes, 0.

    Returns:
      The kind of the chief's command, in every process.
    """
    rate = self._learning_rate if self.is_chief else 0.0
    command = _Command(kind, np.nan if rate is None else rate)
    others = "other workers" if self.is_chief else "chief's next command"
    with self._group.log_wait(f"waiting for the {others}"):
      (total,) = self._group.sum([np.float64(command)])
    command = _Command(*total)
    if not (self.is_chief or np.isnan(command.rate)):
      self.set_learning_rate(float(command.rate))
    return int(command.kind)

  def close(self, error: BaseException | None = None) -> None:
    """Takes this task out of the training. In the chief, ends it for all tasks.

    Args:
      error: The error because of which training ends early, if any. The chief
        tells the other processes that there was an error, but not which.
    """
    if self._group is None:
      return
    # In the middle of a step the others would not receive it; they fail when
    # this process ends.
    if self.is_chief and self._is_between_steps:
      self._is_between_steps = False
      try:
        self._broadcast(_FINISHED if error is None else _FAILED)
        self._group.await_leave()
      except (tf.errors.OpError, TimeoutError) as failure:
        message = processes.shortened(str(failure))
        self._log(
          "could not tell all workers that training ended; end their processes"
          f" if they still run: {message}"
        )
    self._group.close()
