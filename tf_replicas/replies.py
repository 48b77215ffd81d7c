"""What the chief says to replicas that wait: a queue each, on PS task 0."""

import tensorflow as tf

from tf_replicas import ledger
from tf_replicas import parameter_store
from tf_replicas import resources


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

    def dequeue(*_):
      return [resources.select(replica, self._queues, lambda q: q.dequeue()[0])]

    (reply,) = tf.while_loop(
      lambda reply: tf.abs(reply[0]) < tag,
      dequeue,
      dequeue(),
      shape_invariants=[tf.TensorShape(None)],
    )
    reply = tf.ensure_shape(reply, [3])

    def put_back():
      def put(queue):
        with tf.control_dependencies([queue.enqueue([reply])]):
          return tf.constant(int(ledger.Verdict.VOID), tf.int64)

      return resources.select(replica, self._queues, put)

    is_others = reply[0] > tag
    return tf.cond(is_others, put_back, lambda: reply[1]), reply[2]

  def close(self) -> None:
    """Ends it for everybody: waiters get `OutOfRangeError`."""
    for queue in self._queues:
      queue.close()
