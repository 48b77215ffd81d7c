"""Mirrored variables: a copy on every device, gradients all-reduced.

In one process the engine is `tf.distribute.MirroredStrategy`, with a process
per worker `tf.distribute.MultiWorkerMirroredStrategy`. Every device is one
replica. A step:

1. With several processes the chief says that there is one more, and with which
   learning rate; the others wait for that.
2. Each device computes the gradient of its own batch from its own copy.
3. The gradients, the losses and who found what is not finite are summed over
   all devices (all-reduce).
4. Each device applies the mean to its own copy, by the rule and the code of
   the parameter servers (`mean_update`). As all do the same, copies stay equal.

Before the first step every process takes over the chief's variables, which may
have come from a checkpoint. At the end the chief says so in place of 1.

Where things live: on each device a parameter store with one task: variables,
slots, averages, global step. A checkpoint is that of the chief's first device.
"""

import contextlib
from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from tf_replicas import cluster
from tf_replicas import driver
from tf_replicas import gradient_queues
from tf_replicas import one_machine
from tf_replicas import parameter_store
from tf_replicas import sync_replicas
from tf_replicas import towers
from tf_replicas import training
from tf_replicas import worker_group

# What the chief says before a step.
_STEP, _FINISHED, _FAILED = 1, 2, 3


class Copies:
  """The stores of this process's devices, as one; all hold the same.

  Attributes:
    examples_seen: int64 scalar: the examples that all updates used.
  """

  def __init__(
    self, stores: Sequence[parameter_store.ParameterStore], num_replicas: int
  ):
    """Takes `stores` of all `num_replicas`, those of this process."""
    self._stores = list(stores)
    self._num_replicas = num_replicas
    self.examples_seen = stores[0].examples_seen

  def table(self) -> str:
    """Which variable is where; for people."""
    table, number = self._stores[0].table(), self._num_replicas
    return f"{table}\nMirrored: a copy of all this on each of {number} replicas"

  def read_global_step(self) -> tf.Tensor:
    """The global step: an int64 scalar."""
    return self._stores[0].read_global_step()

  def state(self) -> dict[str, tf.Tensor]:
    """One copy of everything, as `ParameterStore.state` has it."""
    return self._stores[0].state()

  def load_state(self, state: Mapping[str, np.ndarray]) -> None:
    """Assigns what `state` gave, to every copy."""
    for store in self._stores:
      store.load_state(state)


class Rules:
  """The update rules of this process's devices, as one."""

  def __init__(self, optimizers: Sequence[sync_replicas.SyncReplicasOptimizer]):
    self._optimizers = list(optimizers)
    self.learning_rate: float | None = None

  def set_learning_rate(self, rate: float) -> None:
    """Sets the inner Keras optimizers' rate, from the next update on."""
    self.learning_rate = rate
    for optimizer in self._optimizers:
      optimizer.set_learning_rate(rate)

  def stop_at(self, step: int) -> None:
    """Nothing: all devices make every step together."""
    del step

  def counts(self) -> list:
    """Nothing is offered, so nothing is counted."""
    return []


