"""Changes the update rule of a training while it runs.

`SwitchingOptimizer` documents how the change is made.
"""

from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Sequence

import tensorflow as tf

from tf_replicas.rules import base as rule_base
from tf_replicas.rules import protocol
from tf_replicas.rules import results
from tf_replicas.rules import step_token
from tf_replicas.rules import switch_conditions
from tf_replicas.runtime import resources
from tf_replicas.store import parameter_store


class SwitchingOptimizer(rule_base.GradientRule):
  """An update rule that uses one of several rules, and can change to another.

  A variable on PS task 0 holds the index of the rule in use. When a replica has
  computed its gradients, it reads this index and hands the gradients to that
  rule. The chief changes the rule between one update and the next:

  1. It sets the index. Replicas that finish computing from now on use the new
     rule.
  2. It suspends the old rule. Replicas that wait in the old rule are released
     without an update, and read the variables again. A replica that read the
     index just before the change may enter the old rule late; a suspended
     synchronous rule keeps on releasing such replicas.
  3. It waits until no update of the old rule is in progress.

  If the change interrupts a synchronous update, this update is not made, and at
  most one contribution (set of gradients) of each replica is refused. So is a
  contribution that the old rule has admitted in advance. All rules share
  variables, slots, moving averages, the global step, the count of examples, and
  the checkpoint.

  Attributes:
    rules: The rules that are combined, by index.
    inner: The inner optimizer, shared by all rules.
    total_num_replicas: M, the number of replicas, including backup replicas.
    preadmits: Whether any of the rules may accept a replica's next contribution
      in advance.
    repeats_refused: Whether a replica computes the same batch again under any
      of the rules, if its contribution was refused and no update was made
      since.
    wire_dtype: The dtype in which trainable float32 variables and their
      gradients are sent. None: their dtype is not changed.
  """

  def __init__(
    self,
    rules: Sequence[rule_base.OptimizerRule],
    choose: Callable[[switch_conditions.Progress], switch_conditions.Choice],
    *,
    name: str = "switching",
  ):
    """Combines several update rules into one.

    Args:
      rules: The rules; training starts with the first. All must wrap the same
        optimizer object, and have the same number M of replicas, `wire_dtype`,
        `loss_scale` and `momentum_correction`.
      choose: Maps the progress of the training to the rule for the next
        updates. `switch_conditions` makes such functions.
      name: The name of the combined rule.

    Raises:
      ValueError: If the rules cannot be combined.
    """
    _check(rules)
    first = rules[0]
    for rule in rules:
      rule.inner = first.inner
    # A read under one rule may be followed by an update under the next.
    needs = [rule.read_needs for rule in rules]
    all_needs = frozenset().union(*needs)
    if all_needs not in needs:
      raise ValueError(
        "One of `rules` must do what reads need under all of them, as replicas"
        " go on reading while the rule changes. Received rules whose reads"
        " need:"
        f" {', '.join(str(sorted(n)) for n in needs)}."
      )
    self.rules = list(rules)
    self._reader = rules[needs.index(all_needs)] if all_needs else None
    self.inner = first.inner
    self.total_num_replicas = first.total_num_replicas
    self.preadmits = any(rule.preadmits for rule in rules)
    self.repeats_refused = any(rule.repeats_refused for rule in rules)
    self.wire_dtype = first.wire_dtype
    self.name = name
    self._choose = choose
    self._number = 0
    # Whether `_number` is that of the rule in use: not in workers.
    self._knows_number = True
    self._last_step: int | None = None
    self._limits: dict[int, int] = {}  # What each rule was told last.
    self._is_interrupted = False

  @property
  def _rule(self) -> rule_base.OptimizerRule:
    """The rule in use. Workers read its index from PS task 0."""
    if self._knows_number or not bool(self._in_use.is_initialized()):
      return self.rules[self._number]
    return self.rules[int(self._in_use.read_value())]

  @property
  def replicas_to_aggregate(self) -> int:
    """The number of contributions in an update of the rule in use."""
    return self._rule.replicas_to_aggregate

  @property
  def accepted_fraction(self) -> float:
    """The fraction of contributions that updates of the rule in use apply."""
    return self._rule.accepted_fraction

  def build(
    self,
    store: parameter_store.ParameterStore,
    *,
    is_sparse: Sequence[bool] | None = None,
    namespace: resources.Namespace | None = None,
  ) -> None:
    """Creates the shared objects of all rules on the PS tasks, or finds them.

    One more object is a variable that holds the index of the rule in use.
    Implements `UpdateRule.build`, which documents the arguments.
    """
    self._store = store
    self._device = store.device_of_task(0)
    namespace = namespace or store.namespace
    for number, rule in enumerate(self.rules):
      own = namespace.child(f"rule{number}")
      rule.build(store, is_sparse=is_sparse, namespace=own)
    with tf.device(self._device):
      self._in_use = namespace.variable("rules/in_use", [], tf.int64)
      self._has_ended = namespace.variable("rules/ended", [], tf.bool)
    self._knows_number = False

  def create(self, values: Sequence[tf.Tensor], *, resumed: bool) -> None:
    """Initializes the shared objects, or takes over those of an earlier chief.

    A new training starts with the first rule; one that is taken over keeps its
    rule. The other rules are suspended. Implements `UpdateRule.create`, which
    documents the arguments.
    """
    if not resumed:
      self._in_use.assign(0)
    self._has_ended.assign(False)
    self._knows_number = True
    self._number = int(self._in_use.read_value())
    for number, rule in enumerate(self.rules):
      rule.create(values, resumed=resumed)
      if number != self._number:
        rule.suspend()

  def start(self) -> None:
    """Calls `start` of the rule in use, which prepares it for its first update.

    The chief calls this method once, after all variables have their values.
    """
    self._rule.start()

  def signature(self) -> dict[str, object]:
    """Returns the settings that must be equal in the chief and all workers.

    Returns:
      The name of this rule and the settings of the combined rules, of types
      that JSON can represent.
    """
    rules = [rule.signature() for rule in self.rules]
    return {"name": self.name, "rules": rules}

  # The replica's half.

  def pull(
    self, replica: int | tf.Tensor, token: step_token.StepToken | None = None
  ) -> tuple[step_token.StepToken, list[tf.Tensor]]:
    """Reads the variables in a way that suits all of the combined rules.

    Some rules need more than a plain read, for example a read that no update
    interrupts (`read_needs`). One of the rules meets the needs of all, and this
    method calls its `pull`. Implements `GradientRule.pull`, which documents the
    arguments and the result.
    """
    if self._reader is not None:
      return self._reader.pull(replica, token)
    return super().pull(replica, token)

  def scale_loss(self, loss: tf.Tensor) -> tf.Tensor:
    """Returns the scalar that a replica differentiates instead of `loss`.

    It is `loss` times the constant `loss_scale` that all rules have, or `loss`
    itself if that is None.
    """
    return self.rules[0].scale_loss(loss)

  @tf.autograph.experimental.do_not_convert
  def apply_gradients(
    self,
    grads_and_vars: Iterable[tuple[rule_base.Gradient, tf.Variable | str]],
    *,
    replica: int | tf.Tensor,
    local_step: tf.Tensor,
    loss: tf.Tensor | float = 0.0,
    num_examples: tf.Tensor | int = 0,
    preadmitted_tag: tf.Tensor | None = None,
  ) -> step_token.StepToken:
    """Hands a replica's gradients to the rule in use, and waits for its reply.

    If the chief changes the rule meanwhile, the gradients may be dropped;
    `admitted` of the returned token is then 0. Implements
    `GradientRule.apply_gradients`, which documents the arguments.
    """
    pairs = list(grads_and_vars)

    def hand_to(rule):
      return rule.apply_gradients(
        pairs,
        replica=replica,
        local_step=local_step,
        loss=loss,
        num_examples=num_examples,
        preadmitted_tag=preadmitted_tag if rule.preadmits else None,
      )

    with tf.device(self._device):
      in_use = tf.identity(self._in_use.read_value())
    token = resources.switch(in_use, self.rules, hand_to)
    with tf.device(self._device):
      with tf.control_dependencies([token.global_step]):
        has_ended = self._has_ended.read_value()
      gave_way = (token.global_step < 0) & ~has_ended
      return token._replace(
        admitted=tf.where(gave_way, tf.zeros([], tf.int64), token.admitted),
        global_step=tf.where(gave_way, local_step, token.global_step),
      )

  # The chief's half.

  def set_learning_rate(self, rate: float) -> None:
    """Sets the learning rate of the optimizer that all rules share.

    The rate is used from the next update on.
    """
    self._rule.set_learning_rate(rate)

  def stop_at(self, step: int) -> None:
    """Makes the training stop updating the variables at global step `step`."""
    self._last_step = step

  def apply_updates(self, max_updates: int = 1) -> list[results.Update]:
    """Changes the rule if `choose` says so, and returns the next update.

    If the old rule has made asynchronous updates that were not returned yet,
    this call returns them instead, combined in one report. `max_updates` is
    ignored. Implements `UpdateRule.apply_updates`, which documents the errors.

    Returns:
      A list of one report.
    """
    del max_updates
    step = int(self._store.read_global_step())
    if self._last_step is not None and step >= self._last_step:
      return self._rule.apply_updates(1)  # Updates not returned yet.
    choice = self._choose(
      switch_conditions.Progress(step, self._number, self._rule.counts)
    )
    limits = [s for s in (choice.until, self._last_step) if s is not None]
    limit = min(limits, default=protocol.NO_LIMIT)
    if self._limits.get(choice.rule) != limit:
      self._limits[choice.rule] = limit
      self.rules[choice.rule].stop_at(limit)
    rest = None
    if choice.rule != self._number and not self._is_interrupted:
      rest = self._change_to(choice.rule)
    try:
      return [rest] if rest else self._rule.apply_updates(1)
    except results.Interrupted:
      self._is_interrupted = False
      raise

  def _change_to(self, number: int) -> results.Update | None:
    """Changes the rule in use.

    Args:
      number: The index of the new rule.

    Returns:
      One report that combines all updates of the old rule that `apply_updates`
      has not returned yet; None if there are none.
    """
    self.rules[number].resume()
    self._in_use.assign(number)
    resources.flush_assignments([self._in_use])
    rest = self._rule.suspend()
    self._number = number
    if self._is_interrupted:  # Only the old rule was interrupted.
      self._rule.interrupt()
    return rest

  # For the driver that watches and ends the training.

  def counts(self) -> list[results.Counts]:
    """Returns how many contributions of each replica were used and refused.

    A contribution is one replica's gradients for one update.

    Returns:
      One `results.Counts` per replica, summed over all rules.
    """
    by_rule = [rule.counts() for rule in self.rules]
    return [results.total(counts) for counts in zip(*by_rule, strict=True)]

  def status(self) -> results.StepStatus:
    """Returns `status` of the rule in use.

    That is the number of contributions that have arrived for the next update,
    and the state of each replica.
    """
    return self._rule.status()

  def declare_lost(self, replica: int, tag: int) -> None:
    """Makes the rule in use stop waiting for `replica`.

    This holds until the replica contributes again. Implements
    `UpdateRule.declare_lost`, which documents the arguments.
    """
    self._rule.declare_lost(replica, tag)

  def trace_ahead(self) -> None:
    """Traces all functions that may have to be called while a task hangs.

    They could not be traced then: a client that traces a function waits for all
    tasks (TensorFlow 2.21).
    """
    for rule in self.rules:
      rule.trace_ahead()

  def interrupt(self) -> None:
    """Ends the wait of `apply_updates`, which runs in another thread.

    `apply_updates` then raises `Interrupted`.
    """
    self._is_interrupted = True
    self._rule.interrupt()

  def end_replicas(self) -> None:
    """Makes the rule in use tell replicas that training has ended.

    Under some rules the call goes on answering replicas until `interrupt` is
    called.
    """
    self._end()
    self._rule.end_replicas()

  def _end(self) -> None:
    """Records in a variable on PS task 0 that training has ended.

    A rule tells replicas to end both when training ends and when the rule is
    suspended. A replica reads this variable to find out which it is. Without
    the record, it would continue with the new rule.
    """
    self._has_ended.assign(True)
    resources.flush_assignments([self._has_ended])

  def release_replica(self, replica: int) -> None:
    """Tells `replica`, which runs in this process, that training has ended.

    Called when the chief, which would answer the replica, is lost.
    """
    self._end()
    for rule in self.rules:
      rule.release_replica(replica)

  def close(self) -> None:
    """Ends the training, so that no call waits any longer.

    Calls of the chief and of replicas that wait for each other raise
    `tf.errors.OutOfRangeError`.
    """
    for rule in self.rules:
      rule.close()


