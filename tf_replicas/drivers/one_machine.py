"""Trains in one process, with the variables on its CPU or on a GPU.

A *tower* is a copy of the model's computation on one device. There are no
servers. A whole step is one `tf.function`:

1. The device of the variables reads the parameters, once.
2. On each device a tower computes the gradients of its part of the batch
   (`model_replica.Replica.gradients`), and their mean is computed.
3. Unless a loss or a gradient is not finite, the device of the variables runs
   the inner optimizer, adds 1 to the global step and updates the moving
   averages of the variables (`LockstepUpdate`).
4. The function returns a `StepReport`, packed into one vector.

Variables, optimizer slots and moving averages are on one device, in a
`ParameterStore` of one task, so that checkpoints are like those of the other
drivers. The device is the CPU, as in `cifar10_multi_gpu_train.py` of TF1's
tutorial, or the first tower's GPU, as with `--local_parameter_device=gpu` of
TF1's benchmarks. With the GPU, fewer bytes are copied between CPU and GPU, but
the variables need memory of the GPU.
"""

from collections.abc import Callable
from collections.abc import Sequence
from typing import Any
from typing import NamedTuple

import tensorflow as tf

from tf_replicas.drivers import base as driver_base
from tf_replicas.replica import model_replica
from tf_replicas.rules import base as rule_base
from tf_replicas.rules import results
from tf_replicas.runtime import datasets
from tf_replicas.runtime import devices
from tf_replicas.runtime import processes
from tf_replicas.runtime import records
from tf_replicas.runtime import resources
from tf_replicas.session import training
from tf_replicas.store import gradient_math
from tf_replicas.store import parameter_store
from tf_replicas.store import placement
from tf_replicas.store import tables

CPU = "/device:CPU:0"


class StepReport(NamedTuple):
  """The result of the function that makes a whole step.

  Attributes:
    bad_replica: The index of a replica whose loss or gradient is not finite; -1
      if there is none. If there is one, no update was made. (All towers of a
      `OneMachine` together are replica 0.)
    step: The global step before the update.
    examples: The number of examples in the step.
    loss: The mean loss of these examples.
  """

  bad_replica: records.Int
  step: records.Int
  examples: records.Int
  loss: records.Float


REPORT = records.Layout(StepReport, tf.float64)


class OneMachine(driver_base.Driver):
  """The driver for training in one process, with one copy of the variables.

  Attributes:
    is_chief: True, as there is no other task.
  """

  is_chief = True

  def __init__(
    self,
    replica_fn: Callable[[], model_replica.Replica],
    optimizer_fn: Callable[[], rule_base.UpdateRule],
    *,
    device_of_variables: str = CPU,
    namespace: str = "",
  ):
    """Builds the replica and the variables.

    Args:
      replica_fn: Builds the replica. Its `devices` are those of the towers, the
        copies of the model.
      optimizer_fn: Builds the update rule, for a single replica.
      device_of_variables: The device of the variables, where the updates are
        computed: the CPU, or the device of a tower.
      namespace: The name of the training, for the names of its variables. Two
        drivers never share variables, even if they have the same namespace.

    Raises:
      ValueError: If the rule is for more than one replica or needs parameter
        servers, or `namespace` is invalid.
    """
    processes.print_stacks_on_request()
    devices.start_quietly()
    own = resources.new_namespace(namespace)
    with tables.home(tables.Home(own, 1, lambda _: CPU)):
      self.replica = replica_fn()
    rule = rule_base.check_rule(optimizer_fn())
    places = rule.replicas_to_aggregate
    if places != 1:
      raise ValueError(
        "`replicas_to_aggregate` must be 1 when one process drives all"
        " devices: together they are one replica, whose gradients are all used."
        f" Received: {places}."
      )
    store: Any = single_store(
      self.replica.shared, CPU, own, device_of_variables
    )
    self.store = store
    self._home = device_of_variables
    self._update = rule.in_lockstep(self.store)
    self._update.create([tf.identity(v) for v in self.replica.shared])
    self._step_fn: Callable[[], tf.Tensor] | None = None

  def set_learning_rate(self, rate: float) -> None:
    """Sets the learning rate of all later updates."""
    self._update.rule.set_learning_rate(rate)

  def run_replica(self) -> int:
    """Always raises RuntimeError: the only task is the chief."""
    self._check_role(needs_chief=False)

  def step(self, max_updates: int = 1) -> training.StepResult:
    """Makes one update of the variables.

    Args:
      max_updates: Ignored: the number of updates is always 1.

    Returns:
      A `StepResult`: the global step after the update, the loss, the number of
      examples, and the means of the model's metrics.

    Raises:
      NonFiniteGradientError: If the loss or a gradient is not finite. No
        variable was changed then.
      RuntimeError: If the data set has ended.
    """
    del max_updates
    metrics = self._metrics
    if self._step_fn is None:
      start = int(self.store.examples_seen.read_value())
      dataset = self.replica.dataset_fn(1, 0, start)
      model_replica.check_dataset(dataset)
      self._iterator = iter(datasets.untuned(dataset))
      # A concrete function skips what a call spends on looking for a trace.
      self._step_fn = tf.function(
        self._step, autograph=False
      ).get_concrete_function()
    step_fn = self._step_fn
    assert step_fn is not None
    result = run_step(
      self._update, step_fn, ["this process"], self.replica.on_data_end
    )
    return result._replace(metrics=metrics.means())

  def _step(self) -> tf.Tensor:
    """Reads the variables, computes the gradients and applies them.

    It is traced as one `tf.function`. If a value is not finite, it applies
    nothing.

    Returns:
      A `StepReport`, packed into one vector.
    """
    with tf.device(CPU):
      batch = next(self._iterator)
    with tf.device(self._home):
      step, values = self.store.pull()
    parameters = [values[i] for i in self.store.contributed]
    # Without `devices`, TensorFlow places the only tower.
    with tf.device(self._home if self.replica.devices else None):
      result = self.replica.gradients(
        parameters, batch, self._update.rule.scale_loss
      )
    with tf.device(self._home):
      gradients = self._update.finish_gradients(result.gradients)
      is_sound = tf.math.is_finite(result.loss)
      is_sound &= gradient_math.all_finite(gradients)

      def update():
        return self._update.apply(gradients, step, result.num_examples)

      new_step = tf.cond(is_sound, update, lambda: step)
      with tf.control_dependencies([new_step]):
        bad = tf.where(is_sound, -1, 0)
        report = StepReport(bad, step, result.num_examples, result.loss)
      with tf.device(CPU):
        return REPORT.pack(report)

  def close(self, error: BaseException | None = None) -> None:
    """Does nothing, as no other task waits for the end of the training."""
    del error


