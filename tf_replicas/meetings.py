"""How replicas with copies of their own meet: the kinds of periodic averaging.

Each kind holds an update rule of the shared variables, the *centre*, and says
what a replica hands over after a period of local steps, and what it goes on
from. `periodic_averaging` says what the kinds are for.
"""

from collections.abc import Callable
from typing import NamedTuple

import tensorflow as tf

from tf_replicas import async_replicas
from tf_replicas import elastic_exchange
from tf_replicas import gradient_queues
from tf_replicas import local_steps
from tf_replicas import parameter_store
from tf_replicas import releases
from tf_replicas import resources
from tf_replicas import sync_replicas
from tf_replicas import turns

# What `meet` returns: whether the period counted and the global step to go on
# from, the copy, and the centre where the kind needs that.
Met = tuple[releases.Release, list[tf.Tensor], list[tf.Tensor]]
# Maps a parameter and its position to what is added to its gradient.
PullBack = Callable[[tf.Tensor, int], tf.Tensor]


class State(NamedTuple):
  """What a replica carries from meeting to meeting.

  Attributes:
    parameters: Its copy, a tensor per variable that is contributed to: the
      trainable ones, then statistics.
    centre: The shared variables as it knows them, where the kind needs that;
      else nothing.
    slots: The local optimizer's.
  """

  parameters: list[tf.Tensor]
  centre: list[tf.Tensor]
  slots: list[tf.Tensor]


class Move:
  """The inner optimizer of a centre that goes where replicas say.

  In place of a gradient it takes how far the centre is from a replica's copy,
  or the mean of that over several, and goes `rate` times as far.
  """

  def __init__(self, rate: float):
    self.rate = rate

  def apply(self, distances, variables) -> None:
    for distance, variable in zip(distances, variables, strict=True):
      variable.assign_sub(self.rate * distance)


class Together:
  """All replicas meet at a time; the centre moves by the mean of distances.

  Attributes:
    rule: What makes it of the replicas' contributions.
    needs_centre: Whether a replica's copy differs from the centre after it.
    needs_totals: Whether `meet` needs the sums of gradients.
  """

  needs_totals = False

  def __init__(
    self,
    rule: sync_replicas.SyncReplicasOptimizer,
    moving_rate: float | None = None,
    rho: float = 0.0,
  ):
    """Puts the parts together.

    Args:
      rule: Around a `Move`.
      moving_rate: How far a copy moves towards the centre, as a share of the
        distance; None: it becomes the centre.
      rho: Of the force in between.
    """
    self.rule = rule
    self.needs_centre = moving_rate is not None
    self._moving_rate = moving_rate
    self._rho = rho

  def build(self, store: parameter_store.ParameterStore) -> None:
    """Says which variables this is about; after `rule.build`."""
    self._store = store

  def signature(self) -> list:
    """What every client must agree on about it."""
    return [self._moving_rate, self._rho]

  def pull_back(self, state: State) -> PullBack | None:
    """What is added to local gradients, if anything."""
    return _pull_back(self._rho, state)

  def meet(
    self,
    replica: int | tf.Tensor,
    state: State,
    local: local_steps.Local,
    *,
    step: tf.Tensor,
    ticket: tf.Tensor | None,
  ) -> Met:
    """Hands over how far the centre is from this copy.

    To be used inside a `tf.function`.

    Args:
      replica: Who comes.
      state: As it was before the period.
      local: What the period led to.
      step: int64 scalar, the global step of the centre as it was met last.
      ticket: That of the last release, unless -1.
    """
    centre = state.centre if self.needs_centre else state.parameters
    distances = _minus(centre, local.parameters)
    # Statistics are moved by what is said, and not by the inner optimizer.
    count, rate = len(self._store.trainable), self.rule.inner.optimizer.rate
    said = [*distances[:count], *(rate * d for d in distances[count:])]
    release = self.rule.apply_gradients(
      zip(said, _paths(self._store), strict=True),
      replica=replica,
      local_step=step,
      loss=local.loss,
      num_examples=local.num_examples,
      ticket=ticket,
    )
    admitted = release.admitted
    release, centre = turns.go_on(self._store, self.rule, replica, release)
    if not self.needs_centre:
      return release, centre, []
    # One that was refused did not move the centre, and is not moved by it.
    rate = tf.where(admitted > 0, self._moving_rate, 0.0)
    return release, _minus(local.parameters, distances, -rate), centre


