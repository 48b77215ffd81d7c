"""What every training binary shares: how it runs, what it trains.

A binary turns its flags into `Options` and a `Workload` and hands them to
`launcher.run`. Nothing here needs TensorFlow.
"""

import dataclasses
import os
from collections.abc import Callable
from collections.abc import Sequence

from tf_replicas import cluster
from tf_replicas import update_settings

BETWEEN_GRAPH = "between_graph"
IN_GRAPH = "in_graph"

# What may happen on the way; anything else is a bug and deserves a traceback.
RUN_TIME_ERRORS = (
  RuntimeError,
  TimeoutError,
  FloatingPointError,
  OSError,
  KeyboardInterrupt,
)


@dataclasses.dataclass(frozen=True)
class Options:
  """How a training is run, whatever is trained.

  Attributes:
    spec: The cluster, or the devices of one process.
    task: Which task this process is; None starts all tasks of this machine, or
      trains here if the spec describes one process.
    train_dir: Where checkpoints, summaries and logs go.
    max_steps: The global step to stop at.
    max_examples: If given, how many examples to stop after, instead: what was
      trained before with another effective batch counts in full.
    replication: `between_graph` or `in_graph`.
    replicas_to_aggregate: Contributions in one update that waits for several;
      None: of all replicas.
    log_every_steps: Steps between log lines.
    summary_every_steps: Steps between TensorBoard points.
    histograms: Whether TensorBoard gets histograms of the variables too.
    checkpoint_every_steps: Steps between checkpoints; None: by time alone.
    checkpoint_every_secs: Seconds between checkpoints.
    keep_checkpoints: How many of the newest checkpoints stay.
    start_timeout_secs: How long tasks wait for each other at the start.
    lost_after_secs: Silence after which a worker's place goes to another.
    intra_op_threads: Threads of one op; None: the cores of this machine,
      divided by the replicas that run on it.
    emulate_gpus: Whether logical CPU devices stand in for the spec's GPUs.
    update: The update rule.
    timeline: Whether every replica records what it does when, in `train_dir`
      of its own machine.
  """

  spec: cluster.ClusterSpec
  task: cluster.Task | None
  train_dir: str
  max_steps: int
  replication: str = BETWEEN_GRAPH
  replicas_to_aggregate: int | None = None
  log_every_steps: int = 10
  summary_every_steps: int = 100
  histograms: bool = False
  checkpoint_every_steps: int | None = None
  checkpoint_every_secs: float = 600.0
  keep_checkpoints: int = 5
  start_timeout_secs: float = 120.0
  lost_after_secs: float = 20.0
  intra_op_threads: int | None = None
  emulate_gpus: bool = False
  max_examples: int | None = None
  update: update_settings.UpdateSettings = update_settings.UpdateSettings()
  timeline: bool = False

  @property
  def is_in_graph(self) -> bool:
    """Whether one client drives all workers of a cluster."""
    return self.spec.is_distributed and self.replication == IN_GRAPH

  @property
  def is_mirrored(self) -> bool:
    """Whether every device has a copy of the variables."""
    return self.spec.variables.on == "mirrored"

  @property
  def only_serves(self) -> bool:
    """Whether this process is a task that others drive, and needs no data."""
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
    """Over how many devices the spec's `layers` spreads a tower."""
    return 1 + max(self.spec.layers.values(), default=0)

  @property
  def num_towers(self) -> int:
    """Towers of all replicas; with `layers` one tower has several devices."""
    gpus = [len(self.spec.gpus(r) or ()) for r in self.replicas]
    return sum(max(1, n // self.devices_per_tower) for n in gpus)

  @property
  def aggregated(self) -> int:
    """N, the contributions in one update."""
    if not self.update.is_of_several:
      return self.update.gradients_per_update(len(self.replicas))
    return self.replicas_to_aggregate or len(self.replicas)

  @property
  def used_share(self) -> float:
    """How much of what the replicas compute is used; less than 1: backups."""
    if not self.update.is_of_several:
      return 1.0
    return min(1.0, self.aggregated / len(self.replicas))

  def effective_batch(self, batch_size: int) -> int:
    """Examples in one update, from those of one tower's batch."""
    if self.spec.variables.on != "ps":
      return self.num_towers * batch_size
    per_replica = self.num_towers * batch_size // len(self.replicas)
    return self.aggregated * self.update.local_steps * per_replica

  @property
  def threads(self) -> int:
    """Threads of one op, given or derived."""
    if self.intra_op_threads:
      return self.intra_op_threads
    local = [t for t in self.spec.local_tasks() if t in self.replicas]
    return max(1, (os.cpu_count() or 1) // max(1, len(local)))


@dataclasses.dataclass(frozen=True)
class Workload:
  """What is trained; functions, since TensorFlow must be connected first.

  Attributes:
    replica_fn: Maps the tower devices to a `towers.Replica`.
    optimizer_fn: Maps what makes the update rule (`update_settings.rule_fn`) to
      the rule around this workload's optimizer.
    learning_rate_fn: Maps the examples seen to the rate of the next update;
      None leaves the rate to the optimizer.
    batch_size: Examples of one tower's batch, for the summary at the start.
    on_start: Called by the chief, once nothing can be refused any more.
    initialize: Gives a new training's variables, a `checkpoints.Checkpointable`
      that the chief calls it with, other values.
  """

  replica_fn: Callable[[Sequence[str]], object]
  optimizer_fn: Callable[[Callable[..., object]], object]
  learning_rate_fn: Callable[[int], float] | None
  batch_size: int
  on_start: Callable[[], None] = lambda: None
  initialize: Callable[[object], None] | None = None


def one_machine_spec(num_gpus: int) -> cluster.ClusterSpec:
  """The spec of one process with a tower on each of GPUs 0 to N - 1.

  Args:
    num_gpus: N. Of 0 and 1 both mean one device: the first GPU, or the CPU of
      a machine without.

  Raises:
    cluster.ClusterError: If it is negative.
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
) -> tuple[cluster.ClusterSpec, cluster.Task | None]:
  """The cluster, and which of its tasks this process is, from flags.

  Args:
    cluster_spec: Path of a cluster-spec JSON; None takes `TF_CONFIG`.
    job_name: The job of this task; None takes `TF_CONFIG`, and without it this
      process starts all tasks.
    task_index: The index of this task.
    environ: The environment.

  Raises:
    cluster.ClusterError: For any mistake in them.
  """
  found = cluster.from_tf_config(environ)
  if cluster_spec is None and found is None:
    raise cluster.ClusterError(
      "`--cluster_spec` must name a cluster-spec JSON unless TF_CONFIG is set."
      " Received: None."
    )
  spec = found[0] if cluster_spec is None else cluster.load(cluster_spec)
  if job_name is not None:
    return spec, cluster.task_from_flags(spec, job_name, task_index)
  if task_index is not None:
    raise cluster.ClusterError(
      f"`--task_index` needs `--job_name`. Received: {task_index}."
    )
  if found is None:
    return spec, None
  return spec, cluster.task_from_flags(spec, found[1].job, found[1].index)


def check(options: Options) -> None:
  """Refuses what cannot run, before anything is started.

  Raises:
    cluster.ClusterError: With the reason.
  """
  spec = options.spec
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
  where = spec.where
  if spec.is_distributed and spec.variables.on == "cpu":
    raise cluster.ClusterError(
      f"{where}`variables.on` must be 'ps' or 'mirrored' for a cluster; 'cpu'"
      " is for one process. Received: 'cpu'."
    )
  if options.replication not in (BETWEEN_GRAPH, IN_GRAPH):
    raise cluster.ClusterError(
      "`--replication` must be between_graph or in_graph. Received:"
      f" {options.replication!r}."
    )
  if options.is_in_graph and not spec.num_tasks("worker"):
    raise cluster.ClusterError(
      f"{where}in-graph replication needs at least one worker. Received: none."
    )
  has_chief = bool(spec.num_tasks("chief"))
  if options.is_in_graph and options.task is not None and not has_chief:
    raise cluster.ClusterError(
      f"{where}in-graph replication, started task by task, needs a chief: the"
      " client that drives the workers and does not train. Received: none."
    )
  update_settings.check(
    options.update, len(options.replicas), options.replicas_to_aggregate
  )
  if options.update.then_update and options.max_examples is not None:
    raise cluster.ClusterError(
      f"{where}`--then_update` needs `--max_steps`, since the updates of two"
      " rules have different numbers of examples. Received:"
      f" {options.max_examples} examples."
    )
  _check_layers(options, where)
  _check_equal_towers(options, where)
  if spec.variables.on != "ps":
    _check_all_take_part(options, where)
  if options.is_mirrored:
    _check_mirrored(options, where)


def _check_layers(options: Options, where: str) -> None:
  """Every tower needs as many devices as the layers are spread over."""
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
  """Every contribution is the mean of as many examples as every other."""
  sizes = {str(t): len(options.spec.gpus(t) or ()) for t in options.replicas}
  if len({max(1, size) for size in sizes.values()}) > 1:
    numbers = ", ".join(f"{n} of {task}" for task, n in sizes.items())
    raise cluster.ClusterError(
      f"{where}`devices` must name as many GPUs for every worker, so that all"
      f" contributions weigh the same. Received: {numbers}."
    )


def _check_all_take_part(options: Options, where: str) -> None:
  """Without parameter servers no update can do without a replica."""
  if options.timeline:
    raise cluster.ClusterError(
      f"{where}`--timeline` needs variables on parameter servers. Received:"
      f" variables on {options.spec.variables.on}."
    )
  if options.update != update_settings.UpdateSettings():
    raise cluster.ClusterError(
      f"{where}`--update`, `--wire_dtype` and what belongs to them need"
      " variables on parameter servers. Received: variables on"
      f" {options.spec.variables.on}."
    )
  given, number = options.replicas_to_aggregate, len(options.replicas)
  if given not in (None, number):
    raise cluster.ClusterError(
      f"{where}`--replicas_to_aggregate` needs variables on parameter servers;"
      f" without them all replicas, {number}, make every update. Received:"
      f" {given}."
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
      f"{where}`layers` needs towers of several devices; a replica of mirrored"
      f" variables has one. Received: {', '.join(spec.layers)}."
    )
  if len(spec.replicas) == 1:
    return
  most = max(len(spec.gpus(t) or ()) for t in spec.replicas)
  if options.emulate_gpus and most > 1:
    raise cluster.ClusterError(
      f"{where}`--emulate_gpus` can stand in for one GPU of each worker where"
      f" variables are mirrored. Received: {most} GPUs."
    )


def describe(options: Options, workload: Workload) -> str:
  """The cluster, who trains, and the effective batch; for people."""
  spec, replicas = options.spec, options.replicas
  towers = options.num_towers
  if not spec.is_distributed:
    on = "mirrored" if options.is_mirrored else "on cpu"
    name = "replica" if options.is_mirrored else "tower"
    return (
      f"one process, variables {on}: updates from {towers} {name}"
      f"{'s' if towers > 1 else ''} of batch {workload.batch_size}: effective"
      f" batch {options.effective_batch(workload.batch_size)}"
    )
  lines = [
    f"cluster: {', '.join(f'{t} at {spec.address(t)}' for t in spec.tasks())}"
  ]
  if options.is_mirrored:
    lines.append(
      f"replication: {options.replication}, variables mirrored: updates from"
      f" {towers} replicas of batch {workload.batch_size}: effective batch"
      f" {options.effective_batch(workload.batch_size)}"
    )
    return "\n".join(lines)
  effective = options.effective_batch(workload.batch_size)
  lines.append(
    f"replication: {options.replication}; {options.update}"
    f" updates from {options.aggregated} of {len(replicas)} replicas with"
    f" {towers} towers of batch {workload.batch_size}: effective batch"
    f" {effective}"
  )
  return "\n".join(lines)
