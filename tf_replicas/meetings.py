"""How replicas with copies of their own meet: the kinds of periodic averaging.

Each kind holds an update rule of the shared variables, the *centre*, and says
what a replica hands over after a period of local steps, and what it goes on
from. `periodic_averaging` says what the kinds are for.
"""

from typing import NamedTuple

import tensorflow as tf

from tf_replicas import applications
from tf_replicas import async_replicas
from tf_replicas import contributions
from tf_replicas import elastic_exchange
from tf_replicas import gradient_queues
from tf_replicas import parameter_store
from tf_replicas import sync_replicas
from tf_replicas import towers


class State(NamedTuple):
  """What a replica carries from meeting to meeting.

  Attributes:
    parameters: Its copy, a tensor per trainable variable.
    centre: The shared variables as it knows them, where the kind needs that;
      else nothing.
    slots: The local optimizer's.
  """

  parameters: list[tf.Tensor]
  centre: list[tf.Tensor]
  slots: list[tf.Tensor]


class Move:
  """The inner optimizer of a centre that goes where replicas say."""

  def __init__(self, rate: float):
    self._rate = rate

  def apply(self, changes, variables) -> None:
    for change, variable in zip(changes, variables, strict=True):
      variable.assign_add(self._rate * change)


class Together:
  """All replicas meet at a time: a synchronous step of their differences."""

  needs_totals = False

  def __init__(
    self,
    rule: sync_replicas.SyncReplicasOptimizer,
    moving_rate: float | None = None,
    rho: float = 0.0,
  ):
    self.rule = rule
    self.needs_centre = moving_rate is not None
    self._moving_rate = moving_rate
    self._rho = rho

  def build(self, store: parameter_store.ParameterStore) -> None:
    self._store = store

  def signature(self) -> list:
    return [self._moving_rate, self._rho]

  def pull_back(self, state: State):
    return _pull_back(self._rho, state)

  def meet(self, replica, state, local, *, step, ticket):
    """Hands over how far this copy is from the centre."""
    centre = state.centre if self.needs_centre else state.parameters
    away = _minus(local.parameters, centre)
    release = self.rule.apply_gradients(
      zip(away, _paths(self._store), strict=True),
      replica=replica,
      local_step=step,
      loss=local.loss,
      num_examples=local.num_examples,
      ticket=ticket,
    )
    admitted = release.admitted
    release, centre = towers.go_on(self._store, self.rule, replica, release)
    if not self.needs_centre:
      return release, centre, []
    # One that was refused did not move the centre, and is not moved by it.
    rate = tf.where(admitted > 0, self._moving_rate, 0.0)
    return release, _minus(local.parameters, away, rate), centre


class AtTheCentre:
  """Each replica meets the centre alone: an exchange of its own."""

  needs_totals = False

  def __init__(
    self,
    rule: async_replicas.AsyncReplicasOptimizer,
    moving_rate: float,
    rho: float,
  ):
    self.rule = rule
    self.needs_centre = rho > 0
    self._moving_rate = moving_rate
    self._rho = rho

  def build(self, store: parameter_store.ParameterStore) -> None:
    self._applications = applications.Applications(
      store, self.rule.total_num_replicas, None
    )
    self.rule.inner.build(store, is_chief=False)
    self._exchange = elastic_exchange.ElasticExchange(store, self.rule.update)

  def signature(self) -> list:
    return [self._moving_rate, self._rho]

  def pull_back(self, state: State):
    return _pull_back(self._rho, state)

  def meet(self, replica, state, local, *, step, ticket):
    """Asks, exchanges, and counts."""
    del state, ticket
    parameters = local.parameters
    is_sound = tf.math.is_finite(local.loss)
    is_sound &= gradient_queues.all_finite(parameters)
    admission = self._applications.admit(replica, step, is_sound)

    def exchange():
      centre = self._exchange(parameters, admission.version)
      with tf.control_dependencies(centre):
        now = self._applications.finish(
          replica, admission.staleness, local.loss, local.num_examples
        )
      return [now, *centre]

    def stay():
      ended = tf.constant(contributions.ENDED, tf.int64)
      now = tf.where(admission.has_ended, ended, admission.version)
      return [now, *map(tf.identity, parameters)]

    now, *centre = tf.cond(admission.admitted, exchange, stay)
    away = _minus(parameters, centre)
    release = contributions.Release(
      tf.cast(admission.admitted, tf.int64), now, tf.constant(-1, tf.int64)
    )
    parameters = _minus(parameters, away, self._moving_rate)
    if not self.needs_centre:
      return release, parameters, []
    return release, parameters, _minus(centre, away, -self._moving_rate)


class Accumulated:
  """Each replica hands over the mean of its gradients, and begins anew."""

  needs_totals = True
  needs_centre = False

  def __init__(self, rule: async_replicas.AsyncReplicasOptimizer, period: int):
    self.rule = rule
    self._period = period

  def build(self, store: parameter_store.ParameterStore) -> None:
    self._store = store

  def signature(self) -> list:
    return []

  def pull_back(self, state: State) -> None:
    del state

  def meet(self, replica, state, local, *, step, ticket):
    """Lets the shared optimizer apply the mean, and pulls."""
    del state
    means = [
      None if total is None else total / self._period for total in local.totals
    ]
    release = self.rule.apply_gradients(
      zip(means, _paths(self._store), strict=True),
      replica=replica,
      local_step=step,
      loss=local.loss,
      num_examples=local.num_examples,
      ticket=ticket,
    )
    return *towers.go_on(self._store, self.rule, replica, release), []


def _paths(store: parameter_store.ParameterStore) -> list[str]:
  return [store.specs[index].path for index in store.trainable]


def _minus(ours, theirs, factor=1.0) -> list[tf.Tensor]:
  """ours - factor * theirs, tensor by tensor."""
  return [
    a - tf.cast(factor, b.dtype) * b for a, b in zip(ours, theirs, strict=True)
  ]


def _pull_back(rho: float, state: State):
  """The gradient of rho / 2 times the squared distance to the centre."""
  if not rho:
    return None
  return lambda parameter, i: rho * (parameter - state.centre[i])


Meeting = Together | AtTheCentre | Accumulated