class AtTheCentre:
  """Each replica meets the centre alone: an exchange of its own.

  Attributes: As for `Together`.
  """

  needs_totals = False

  def __init__(
    self,
    rule: async_replicas.AsyncReplicasOptimizer,
    moving_rate: float,
    rho: float,
  ):
    """As for `Together`; only the chief's half of the rule is used."""
    self.rule = rule
    self.needs_centre = rho > 0
    self._moving_rate = moving_rate
    self._rho = rho

  def build(self, store: parameter_store.ParameterStore) -> None:
    """As for `Together`."""
    self.rule.inner.build(store, is_chief=False)
    self._exchange = elastic_exchange.ElasticExchange(store, self.rule.update)
    self._device = store.device_of_task(0)

  def signature(self) -> list:
    """As for `Together`."""
    return [self._moving_rate, self._rho]

  def pull_back(self, state: State) -> PullBack | None:
    """As for `Together`."""
    return _pull_back(self._rho, state)

  def meet(self, replica, state, local, *, step, ticket) -> Met:
    """Asks, exchanges, and counts; as for `Together`."""
    del state, ticket
    parameters = local.parameters
    is_sound = tf.math.is_finite(local.loss)
    is_sound &= gradient_queues.all_finite(parameters)
    replica, step, is_sound, loss, num_examples = resources.land_scalars(
      self._device, replica, step, is_sound, local.loss, local.num_examples
    )
    admission = self.rule.applications.admit(replica, step, is_sound)
    asked = releases.now(admission.admitted)

    statistics_rate = self._moving_rate
    if self.rule.has_chief_statistics:
      statistics_rate *= tf.cast(replica == 0, tf.float32)

    def exchange():
      centre = self._exchange(parameters, admission.version, statistics_rate)
      with tf.control_dependencies(centre):
        now = self.rule.applications.finish(
          replica, admission.staleness, loss, num_examples
        )
      return [now, *centre]

    def stay():
      ended = tf.constant(releases.ENDED, tf.int64)
      now = tf.where(admission.has_ended, ended, admission.version)
      return [now, *map(tf.identity, parameters)]

    now, *centre = tf.cond(admission.admitted, exchange, stay)
    release = releases.Release(
      tf.cast(admission.admitted, tf.int64),
      now,
      tf.constant(-1, tf.int64),
      releases.pack_times(asked, *[releases.now(now)] * 3),
    )
    # Both go the same way towards where the other was.
    distances = _minus(centre, parameters)
    parameters = _minus(parameters, distances, -self._moving_rate)
    if not self.needs_centre:
      return release, parameters, []
    return release, parameters, _minus(centre, distances, self._moving_rate)


class Accumulated:
  """Each replica hands over the mean of its gradients, and begins anew.

  Attributes: As for `Together`.
  """

  needs_totals = True
  needs_centre = False

  def __init__(self, rule: async_replicas.AsyncReplicasOptimizer, period: int):
    """Puts the parts together.

    Args:
      rule: Applies the means.
      period: Of how many gradients each is the mean.
    """
    self.rule = rule
    self._period = period

  def build(self, store: parameter_store.ParameterStore) -> None:
    """As for `Together`."""
    self._store = store

  def signature(self) -> list:
    """As for `Together`."""
    return []

  def pull_back(self, state: State) -> None:
    """As for `Together`."""
    del state

  def meet(self, replica, state, local, *, step, ticket) -> Met:
    """Lets the rule apply the mean, and pulls; as for `Together`."""
    del state
    count = len(self._store.trainable)
    # A walk of statistics is towards where they belong: walks of several
    # replicas from one place add up to far beyond it, but not their mean.
    rule = self.rule
    walks = 1 if rule.has_chief_statistics else rule.total_num_replicas
    means = [
      None if total is None else total / (self._period if i < count else walks)
      for i, total in enumerate(local.totals)
    ]
    release = self.rule.apply_gradients(
      zip(means, _paths(self._store), strict=True),
      replica=replica,
      local_step=step,
      loss=local.loss,
      num_examples=local.num_examples,
      ticket=ticket,
    )
    return *turns.go_on(self._store, self.rule, replica, release), []


Meeting = Together | AtTheCentre | Accumulated


def _paths(store: parameter_store.ParameterStore) -> list[str]:
  return [store.specs[index].path for index in store.contributed]


def _minus(ours, theirs, factor=1.0) -> list[tf.Tensor]:
  """ours - factor * theirs, tensor by tensor."""
  return [
    a - tf.cast(factor, b.dtype) * b for a, b in zip(ours, theirs, strict=True)
  ]


def _pull_back(rho: float, state: State) -> PullBack | None:
  """The gradient of rho / 2 times the squared distance to the centre."""
  if not rho:
    return None
  return lambda parameter, i: rho * (parameter - state.centre[i])
