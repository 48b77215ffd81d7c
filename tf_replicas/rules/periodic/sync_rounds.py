"""Defines the kinds of exchange between a replica's copy and the centre.

The *centre* is the shared variables on the PS tasks. Each kind of exchange
holds an update rule for the centre. The kind determines what a replica hands
over after a period of local steps, and from which copy the replica continues.
`periodic_averaging` documents the purpose of each kind.
"""

import abc
from collections.abc import Callable
from collections.abc import Sequence
from typing import cast
from typing import NamedTuple

import tensorflow as tf

from tf_replicas.rules import base as rule_base
from tf_replicas.rules import step_token
from tf_replicas.rules.asynchronous import async_replicas
from tf_replicas.rules.periodic import local_steps
from tf_replicas.rules.sync import sync_replicas
from tf_replicas.runtime import resources
from tf_replicas.store import applier
from tf_replicas.store import gradient_math
from tf_replicas.store import parameter_store

# The result of `exchange`: a token that says whether the period was used, and
# the global step to continue from; the replica's copy; and the centre if the
# kind needs it, else an empty list.
Exchanged = tuple[step_token.StepToken, list[tf.Tensor], list[tf.Tensor]]
# Maps a parameter and its position to a term that is added to its gradient.
PullBack = Callable[[tf.Tensor, int], tf.Tensor]


class State(NamedTuple):
  """The state that a replica carries from exchange to exchange.

  Attributes:
    parameters: The replica's copy, one tensor per element of the store's
      `contributed`: the trainable variables, then the statistics.
    centre: The centre after the replica's last exchange, as many tensors; empty
      if the kind of exchange does not need it.
    slots: The state of the local optimizer.
  """

  parameters: list[tf.Tensor]
  centre: list[tf.Tensor]
  slots: list[tf.Tensor]


class Period(NamedTuple):
  """A period of local steps of a replica, before the exchange that ends it.

  Attributes:
    replica: The index of the replica, in [0, total_num_replicas).
    state: The replica's state before the period.
    local: The result of the period.
    token: The token of the last exchange, with the global step of the centre at
      that time.
  """

  replica: int | tf.Tensor
  state: State
  local: local_steps.Local
  token: step_token.StepToken


class MoveToward:
  """An inner optimizer that moves the centre toward replicas' copies.

  In place of a gradient it takes the distance centre - copy, or the mean
  distance over several copies, and subtracts `rate` times that from the centre.
  """

  def __init__(self, rate: float):
    self.rate = rate

  def apply(
    self, distances: Sequence[tf.Tensor], variables: Sequence[tf.Variable]
  ) -> None:
    """Subtracts `rate` times its distance from each variable."""
    for distance, variable in zip(distances, variables, strict=True):
      variable.assign_sub(self.rate * distance)


class SyncRound(abc.ABC):
  """One kind of exchange between replicas and the centre.

  Attributes:
    rule: The update rule of the centre.
    needs_centre: Whether a replica's state includes the centre.
    needs_totals: Whether `exchange` needs the sums of local gradients.
  """

  rule: rule_base.OptimizerRule
  needs_centre: bool = False
  needs_totals: bool = False

  def __init__(
    self,
    rule: rule_base.OptimizerRule,
    moving_rate: float | None = None,
    rho: float = 0.0,
  ):
    """Stores the settings.

    Args:
      rule: The rule that updates the centre.
      moving_rate: The fraction of its distance to the centre by which a copy
        moves toward the centre. None: the copy is replaced by the centre.
      rho: The factor of the attraction between exchanges; see `pull_back`.
    """
    self.rule = rule
    self._moving_rate = moving_rate
    self._rho = rho

  def build(self, store: parameter_store.ParameterStore) -> None:
    """Binds the kind to the variables; called after `rule.build`."""
    self._store = store

  def signature(self) -> dict[str, object]:
    """Returns what must be equal in all clients; JSON values by name."""
    return {"moving_rate": self._moving_rate, "rho": self._rho}

  def pull_back(self, state: State) -> PullBack | None:
    """Makes a function that attracts a copy to the centre in local steps.

    Args:
      state: The replica's state before the period.

    Returns:
      Maps a parameter and its position to the gradient of rho / 2 times the
      squared distance to the centre; None if rho is 0.
    """
    if not self._rho:
      return None
    return lambda parameter, i: self._rho * (parameter - state.centre[i])

  @abc.abstractmethod
  def exchange(self, period: Period) -> Exchanged:
    """Makes one exchange after a period; inside a `tf.function`.

    Args:
      period: The period.

    Returns:
      The token of this exchange, the copy to continue from, and the centre if
      `needs_centre`, else an empty list.
    """

  def _contribute(
    self, contribution: Sequence[tf.Tensor | None], period: Period
  ) -> step_token.StepToken:
    """Hands `contribution` to the rule in place of gradients."""
    paths = [self._store.specs[i].path for i in self._store.contributed]
    return self.rule.apply_gradients(
      zip(contribution, paths, strict=True),
      replica=period.replica,
      local_step=period.token.global_step,
      loss=period.local.loss,
      num_examples=period.local.num_examples,
      preadmitted_tag=cast(tf.Tensor | None, period.token.preadmitted_tag),
    )