class Mirrored(driver.Driver):
  """The driver of mirrored variables.

  Attributes:
    store: The copies of this process.
    optimizer: Their update rules.
  """

  def __init__(
    self,
    replica_fn: Callable[[], towers.Replica],
    optimizer_fn: Callable[[int], sync_replicas.SyncReplicasOptimizer],
    devices: Sequence[str] = (),
    *,
    spec: cluster.ClusterSpec | None = None,
    task: cluster.Task | None = None,
    start_timeout_secs: float = 120.0,
    log: Callable[[str], None] = print,
  ):
    """Connects, and creates the copies.

    Args:
      replica_fn: Builds the replica of one device: without `devices`.
      optimizer_fn: Maps the number of replicas N, all devices of all processes,
        to the update rule of N; called once for each device of this process.
      devices: This process's, such as `/device:GPU:0`; the first CPU if empty.
        With several processes, the same number in each: its first GPUs, or one
        CPU.
      spec: The cluster of several processes, ports chosen.
      task: Which of its `replicas` this process is.
      start_timeout_secs: How long to wait for the other processes.
      log: Where words go.

    Raises:
      cluster.ClusterError: If the port of `task` is in use.
      TimeoutError: If another process does not come in time.
      RuntimeError: If another process builds other variables, or this process
        has a driver already.
      ValueError: If replica or rule are for something else.
    """
    tasks = spec.replicas if spec is not None and spec.is_distributed else ()
    self._log = log
    self.is_chief = not tasks or task == spec.chief
    devices = tuple(devices) or ("/device:CPU:0",)
    if len(tasks) > 1:
      self._strategy = worker_group.connect(
        spec, task, devices, timeout_secs=start_timeout_secs, log=log
      )
    else:
      # Collectives between CPUs bind a process to one set of them (TensorFlow
      # 2.21: "joining a group with size 3, but that group has size 2").
      is_on_gpus = ":GPU:" in devices[0]
      reduction = None if is_on_gpus else tf.distribute.ReductionToOneDevice()
      self._strategy = tf.distribute.MirroredStrategy(
        devices, cross_device_ops=reduction
      )
    self._devices = self._strategy.extended.worker_devices
    self._num_replicas = self._strategy.num_replicas_in_sync
    # Of all replicas, the number of this process's first.
    self._first = tasks.index(task) * len(self._devices) if tasks else 0
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
    self._create(optimizer_fn)
    self._step_fn: Callable[[], tf.Tensor] | None = None
    # Whether all processes wait for the chief's next word.
    self._is_at_rest = True
    self._group: worker_group.WorkerGroup | None = None
    if len(tasks) > 1:
      self._group = worker_group.WorkerGroup(
        self._strategy,
        [spec.address(other) for other in tasks if other != task],
        is_chief=self.is_chief,
        log=log,
      )
      self._group.agree(
        [
          self._optimizers[0].signature(),
          self._stores[0].signature(),
          towers.sparsity(self.replica),
        ],
        timeout_secs=start_timeout_secs,
      )

  def _create(self, optimizer_fn) -> None:
    """The copies, at the initial values of this process's model."""
    values = [tf.identity(v) for v in self.replica.shared]
    self._stores, self._optimizers = [], []
    for device in self._devices:
      optimizer = optimizer_fn(self._num_replicas)
      if optimizer.replicas_to_aggregate != self._num_replicas:
        raise ValueError(
          "`replicas_to_aggregate` must be the number of devices,"
          f" {self._num_replicas}, where variables are mirrored. Received:"
          f" {optimizer.replicas_to_aggregate}."
        )
      store = one_machine.single_store(self.replica.shared, device)
      optimizer.build(store, is_alone=True)
      optimizer.create(values)
      self._stores.append(store)
      self._optimizers.append(optimizer)
    self.store = Copies(self._stores, self._num_replicas)
    self.optimizer = Rules(self._optimizers)

  def step(self) -> training.StepResult:
    """The chief's: makes one update.

    Raises:
      NonFiniteGradientError: In every process, if a loss or a gradient is not
        finite anywhere; then nothing was changed.
      RuntimeError: If the data set has ended.
      tf.errors.OpError: If another process is lost.
    """
    self._is_at_rest = False
    if self._group is not None:
      self._say(_STEP)
    return self._make_step()

  def run_replica(self) -> int:
    """Everyone else's: makes the chief's steps until it says that it ended.

    Returns:
      The global step when it ended.

    Raises:
      RuntimeError: If the chief ended early.
    """
    while (word := self._say(0)) == _STEP:
      self._make_step()
    if word != _FINISHED:
      raise RuntimeError("the chief ended the training early")
    return self.global_step

  def _make_step(self) -> training.StepResult:
    if self._step_fn is None:
      self._start()
    for optimizer in self._optimizers[1:]:
      optimizer.inner.refresh()
    saying = contextlib.nullcontext()
    if self._group is not None:
      saying = self._group.saying("a step of this worker and the others")
    with saying:
      result = one_machine.run_step(
        self._optimizers[0], self._step_fn, self._names
      )
    self._is_at_rest = True
    return result

  def _start(self) -> None:
    if self._group is not None:
      self.store.load_state(self._group.broadcast(self.store.state()))
    start = int(self.store.examples_seen.read_value())
    self._iterators = []
    for number in range(len(self._devices)):
      dataset = self.replica.dataset_fn(
        self._num_replicas, self._first + number, start
      )
      self._iterators.append(iter(dataset))
    self._step_fn = tf.function(
      self._step, autograph=False
    ).get_concrete_function()

  def _step(self) -> tf.Tensor:
    """The whole step; returns what `one_machine.run_step` reads."""
    step = self.store.read_global_step()
    sums, report = self._strategy.run(self._replica_step)
    local = self._strategy.experimental_local_results
    sums = [local(total) for total in sums]
    with tf.device("/device:CPU:0"):
      report = tf.identity(local(report)[0])
      loss, examples = report[0] / self._num_replicas, report[1]
      bad = tf.argmax(report[2:])
      bad = tf.where(tf.reduce_any(report[2:] > 0), bad, -1)

      def update():
        return self._update(step, sums, examples)

      with tf.control_dependencies(
        [tf.cond(bad < 0, update, lambda: tf.constant(False))]
      ):
        return one_machine.pack_report(bad, step, examples, loss)

  def _replica_step(self):
    """What each device does: its gradient, then the sums over all devices.

    Returns:
      The sums of the gradients that there are, and of the report: float64
      [2 + N], loss, examples, and 1 for whoever found what is not finite.
    """
    number = worker_group.local_number(self._strategy)
    store, optimizer = self._stores[number], self._optimizers[number]
    values = store.read()
    result = self.replica.gradients(
      [values[i] for i in store.contributed],
      next(self._iterators[number]),
      optimizer.scale_loss,
    )
    gradients = optimizer.finish_gradients(
      result.gradients, self._first + number
    )
    # The same on every device, and known once this is traced.
    self._present = [gradient is not None for gradient in gradients]
    is_sound = tf.math.is_finite(result.loss)
    is_sound &= gradient_queues.all_finite(gradients)
    bad = tf.one_hot(
      tf.where(is_sound, -1, self._first + number),
      self._num_replicas,
      dtype=tf.float64,
    )
    fields = [result.loss, result.num_examples]
    report = tf.stack([tf.cast(field, tf.float64) for field in fields])
    kept = [gradient for gradient in gradients if gradient is not None]
    report = tf.concat([report, bad], axis=0)
    *sums, report = worker_group.all_reduce([*kept, report])
    return sums, report

  def _update(self, step, sums, examples) -> tf.Tensor:
    """Every device's update of its own copy; returns True."""
    steps = []
    for number, optimizer in enumerate(self._optimizers):
      mine = iter([total[number] for total in sums])
      mine = [next(mine) if has_one else None for has_one in self._present]
      with tf.device(self._devices[number]):
        steps.append(
          optimizer.update.whole_step(
            mine, step, examples, num_contributions=self._num_replicas
          )
        )
    with tf.control_dependencies(steps):
      return tf.constant(True)

  def _say(self, word: int) -> int:
    """The chief's word, which the others hear; with the learning rate."""
    rate = self.optimizer.learning_rate if self.is_chief else 0.0
    message = np.float64([word, np.nan if rate is None else rate])
    others = "other workers" if self.is_chief else "chief's next step"
    with self._group.saying(f"waiting for the {others}"):
      ((word, rate),) = self._group.sum([message])
    if not (self.is_chief or np.isnan(rate)):
      self.optimizer.set_learning_rate(float(rate))
    return int(word)

  def close(self, error: BaseException | None = None) -> None:
    """The chief's: tells the others that training ended, and how."""
    if self._group is None:
      return
    # In the middle of a step nobody would listen; they notice when this
    # process leaves.
    if self.is_chief and self._is_at_rest:
      self._is_at_rest = False
      try:
        self._say(_FINISHED if error is None else _FAILED)
        self._group.await_leave()
      except (tf.errors.OpError, TimeoutError) as failure:
        self._log(f"could not take leave of the others: {failure}")
    self._group.close()
