"""Defines the kinds of exchange of replicas that train their own copies.

An exchange is between a replica's copy of the variables and the *center*, the
shared variables on the PS tasks. Each kind of exchange has an update rule for
the center. The kind determines what a replica hands over after a *period* of
local steps, and from which copy the replica continues. `periodic_averaging`
documents the purpose of each kind.
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
# the global step to continue from; the replica's copy; and the center if the
# kind needs it, else an empty list.
Exchanged = tuple[step_token.StepToken, list[tf.Tensor], list[tf.Tensor]]
# Maps a parameter and its position to a term that is added to its gradient.
PullBack = Callable[[tf.Tensor, int], tf.Tensor]


class State(NamedTuple):
  """The tensors that a replica carries from exchange to exchange.

  An exchange is between the replica's own copy of the variables and the center,
  the shared variables.

  Attributes:
    parameters: The replica's copy, one tensor per element of the store's
      `contributed`: the trainable variables, then the variables without
      gradients.
    center: The center after the replica's last exchange, as many tensors as
      `parameters`; empty if the kind of exchange does not need it.
    slots: The state of the optimizer that trains the copy.
  """

  parameters: list[tf.Tensor]
  center: list[tf.Tensor]
  slots: list[tf.Tensor]


class Period(NamedTuple):
  """A replica's period of local steps, before the exchange that follows it.

  In a period, the replica trains its own copy of the variables. The exchange is
  with the center, the shared variables.

  Attributes:
    replica: The index of the replica, in [0, total_num_replicas).
    state: The replica's state before the period.
    local: The replica's copy and optimizer state after the period, with the
      loss and the number of examples.
    token: The `StepToken` of the exchange before the period. Its global step is
      that of the center at that time.
  """

  replica: int | tf.Tensor
  state: State
  local: local_steps.Local
  token: step_token.StepToken


class MoveToward:
  """An optimizer that moves the center (the shared variables) toward copies.

  A copy is the variables as one replica has trained them. In place of
  gradients, the optimizer takes distances: the value of the center minus that
  of a copy, or the mean of this difference over several copies. It subtracts
  `rate` times the distance from the center.

  Attributes:
    rate: The factor of the distance. With 1, the center becomes the copy, or
      the mean of the copies.
  """

  def __init__(self, rate: float):
    self.rate = rate

  def apply(
    self, distances: Sequence[tf.Tensor], variables: Sequence[tf.Variable]
  ) -> None:
    """Subtracts `rate` times its distance from each variable.

    Args:
      distances: For each variable, its value minus that of a replica's copy, or
        the mean of this difference over several copies.
      variables: The variables to change.
    """
    for distance, variable in zip(distances, variables, strict=True):
      variable.assign_sub(self.rate * distance)


class SyncRound(abc.ABC):
  """One kind of exchange between replicas' copies and the center.

  The center is the shared variables. A replica trains its own copy of them for
  a period of local steps, and then makes an exchange.

  Attributes:
    rule: The update rule of the center.
    needs_center: Whether a replica keeps the values of the center from one
      exchange to the next, in `State.center`.
    needs_totals: Whether `exchange` needs the sums of local gradients.
  """

  rule: rule_base.OptimizerRule
  needs_center: bool = False
  needs_totals: bool = False

  def __init__(
    self,
    rule: rule_base.OptimizerRule,
    moving_rate: float | None = None,
    rho: float = 0.0,
  ):
    """Stores the settings of a kind of exchange.

    An exchange is between a replica's own copy of the variables and the center,
    the shared variables.

    Args:
      rule: The rule that updates the center.
      moving_rate: The fraction of its distance to the center by which an
        exchange moves a copy toward the center. None: the copy is replaced by
        the center.
      rho: A factor. Before each local step, `rho` times (copy - center) is
        added to the gradient, which attracts the copy to the center.
    """
    self.rule = rule
    self._moving_rate = moving_rate
    self._rho = rho

  def build(self, store: parameter_store.ParameterStore) -> None:
    """Stores `store`, which holds the center (the shared variables).

    To be called after `rule.build`.
    """
    self._store = store

  def signature(self) -> dict[str, object]:
    """Returns the settings that must be equal in the chief and all workers.

    Returns:
      The settings by name, of types that JSON can represent.
    """
    return {"moving_rate": self._moving_rate, "rho": self._rho}

  def pull_back(self, state: State) -> PullBack | None:
    """Returns a function whose results attract a replica's copy to the center.

    The center is the shared variables. In its local steps, the replica adds the
    result of the function to its gradients.

    Args:
      state: The replica's state before the local steps.

    Returns:
      A function that maps a parameter and its position to rho * (parameter -
      center), the gradient of rho / 2 times their squared distance; None if rho
      is 0.
    """
    if not self._rho:
      return None
    return lambda parameter, i: self._rho * (parameter - state.center[i])

  @abc.abstractmethod
  def exchange(self, period: Period) -> Exchanged:
    """Makes one exchange between a replica's copy and the center.

    The center is the shared variables. To be used inside a `tf.function`.

    Args:
      period: The replica's local steps before the exchange.

    Returns:
      The `StepToken` of this exchange, which says whether the center was
      updated; the copy from which the replica continues; and the center if
      `needs_center`, else an empty list.
    """

  def _contribute(
    self, contribution: Sequence[tf.Tensor | None], period: Period
  ) -> step_token.StepToken:
    """Gives tensors in place of gradients to the rule that updates the center.

    The center is the shared variables.

    Args:
      contribution: One tensor per element of the store's `contributed` (the
        trainable variables, then the variables without gradients), or None.
      period: The replica's local steps before the exchange.

    Returns:
      The rule's reply, which says whether the tensors were used.
    """
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
  """A kind of exchange in which an update waits for the copies of N replicas.

  Each replica trains its own copy of the variables. One update moves the center
  (the shared variables) toward the mean of the first N copies whose replicas
  have read the present center, by a fixed fraction of the distance from the
  center to that mean. Other copies are refused. If `moving_rate` is None, each
  replica goes on from the new center, also one whose copy was refused.
  Otherwise it goes on from its own copy, after moving it toward the center as
  it was before the update, by the fraction `moving_rate` of their distance. A
  refused copy is not moved.
  """

  rule: sync_replicas.SyncReplicasOptimizer  # Its optimizer: a `MoveToward`.

  @property
  def needs_center(self) -> bool:
    """Whether a replica keeps its copy, and so needs the center in its state.

    The center is the shared variables. True: an exchange moves the copy toward
    the center. False: the center replaces the copy.
    """
    return self._moving_rate is not None

  def exchange(self, period: Period) -> Exchanged:
    """Makes one exchange, in which the replica waits for the other replicas.

    The replica hands over the distance of the center (the shared variables)
    from its copy. If `needs_center`, the copy then moves by a fraction of this
    distance, unless it was refused; else the new center replaces it. Implements
    `SyncRound.exchange`, which documents the argument and the result.
    """
    state, parameters = period.state, period.local.parameters
    center = state.center if self.needs_center else state.parameters
    distances = _minus(center, parameters)
    # The inner optimizer does not apply statistics: multiply them here.
    count = len(self._store.trainable)
    rate = cast(MoveToward, self.rule.inner.optimizer).rate
    moves = [*distances[:count], *(rate * d for d in distances[count:])]
    token = self._contribute(moves, period)
    token, center = self.rule.pull_contributed(period.replica, token)
    if not self.needs_center:
      return token, center, []
    # A refused copy did not move the center, so it is not moved either.
    rate = tf.where(token.admitted > 0, self._moving_rate, 0.0)
    return token, _minus(parameters, distances, -rate), center


class ElasticExchange:
  """Moves the center toward replicas' copies, one copy at a time.

  The center is the shared variables on the PS tasks. Each replica trains its
  own copy of them.

  The replica's copy is sent to the PS tasks. There, under one lock, the center
  moves toward the copy by a fraction of their distance. The values that the
  center had before are sent back. `ElasticRound` then moves the replica's copy
  toward these by the same fraction.
  """

  def __init__(
    self,
    store: parameter_store.ParameterStore,
    update: applier.Applier,
  ):
    """Creates the lock of all exchanges on PS task 0, or attaches to it.

    Args:
      store: Holds the center, the shared variables.
      update: Moves the center by a fraction of its distance from a copy.
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
    """Moves the center toward a replica's copy, under a lock.

    The center is the shared variables. The constructor's `update` determines by
    which fraction of the distance the trainable variables move. To be used
    inside a `tf.function`.

    Args:
      parameters: The replica's copy, one tensor per element of the store's
        `contributed` (the trainable variables, then the statistics).
      version: int64 scalar, the number of exchanges before this one.
      statistics_rate: Scalar, the fraction of the distance by which statistics
        (variables without gradients, such as moving means) move.

    Returns:
      The values of the center just before the move, one tensor per element of
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
    """Sends the shards (parts of variables) of a replica's copy to PS tasks.

    Returns:
      For each PS task, the shards that it holds, on that task.
    """
    sent = []
    split = self._store.split_by_task(parameters)
    for task, parcel in enumerate(self._parcels):
      packed = parcel.pack(split[task])
      with tf.device(self._store.device_of_task(task)):
        sent.append(parcel.unpack([tf.identity(p) for p in packed]))
    return sent

  def _read(self) -> list[list[tf.Tensor]]:
    """Reads the shards of the shared variables on each PS task.

    Returns:
      For each PS task, the shards (parts of variables) that it holds.
    """
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
    """Packs tensors on each PS task into fewer tensors, which are sent faster.

    Args:
      values: For each PS task, one tensor per shard (part of a variable).

    Returns:
      The packed tensors of all tasks, in order.
    """
    packed = []
    for task, parcel in enumerate(self._parcels):
      with tf.device(self._store.device_of_task(task)):
        packed += parcel.pack(values[task])
    return packed

  def _join(self, packed: list[tf.Tensor]) -> list[tf.Tensor]:
    """Joins packed shards to whole variables, on the replica's device.

    Args:
      packed: The result of `_pack`: the shards (parts of variables) of all PS
        tasks, packed into fewer tensors.

    Returns:
      One tensor per element of the store's `contributed` (the trainable
      variables, then the variables without gradients).
    """
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
  """A kind of exchange that each replica makes alone.

  The replica's copy of the variables and the center (the shared variables) move
  toward each other. No replica waits for others.
  """

  rule: async_replicas.AsyncReplicasOptimizer  # Admits and counts exchanges.
  _moving_rate: float

  @property
  def needs_center(self) -> bool:
    """Whether `rho` is positive, so that local steps need the center.

    The center is the shared variables. Local steps then attract the replica's
    copy to the values that the center had after the last exchange.
    """
    return self._rho > 0

  def build(self, store: parameter_store.ParameterStore) -> None:
    """Prepares exchanges with the shared variables in `store`.

    Creates the lock of all exchanges on PS task 0, or attaches to it. To be
    called after `rule.build`.
    """
    super().build(store)
    self.rule.inner.build(store, is_chief=False)
    self._exchange = ElasticExchange(store, self.rule.applier)
    self._device = store.device_of_task(0)

  def exchange(self, period: Period) -> Exchanged:
    """Moves the center and the replica's copy toward each other.

    The center is the shared variables. The replica first asks the rule for
    admission. The rule refuses if a value is not finite or training has ended;
    then neither the center nor the copy moves. Implements `SyncRound.exchange`,
    which documents the argument and the result.
    """
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

    def with_center():
      center = self._exchange(parameters, admission.version, statistics_rate)
      with tf.control_dependencies(center):
        now = self.rule.admission.finish(
          replica, admission.staleness, loss, num_examples
        )
      return [now, *center]

    def stay():
      ended = tf.constant(step_token.ENDED, tf.int64)
      now = tf.where(admission.has_ended, ended, admission.version)
      return [now, *map(tf.identity, parameters)]

    now, *center = tf.cond(admission.admitted, with_center, stay)
    token = step_token.StepToken(
      tf.cast(admission.admitted, tf.int64),
      now,
      tf.constant(step_token.NO_TAG, tf.int64),
      step_token.pack_times(asked, *[step_token.now(now)] * 3),
    )
    token = step_token.copy_here(self._device, token)
    # Copy and center move by the same fraction of their distance.
    distances = _minus(center, parameters)
    parameters = _minus(parameters, distances, -self._moving_rate)
    if not self.needs_center:
      return token, parameters, []
    return token, parameters, _minus(center, distances, self._moving_rate)


class AccumulatedGradients(SyncRound):
  """A kind of exchange in which a replica hands over its mean gradient.

  The mean is over the local steps since the last exchange. It is applied to the
  center (the shared variables), from which the replica then continues. No
  replica waits for others.
  """

  needs_totals = True

  def __init__(self, rule: async_replicas.AsyncReplicasOptimizer, period: int):
    """Stores the settings of this kind of exchange.

    Args:
      rule: Applies replicas' mean gradients to the shared variables.
      period: The number of local gradients in each mean.
    """
    super().__init__(rule)
    self._period = period

  def exchange(self, period: Period) -> Exchanged:
    """Applies the replica's mean gradient to the center, then reads the center.

    The center is the shared variables. Implements `SyncRound.exchange`, which
    documents the argument and the result.
    """
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
    return *self.rule.pull_contributed(period.replica, token), []


def _minus(
  ours: Sequence[tf.Tensor],
  theirs: Sequence[tf.Tensor],
  factor: float | tf.Tensor = 1.0,
) -> list[tf.Tensor]:
  """Computes ours - factor * theirs for each pair of tensors of two lists."""
  return [
    a - tf.cast(factor, b.dtype) * b for a, b in zip(ours, theirs, strict=True)
  ]
