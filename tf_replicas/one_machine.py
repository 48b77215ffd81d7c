"""One machine, variables on its CPU: towers in one program.

The whole step is one function of this process, and there are no servers:

1. Read the parameters on the CPU, once.
2. On each device a tower computes the gradient of its part of the batch; they
   meet on the CPU, which takes their mean (`towers.Replica.gradients`).
3. On the CPU: the inner optimizer, global step + 1, moving averages
   (`mean_update`), unless a loss or gradient is not finite.
4. One vector comes back: the step, the loss, the examples.

Where things live: all in this process. Variables, slots and averages are on
the CPU, in a parameter store with one task, so that a checkpoint cannot tell
this driver from the others.

After `cifar10_multi_gpu_train.py` of TF1's tutorial.
"""

from collections.abc import Callable
from collections.abc import Sequence

import tensorflow as tf

from tf_replicas import driver
from tf_replicas import gradient_queues
from tf_replicas import parameter_store
from tf_replicas import placement
from tf_replicas import sync_replicas
from tf_replicas import towers
from tf_replicas import training
from tf_replicas import updates

_CPU = "/device:CPU:0"


class OneMachine(driver.Driver):
  """The driver of one process with its variables on the CPU.

  Attributes:
    is_chief: True; there is nobody else.
  """

  is_chief = True

  def __init__(
    self,
    replica_fn: Callable[[], towers.Replica],
    optimizer_fn: Callable[[], sync_replicas.SyncReplicasOptimizer],
  ):
    """Builds the replica, and the variables on the CPU.

    Args:
      replica_fn: Builds the replica; its `devices` are the towers'.
      optimizer_fn: Builds the update rule, for one replica of one.

    Raises:
      ValueError: If the rule is for another number of contributions.
      RuntimeError: If another driver of this process has such variables:
        there is one store in a process, found by name.
    """
    self.replica = replica_fn()
    self.optimizer = optimizer_fn()
    places = self.optimizer.replicas_to_aggregate
    if places != 1:
      raise ValueError(
        "`replicas_to_aggregate` must be 1 where one program has all the"
        f" towers. Received: {places}."
      )
    self.store = single_store(self.replica.shared, _CPU)
    self.optimizer.build(self.store, is_alone=True)
    self.optimizer.create([tf.identity(v) for v in self.replica.shared])
    self._step_fn: Callable[[], tf.Tensor] | None = None

  def step(self) -> training.StepResult:
    """Makes one update.

    Raises:
      NonFiniteGradientError: If the loss or a gradient is not finite; then
        nothing was changed.
      RuntimeError: If the data set has ended.
    """
    if self._step_fn is None:
      start = int(self.store.examples_seen.read_value())
      self._iterator = iter(self.replica.dataset_fn(1, 0, start))
      # A concrete function skips what a call spends on looking for a trace.
      self._step_fn = tf.function(
        self._step, autograph=False
      ).get_concrete_function()
    return run_step(self.optimizer, self._step_fn, ["this process"])

  def _step(self) -> tf.Tensor:
    """The whole step; returns what `run_step` reads."""
    with tf.device(_CPU):
      step, values = self.store.pull()
      batch = next(self._iterator)
    parameters = [values[i] for i in self.store.contributed]
    # What several towers share, such as their mean, is on the CPU; one without
    # a device goes where TensorFlow puts it.
    with tf.device(_CPU if self.replica.devices else None):
      result = self.replica.gradients(
        parameters, batch, self.optimizer.scale_loss
      )
    with tf.device(_CPU):
      gradients = self.optimizer.finish_gradients(result.gradients)
      is_sound = tf.math.is_finite(result.loss)
      is_sound &= gradient_queues.all_finite(gradients)

      def update():
        return self.optimizer.update.whole_step(
          gradients, step, result.num_examples, num_contributions=1
        )

      new_step = tf.cond(is_sound, update, lambda: step)
      with tf.control_dependencies([new_step]):
        bad = tf.where(is_sound, -1, 0)
        return pack_report(bad, step, result.num_examples, result.loss)

  def close(self, error: BaseException | None = None) -> None:
    """Does nothing: no other task waits."""
    del error


def single_store(
  variables: Sequence[tf.Variable], device: str
) -> parameter_store.ParameterStore:
  """A store with one task, on `device` of this process.

  Args:
    variables: Keras or TensorFlow variables: a pattern; values do not matter.
    device: Where it is.

  Raises:
    RuntimeError: If it exists already.
  """
  specs = placement.from_variables(variables)
  store = parameter_store.ParameterStore(
    specs,
    placement.plan(specs, placement.GreedyByBytes(1)),
    num_tasks=1,
    device_of_task=lambda _: device,
  )
  if store.is_initialized():
    raise RuntimeError(
      f"the variables on {device} of this process belong to another driver;"
      " one process can hold one driver of one machine"
    )
  return store


def describe(variables: Sequence[tf.Variable], device: str) -> str:
  """The placement table of such a store, which need not exist."""
  specs = placement.from_variables(variables)
  plan = placement.plan(specs, placement.GreedyByBytes(1))
  return placement.table(specs, plan, [device])


def pack_report(
  bad_replica: tf.Tensor,
  step: tf.Tensor,
  num_examples: tf.Tensor,
  loss: tf.Tensor,
) -> tf.Tensor:
  """What a step's function returns, in one vector: float64 [4]."""
  fields = (bad_replica, step, num_examples, loss)
  return tf.stack([tf.cast(field, tf.float64) for field in fields])


def run_step(
  optimizer: sync_replicas.SyncReplicasOptimizer,
  step_fn: Callable[[], tf.Tensor],
  names: Sequence[str],
) -> training.StepResult:
  """Calls the function of a whole step, and reads its report.

  Args:
    optimizer: The update rule.
    step_fn: Returns what `pack_report` does: the replica whose loss or gradient
      was not finite, or -1 if the update was made, and the step before it.
    names: The replicas' names.

  Raises:
    NonFiniteGradientError: If there is such a replica.
    RuntimeError: If the data set has ended.
  """
  optimizer.inner.refresh()
  try:
    bad_replica, step, num_examples, loss = step_fn().numpy()
  except tf.errors.OutOfRangeError as error:
    raise RuntimeError("the data set has ended; it must be endless") from error
  if bad_replica >= 0:
    name = names[int(bad_replica)]
    raise updates.NonFiniteGradientError(int(bad_replica), int(step), name)
  return training.StepResult(
    int(step) + 1,
    float(loss),
    int(num_examples),
    {"learning_rate": optimizer.inner.learning_rate(int(step))},
  )
