"""A replica of any Keras model: normalization, dropout, regularization."""

from collections.abc import Callable

import keras
import tensorflow as tf

from tf_replicas import towers

# The end of the path of a `keras.random.SeedGenerator`'s state (Keras 3).
_SEED = "seed_generator_state"


def keras_replica(
  model: keras.Model,
  loss: Callable[[tf.Tensor, tf.Tensor], tf.Tensor],
  dataset_fn: Callable[..., tf.data.Dataset],
  **settings: object,
) -> towers.Replica:
  """Makes a replica of a Keras model; `compile` and `fit` have no part in it.

  The loss is that of the outputs plus what the model's regularizers add.
  What is not trained but moves with the batches, such as the mean and variance
  of a batch normalization, is shared and moves to the mean of what the
  contributions say. Random layers draw anew for every gradient. The weights of
  a frozen layer are shared like those, so they travel, though they stay.

  Args:
    model: Built, Keras 3. Only a pattern: its own weights do not change, see
      `Driver.values`.
    loss: Maps (labels, outputs) to the mean over the batch, a scalar, as a
      `keras.losses.Loss` does.
    dataset_fn: As that of a `Replica`; its batches are (inputs, labels).
    **settings: Further attributes of the `Replica`, such as `devices`.

  Raises:
    ValueError: If the model is not built.
  """
  if not model.built:
    raise ValueError(
      f"`model` must be built, such as by a `keras.Input`. Received: {model}."
    )
  variables = model.trainable_variables
  states = model.non_trainable_variables
  statistics = [v for v in states if _can_move(v)]

  def loss_fn(parameters, inputs, labels):
    trained = parameters[: len(variables)]
    moved = iter(parameters[len(variables) :])
    given = [next(moved) if _can_move(v) else _fresh(v) for v in states]
    outputs, updated, penalties = model.stateless_call(
      trained, given, inputs, training=True, return_losses=True
    )
    total = tf.add_n([loss(labels, outputs), *penalties])
    if not statistics:
      return total
    pairs = zip(updated, states, strict=True)
    return total, [new for new, v in pairs if _can_move(v)]

  return towers.Replica(
    variables, loss_fn, dataset_fn, statistics=statistics, **settings
  )


def _can_move(state) -> bool:
  return tf.as_dtype(state.dtype).is_floating


def _fresh(state) -> tf.Tensor:
  """A seed that differs in each execution; another state stays as it is."""
  if not state.path.endswith(_SEED):
    return state.value
  number = tf.random.uniform(state.shape, maxval=2**31 - 1, dtype=tf.int64)
  return tf.cast(number, state.dtype)
