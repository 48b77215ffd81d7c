"""The chief's replies to waiting replicas: one queue each, on PS task 0."""

from collections.abc import Callable
from collections.abc import Sequence
from typing import NamedTuple

import tensorflow as tf

from tf_replicas.rules import protocol
from tf_replicas.runtime import control_flow
from tf_replicas.runtime import records
from tf_replicas.runtime import resources
from tf_replicas.store import parameter_store


class Reply(NamedTuple):
  """One reply; int64 scalars.

  Attributes:
    tag: The tag of the contribution it answers; -t answers all up to tag t.
    verdict: A `protocol.Verdict`.
    step: The global step to continue from.
  """

  tag: tf.Tensor
  verdict: tf.Tensor
  step: tf.Tensor


LAYOUT = records.Layout(
  Reply, tf.int64, tag=tf.int64, verdict=tf.int64, step=tf.int64
)


def take_own(
  queues: Sequence[resources.Queue],
  replica: int | tf.Tensor,
  tag: tf.Tensor,
  tag_of: Callable[[tf.Tensor], tf.Tensor],
) -> tuple[tf.Tensor, tf.Tensor]:
  """Waits for an element for `tag` or a later one; drops those for earlier.

  An element for a later tag is meant for another process that now runs as this
  replica; it is put back. To be used inside a `tf.function`.

  Args:
    queues: One per replica.
    replica: The replica whose queue is read.
    tag: int64 scalar.
    tag_of: Gives the tag of an element; -t stands for all up to t.

  Returns:
    The element, and a bool scalar: whether it was put back.
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
  """One queue of `Reply` per replica."""

  def __init__(
    self,
    store: parameter_store.ParameterStore,
    num_replicas: int,
    namespace: resources.Namespace,
  ):
    """Creates the queues in `namespace`, or attaches to them."""
    with tf.device(store.device_of_task(0)):
      self._queues = [
        namespace.queue(f"replies/{r}", [tf.int64]) for r in range(num_replicas)
      ]

  def send(self, verdict: tf.Tensor, tag: tf.Tensor, step: tf.Tensor) -> None:
    """Replies to every replica that has a verdict; runs on PS task 0.

    Args:
      verdict: int64 [R], a `protocol.Verdict`; no reply where it is negative.
      tag: int64 [R], the contribution that is answered; -t answers all up to t.
      step: int64 scalar, the global step to continue from.
    """
    for r, queue in enumerate(self._queues):
      control_flow.run_if(
        verdict[r] >= 0,
        lambda r=r, queue=queue: queue.enqueue(
          [LAYOUT.pack(Reply(tag[r], verdict[r], step))]
        ),
      )

  def wait(
    self, replica: int | tf.Tensor, tag: tf.Tensor
  ) -> tuple[tf.Tensor, tf.Tensor]:
    """Waits for the reply to `tag`; drops replies to earlier tags.

    A reply to a later tag is meant for another process that now runs as this
    replica. It is put back, and the contribution of this process is void.

    Args:
      replica: The replica that waits.
      tag: int64 scalar.

    Returns:
      The verdict and the step, int64 scalars.
    """

    def tag_of(element):
      return LAYOUT.unpack(tf.ensure_shape(element, [LAYOUT.size])).tag

    taken, is_anothers = take_own(self._queues, replica, tag, tag_of)
    reply = LAYOUT.unpack(tf.ensure_shape(taken, [LAYOUT.size]))
    void = tf.constant(int(protocol.Verdict.VOID), tf.int64)
    return tf.where(is_anothers, void, reply.verdict), reply.step

  def close(self) -> None:
    """Closes all queues: waiting replicas get `OutOfRangeError`."""
    for queue in self._queues:
      queue.close()
