"""Whole gradient sets on their way from the replicas to the update.

A *contribution* is everything one replica has to say about one batch: all its
gradients, its loss, its number of examples. It is admitted or refused as a
whole, and what is offered is refused before its bytes travel.

Where objects live:

* PS task 0: the `inbox` (a queue of short messages from all replicas), one
  `replies` queue per replica, and the *ledger*: what each replica is doing,
  which contributions the step has accepted, and counts since the start.
* every PS task: one `gradients` queue per replica, for the part of its
  gradient sets that concerns the variables of that task.

A replica's side of one contribution (`offer`):

1. It puts OFFER(replica, tag, step) into the inbox; the step is that of the
   variables which it computed from.
2. It waits for the reply: ADMIT or RELEASE(step).
3. If admitted, it puts its gradients into its queue on every PS task, then
   DELIVERED into the inbox, and waits for RELEASE(step) or CONTINUE(step).
4. CONTINUE means that its next contribution is admitted already, under the
   next tag, its *ticket*: it goes on with 3. Where every replica is needed for
   every step nobody has to ask.

The chief's side of one step (`collect`, which runs wholly on PS task 0): take
messages from the inbox, note each in the ledger (`ledger.record`), and give
the free places of the step to those who wait with a fresh offer
(`ledger.settle`). Of N places one is free unless it was delivered or is owed
by an admitted replica. An offer from older variables is released at once, as
late. A fresh one without a place waits: it takes that of an admitted replica
that is lost (the chief says LOST), or is surplus when the step ends. When N
were delivered their mean is applied (`take_sums`, `release_all`).

A replica has one contribution open at a time. A new offer of a replica whose
last one is still open therefore means that it was restarted: the old one is
void, its gradients are thrown away by their tag, and the old waiter, which may
live on at the PS and would eat the next reply, is fed a VOID that carries the
old tag. If the old process lives as well, its next offer voids the new one's;
both go on so until the old one has heard that it was replaced (`membership`).
"""

import secrets
from collections.abc import Sequence

import tensorflow as tf

from tf_replicas import gradient_queues
from tf_replicas import ledger as ledger_lib
from tf_replicas import parameter_store
from tf_replicas import releases
from tf_replicas import replies as replies_lib
from tf_replicas import resources

Kind = ledger_lib.Kind
Status = ledger_lib.Status
Verdict = ledger_lib.Verdict