def single_store(
  variables: Sequence[tf.Variable],
  device: str,
  namespace: resources.Namespace,
  device_of_variables: str | None = None,
) -> parameter_store.ParameterStore:
  """Returns a parameter store on devices of this process.

  Its variables are on one device, and its counters on the same or another one.

  Args:
    variables: Keras or TensorFlow variables. The store makes variables with the
      same paths, shapes and dtypes, without values yet.
    device: The device of the counters, such as the global step.
    namespace: A prefix of the names of the store's variables. Stores with the
      same namespace share their variables.
    device_of_variables: The device of the other variables; None: `device`.
  """
  specs = placement.from_variables(variables)
  return parameter_store.ParameterStore(
    specs,
    placement.plan(specs, placement.GreedyByBytes(1)),
    num_tasks=1,
    device_of_task=lambda _: device,
    device_of_variables=lambda _: device_of_variables or device,
    namespace=namespace,
  )


def describe(variables: Sequence[tf.Variable], device: str) -> str:
  """Returns a readable table of variables that would be on one device.

  It creates no variables.

  Args:
    variables: Keras or TensorFlow variables, whose paths, shapes and dtypes the
      table shows.
    device: The name of the device, which the table shows for each of them.
  """
  specs = placement.from_variables(variables)
  plan = placement.plan(specs, placement.GreedyByBytes(1))
  return placement.table(specs, plan, [device])


def run_step(
  update: rule_base.LockstepUpdate,
  step_fn: Callable[[], tf.Tensor],
  names: Sequence[str],
  on_data_end: str = "error",
) -> training.StepResult:
  """Calls the function that makes a whole step, and returns the result.

  Args:
    update: The object that applies the gradients in the step.
    step_fn: Makes the step, and returns a `StepReport`, packed into one vector.
    names: The replicas' names, for error messages.
    on_data_end: What happens when the data set ends, as `Replica.on_data_end`.

  Returns:
    The global step after the update, the loss, the number of examples and the
    learning rate.

  Raises:
    NonFiniteGradientError: If a replica's loss or gradient is not finite.
    RuntimeError: If the data set has ended; `training.DataEnded` instead if
      `on_data_end` is not "error".
  """
  update.rule.inner.refresh()
  try:
    (report,) = REPORT.unpack_rows(step_fn().numpy()[None])
  except tf.errors.OutOfRangeError as error:
    if on_data_end != "error":
      raise training.DataEnded("the data have ended") from None
    raise RuntimeError(
      "the data set has ended; it must be endless, and not empty"
    ) from error
  if report.bad_replica >= 0:
    raise results.NonFiniteGradientError(
      report.bad_replica, report.step, names[report.bad_replica]
    )
  return training.StepResult(
    report.step + 1,
    report.loss,
    report.examples,
    {"learning_rate": update.rule.inner.learning_rate(report.step)},
  )
