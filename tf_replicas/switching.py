"""A training whose update rule changes on the way.

`SwitchingOptimizer` says how it comes about.
"""

from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Sequence

import tensorflow as tf

from tf_replicas import ledger
from tf_replicas import parameter_store
from tf_replicas import releases
from tf_replicas import resources
from tf_replicas import rule_choice
from tf_replicas import update_rule
from tf_replicas import updates


class SwitchingOptimizer:
  """Several update rules on the same variables, of which one is in use.

  Which one is a variable on PS task 0. A replica looks there when it has its
  gradients, and hands them to the rule that is then in use. The chief changes
  it between two updates:

  1. It says which rule is next, so that whoever has gradients from now on turns
     to that one.
  2. It ends the old rule: who waits in it is released, and reads anew. A thread
     goes on to release those who looked just before the change.
  3. It waits until no update of the old rule is under way.

  What a replica had handed over for a synchronous update that is not made is
  dropped; at most one set of gradients of each. Variables, slots, averages,
  global step and the count of examples are one and the same for all rules, and
  so is the checkpoint.

  Attributes:
    rules: The rules.
    inner: The inner optimizer of them all.
    total_num_replicas: M.
    wire_dtype: As what float32 parameters and gradients travel.
  """

  refresh_every = 1
  used_share = 1.0

  def __init__(
    self,
    rules: Sequence[update_rule.UpdateRule],
    choose: Callable[[rule_choice.Progress], rule_choice.Choice],
    *,
    name: str = "switching",
  ):
    """Puts rules together.

    Args:
      rules: All around one and the same optimizer, for the same M replicas.
      choose: Maps the progress to the rule for the next update.
      name: Names the rule.

    Raises:
      ValueError: If the rules do not go together.
    """
    first = rules[0]
    for rule in rules:
      for field in ("total_num_replicas", "wire_dtype"):
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
      if rule.replicas_to_aggregate > rule.total_num_replicas:
        raise ValueError(
          "`rules` must want one contribution of a replica at a time."
          f" Received: {rule.replicas_to_aggregate} of"
          f" {rule.total_num_replicas} replicas."
        )
      rule.inner = first.inner
    if len({type(rule) for rule in rules}) < len(rules):
      raise ValueError(
        "`rules` must be of different classes, as two of one would share their"
        f" queues and counts. Received: {[type(r).__name__ for r in rules]}."
      )
    self.rules = list(rules)
    self.inner = first.inner
    self.total_num_replicas = first.total_num_replicas
    self.replicas_to_aggregate = 1
    self.wire_dtype = first.wire_dtype
    self.name = name
    self._choose = choose
    self._number = 0
    self._last_step: int | None = None
    self._limited: tuple[int, int] | None = None
    self._is_interrupted = False

  @property
  def has_tickets(self) -> bool:
    """Whether a `Release` may carry a ticket."""
    return any(rule.has_tickets for rule in self.rules)

  @property
  def _rule(self) -> update_rule.UpdateRule:
    return self.rules[self._number]

  def build(
    self,
    store: parameter_store.ParameterStore,
    *,
    is_sparse: Sequence[bool] | None = None,
  ) -> None:
    """Attaches to, or creates, everything on the PS tasks; as the rules."""
    self._store = store
    self._device = store.device_of_task(0)
    for rule in self.rules:
      rule.build(store, is_sparse=is_sparse)
    with tf.device(self._device):
      self._in_use = resources.shared_variable("rules/in_use", [], tf.int64)
      self._has_ended = resources.shared_variable("rules/ended", [], tf.bool)

  def create(self, values: Sequence[tf.Tensor]) -> None:
    """The chief's: gives everything its first value, unless it has one.

    Args:
      values: Of the variables, in the store's order.
    """
    is_new = not self._store.is_initialized()
    if is_new:
      self._in_use.assign(0)
      self._has_ended.assign(False)
      for rule in self.rules:
        rule.initialize(values)
    for rule in self.rules:
      rule.make_ready(is_chief=True)
    self._number = int(self._in_use.read_value())
    if is_new:
      self._store.start()
    else:
      self._has_ended.assign(False)
      self._rule.take_over()
    for number, rule in enumerate(self.rules):
      if number != self._number:
        rule.suspend()

  def begin_updates(self) -> None:
    """The chief's, before its first update: of a store that is whole."""
    self._rule.begin_updates()

  def signature(self) -> list:
    """What every client of a training must agree on about the rule."""
    return [self.name, [rule.signature() for rule in self.rules]]

  # The replica's half.

  def pull(self, replica: int | tf.Tensor) -> tuple[tf.Tensor, list[tf.Tensor]]:
    """The global step and every variable; to be used inside a `tf.function`.

    The way of that rule which does more than read, if there is one: its
    successor may apply what comes of it.
    """
    for rule in self.rules:
      if hasattr(rule, "pull"):
        return rule.pull(replica)
    return self._store.pull()

  def scale_loss(self, loss: tf.Tensor) -> tf.Tensor:
    """What to differentiate instead of `loss`."""
    return self.rules[0].scale_loss(loss)

  @tf.autograph.experimental.do_not_convert
  def apply_gradients(
    self,
    grads_and_vars: Iterable[tuple[parameter_store.Gradient, object]],
    *,
    local_step: tf.Tensor,
    ticket: tf.Tensor | None = None,
    **more,
  ) -> releases.Release:
    """Hands gradients to the rule in use; to be used inside a `tf.function`.

    Args:
      grads_and_vars: As the rules take them.
      local_step: As the rules take it.
      ticket: That of the last `Release`, unless -1.
      **more: What else the rules take.

    Returns:
      What the rule returned, or, if it ended meanwhile, that the gradients were
      not used.
    """
    pairs = list(grads_and_vars)

    def hand_to(rule):
      own_ticket = ticket if rule.has_tickets else None
      return rule.apply_gradients(
        pairs, local_step=local_step, ticket=own_ticket, **more
      )

    with tf.device(self._device):
      in_use = tf.identity(self._in_use.read_value())
    release = resources.select(in_use, self.rules, hand_to)
    with tf.device(self._device):
      with tf.control_dependencies([release.global_step]):
        has_ended = self._has_ended.read_value()
      gave_way = (release.global_step < 0) & ~has_ended
      return release._replace(
        admitted=tf.where(gave_way, tf.zeros([], tf.int64), release.admitted),
        global_step=tf.where(gave_way, local_step, release.global_step),
      )

  # The chief's half.

  def set_learning_rate(self, rate: float) -> None:
    """Sets the inner Keras optimizer's rate, from the next update on."""
    self._rule.set_learning_rate(rate)

  def stop_at(self, step: int) -> None:
    """Makes no update after global step `step`."""
    self._last_step = step

  def apply_update(self) -> updates.Update:
    """Changes the rule if it is time to, and makes an update by it.

    Raises:
      As the rules do.
    """
    step = int(self._store.read_global_step())
    if self._last_step is not None and step >= self._last_step:
      return self._rule.apply_update()  # Which tells of what was made.
    choice = self._choose(
      rule_choice.Progress(step, self._number, self._rule.counts)
    )
    limits = [s for s in (choice.until, self._last_step) if s is not None]
    limit = min(limits, default=None)
    if limit is not None and (choice.rule, limit) != self._limited:
      self._limited = choice.rule, limit
      self.rules[choice.rule].stop_at(limit)
    rest = None
    if choice.rule != self._number and not self._is_interrupted:
      rest = self._change_to(choice.rule)
    try:
      return rest or self._rule.apply_update()
    except updates.Interrupted:
      self._is_interrupted = False
      raise

  def _change_to(self, number: int) -> updates.Update | None:
    """Changes the rule; what the old one has not told of yet."""
    self.rules[number].resume()
    self._in_use.assign(number)
    resources.await_assigned([self._in_use])
    rest = self._rule.suspend()
    self._number = number
    if self._is_interrupted:  # That was told to the old rule.
      self._rule.interrupt()
    return rest

  # For whoever drives or watches it.

  def counts(self) -> list[updates.Counts]:
    """What became of each replica's gradients, under all rules."""
    by_rule = [rule.counts() for rule in self.rules]
    return [updates.total(counts) for counts in zip(*by_rule, strict=True)]

  def ledger(self) -> ledger.Ledger:
    """Who owes what at this moment to the rule in use."""
    return self._rule.ledger()

  def declare_lost(self, replica: int, tag: int) -> None:
    """Tells the rule in use that `replica` is gone."""
    self._rule.declare_lost(replica, tag)

  def trace_ahead(self) -> None:
    """See `update_rule.UpdateRule`."""
    for rule in self.rules:
      rule.trace_ahead()

  def interrupt(self) -> None:
    """Makes `apply_update`, waiting in another thread, raise `Interrupted`."""
    self._is_interrupted = True
    self._rule.interrupt()

  def end_replicas(self) -> None:
    """Releases every replica to `releases.ENDED`, as the rule in use."""
    self._end()
    self._rule.end_replicas()

  def _end(self) -> None:
    """Says that who is released to `releases.ENDED` is not to begin anew."""
    self._has_ended.assign(True)
    resources.await_assigned([self._has_ended])

  def give_up(self, replica: int) -> None:
    """Ends `replica`, which has no chief; its thread is another."""
    self._end()
    for rule in self.rules:
      rule.give_up(replica)

  def close(self) -> None:
    """Ends the training: every replica gets `OutOfRangeError`."""
    for rule in self.rules:
      rule.close()
