"""Defines what the update rules race on: task, rules, workers, compute times.

All times are in *batch times*: the mean time in which a usual worker computes
the gradient of one batch.
"""

import dataclasses
import functools
import json
import os
from collections.abc import Callable
from collections.abc import Mapping
from typing import NamedTuple

import keras
import numpy as np
import tensorflow as tf

from experiments.simulator import compute_times
from experiments.support import event_clock
from experiments.support import small_network
from tf_replicas.programs import update_options
from tf_replicas.replica import model_replica
from tf_replicas.rules import base as rule_base

BATCH_SIZE = 32
HIDDEN = 64
# After so many batches, a replica begins again with the first one.
NUM_BATCHES = 600
PRECISION = 0.8
# An exchange with the parameter server.
EXCHANGE_SECS = 0.1
# A training that has not reached the precision by then is given up.
MAX_SECS = 1000
# So many measured compute times of a worker are replayed in a row.
TIMES_IN_A_ROW = 256
# The learning rates among which the search finds that of a cell.
RATES = (0.00375, 0.0075, 0.015, 0.03, 0.06, 0.12, 0.24, 0.48, 0.96)
SEARCH_SEEDS = (100, 101, 102)
SWITCH_AT = 20
PERIOD = 4
SLOWER = 5.0
# When the last worker dies and returns, and how soon that is noticed.
DIES, RETURNS, NOTICED_AFTER = 20.0, 60.0, 5.0
EVEN = compute_times.Lognormal(1.0, 0.1)
_MEASURED = os.path.join(
  os.path.dirname(__file__), "..", "results", "race_compute_times.json"
)


class Contestant(NamedTuple):
  """An update rule that takes part in the race.

  Attributes:
    name: The name in tables.
    settings: The settings of the rule.
    needs: Maps the global step to the number of contributions in the next
      update, for a rule that switches; None for all others.
  """

  name: str
  settings: update_options.UpdateSettings
  needs: Callable[[int], int] | None = None

  def rule(self, workers: int, rate: float) -> rule_base.UpdateRule:
    """Makes the update rule around plain gradient descent.

    Args:
      workers: The number of replicas.
      rate: The learning rate.
    """
    update_options.check(self.settings, num_replicas=workers)
    make = update_options.rule_fn(self.settings, workers)
    return make(keras.optimizers.SGD(rate))


