"""The interface of an update rule.

An *update rule* decides when and how gradients reach the variables. It never
learns which driver runs it. Its life, on the chief (C), on every replica (R),
or on both:

    build ── create ── start ─┬─ begin ── contribute ── contribute ── …     (R)
      CR        C        C    │
                              └─ apply_updates ── apply_updates ── …        (C)

    … ── end_replicas ── close                                              (C)

* `build` attaches to the shared objects on the parameter servers, by name.
* `create` gives them their first values, or takes them over from an earlier
  chief. Then a checkpoint may be restored, and `start` follows.
* A replica calls `begin` once and then `contribute` for every step. What it
  carries from one call to the next is its *state*: a list of tensors, such as
  the parameters. The rule says what is in it.
* The chief calls `apply_updates`, which waits for updates or makes them.
* Another thread may call `interrupt`, `status`, `counts`, `declare_lost`.

`UpdateRule` is the interface. `GradientRule` has the replica's half of all
rules whose replicas hand over the gradient of one batch at a time;
`OptimizerRule` is what the rules around an inner optimizer share.

How to extend it:

* Replicas that join and leave: a new one calls `begin`; `declare_lost` ends the
  wait for one that left.
* Rows of a table: a gradient may be a `tf.IndexedSlices`.
* Contributions that arrive in parts: only `GradientRule.apply_gradients` knows
  how gradients are sent.
* Several trainings: the store's namespace keeps their objects apart.
"""

import abc
from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Mapping
from collections.abc import Sequence
from typing import NamedTuple
from typing import NoReturn

import tensorflow as tf

from tf_replicas.replica import model_replica
from tf_replicas.rules import results
from tf_replicas.rules import step_token
from tf_replicas.runtime import resources
from tf_replicas.store import alternating_optimizer
from tf_replicas.store import applier
from tf_replicas.store import gradient_math
from tf_replicas.store import inner_optimizer
from tf_replicas.store import loss_scaling
from tf_replicas.store import metric_sums
from tf_replicas.store import moving_averages
from tf_replicas.store import parameter_store

WIRE_DTYPES = ("float16", "bfloat16")

# Methods of TF1's optimizers, and what replaces them.
_TF1_SUCCESSORS = {
  "compute_gradients": "`tf_replicas.Replica` computes gradients",
  "get_chief_queue_runner": "the chief calls the driver's `step`",
  "get_init_tokens_op": "the driver calls `start`",
  "get_slot": "read slots with the driver's `store.state()`",
  "get_slot_names": "read slots with the driver's `store.state()`",
  "make_session_run_hook": "use `tf_replicas.Session` with a driver",
  "minimize": "use a driver's `step` and `run_replica`",
  "variables": "read variables with the driver's `store.state()`",
}

Gradient = parameter_store.Gradient
Optimizer = (
  inner_optimizer.Optimizer | alternating_optimizer.AlternatingOptimizer
)
Inner = (
  inner_optimizer.InnerOptimizer | alternating_optimizer.AlternatingOptimizer
)
ScaleLoss = Callable[[tf.Tensor], tf.Tensor]
# Maps parameters, and a function that scales the loss, to the gradients of the
# next batch: one parameter and one gradient per element of `store.contributed`.
ComputeFn = Callable[[Sequence[tf.Tensor], ScaleLoss], model_replica.Gradients]


class ReplicaStep(NamedTuple):
  """What a replica has after a step.

  Attributes:
    token: What the rule told the replica. Its `global_step` is that of the
      state, or `step_token.ENDED`.
    state: What the replica carries to its next step.
    computed: float64 scalar, seconds since 1970 when the replica had its last
      gradient; `step_token.NEVER` unless times are recorded.
  """

  token: step_token.StepToken
  state: list[tf.Tensor]
  computed: tf.Tensor