def _check(rules: Sequence[rule_base.OptimizerRule]) -> None:
  """Raises ValueError unless the rules can be combined.

  They need the same optimizer object, number of replicas, `wire_dtype`,
  `loss_scale` and `momentum_correction`. A replica scales its loss before it
  knows which rule takes its gradients, and all rules use the wrapped optimizer
  of the first. They must not use options such as `refresh_every` or
  `step_timeout_secs`.
  """
  first = rules[0]
  same = "total_num_replicas", "wire_dtype", "loss_scale", "momentum_correction"
  for rule in rules:
    for field in same:
      if getattr(rule, field) != getattr(first, field):
        raise ValueError(
          f"`rules` must have the same `{field}`. Received:"
          f" {getattr(first, field)} and {getattr(rule, field)}."
        )
    if rule.inner.optimizer is not first.inner.optimizer:
      raise ValueError(
        "`rules` must be around one and the same optimizer. Received:"
        f" {first.inner.optimizer!r} and {rule.inner.optimizer!r}."
      )
    if rule.refresh_every > 1:
      raise ValueError(
        "`rules` must have a `refresh_every` of 1. Received:"
        f" {rule.refresh_every}."
      )
    if rule.step_timeout_secs is not None:
      raise ValueError(
        "`rules` must have no `step_timeout_secs`. Received:"
        f" {rule.step_timeout_secs}."
      )
    if rule.min_contributions not in (None, rule.replicas_to_aggregate):
      raise ValueError(
        "Each of `rules` must have as many `min_contributions` as"
        f" `replicas_to_aggregate`, {rule.replicas_to_aggregate}. Received:"
        f" {rule.min_contributions}."
      )
    if rule.replicas_to_aggregate > rule.total_num_replicas:
      raise ValueError(
        "Each of `rules` must take at most one contribution of a replica in an"
        f" update. Received: {rule.replicas_to_aggregate} contributions of"
        f" {rule.total_num_replicas} replicas."
      )
