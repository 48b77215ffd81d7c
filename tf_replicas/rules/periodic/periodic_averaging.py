"""Makes update rules by which replicas train their own copies of the variables.

`model_average` (local SGD with model averaging), `elastic_average` and
`accumulated_gradients` (accumulated gradient normalization) each make a
`PeriodicOptimizer`. They are the successors of `ModelAverageOptimizer`,
`ElasticAverageOptimizer` and `AGNOptimizer` of TF1's contrib.

The shared variables on the PS tasks are the *center*. The center and every copy
include statistics (variables without gradients, such as moving means of batch
normalization). A replica:

1. Begins with a copy of the center, on its own device.
2. Makes `period` local steps. Each computes the gradient of a batch and makes
   one step of a Keras optimizer on the copy. Each replica has its own slots and
   step count of this optimizer, and keeps them across exchanges.
3. Exchanges values with the center, and returns to 2. An exchange contributes
   to one update of the center; `sync_rounds` defines the kinds of exchange.

The center, its moving averages, queues, counters, the learning rate and the
flag that ends training are on the PS tasks, as for the rule that updates the
center (`SyncReplicasOptimizer` or `AsyncReplicasOptimizer`). The copy and its
slots are tensors that a replica carries from step to step. No checkpoint
includes them. A restarted replica begins with the center and with new slots.
"""

from collections.abc import Iterable

import keras
import tensorflow as tf

from tf_replicas.rules import base as rule_base
from tf_replicas.rules.asynchronous import async_replicas
from tf_replicas.rules.periodic import local_steps
from tf_replicas.rules.periodic import periodic_optimizer
from tf_replicas.rules.periodic import sync_rounds
from tf_replicas.rules.sync import sync_replicas
from tf_replicas.store import moving_averages

