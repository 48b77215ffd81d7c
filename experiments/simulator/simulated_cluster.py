"""What is simulated and what comes out: a cluster, a rule, a result."""

import dataclasses
import math
from collections.abc import Mapping

import numpy as np

from experiments.simulator import compute_times


@dataclasses.dataclass(frozen=True)
class Cluster:
  """Replicas, parameter servers and what is between them.

  The PS tasks hold equal shares of the parameters and behave alike, so that
  they are one PS whose links are as wide as theirs together.

  Attributes:
    num_replicas: M.
    compute: Seconds of one batch on one replica.
    slowdown: By what the compute times of a replica are multiplied; 1 if not
      given.
    num_ps: How many PS tasks share the parameters.
    read_bytes: What a replica reads per step, from all PS tasks together.
    gradient_bytes: What it hands over per contribution; as many if not given.
    latency: Seconds from a replica to a PS task or back, one way.
    replica_bandwidth: Of a replica's link, bytes/s in either direction.
    ps_bandwidth: Of one PS task's link, bytes/s in either direction.
    apply_secs: Of one update on the PS tasks.
    cores: How many batches can be computed at full speed at the same time,
      for replicas that share a machine.
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
    """Of one contribution."""
    given = self.gradient_bytes
    return self.read_bytes if given is None else given

  @property
  def total_bandwidth(self) -> float:
    """Of all PS tasks together, bytes/s in either direction."""
    return self.ps_bandwidth * self.num_ps

  def draws(self, seed: int) -> compute_times.Draws:
    """The compute times of all replicas."""
    return compute_times.Draws(
      self.compute, self.num_replicas, seed, self.slowdown
    )


@dataclasses.dataclass(frozen=True)
class Sync:
  """An update is the mean of N contributions computed from its very step.

  Attributes:
    replicas_to_aggregate: N; all replicas if not given. Less than M: the others
      are backup replicas (Chen et al. 2016, section 2.2).
    restarts_late: Whether replicas leave the batch they compute when a step
      ends, as in K-sync of Dutta et al. 2018, section 2. Not what a training
      program can do easily, but what order statistics describe.
  """

  replicas_to_aggregate: int | None = None
  restarts_late: bool = False


@dataclasses.dataclass(frozen=True)
class Async:
  """An update is made as soon as there are gradients for it.

  Attributes:
    gradients_per_update: How many make one. With M / n of them this is
      n-softsync (Zhang et al. 2015, section 3).
    max_lead: How many batches a replica may be ahead of the slowest, which is
      bounded staleness (Ho et al. 2013, section 2); any number if not given.
    max_staleness: Gradients staler than that are dropped, unsent; none is if
      not given.
  """

  gradients_per_update: int = 1
  max_lead: int | None = None
  max_staleness: int | None = None


@dataclasses.dataclass(frozen=True)
class Event:
  """What a task did from `start` to `end`; a line of a timeline.

  Attributes:
    task: Such as `worker:0`.
    step: The global step that it belongs to, as far as the task knows.
    kind: One of `KINDS`.
    start: Seconds, on a clock that all tasks share.
    end: Seconds.
  """

  task: str
  step: int
  kind: str
  start: float
  end: float


KINDS = ("read", "compute", "hand_over", "wait", "apply", "refused")


@dataclasses.dataclass
class Result:
  """What happened until the last of S updates; M replicas, seconds.

  Attributes:
    step_ends: float64 [S], when each update was done.
    applied: int64 [M], contributions that were used.
    surplus: int64 [M], those in time that were not needed.
    late: int64 [M], those refused or dropped because they were stale, or given
      up unfinished.
    staleness: int64 [A], updates between the read of an applied contribution
      and its own, in the order of application.
    compute_secs: float64 [M], spent on batches, in vain or not.
    wait_secs: float64 [M], from having computed until released, less the time
      in which gradients were handed over.
    read_bytes: float64 [M], from the PS tasks to each replica.
    sent_bytes: float64 [M], from each replica to the PS tasks.
    events: What each task did; empty unless asked for.
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
    """float64 [S], how long each step took."""
    return np.diff(self.step_ends, prepend=0.0)

  @property
  def throughput(self) -> float:
    """Applied contributions per second."""
    return float(self.applied.sum() / self.step_ends[-1])

  def ps_link_bytes(self, num_ps: int) -> tuple[float, float]:
    """Bytes that left and reached each of `num_ps` PS tasks."""
    return self.read_bytes.sum() / num_ps, self.sent_bytes.sum() / num_ps


def empty_result(num_replicas: int) -> Result:
  """All zeros, to be counted up."""
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
