"""Defines the interface of an update rule.

An *update rule* decides when and how gradients reach the variables. It does not
depend on the *driver*, the object that runs the training. The driver calls the
methods of the rule in this order, in the chief (C), in every replica (R), or in
both (CR):

    build ── create ── start ─┬─ begin ── contribute ── contribute ── …     (R)
      CR        C        C    │
                              └─ apply_updates ── apply_updates ── …        (C)

    … ── end_replicas ── close                                              (C)

* `build` creates the shared objects (variables, queues) on the parameter
  servers, or attaches to existing objects of the same names.
* `create` gives these objects their first values, or takes them over from an
  earlier chief. Then a checkpoint may be restored, and `start` follows.
* A replica calls `begin` once and then `contribute` for every step. From one
  call to the next it carries its *state*: a list of tensors, such as the
  parameters. The rule decides what the list contains.
* The chief calls `apply_updates`, which waits for updates or makes them.
* Another thread may call `interrupt`, `status`, `counts`, `declare_lost`.

A *contribution* is what a replica hands over for one update: gradients, the
loss and the number of examples. A *statistic* is a variable without gradients,
such as a moving mean of batch normalization. Its entry among the gradients is
its old minus its new value. `store.contributed` lists the trainable variables,
then the statistics. `rules.protocol` defines tags and admission.

`UpdateRule` is the interface. `GradientRule` implements the replica's methods
for rules whose replicas hand over the gradient of one batch at a time.
`OptimizerRule` contains what all rules that wrap an optimizer share.

How to extend it:

* Replicas that join and leave: a new replica calls `begin`; `declare_lost` ends
  the wait for a replica that left.
* Contributions that arrive in pieces: only `GradientRule.apply_gradients` knows
  how gradients are sent.
* Several trainings on the same tasks: the store's namespace, a scope for the
  names of shared objects, separates them.
"""

import abc
import functools
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
from tf_replicas.store import moving_averages
from tf_replicas.store import parameter_store

WIRE_DTYPES = ("float16", "bfloat16")

