"""Defines the dtypes that a network may compute in.

Variables and losses are float32 with each of these dtypes.
"""

FLOAT32 = "float32"
FLOAT16 = "float16"
NAMES = (FLOAT32, "bfloat16", FLOAT16)

# float16 holds nothing below 6e-8: where gradients are smaller, they vanish
# unless the loss is scaled up. A power of two rounds nothing.
FLOAT16_LOSS_SCALE = 1024.0


def policy(name: str) -> str:
  """Returns the name of Keras' dtype policy for layers that compute in `name`.

  Args:
    name: The name of a dtype, such as "bfloat16".
  """
  return name if name == FLOAT32 else f"mixed_{name}"


def loss_scale(name: str) -> float | None:
  """Returns the factor by which to multiply the loss; None for no factor.

  Only "float16" needs one: otherwise small gradients would become 0.

  Args:
    name: The name of the dtype that layers compute in.
  """
  return FLOAT16_LOSS_SCALE if name == FLOAT16 else None
