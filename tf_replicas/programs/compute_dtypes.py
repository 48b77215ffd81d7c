"""Compute dtypes of a network; its variables and losses stay float32."""

FLOAT32 = "float32"
FLOAT16 = "float16"
NAMES = (FLOAT32, "bfloat16", FLOAT16)

# float16 holds nothing below 6e-8: where gradients are smaller, they vanish
# unless the loss is scaled up. A power of two rounds nothing.
FLOAT16_LOSS_SCALE = 1024.0


def policy(name: str) -> str:
  """The Keras dtype policy of layers that compute in one of `NAMES`."""
  return name if name == FLOAT32 else f"mixed_{name}"


def loss_scale(name: str) -> float | None:
  """The factor by which an update rule scales the loss; None: it does not."""
  return FLOAT16_LOSS_SCALE if name == FLOAT16 else None