# A copy and the center go BETA / period / M of the way to each other, as in
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
  clip_replica_norm: float | None = None,
) -> periodic_optimizer.PeriodicOptimizer:
  """Makes an update rule for model averaging, also called local SGD.

  Each replica trains its own copy of the variables. Once N replicas have handed
  over their copies, the center (the shared variables) becomes the mean of these
  copies, and all replicas continue from the center. A copy is refused as a
  whole if it was trained from an older center, or if N others came first. Its
  replica continues from the center as well. Lost replicas are treated as by
  `SyncReplicasOptimizer`.

  With plain gradient descent and a period of 1 this is synchronous gradient
  descent. TF1's `ModelAverageOptimizer` called the period `interval_steps`.

  Args:
    optimizer: Makes the local steps, in which a replica trains its copy. A
      Keras optimizer that is not built yet, whose learning rate is a number.
    replicas_to_aggregate: N, the number of copies in one mean.
    total_num_replicas: M, the number of replicas that train, at least N. None:
      N.
    period: The number of local steps between two exchanges.
    variable_averages: Keeps moving averages of the center. None: there are
      none.
    variables_to_average: The variables of which moving averages are kept, or
      their paths. None: all.
    has_chief_statistics: Whether statistics (variables without gradients, such
      as moving means) are updated from one replica alone: of those whose copies
      are used, the one with the smallest index.
    loss_scale: A constant by which the loss is multiplied and the gradients are
      divided, for float16 computation. None: no scale.
    clip_replica_norm: The global norm to which the gradients of each local step
      are clipped. None: no clipping.

  Returns:
    The update rule.

  Raises:
    TypeError, ValueError: If an argument is invalid.
  """
  steps = local_steps.LocalSteps(
    local_steps.LocalOptimizer(optimizer), period, loss_scale, clip_replica_norm
  )
  rule = sync_replicas.SyncReplicasOptimizer(
    sync_rounds.MoveToward(1.0),
    replicas_to_aggregate,
    total_num_replicas,
    variable_averages=variable_averages,
    variables_to_average=variables_to_average,
    has_chief_statistics=has_chief_statistics,
    name="model_average",
  )
  if rule.replicas_to_aggregate > rule.total_num_replicas:
    raise ValueError(
      "`replicas_to_aggregate` must not exceed `total_num_replicas`, for a"
      " replica has one copy to average. Received:"
      f" {replicas_to_aggregate} of {rule.total_num_replicas}."
    )
  return periodic_optimizer.PeriodicOptimizer(
    steps, sync_rounds.AverageAll(rule)
  )


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
  clip_replica_norm: float | None = None,
) -> periodic_optimizer.PeriodicOptimizer:
  """Makes an update rule for elastic averaging.

  Each replica trains its own copy of the variables. After each `period`, the
  copy and the center (the shared variables) move toward each other; a replica
  never replaces its copy by the center. An exchange computes, with a =
  `moving_rate` and difference = copy - center,

      copy   <- copy   - a * difference
      center <- center + a * difference

  as one atomic operation per replica. If `synchronous`, all replicas exchange
  together: each copy moves by a times its own difference from the same center,
  and the center by a times the sum of all differences. Between exchanges, each
  local gradient is increased by

      rho * (copy - center after the last exchange of this replica)

  See Zhang et al. 2015, "Deep learning with elastic averaging SGD", section 3,
  and Algorithm 1 if `synchronous` is False. The defaults, and the term with
  `rho`, are those of `ElasticAverageOptimizer` of TF1's contrib.

  Args:
    optimizer: Makes the local steps, in which a replica trains its copy. A
      Keras optimizer that is not built yet, whose learning rate is a number.
    total_num_replicas: M, the number of replicas that train. A synchronous
      exchange waits for all of them.
    period: The number of local steps between two exchanges.
    moving_rate: a, the fraction of the difference by which an exchange moves
      the copy and the center, in (0, 1]. None: 0.9 / `period` / M.
    rho: The factor of the term that is added to local gradients, at least 0.
      None: `moving_rate` / the optimizer's learning rate.
    synchronous: Whether all replicas exchange together.
    variable_averages: Keeps moving averages of the center. None: there are
      none.
    variables_to_average: The variables of which moving averages are kept, or
      their paths. None: all.
    has_chief_statistics: Whether statistics (variables without gradients, such
      as moving means) are updated from replica 0 alone.
    loss_scale: A constant by which the loss is multiplied and the gradients are
      divided, for float16 computation. None: no scale.
    clip_replica_norm: The global norm to which the gradients of each local step
      are clipped. None: no clipping.

  Returns:
    The update rule.

  Raises:
    TypeError, ValueError: If an argument is invalid.
  """
  steps = local_steps.LocalSteps(
    local_steps.LocalOptimizer(optimizer), period, loss_scale, clip_replica_norm
  )
  rule_base.check_count("total_num_replicas", total_num_replicas)
  if moving_rate is None:
    moving_rate = BETA / period / total_num_replicas
  if not 0 < moving_rate <= 1:
    raise ValueError(
      f"`moving_rate` must be in (0, 1]. Received: {moving_rate}."
    )
  if rho is None:
    if not steps.learning_rate:
      raise ValueError(
        "`rho` must be given if the learning rate is 0: its default is"
        " moving_rate / learning_rate. Received: None."
      )
    rho = moving_rate / steps.learning_rate
  if not rho >= 0:
    raise ValueError(f"`rho` must be at least 0. Received: {rho}.")
  make_rule, make_sync_round, rate = (
    (
      sync_replicas.SyncReplicasOptimizer,
      sync_rounds.AverageAll,
      moving_rate * total_num_replicas,
    )
    if synchronous
    else (
      async_replicas.AsyncReplicasOptimizer,
      sync_rounds.ElasticRound,
      moving_rate,
    )
  )
  rule = make_rule(
    sync_rounds.MoveToward(rate),
    total_num_replicas,
    variable_averages=variable_averages,
    variables_to_average=variables_to_average,
    has_chief_statistics=has_chief_statistics,
    name="elastic_average",
  )
  return periodic_optimizer.PeriodicOptimizer(
    steps, make_sync_round(rule, moving_rate, rho)
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
  clip_replica_norm: float | None = None,
) -> periodic_optimizer.PeriodicOptimizer:
  """Makes an update rule for accumulated gradient normalization.

  Each replica trains its own copy of the variables. After `period` local steps,
  `optimizer` applies the mean of the replica's gradients to the center (the
  shared variables), without waiting for other replicas. The replica continues
  from the center, which other replicas may have changed. A statistic (a
  variable without gradients, such as a moving mean) of the center changes by 1
  / M of the change in the copy.

  See Hermans et al. 2017, "Accumulated gradient normalization", section 3.

  Args:
    optimizer: Applied to the center, with slots on the PS tasks. The local
      steps use a second optimizer, made from the configuration of this one,
      with its own slots. A Keras optimizer that is not built yet, whose
      learning rate is a number.
    total_num_replicas: M, the number of replicas that train.
    period: The number of local steps between two exchanges.
    use_locking: Whether updates of one variable of the center exclude each
      other.
    variable_averages: Keeps moving averages of the center. None: there are
      none.
    variables_to_average: The variables of which moving averages are kept, or
      their paths. None: all.
    has_chief_statistics: Whether statistics are updated from replica 0 alone,
      and by its whole change instead of 1 / M of it.
    loss_scale: A constant by which the loss is multiplied and the gradients are
      divided, for float16 computation. None: no scale.
    clip_replica_norm: The global norm to which the gradients of each local step
      are clipped. None: no clipping.

  Returns:
    The update rule.

  Raises:
    TypeError, ValueError: If an argument is invalid.
  """
  steps = local_steps.LocalSteps(
    local_steps.LocalOptimizer(optimizer).copy(),
    period,
    loss_scale,
    clip_replica_norm,
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
    steps, sync_rounds.AccumulatedGradients(rule, period)
  )