class Contributions:
  """The queues and the ledger of one training, for either side.

  Attributes:
    num_replicas: R, how many replicas offer.
    replicas_to_aggregate: N, how many contributions make a step.
  """

  def __init__(
    self,
    store: parameter_store.ParameterStore,
    *,
    num_replicas: int,
    replicas_to_aggregate: int,
    is_sparse: Sequence[bool],
    has_chief_statistics: bool = False,
  ):
    """Creates the objects on the PS tasks, or attaches to them.

    Args:
      store: The variables that the gradients belong to.
      num_replicas: R.
      replicas_to_aggregate: N.
      is_sparse, has_chief_statistics: As for `GradientQueues`.
    """
    self.num_replicas = num_replicas
    self.replicas_to_aggregate = replicas_to_aggregate
    self._store = store
    self._device = store.device_of_task(0)
    empty = ledger_lib.new_ledger(num_replicas, replicas_to_aggregate)
    with tf.device(self._device):
      self._inbox = resources.Queue("inbox", [tf.int64, tf.float64, tf.bool])
      self._ledger = ledger_lib.Ledger._make(
        resources.shared_variable(f"ledger/{k}", v.shape, v.dtype)
        for k, v in empty._asdict().items()
      )
      self._present = resources.shared_variable(
        "ledger/present", [len(is_sparse)], tf.bool
      )
      # Who takes messages: the calls of others may live on at the PS.
      self._taker = resources.shared_variable("taker", [], tf.int64)
    self._number = secrets.randbelow(1 << 62)
    self._replies = replies_lib.Replies(store, num_replicas)
    self._gradients = gradient_queues.GradientQueues(
      store, num_replicas, is_sparse, has_chief_statistics=has_chief_statistics
    )
    self._snapshot = resources.reader(self._read)

  def initialize(self, *, keep_counts: bool = False) -> None:
    """Empties the ledger: what was offered and delivered so far is void.

    The chief's; from now on its `collect` takes the messages, and no other.
    """
    empty = ledger_lib.new_ledger(self.num_replicas, self.replicas_to_aggregate)
    if keep_counts:
      old = self._snapshot()
      empty = empty._replace(counts=old.counts, held_up=old.held_up)
    self._taker.assign(self._number)
    self._write(empty)
    self._present.assign(tf.zeros(self._present.shape, tf.bool))
    resources.await_assigned([self._taker])

  def begin_anew(self) -> None:
    """Makes void what was offered or delivered; whoever waits offers anew."""
    self.initialize(keep_counts=True)
    with tf.device(self._device):
      until_now = -releases.microseconds(releases.now())
      verdicts = tf.fill([self.num_replicas], int(Verdict.VOID))
      tags = tf.fill([self.num_replicas], until_now)
      step = self._store.read_global_step()
      self._replies.send(tf.cast(verdicts, tf.int64), tags, step)

  # The replica's side.

  def offer(
    self,
    replica: int | tf.Tensor,
    gradients: Sequence[parameter_store.Gradient],
    *,
    local_step: tf.Tensor,
    loss: tf.Tensor,
    num_examples: tf.Tensor,
    ticket: tf.Tensor | None = None,
  ) -> releases.Release:
    """Offers one contribution, hands it over if admitted, waits for release.

    To be used inside a `tf.function`.

    Args:
      replica: Which this is, in [0, R); an int64 scalar where one serves all.
      gradients: One per element of the store's `contributed`, of whole
        variables; may be None.
      local_step: int64 scalar: the global step of the variables used.
      loss: Scalar, the mean loss of the batch.
      num_examples: Scalar, the size of the batch.
      ticket: int64 scalar from the last release, not -1, if it is to be
        handed over without an offer.

    Raises:
      tf.errors.OutOfRangeError, tf.errors.CancelledError: When training has
        ended meanwhile (at run time).
    """
    is_sound = tf.math.is_finite(tf.cast(loss, tf.float32))
    is_sound &= gradient_queues.all_finite(gradients, self._store.wire_dtype)
    packed = self._gradients.pack(gradients)
    present = [g is not None for g in gradients]
    if ticket is not None:
      *report, is_sound, replica, tag = resources.land_scalars(
        self._device, loss, num_examples, is_sound, replica, ticket
      )
      return self._hand_over(replica, tag, packed, present, report, is_sound)
    *report, is_sound, replica, local_step = resources.land_scalars(
      self._device, loss, num_examples, is_sound, replica, local_step
    )
    with tf.device(self._device):
      tag = releases.microseconds(releases.now())
      kind = tf.where(is_sound, int(Kind.OFFER), int(Kind.NONFINITE))
      offered = self._send(kind, replica, tag, step=local_step)
      with tf.control_dependencies([offered]):
        verdict, step = self._replies.wait(replica, tag)
      answered = releases.now(verdict)
      with tf.control_dependencies([answered]):
        admitted = tf.equal(verdict, int(Verdict.ADMIT))
      return tf.cond(
        admitted,
        lambda: self._hand_over(
          replica, tag, packed, present, report, True, answered
        ),
        lambda: releases.Release(
          tf.constant(0, tf.int64),
          step,
          tf.constant(-1, tf.int64),
          releases.pack_times(released=answered),
        ),
      )

  def _hand_over(
    self,
    replica,
    tag,
    packed,
    present,
    report,
    is_sound,
    admitted_at=releases.NEVER,
  ) -> releases.Release:
    """Sends what was admitted under `tag`, and waits for the release."""
    arrived = self._gradients.put(replica, tag, packed)
    with tf.device(self._device), tf.control_dependencies(arrived):
      kind = tf.where(is_sound, int(Kind.DELIVERED), int(Kind.NONFINITE))
      delivered = self._send(kind, replica, tag, report=report, present=present)
      with tf.control_dependencies([delivered]):
        delivered_at = releases.now()
      with tf.control_dependencies([delivered_at]):
        verdict, step = self._replies.wait(replica, tag)
      times = releases.pack_times(
        admitted_at, delivered_at, released=releases.now(verdict)
      )
      may_continue = verdict == int(Verdict.CONTINUE)
      ticket = tf.where(may_continue, tag + 1, tf.constant(-1, tf.int64))
      is_used = tf.cast(verdict != int(Verdict.VOID), tf.int64)
      return releases.Release(is_used, step, ticket, times)

  def _send(
    self, kind, replica, tag, *, step=0, report=(0.0, 0.0), present=False
  ) -> tf.Operation | None:
    """Puts a message into the inbox; built there, to send little."""
    with tf.device(self._device):
      header = [tf.cast(x, tf.int64) for x in (kind, replica, tag, step)]
      report = tf.stack([tf.cast(x, tf.float64) for x in report])
      present = tf.convert_to_tensor(present)
      return self._inbox.enqueue([tf.stack(header), report, present])

  # The chief's side.

  def collect(self) -> ledger_lib.Collected:
    """Answers the replicas until the step has its N contributions.

    To be used inside a `tf.function`. Returns early, with everything noted,
    when a replica reports something not finite, when `wake` is called, or when
    another chief has begun. Raises `OutOfRangeError` after `close`, when run.
    """
    with tf.device(self._device):
      step = self._store.read_global_step()
      done = self._is_complete(self._ledger.accepted.read_value())
      kind = tf.where(done, int(Kind.DELIVERED), int(Kind.OFFER))
      is_mine = tf.equal(self._taker.read_value(), self._number)
      kind = tf.where(is_mine, kind, int(Kind.WAKE))
      kind, replica = tf.while_loop(
        lambda kind, _: kind == int(Kind.OFFER),
        lambda *_: self._take_one(step),
        [tf.cast(kind, tf.int64), tf.constant(-1, tf.int64)],
      )
      with tf.control_dependencies([kind]):
        loss = self._ledger.loss.read_value()
        return ledger_lib.Collected(
          kind=kind,
          replica=replica,
          step=step,
          examples=self._ledger.examples.read_value(),
          loss=loss / self.replicas_to_aggregate,
          present=self._present.read_value(),
        )

  def _take_one(self, step) -> tuple[tf.Tensor, tf.Tensor]:
    """Serves one message; (OFFER to go on or why to return, its sender)."""
    woken = tf.constant(int(Kind.WAKE), tf.int64), tf.constant(-1, tf.int64)
    return self._take(
      self._number, lambda *message: self._serve(*message, step), woken
    )

  def _take(self, number, serve, otherwise):
    """Serves the next message, or puts it back if they are not `number`'s."""
    header, *rest = self._inbox.dequeue()

    def put_back():
      with tf.control_dependencies([self._inbox.enqueue([header, *rest])]):
        return tf.nest.map_structure(tf.identity, otherwise)

    with tf.control_dependencies([header]):
      is_its = tf.equal(self._taker.read_value(), number)
    header = tf.ensure_shape(header, [4])
    return tf.cond(is_its, lambda: serve(header, *rest), put_back)

  def _serve(self, header, report, present, step):
    header = tf.unstack(header)
    loss, examples = tf.unstack(tf.ensure_shape(report, [2]))
    message = ledger_lib.Message(
      *header, tf.cast(examples, tf.int64), loss, releases.now(loss)
    )
    before = self._read()
    noted, replies = ledger_lib.record(before, message, step)
    ledger, settled = ledger_lib.settle(noted)
    self._write(ledger)
    is_used = tf.reduce_any(noted.accepted != before.accepted)  # Not void.
    self._present.assign(self._present.read_value() | (present & is_used))
    verdict = tf.maximum(settled, replies.verdict)
    is_nonfinite = message.kind == int(Kind.NONFINITE)

    def reply():
      # Who waits longest takes the first: it hears VOID.
      void = tf.where(replies.flush >= 0, int(Verdict.VOID), -1)
      self._replies.send(tf.cast(void, tf.int64), replies.flush, step)
      self._replies.send(verdict, noted.tag, step)
      sender = tf.where(is_nonfinite, message.replica, -1)
      return self._end_one(sender, message.tag)

    # Most messages cause no reply, and this spares a branch per replica.
    has_reply = tf.reduce_any(tf.maximum(verdict, replies.flush) >= 0)
    tf.cond(has_reply | is_nonfinite, reply, lambda: tf.constant(False))
    is_complete = self._is_complete(ledger.accepted)
    kind = tf.where(is_complete, int(Kind.DELIVERED), int(Kind.OFFER))
    is_urgent = is_nonfinite | (message.kind == Kind.WAKE)
    kind = tf.where(is_urgent, message.kind, tf.cast(kind, tf.int64))
    return kind, message.replica

  def _is_complete(self, accepted) -> tf.Tensor:
    return tf.reduce_all(accepted[:, 0] >= 0)

  def _read(self) -> ledger_lib.Ledger:
    return ledger_lib.Ledger(*[v.read_value() for v in self._ledger])

  def _write(self, ledger: ledger_lib.Ledger) -> None:
    for variable, value in zip(self._ledger, ledger, strict=True):
      variable.assign(value)

  def take_sums(self, task: int) -> list[parameter_store.Gradient]:
    """Sums the accepted contributions of one PS task, once per step.

    To be used inside a `tf.function`; see `GradientQueues.take_sums`.
    """
    with tf.device(self._device):
      accepted = self._ledger.accepted.read_value()
    return self._gradients.take_sums(task, accepted)

  def release_all(self, step: tf.Tensor) -> None:
    """Ends the step: counts, forgets it, and releases who waits to `step`."""
    with tf.device(self._device):
      before = self._read()
      ledger, verdict = ledger_lib.finish(before)
      self._write(ledger)
      self._present.assign(tf.zeros(self._present.shape, tf.bool))
      self._replies.send(verdict, before.tag, step)

  def end_replicas(self) -> None:
    """Releases all to `releases.ENDED`, also who still comes; until `wake`.

    To be used inside a `tf.function`. An earlier chief's call may live on at
    the PS: the next message ends it, and is left to who takes messages now.
    """

    def answer(header, *_):
      kind, replica, tag, _ = tf.unstack(header)
      with tf.control_dependencies([self._end_one(replica, tag)]):
        # An earlier one was for a `collect` that had returned by itself.
        return (kind != int(Kind.WAKE)) | (tag < began)

    with tf.device(self._device):
      began = releases.microseconds(releases.now())
      self._taker.assign(began)
      noted = self._read()  # What `collect` has read, nobody else will answer.
      verdict = tf.where(noted.status != Status.COMPUTING, Verdict.RELEASE, -1)
      self._replies.send(tf.cast(verdict, tf.int64), noted.tag, releases.ENDED)
      tf.while_loop(
        lambda goes_on: goes_on,
        lambda _: [self._take(began, answer, tf.constant(False))],
        [tf.constant(True)],
      )

  def _end_one(self, replica: tf.Tensor, tag: tf.Tensor) -> tf.Tensor:
    is_this = tf.range(self.num_replicas, dtype=tf.int64) == replica
    verdict = tf.where(is_this, int(Verdict.RELEASE), int(Verdict.NONE))
    tags = tf.fill([self.num_replicas], tag)
    self._replies.send(tf.cast(verdict, tf.int64), tags, releases.ENDED)
    return tf.constant(True)

  def wake(self) -> None:
    """Makes a waiting `collect` or `end_replicas` return."""
    with tf.device(self._device):
      self._send(Kind.WAKE, -1, releases.microseconds(releases.now()))

  def declare_lost(self, replica: int, tag: int) -> None:
    """Tells the ledger that `replica`, whose last offer is `tag`, is gone."""
    self._send(Kind.LOST, replica, tag)

  def snapshot(self) -> ledger_lib.Ledger:
    """The ledger as it is now, as NumPy values; for people."""
    return ledger_lib.Ledger(*[v.numpy() for v in self._snapshot()])

  def give_up(self, replica: int) -> None:
    """Ends what `replica` asked so far; a closed queue would stay closed."""
    with tf.device(self._device):
      self._end_one(replica, -releases.microseconds(releases.now()))

  def close(self) -> None:
    """Ends it for everybody: waiters get `OutOfRangeError`, offers fail."""
    self._inbox.close()
    self._replies.close()