class AverageAll(SyncRound):
  """All replicas exchange together; the centre moves by the mean distance."""

  rule: sync_replicas.SyncReplicasOptimizer  # Its optimizer: a `MoveToward`.

  @property
  def needs_centre(self) -> bool:
    """Whether copies are kept, and so have distances to the centre."""
    return self._moving_rate is not None

  def exchange(self, period: Period) -> Exchanged:
    """Hands over the distance of the centre from this replica's copy."""
    state, parameters = period.state, period.local.parameters
    centre = state.centre if self.needs_centre else state.parameters
    distances = _minus(centre, parameters)
    # The inner optimizer does not apply statistics: multiply them here.
    count = len(self._store.trainable)
    rate = cast(MoveToward, self.rule.inner.optimizer).rate
    moves = [*distances[:count], *(rate * d for d in distances[count:])]
    token = self._contribute(moves, period)
    admitted = token.admitted
    token, centre = self.rule.read_on(token, period.replica)
    if not self.needs_centre:
      return token, centre, []
    # A refused copy did not move the centre, so it is not moved either.
    rate = tf.where(admitted > 0, self._moving_rate, 0.0)
    return token, _minus(parameters, distances, -rate), centre


class ElasticExchange:
  """Makes the exchanges of `ElasticRound` on the PS tasks, one by one.

  The replica's copy is sent to the PS tasks. There, under one lock, the centre
  moves toward the copy by a fraction of their distance. The centre before that
  move is sent back. `ElasticRound` then moves the replica's copy toward the
  centre by the same fraction.
  """

  def __init__(
    self,
    store: parameter_store.ParameterStore,
    update: applier.Applier,
  ):
    """Creates the lock on PS task 0, or attaches to it.

    Args:
      store: Holds the centre.
      update: Moves the centre by a fraction of its distances from a copy.
    """
    self._store = store
    self._update = update
    self._parcels = [
      store.parcel(task, is_narrowed=False) for task in range(store.num_tasks)
    ]
    with tf.device(store.device_of_task(0)):
      self._lock = store.namespace.mutex("elastic/lock")

  @tf.autograph.experimental.do_not_convert
  def __call__(
    self,
    parameters: Sequence[tf.Tensor],
    version: tf.Tensor,
    statistics_rate: float | tf.Tensor,
  ) -> list[tf.Tensor]:
    """Moves the centre toward a replica's copy, under the lock.

    The caller moves the copy. To be used inside a `tf.function`.

    Args:
      parameters: The replica's copy, one tensor per element of the store's
        `contributed`.
      version: int64 scalar, the number of exchanges before this one.
      statistics_rate: Scalar, the `moving_rate` of statistics, such as the
        moving means of batch normalization.

    Returns:
      The centre just before the exchange, one tensor per element of
      `contributed`.
    """
    sent = self._send(parameters)

    def exchange():
      before = self._read()

      def distances(task):
        shards = self._store.contributed_shards(task)
        distances = [
          a - b for a, b in zip(before[task], sent[task], strict=True)
        ]
        return [
          d if position < len(self._store.trainable) else statistics_rate * d
          for d, (position, _) in zip(distances, shards, strict=True)
        ]

      self._update([True] * len(parameters), version, distances, 1)
      return self._pack(before)

    return self._join(self._lock.hold(exchange, after=sum(sent, [])))

  def _send(self, parameters) -> list[list[tf.Tensor]]:
    """Sends the shards of the replica's copy to their PS tasks."""
    sent = []
    split = self._store.split_by_task(parameters)
    for task, parcel in enumerate(self._parcels):
      packed = parcel.pack(split[task])
      with tf.device(self._store.device_of_task(task)):
        sent.append(parcel.unpack([tf.identity(p) for p in packed]))
    return sent

  def _read(self) -> list[list[tf.Tensor]]:
    """Reads the shards of the centre, on each PS task its own."""
    values = []
    for task in range(self._store.num_tasks):
      with tf.device(self._store.device_of_task(task)):
        values.append(
          [
            self._store.variables(self._store.contributed[p])[n].read_value()
            for p, n in self._store.contributed_shards(task)
          ]
        )
    return values

  def _pack(self, values: list[list[tf.Tensor]]) -> list[tf.Tensor]:
    """Packs the shards of each PS task into groups, on that task."""
    packed = []
    for task, parcel in enumerate(self._parcels):
      with tf.device(self._store.device_of_task(task)):
        packed += parcel.pack(values[task])
    return packed

  def _join(self, packed: list[tf.Tensor]) -> list[tf.Tensor]:
    """Joins packed groups to whole variables, on the replica's device."""
    groups, values = iter(packed), {}
    for task, parcel in enumerate(self._parcels):
      parts = parcel.unpack([next(groups) for _ in parcel.groups])
      shards = self._store.contributed_shards(task)
      values.update(zip(shards, parts, strict=True))
    whole = []
    for position, index in enumerate(self._store.contributed):
      shards = self._store.shards[index]
      parts = [values[position, number] for number in range(len(shards))]
      whole.append(parameter_store.join(parts, shards))
    return whole


