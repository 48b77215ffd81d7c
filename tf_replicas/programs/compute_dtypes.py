"""Defines the dtypes that a network may compute in.

Variables and losses are float32, whichever of these dtypes is chosen.
"""

FLOAT32 = "float32"
FLOAT16 = "float16"
NAMES = (FLOAT32, "bfloat16", FLOAT16)

# float16 holds nothing below 6e-8: where gradients are smaller, they vanish
# unless the loss is scaled up. A power of two rounds nothing.
FLOAT16_LOSS_SCALE = 1024.0


def policy(name: str) -> str:
  """Returns the Keras dtype policy for layers that compute in dtype `name`."""
  return name if name == FLOAT32 else f"mixed_{name}"


def loss_scale(name: str) -> float | None:
  """Returns the factor by which to scale the loss if layers compute in `name`.

  Only "float16" needs a factor, since small gradients would become 0. For other
  dtypes the result is None.
  """
  return FLOAT16_LOSS_SCALE if name == FLOAT16 else None
