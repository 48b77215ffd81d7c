"""A simple update rule for tests: an update is the sum of two gradients.

It was written by following CONTRIBUTING.md, to see what a new rule needs. A
replica sends all its gradients, as dense tensors, to one queue on PS task 0,
and waits for a reply. The chief takes one message after the other, adds to its
gradients those of the message before, and makes an update. No gradients are
refused.
"""

import tensorflow as tf

from tf_replicas.rules import base as rule_base
from tf_replicas.rules import protocol
from tf_replicas.rules import results
from tf_replicas.rules import step_token
from tf_replicas.store import gradient_math

_NOBODY = -1
_UPDATE, _WAKE, _NONFINITE = range(3)
_REPLICAS = 2


class SumOfTwo(rule_base.OptimizerRule):
  """An update rule that applies each gradient together with the one before."""

  total_num_replicas = _REPLICAS

  def __init__(self, optimizer):
    super().__init__(optimizer, name="sum_of_two")
    self._last_step: int | None = None

  # Life.

  def build(self, store, *, is_sparse=None, namespace=None):
    del is_sparse  # All is sent dense.
    self.bind(store)
    namespace = namespace or store.namespace
    self._device = store.device_of_task(0)
    specs = [store.specs[i] for i in store.contributed]
    self._shapes = [spec.shape for spec in specs]
    with tf.device(self._device):
      # Kind, replica, step, examples; loss; the gradients.
      dtypes = [tf.int64, tf.float64, *(tf.float32 for _ in specs)]
      self._inbox = namespace.queue("sum_of_two/inbox", dtypes)
      self._replies = [
        namespace.queue(f"sum_of_two/reply_{r}", [tf.int64])
        for r in range(_REPLICAS)
      ]
      self._applied = namespace.variable(
        "sum_of_two/applied", [_REPLICAS], tf.int64
      )
      self._before = [
        namespace.variable(f"sum_of_two/before_{i}", shape, tf.float32)
        for i, shape in enumerate(self._shapes)
      ]

  def create(self, values, *, resumed):
    if not resumed:
      for variable in (self._applied, *self._before):
        variable.assign(tf.zeros(variable.shape, variable.dtype))
      self.assign_first(values)
    self.inner.build(self._store, is_chief=True)
    if resumed:
      self.interrupt()  # An earlier chief's wait may live on at the PS.

  def start(self):
    pass

  def trace_ahead(self):
    super().trace_ahead()
    self._next.get_concrete_function()
    self._answer_to_the_end.get_concrete_function()

  def signature(self):
    return {"name": self.name, "total_num_replicas": _REPLICAS}

  # The replica's half.

  @tf.autograph.experimental.do_not_convert
  def apply_gradients(
    self,
    grads_and_vars,
    *,
    replica,
    local_step,
    loss=0.0,
    num_examples=0,
    preadmitted_tag=None,
  ):
    del preadmitted_tag
    gradients = self.in_order(grads_and_vars)
    is_sound = tf.math.is_finite(tf.cast(loss, tf.float32))
    is_sound &= gradient_math.all_finite(gradients)
    dense = [
      tf.zeros(shape) if g is None else tf.convert_to_tensor(g)
      for g, shape in zip(gradients, self._shapes, strict=True)
    ]
    kind = tf.where(is_sound, _UPDATE, _NONFINITE)
    with tf.device(self._device):
      sent = self._send(kind, replica, local_step, num_examples, loss, dense)
      replica = tf.cast(replica, tf.int32)
      with tf.control_dependencies([sent]):
        (step,) = tf.switch_case(
          replica, [queue.dequeue for queue in self._replies]
        )
      return step_token.StepToken(
        tf.cast(step != step_token.ENDED, tf.int64),
        step,
        tf.constant(step_token.NO_TAG, tf.int64),
        step_token.pack_times(),
      )

  def _send(self, kind, replica, step, examples, loss, gradients):
    header = [tf.cast(x, tf.int64) for x in (kind, replica, step, examples)]
    loss = tf.cast(loss, tf.float64)
    return self._inbox.enqueue([tf.stack(header), loss, *gradients])

  # The chief's half.

  def stop_at(self, step):
    del step  # No update is made unless `apply_updates` is called.

  def apply_updates(self, max_updates=1):
    del max_updates
    self.inner.refresh()
    header, loss, after = (value.numpy() for value in self._next())
    kind, replica, step, examples = map(int, header)
    if kind == _WAKE:
      raise results.Interrupted("interrupted")
    if kind == _NONFINITE:
      raise results.NonFiniteGradientError(replica, step)
    rate = self.inner.learning_rate(int(after) - 1)
    return [results.Update(int(after), float(loss), examples, rate)]

  @tf.function(autograph=False)
  def _next(self):
    """Takes one message of a replica, and makes an update if it has gradients.

    Returns:
      The header and the loss of the message, and the global step after it.
    """
    with tf.device(self._device):
      header, loss, *gradients = self._inbox.dequeue()
      header = tf.ensure_shape(header, [4])
      step = self._store.read_global_step()
      after = tf.cond(
        header[0] == _UPDATE,
        lambda: self._update(header, gradients, step),
        lambda: step,
      )
      return header, tf.ensure_shape(loss, []), after

  def _update(self, header, gradients, step):
    sums = [
      tf.ensure_shape(g, v.shape) + v.read_value()
      for g, v in zip(gradients, self._before, strict=True)
    ]

    def take_sums(task):
      """Returns the parts of the summed gradients that PS `task` applies."""
      return [
        self._store.split(self._store.contributed[position], sums[position])[
          number
        ]
        for position, number in self._store.contributed_shards(task)
      ]

    updated = self.applier([True] * len(sums), step, take_sums, 1)
    with tf.control_dependencies([updated]):
      for gradient, variable in zip(gradients, self._before, strict=True):
        variable.assign(gradient)
      replica = header[1]
      self._applied.assign_add(tf.one_hot(replica, _REPLICAS, dtype=tf.int64))
      after = self._store.advance(step, header[3])
    with tf.control_dependencies([after]):
      self._reply(replica, after)
      return tf.identity(after)

  def _reply(self, replica, step):
    def to(queue):
      def send():
        with tf.control_dependencies([queue.enqueue([step])]):
          return tf.constant(True)

      return send

    return tf.switch_case(
      tf.cast(replica, tf.int32), [to(queue) for queue in self._replies]
    )

  # For the driver that watches and ends the training.

  def counts(self):
    applied = self._applied.read_value().numpy()
    return [results.Counts(int(count), 0, ()) for count in applied]

  def status(self):
    computing = results.ReplicaStatus(protocol.Status.COMPUTING, tag=-1)
    return results.StepStatus(0, 1, [computing] * _REPLICAS)

  def declare_lost(self, replica, tag):
    del replica, tag  # Nobody waits for another replica.

  def interrupt(self):
    try:
      self._wake()
    except tf.errors.OpError:
      pass  # It was closed meanwhile, which ends the wait as well.

  @tf.function(autograph=False)
  def _wake(self):
    with tf.device(self._device):
      nothing = [tf.zeros(shape) for shape in self._shapes]
      self._send(_WAKE, _NOBODY, 0, 0, 0.0, nothing)

  def release_replica(self, replica):
    with tf.device(self._device):
      self._replies[replica].enqueue([tf.constant(step_token.ENDED, tf.int64)])

  def end_replicas(self):
    self._answer_to_the_end()

  @tf.function(autograph=False)
  def _answer_to_the_end(self):
    """Answers every replica that the training has ended, until interrupted.

    `interrupt` puts the message that ends this loop into the queue.
    """

    def answer(kind):
      del kind
      header, *_ = self._inbox.dequeue()
      header = tf.ensure_shape(header, [4])

      def reply():
        return self._reply(header[1], tf.constant(step_token.ENDED, tf.int64))

      tf.cond(header[0] == _WAKE, lambda: tf.constant(True), reply)
      return [header[0]]

    with tf.device(self._device):
      tf.while_loop(
        lambda kind: kind != _WAKE, answer, [tf.constant(_UPDATE, tf.int64)]
      )

  def close(self):
    self._inbox.close()
    for queue in self._replies:
      queue.close()

  # Only a rule of `SwitchingOptimizer` needs these.
