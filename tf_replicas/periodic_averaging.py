"""Periodic averaging: replicas train copies of their own, and meet at times.

Local SGD with model averaging, elastic averaging, accumulated gradient
normalization: what TF1's contrib had as `ModelAverageOptimizer`,
`ElasticAverageOptimizer` and `AGNOptimizer`. `periodic_optimizer` says what
they have in common; `model_average`, `elastic_average` and
`accumulated_gradients` make one of each kind.

The shared variables on the PS tasks are the *centre*; statistics, such as those
of batch normalization, belong to it and to the copies. A replica:

1. Begins with a copy of the centre, on its own device.
2. Takes `period` local steps: a batch, its gradient, one step of a Keras
   optimizer on the copy. Slots and step count of this optimizer are the
   replica's own, and outlast the meetings.
3. Meets: hands over what the kind says, and goes on from what it says; one
   update of the centre.

Where things live: centre, averages, queues, counters, the learning rate and
the word that training is over on the PS tasks, as for `SyncReplicasOptimizer`
or `AsyncReplicasOptimizer`, one of which is held; copy and slots in tensors
that a replica carries along. They are in no checkpoint, and die with it: a
replica that is restarted begins with the centre and with new slots.
"""

from collections.abc import Iterable

import keras
import tensorflow as tf

from tf_replicas import async_replicas
from tf_replicas import local_optimizer
from tf_replicas import local_steps
from tf_replicas import meetings
from tf_replicas import moving_averages
from tf_replicas import periodic_optimizer
from tf_replicas import sync_replicas
from tf_replicas import update_rule

# A copy and the centre go BETA / period / M of the way to each other, as in
# TF1's `ElasticAverageOptimizer`; in Zhang et al. 2015, section 5, BETA / M.
BETA = 0.9


def model_average(
  optimizer: keras.optimizers.Optimizer,
  replicas_to_aggregate: int,
  total_num_replicas: int | None = None,
  *,
  period: int = 100,
  variable_averages: moving_averages.MovingAverages | None = None,
  variables_to_average: Iterable[tf.Variable | str] | None = None,
  has_chief_statistics: bool = False,
  loss_scale: float | None = None,
) -> periodic_optimizer.PeriodicOptimizer:
  """Local SGD with model averaging: the centre becomes the mean of N copies.

  When N replicas have met, the centre becomes the mean of their copies, and
  all go on from it. A copy made from an older centre is refused whole, as is
  one beyond the first N; its replica goes on from the centre as well. Whether
  a replica is waited for, or lost, is as with `SyncReplicasOptimizer`.

  With plain gradient descent and a period of 1 this is synchronous gradient
  descent. After `ModelAverageOptimizer` of TF1's contrib, whose
  `interval_steps` is the period here.

  Args:
    optimizer: Makes the local steps; a Keras optimizer whose learning rate is a
      number, not built yet.
    replicas_to_aggregate: N, the copies in one mean.
    total_num_replicas: M, the replicas that train, at least N; N if not given.
    period: The local steps between two meetings.
    variable_averages: Keeps shadow averages of the centre.
    variables_to_average: As for `SyncReplicasOptimizer`.
    has_chief_statistics: Whether statistics follow one replica alone.
    loss_scale: As for `SyncReplicasOptimizer`.

  Raises:
    TypeError, ValueError: If an argument is of no use.
  """
  steps = local_steps.LocalSteps(
    local_optimizer.LocalOptimizer(optimizer), period, loss_scale
  )
  rule = sync_replicas.SyncReplicasOptimizer(
    meetings.Move(1.0),
    replicas_to_aggregate,
    total_num_replicas,
    variable_averages=variable_averages,
    variables_to_average=variables_to_average,
    has_chief_statistics=has_chief_statistics,
    name="model_average",
  )
  if replicas_to_aggregate > rule.total_num_replicas:
    raise ValueError(
      "`replicas_to_aggregate` must not exceed `total_num_replicas`, for a"
      " replica has one copy to average. Received:"
      f" {replicas_to_aggregate} of {rule.total_num_replicas}."
    )
  return periodic_optimizer.PeriodicOptimizer(steps, meetings.Together(rule))