class UpdateRule(abc.ABC):
  """When and how gradients reach the variables; see the module's docstring.

  Attributes:
    name: Names the rule, and its summaries.
    total_num_replicas: How many replicas contribute.
    replicas_to_aggregate: How many contributions make one update.
    accepted_fraction: The fraction of what replicas compute that is used, if
      all are equally fast.
    wire_dtype: The dtype as which float32 parameters and gradients travel;
      None leaves them as they are.
    preadmits: Whether a `StepToken` may admit the next contribution in advance.
  """

  name: str
  total_num_replicas: int
  replicas_to_aggregate: int = 1
  accepted_fraction: float = 1.0
  wire_dtype: str | None = None
  preadmits: bool = False

  # Life.

  @abc.abstractmethod
  def build(
    self,
    store: parameter_store.ParameterStore,
    *,
    is_sparse: Sequence[bool] | None = None,
    namespace: resources.Namespace | None = None,
  ) -> None:
    """Attaches to the shared objects on the PS tasks, or creates them.

    Args:
      store: Holds the variables; need not be initialized yet.
      is_sparse: For each element of `store.contributed`, whether its gradients
        are `tf.IndexedSlices`. None: no gradient is.
      namespace: That of the rule's own objects (queues, counts); None: that of
        `store`.

    Raises:
      ValueError: If the rule cannot treat such variables or gradients.
    """

  @abc.abstractmethod
  def create(self, values: Sequence[tf.Tensor], *, resumed: bool) -> None:
    """The chief's: gives everything its first value, or takes it over.

    Args:
      values: The initial value of each variable, in the store's order.
      resumed: Whether the store is initialized: an earlier chief made it.
    """

  @abc.abstractmethod
  def start(self) -> None:
    """Called once by the chief, before its first update.

    All variables have their values by then.
    """

  @abc.abstractmethod
  def trace_ahead(self) -> None:
    """Traces now all functions that may be called later, while a task hangs.

    An in-graph client that traces a function waits for all tasks (TensorFlow
    2.21). So it must not trace while one of them hangs.
    """

  @abc.abstractmethod
  def signature(self) -> Mapping[str, object]:
    """What all clients of one training must agree on; JSON values by name."""

  # The replica's half; to be used inside a `tf.function`.

  @abc.abstractmethod
  def begin(self, replica: int | tf.Tensor) -> ReplicaStep:
    """What a replica starts with.

    Args:
      replica: Which replica this is, in [0, total_num_replicas).

    Returns:
      A token with the global step of the state, and the state.
    """

  @abc.abstractmethod
  def contribute(
    self,
    compute: ComputeFn,
    replica: int | tf.Tensor,
    state: Sequence[tf.Tensor],
    *,
    token: step_token.StepToken,
    records_times: bool = False,
  ) -> ReplicaStep:
    """One step of a replica: compute, hand over, wait, read.

    Args:
      compute: Computes the gradients of the next batch.
      replica: Which replica this is, in [0, total_num_replicas).
      state: As `begin` or the last call returned it.
      token: As `begin` or the last call returned it.
      records_times: Whether to read the clock, which makes other ops wait.

    Raises:
      tf.errors.OutOfRangeError, tf.errors.CancelledError: At run time, when
        training has ended.
    """

  # The chief's half.

  @abc.abstractmethod
  def apply_updates(self, max_updates: int = 1) -> list[results.Update]:
    """Waits for updates, or makes them.

    Args:
      max_updates: How many at most; a rule may always return one.

    Returns:
      At least one update.

    Raises:
      NonFiniteGradientError: If a replica computed a value that is not finite.
      Interrupted: If `interrupt` was called.
      tf.errors.OutOfRangeError: After `close`.
    """

  @abc.abstractmethod
  def set_learning_rate(self, rate: float) -> None:
    """Sets the learning rate, from the next update on."""

  @abc.abstractmethod
  def stop_at(self, step: int) -> None:
    """Makes no update beyond global step `step`."""

  # For the driver that watches and ends the training.

  @abc.abstractmethod
  def counts(self) -> list[results.Counts]:
    """What became of the contributions of each replica."""

  @abc.abstractmethod
  def status(self) -> results.StepStatus:
    """How far the next update has come, and what each replica does."""

  @abc.abstractmethod
  def declare_lost(self, replica: int, tag: int) -> None:
    """Stops waiting for `replica` until it contributes again.

    Args:
      replica: The replica.
      tag: The tag of its last contribution, as `status` had it.
    """

  @abc.abstractmethod
  def interrupt(self) -> None:
    """Makes `apply_updates`, waiting in another thread, raise `Interrupted`."""

  @abc.abstractmethod
  def release_replica(self, replica: int) -> None:
    """Unblocks this process's own `replica`, because its chief is lost."""

  @abc.abstractmethod
  def end_replicas(self) -> None:
    """Tells replicas that training has ended; may last until `interrupt`."""

  @abc.abstractmethod
  def close(self) -> None:
    """Ends the training: whatever waits gets `tf.errors.OutOfRangeError`."""

  # One program that has all gradients of a step.

  def in_lockstep(
    self, store: parameter_store.ParameterStore
  ) -> "LockstepUpdate":
    """The update of one program that has all gradients of a step.

    Args:
      store: Holds the variables, on one task.

    Raises:
      ValueError: If the rule needs parameter servers.
    """
    del store
    raise ValueError(
      f"the update rule {self.name!r} works only with parameter servers. This"
      " training has none: one process computes all gradients, so only"
      " synchronous updates are possible. Use `SyncReplicasOptimizer`, or"
      " variables on parameter servers."
    )


