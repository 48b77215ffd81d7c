"""Defines how a training is run, and what is trained, and checks the options.

A binary makes `Options` and a `Workload` and passes them to `launcher.run` or
`task_runner.train`. This module does not import TensorFlow.

A replica is a task that computes gradients. A tower is a copy of the model. A
replica has one tower on each of its devices or, if the layers of a model are
spread over several devices, on each group of devices. A contribution is what a
replica sends for one update, such as a gradient.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import os
from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
from typing import NamedTuple
from typing import TYPE_CHECKING

from tf_replicas import cluster
from tf_replicas.cluster import environment
from tf_replicas.programs import fields
from tf_replicas.programs import update_options

if TYPE_CHECKING:
  import keras
  import numpy as np

  from tf_replicas.replica import model_parallel
  from tf_replicas.replica import model_replica
  from tf_replicas.rules import base as rule_base
  from tf_replicas.session import checkpoints

BETWEEN_GRAPH = "between_graph"
IN_GRAPH = "in_graph"

# Groups of flags: of every training, of several devices, of a cluster.
RUN, DEVICES, CLUSTER = "Run", "Devices", "Cluster"
_run = functools.partial(fields.setting, group=RUN)
_cluster = functools.partial(fields.setting, group=CLUSTER)

# Expected errors of a run, printed as one line; any other is a bug, and keeps
# its traceback.
RUN_TIME_ERRORS = (
  RuntimeError,
  TimeoutError,
  FloatingPointError,
  OSError,
  KeyboardInterrupt,
)


class OptimizerStep(NamedTuple):
  """A kind of optimizer step, from which a learning rate is computed.

  Attributes:
    name: Name of the kind, such as "async updates".
    num_examples: Number of examples in the gradient that one step applies.
    staleness: Expected age of the gradient: the number of updates between
      reading the variables that it is computed from and applying it.
  """

  name: str
  num_examples: int
  staleness: float = 0.0


@dataclasses.dataclass(frozen=True)
class Options:
  """The options of how a training is run, whatever the model.

  The help texts of the fields that are not listed here describe them.

  Attributes:
    spec: The cluster, or the devices of one process.
    train_dir: Directory of checkpoints, summaries and logs.
    task: The task that this process is. None: this process starts all tasks of
      this machine or, if the spec describes one process, trains itself.
    update: The update rule and its settings.

  Raises:
    cluster.ClusterError: If no training can run with these options. The message
      gives the reason.
  """

  spec: cluster.ClusterSpec
  train_dir: str
  task: cluster.Task | None = None
  update: update_options.UpdateSettings = update_options.UpdateSettings()
  micro_batches: int = _run(
    1, "Parts in which a tower processes its batch", fields.COUNT
  )
  log_every_steps: int = _run(10, "Steps between log lines", fields.COUNT)
  summary_every_steps: int = _run(100, "Steps between summaries", fields.COUNT)
  histograms: bool = _run(
    False,
    "Also write histograms of variables and, of CIFAR-10, activations,"
    " gradients, losses apart and images",
  )
  checkpoint_every_steps: int | None = _run(
    None, "Steps between checkpoints; default: by time alone", fields.COUNT
  )
  checkpoint_every_secs: float = _run(
    600.0, "Seconds between checkpoints", "[0.001, inf)"
  )
  keep_checkpoints: int = _run(5, "Newest checkpoints to keep", fields.COUNT)
  intra_op_threads: int | None = _run(
    None,
    "Threads of one op; default: cores / replicas on this machine",
    fields.COUNT,
  )
  dry_run: bool = _run(False, "Check and describe only, start nothing")
  log_device_placement: bool = _run(
    False, "Log the device of each operation, as TensorFlow says it"
  )
  check_gpu: bool = _run(
    False,
    "Make one update on the CPU, and name the ops that have no GPU kernel",
  )
  emulate_gpus: bool = fields.setting(
    False, "Use logical CPU devices in place of GPUs", group=DEVICES
  )
  replication: str = _cluster(
    BETWEEN_GRAPH,
    "Every worker trains as a client, or one client drives all workers",
    choices=(BETWEEN_GRAPH, IN_GRAPH),
  )
  timeline: bool = _cluster(
    False, "Record what every replica does when, in its train directory"
  )
  private_network: bool = _cluster(
    False,
    "If all tasks start on this machine, let nobody else connect to them: they"
    " run in a network namespace of Linux that has only loopback",
  )
  max_workers: int | None = _cluster(
    None,
    "Largest number of workers, if others than those of the cluster spec may"
    " join; the same for all tasks; default: no others",
    fields.COUNT,
  )
  start_timeout_secs: float = _cluster(
    120.0, "Seconds that tasks wait for each other at the start", "[0, inf)"
  )
  lost_after_secs: float = _cluster(
    20.0,
    "Seconds without a heartbeat after which a worker is lost and its place in"
    " the step goes to another; mirrored variables ignore it",
    "[2, inf)",
  )
  recovery_timeout_secs: float = _cluster(
    600.0,
    "Seconds to wait for the restart of a parameter server that was lost;"
    " training then resumes from the newest checkpoint; 0: the loss ends"
    " training; mirrored variables ignore it",
    "[0, inf)",
  )

  def __post_init__(self):
    fields.validate(self, cluster.ClusterError)
    _check(self)

  @property
  def is_in_graph(self) -> bool:
    """Whether one client process drives all workers (in-graph replication)."""
    return self.spec.is_distributed and self.replication == IN_GRAPH

  @property
  def is_mirrored(self) -> bool:
    """Whether the variables are mirrored: every device has a copy of them."""
    return self.spec.variables.on == "mirrored"

  @property
  def launches(self) -> bool:
    """Whether this process only starts the tasks of this machine."""
    has_task = self.task is not None or not self.spec.is_distributed
    return not has_task and not self.dry_run

  @property
  def only_serves(self) -> bool:
    """Whether this task only executes what other tasks ask it to.

    True for parameter servers, and for the workers of in-graph replication.
    Such a task does not build a model, and reads no data on its own.
    """
    if self.task is None or not self.spec.is_distributed:
      return False
    return self.task.job == "ps" or (
      self.is_in_graph and self.task.job == "worker"
    )

  @property
  def replicas(self) -> tuple[cluster.Task, ...]:
    """The tasks that compute gradients."""
    if self.is_in_graph:
      return self.spec.tasks("worker")
    return self.spec.replicas

  @property
  def devices_per_tower(self) -> int:
    """Number of devices over which the layers of one tower are spread.

    A tower is one copy of the model. The section `layers` of the cluster spec
    says which layers are on which device. Without it, the number is 1.
    """
    return 1 + max(self.spec.layers.values(), default=0)

  @property
  def num_towers(self) -> int:
    """Number of towers (copies of the model) of all replicas together."""
    gpus = [len(self.spec.gpus(r) or ()) for r in self.replicas]
    return sum(max(1, n // self.devices_per_tower) for n in gpus)

  def place_layers(self, model: keras.Model) -> model_parallel.LayerPlacement:
    """Places the model's layers on devices, as the spec's `layers` says.

    If there are several devices, the method `call` of each layer is replaced by
    one that runs on the layer's device.

    Args:
      model: The model, which must be built.

    Returns:
      Which layer is on which device.

    Raises:
      cluster.ClusterError: If the model is not built, a name pattern in
        `layers` decides the device of no layer, or a device has no layer.
    """
    from tf_replicas.replica import model_parallel

    try:
      return model_parallel.place_layers(model, self.spec.layers)
    except ValueError as error:
      raise cluster.ClusterError(str(error)) from None

  @property
  def replicas_to_aggregate(self) -> int:
    """Number of contributions in one update.

    A contribution is what one replica sends for one update, such as a gradient.
    """
    return update_options.replicas_to_aggregate(self.update, len(self.replicas))

  @property
  def used_share(self) -> float:
    """Fraction of the contributions of all replicas that updates use.

    A contribution is what one replica sends for one update, such as a gradient.
    The fraction is below 1 only if there are backup replicas: if a synchronous
    update waits for fewer contributions than there are replicas. Then the
    slowest contributions are refused.
    """
    if not self.update.waits_for_several:
      return 1.0
    return min(1.0, self.replicas_to_aggregate / len(self.replicas))

  def effective_batch(self, batch_size: int) -> int:
    """Computes the number of examples in one update of the shared variables.

    Args:
      batch_size: Number of examples in the batch of one tower, a copy of the
        model.

    Returns:
      The number of examples in all contributions to the update.
    """
    if self.spec.variables.on != "ps":
      return self.num_towers * batch_size
    per_replica = self.num_towers * batch_size // len(self.replicas)
    return self.replicas_to_aggregate * self.update.local_steps * per_replica

  def optimizer_steps(self, batch_size: int) -> list[OptimizerStep]:
    """Lists the kinds of optimizer steps that use the learning rate.

    Args:
      batch_size: Number of examples in the batch of one tower, a copy of the
        model.

    Returns:
      The kinds of steps, one for each update rule of the training; two if it
      switches rules. With several replicas, the rule "accumulated_gradients"
      has two kinds: it applies each gradient to the replica's own copy of the
      variables, and the mean of accumulated gradients to the shared variables.
    """
    number = len(self.replicas)
    if self.spec.variables.on != "ps":
      return [OptimizerStep("updates", self.num_towers * batch_size)]
    per_replica = self.num_towers * batch_size // number
    steps = []
    for update in update_options.phases(self.update):
      staleness = update_options.expected_staleness(update, number)
      if update.is_periodic:
        steps.append(OptimizerStep(f"local steps of {update}", per_replica))
        if not staleness:
          continue
      count = update_options.replicas_to_aggregate(update, number)
      count *= update.local_steps
      steps.append(
        OptimizerStep(f"{update} updates", count * per_replica, staleness)
      )
    return steps

  @property
  def threads(self) -> int:
    """Number of threads that one op may use.

    It is `intra_op_threads` or, if that is None, the number of cores of this
    machine divided by the number of replicas on it, at least 1.
    """
    if self.intra_op_threads:
      return self.intra_op_threads
    local = [t for t in self.spec.local_tasks() if t in self.replicas]
    return max(1, (os.cpu_count() or 1) // max(1, len(local)))


@dataclasses.dataclass(frozen=True)
class Workload:
  """Describes what is trained, by functions that build it.

  The functions are called after TensorFlow has connected to the cluster, since
  models built earlier cannot be used. A tower is a copy of the model.

  Attributes:
    replica_fn: Maps the devices of the towers to the replica, which holds the
      model and the data.
    optimizer_fn: Makes the update rule with this workload's optimizer. Its
      argument is the result of `update_options.rule_fn`.
    learning_rate_fn: Maps the number of examples seen to the learning rate of
      the next update; None leaves the rate to the optimizer.
    batch_size: Number of examples in one tower's batch.
    max_steps: The global step to stop at. None: the training stops after
      `max_examples`.
    max_examples: Number of examples to stop after if `max_steps` is None.
      Examples of earlier runs, from whose checkpoint this run resumes, count
      too.
    on_start: Called by the chief after all checks, before the first update.
    initialize: Called by the chief with its parameter store in a new training,
      to give the variables other initial values; None keeps those of the model.
    rate_note: A log line that says which learning rate is used, and why.
    divergence_advice: A line that says what to change if the loss diverges.
    summary_fn: Called by the chief before the first update, if histograms are
      asked for. It returns a function that maps the values of the trainable
      variables, by path, to a `Summary` to write. None: there are none.
  """

  replica_fn: Callable[[Sequence[str]], model_replica.Replica]
  optimizer_fn: Callable[[update_options.RuleFn], rule_base.UpdateRule]
  learning_rate_fn: Callable[[int], float] | None
  batch_size: int
  max_steps: int | None = None
  max_examples: int = 0
  on_start: Callable[[], None] = lambda: None
  initialize: Callable[[checkpoints.Checkpointable], None] | None = None
  rate_note: str = ""
  divergence_advice: str = ""
  summary_fn: Callable[[], Callable[[Mapping], Summary]] | None = None

  def last_step(self, options: Options, *, step: int = 0, seen: int = 0) -> int:
    """Computes the global step to stop at.

    It is `max_steps` or, if that is None, the step at which `max_examples`
    examples have been seen.

    Args:
      options: How the training is run.
      step: The global step so far.
      seen: Number of examples seen so far.
    """
    if self.max_steps is not None:
      return self.max_steps
    left = max(0, self.max_examples - seen)
    return step + math.ceil(left / options.effective_batch(self.batch_size))


class Summary(NamedTuple):
  """What a workload adds to a summary for TensorBoard.

  Attributes:
    scalars: Numbers by name.
    histograms: Values by name, of any shape.
    images: Pictures by name, uint8 `[height, width, channels]`.
  """

  scalars: dict[str, float]
  histograms: dict[str, np.ndarray]
  images: dict[str, np.ndarray]


class Outcome(NamedTuple):
  """The state of a training at its end.

  Attributes:
    global_step: The global step reached.
    loss: The loss of the last update; None if this process made no update.
  """

  global_step: int
  loss: float | None


def check_length(
  options: Options, batch_size: int, max_steps: int | None
) -> None:
  """Checks that the batch size and the length of a training fit its options.

  Args:
    options: How the training is run.
    batch_size: Number of examples in the batch of one tower, a copy of the
      model.
    max_steps: Number of updates to make; None if the length of the training is
      given as a number of examples.

  Raises:
    cluster.ClusterError: If `micro_batches` does not divide the batch size, or
      if `max_steps` is None in a training that switches update rules.
  """
  if batch_size % options.micro_batches:
    raise cluster.ClusterError(
      f"`--micro_batches` must divide the batch of {batch_size}. Received:"
      f" {options.micro_batches}."
    )
  if options.update.then_update and max_steps is None:
    raise cluster.ClusterError(
      "`--then_update` needs `--max_steps`, since the updates of two rules have"
      f" different numbers of examples. Received: --update={options.update}."
    )


def one_machine_spec(num_gpus: int) -> cluster.ClusterSpec:
  """Makes the cluster spec of one process, with a model on each of its GPUs.

  Args:
    num_gpus: Number of GPUs. Both 0 and 1 give one copy of the model: on the
      first GPU, or on the CPU if the machine has no GPU.

  Returns:
    The cluster spec.

  Raises:
    cluster.ClusterError: If `num_gpus` is negative.
  """
  if num_gpus < 0:
    raise cluster.ClusterError(
      f"`num_gpus` must not be negative. Received: {num_gpus}."
    )
  devices = {"worker": {"gpus": list(range(num_gpus))}} if num_gpus else {}
  return cluster.parse({"cluster": {}, "devices": devices})


def choose_task(
  cluster_spec: str | None,
  job_name: str | None,
  task_index: int | None,
  environ: dict[str, str],
  max_workers: int | None = None,
) -> tuple[cluster.ClusterSpec, cluster.Task | None]:
  """Finds the cluster, and the task that this process is, from flags.

  Args:
    cluster_spec: Path of a cluster-spec JSON; None takes the cluster from the
      environment variables.
    job_name: The job of this process. None takes the task from the environment
      variables. If they name no task either, this process is the launcher,
      which starts all tasks.
    task_index: Index of this task in its job.
    environ: The environment variables, in which `cluster.environment` looks for
      the cluster, the task and further settings.
    max_workers: The largest number of workers, if workers that the cluster spec
      does not list may join the training; None if none may join.

  Returns:
    The cluster spec; and the task, or None if this process is the launcher.

  Raises:
    cluster.ClusterError: If flags or environment variables are invalid.
  """
  found = None
  if cluster_spec is None or job_name is None:
    found = environment.role(environ)
  if cluster_spec is not None:
    spec = environment.settle(cluster.load(cluster_spec), environ)
  elif found is not None:
    spec, _ = found
  else:
    raise cluster.ClusterError(
      "`--cluster_spec` must name a cluster-spec JSON unless TF_CONFIG is set"
      " or `srun` has started several processes. Received: None."
    )
  spec = spec.admit(max_workers)
  if job_name is not None:
    task = cluster.task_from_flags(spec, job_name, task_index)
    return spec.with_joined(task), task
  if task_index is not None:
    raise cluster.ClusterError(
      f"`--task_index` needs `--job_name`. Received: {task_index}."
    )
  if found is None:
    return spec, None
  task = cluster.task_from_flags(spec, found[1].job, found[1].index)
  return spec.with_joined(task), task


def _check(options: Options) -> None:
  """Raises ClusterError if no training can run with the options."""
  spec = options.spec
  where = spec.where
  if options.task is not None and options.task.job == "evaluator":
    raise cluster.ClusterError(
      "an evaluator takes no part in training; run the evaluation binary there."
      f" Received: task {options.task}."
    )
  if os.path.isfile(options.train_dir):
    raise cluster.ClusterError(
      f"`--train_dir` must be a directory. Received: {options.train_dir}, a"
      " file."
    )
  if spec.is_distributed and spec.variables.on in ("cpu", "gpu"):
    raise cluster.ClusterError(
      f"{where}`variables.on` must be 'ps' or 'mirrored' for a cluster; 'cpu'"
      f" and 'gpu' are for one process. Received: '{spec.variables.on}'."
    )
  if spec.variables.on == "gpu" and not spec.gpus(spec.chief):
    raise cluster.ClusterError(
      f"{where}`variables.on` must not be 'gpu' unless `devices` gives the"
      " process a GPU. Received: 'gpu'."
    )
  if options.is_in_graph:
    _check_in_graph(options, where)
  update_options.check(options.update, len(options.replicas))
  if spec.max_workers:
    _check_joining(options, where)
  _check_layers(options, where)
  _check_equal_towers(options, where)
  if spec.variables.on != "ps":
    _check_all_take_part(options, where)
  if options.is_mirrored:
    _check_mirrored(options, where)


def _check_in_graph(options: Options, where: str) -> None:
  """Checks the cluster of a training in which one client drives all workers.

  Args:
    options: The options to check.
    where: Beginning of the error messages: the source of the cluster spec.

  Raises:
    cluster.ClusterError: If there are no workers, the tasks are started one by
      one without a `chief` task for the client, or the chief has GPUs.
  """
  spec = options.spec
  if not spec.num_tasks("worker"):
    raise cluster.ClusterError(
      f"{where}in-graph replication needs at least one worker. Received: none."
    )
  chief = cluster.Task("chief", 0)
  has_chief = chief in spec.tasks()
  if options.task is not None and not has_chief:
    raise cluster.ClusterError(
      f"{where}in-graph replication, started task by task, needs a chief: the"
      " client that drives the workers and does not train. Received: none."
    )
  if has_chief and spec.gpus(chief):
    raise cluster.ClusterError(
      f"{where}`devices.chief.gpus` must be [] with --replication=in_graph,"
      " whose chief drives the workers and does not train. Received:"
      f" {list(spec.gpus(chief))}."
    )


def _check_layers(options: Options, where: str) -> None:
  """Checks that the GPUs of each replica suffice for whole towers.

  A tower is a copy of the model. The section `layers` of the cluster spec may
  spread its layers over N devices.

  Args:
    options: The options to check.
    where: Beginning of the error messages: the source of the cluster spec.

  Raises:
    cluster.ClusterError: If N is more than 1, and the number of a replica's
      GPUs is not a positive multiple of N.
  """
  needed = options.devices_per_tower
  for replica in options.replicas:
    gpus = options.spec.gpus(replica) or ()
    if needed > 1 and (not gpus or len(gpus) % needed):
      raise cluster.ClusterError(
        f"{where}`layers` spreads a tower over {needed} devices, so `devices`"
        f" of {replica} must name a multiple of {needed} GPUs. Received:"
        f" {list(gpus)}."
      )


def _check_equal_towers(options: Options, where: str) -> None:
  """Raises ClusterError unless every replica has the same number of GPUs.

  Otherwise the gradients that the replicas send would be means of different
  numbers of examples.

  Args:
    options: The options to check.
    where: Beginning of the error message: the source of the cluster spec.
  """
  sizes = {str(t): len(options.spec.gpus(t) or ()) for t in options.replicas}
  if len({max(1, size) for size in sizes.values()}) > 1:
    numbers = ", ".join(f"{n} of {task}" for task, n in sizes.items())
    raise cluster.ClusterError(
      f"{where}`devices` must name equally many GPUs for every worker, so that"
      f" the gradients of all workers weigh the same. Received: {numbers}."
    )


def _check_joining(options: Options, where: str) -> None:
  """Raises ClusterError if the options do not let further workers join.

  These are in-graph replication, mirrored variables, and updates that wait for
  more workers than the cluster spec lists.

  Args:
    options: The options to check.
    where: Beginning of the error message: the source of the cluster spec.
  """
  if options.is_in_graph or options.is_mirrored:
    kind = "in_graph" if options.is_in_graph else "mirrored variables"
    raise cluster.ClusterError(
      f"{where}`--max_workers` needs `--replication=between_graph` and"
      " variables on parameter servers: TensorFlow cannot add workers to"
      f" {kind}."
      f" Received: {options.spec.max_workers}."
    )
  listed = len(options.replicas) - len(options.spec.joining)
  update_options.check_joining(options.update, listed, len(options.replicas))


def _check_all_take_part(options: Options, where: str) -> None:
  """Raises ClusterError if an option needs parameter servers.

  Called if there are none. Then every update uses every replica.

  Args:
    options: The options to check.
    where: Beginning of the error message: the source of the cluster spec.
  """
  if options.timeline:
    raise cluster.ClusterError(
      f"{where}`--timeline` needs variables on parameter servers. Received:"
      f" variables on {options.spec.variables.on}."
    )
  number = len(options.replicas)
  if update_options.needs_parameter_servers(options.update):
    raise cluster.ClusterError(
      f"{where}`--update`, `--wire_dtype` and their settings need variables on"
      " parameter servers. Received: variables on"
      f" {options.spec.variables.on}."
    )
  if options.replicas_to_aggregate != number:
    raise cluster.ClusterError(
      f"{where}`--replicas_to_aggregate` needs variables on parameter servers;"
      f" without them, every update uses every replica, {number} in all."
      f" Received: {options.update.replicas_to_aggregate}."
    )


def _check_mirrored(options: Options, where: str) -> None:
  spec = options.spec
  if options.is_in_graph:
    raise cluster.ClusterError(
      f"{where}mirrored variables on several workers need"
      " `--replication=between_graph`. Received: in_graph."
    )
  if spec.layers:
    raise cluster.ClusterError(
      f"{where}`layers` must be absent with mirrored variables, where every"
      f" device has all layers. Received: {', '.join(spec.layers)}."
    )
  if len(spec.replicas) == 1:
    return
  num_gpus = max(len(spec.gpus(t) or ()) for t in spec.replicas)
  if options.emulate_gpus and num_gpus > 1:
    raise cluster.ClusterError(
      f"{where}with mirrored variables, `--emulate_gpus` supports at most one"
      f" GPU per worker. Received: {num_gpus} GPUs."
    )


def describe_cluster(spec: cluster.ClusterSpec) -> str:
  """Lists the tasks of a cluster with their addresses, in one line."""
  tasks = [f"{task} at {spec.address(task)}" for task in spec.tasks()]
  return f"cluster: {', '.join(tasks)}"


def describe_updates(
  replication: str,
  update: update_options.UpdateSettings,
  num_replicas: int,
  *,
  num_towers: int,
  batch_size: int | None,
) -> str:
  """Returns a line about the numbers of replicas and towers, and the updates.

  A tower is a copy of the model. A contribution is what one replica sends for
  one update, such as a gradient.

  Args:
    replication: Kind of replication, such as "between_graph".
    update: The update rule.
    num_replicas: Number of replicas.
    num_towers: Number of towers of one replica.
    batch_size: Number of examples in one tower's batch; None leaves it out.

  Returns:
    A line such as "replication: between_graph; 2 replicas with 1 tower of batch
    16 each; sync updates of 2 contributions".
  """
  count = update_options.replicas_to_aggregate(update, num_replicas)
  batch = "" if batch_size is None else f" of batch {batch_size}"
  return (
    f"replication: {replication}; {num_replicas}"
    f" replica{'s' if num_replicas > 1 else ''} with {num_towers}"
    f" tower{'s' if num_towers > 1 else ''}{batch}"
    f"{' each' if num_replicas > 1 else ''}; {update} updates of {count}"
    f" contribution{'s' if count > 1 else ''}"
  )


def describe(options: Options, workload: Workload) -> str:
  """Describes a training's replicas, batch size and learning rate for the log.

  Args:
    options: How the training is run.
    workload: What is trained.

  Returns:
    One or more lines to print, joined by line breaks.
  """
  lines = [_describe_replicas(options, workload), workload.rate_note]
  return "\n".join(line for line in lines if line)


def _describe_replicas(options: Options, workload: Workload) -> str:
  """Returns a log line about replicas, batches, and examples per update."""
  number = options.num_towers
  effective = f"effective batch {options.effective_batch(workload.batch_size)}"
  if options.is_mirrored or not options.spec.is_distributed:
    on, name = ("mirrored", "replica")
    if not options.is_mirrored:
      on, name = (f"on {options.spec.variables.on}", "tower")
    where = "one process"
    if options.spec.is_distributed:
      where = f"replication: {options.replication}"
    return (
      f"{where}, variables {on}: updates from {number} {name}"
      f"{'s' if number > 1 else ''} of batch {workload.batch_size}: {effective}"
    )
  line = describe_updates(
    options.replication,
    options.update,
    len(options.replicas),
    num_towers=number // len(options.replicas),
    batch_size=workload.batch_size,
  )
  return f"{line}: {effective}"