def elastic_average(
  optimizer: keras.optimizers.Optimizer,
  total_num_replicas: int,
  *,
  period: int = 10,
  moving_rate: float | None = None,
  rho: float | None = None,
  synchronous: bool = False,
  variable_averages: moving_averages.MovingAverages | None = None,
  variables_to_average: Iterable[tf.Variable | str] | None = None,
  has_chief_statistics: bool = False,
  loss_scale: float | None = None,
) -> periodic_optimizer.PeriodicOptimizer:
  """Elastic averaging: copies and centre pull at each other.

  A replica never takes over the centre. When it meets it, with a =
  `moving_rate` and the difference of its copy from the centre,

      copy   <- copy   - a * difference
      centre <- centre + a * difference

  in one piece: exchanges follow one another. Synchronous: all replicas meet at
  a time, each moves by its own difference from the same centre, and the centre
  by the sum of them. In between, each local gradient is increased by

      rho * (copy - centre as this replica knows it from the last meeting)

  Zhang et al. 2015, "Deep learning with elastic averaging SGD", section 3, and
  Algorithm 1 where `synchronous` is False; defaults and the force in between
  after `ElasticAverageOptimizer` of TF1's contrib.

  Args:
    optimizer: Makes the local steps, as for `model_average`.
    total_num_replicas: M, the replicas that train; all are waited for where
      they meet at a time.
    period: The local steps between two meetings.
    moving_rate: a, in (0, 1]; 0.9 / `period` / M if not given.
    rho: At least 0; `moving_rate` / the optimizer's learning rate if not given.
    synchronous: Whether all replicas meet at a time.
    variable_averages: Keeps shadow averages of the centre.
    variables_to_average: As for `SyncReplicasOptimizer`.
    has_chief_statistics: Whether statistics follow one replica alone.
    loss_scale: As for `SyncReplicasOptimizer`.

  Raises:
    TypeError, ValueError: If an argument is of no use.
  """
  steps = local_steps.LocalSteps(
    local_optimizer.LocalOptimizer(optimizer), period, loss_scale
  )
  update_rule.check_count("total_num_replicas", total_num_replicas)
  if moving_rate is None:
    moving_rate = BETA / period / total_num_replicas
  if not 0 < moving_rate <= 1:
    raise ValueError(
      f"`moving_rate` must be in (0, 1]. Received: {moving_rate}."
    )
  if rho is None:
    rho = moving_rate / steps.learning_rate if steps.learning_rate else -1
  if not rho >= 0:
    raise ValueError(
      "`rho` must be given where the learning rate is 0, and must not be"
      f" negative. Received: {rho}."
    )
  make_rule, make_meeting, rate = (
    (
      sync_replicas.SyncReplicasOptimizer,
      meetings.Together,
      moving_rate * total_num_replicas,
    )
    if synchronous
    else (
      async_replicas.AsyncReplicasOptimizer,
      meetings.AtTheCentre,
      moving_rate,
    )
  )
  rule = make_rule(
    meetings.Move(rate),
    total_num_replicas,
    variable_averages=variable_averages,
    variables_to_average=variables_to_average,
    has_chief_statistics=has_chief_statistics,
    name="elastic_average",
  )
  return periodic_optimizer.PeriodicOptimizer(
    steps, make_meeting(rule, moving_rate, rho)
  )


def accumulated_gradients(
  optimizer: keras.optimizers.Optimizer,
  total_num_replicas: int,
  *,
  period: int = 10,
  use_locking: bool = True,
  variable_averages: moving_averages.MovingAverages | None = None,
  variables_to_average: Iterable[tf.Variable | str] | None = None,
  has_chief_statistics: bool = False,
  loss_scale: float | None = None,
) -> periodic_optimizer.PeriodicOptimizer:
  """Accumulated gradient normalization: the mean gradient of a local walk.

  A replica explores with local steps. When it meets the centre, the mean of its
  `period` gradients is applied there by an optimizer of the same settings, at
  once, and it goes on from the centre, which others may have changed meanwhile.
  Statistics go 1 / M of the way that they went in its copy.

  Hermans et al. 2017, "Accumulated gradient normalization", section 3; after
  `AGNOptimizer` of TF1's contrib.

  Args:
    optimizer: Applied to the centre, with slots on the PS tasks, as by
      `AsyncReplicasOptimizer`; a copy of it, made from its configuration, makes
      the local steps, with slots of its own. As for `model_average`.
    total_num_replicas: M, the replicas that train.
    period: The local steps between two meetings.
    use_locking: Whether updates of one variable exclude each other.
    variable_averages: Keeps shadow averages of the centre.
    variables_to_average: As for `SyncReplicasOptimizer`.
    has_chief_statistics: Whether statistics follow one replica alone.
    loss_scale: As for `SyncReplicasOptimizer`.

  Raises:
    TypeError, ValueError: If an argument is of no use.
  """
  steps = local_steps.LocalSteps(
    local_optimizer.LocalOptimizer(optimizer).copy(), period, loss_scale
  )
  rule = async_replicas.AsyncReplicasOptimizer(
    optimizer,
    total_num_replicas,
    use_locking=use_locking,
    variable_averages=variable_averages,
    variables_to_average=variables_to_average,
    has_chief_statistics=has_chief_statistics,
    name="accumulated_gradients",
  )
  return periodic_optimizer.PeriodicOptimizer(
    steps, meetings.Accumulated(rule, period)
  )
