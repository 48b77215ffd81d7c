"""What the chief says to replicas that wait: a queue each, on PS task 0."""

from collections.abc import Callable
from collections.abc import Sequence

import tensorflow as tf

from tf_replicas import ledger
from tf_replicas import parameter_store
from tf_replicas import resources


def take_own(
  queues: Sequence[resources.Queue],
  replica: int | tf.Tensor,
  tag: tf.Tensor,
  tag_of: Callable[[tf.Tensor], tf.Tensor],
) -> tuple[tf.Tensor, tf.Tensor]:
  """Waits for what is for `tag` or later; throws away what is for earlier ones.

  What is for a later one is for another process, which runs as this replica
  now, and is put back. To be used inside a `tf.function`.

  Args:
    queues: One per replica.
    replica: Whose to wait at.
    tag: int64 scalar.
    tag_of: Gives the tag of an element; -t is all until t.

  Returns:
    The element, and whether it was put back.
  """

  def dequeue(*_):
    return [resources.select(replica, queues, lambda q: q.dequeue()[0])]

  (taken,) = tf.while_loop(
    lambda taken: tf.abs(tag_of(taken)) < tag,
    dequeue,
    dequeue(),
    shape_invariants=[tf.TensorShape(None)],
  )

  def put_back(queue):
    with tf.control_dependencies([queue.enqueue([taken])]):
      return tf.constant(True)

  is_put_back = tf.cond(
    tag_of(taken) > tag,
    lambda: resources.select(replica, queues, put_back),
    lambda: tf.constant(False),
  )
  return taken, is_put_back


class Replies:
  """One queue of (tag, verdict, step) per replica."""

  def __init__(self, store: parameter_store.ParameterStore, num_replicas: int):
    """Creates the queues, or attaches to them."""
    with tf.device(store.device_of_task(0)):
      self._queues = [
        resources.Queue(f"replies/{r}", [tf.int64]) for r in range(num_replicas)
      ]

  def send(self, verdict: tf.Tensor, tag: tf.Tensor, step: tf.Tensor) -> None:
    """Replies to everyone with a verdict; on PS task 0.

    Args:
      verdict: int64 [R], a `ledger.Verdict`; negative: no reply.
      tag: int64 [R], to which contribution; -t is to all until t.
      step: int64 scalar, to go on from.
    """
    for r, queue in enumerate(self._queues):

      def send(r=r, queue=queue):
        with tf.control_dependencies(
          [queue.enqueue([tf.stack([tag[r], verdict[r], step])])]
        ):
          return tf.constant(True)

      tf.cond(verdict[r] >= 0, send, lambda: tf.constant(False))

  def wait(
    self, replica: int | tf.Tensor, tag: tf.Tensor
  ) -> tuple[tf.Tensor, tf.Tensor]:
    """Waits for the reply to `tag`; throws away those to earlier ones.

    One to a later tag is for another process, which runs as this replica now.
    It is put back, and this one's contribution is void.

    Args:
      replica: Whose.
      tag: int64 scalar.

    Returns:
      The verdict and the step, int64 scalars.
    """

    reply, is_anothers = take_own(
      self._queues, replica, tag, lambda reply: reply[0]
    )
    reply = tf.ensure_shape(reply, [3])
    void = tf.constant(int(ledger.Verdict.VOID), tf.int64)
    return tf.where(is_anothers, void, reply[1]), reply[2]

  def close(self) -> None:
    """Ends it for everybody: waiters get `OutOfRangeError`."""
    for queue in self._queues:
      queue.close()