class ElasticRound(SyncRound):
  """Each replica exchanges with the centre on its own."""

  rule: async_replicas.AsyncReplicasOptimizer  # Admits and counts exchanges.
  _moving_rate: float

  @property
  def needs_centre(self) -> bool:
    """Whether local steps are attracted to the centre."""
    return self._rho > 0

  def build(self, store: parameter_store.ParameterStore) -> None:
    """See `SyncRound.build`."""
    super().build(store)
    self.rule.inner.build(store, is_chief=False)
    self._exchange = ElasticExchange(store, self.rule.applier)
    self._device = store.device_of_task(0)

  def exchange(self, period: Period) -> Exchanged:
    """Asks for admission, moves centre and copy, and counts the exchange."""
    local, parameters = period.local, period.local.parameters
    is_sound = tf.math.is_finite(local.loss)
    is_sound &= gradient_math.all_finite(parameters)
    replica, step, is_sound, loss, num_examples = resources.transfer_scalars(
      self._device,
      period.replica,
      period.token.global_step,
      is_sound,
      local.loss,
      local.num_examples,
    )
    admission = self.rule.admission.admit(replica, step, is_sound)
    asked = step_token.now(admission.admitted)

    statistics_rate = self._moving_rate
    if self.rule.has_chief_statistics:
      statistics_rate *= tf.cast(replica == 0, tf.float32)

    def with_centre():
      centre = self._exchange(parameters, admission.version, statistics_rate)
      with tf.control_dependencies(centre):
        now = self.rule.admission.finish(
          replica, admission.staleness, loss, num_examples
        )
      return [now, *centre]

    def stay():
      ended = tf.constant(step_token.ENDED, tf.int64)
      now = tf.where(admission.has_ended, ended, admission.version)
      return [now, *map(tf.identity, parameters)]

    now, *centre = tf.cond(admission.admitted, with_centre, stay)
    token = step_token.StepToken(
      tf.cast(admission.admitted, tf.int64),
      now,
      tf.constant(step_token.NO_TAG, tf.int64),
      step_token.pack_times(asked, *[step_token.now(now)] * 3),
    )
    # Copy and centre move by the same fraction of their distance.
    distances = _minus(centre, parameters)
    parameters = _minus(parameters, distances, -self._moving_rate)
    if not self.needs_centre:
      return token, parameters, []
    return token, parameters, _minus(centre, distances, self._moving_rate)


class AccumulatedGradients(SyncRound):
  """Each replica hands over its mean gradient, and continues from the centre.

  No replica waits for others.
  """

  needs_totals = True

  def __init__(self, rule: async_replicas.AsyncReplicasOptimizer, period: int):
    """Stores the settings.

    Args:
      rule: Applies the mean gradients to the centre.
      period: The number of gradients in each mean.
    """
    super().__init__(rule)
    self._period = period

  def exchange(self, period: Period) -> Exchanged:
    """Has the mean gradient applied, then reads the centre."""
    count = len(self._store.trainable)
    # Statistics converge to a target; the moves of M replicas together would
    # overshoot it, so they are divided by M.
    rule = self.rule
    parts = 1 if rule.has_chief_statistics else rule.total_num_replicas
    means = [
      None if total is None else total / (self._period if i < count else parts)
      for i, total in enumerate(period.local.totals)
    ]
    token = self._contribute(means, period)
    return *self.rule.read_on(token, period.replica), []


def _minus(
  ours: Sequence[tf.Tensor],
  theirs: Sequence[tf.Tensor],
  factor: float | tf.Tensor = 1.0,
) -> list[tf.Tensor]:
  """Computes ours - factor * theirs, tensor by tensor."""
  return [
    a - tf.cast(factor, b.dtype) * b for a, b in zip(ours, theirs, strict=True)
  ]