class GradientRule(UpdateRule):
  """A rule whose replicas hand over the gradient of one batch at a time.

  Its state is the parameters, one tensor per element of `store.contributed`,
  unless a subclass adds to it.

  Attributes:
    read_needs: What `pull` does besides reading the variables, by name; empty
      if it only reads.
    refresh_every: How many steps a replica makes from what it read once.
  """

  refresh_every: int = 1
  read_needs: frozenset[str] = frozenset()
  _store: parameter_store.ParameterStore

  @abc.abstractmethod
  def scale_loss(self, loss: tf.Tensor) -> tf.Tensor:
    """What to differentiate instead of `loss`."""

  @abc.abstractmethod
  def apply_gradients(
    self,
    grads_and_vars: Iterable[tuple[Gradient, tf.Variable | str]],
    *,
    replica: int | tf.Tensor,
    local_step: tf.Tensor,
    loss: tf.Tensor | float = 0.0,
    num_examples: tf.Tensor | int = 0,
    preadmitted_tag: tf.Tensor | None = None,
  ) -> step_token.StepToken:
    """Hands over the gradients of a replica; waits until it may continue.

    To be used inside a `tf.function`.

    Args:
      grads_and_vars: (gradient, variable) pairs. A gradient has the variable's
        shape and is dense, `tf.IndexedSlices` or None; a variable may be given
        by its path. Variables left out have no gradient. For a statistic, such
        as a moving mean, old minus new value takes the gradient's place.
      replica: Which replica this is, in [0, total_num_replicas).
      local_step: int64 scalar, the global step whose variables were used.
      loss: Scalar, for the reports: the mean over these examples.
      num_examples: Scalar, how many examples the gradients are the mean of.
      preadmitted_tag: int64 scalar, that of the last `StepToken`; None if that
        had none.

    Returns:
      Whether the gradients were used, and the global step to continue from.

    Raises:
      ValueError: If a variable is not in the store.
      tf.errors.OutOfRangeError, tf.errors.CancelledError: At run time, when
        training has ended.
    """

  def pull(self, replica: int | tf.Tensor) -> tuple[tf.Tensor, list[tf.Tensor]]:
    """Reads the variables; to be used inside a `tf.function`.

    Args:
      replica: Which replica reads, in [0, total_num_replicas).

    Returns:
      The int64 global step, and one tensor per variable of the store.
    """
    del replica
    return self._store.pull()

  def pull_contributed(
    self, replica: int | tf.Tensor
  ) -> tuple[tf.Tensor, list[tf.Tensor]]:
    """As `pull`, but one tensor per element of `store.contributed`."""
    step, values = self.pull(replica)
    return step, [values[i] for i in self._store.contributed]

  @tf.autograph.experimental.do_not_convert
  def begin(self, replica: int | tf.Tensor) -> ReplicaStep:
    """See `UpdateRule.begin`."""
    step, parameters = self.pull_contributed(replica)
    return ReplicaStep(step_token.first(step), parameters, step_token.never())

  @tf.autograph.experimental.do_not_convert
  def contribute(
    self,
    compute: ComputeFn,
    replica: int | tf.Tensor,
    state: Sequence[tf.Tensor],
    *,
    token: step_token.StepToken,
    records_times: bool = False,
  ) -> ReplicaStep:
    """See `UpdateRule.contribute`."""
    token, computed = self.contribute_batch(
      compute, replica, state, token, records_times
    )
    return ReplicaStep(*self.read_on(token, replica), computed)

  def contribute_batch(
    self,
    compute: ComputeFn,
    replica: int | tf.Tensor,
    parameters: Sequence[tf.Tensor],
    token: step_token.StepToken,
    records_times: bool,
  ) -> tuple[step_token.StepToken, tf.Tensor]:
    """Computes the gradients of one batch and hands them over.

    Returns:
      What `apply_gradients` returned, and when the gradients were there (see
      `ReplicaStep.computed`).
    """
    result = compute(parameters, self.scale_loss)
    gradients, computed = result.gradients, step_token.never()
    if records_times:
      computed, (gradients, _) = step_token.clocked((gradients, result.loss))
    paths = [self._store.specs[i].path for i in self._store.contributed]
    token = self.apply_gradients(
      zip(gradients, paths, strict=True),
      replica=replica,
      local_step=token.global_step,
      loss=result.loss,
      num_examples=result.num_examples,
      preadmitted_tag=token.preadmitted_tag,
    )
    return token, computed

  def read_on(
    self, token: step_token.StepToken, replica: int | tf.Tensor
  ) -> tuple[step_token.StepToken, list[tf.Tensor]]:
    """Reads the parameters for the next step, once `token` has arrived.

    Returns:
      The token, with the step of what was read unless training has ended, and
      one parameter per element of `store.contributed`.
    """
    with tf.control_dependencies([token.global_step]):
      now, parameters = self.pull_contributed(replica)
    return self.at_step(token, now), parameters

  def at_step(
    self, token: step_token.StepToken, step: tf.Tensor
  ) -> step_token.StepToken:
    """`token` with global step `step`, unless it says that training ended.

    A refused replica may continue while an update is being made, and then reads
    variables of a later step than the token's.
    """
    with tf.device(self._store.device_of_task(0)):
      ended = token.global_step < 0
      return token._replace(
        global_step=tf.where(ended, token.global_step, step)
      )


