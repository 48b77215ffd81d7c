"""Sends the chief's replies to waiting replicas.

PS task 0 holds one queue of replies per replica. A reply tells a replica what
became of its contribution (its gradients for one update). `rules.protocol`
defines tags, which identify contributions, and verdicts, the kinds of replies.
"""

from collections.abc import Callable
from collections.abc import Sequence
from typing import Annotated
from typing import NamedTuple

import tensorflow as tf

from tf_replicas.rules import protocol
from tf_replicas.runtime import control_flow
from tf_replicas.runtime import records
from tf_replicas.runtime import resources
from tf_replicas.store import parameter_store


class Reply(NamedTuple):
  """The chief's reply to one contribution of a replica.

  A contribution is one replica's gradients for one update. All fields are int64
  scalars.

  Attributes:
    tag: The tag, a positive integer that identifies the contribution. A
      negative number -t makes this the reply to all contributions of the
      replica whose tag is at most t.
    verdict: A `protocol.Verdict`, which says what the replica must do.
    step: The global step from which the replica continues; `step_token.ENDED`
      (-1) if training has ended.
  """

  tag: Annotated[tf.Tensor, tf.int64]
  verdict: Annotated[tf.Tensor, tf.int64]
  step: Annotated[tf.Tensor, tf.int64]


LAYOUT = records.Layout(Reply, tf.int64)
# With more replicas, replies are sent in a loop and not in branches.
_MOST_BRANCHES = 16


def take_own(
  queues: Sequence[resources.Queue],
  replica: int | tf.Tensor,
  tag: tf.Tensor,
  tag_of: Callable[[tf.Tensor], tf.Tensor],
) -> tuple[tf.Tensor, tf.Tensor]:
  """Waits until a replica's queue has an element for `tag`, and takes it.

  A tag is a positive integer that identifies one wait of a replica, for example
  for the reply to one contribution (gradients for one update); later waits have
  larger tags. Elements for earlier tags are dropped. An element for a later tag
  means that another process now runs as this replica. That process needs the
  element, so it is put back. To be used inside a `tf.function`.

  Args:
    queues: One queue per replica.
    replica: The index of the replica whose queue is read.
    tag: int64 scalar, the tag of this wait.
    tag_of: Maps an element to its tag. A negative result -t stands for all tags
      up to t.

  Returns:
    A pair. The first is the element that was found, for `tag` or a later tag.
    The second is a bool scalar: True if it was for a later tag and so was put
    back.
  """

  def dequeue(*_):
    return [resources.switch(replica, queues, lambda q: q.dequeue()[0])]

  (taken,) = tf.while_loop(
    lambda taken: tf.abs(tag_of(taken)) < tag,
    dequeue,
    dequeue(),
    shape_invariants=[tf.TensorShape(None)],
  )

  def put_back():
    return resources.switch(
      replica, queues, lambda q: control_flow.done(q.enqueue([taken]))
    )

  return taken, control_flow.run_if(tag_of(taken) > tag, put_back)


class ReplyQueues:
  """Sends and receives the chief's replies, by one queue per replica.

  The queues are on PS task 0. A reply tells a replica what became of its
  contribution (its gradients for one update).
  """

  def __init__(
    self,
    store: parameter_store.ParameterStore,
    num_replicas: int,
    namespace: resources.Namespace,
  ):
    """Creates one queue per replica on PS task 0.

    If another process has created queues of these names, uses those.

    Args:
      store: The parameter store, which knows the device of PS task 0.
      num_replicas: The number of replicas.
      namespace: The scope of the queues' names on the parameter servers.
    """
    with tf.device(store.device_of_task(0)):
      self._queues = [
        namespace.queue(f"replies/{r}", [tf.int64]) for r in range(num_replicas)
      ]
    self._array = resources.QueueArray(self._queues)

  def send(self, verdict: tf.Tensor, tag: tf.Tensor, step: tf.Tensor) -> None:
    """Sends a reply to each replica for which `verdict` is not negative.

    To be used on PS task 0. A tag is a positive integer that identifies a
    contribution (gradients for one update) of a replica.

    Args:
      verdict: int64 [R], a `protocol.Verdict` for each of the R replicas. A
        replica with a negative verdict gets no reply.
      tag: int64 [R], for each replica the tag of the contribution to which this
        is the reply. A negative number -t makes it the reply to all tags up to
        t.
      step: int64 scalar, the global step from which the replicas continue.
    """
    if len(self._queues) > _MOST_BRANCHES:
      self._send_in_turn(verdict, tag, step)
      return
    for r, queue in enumerate(self._queues):
      control_flow.run_if(
        verdict[r] >= 0,
        lambda r=r, queue=queue: queue.enqueue(
          [LAYOUT.pack(Reply(tag[r], verdict[r], step))]
        ),
      )

  def _send_in_turn(self, verdict, tag, step) -> None:
    """Sends the same replies as `send`, by a `tf.while_loop` over receivers.

    `send` has a `tf.cond` per replica instead. With many replicas that is slow:
    every conditional is evaluated for each message to the chief, and tracing
    one takes 30 ms.
    """
    replicas = tf.where(verdict >= 0)[:, 0]

    def send_one(i):
      r = replicas[i]
      reply = LAYOUT.pack(Reply(tag[r], verdict[r], step))
      with tf.control_dependencies([self._array.enqueue(r, [reply])]):
        return [i + 1]

    tf.while_loop(lambda i: i < tf.size(replicas), send_one, [tf.constant(0)])

  def wait(
    self, replica: int | tf.Tensor, tag: tf.Tensor
  ) -> tuple[tf.Tensor, tf.Tensor]:
    """Waits for the chief's reply to one contribution of a replica.

    A contribution is one replica's gradients for one update; its tag, a
    positive integer, identifies it. Replies to earlier tags are dropped. A
    reply to a later tag means that another process now runs as this replica.
    The reply is then put back for that process, and the result is VOID: the
    contribution was not used.

    Args:
      replica: The index of the replica that waits.
      tag: int64 scalar, the tag of the contribution.

    Returns:
      The `protocol.Verdict`, and the global step from which the replica
      continues, int64 scalars.

    Raises:
      tf.errors.OutOfRangeError: At run time, after `close`.
    """

    def tag_of(element):
      return LAYOUT.unpack(tf.ensure_shape(element, [LAYOUT.size])).tag

    taken, is_anothers = take_own(self._queues, replica, tag, tag_of)
    reply = LAYOUT.unpack(tf.ensure_shape(taken, [LAYOUT.size]))
    void = tf.constant(int(protocol.Verdict.VOID), tf.int64)
    return tf.where(is_anothers, void, reply.verdict), reply.step

  def close(self) -> None:
    """Closes the queues, so that no replica waits for a reply any longer.

    Waiting calls of `wait` raise `tf.errors.OutOfRangeError`.
    """
    for queue in self._queues:
      queue.close()
