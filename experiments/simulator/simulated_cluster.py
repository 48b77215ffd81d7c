"""Defines the input and output of a simulation: cluster, rule and result."""

import dataclasses
import math
from collections.abc import Mapping

import numpy as np

from experiments.simulator import compute_times


@dataclasses.dataclass(frozen=True)
class Cluster:
  """Describes a simulated cluster: replicas, parameter servers, and links.

  The PS tasks (parameter servers) hold equal shares of the parameters. So the
  simulator treats them as one PS whose link has the bandwidth of all of them
  together.

  Attributes:
    num_replicas: M, the number of replicas.
    compute: The distribution of the seconds of one batch on one replica.
    slowdown: Maps the index of a replica to the factor by which its compute
      times are multiplied. The factor of all other replicas is 1.
    num_ps: The number of PS tasks that share the parameters.
    read_bytes: The bytes that a replica reads per step, from all PS tasks
      together.
    gradient_bytes: The bytes that a replica hands over per contribution; None:
      `read_bytes`.
    latency: Seconds from a replica to a PS task or back, one way.
    replica_bandwidth: The bandwidth of a replica's link, bytes/s in either
      direction.
    ps_bandwidth: The bandwidth of one PS task's link, bytes/s in either
      direction.
    apply_secs: The seconds of one update on the PS tasks.
    cores: The number of batches that can be computed at full speed at the same
      time, if the replicas share a machine.
  """

  num_replicas: int
  compute: compute_times.Distribution
  slowdown: Mapping[int, float] = dataclasses.field(default_factory=dict)
  num_ps: int = 1
  read_bytes: float = 0.0
  gradient_bytes: float | None = None
  latency: float = 0.0
  replica_bandwidth: float = math.inf
  ps_bandwidth: float = math.inf
  apply_secs: float = 0.0
  cores: float = math.inf

  def __post_init__(self):
    for name in ("num_replicas", "num_ps"):
      if getattr(self, name) < 1:
        raise ValueError(
          f"`{name}` must be at least 1. Received: {getattr(self, name)}."
        )
    for name in ("replica_bandwidth", "ps_bandwidth", "cores"):
      if not getattr(self, name) > 0:
        raise ValueError(
          f"`{name}` must be positive. Received: {getattr(self, name)}."
        )
    for name in ("read_bytes", "latency", "apply_secs"):
      if not getattr(self, name) >= 0:
        raise ValueError(
          f"`{name}` must not be negative. Received: {getattr(self, name)}."
        )
    for replica in self.slowdown:
      if not 0 <= replica < self.num_replicas:
        raise ValueError(
          f"`slowdown` must name replicas below {self.num_replicas}."
          f" Received: {replica}."
        )

  @property
  def handed_over_bytes(self) -> float:
    """Bytes that a replica hands over per contribution (set of gradients)."""
    given = self.gradient_bytes
    return self.read_bytes if given is None else given

  @property
  def total_bandwidth(self) -> float:
    """Bandwidth of all PS tasks together, bytes/s in either direction."""
    return self.ps_bandwidth * self.num_ps

  def draws(self, seed: int) -> compute_times.Draws:
    """Returns the source of the random compute times of all replicas.

    Args:
      seed: The seed of the times.
    """
    return compute_times.Draws(
      self.compute, self.num_replicas, seed, self.slowdown
    )


@dataclasses.dataclass(frozen=True)
class Sync:
  """Synchronous update rule: an update is the mean of N gradients of one step.

  All of these gradients are computed from the variables that the update
  changes.

  Attributes:
    replicas_to_aggregate: N; None: all M replicas. If N is less than M, the
      other replicas are backup replicas (Chen et al. 2016, section 2.2).
    restarts_late: Whether a replica abandons the batch that it computes when a
      step ends, as in K-sync of Dutta et al. 2018, section 2. A training
      program cannot easily do this, but order statistics describe it.
  """

  replicas_to_aggregate: int | None = None
  restarts_late: bool = False


@dataclasses.dataclass(frozen=True)
class Async:
  """Asynchronous update rule: gradients are applied as soon as they arrive.

  Attributes:
    gradients_per_update: The number of gradients in an update. M / n gradients,
      with M replicas, give n-softsync (Zhang et al. 2015, section 3).
    max_lead: By how many batches a replica may be ahead of the slowest one,
      which is bounded staleness (Ho et al. 2013, section 2). None: no bound.
    max_staleness: Gradients that are staler than this number of updates are
      dropped, and not sent. None: no gradient is dropped.
  """

  gradients_per_update: int = 1
  max_lead: int | None = None
  max_staleness: int | None = None


@dataclasses.dataclass(frozen=True)
class Event:
  """What a task did from `start` to `end`; a line of a timeline file.

  Attributes:
    task: The task, such as `worker:0`.
    step: The global step to which the event belongs, as far as the task knows.
    kind: One of `KINDS`, such as `read` or `compute`.
    start: Seconds, on a clock that all tasks share.
    end: Seconds, on this clock.
  """

  task: str
  step: int
  kind: str
  start: float
  end: float


KINDS = ("read", "compute", "hand_over", "wait", "apply", "refused")


@dataclasses.dataclass
class Result:
  """Result of a simulation of M replicas until the last of S updates.

  A contribution is the gradients that a replica computed from one batch.

  Attributes:
    step_ends: float64 [S], the time in seconds at which each update was done.
    applied: int64 [M], the contributions of each replica that were used.
    surplus: int64 [M], the contributions that were in time but not needed.
    late: int64 [M], the contributions that were refused or dropped because they
      were stale, or given up unfinished.
    staleness: int64 [A], for each of the A applied contributions, in order, the
      number of updates between the read of the variables and the update.
    compute_secs: float64 [M], the seconds spent on batches, used or not.
    wait_secs: float64 [M], the seconds between a computation and the release,
      less the time in which gradients were handed over.
    read_bytes: float64 [M], the bytes from the PS tasks to each replica.
    sent_bytes: float64 [M], the bytes from each replica to the PS tasks.
    events: What each task did; empty unless recorded.
  """

  step_ends: np.ndarray
  applied: np.ndarray
  surplus: np.ndarray
  late: np.ndarray
  staleness: np.ndarray
  compute_secs: np.ndarray
  wait_secs: np.ndarray
  read_bytes: np.ndarray
  sent_bytes: np.ndarray
  events: list[Event] = dataclasses.field(default_factory=list)

  @property
  def step_secs(self) -> np.ndarray:
    """Seconds that each step took: float64 [S] for S steps."""
    return np.diff(self.step_ends, prepend=0.0)

  @property
  def throughput(self) -> float:
    """Number of contributions (sets of gradients) applied per second."""
    return float(self.applied.sum() / self.step_ends[-1])

  def ps_link_bytes(self, num_ps: int) -> tuple[float, float]:
    """Returns the bytes that each of `num_ps` PS tasks sent, and received."""
    return self.read_bytes.sum() / num_ps, self.sent_bytes.sum() / num_ps


def empty_result(num_replicas: int) -> Result:
  """Returns a result whose counts are all zero, to begin a simulation with."""
  whole = {
    name: np.zeros([num_replicas], np.int64)
    for name in ("applied", "surplus", "late")
  }
  secs = {
    name: np.zeros([num_replicas])
    for name in ("compute_secs", "wait_secs", "read_bytes", "sent_bytes")
  }
  return Result(
    step_ends=np.zeros([0]), staleness=np.zeros([0], np.int64), **whole, **secs
  )
