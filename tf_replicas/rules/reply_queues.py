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
  """The chief's reply to a replica that has offered gradients for an update.

  All fields are int64 scalars.

  Attributes:
    tag: The tag, an integer that identifies the set of gradients that is
      answered. A negative tag -t answers all sets of the replica with tags up
      to t.
    verdict: A `protocol.Verdict`, which says what the replica is to do.
    step: The global step to continue from.
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
  """Takes the element for `tag` off a replica's queue; waits until it is there.

  A tag is an integer that identifies one contribution (gradients for one
  update) of a replica; later contributions have larger tags. Elements for
  earlier tags are dropped. An element for a later tag is meant for another
  process that now runs as this replica, so it is put back. To be used inside a
  `tf.function`.

  Args:
    queues: One queue per replica.
    replica: The index of the replica whose queue is read.
    tag: int64 scalar, the tag of the contribution to wait for.
    tag_of: Maps an element to its tag. A tag -t stands for all tags up to t.

  Returns:
    The element for `tag` or a later tag; and a bool scalar, whether the element
    was put back.
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
    """Creates one queue per replica on PS task 0, or attaches to the queues.

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
    """Replies to every replica for which `verdict` is not negative.

    To be used on PS task 0. A tag is an integer that identifies a contribution
    (gradients for one update) of a replica.

    Args:
      verdict: int64 [R], a `protocol.Verdict` for each of the R replicas. A
        replica with a negative verdict gets no reply.
      tag: int64 [R], the tag of the contribution that is answered, for each
        replica. A tag -t answers all tags up to t.
      step: int64 scalar, the global step to continue from.
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
    """Sends replies as `send` does, in a loop over those that there are.

    With R branches, each of up to R messages per step would evaluate all of
    them, and tracing them would take 30 ms per branch.
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

    A contribution is one replica's gradients for one update; its tag, an
    integer, identifies it. Replies to earlier tags are dropped. A reply to a
    later tag is meant for another process that now runs as this replica. It is
    put back, and the verdict for this process is VOID: its contribution was not
    used.

    Args:
      replica: The index of the replica that waits.
      tag: int64 scalar, the tag of the contribution.

    Returns:
      The `protocol.Verdict` and the global step to continue from, int64
      scalars.
    """

    def tag_of(element):
      return LAYOUT.unpack(tf.ensure_shape(element, [LAYOUT.size])).tag

    taken, is_anothers = take_own(self._queues, replica, tag, tag_of)
    reply = LAYOUT.unpack(tf.ensure_shape(taken, [LAYOUT.size]))
    void = tf.constant(int(protocol.Verdict.VOID), tf.int64)
    return tf.where(is_anothers, void, reply.verdict), reply.step

  def close(self) -> None:
    """Closes the queues from which replicas take the chief's replies.

    Replicas that wait for a reply get `OutOfRangeError`.
    """
    for queue in self._queues:
      queue.close()
