"""Computes with gradients that are dense, `tf.IndexedSlices` or None."""

from collections.abc import Iterable
from collections.abc import Sequence

import tensorflow as tf

from tf_replicas.store import parameter_store
from tf_replicas.store import placement

Gradient = parameter_store.Gradient


def all_finite(
  gradients: Sequence[Gradient],
  wire_dtypes: Sequence[tf.DType] | None = None,
) -> tf.Tensor:
  """Returns whether all gradients are finite, also as they are transferred.

  A finite sum of squares proves that all numbers are finite, and is cheap to
  compute. But large finite numbers may overflow the sum. So if the sum is not
  finite, every number is checked.

  Args:
    gradients: The gradients. A gradient that is None counts as finite.
    wire_dtypes: The dtype to which each gradient is cast for its transfer, as
      `ParameterStore.wire_dtypes` returns them. None: no cast.

  Returns:
    A bool scalar.
  """
  dtypes = wire_dtypes or [None] * len(gradients)
  tensors = []
  for gradient, dtype in zip(gradients, dtypes, strict=True):
    if gradient is not None:
      if isinstance(gradient, tf.IndexedSlices):
        gradient = gradient.values
      tensors.append(gradient if dtype is None else tf.cast(gradient, dtype))
  if not tensors:
    return tf.constant(True)
  squares = [tf.cast(tf.nn.l2_loss(t), tf.float32) for t in tensors]
  return tf.cond(
    tf.math.is_finite(tf.add_n(squares)),
    lambda: tf.constant(True),
    lambda: tf.reduce_all(
      [tf.reduce_all(tf.math.is_finite(t)) for t in tensors]
    ),
  )


def in_order(
  store: parameter_store.ParameterStore,
  pairs: Iterable[tuple[Gradient, tf.Variable | str]],
) -> list[Gradient]:
  """Sorts what one replica contributes into the order that the store defines.

  A replica contributes a gradient for a trainable variable, and old minus new
  value for a statistic, which is a variable without gradients.

  Args:
    store: Holds the variables.
    pairs: (gradient, variable) pairs, and (old value - new value, statistic)
      pairs. A variable may be given by its path.

  Returns:
    One gradient per trainable variable, then one difference per statistic, in
    the order of `store.contributed`; None for variables without a pair.

  Raises:
    ValueError: If a variable is not in the store.
  """
  by_path = dict.fromkeys(store.specs[i].path for i in store.contributed)
  for gradient, variable in pairs:
    path = placement.path_of(variable)
    if path not in by_path:
      raise ValueError(
        f"`grads_and_vars` must have variables of the store: {list(by_path)}."
        f" Received: {path!r}."
      )
    by_path[path] = gradient
  return list(by_path.values())


def scaled(gradient: Gradient, factor: float | tf.Tensor) -> Gradient:
  """Multiplies a gradient by the scalar `factor`.

  The result has the form (dense, `tf.IndexedSlices` or None) and the dtype of
  `gradient`.
  """
  if gradient is None:
    return None
  if isinstance(gradient, tf.IndexedSlices):
    values = gradient.values * tf.cast(factor, gradient.values.dtype)
    return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
  return gradient * tf.cast(factor, gradient.dtype)


def clipped(
  gradients: Sequence[Gradient],
  shapes: Sequence[Sequence[int]],
  clip_norm: float,
) -> list[Gradient]:
  """Scales gradients down if their global norm exceeds `clip_norm`.

  Unlike `tf.clip_by_global_norm`, the function first sums rows of a
  `tf.IndexedSlices` that have the same index. Otherwise the norm would be
  wrong.

  Args:
    gradients: Gradients of whole variables, or None.
    shapes: The shape of each variable.
    clip_norm: The largest global norm.

  Returns:
    The scaled gradients. In a `tf.IndexedSlices`, each row occurs once.
  """
  gradients = [
    sum_rows(g, tf.TensorShape(shape), may_be_empty=True)
    if isinstance(g, tf.IndexedSlices)
    else g
    for g, shape in zip(gradients, shapes, strict=True)
  ]
  squares = [sum_of_squares(g) for g in gradients if g is not None]
  if not squares:
    return gradients
  factor = clip_factor(squares, clip_norm)
  return [None if g is None else scaled(g, factor) for g in gradients]


def sum_of_squares(gradient: tf.Tensor | tf.IndexedSlices) -> tf.Tensor:
  """Computes the sum of squares of a gradient.

  Args:
    gradient: The gradient. Of `tf.IndexedSlices`, rows with equal indices count
      separately, so `sum_rows` must have added them up.

  Returns:
    A float64 scalar, since the sum might overflow float32.
  """
  values = getattr(gradient, "values", gradient)
  return tf.reduce_sum(tf.square(tf.cast(values, tf.float64)))


def clip_factor(squares: Sequence[tf.Tensor], clip_norm: float) -> tf.Tensor:
  """Computes the factor that limits the global norm of gradients.

  Args:
    squares: The sum of squares of each gradient, as float64 scalars.
    clip_norm: The largest global norm.

  Returns:
    A float32 scalar, at most 1, by which the gradients are to be multiplied.
  """
  norm = tf.sqrt(tf.add_n(squares))
  return tf.cast(clip_norm / tf.maximum(norm, clip_norm), tf.float32)


def sum_rows(
  gradient: tf.IndexedSlices,
  shape: tf.TensorShape,
  *,
  may_be_empty: bool = False,
) -> tf.IndexedSlices:
  """Sums the rows of a sparse gradient that have the same index.

  Args:
    gradient: The gradient.
    shape: The static shape of the gradient's variable.
    may_be_empty: Whether the result may have no rows.

  Returns:
    The gradient with each row once. If `gradient` has no rows, the result has
    one row of zeros, unless `may_be_empty`.
  """
  rows, where = tf.unique(gradient.indices)
  # The sum costs much more than the comparison. A replica sends the gradient of
  # each row of a table only once.
  values = tf.cond(
    tf.size(rows) == tf.size(where),
    lambda: gradient.values,
    lambda: tf.math.unsorted_segment_sum(gradient.values, where, tf.size(rows)),
  )
  # Keras 3.15 fails for slices without rows, which a shard may get: "indices[0]
  # = 0 is not in [0, 0)". A row of zeros has the same effect.
  if not may_be_empty:
    num_missing = tf.cast(tf.size(rows) == 0, tf.int32)
    rows = tf.pad(rows, [[0, num_missing]])
    values = tf.pad(values, [[0, num_missing]] + [[0, 0]] * (len(shape) - 1))
  values = tf.ensure_shape(values, [None, *shape[1:]])
  return tf.IndexedSlices(values, rows, tf.constant(shape.as_list(), tf.int64))
