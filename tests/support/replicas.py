"""One replica of a test, whose steps the test makes one by one."""

import functools

import tensorflow as tf

from tf_replicas.drivers import replica_loop
from tf_replicas.rules import step_token


class Runner:
  """A `ReplicaLoop` outside of any driver.

  Attributes:
    loop: The loop.
  """

  def __init__(self, rule, store, replica, iterator, index):
    """As the attributes of `ReplicaLoop`; `store` is that of the rule."""
    self.loop = replica_loop.ReplicaLoop(
      rule,
      replica,
      iterator,
      index,
      ps_device=store.device_of_task(0),
      device=None,
    )
    self._begin = tf.function(self.loop.begin, autograph=False)
    self._offer, self._hand_over = (
      tf.function(
        functools.partial(self.loop.run_one, is_preadmitted), autograph=False
      )
      for is_preadmitted in (False, True)
    )

  def begin(self) -> step_token.StepToken:
    """Reads what the first step starts from."""
    self.carried = self._begin()
    return self.token

  def step(self) -> step_token.StepToken:
    """Makes one step; the token after it, as Python numbers."""
    has_tag = self.token.preadmitted_tag != step_token.NO_TAG
    run = self._hand_over if has_tag else self._offer
    self.carried = run(*self.carried)
    return self.token

  @property
  def token(self) -> step_token.StepToken:
    """The last token, as Python numbers."""
    (token,) = step_token.LAYOUT.unpack_rows(self.carried[0].numpy()[None])
    return token

  @property
  def state(self) -> list[tf.Tensor]:
    """What the replica carries."""
    return list(self.carried[1:])
