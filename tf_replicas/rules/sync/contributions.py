"""Brings whole sets of gradients from the replicas to a synchronous update.

A *contribution* is what one replica computed from one batch: all gradients, the
loss, the number of examples. It is admitted or refused as a whole, before its
gradients are sent.

Where objects live:

* PS task 0: the `inbox` (a queue of short messages from all replicas), one
  `replies` queue per replica, and the *ledger*: variables that record the state
  of each replica, the contributions that the step has accepted, and counts of
  contributions since the start of training.
* every PS task: one `gradients` queue per replica, for the gradients of the
  variables on that task.

The steps of a replica for one contribution (`offer`):

1. It puts OFFER(replica, tag, step) into the inbox. The *tag* identifies the
   contribution among those of the replica: the time of the offer in
   microseconds. The step is that of the variables that the replica used.
2. It waits for the reply: ADMIT or RELEASE(step).
3. If admitted, it puts its gradients into its queue on every PS task, then
   DELIVERED into the inbox, and waits for RELEASE(step) or CONTINUE(step).
4. CONTINUE means that the replica's next contribution is admitted already,
   under tag + 1, the token's `preadmitted_tag`. The replica then goes directly
   to 3. Where every step needs every replica, no replica has to ask.

The chief's part in one step (`collect`, which runs wholly on PS task 0) is to
take messages from the inbox, to enter each in the ledger (`ledger.record`), and
to give the free places of the step to waiting replicas (`ledger.settle`). A
step has N *places*, one for each contribution that it averages. A place is free
unless its contribution was delivered or is still expected from an admitted
replica. An offer from variables of an earlier step is late, and its replica is
released at once. Any other offer without a place waits. It gets the place of an
admitted replica that is lost (the chief sends LOST), or is *surplus* when the
step ends. Once N contributions were delivered, the chief applies their mean
(`take_sums`) and releases the replicas (`release_all`).

A replica has at most one contribution without a final reply. So if a replica
makes a new offer before that reply, its process was restarted: the old
contribution is *void*, and its gradients, which the tag identifies, are
dropped. The old process's wait for a reply may still run on the PS task,
where it would take the reply that is meant for the new process. A VOID reply
with the old tag ends this wait. If the old process lives as well, the two
processes void each other's offers until the old process learns by its heartbeat
that it was replaced.
"""

import functools
import secrets
from collections.abc import Sequence
from typing import Any
from typing import NamedTuple

import tensorflow as tf

from tf_replicas.rules import protocol
from tf_replicas.rules import reply_queues as replies_lib
from tf_replicas.rules import step_token
from tf_replicas.rules.sync import gradient_queues
from tf_replicas.rules.sync import ledger as ledger_lib
from tf_replicas.rules.sync import quorum as quorum_lib
from tf_replicas.runtime import control_flow
from tf_replicas.runtime import records
from tf_replicas.runtime import resources
from tf_replicas.store import gradient_math
from tf_replicas.store import parameter_store


class _Header(NamedTuple):
  """The int64 fields of a message in the chief's inbox.

  `ledger.Message` documents the fields.
  """

  kind: records.Int
  replica: records.Int
  tag: records.Int
  step: records.Int


class _Report(NamedTuple):
  """The float64 fields of a message in the chief's inbox.

  `ledger.Message` documents the fields.
  """

  loss: records.Float
  examples: records.Int


_HEADER = records.Layout(_Header, tf.int64)
_REPORT = records.Layout(_Report, tf.float64)

Kind = protocol.MessageType
Status = protocol.Status
Verdict = protocol.Verdict