class OptimizerRule(GradientRule):
  """A rule around an inner optimizer.

  Attributes:
    inner: The inner optimizer, bound to the store.
    applier: Applies gradients to the variables, once `bind` was called.
    variable_averages: How the moving averages follow, if there are any.
    has_chief_statistics: Whether statistics follow one replica alone.
    is_built: Whether `build` was called.
  """

  is_built: bool = False

  def __init__(
    self,
    optimizer: Optimizer,
    *,
    variable_averages: moving_averages.MovingAverages | None = None,
    variables_to_average: Iterable[tf.Variable | str] | None = None,
    clip_replica_norm: float | None = None,
    clip_mean_norm: float | None = None,
    momentum_correction: bool = False,
    has_chief_statistics: bool = False,
    loss_scale: float | None = None,
    wire_dtype: str | None = None,
    name: str,
  ):
    """Wraps `optimizer`.

    Args:
      optimizer: The inner optimizer: a Keras 3 optimizer, or any object with
        `apply(gradients, variables)` or `apply_gradients(pairs)`.
      variable_averages: Keeps moving averages, updated after every update and
        before the replicas continue.
      variables_to_average: Variables, or their paths; all if not given.
      clip_replica_norm: Each replica's gradients are scaled down to this
        global norm before they leave it.
      clip_mean_norm: What is applied is scaled down to this global norm.
      momentum_correction: As for `InnerOptimizer`.
      has_chief_statistics: Whether statistics follow one replica alone.
      loss_scale: `scale_loss` multiplies by it and `apply_gradients` divides
        by it, for float16 computation.
      wire_dtype: `float16` or `bfloat16`; see `ParameterStore`.
      name: Names the rule, and its summaries.

    Raises:
      TypeError, ValueError: If an argument is invalid.
    """
    check_positive("clip_replica_norm", clip_replica_norm)
    check_positive("clip_mean_norm", clip_mean_norm)
    check_positive("loss_scale", loss_scale)
    if variables_to_average is not None and variable_averages is None:
      raise ValueError("`variables_to_average` needs `variable_averages`.")
    if wire_dtype not in (None, *WIRE_DTYPES):
      raise ValueError(
        f"`wire_dtype` must be one of {', '.join(WIRE_DTYPES)}, or None."
        f" Received: {wire_dtype!r}."
      )
    if isinstance(optimizer, alternating_optimizer.AlternatingOptimizer):
      if momentum_correction:
        raise ValueError(
          "`momentum_correction` must be False where several optimizers take"
          " turns. Received: True."
        )
      self.inner: Inner = optimizer
    else:
      self.inner = inner_optimizer.InnerOptimizer(
        optimizer, momentum_correction=momentum_correction
      )
    self.variable_averages = variable_averages
    self.wire_dtype = wire_dtype
    self.name = name
    self.has_chief_statistics = has_chief_statistics
    self._to_average = variables_to_average
    self._clip_replica_norm = clip_replica_norm
    self._clip_mean_norm = clip_mean_norm
    self._loss_scale = loss_scale

  def __getattr__(self, name: str) -> NoReturn:
    """Names the successor of a method that TF1's optimizers had."""
    hint = _TF1_SUCCESSORS.get(name)
    raise AttributeError(
      f"{type(self).__name__!r} has no attribute {name!r}"
      + (f"; {hint}." if hint else ".")
    )

  def check_built(self) -> None:
    """Raises RuntimeError unless `build` was called."""
    if not self.is_built:
      raise RuntimeError(
        f"The update rule {self.name!r} is not built: call `build` with the"
        " parameter store, or give the rule to a driver."
      )

  def bind(self, store: parameter_store.ParameterStore) -> None:
    """Says which variables are trained; creates their moving averages."""
    self._store = store
    self.applier = applier.Applier(
      store,
      self.inner,
      variable_averages=self.variable_averages,
      to_average=self._to_average,
      clip_norm=self._clip_mean_norm,
    )

  def assign_first(self, values: Sequence[tf.Tensor]) -> None:
    """Gives variables and moving averages their first values."""
    for index, value in enumerate(values):
      self._store.assign(index, value)
    self.applier.initialize(values)

  def scale_loss(self, loss: tf.Tensor) -> tf.Tensor:
    """What to differentiate instead of `loss`; see `loss_scale`."""
    return loss if self._loss_scale is None else loss * self._loss_scale

  def finish_gradients(self, gradients: Sequence[Gradient]) -> list[Gradient]:
    """A replica's gradients of the scaled loss as they leave it.

    Args:
      gradients: One per element of `store.contributed`.

    Returns:
      The same, without the loss scale and clipped to `clip_replica_norm`.
    """
    count = len(self._store.trainable)
    gradients, moves = list(gradients[:count]), list(gradients[count:])
    if self._loss_scale is not None:
      factor = 1 / self._loss_scale
      gradients = [gradient_math.scaled(g, factor) for g in gradients]
    if self._clip_replica_norm is not None:
      shapes = [self._store.specs[i].shape for i in self._store.trainable]
      gradients = gradient_math.clipped(
        gradients, shapes, self._clip_replica_norm
      )
    return [*gradients, *moves]

  def weigh_statistics(
    self, gradients: Sequence[Gradient], weight: int | tf.Tensor
  ) -> list[Gradient]:
    """Multiplies statistics by `weight` if they follow one replica alone.

    Args:
      gradients: One per element of `store.contributed`.
      weight: N, the contributions of an update, for the replica that the
        statistics follow, so that the mean over N is its value; for the others
        0.
    """
    if not self.has_chief_statistics:
      return list(gradients)
    weighed = []
    for index, gradient in zip(self._store.contributed, gradients, strict=True):
      spec = self._store.specs[index]
      counts_all = loss_scaling.is_own(spec.path)
      counts_all |= metric_sums.is_own(spec.path)
      if not spec.trainable and not counts_all:
        gradient = gradient_math.scaled(gradient, weight)
      weighed.append(gradient)
    return weighed

  def in_order(
    self, grads_and_vars: Iterable[tuple[Gradient, tf.Variable | str]]
  ) -> list[Gradient]:
    """One finished gradient, or None, per element of `store.contributed`.

    Args:
      grads_and_vars: As for `apply_gradients`.

    Raises:
      ValueError: If a variable is not in the store.
    """
    gradients, moves = gradient_math.in_order(self._store, grads_and_vars)
    return self.finish_gradients([*gradients, *moves])

  def set_learning_rate(self, rate: float) -> None:
    """Sets the inner optimizer's rate, from the next update on.

    Raises:
      ValueError: If several optimizers take turns, or the rate of this one
        cannot be changed.
    """
    if isinstance(self.inner, alternating_optimizer.AlternatingOptimizer):
      raise ValueError(
        "the learning rates of several optimizers that take turns must not be"
        " set during training: give each optimizer a schedule."
      )
    self.inner.set_learning_rate(rate)

  def trace_ahead(self) -> None:
    """See `UpdateRule.trace_ahead`."""
    self.counts()
    self.status()

  def suspend(self) -> results.Update | None:
    """Releases every replica until `resume`; for `SwitchingOptimizer`.

    Returns:
      Updates that `apply_updates` has not returned yet, as one.

    Raises:
      ValueError: If the rule cannot be suspended.
    """
    raise ValueError(
      f"the update rule {self.name!r} has no `suspend` and `resume`, which"
      " `SwitchingOptimizer` needs."
    )

  def resume(self) -> None:
    """Takes contributions again; replicas may come in any order.

    Raises:
      ValueError: If the rule cannot be suspended.
    """
    raise ValueError(
      f"the update rule {self.name!r} has no `suspend` and `resume`, which"
      " `SwitchingOptimizer` needs."
    )


