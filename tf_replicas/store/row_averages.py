"""Keeps moving averages of tables, whose rows are updated one by one.

A table is a large matrix whose rows are divided among the PS tasks (parameter
servers). An update changes few rows, so it updates the averages of these rows
only. For each row, a PS task stores the average, its *shadow*, and the global
step up to which the shadow is valid. Between this step s and a later step t no
update has changed the row v. So its average at step t has a closed form,

    shadow(t) = v + D * (shadow(s) - v)

where D is the product of the decays of the steps s + 1 to t
(`MovingAverages.decay_between`). To *catch up* is to compute this average. An
update first lets the shadows of its rows catch up to the step before it, with
the old rows. Then it makes its own step with the new rows. A reader lets the
rows that it reads catch up to the present global step, and writes nothing.

Each update counts as one step of all rows, also if it was made void by an
overflow of the scaled loss (`loss_scaling`).

Asynchronous updates of one row may be late or overlap, as those of other
variables. An update that begins after a later one has written leaves the shadow
as it is, and the next step takes its change into account. If two updates of a
row overlap, the later write wins; in rare cases a step then counts twice or not
at all.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Sequence
from typing import Any
from typing import NamedTuple

import tensorflow as tf

from tf_replicas.runtime import resources
from tf_replicas.store import moving_averages


class AveragedRows(NamedTuple):
  """Averages of n rows of a part of a table, on the PS task of the part.

  Attributes:
    ids: The indices of the rows within the part, [n].
    values: The averages, [n, columns].
    steps: int64 [n], the global step up to which each average is valid.
  """

  ids: tf.Tensor
  values: tf.Tensor
  steps: tf.Tensor


class AveragedPart:
  """Moving averages of the rows of one part of a table, on its PS task.

  A table is a large matrix, and each PS task (parameter server) holds one part
  of it. The object has the attribute and methods of a variable that `Rows` uses
  (`device`, `gather` and `scatter_update`), so that blocks of averages are read
  and assigned as those of the table are.

  Attributes:
    device: The device of the part and of its averages.
    shadow: The variable of the shadows: the average of each row, valid up to
      the step in `steps`. It has the shape of the part.
    steps: int64 variable, [rows], the global step up to which each shadow is
      valid.
  """

  def __init__(
    self,
    averages: moving_averages.MovingAverages,
    part: resources.SharedVariable,
    namespace: resources.Namespace,
    read_step: Callable[[], tf.Tensor],
  ):
    """Creates the variables, or attaches to those of another client.

    Clients are the processes that train. The variables have no values until
    some client assigns them.

    Args:
      averages: Has the decays.
      part: The variable of the part of the table.
      namespace: The scope of the names of the new variables.
      read_step: Reads the present global step, an int64 scalar.
    """
    self.device = part.device
    self._averages = averages
    self._part = part
    self._read_step = read_step
    shape: Any = part.shape.as_list()
    with tf.device(self.device):
      self.shadow = namespace.variable(
        f"averages/{part.path}", shape, part.dtype.name
      )
      self.steps = namespace.variable(
        f"averaged_at/{part.path}", shape[:1], "int64"
      )

  def caught_up(self, ids: tf.Tensor, step: tf.Tensor) -> AveragedRows:
    """Computes the averages of some rows at a global step; writes nothing.

    Args:
      ids: The indices of the rows within the part, [n].
      step: int64 scalar, the global step. An average that is already valid up
        to a later step is returned as it is.
    """
    with tf.device(self.device):
      # `update` writes in the opposite order. So if it runs at the same time,
      # this may read new shadows with old steps. They catch up once too often,
      # with values that are close to them. Old shadows with new steps would
      # not catch up at all.
      steps = self.steps.gather(ids)
      with tf.control_dependencies([steps]):
        shadows = self.shadow.gather(ids)
      with tf.control_dependencies([shadows]):
        return self._advanced(AveragedRows(ids, shadows, steps), step)

  def update(self, rows: AveragedRows, step: tf.Tensor) -> None:
    """Writes the averages of the rows that an update has changed.

    To be used inside a `tf.function`, after the update of the table.

    Args:
      rows: The result of `caught_up` for these rows and the step before the
        update, computed before the update of the table.
      step: int64 scalar, the global step after the update.
    """
    with tf.device(self.device):
      rows = self._advanced(rows, step)
      written = self.shadow.scatter_update(
        tf.IndexedSlices(rows.values, rows.ids)
      )
      with tf.control_dependencies([written]):
        self.steps.scatter_update(tf.IndexedSlices(rows.steps, rows.ids))

  def _advanced(self, rows: AveragedRows, step: tf.Tensor) -> AveragedRows:
    """Returns the averages at step `step`, with the present rows of the part.

    Args:
      rows: The averages at earlier or later steps; the later ones stay.
      step: int64 scalar, the global step.
    """
    steps = tf.maximum(rows.steps, step)
    decay = self._averages.decay_between(rows.steps, steps)
    values = moving_averages.moving_average_update(
      rows.values, self._part.gather(rows.ids), decay[:, tf.newaxis]
    )
    return AveragedRows(rows.ids, values, steps)

  def gather(self, rows: tf.Tensor) -> tf.Tensor:
    """Returns the averages of some rows at the present global step.

    Args:
      rows: int64 [n], the indices of the rows within the part.

    Returns:
      The averages, [n, columns], on the device of the part.
    """
    return self.caught_up(rows, self._read_step()).values

  def scatter_update(self, slices: tf.IndexedSlices) -> None:
    """Assigns averages; `restart` must set the step at which they are valid.

    To be used inside a `tf.function`.

    Args:
      slices: The averages, and the indices of their rows within the part.
    """
    self.shadow.scatter_update(slices)


def restart(parts: Iterable[Sequence[AveragedPart]], step: int) -> None:
  """Declares all averages of some tables to be valid at a global step.

  A client (a process that trains) calls it before it sets the global step.

  Args:
    parts: The averages of each table, one element per part.
    step: The global step.
  """
  every = [part for table in parts for part in table]
  if not every:
    return

  @tf.function(autograph=False, input_signature=[tf.TensorSpec([], tf.int64)])
  def assign(step: tf.Tensor) -> tf.Tensor:
    for part in every:
      with tf.device(part.device):
        part.steps.assign(tf.fill(part.steps.shape, step), read_value=False)
    return tf.constant(True)

  # A call of the function itself would warn of many traces.
  assign.get_concrete_function()(tf.constant(step, tf.int64))