def contestants(workers: int) -> list[Contestant]:
  """Returns all rules of the race, with their settings.

  Args:
    workers: The number of workers, on which some settings depend.
  """

  def contestant(name, *rules, needs=None, **settings):
    if rules:
      settings["rules"] = rules
    return Contestant(name, update_options.UpdateSettings(**settings), needs)

  return [
    contestant("sync"),
    contestant("sync, 1 backup", replicas_to_aggregate=workers - 1),
    contestant("async", "async"),
    contestant("bounded staleness 2", "bounded_staleness", max_staleness=2),
    contestant(
      "drop stale", "drop_stale", max_staleness=max(1, 2 * (workers - 1))
    ),
    contestant("staleness-aware", "staleness_aware"),
    contestant(
      "delay-compensated", "delay_compensated", delay_compensation=0.04
    ),
    contestant("softsync", "softsync", softsync_n=workers // 2),
    contestant("model average", "model_average", period=PERIOD),
    contestant(
      "elastic average",
      "elastic_average",
      period=PERIOD,
      moving_rate=0.9 / workers,
      rho=0.0,
    ),
    contestant("accumulated gradients", "accumulated_gradients", period=PERIOD),
    contestant(
      "sync, then async",
      then_update=("async",),
      switch_at_step=SWITCH_AT,
      needs=lambda step: workers if step < SWITCH_AT else 1,
    ),
    # In virtual time an update is instantaneous, so this must equal `async`.
    contestant("async, locked", "async", use_locking=True),
  ]


def contestant(name: str, workers: int) -> Contestant:
  """Returns the rule of the race with the name `name`.

  Args:
    name: The name of the rule in tables.
    workers: The number of workers.

  Raises:
    LookupError: If there is no such rule.
  """
  found = [c for c in contestants(workers) if c.name == name]
  if not found:
    raise LookupError(f"no rule of the race has the name {name!r}")
  return found[0]


def measured() -> compute_times.Recorded:
  """Returns the measured compute times, divided by their mean."""
  with open(_MEASURED, encoding="utf-8") as file:
    replicas = json.load(file)["secs"]
  mean = np.mean(np.concatenate(replicas))
  return compute_times.Recorded(
    tuple(tuple((np.asarray(own) / mean).tolist()) for own in replicas)
  )


@dataclasses.dataclass(frozen=True)
class Workers:
  """A kind of workers: how fast they are, and whether one dies.

  Attributes:
    name: The name in tables.
    compute: The distribution of the time of one batch.
    slows_last: Whether the last worker is slower than the others.
    loses_last: Whether the last worker dies and returns.
  """

  name: str
  compute: compute_times.Distribution
  slows_last: bool = False
  loses_last: bool = False

  def times(self, workers: int, seed: int) -> compute_times.Draws:
    """Returns the compute times of all workers.

    Args:
      workers: The number of workers.
      seed: The seed of the times.
    """
    slow = {workers - 1: SLOWER} if self.slows_last else {}
    return compute_times.Draws(
      self.compute, workers, seed, slow, block=TIMES_IN_A_ROW
    )

  def absence(self, workers: int) -> event_clock.Absence | None:
    """Returns when which of `workers` workers is dead; None if none dies."""
    if not self.loses_last:
      return None
    return event_clock.Absence(workers - 1, DIES, RETURNS, NOTICED_AFTER)


@functools.cache
def conditions() -> Mapping[str, Workers]:
  """Returns the kinds of workers by name."""
  kinds = [
    Workers("even", EVEN),
    Workers("one slow", EVEN, slows_last=True),
    Workers("stragglers", measured()),
    Workers("one dies", EVEN, loses_last=True),
  ]
  return {kind.name: kind for kind in kinds}


def build(seed: int) -> keras.Model:
  """Builds the network: one hidden layer of 64 units, 49,866 parameters.

  Args:
    seed: Decides the initial weights.
  """
  first, second = (
    keras.initializers.HeNormal(seed=int(s >> 1))
    for s in np.random.SeedSequence(seed).generate_state(2)
  )
  size = small_network.IMAGE_SIZE
  images = keras.Input([size, size, 3])
  x = keras.layers.Flatten()(images)
  x = keras.layers.Dense(
    HIDDEN, activation="relu", kernel_initializer=first, name="hidden"
  )(x)
  x = keras.layers.Dense(10, kernel_initializer=second, name="linear")(x)
  return keras.Model(images, x)


def batches(workers: int, seed: int) -> np.ndarray:
  """Draws the examples of all batches: int64 [workers, batches, BATCH_SIZE].

  Every worker draws from the whole data set, in an order of its own.

  Args:
    workers: The number of workers.
    seed: The seed of the order.
  """
  count = small_network.synthetic.NUM_TRAIN
  return np.stack(
    [
      small_network.batches(
        count, BATCH_SIZE, NUM_BATCHES, seed=1000 * seed + worker
      )
      for worker in range(workers)
    ]
  )


class Task:
  """The task: a network, its pictures, and how precise it is.

  Attributes:
    model: The network, whose own variables are only used for their shapes.
    replica: Computes gradients of batches of indices of pictures.
  """

  def __init__(self, dataset_fn: Callable | None = None, seed: int = 0):
    """Reads the pictures, and builds the network.

    Args:
      dataset_fn: Makes the data set of indices; None where it is not needed.
      seed: Decides the initial weights of the network's own variables.
    """
    train, self._test = map(small_network.read, ("train", "test"))
    self.model = build(seed)
    self.replica = model_replica.Replica(
      self.model.trainable_variables,
      lambda parameters, chosen: small_network.loss(
        self.model, parameters, train, chosen
      ),
      dataset_fn or (lambda *_: None),
    )

  def values(self, seed: int) -> list[tf.Tensor]:
    """Returns the initial values of the parameters.

    Args:
      seed: Decides the initial weights.
    """
    return small_network.values(build(seed))

  @functools.cached_property
  def _precision(self):
    @tf.function(autograph=False)
    def precision(*values):
      logits, _ = self.model.stateless_call(values, [], self._test.images)
      is_right = tf.argmax(logits, axis=1) == self._test.labels
      return tf.reduce_mean(tf.cast(is_right, tf.float64))

    return precision

  def precision(self, values) -> float:
    """Returns the share of the 1,000 test pictures that are classified right.

    Args:
      values: The values of the parameters.
    """
    return float(self._precision(*values))