# Methods of TF1's optimizers, and what replaces them.
_TF1_SUCCESSORS = {
  "compute_gradients": "`tf_replicas.Replica` computes gradients",
  "get_chief_queue_runner": "the chief calls the driver's `step`",
  "get_init_tokens_op": "not needed: the driver's `step` begins at once",
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
  """The result of one step of a replica.

  Attributes:
    token: The update rule's reply to the replica's gradients. Its `global_step`
      is the global step at which the variables in `state` were read, or
      `step_token.ENDED` (-1) if training has ended.
    state: The tensors that the replica needs for its next step, such as the
      parameters.
    computed: float64 scalar, the time at which the last gradients of the step
      were computed, in seconds since 1970; `step_token.NEVER` (0.0) if times
      are not recorded.
  """

  token: step_token.StepToken
  state: list[tf.Tensor]
  computed: tf.Tensor


class UpdateRule(abc.ABC):
  """Decides when and how gradients reach the variables.

  This is the interface of all update rules. A driver, the object that runs the
  training, calls the methods in the order that the module's docstring shows. A
  contribution is what a replica hands over for one update: gradients, the loss
  and the number of examples.

  Attributes:
    name: The name of the rule, which also appears in summaries.
    total_num_replicas: The number of replicas that contribute.
    replicas_to_aggregate: The number of contributions in one update.
    accepted_fraction: The fraction of all contributions that updates use if all
      replicas are equally fast.
    wire_dtype: The dtype to which trainable float32 variables and their
      gradients are cast while they are sent. None: they are not cast.
    step_timeout_secs: The time in seconds that an update waits for its
      contributions. Then it is made from those that have come; if they are
      fewer than `min_contributions`, the training ends with an error. None:
      there is no such limit.
    min_contributions: The smallest number of contributions in an update if
      replicas are lost or exceed `step_timeout_secs`. None: updates always have
      `replicas_to_aggregate` contributions.
    preadmits: Whether a `StepToken`, the reply to a contribution, may accept
      the replica's next contribution in advance, so that the replica sends its
      gradients without asking.
    repeats_refused: Whether a replica must compute the same batch again if its
      contribution was refused, and no update was made since. It is so where
      each update needs every replica. If a killed chief is restarted, for
      example, the update is then made from the batches that it would have had.
  """

  name: str
  total_num_replicas: int
  replicas_to_aggregate: int = 1
  accepted_fraction: float = 1.0
  wire_dtype: str | None = None
  step_timeout_secs: float | None = None
  min_contributions: int | None = None
  preadmits: bool = False
  repeats_refused: bool = False

  # Life.

  def __getattr__(self, name: str) -> NoReturn:
    """Raises AttributeError; Python calls it if an attribute does not exist.

    If `name` is a method of TF1's optimizers, the message says what to use
    instead.
    """
    hint = _TF1_SUCCESSORS.get(name)
    raise AttributeError(
      f"{type(self).__name__!r} has no attribute {name!r}"
      + (f"; {hint}." if hint else ".")
    )

  @abc.abstractmethod
  def build(
    self,
    store: parameter_store.ParameterStore,
    *,
    is_sparse: Sequence[bool] | None = None,
    namespace: resources.Namespace | None = None,
  ) -> None:
    """Creates the rule's shared objects on the PS tasks.

    If another process has created objects of these names, uses those.

    Args:
      store: Holds the variables, which need no values yet.
      is_sparse: For each element of `store.contributed` (the trainable
        variables, then the variables without gradients), whether its gradients
        are `tf.IndexedSlices`. None: all are dense.
      namespace: The scope of the names of the rule's own shared objects
        (queues, counts). None: the namespace of `store`.

    Raises:
      ValueError: If the rule does not support such variables or gradients.
    """

  @abc.abstractmethod
  def create(self, values: Sequence[tf.Tensor], *, resumed: bool) -> None:
    """Initializes the shared objects, or takes over those of an earlier chief.

    Only the chief calls it, after `build`.

    Args:
      values: The initial value of each variable, in the order of the parameter
        store. Not used if `resumed`.
      resumed: Whether to take over: True if an earlier chief has initialized
        the parameter store. Its variables then keep their values.
    """

  @abc.abstractmethod
  def start(self) -> None:
    """Prepares the rule for the first update of this chief.

    For example, a rule drops what replicas sent to an earlier chief. The chief
    calls it once, after all variables have their values.
    """

  @abc.abstractmethod
  def trace_ahead(self) -> None:
    """Traces all functions that may have to be called while a task hangs.

    They could not be traced then: an in-graph client that traces a function
    waits for all tasks (TensorFlow 2.21).
    """

  @abc.abstractmethod
  def signature(self) -> Mapping[str, object]:
    """Returns the settings that must be equal in the chief and all workers.

    Returns:
      The settings by name, of types that JSON can represent.
    """

  # The replica's half; to be used inside a `tf.function`.

  @abc.abstractmethod
  def begin(self, replica: int | tf.Tensor) -> ReplicaStep:
    """Reads the variables for a replica's first step.

    To be used inside a `tf.function`.

    Args:
      replica: The index of this replica, in [0, total_num_replicas).

    Returns:
      A `ReplicaStep` with the state for the first step, a list of tensors such
      as the parameters, and a `StepToken` with the global step at which they
      were read.
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
    """Makes one step of a replica: computes gradients and hands them over.

    Then waits until the replica may continue, and reads the variables for its
    next step. To be used inside a `tf.function`.

    Args:
      compute: Computes the gradients of the next batch from the parameters.
      replica: The index of this replica, in [0, total_num_replicas).
      state: The state that `begin` or the last `contribute` returned.
      token: The `StepToken` that `begin` or the last `contribute` returned.
      records_times: Whether to record when the gradients were computed. The
        gradients are then sent only after the clock was read.

    Returns:
      A `ReplicaStep` with the rule's reply to the gradients, and the state for
      the next step.

    Raises:
      tf.errors.OutOfRangeError, tf.errors.CancelledError: At run time, when
        training has ended.
    """

  # The chief's half.

  @abc.abstractmethod
  def apply_updates(self, max_updates: int = 1) -> list[results.Update]:
    """Waits for updates of the variables, or makes them.

    Only the chief calls it. Under synchronous rules, this method makes the
    updates. Under asynchronous rules the replicas make them, and this method
    reports them.

    Args:
      max_updates: The largest number of updates to make. A rule may make only
        one update per call, whatever the number.

    Returns:
      A list of at least one report. A report may combine several updates.

    Raises:
      NonFiniteGradientError: If a replica computed a gradient or a loss that is
        not finite.
      Interrupted: If `interrupt` was called.
      tf.errors.OutOfRangeError: After `close`.
    """

  @abc.abstractmethod
  def set_learning_rate(self, rate: float) -> None:
    """Sets the learning rate that is used from the next update on."""

  @abc.abstractmethod
  def stop_at(self, step: int) -> None:
    """Makes no more updates of the variables once the global step is `step`."""

  # For the driver that watches and ends the training.

  @abc.abstractmethod
  def counts(self) -> list[results.Counts]:
    """Returns how many contributions of each replica were used and refused.

    A contribution is one replica's gradients for one update. The numbers are
    for the whole training so far.

    Returns:
      One `results.Counts` per replica.
    """

  @abc.abstractmethod
  def status(self) -> results.StepStatus:
    """Returns the progress of the next update and the state of each replica.

    The progress is the number of contributions (sets of gradients) that have
    arrived and that are needed.
    """

  @abc.abstractmethod
  def declare_lost(self, replica: int, tag: int) -> None:
    """Stops waiting for `replica` until it contributes again.

    A contribution is one replica's gradients for one update; an integer tag
    identifies it.

    Args:
      replica: The index of the replica.
      tag: The tag of the replica's last contribution, as `status` returned it.
        A synchronous rule ignores the call if the replica has made a newer one.
    """

  def expire(self, step: int) -> None:
    """Makes an update from the contributions that have arrived.

    A contribution is one replica's gradients for one update. The driver calls
    this method when an update has waited for `step_timeout_secs`, and at least
    `min_contributions` have arrived. It does nothing under rules without
    `step_timeout_secs`.

    Args:
      step: The global step. The call has no effect on later steps.
    """
    del step

  @abc.abstractmethod
  def interrupt(self) -> None:
    """Ends the wait of `apply_updates`, which runs in another thread.

    `apply_updates` then raises `Interrupted`.
    """

  @abc.abstractmethod
  def release_replica(self, replica: int) -> None:
    """Tells `replica`, which runs in this process, that training has ended.

    The replica then stops waiting. The driver calls this method when the chief,
    which would answer the replica, is lost.
    """

  @abc.abstractmethod
  def end_replicas(self) -> None:
    """Tells replicas that training has ended.

    Under some rules, the call goes on answering replicas until `interrupt` is
    called in another thread.
    """

  @abc.abstractmethod
  def close(self) -> None:
    """Ends the training, so that no call waits any longer.

    Calls of the chief and of replicas that wait for each other raise
    `tf.errors.OutOfRangeError`.
    """

  # One program that has all gradients of a step.

  def in_lockstep(
    self, store: parameter_store.ParameterStore
  ) -> "LockstepUpdate":
    """Adapts this rule to one program that computes all replicas' gradients.

    Such a program needs no parameter servers: it sums the gradients of the
    replicas itself, and all updates are synchronous.

    Args:
      store: Holds the variables, all on one task.

    Returns:
      An object that makes updates with the optimizer and the settings of this
      rule.

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

  From step to step, a replica carries a state: the parameters, one tensor per
  element of `store.contributed` (the trainable variables, then the variables
  without gradients). Subclasses may add tensors to the state.

  Attributes:
    read_needs: What `pull` must do besides reading the variables, as names such
      as `snapshot_reads`. Empty: `pull` only reads.
    refresh_every: The number of steps that a replica makes between two reads of
      the variables.
  """

  refresh_every: int = 1
  read_needs: frozenset[str] = frozenset()
  _store: parameter_store.ParameterStore

  @abc.abstractmethod
  def scale_loss(self, loss: tf.Tensor) -> tf.Tensor:
    """Returns the scalar that a replica differentiates instead of `loss`.

    For example, it is `loss` times a constant for float16 computation.
    """

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
    """Hands over the gradients of a replica, and waits until it may continue.

    To be used inside a `tf.function`.

    Args:
      grads_and_vars: (gradient, variable) pairs. A gradient has the variable's
        shape and is a dense tensor, `tf.IndexedSlices` or None. A variable may
        be given by its path. Variables left out have no gradient. For a
        statistic (a variable without gradients, such as a moving mean), the old
        value minus the new value takes the gradient's place.
      replica: The index of this replica, in [0, total_num_replicas).
      local_step: int64 scalar, the global step of the variables from which the
        gradients were computed.
      loss: Scalar, the mean loss over the examples of the batch, for the
        chief's reports.
      num_examples: Scalar, the number of examples in the batch. Gradients and
        loss are means over them.
      preadmitted_tag: int64 scalar, the `preadmitted_tag` of the last
        `StepToken`, if that token has accepted these gradients in advance. They
        are then sent without asking. None: the rule decides first whether it
        accepts them.

    Returns:
      A token that says whether the gradients were used, and from which global
      step the replica continues.

    Raises:
      ValueError: If a variable is not in the store.
      tf.errors.OutOfRangeError, tf.errors.CancelledError: At run time, when
        training has ended.
    """

  def pull(
    self, replica: int | tf.Tensor, token: step_token.StepToken | None = None
  ) -> tuple[step_token.StepToken, list[tf.Tensor]]:
    """Reads the variables for a replica; to be used inside a `tf.function`.

    Args:
      replica: The index of the replica that reads, in [0, total_num_replicas).
      token: The reply to the replica's last gradients, on PS task 0, after
        which the variables are read. None: this is the first read.

    Returns:
      A copy of `token` with the global step at which the variables were read,
      as `step_token.at_step` makes it; and one tensor per variable of the
      parameter store. All are on the replica's device.
    """
    del replica
    read = functools.partial(self._store.pull, in_order=True)
    return step_token.pull(token, read)

  def pull_contributed(
    self, replica: int | tf.Tensor, token: step_token.StepToken | None = None
  ) -> tuple[step_token.StepToken, list[tf.Tensor]]:
    """Reads the variables to which replicas contribute, for a replica.

    To be used inside a `tf.function`.

    Args:
      replica: The index of the replica that reads, in [0, total_num_replicas).
      token: The reply to the replica's last gradients, on PS task 0, after
        which the variables are read. None: this is the first read.

    Returns:
      A copy of `token` with the global step at which the variables were read,
      as `step_token.at_step` makes it; and one tensor per element of
      `store.contributed`: the trainable variables, then the variables without
      gradients. All are on the replica's device.
    """
    token, values = self.pull(replica, token)
    return token, [values[i] for i in self._store.contributed]

  @tf.autograph.experimental.do_not_convert
  def begin(self, replica: int | tf.Tensor) -> ReplicaStep:
    """Reads the parameters for a replica's first step.

    To be used inside a `tf.function`. Implements `UpdateRule.begin`.

    Args:
      replica: The index of this replica, in [0, total_num_replicas).

    Returns:
      A `ReplicaStep` with the parameters, one tensor per element of
      `store.contributed` (the trainable variables, then the variables without
      gradients), and a `StepToken` with the global step at which they were
      read.
    """
    token, parameters = self.pull_contributed(replica)
    return ReplicaStep(token, parameters, step_token.never())

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
    """Computes and hands over the gradients of a batch, then reads parameters.

    Waits for the rule's reply before it reads. To be used inside a
    `tf.function`. Implements `UpdateRule.contribute`.

    Args:
      compute: Computes the gradients of the next batch from the parameters.
      replica: The index of this replica, in [0, total_num_replicas).
      state: The state that `begin` or the last `contribute` returned.
      token: The `StepToken` that `begin` or the last `contribute` returned.
      records_times: Whether to record when the gradients were computed. The
        gradients are then sent only after the clock was read.

    Returns:
      A `ReplicaStep` with the rule's reply to the gradients, and the parameters
      for the next step. The global step of the reply is the step at which these
      parameters were read, or `step_token.ENDED` (-1) if training has ended.

    Raises:
      tf.errors.OutOfRangeError, tf.errors.CancelledError: At run time, when
        training has ended.
    """
    token, computed = self.contribute_batch(
      compute, replica, state, token, records_times
    )
    return ReplicaStep(*self.pull_contributed(replica, token), computed)

  def contribute_batch(
    self,
    compute: ComputeFn,
    replica: int | tf.Tensor,
    parameters: Sequence[tf.Tensor],
    token: step_token.StepToken,
    records_times: bool,
  ) -> tuple[step_token.StepToken, tf.Tensor]:
    """Computes the gradients of one batch and hands them over.

    Called by `contribute`, inside a `tf.function`.

    Args:
      compute: Computes the gradients of the next batch from the parameters.
      replica: The index of this replica, in [0, total_num_replicas).
      parameters: The parameters that the replica read last.
      token: The `StepToken` that the replica received last.
      records_times: Whether to record when the gradients were computed.

    Returns:
      The `StepToken` that `apply_gradients` returned; and the time at which the
      gradients were computed, a float64 scalar in seconds since 1970, or
      `step_token.NEVER` (0.0) if `records_times` is False.
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


class OptimizerRule(GradientRule):
  """A rule that updates variables with the user's optimizer.

  Attributes:
    inner: The user's optimizer, wrapped so that it updates variables on PS
      tasks.
    applier: Applies gradients to the variables by the inner optimizer; set by
      `bind`.
    variable_averages: Keeps moving averages of variables. None: there are none.
    has_chief_statistics: Whether statistics (variables without gradients, such
      as moving means) are updated from one replica alone. If False, they are
      updated from the mean over the replicas.
    momentum_correction: Whether velocities are rescaled when the learning rate
      changes.
    loss_scale: A constant by which the loss is multiplied before it is
      differentiated, and by which gradients are divided. None: no scale.
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
    """Makes an update rule that applies gradients by `optimizer`.

    Args:
      optimizer: The optimizer of the user: a Keras 3 optimizer, or any object
        with `apply(gradients, variables)` or `apply_gradients(pairs)`.
      variable_averages: Keeps moving averages of variables. They are updated
        before the replicas continue. None: there are none.
      variables_to_average: The variables to average, or their paths. None: all,
        tables included.
      clip_replica_norm: The global norm to which each replica's gradients are
        clipped before they are sent. None: no clipping.
      clip_mean_norm: The global norm to which the gradients that an update
        applies are clipped. None: no clipping.
      momentum_correction: Whether velocities are rescaled when the learning
        rate changes, as `InnerOptimizer` describes.
      has_chief_statistics: Whether statistics (variables without gradients,
        such as moving means) are updated from one replica alone.
      loss_scale: A constant by which `scale_loss` multiplies the loss and
        `apply_gradients` divides the gradients, for float16 computation. None:
        no scale.
      wire_dtype: `float16` or `bfloat16`: the dtype to which trainable float32
        variables and their gradients are cast while they are sent. None: they
        are not cast.
      name: The name of the rule, which also appears in summaries.

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
    self.momentum_correction = momentum_correction
    self.loss_scale = loss_scale
    self._to_average = variables_to_average
    self._clip_replica_norm = clip_replica_norm
    self._clip_mean_norm = clip_mean_norm

  def check_built(self) -> None:
    """Raises RuntimeError unless `build` was called."""
    if not self.is_built:
      raise RuntimeError(
        f"The update rule {self.name!r} is not built: call `build` with the"
        " parameter store, or give the rule to a driver."
      )

  def bind(self, store: parameter_store.ParameterStore) -> None:
    """Stores `store`, and creates `applier` for its variables.

    The `applier` applies gradients by the inner optimizer, and updates the
    moving averages of variables.

    Args:
      store: Holds the variables to train.

    Raises:
      ValueError: If the store has tables (`tf_replicas.Embedding`), and several
        optimizers take turns, which does not work with tables.
    """
    if isinstance(self.inner, alternating_optimizer.AlternatingOptimizer):
      check_no_tables(store, "several optimizers that take turns")
    self._store = store
    self.applier = applier.Applier(
      store,
      self.inner,
      variable_averages=self.variable_averages,
      to_average=self._to_average,
      clip_norm=self._clip_mean_norm,
    )

  def assign_first(self, values: Sequence[tf.Tensor]) -> None:
    """Gives variables and moving averages their first values.

    Args:
      values: The initial value of each variable, in the order of the store.
    """
    self._store.assign_first(values)
    self.applier.initialize(values)

  def scale_loss(self, loss: tf.Tensor) -> tf.Tensor:
    """Multiplies `loss` by the rule's `loss_scale`, unless that is None."""
    return loss if self.loss_scale is None else loss * self.loss_scale

  def finish_gradients(self, gradients: Sequence[Gradient]) -> list[Gradient]:
    """Prepares one replica's gradients for sending.

    Args:
      gradients: The gradients of the scaled loss, one per element of
        `store.contributed` (the trainable variables, then the statistics, which
        have no gradients).

    Returns:
      The gradients divided by `loss_scale`, then clipped to the global norm
      `clip_replica_norm`. The entries of statistics (old minus new value) are
      not changed.
    """
    count = len(self._store.trainable)
    gradients, moves = list(gradients[:count]), list(gradients[count:])
    if self.loss_scale is not None:
      factor = 1 / self.loss_scale
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
    """Makes the mean of statistics over N contributions that of one replica.

    Statistics are variables without gradients, such as moving means. With
    `has_chief_statistics`, this multiplies their entries by N in the
    contribution of one replica, and by 0 in all others. The mean over N
    contributions is then the entry of that replica. The loss scale and the sums
    of metrics are also variables without gradients, but need all replicas:
    their entries are not changed.

    Args:
      gradients: One replica's contribution, one entry per element of
        `store.contributed` (the trainable variables, then the statistics).
      weight: The factor: N for the replica that updates the statistics, 0 for
        all other replicas.

    Returns:
      The contribution with the factor applied; `gradients` unchanged if
      `has_chief_statistics` is False.
    """
    if not self.has_chief_statistics:
      return list(gradients)
    weighed = []
    for index, gradient in zip(self._store.contributed, gradients, strict=True):
      if self._store.specs[index].is_statistic:
        gradient = gradient_math.scaled(gradient, weight)
      weighed.append(gradient)
    return weighed

  def in_order(
    self, grads_and_vars: Iterable[tuple[Gradient, tf.Variable | str]]
  ) -> list[Gradient]:
    """Sorts a replica's gradients by variable, and prepares them for sending.

    Args:
      grads_and_vars: (gradient, variable) pairs, as for `apply_gradients`.

    Returns:
      The result of `finish_gradients`: one gradient per element of
      `store.contributed` (the trainable variables, then the variables without
      gradients).

    Raises:
      ValueError: If a variable is not in the store.
    """
    ordered = gradient_math.in_order(self._store, grads_and_vars)
    return self.finish_gradients(ordered)

  def set_learning_rate(self, rate: float) -> None:
    """Sets the learning rate that the optimizer uses from the next update on.

    Raises:
      ValueError: If several optimizers take turns, or if the optimizer's rate
        cannot be changed.
    """
    if isinstance(self.inner, alternating_optimizer.AlternatingOptimizer):
      raise ValueError(
        "the learning rates of several optimizers that take turns must not be"
        " set during training: give each optimizer a schedule."
      )
    self.inner.set_learning_rate(rate)

  def trace_ahead(self) -> None:
    """Traces the functions that `counts` and `status` call.

    They could not be traced later, while a task hangs: a client that traces a
    function waits for all tasks.
    """
    self.counts()
    self.status()

  def suspend(self) -> results.Update | None:
    """Refuses all gradients until `resume`, and lets waiting replicas continue.

    `SwitchingOptimizer` calls it when it changes to another rule. This
    implementation only raises ValueError; a rule that can be suspended
    overrides it.

    Returns:
      One report that combines all updates that `apply_updates` has not returned
      yet; None if there are none.

    Raises:
      ValueError: If the rule cannot be suspended.
    """
    raise ValueError(
      f"the update rule {self.name!r} has no `suspend` and `resume`, which"
      " `SwitchingOptimizer` needs."
    )

  def resume(self) -> None:
    """Takes gradients of replicas again after `suspend`.

    `SwitchingOptimizer` calls it when it changes to this rule. This
    implementation only raises ValueError; a rule that can be suspended
    overrides it.

    Raises:
      ValueError: If the rule cannot be suspended.
    """
    raise ValueError(
      f"the update rule {self.name!r} has no `suspend` and `resume`, which"
      " `SwitchingOptimizer` needs."
    )


class LockstepUpdate:
  """Makes the updates for one program that computes all replicas' gradients.

  The training then needs no parameter servers, and all updates are synchronous.

  Attributes:
    rule: The update rule, whose optimizer and settings are used.
  """

  def __init__(
    self, rule: OptimizerRule, store: parameter_store.ParameterStore
  ):
    """Prepares the updates of the variables in `store` by `rule`.

    Args:
      rule: The update rule, whose optimizer and settings are used.
      store: Holds the variables, all on one task.
    """
    self.rule = rule
    self._store = store
    rule.bind(store)

  def create(self, values: Sequence[tf.Tensor]) -> None:
    """Assigns the initial values, and sets the global step to 0.

    Args:
      values: The initial value of each variable, in the order of the store.
    """
    self.rule.assign_first(values)
    self.rule.inner.build(self._store, is_chief=True)
    self._store.start()

  def finish_gradients(
    self, gradients: Sequence[Gradient], replica: int = 0
  ) -> list[Gradient]:
    """Prepares one replica's gradients for the sum over all replicas.

    Args:
      gradients: One per element of `store.contributed` (the trainable
        variables, then the statistics, which have no gradients).
      replica: The index of the replica. With `has_chief_statistics`, only
        replica 0 updates the statistics.

    Returns:
      The gradients, divided by the loss scale and clipped, if the rule does so;
      and the entries of the statistics.
    """
    weight = 0 if replica else self.rule.replicas_to_aggregate
    gradients = self.rule.finish_gradients(gradients)
    return self.rule.weigh_statistics(gradients, weight)

  def apply(
    self, sums: Sequence[Gradient], step: tf.Tensor, num_examples: tf.Tensor
  ) -> tf.Tensor:
    """Updates the variables from sums of gradients; inside a `tf.function`.

    Also increases the global step by 1.

    Args:
      sums: For each element of `store.contributed`, the sum over all replicas:
        for a trainable variable of its gradients; for a variable without
        gradients, such as a moving mean, of old minus new values. None skips
        the variable.
      step: int64 scalar, the global step before the update.
      num_examples: Scalar, the number of examples used.

    Returns:
      int64 scalar, the global step after the update; a control dependency on it
      waits for the whole update.
    """
    present = [total is not None for total in sums]
    updated = self.rule.applier(
      present, step, lambda _: sums, self.rule.replicas_to_aggregate
    )
    with tf.control_dependencies([updated]):
      return self._store.advance(step, num_examples)


def check_count(name: str, value: int) -> None:
  """Raises TypeError or ValueError unless `value` is a positive integer.

  Args:
    name: The name of the argument that is checked, for the message.
    value: The value of the argument.
  """
  if isinstance(value, bool) or not isinstance(value, int):
    raise TypeError(f"`{name}` must be an integer. Received: {value!r}.")
  if value < 1:
    raise ValueError(f"`{name}` must be at least 1. Received: {value}.")


def check_positive(name: str, value: float | None) -> None:
  """Raises ValueError unless `value` is positive or None.

  Args:
    name: The name of the argument that is checked, for the message.
    value: The value of the argument.
  """
  if value is not None and not value > 0:
    raise ValueError(f"`{name}` must be positive. Received: {value}.")


def check_no_tables(store: parameter_store.ParameterStore, what: str) -> None:
  """Raises ValueError if `store` has tables.

  A table is the variable of a `tf_replicas.Embedding`, whose rows stay on the
  parameter servers.

  Args:
    store: The parameter store.
    what: The rule or option that does not support tables, for the message.
  """
  if store.table_paths:
    raise ValueError(
      f"{what} must not be used with tables (`tf_replicas.Embedding`), whose"
      " rows exist only on the parameter servers; use `keras.layers.Embedding`,"
      f" or another rule. Received: the tables {', '.join(store.table_paths)}."
    )


def check_rule(rule: object) -> UpdateRule:
  """Checks that a user's function has returned an update rule.

  Args:
    rule: What the function has returned.

  Returns:
    `rule`.

  Raises:
    TypeError: If `rule` is not an `UpdateRule`.
  """
  if not isinstance(rule, UpdateRule):
    raise TypeError(
      "the function that makes the update rule must return one, such as"
      " `tf_replicas.SyncReplicasOptimizer(optimizer, ...)`. Received:"
      f" {rule!r:.60}."
    )
  return rule


def check_replicas(rule: UpdateRule, names: Sequence[str]) -> None:
  """Checks that `rule.total_num_replicas` is the number of replicas.

  Otherwise the rule would wait for replicas that do not exist, or leave some
  out.

  Args:
    rule: The update rule.
    names: The names of all replicas.

  Raises:
    ValueError: If the numbers differ.
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
  """Initializes a new training, or takes over an earlier chief's training.

  It takes over if the variables of `store` are initialized already. Only the
  chief calls it.

  Args:
    rule: The update rule, built for `store`.
    store: Holds the variables.
    values: The initial value of each variable, in the store's order; used for a
      new training only.
  """
  is_resumed = store.is_initialized()
  rule.create(values, resumed=is_resumed)
  if not is_resumed:
    # The global step comes last: it tells other clients that all values exist.
    store.start()
