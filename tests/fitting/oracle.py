"""Synchronous training by hand: each part of a batch is computed by itself."""

import keras
import numpy as np
import tensorflow as tf

from tests.fitting import models


def train(
  case: models.Case, *, num_parts: int, batch_size: int, epochs: int
) -> tuple[keras.Model, dict[str, list[float]]]:
  """What `fit` should do with as many replicas, without shuffling.

  An update applies the mean of the parts' gradients. States, such as moving
  means, become the mean of what the parts make of them. Metrics count all.

  Args:
    case: The model, and its data.
    num_parts: The replicas. They divide every batch evenly.
    batch_size: Examples of an update.
    epochs: How often the data are used.

  Returns:
    The trained model, and the history.
  """
  model, history = case.model_fn(), {}
  data = case.arguments["x"], case.arguments["y"]
  for _ in range(epochs):
    model.reset_metrics()
    for begin in range(0, models.NUM_EXAMPLES, batch_size):
      size = min(batch_size, models.NUM_EXAMPLES - begin) // num_parts
      parts = [
        tf.nest.map_structure(lambda a, b=b, s=size: a[b : b + s], data)
        for b in range(begin, begin + num_parts * size, size)
      ]
      _update(model, parts, size)
    for name, value in model.get_metrics_result().items():
      history.setdefault(name, []).append(float(value))
  return model, history


def _update(model: keras.Model, parts: list, size: int) -> None:
  gradients, states = [], []
  first = [v.numpy() for v in model.non_trainable_variables]
  for x, y in parts:
    _assign(model.non_trainable_variables, first)
    with tf.GradientTape() as tape:
      outputs = model(x, training=True)
      loss = model.compute_loss(x, y, outputs, training=True)
    found = tape.gradient(loss, model.trainable_variables)
    gradients.append([tf.convert_to_tensor(g) for g in found])
    states.append([v.numpy() for v in model.non_trainable_variables])
    model.metrics[0].update_state(loss, sample_weight=size)
    model.compute_metrics(x, y, outputs)
  _assign(model.non_trainable_variables, _means(states))
  model.optimizer.apply(_means(gradients), model.trainable_variables)


def _means(values: list) -> list[np.ndarray]:
  return [np.mean(same, axis=0) for same in zip(*values, strict=True)]


def _assign(variables: list, values: list) -> None:
  for variable, value in zip(variables, values, strict=True):
    variable.assign(value)