class LockstepUpdate:
  """The update of one program that has all gradients of a step.

  Attributes:
    rule: The rule whose settings it uses.
  """

  def __init__(
    self, rule: OptimizerRule, store: parameter_store.ParameterStore
  ):
    """Binds `rule` to `store`, which has one task."""
    self.rule = rule
    self._store = store
    rule.bind(store)

  def create(self, values: Sequence[tf.Tensor]) -> None:
    """Gives everything its first value, in the store's order."""
    self.rule.assign_first(values)
    self.rule.inner.build(self._store, is_chief=True)
    self._store.start()

  def finish_gradients(
    self, gradients: Sequence[Gradient], replica: int = 0
  ) -> list[Gradient]:
    """As `OptimizerRule.finish_gradients`, with the statistics weighed.

    Args:
      gradients: Those of one replica.
      replica: Which of the N replicas; statistics that follow one replica
        follow replica 0.
    """
    weight = 0 if replica else self.rule.replicas_to_aggregate
    gradients = self.rule.finish_gradients(gradients)
    return self.rule.weigh_statistics(gradients, weight)

  def apply(
    self, sums: Sequence[Gradient], step: tf.Tensor, num_examples: tf.Tensor
  ) -> tf.Tensor:
    """Makes the update and advances the step; inside a `tf.function`.

    Args:
      sums: One per element of `store.contributed`: the sum over all replicas;
        None skips the variable.
      step: int64 scalar, the global step before the update.
      num_examples: Scalar, the examples that were used.

    Returns:
      The global step after the update, when all of it was made.
    """
    present = [total is not None for total in sums]
    updated = self.rule.applier(
      present, step, lambda _: sums, self.rule.replicas_to_aggregate
    )
    with tf.control_dependencies([updated]):
      return self._store.advance(step, num_examples)


