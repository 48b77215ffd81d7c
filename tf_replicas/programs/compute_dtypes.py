"""Defines the dtypes that a network may compute in.

Variables and losses are float32 with each of these dtypes.
"""

from __future__ import annotations

import typing

from tf_replicas.programs import update_options

if typing.TYPE_CHECKING:
  from tf_replicas.store import loss_scaling

FLOAT32 = "float32"
FLOAT16 = "float16"
NAMES = (FLOAT32, "bfloat16", FLOAT16)
# A power of two rounds nothing.
_FIXED_LOSS_SCALE = 1024.0


def policy(name: str) -> str:
  """Returns the name of Keras' dtype policy for layers that compute in `name`.

  Args:
    name: The name of a dtype, such as "bfloat16".
  """
  return name if name == FLOAT32 else f"mixed_{name}"


def loss_scale(
  name: str, update: update_options.UpdateSettings
) -> loss_scaling.LossScale | None:
  """Returns the `loss_scale` of a replica; None for no dynamic scale.

  Only "float16" needs one: it holds nothing below 6e-8, so small gradients
  would become 0.

  Args:
    name: The name of the dtype that layers compute in.
    update: The settings of the update rule.
  """
  if name != FLOAT16 or _trains_copies(update):
    return None
  # TensorFlow is imported only by the tasks that compute.
  from tf_replicas.store import loss_scaling

  return loss_scaling.LossScale()


def fixed_loss_scale(
  name: str, update: update_options.UpdateSettings
) -> float | None:
  """Returns the `loss_scale` of an update rule; None for no fixed scale.

  "float16" needs it if the replicas train copies of the variables, since they
  cannot scale the loss dynamically.

  Args:
    name: The name of the dtype that layers compute in.
    update: The settings of the update rule.
  """
  is_fixed = name == FLOAT16 and _trains_copies(update)
  return _FIXED_LOSS_SCALE if is_fixed else None


def _trains_copies(update: update_options.UpdateSettings) -> bool:
  return any(phase.is_periodic for phase in update_options.phases(update))
