"""A simple driver for tests: one process that takes every batch in two halves.

It was written by following CONTRIBUTING.md, to see what a new driver needs. A
step computes the gradients of both halves, one after the other, from the same
variables, and applies their mean.
"""

import tensorflow as tf

from tf_replicas.drivers import base as driver_base
from tf_replicas.drivers import one_machine
from tf_replicas.replica import model_parallel
from tf_replicas.replica import model_replica
from tf_replicas.runtime import resources
from tf_replicas.store import gradient_math

_CPU = "/device:CPU:0"


class Halves(driver_base.Driver):
  """A driver of one process that computes each batch as two halves."""

  is_chief = True

  def __init__(self, replica_fn, rule_fn):
    """Builds the replica, the update rule and the variables.

    Args:
      replica_fn: Builds the replica.
      rule_fn: Maps the number of replicas to an update rule.
    """
    self.replica = replica_fn()
    self.store = one_machine.single_store(
      self.replica.shared, _CPU, resources.new_namespace("halves")
    )
    self._update = rule_fn(1).in_lockstep(self.store)
    self._update.create([tf.identity(v) for v in self.replica.shared])
    self._step_fn = None

  def step(self, max_updates=1):
    del max_updates
    if self._step_fn is None:
      start = int(self.store.examples_seen.read_value())
      self._iterator = iter(self.replica.dataset_fn(1, 0, start))
      self._step_fn = tf.function(self._step, autograph=False)
    return one_machine.run_step(self._update, self._step_fn, ["this process"])

  def _step(self):
    with tf.device(_CPU):
      step, values = self.store.pull()
      parameters = [values[i] for i in self.store.contributed]
      halves = [
        self.replica.gradients(parameters, half, self._update.rule.scale_loss)
        for half in model_parallel.parts(next(self._iterator), 2, "halves")
      ]
      both = model_replica.average_towers(halves)
      gradients = self._update.finish_gradients(both.gradients)
      is_sound = tf.math.is_finite(both.loss)
      is_sound &= gradient_math.all_finite(gradients)
      new_step = tf.cond(
        is_sound,
        lambda: self._update.apply(gradients, step, both.num_examples),
        lambda: step,
      )
      with tf.control_dependencies([new_step]):
        bad = tf.where(is_sound, -1, 0)
        return one_machine.REPORT.pack(
          one_machine.StepReport(bad, step, both.num_examples, both.loss)
        )

  def run_replica(self):
    self._check_role(needs_chief=False)

  def set_learning_rate(self, rate):
    self._update.rule.set_learning_rate(rate)

  def close(self, error=None):
    del error  # No other task waits.