class Contributions:
  """Exchanges contributions and replies between the replicas and the chief.

  A contribution is what one replica computed from one batch: all gradients, the
  loss and the number of examples. Replicas and chief communicate by queues and
  variables on the PS tasks.

  Attributes:
    num_replicas: R, the number of replicas that offer contributions.
    quorum: How many contributions an update needs, by the number of replicas.
  """

  def __init__(
    self,
    store: parameter_store.ParameterStore,
    *,
    num_replicas: int,
    quorum: quorum_lib.Quorum,
    is_sparse: Sequence[bool],
    has_chief_statistics: bool = False,
    namespace: resources.Namespace | None = None,
  ):
    """Creates the queues and the ledger on the PS tasks, or attaches to them.

    The ledger is a set of variables that record the state of the step. If
    another process has created objects of these names, this process uses the
    same ones.

    Args:
      store: Holds the variables that the gradients belong to.
      num_replicas: R, the number of replicas.
      quorum: How many contributions an update needs, by the number of replicas.
      is_sparse: For each element of `store.contributed` (the trainable
        variables, then the statistics, which have no gradients), whether its
        gradients are `tf.IndexedSlices`.
      has_chief_statistics: If True, statistics are updated from one replica: of
        those whose contributions are used, the one with the smallest index. If
        False, from the mean of all contributions.
      namespace: The scope of the names of the queues and of the ledger. None:
        the namespace of `store`.
    """
    namespace = namespace or store.namespace
    self.num_replicas = num_replicas
    self.quorum = quorum
    self._can_skip = quorum.can_shrink
    self._store = store
    self._device = store.device_of_task(0)
    empty = ledger_lib.new_ledger(num_replicas, quorum.most)
    with tf.device(self._device):
      self._inbox = namespace.queue("inbox", [tf.int64, tf.float64, tf.bool])
      self._ledger = ledger_lib.Ledger._make(
        namespace.variable(f"ledger/{k}", v.shape, v.dtype)
        for k, v in empty._asdict().items()
      )
      self._present = namespace.variable(
        "ledger/present", [len(is_sparse)], tf.bool
      )
      # Identifies the call that may take messages off the inbox. A call of a
      # killed chief may live on at the PS.
      self._taker = namespace.variable("taker", [], tf.int64)
    self._number = secrets.randbelow(1 << 62)
    self._replies = replies_lib.ReplyQueues(store, num_replicas, namespace)
    self._gradients = gradient_queues.GradientQueues(
      store,
      num_replicas,
      is_sparse,
      has_chief_statistics=has_chief_statistics,
      namespace=namespace,
    )
    self._snapshot = resources.remote_reader(self._read)

  def initialize(self, *, keep_counts: bool = False) -> None:
    """Clears the ledger, so that no earlier contribution is used any more.

    The ledger is a set of variables that record the state of the step and of
    each replica. The chief calls this method. From then on, only the `collect`
    of this object takes messages out of the chief's inbox, and no longer that
    of an earlier chief.

    Args:
      keep_counts: Whether to keep what was counted since the start of training:
        the number of contributions of each replica by outcome, and the time for
        which steps waited for this replica only. The contributions that are
        dropped then count as refused.
    """
    if keep_counts:
      self._initialize(ledger_lib.cleared(self._snapshot()))
    else:
      self._initialize(
        ledger_lib.new_ledger(self.num_replicas, self.quorum.most)
      )

  def _initialize(self, empty: ledger_lib.Ledger) -> None:
    """Writes a ledger without contributions, and takes over the inbox."""
    self._taker.assign(self._number)
    self._write(empty)
    self._present.assign(tf.zeros(self._present.shape, tf.bool))
    resources.flush_assignments([self._taker])

  def begin_anew(self, *, is_restored: bool = False) -> None:
    """Drops all contributions so far, and lets the waiting replicas continue.

    A contribution is one replica's gradients for one update. The waiting
    replicas get the reply VOID: their contribution was not used, and counts as
    refused. The counts since the start of training are kept.

    Args:
      is_restored: Whether the variables have been restored from a checkpoint.
        What the other replicas compute at present is then refused too.
    """
    old = self._snapshot()
    self._initialize(ledger_lib.cleared(old, is_restored=is_restored))
    with tf.device(self._device):
      until_now = -step_token.microseconds(step_token.now())
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
    preadmitted_tag: tf.Tensor | None = None,
  ) -> step_token.StepToken:
    """Offers a replica's gradients for one update, and sends them if admitted.

    Then waits until the chief lets the replica continue. To be used inside a
    `tf.function`.

    Args:
      replica: The index of the replica, in [0, R); an int, or an int64 scalar
        if one traced function serves several replicas.
      gradients: One per element of the store's `contributed`, each of a whole
        variable's shape: the gradients of the trainable variables; then, for
        each variable without gradients, such as a moving mean, its old value
        minus its new value. None: the replica has no such value.
      local_step: int64 scalar, the global step of the variables that the
        gradients were computed from.
      loss: Scalar, the mean loss of the batch.
      num_examples: Scalar, the number of examples in the batch.
      preadmitted_tag: None: the gradients are offered first. Otherwise the
        chief has admitted these gradients in advance, and they are sent without
        an offer. Then this is the `preadmitted_tag` of the last token, an int64
        scalar other than `NO_TAG`.

    Returns:
      A token that says whether the gradients were used, and from which global
      step to continue.

    Raises:
      tf.errors.OutOfRangeError, tf.errors.CancelledError: At run time, if the
        training has ended before the reply.
    """
    is_sound = tf.math.is_finite(tf.cast(loss, tf.float32))
    is_sound &= gradient_math.all_finite(gradients, self._store.wire_dtypes)
    present = [g is not None for g in gradients]
    if preadmitted_tag is not None:
      scalars = resources.Scalars(
        replica, preadmitted_tag, is_sound, loss, num_examples
      )
      packed = self._gradients.pack(gradients, scalars)

      def report_all(arrived, landed) -> step_token.StepToken:
        replica, tag, is_sound, *report = landed
        with tf.control_dependencies([arrived]):
          return self._report(replica, tag, present, report, is_sound)

      return self._gradients.put_with_scalars(packed, scalars, report_all)
    packed = self._gradients.pack(gradients)
    scalars = resources.Scalars(
      replica, local_step, is_sound, loss, num_examples
    )

    def ask() -> list[Any]:
      replica, local_step, is_sound, *report = scalars.split(scalars.vector)
      tag = step_token.microseconds(step_token.now())
      kind = tf.where(is_sound, int(Kind.OFFER), int(Kind.NONFINITE))
      offered = self._send(kind, replica, tag, step=local_step)
      verdict, step = self._await_reply(offered, replica, tag)
      answered = step_token.now(verdict)
      admitted = tf.equal(verdict, int(Verdict.ADMIT))
      return [admitted, step, answered, tag, replica, report]

    admitted, step, answered, tag, landed, report = control_flow.call_on(
      self._device, ask
    )
    if tf.is_tensor(replica):
      replica = landed

    def deliver() -> step_token.StepToken:
      report_all = functools.partial(
        self._report, replica, tag, present, report, True, answered
      )
      arrived = self._gradients.put(replica, tag, packed)
      return control_flow.call_on(self._device, report_all, arrived)

    with tf.device(self._device):
      return tf.cond(
        admitted,
        deliver,
        lambda: step_token.StepToken(
          tf.constant(0, tf.int64),
          step,
          tf.constant(step_token.NO_TAG, tf.int64),
          step_token.pack_times(released=answered),
        ),
      )

  def _report(
    self,
    replica,
    tag,
    present,
    report,
    is_sound,
    admitted_at: tf.Tensor | float = step_token.NEVER,
  ) -> step_token.StepToken:
    """Reports to the chief that gradients have arrived, and awaits its reply.

    To be called on PS task 0, when all gradients are on the PS tasks.

    Args:
      replica: The index of the replica.
      tag: int64 scalar, identifies the gradients among those of the replica.
      present: For each variable, whether the replica has a gradient for it.
      report: The mean loss, and the number of examples.
      is_sound: bool scalar, whether loss and gradients are finite. If not, the
        message to the chief is NONFINITE.
      admitted_at: When the chief admitted the gradients, in seconds since 1970;
        `NEVER` if they were not offered.

    Returns:
      A token that says whether the gradients were used, and from which global
      step to continue.
    """
    with tf.device(self._device):
      kind = tf.where(is_sound, int(Kind.DELIVERED), int(Kind.NONFINITE))
      delivered = self._send(kind, replica, tag, report=report, present=present)
      with tf.control_dependencies([delivered]):
        delivered_at = step_token.now()
      verdict, step = self._await_reply(delivered_at, replica, tag)
      times = step_token.pack_times(
        admitted_at, delivered_at, released=step_token.now(verdict)
      )
      may_continue = verdict == int(Verdict.CONTINUE)
      next_tag = tf.where(
        may_continue, tag + 1, tf.constant(step_token.NO_TAG, tf.int64)
      )
      is_used = tf.cast(verdict != int(Verdict.VOID), tf.int64)
      return step_token.StepToken(is_used, step, next_tag, times)

  def _send(
    self, kind, replica, tag, *, step=0, report=(0.0, 0), present=False
  ) -> tf.Operation | None:
    """Packs a message on PS task 0, and puts it into the chief's inbox.

    Args:
      kind: A `protocol.MessageType`.
      replica: The index of the replica that the message is about, or -1.
      tag: The tag of the replica's contribution (its gradients for one update).
      step: The global step of the variables that the replica used.
      report: The mean loss, and the number of examples.
      present: For each variable, whether the replica has a gradient for it.
    """
    with tf.device(self._device):
      header = _HEADER.pack(_Header(kind, replica, tag, step))
      report = _REPORT.pack(_Report(*report))
      return self._inbox.enqueue(
        [header, report, tf.convert_to_tensor(present)]
      )

  def _await_reply(
    self, sent: tf.Operation | tf.Tensor | None, replica, tag
  ) -> tuple[tf.Tensor, tf.Tensor]:
    """Waits for the chief's reply to a message.

    After the loss of a parameter server, the chief deletes the variables and
    queues of the old namespace. A replica that still computes does not know
    this. It would create new queues of the same names, which nobody else uses,
    and wait there forever. A deleted variable is not created again, so reading
    it fails. For this reason, this method reads a variable before it waits.

    Args:
      sent: Available once the message is in the inbox.
      replica: The index of the replica.
      tag: int64 scalar, the tag of the contribution that the message is about.

    Returns:
      The `protocol.Verdict`, and the global step from which the replica
      continues, int64 scalars.

    Raises:
      tf.errors.OutOfRangeError: At run time, after `close`.
      tf.errors.OpError: At run time, if the namespace was deleted.
    """
    with tf.control_dependencies([sent]):
      exists = self._taker.read_value()
    with tf.control_dependencies([exists]):
      return self._replies.wait(replica, tag)

  # The chief's side.

  def collect(self) -> ledger_lib.Collected:
    """Answers the replicas until the step has all its contributions.

    A contribution is one replica's gradients for one update. To be used inside
    a `tf.function`.

    Returns early if a replica reports a value that is not finite, if `wake` is
    called, or if another chief has begun. Even then, every message taken so far
    has been entered in the ledger, the variables that record the state of the
    step. So the next call continues where this one has ended.

    Returns:
      The number of contributions, their mean loss and so on, or why the call
      has ended early. The gradients themselves stay in their queues.

    Raises:
      tf.errors.OutOfRangeError: At run time, after `close`.
    """
    with tf.device(self._device):
      step = self._store.read_global_step()
      done = self._is_complete(
        self._ledger._replace(accepted=self._ledger.accepted.read_value())
      )
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
        count = self.quorum.most
        if self._can_skip:
          taken = ledger_lib.places(self._ledger.accepted.read_value()).is_taken
          # A step that was interrupted may have none.
          count = tf.math.count_nonzero(taken, dtype=tf.float64)
          count = tf.maximum(count, 1.0)
        return ledger_lib.Collected(
          kind=kind,
          replica=replica,
          step=step,
          examples=self._ledger.examples.read_value(),
          count=count,
          loss=loss / count,
          present=self._present.read_value(),
        )

  def _take_one(self, step) -> tuple[tf.Tensor, tf.Tensor]:
    """Takes one message out of the chief's inbox and handles it.

    Args:
      step: int64 scalar, the current global step.

    Returns:
      A `protocol.MessageType`: OFFER if `collect` must take another message,
      otherwise the reason to stop, as in `Collected.kind`; and the index of the
      replica that sent the message.
    """
    woken = tf.constant(int(Kind.WAKE), tf.int64), tf.constant(-1, tf.int64)
    return self._take(
      self._number, lambda *message: self._serve(*message, step), woken
    )

  def _take(self, number, serve, otherwise):
    """Takes the next message out of the chief's inbox, and handles it.

    A call of a killed chief may still run on the PS task. The shared variable
    `taker` holds the number of the chief that may take messages. If it is
    another number than `number`, the message is put back.

    Args:
      number: The number of this chief.
      serve: Handles the message.
      otherwise: What to return if the message was put back.

    Returns:
      The result of `serve`, or `otherwise`.
    """
    header, report, present = self._inbox.dequeue()

    def put_back():
      with tf.control_dependencies(
        [self._inbox.enqueue([header, report, present])]
      ):
        return tf.nest.map_structure(tf.identity, otherwise)

    def serve_it():
      fields = _HEADER.unpack(tf.ensure_shape(header, [_HEADER.size]))
      return serve(fields, report, present)

    with tf.control_dependencies([header]):
      is_its = tf.equal(self._taker.read_value(), number)
    return tf.cond(is_its, serve_it, put_back)

  def _serve(
    self, header: _Header, report: tf.Tensor, present: tf.Tensor, step
  ) -> tuple[tf.Tensor, tf.Tensor]:
    """Enters one message in the ledger, and sends the replies that follow.

    The ledger is a set of variables that record the state of the step.

    Args:
      header: The int64 fields of the message.
      report: The float64 fields of the message, packed.
      present: For each variable, whether the replica has a gradient for it.
      step: int64 scalar, the current global step.

    Returns:
      A `protocol.MessageType`: OFFER if `collect` must take another message,
      otherwise the reason to stop, as in `Collected.kind`; and the index of the
      replica that sent the message.
    """
    batch = _REPORT.unpack(tf.ensure_shape(report, [_REPORT.size]))
    message = ledger_lib.Message(
      *header, batch.examples, batch.loss, step_token.now(batch.loss)
    )
    before = self._read()
    noted, replies = ledger_lib.record(
      before, message, step, can_skip=self._can_skip
    )
    ledger, settled = ledger_lib.settle(noted, self.quorum)
    self._write(ledger)
    is_used = tf.reduce_any(
      noted.accepted != before.accepted
    )  # False if the contribution was void.
    self._present.assign(self._present.read_value() | (present & is_used))
    verdict = tf.maximum(settled, replies.verdict)
    is_nonfinite = message.kind == int(Kind.NONFINITE)

    def reply():
      # The wait that began first takes the first reply: VOID, for the old tag.
      void = tf.where(replies.flush >= 0, int(Verdict.VOID), -1)
      self._replies.send(tf.cast(void, tf.int64), replies.flush, step)
      self._replies.send(verdict, noted.tag, step)
      sender = tf.where(is_nonfinite, message.replica, -1)
      self._end_one(sender, message.tag)

    # Most messages cause no reply; then the branches per replica do not run.
    has_reply = tf.reduce_any(tf.maximum(verdict, replies.flush) >= 0)
    control_flow.run_if(has_reply | is_nonfinite, reply)
    is_complete = self._is_complete(ledger)
    kind = tf.where(is_complete, int(Kind.DELIVERED), int(Kind.OFFER))
    is_urgent = is_nonfinite | (message.kind == Kind.WAKE)
    kind = tf.where(is_urgent, message.kind, tf.cast(kind, tf.int64))
    return kind, message.replica

  def _is_complete(self, ledger: ledger_lib.Ledger) -> tf.Tensor:
    return ledger_lib.is_complete(ledger, self.quorum)

  def _read(self) -> ledger_lib.Ledger:
    return ledger_lib.Ledger(*[v.read_value() for v in self._ledger])

  def _write(self, ledger: ledger_lib.Ledger) -> None:
    for variable, value in zip(self._ledger, ledger, strict=True):
      variable.assign(value)

  def read_accepted(self) -> tf.Tensor:
    """Reads which contributions the step has accepted, on PS task 0.

    Returns:
      int64 [N, 2], a row (replica, tag) for each of N; -1 if there are fewer.
    """
    with tf.device(self._device):
      return self._ledger.accepted.read_value()

  def take_sums(
    self, task: int, accepted: tf.Tensor
  ) -> list[parameter_store.Gradient]:
    """Sums the gradients that the step has accepted, for one PS task.

    The gradients are taken out of the queues on the task. To be called once per
    step and task, inside a `tf.function`.

    Args:
      task: The index of the PS task.
      accepted: What `read_accepted` returned.

    Returns:
      One sum for each variable, or shard of one, on the task, as
      `GradientQueues.take_sums` describes.
    """
    return self._gradients.take_sums(task, accepted)

  def release_all(self, step: tf.Tensor) -> None:
    """Ends the step: lets the waiting replicas continue, and clears the step.

    Args:
      step: int64 scalar, the global step from which the replicas continue.
    """
    with tf.device(self._device):
      before = self._read()
      ledger, verdict = ledger_lib.finish(before, can_skip=self._can_skip)
      self._write(ledger)
      self._present.assign(tf.zeros(self._present.shape, tf.bool))
      self._replies.send(verdict, before.tag, step)

  def end_replicas(self) -> None:
    """Tells every replica that training has ended, and returns after `wake`.

    Until `wake` is called, answers all waiting replicas and all later offers of
    gradients with the global step `step_token.ENDED`. To be used inside a
    `tf.function`. A call of an earlier chief that still runs on the PS task
    puts the next message back and ends.
    """

    def answer(header, *_):
      self._end_one(header.replica, header.tag)
      # Ignore wake-ups older than this call.
      return (header.kind != int(Kind.WAKE)) | (header.tag < began)

    with tf.device(self._device):
      began = step_token.microseconds(step_token.now())
      self._taker.assign(began)
      # Answer every offer that `collect` had already taken off the queue.
      noted = self._read()
      verdict = tf.where(noted.status != Status.COMPUTING, Verdict.RELEASE, -1)
      self._replies.send(
        tf.cast(verdict, tf.int64), noted.tag, step_token.ENDED
      )
      tf.while_loop(
        lambda goes_on: goes_on,
        lambda _: [self._take(began, answer, tf.constant(False))],
        [tf.constant(True)],
      )

  def _end_one(self, replica: int | tf.Tensor, tag: tf.Tensor) -> None:
    """Tells one replica that training has ended.

    The reply has the global step `step_token.ENDED`.

    Args:
      replica: The index of the replica; -1 sends nothing.
      tag: The tag that identifies the contribution (the replica's gradients for
        one update) to which this is the reply. A negative tag -t stands for all
        tags up to t.
    """
    is_this = tf.range(self.num_replicas, dtype=tf.int64) == replica
    verdict = tf.where(is_this, int(Verdict.RELEASE), int(Verdict.NONE))
    tags = tf.fill([self.num_replicas], tag)
    self._replies.send(tf.cast(verdict, tf.int64), tags, step_token.ENDED)

  def wake(self) -> None:
    """Makes a waiting call of `collect` or `end_replicas` return.

    That call runs in another thread or process.
    """
    with tf.device(self._device):
      self._send(Kind.WAKE, -1, step_token.microseconds(step_token.now()))

  def expire(self, step: int) -> None:
    """Tells the chief, by its inbox, that a step has exceeded its deadline.

    The step then does without the replicas from which no contribution (set of
    gradients) has arrived, but still waits until it has `min_contributions`.

    Args:
      step: The global step. The message has no effect on later steps.
    """
    self._send(Kind.EXPIRED, -1, -1, step=step)

  def declare_lost(self, replica: int, tag: int) -> None:
    """Tells the chief, by its inbox, that a replica is lost.

    Args:
      replica: The index of the replica.
      tag: The tag of the replica's last contribution (its gradients for one
        update). The message has no effect if the replica has made a newer one.
    """
    self._send(Kind.LOST, replica, tag)

  def snapshot(self) -> ledger_lib.Ledger:
    """Reads the ledger, the variables that record the state of the step.

    Returns:
      The ledger, with NumPy arrays.
    """
    return ledger_lib.Ledger(*[v.numpy() for v in self._snapshot()])

  def release_replica(self, replica: int) -> None:
    """Tells `replica`, if it waits for a reply, that training has ended.

    The reply has the global step `step_token.ENDED`.
    """
    with tf.device(self._device):
      self._end_one(replica, -step_token.microseconds(step_token.now()))

  def close(self) -> None:
    """Closes the queues between the replicas and the chief.

    Calls that wait for a message raise `tf.errors.OutOfRangeError`, and later
    offers of gradients fail.
    """
    self._inbox.close()
    self._replies.close()
