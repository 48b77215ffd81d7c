"""Defines a replica whose steps a test makes one by one."""

import functools

import tensorflow as tf

from tf_replicas.drivers import replica_loop
from tf_replicas.rules import step_token


class Runner:
  """Makes the steps of a replica one by one, without a driver.

  A driver would make them in a loop. A *token* is the update rule's answer to
  the gradients of a step.

  Attributes:
    loop: The object that makes the steps.
  """

  def __init__(self, rule, store, replica, iterator, index):
    """Prepares the functions that make the steps.

    Args:
      rule: The update rule.
      store: The variables of the update rule.
      replica: Computes the gradients.
      iterator: The iterator over the replica's batches.
      index: The number of the replica.
    """
    self.loop = replica_loop.ReplicaLoop(
      rule,
      replica,
      iterator,
      index,
      device=None,
    )
    self._begin = tf.function(self.loop.begin, autograph=False)
    self._offer, self._hand_over = (
      tf.function(
        functools.partial(self.loop.run_one, is_preadmitted=is_preadmitted),
        autograph=False,
      )
      for is_preadmitted in (False, True)
    )

  def begin(self) -> step_token.StepToken:
    """Reads the parameters and whatever else the first step needs.

    Returns:
      The first token, which says at which global step the replica begins.
    """
    self.carried = self._begin()
    return self.token

  def step(self) -> step_token.StepToken:
    """Computes and sends the gradients of one batch.

    Returns:
      The token that ends the step (the update rule's answer to the gradients),
      as Python numbers.
    """
    has_tag = self.token.preadmitted_tag != step_token.NO_TAG
    run = self._hand_over if has_tag else self._offer
    self.carried = run(*self.carried)
    return self.token

  @property
  def token(self) -> step_token.StepToken:
    """The last token, which is the rule's answer to the last gradients.

    Its values are Python numbers.
    """
    (token,) = step_token.LAYOUT.unpack_rows(self.carried[0].numpy()[None])
    return token

  @property
  def state(self) -> list[tf.Tensor]:
    """The tensors that the update rule carries from step to step.

    The parameters are the first of them.
    """
    return list(self.carried[1:])