def check_count(name: str, value: int) -> None:
  """Raises TypeError or ValueError unless `value` is an integer from 1 on."""
  if isinstance(value, bool) or not isinstance(value, int):
    raise TypeError(f"`{name}` must be an integer. Received: {value!r}.")
  if value < 1:
    raise ValueError(f"`{name}` must be at least 1. Received: {value}.")


def check_positive(name: str, value: float | None) -> None:
  """Raises ValueError unless `value` is positive or None."""
  if value is not None and not value > 0:
    raise ValueError(f"`{name}` must be positive. Received: {value}.")


def check_rule(rule: object) -> UpdateRule:
  """Returns what a driver's caller made, if it is an update rule.

  Raises:
    TypeError: If it is something else.
  """
  if not isinstance(rule, UpdateRule):
    raise TypeError(
      "the function that makes the update rule must return one, such as"
      " `tf_replicas.SyncReplicasOptimizer(optimizer, ...)`. Received:"
      f" {rule!r:.60}."
    )
  return rule


def check_replicas(rule: UpdateRule, names: Sequence[str]) -> None:
  """Checks that a rule is for as many replicas as there are.

  Raises:
    ValueError: If it is not. It would wait for replicas that do not exist, or
      leave some out.
  """
  if rule.total_num_replicas != len(names):
    raise ValueError(
      f"`total_num_replicas` must be {len(names)}, as there are"
      f" {', '.join(names)}. Received: {rule.total_num_replicas}."
    )


def create_or_resume(
  rule: UpdateRule,
  store: parameter_store.ParameterStore,
  values: Sequence[tf.Tensor],
) -> None:
  """The chief's: creates a training, or takes over that of an earlier chief.

  Args:
    rule: The update rule, built for `store`.
    store: Holds the variables.
    values: The initial value of each variable, in the store's order.
  """
  is_resumed = store.is_initialized()
  rule.create(values, resumed=is_resumed)
  if not is_resumed:
    # The global step comes last: it tells others that everything is there.
    store.start()
