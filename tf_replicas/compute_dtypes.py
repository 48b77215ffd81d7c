"""In what a network computes; variables and losses are float32 in any case.

Imports no TensorFlow.
"""

FLOAT32 = "float32"
FLOAT16 = "float16"
NAMES = (FLOAT32, "bfloat16", FLOAT16)

# float16 holds nothing below 6e-8: where gradients are smaller, they vanish
# unless the loss is scaled up. A power of two rounds nothing.
FLOAT16_LOSS_SCALE = 1024.0


def policy(name: str) -> str:
  """Keras' name of the policy for layers that compute in one of `NAMES`."""
  return name if name == FLOAT32 else f"mixed_{name}"


def loss_scale(name: str) -> float | None:
  """By how much an update rule has to scale the loss up; None: not at all."""
  return FLOAT16_LOSS_SCALE if name == FLOAT16 else None
