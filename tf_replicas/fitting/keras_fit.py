"""Trains a compiled Keras model on a cluster, with Keras' own training loop.

`keras.Model.fit` runs in the chief, with Keras' own epochs, callbacks,
validation and history. Only its training function is replaced. The replacement
makes updates with a *driver*, the object that makes updates on the cluster, and
loads the results into the chief's model. The progress bar also shows the
learning rate.
"""

import contextlib
import dataclasses
import functools
import logging
import math
import os
import re
import time
from collections.abc import Callable
from collections.abc import Collection
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any
from typing import TypeVar

import keras
import numpy as np
import tensorflow as tf

from tf_replicas import cluster as cluster_module
from tf_replicas.drivers import base as driver_base
from tf_replicas.fitting import arguments
from tf_replicas.fitting import compiled_model
from tf_replicas.fitting import data as data_module
from tf_replicas.fitting import progress
from tf_replicas.fitting import roles
from tf_replicas.programs import update_options
from tf_replicas.replica import embeddings
from tf_replicas.replica import model_replica
from tf_replicas.runtime import keras_internals
from tf_replicas.session import interrupts
from tf_replicas.session import training
from tf_replicas.store import tables

_R = TypeVar("_R")
# About how many calls of the training function make an epoch, unless a callback
# looks at every batch.
_CALLS_PER_EPOCH = 100
# Seconds between two reads of the metrics within an epoch.
_READ_SECS = 0.5


def fit(
  model_fn: Callable[[], keras.Model],
  x: data_module.Source,
  y: object = None,
  *,
  batch_size: int | None = None,
  epochs: int = 1,
  verbose: str | int = "auto",
  callbacks: Sequence[keras.callbacks.Callback] | None = None,
  validation_split: float = 0.0,
  validation_data: object = None,
  validation_steps: int | None = None,
  validation_batch_size: int | None = None,
  validation_freq: int | Collection[int] = 1,
  shuffle: bool = True,
  class_weight: Mapping[int, float] | None = None,
  sample_weight: object = None,
  initial_epoch: int = 0,
  steps_per_epoch: int | None = None,
  rule: update_options.UpdateSettings | None = None,
  replication: str = "between_graph",
  cluster: cluster_module.ClusterSpec | str | None = None,
  devices: Sequence[str] | None = None,
  train_dir: str | os.PathLike[str] | None = None,
  checkpoint_every_secs: float = 600.0,
  table_writer: str = "chief",
  min_table_bytes: int | None = embeddings.MIN_TABLE_BYTES,
  start_timeout_secs: float = 120.0,
  recovery_timeout_secs: float = 600.0,
  seed: int = 0,
  log: Callable[[str], None] = print,
) -> keras.callbacks.History:
  """Trains a compiled Keras 3 model on a cluster, as `keras.Model.fit` does.

  The role of this process comes from environment variables (see
  `cluster.environment.role`). Without a role, this process trains alone, as the
  chief. On a cluster, the call returns in the chief only: a parameter server
  serves, and another worker computes gradients, inside this call until the
  chief's process ends; then the process exits. The chief may call `fit` or
  `run` again, and the other tasks take part again. Workers get the arguments of
  such a call from the chief, pickled by cloudpickle. With mirrored variables on
  a cluster, only one call is possible.

  The *global batch* has the examples of one update. It is what Keras calls a
  batch. It is divided into parts, one for each *contribution* to the update: a
  replica computes gradients from each part, and the update applies their mean.
  Under `Sync` there are `replicas_to_aggregate` contributions. Under `Async`
  there is one, but with "softsync" there are (number of replicas) / n. (If the
  `train_step` of the model applies gradients several times, each time is an
  update, and all of them use one global batch.)

  Metrics count exactly the contributions that were applied. Callbacks run in
  the chief only. When they are called after an epoch, the model has the current
  weights. It also has them after each batch if a callback has a method for
  batches. Weights and learning rates that a callback assigns are sent to the
  parameter servers before the next update. Gradients that replicas computed
  before that are still used.

  Args:
    model_fn: Builds and compiles the model, in the same way in all tasks. It is
      called once per task, after this process has joined the cluster.
    x: One of these: arrays; a `tf.data.Dataset`, a `keras.utils.PyDataset` or
      an iterator (such as a generator) of global batches; or a function of
      `tf.distribute.InputContext` that returns the data set of one replica,
      whose elements are parts of global batches.
    y: The labels, if `x` consists of arrays.
    batch_size: The number of examples in a global batch, if `x` consists of
      arrays. None: 32.
    epochs: As in `keras.Model.fit`.
    verbose: As in `keras.Model.fit`. Unless it is 0, the chief also prints the
      number of replicas of a cluster, and the learning rate. If stdout is not a
      terminal, "auto" and 1 print lines instead of a bar.
    callbacks: As in `keras.Model.fit`.
    validation_split: As in `keras.Model.fit`, if `x` consists of arrays.
    validation_data: As in `keras.Model.fit`, or a function without arguments
      that returns such data. The chief evaluates the model on it.
    validation_steps: As in `keras.Model.fit`.
    validation_batch_size: As in `keras.Model.fit`.
    validation_freq: As in `keras.Model.fit`.
    shuffle: Whether to shuffle arrays before every pass over them.
    class_weight: As in `keras.Model.fit`.
    sample_weight: As in `keras.Model.fit`.
    initial_epoch: As in `keras.Model.fit`. A run that resumes from `train_dir`
      must get that of the first run.
    steps_per_epoch: The number of global batches in an epoch. None: as many as
      `x` has.
    rule: The update rule, made by `Sync` or `Async`. None: that of `Sync()`.
    replication: "between_graph": every worker runs the script and trains;
      "in_graph": the chief, a separate task, drives all workers; "mirrored":
      every device has a copy of the variables, and gradients are all-reduced.
    cluster: A cluster spec, or the path of its file. None: the cluster that the
      environment describes. The task of this process comes from the environment
      in both cases.
    devices: The devices of this process that compute, such as "/device:GPU:0".
      Each has a copy of the model. None: the GPUs that the cluster spec gives
      to this task.
    train_dir: The directory for checkpoints. If it has checkpoints, training
      resumes from the newest one. None: nothing is written. None is not allowed
      with tables (`Embedding`) on parameter servers.
    checkpoint_every_secs: Seconds between two checkpoints. One is also written
      at the end.
    table_writer: Who writes the rows of tables (`Embedding`) to checkpoints.
      "chief": the chief, in blocks that it reads from the parameter servers.
      "ps": each parameter server its own rows; `train_dir` must be on storage
      that all tasks share.
    min_table_bytes: A size in bytes. With parameter servers, a
      `keras.layers.Embedding` whose weight is at least that large becomes a
      `tf_replicas.Embedding`, whose rows stay on the parameter servers. This
      applies to layers that are made in `model_fn`. A subclass of that size is
      refused. None: no layer is changed or refused.
    start_timeout_secs: Seconds to wait for the other tasks to start.
    recovery_timeout_secs: Seconds to wait for the restart of a parameter server
      that was lost. Training then resumes from the newest checkpoint of
      `train_dir`, and callbacks do not notice. 0, or no `train_dir`: the loss
      ends training.
    seed: The seed of the shuffling.
    log: Receives each line of the log of a serving task (a parameter server or
      an in-graph worker), and in the chief a line about the replicas.

  Returns:
    The history, as `keras.Model.fit` returns it, with three attributes:

    * `model`: the model with the trained weights and the state of the
      optimizer, but without the rows of tables (see `load_tables`).
    * `contributions`: maps each replica, such as "worker 1", to the
      `rules.results.Counts` of its contributions: how many were used or
      refused. Empty without parameter servers.
    * `row_updates`: maps each parameter server, such as "ps 0", to the number
      of rows of tables that updates changed there. Empty without tables.

  Raises:
    cluster.ClusterError: If cluster, task and rule do not fit together.
    TypeError, ValueError: If an argument, the model or the data is not
      supported, or if an op of the model or the data fails. The message is one
      line. Errors of the model's own code, and of Keras about the model, are
      passed on unchanged.
    FloatingPointError: If a gradient or a loss is not finite.
    KeyboardInterrupt: If interrupted. A checkpoint is written first.
    RuntimeError: If another task ended the training or has other versions of
      TensorFlow, Keras or this library, if an earlier training of this process
      failed, or if `x` yields nothing.
    ImportError: If cloudpickle is not installed, and a second call on a cluster
      needs it.
    TimeoutError: If another task does not start in time, or a lost parameter
      server is not restarted in time.
  """
  arguments.check(
    epochs=epochs,
    initial_epoch=initial_epoch,
    verbose=verbose,
    callbacks=callbacks,
    validation_steps=validation_steps,
    validation_batch_size=validation_batch_size,
    validation_freq=validation_freq,
    checkpoint_every_secs=checkpoint_every_secs,
    table_writer=table_writer,
    min_table_bytes=min_table_bytes,
    start_timeout_secs=start_timeout_secs,
    recovery_timeout_secs=recovery_timeout_secs,
    train_dir=train_dir,
    log=log,
  )
  arguments.check_epochs(initial_epoch, epochs)
  rule = roles.check_rule(rule)
  roles.check_replication(replication)
  arguments.check_builder(
    "model_fn", model_fn, "builds and compiles the model", keras.Model
  )
  _check_swaps(rule, callbacks or ())
  if callable(validation_data):
    arguments.check_function("validation_data", validation_data, 0)
  part = roles.take(
    replication=replication,
    cluster=cluster,
    devices=devices,
    start_timeout_secs=start_timeout_secs,
    recovery_timeout_secs=recovery_timeout_secs if train_dir else 0.0,
    log=log,
    caller="fit",
  )
  contributions = _contributions_per_update(rule, part.num_replicas)
  part.check_joining(rule)
  if validation_split and validation_data is None:
    (x, y, sample_weight), validation_data = data_module.split_validation(
      x, y, sample_weight, validation_split
    )
  given = {
    "x": _connectable(x, validation_data, part),
    "y": y,
    "sample_weight": sample_weight,
    "class_weight": class_weight,
    "batch_size": batch_size,
    "steps_per_epoch": steps_per_epoch,
    "shuffle": shuffle,
    "seed": seed,
  }
  data_fn = functools.partial(
    data_module.make,
    **given,
    num_contributions=contributions,
    num_epochs=epochs - initial_epoch,
  )
  task = _Task(
    model_fn,
    data_fn,
    rule,
    part.num_replicas,
    contributions,
    part.devices,
    min_table_bytes if part.role is not None else None,
  )
  if not part.connects_late:
    _ = task.data
  part.call_workers(
    fit,
    {
      **given,
      "model_fn": model_fn,
      "epochs": epochs,
      "initial_epoch": initial_epoch,
      "rule": rule,
      "replication": replication,
      "devices": devices,
      "min_table_bytes": min_table_bytes,
      "start_timeout_secs": start_timeout_secs,
      "recovery_timeout_secs": recovery_timeout_secs,
      "train_dir": train_dir,
    },
  )
  driver = part.driver(task.replica, task.new_rule)
  task.driver = driver
  if not driver.is_chief:
    part.contribute(driver)
  model = task.model
  assert model is not None
  with driver:
    if verbose and part.is_replicated:
      count = contributions * max(1, len(part.devices))
      log(part.describe(rule, _part_size(x, batch_size, count)))
    arguments.make_directory(train_dir)
    roles.check_tables_are_saved(driver, train_dir)
    validation_data = data_module.validation(validation_data)
    _check_validation(model, validation_data, validation_steps)
    _check_callbacks(model, callbacks or ())
    loop = _Loop(
      driver,
      model,
      task.data.steps_per_epoch,
      train_dir=train_dir,
      checkpoint_every_secs=checkpoint_every_secs,
      table_writer=table_writer,
      callbacks=list(callbacks or ()),
      epochs=epochs,
      initial_epoch=initial_epoch,
      log=log,
    )
    history = loop.run(
      batch_size=validation_batch_size or batch_size,
      verbose=verbose,
      validation_data=validation_data,
      validation_steps=validation_steps,
      validation_freq=arguments.validation_freq(validation_freq),
    )
    counts = zip(driver.replica_names, driver.counts(), strict=True)
    vars(history)["contributions"] = dict(counts)
    vars(history)["row_updates"] = rows = driver.row_updates()
    if verbose and sum(rows.values()):
      log(roles.describe_load(rows))
  part.end()
  return history


def _contributions_per_update(
  rule: update_options.UpdateSettings, num_replicas: int
) -> int:
  """Returns the number of contributions that an update averages.

  Args:
    rule: The settings of the update rule.
    num_replicas: The number of replicas of the cluster.

  Raises:
    cluster.ClusterError: If the rule cannot be used with this number of
      replicas, or is one of `Periodic`.
  """
  update_options.check(rule, num_replicas)
  if rule.is_periodic:
    raise cluster_module.ClusterError(
      "`rule` must be made by `Sync` or `Async`: metrics are not defined for"
      f" replicas that train copies of their own. Received: {rule}."
    )
  return update_options.replicas_to_aggregate(rule, num_replicas)


def _connectable(
  x: data_module.Source, validation_data: object, part: roles.Part
) -> data_module.Source:
  """Returns the training data in a form that can be used on the cluster.

  When this process joins a cluster, TensorFlow starts again, and a data set
  that was made before may be lost. So a data set is converted to its graph if
  other processes use it, or if this process has trained before.

  Args:
    x: The training data.
    validation_data: The validation data. It is checked, and not converted.
    part: The part that this process has in the training.

  Returns:
    `x`, or what replaces it.

  Raises:
    TypeError, ValueError: If the data cannot be used on the cluster.
  """
  data_module.check_python(x, can_run=part.runs_own_script)
  if part.role is None:
    return x
  data_module.check_can_connect(x, "x")
  if part.is_first:
    data_module.check_can_connect(validation_data, "validation_data")
  # All tasks must decide alike, as a copy may shuffle in another order.
  is_sent = not part.is_first or not part.runs_own_script
  if isinstance(x, tf.data.Dataset) and is_sent and not part.connects_late:
    return data_module.sendable(x)
  return x


def _check_validation(
  model: keras.Model, validation_data: object, validation_steps: int | None
) -> None:
  """Checks that the validation data fits the model and the number of steps.

  Args:
    model: The compiled model.
    validation_data: What `data_module.validation` returned.
    validation_steps: The argument `validation_steps` of `fit`.

  Raises:
    TypeError, ValueError: If the data does not fit.
  """
  spec = data_module.check_validation(validation_data, validation_steps)
  if spec is not None:
    compiled_model.check_data(model, spec, "validation_data: ")


def _check_swaps(
  rule: update_options.UpdateSettings,
  callbacks: Sequence[keras.callbacks.Callback],
) -> None:
  """Raises ValueError if `SwapEMAWeights` is used with asynchronous updates.

  The callback takes the weights out of the model for an evaluation, and puts
  them back. `fit` would send them to the parameter servers, over the updates
  that were made meanwhile.

  Args:
    rule: The settings of the update rule.
    callbacks: The user's callbacks.
  """
  swaps = keras.callbacks.SwapEMAWeights
  has_swaps = any(isinstance(callback, swaps) for callback in callbacks)
  if has_swaps and set(rule.all_rules) != {update_options.SYNC}:
    raise ValueError(
      "`callbacks` must not have `SwapEMAWeights` if `rule` is made by `Async`:"
      " the updates that replicas make during an evaluation would be lost. With"
      " `use_ema=True`, the model has the averages after `fit`. Received: the"
      f" callback, and {rule}."
    )


def _check_callbacks(
  model: keras.Model, callbacks: Sequence[keras.callbacks.Callback]
) -> None:
  """Raises ValueError if a callback needs weights that the model does not have.

  The rows of tables are on the parameter servers. So Keras' callbacks that keep
  or exchange all weights of the model would do this with the others only.

  Args:
    model: The compiled model.
    callbacks: The user's callbacks.
  """
  found = list(filter(None, map(tables.rows_of, model.variables)))
  names = [name for c in callbacks if (name := _keeps_weights(c)) is not None]
  if not found or not names:
    return
  if names[0] == "SwapEMAWeights":
    advice = (
      "evaluate the averages after `fit`, by `load_tables(model, train_dir,"
      " averaged=True)`"
    )
  else:
    advice = (
      "`train_dir` keeps checkpoints with the rows, and a callback of your own"
      " can call `load_tables(self.model)` and save the model"
    )
  raise ValueError(
    f"`callbacks` must not have `{names[0]}` where the model has tables, whose"
    f" rows stay on the parameter servers: {advice}. Received: the callback,"
    f" and the table {found[0].path!r}."
  )


def _keeps_weights(callback: keras.callbacks.Callback) -> str | None:
  """Returns what a callback is that keeps or exchanges all weights of a model.

  Returns:
    The name of a class of Keras, and an option where that is needed; None for
    another callback.
  """
  if isinstance(callback, keras.callbacks.EarlyStopping):
    restores = callback.restore_best_weights
    return "EarlyStopping(restore_best_weights=True)" if restores else None
  names = {kind.__name__ for kind in type(callback).__mro__}
  # Not each version of Keras has `OrbaxCheckpoint`.
  for name in (
    "SwapEMAWeights",
    "ModelCheckpoint",
    "BackupAndRestore",
    "OrbaxCheckpoint",
  ):
    if name in names:
      return name
  return None


def _averaged_tables(model: keras.Model) -> list[tables.Rows]:
  """Returns the tables of a model of which moving averages are kept.

  A table is a matrix whose rows live on the parameter servers. It is averaged
  if the optimizer has `use_ema=True`.
  """
  found = map(tables.rows_of, model.variables)
  return [rows for rows in found if rows is not None and rows.averages]


def _part_size(
  x: data_module.Source, batch_size: int | None, num_parts: int
) -> int | None:
  """Returns the number of examples in each part of a global batch.

  Args:
    x: The training data.
    batch_size: The argument `batch_size` of `fit`; None: 32.
    num_parts: The number of parts.

  Returns:
    The number of examples. None if `x` yields batches, whose size is not known
    here, or if the sizes of the parts differ.
  """
  if data_module.yields_batches(x):
    return None
  size, rest = divmod(batch_size or 32, num_parts)
  return None if rest else size


@dataclasses.dataclass(eq=False)
class _Task:
  """Builds the replica and the update rule of this task.

  Attributes:
    model_fn: Builds the user's model.
    data_fn: Makes the training data.
    rule: The settings of the update rule.
    num_replicas: The number of replicas of the cluster.
    num_contributions: The number of contributions that an update averages. A
      contribution is the gradients that a replica computes from one batch.
    towers: The devices that have a copy of the model. Empty: one copy on the
      default device.
    min_table_bytes: The smallest size in bytes of an embedding layer's weight
      that becomes a table on the parameter servers. None: no tables.
    model: The model; None until `replica` was called.
    driver: The driver of this task; None until the caller sets it.
  """

  model_fn: Callable[[], keras.Model]
  data_fn: Callable[[], data_module.TrainingData]
  rule: update_options.UpdateSettings
  num_replicas: int
  num_contributions: int
  towers: Sequence[str]
  min_table_bytes: int | None
  model: keras.Model | None = None
  driver: driver_base.Driver | None = None

  @functools.cached_property
  def data(self) -> data_module.TrainingData:
    """The training data, made at the first access."""
    return self.data_fn()

  def replica(self) -> compiled_model.CompiledReplica:
    """Builds the user's model, and makes the replica that trains it.

    Raises:
      TypeError, ValueError: If the model is not supported.
    """
    spec = self.data.spec
    with embeddings.replacing(self.min_table_bytes):
      with keras_internals.names_from_the_start():
        model = self.model = self.model_fn()
        _check_is_new(model)
        compiled_model.build(model, spec)  # Layers may make others here.
    return compiled_model.replica(
      model,
      self._dataset,
      num_contributions=self.num_contributions,
      devices=self.towers,
      leased=self._leased,
    )

  @property
  def _leased(self) -> model_replica.LeasedData | None:
    """The parts of all global batches by their numbers, if `data` allows it."""
    leased_fn = self.data.leased_fn
    if leased_fn is None:
      return None
    assert self.model is not None
    count = len(compiled_model.phases(self.model))
    return model_replica.LeasedData(
      lambda numbers: leased_fn(numbers, count),
      lambda step, _: step * self.num_contributions,
    )

  def _dataset(self, num_shards, index, start) -> tf.data.Dataset:
    """Makes the endless data set of one replica, from the next update on.

    The next update follows from the driver's global step. It is the first
    update while there is no driver.

    Args:
      num_shards: The number of replicas.
      index: The index of the replica.
      start: Not used: the number of examples drawn so far.

    Returns:
      The parts of global batches that this replica trains on, each (data,) or
      (data, weights); see `TrainingData.part_fn`.
    """
    # A number of examples does not tell the update: an epoch may end with a
    # smaller batch.
    del start
    step = 0
    if self.driver is not None:
      step = self.driver.store.read_global_step()
    assert self.model is not None
    count = len(compiled_model.phases(self.model))
    return self.data.part_fn(num_shards, index, step, count)

  def new_rule(self):
    """Makes the update rule around a copy of the model's optimizer.

    Returns:
      The rule, not yet built.

    Raises:
      ValueError: If the model's `train_step` applies gradients several times,
        and the rule is not synchronous.
    """
    assert self.model is not None
    make = update_options.rule_fn(self.rule, self.num_replicas)
    count = len(compiled_model.phases(self.model))
    if count > 1 and self.rule.all_rules != (update_options.SYNC,):
      raise ValueError(
        "`rule` must be made by `Sync` for a model whose `train_step` applies"
        " gradients several times, since each time needs the variables that the"
        f" time before has changed. Received: {self.rule}, and {count} times."
      )
    optimizer, common = compiled_model.inner_optimizer_of(self.model)
    return make(optimizer, **common)


def _check_is_new(model: keras.Model) -> None:
  """Checks that a model was made after this process joined a cluster.

  Args:
    model: What the user's `model_fn` returned.

  Raises:
    ValueError: If a variable of the model was made before. Its value is lost.
  """
  if not isinstance(model, keras.Model):
    return
  here = tf.DeviceSpec.from_string(tf.zeros([]).device).job
  for variable in model.variables:
    if tf.DeviceSpec.from_string(variable.value.device).job != here:
      raise ValueError(
        "`model_fn` must make the model and its layers itself: what was made"
        " before this process joined the cluster cannot be used any more."
        f" Received: {variable.path!r}, which was made before."
      )


class _OwnCalls(keras.callbacks.Callback):
  """Gives the model its own `steps_per_execution` back.

  `fit` changes this number only while Keras makes the iterator of the training.
  Otherwise an evaluation within the training would make as many batches per
  call, and so more than `validation_steps`. This callback comes first.
  """

  def __init__(self, steps_per_execution: int):
    """Makes the callback, with the model's own number."""
    super().__init__()
    self._own = steps_per_execution

  def on_train_begin(self, logs=None) -> None:
    """Gives it back. Keras calls this after it has made the iterator."""
    model: Any = self.model
    model.steps_per_execution = self._own


class _AveragedLookups(keras.callbacks.Callback):
  """Makes the model look up averages when its weights have become averages.

  With `use_ema=True`, Keras assigns the moving averages to the weights when the
  training ends. Rows of tables are no weights in this process: they are looked
  up on the parameter servers. This callback comes before those of the user,
  which may evaluate the model in `on_train_end`.
  """

  def on_train_end(self, logs=None) -> None:
    """Makes later lookups read the averages of rows, where there are any."""
    model: Any = self.model
    found = _averaged_tables(model)
    for rows in found:
      rows.home.reads_averages = True
    if found:  # Keras traces these again.
      model.test_function = model.predict_function = None


class _Loop(keras.callbacks.Callback):
  """Runs `keras.Model.fit` in the chief, with a driver that makes the updates.

  Keras calls `_train` once per batch, or once per `steps_per_execution`
  batches. The object is also a Keras callback, so that Keras tells it when an
  epoch begins.
  """

  def __init__(
    self,
    driver: driver_base.Driver,
    model: keras.Model,
    steps_per_epoch: int,
    *,
    train_dir: str | os.PathLike[str] | None,
    checkpoint_every_secs: float,
    table_writer: str,
    callbacks: list[keras.callbacks.Callback],
    epochs: int,
    initial_epoch: int,
    log: Callable[[str], None],
  ):
    super().__init__()
    self._driver = driver
    self._trained = model
    self._steps_per_epoch = steps_per_epoch
    self._per_batch = len(compiled_model.phases(model))
    updates = self._updates_per_epoch = steps_per_epoch * self._per_batch
    self._callbacks = callbacks
    self._epochs = epochs
    self._metrics = compiled_model.metric_variables(model)
    count = len(self._metrics)
    shared = compiled_model.shared(model)
    self._weights = shared[: len(shared) - count]
    self._unload_tables = embeddings.unloader(model)
    optional = {f"variables/{v.path}" for v in self._metrics}
    self._new_session = functools.partial(
      training.Session,
      train_dir,
      max_steps=(epochs - initial_epoch) * updates,
      checkpoint_every_secs=checkpoint_every_secs,
      table_writer=table_writer,
      is_optional=lambda n: driver_base.is_optional(n) or n in optional,
    )
    self._restore()
    if driver.recovers:
      # The model, which gets trained weights, does not keep its first ones.
      self._session.save(self._step)
    self._is_resumed = self._step > 0
    # The argument is that of the run that made the first update.
    self._initial_epoch = initial_epoch + self._step // updates
    if initial_epoch and self._is_resumed:
      # Keras' users pass another one when they go on.
      log(
        f"training goes on at epoch {self._initial_epoch + 1}:"
        f" `initial_epoch`, {initial_epoch}, counts as that of the first run"
      )
    self._epoch = self._initial_epoch
    self._epoch_end = -1
    self._target = 0
    self._has_warned = False
    # The metrics of this epoch; empty before a read.
    self._logs: dict[str, float | np.ndarray] = {}
    # The newest values of the metrics that count any update.
    self._newest = [np.asarray(v) for v in self._metrics]
    self._read_at = 0.0
    self._sees_batches = any(map(_sees_batches, callbacks))
    for callback in callbacks:
      if isinstance(callback, keras.callbacks.SwapEMAWeights):
        keras_internals.swap_exactly(callback)
    self._per_call = model.steps_per_execution
    if self._per_call == 1 and not self._sees_batches:
      self._per_call = max(1, steps_per_epoch // _CALLS_PER_EPOCH)
    # Weights as last loaded from the store into the model, to find those that
    # callbacks change; None if there is nothing to compare.
    self._loaded: list[np.ndarray] | None = None
    self._rates = _rates(model)
    self._rate = math.nan

  def run(self, *, batch_size: int | None, verbose: Any, **arguments):
    """Calls `keras.Model.fit` with `_train` as the training function.

    Args:
      batch_size: The batch size of the validation; None: Keras' default.
      verbose: As in `keras.Model.fit`.
      **arguments: Further arguments of `keras.Model.fit`.

    Returns:
      The `History` that `keras.Model.fit` returned.
    """
    model, own = self._trained, self._trained.steps_per_execution
    self._load()
    first, bars = [_OwnCalls(own), _AveragedLookups()], []
    if verbose and not any(
      isinstance(callback, keras.callbacks.ProgbarLogger)
      for callback in self._callbacks
    ):
      bars.append(progress.Progress(lambda: self._rate))
    with interrupts.deferred(self._driver.interrupt) as make_step:
      self._make_step = make_step
      model.__dict__["train_function"] = self._train
      model.steps_per_execution = self._per_call
      try:
        with _one_line_op_errors():  # Those of the validation, too.
          history = model.fit(
            tf.data.Dataset.range(self._steps_per_epoch),
            epochs=self._epochs,
            initial_epoch=self._initial_epoch,
            shuffle=False,
            callbacks=[*first, *self._callbacks, self, *bars],
            verbose=verbose,
            validation_batch_size=batch_size,
            **arguments,
          )
        self._recovering(self._finish)
      except (KeyboardInterrupt, training.StepExpired):
        self._session.save_interrupted()
        raise
      except BaseException:
        self._session.end_writing()
        raise
      finally:
        model.steps_per_execution = own
        model.train_function = None
        model._initial_epoch = None
    return history

  def _finish(self) -> None:
    while self._step < self._target:
      self._make_updates(self._target)
    self._session.finish(self._step)

  def _restore(self) -> None:
    """Restores the newest checkpoint, if there is one.

    The values are assigned where the driver keeps them, not to the model.
    """
    first = len(self._weights)
    self._read_metrics = self._driver.store.reader(
      range(first, first + len(self._metrics))
    )
    self._session = self._new_session(state=self._driver.store)
    self._driver.on_leave = self._session.save
    self._step = self._session.restore_or_initialize()
    self._read_metrics()  # In-graph, a later trace could hang.

  def _recovering(self, function: Callable[[], _R]) -> _R:
    """Calls a function, and calls it again after a parameter server was lost.

    Before the second call, it restores the newest checkpoint, and makes the
    updates again that were lost and belong to earlier epochs. No callbacks are
    called for them.

    Args:
      function: A function that uses the driver.

    Returns:
      The result of the last call of `function`.

    Raises:
      ValueError: If an op of the user's model or data fails.
      TimeoutError: If the parameter server is not restarted in time.
    """
    is_lost = False

    def attempt() -> _R:
      nonlocal is_lost
      if is_lost:
        self._resume()
      is_lost = True
      return function()

    with _one_line_op_errors():
      return self._driver.recovering(attempt)

  def _resume(self) -> None:
    """Restores the newest checkpoint, after a parameter server was lost.

    If the checkpoint is older than the start of the present epoch, it makes the
    updates up to there again.
    """
    self._session.end_writing()
    self._restore()
    # Keras traces these again. They do not find the rows of tables any more.
    self._trained.test_function = self._trained.predict_function = None
    # With several optimizers, callbacks cannot have changed the rates.
    if self._rates and self._per_batch == 1:
      self._driver.set_learning_rate(self._rates[0])
    self._logs = {}
    begin = self._epoch_end - self._updates_per_epoch
    if self._step > begin:
      return
    while self._step < begin:
      self._make_updates(begin)
    self._load_metrics()
    self._clear_metrics()

  def _make_updates(self, last: int) -> None:
    """Makes at least one update, and none beyond the global step `last`."""
    step_fn = functools.partial(self._driver.step, last - self._step)
    result = self._make_step(step_fn)
    self._step = result.global_step
    if self._per_batch == 1:  # Otherwise each optimizer has its own.
      self._rate = result.scalars.get("learning_rate", math.nan)

  # Methods as a callback of Keras, called after all other callbacks.

  def on_train_begin(self, logs=None) -> None:
    """Loads the values of the restored checkpoint into the model again.

    Keras calls this after the other callbacks. One of them,
    `keras.callbacks.BackupAndRestore`, may have changed the model.
    """
    self._unload_tables()
    if self._is_resumed:
      self._load()
      self._trained._initial_epoch = self._initial_epoch

  def on_epoch_begin(self, epoch, logs=None) -> None:
    """Computes the global steps at which this epoch and the training end.

    Keras calls this. It also sets the metrics to zero, unless training resumes
    from a checkpoint that was written within this epoch.
    """
    self._unload_tables()
    updates = self._updates_per_epoch
    # A checkpoint written within an epoch has the epoch's metrics so far.
    is_within = self._epoch_end < 0 and self._step % updates > 0
    if self._epoch_end < 0:
      self._epoch_end = self._step - self._step % updates
    self._epoch_end += updates
    self._epoch = epoch
    epochs_left = self._epochs - epoch - 1
    end = self._epoch_end + epochs_left * self._updates_per_epoch
    self._target = self._epoch_end - self._updates_per_epoch
    self._logs = {}

    def begin() -> None:
      self._driver.stop_at(end)
      if not is_within:
        self._clear_metrics()

    self._recovering(begin)

  def on_epoch_end(self, epoch, logs=None) -> None:
    """Undoes `load_tables`, which a callback may have called.

    Keras calls this after the other callbacks.
    """
    self._unload_tables()

  # Methods as the training function of Keras.

  def _train(self, iterator) -> dict[str, float | np.ndarray]:
    """Makes the next updates. Keras calls it as its training function.

    Args:
      iterator: Ignored: the replicas have their own data.

    Returns:
      The metrics of the epoch so far, by name.
    """
    del iterator  # Replicas have the data.
    self._unload_tables()
    self._target += self._per_call * self._per_batch
    self._target = min(self._target, self._epoch_end)
    return self._recovering(self._reach_target)

  def _reach_target(self) -> dict[str, float | np.ndarray]:
    """Makes updates up to the target of the present call of `_train`.

    It first sends what callbacks have changed, and afterwards reads the metrics
    or the whole model.

    Returns:
      The metrics of the epoch so far, by name.
    """
    self._send_changes()
    previous = self._step
    # If no callback looks at batches, this call may already make the updates of
    # later calls.
    last = self._target if self._sees_batches else self._epoch_end
    while self._step < self._target:
      self._make_updates(last)
    if self._sees_batches or self._target == self._epoch_end:
      self._load()
    elif self._logs and time.monotonic() - self._read_at < _READ_SECS:
      return self._logs
    else:
      self._load_metrics()
    self._read_at = time.monotonic()
    self._session.save_if_due(previous, self._step)
    # Asynchronous updates may all have been counted in the epoch before. Then
    # the values of that epoch stand: callbacks expect metrics after each batch.
    if any(map(np.any, self._reported)):
      self._newest = self._reported
    else:
      if self._target == self._epoch_end:
        self._warn_of_old_metrics()
      for variable, value in zip(self._metrics, self._newest, strict=True):
        variable.assign(value)
    self._logs = compiled_model.results(self._trained)
    return self._logs

  def _warn_of_old_metrics(self) -> None:
    """Warns, once in a training, that an epoch shows the metrics of the last.

    This happens if asynchronous updates run ahead: all updates of this epoch
    were made, and counted in the metrics, before the last epoch ended.
    """
    if not self._has_warned:
      logging.warning(
        "tf_replicas: epoch %d repeats the metrics of the epoch before."
        " Asynchronous updates ran ahead: those of this epoch were made, and"
        " counted, before the earlier epoch ended. Training is not affected."
        " Longer epochs get metrics of their own. (This is logged once.)",
        self._epoch + 1,
      )
    self._has_warned = True

  def _load(self) -> None:
    """Loads weights, optimizer state and metrics into the chief's model."""
    state = {k: np.asarray(v) for k, v in self._driver.store.state().items()}
    compiled_model.load(self._trained, state, int(state["global_step"]))
    self._loaded = [np.asarray(v) for v in self._weights]
    self._reported = [np.asarray(v) for v in self._metrics]

  def _load_metrics(self) -> None:
    self._reported = [np.asarray(v) for v in self._read_metrics()]
    for variable, value in zip(self._metrics, self._reported, strict=True):
      variable.assign(value)

  def _clear_metrics(self) -> None:
    """Sets the sums of the metrics back at the start of an epoch.

    It subtracts the values that were read last from those on the parameter
    servers. What asynchronous updates have added since then remains, and counts
    for the next epoch.
    """
    for index, value in enumerate(self._reported, start=len(self._weights)):
      self._driver.store.subtract(index, value)
    self._reported = []

  def _send_changes(self) -> None:
    """Gives weights and learning rates that callbacks changed to the driver."""
    rates = _rates(self._trained)
    if rates != self._rates:
      self._driver.set_learning_rate(rates[0])
      self._rates = rates
    if self._loaded is None:
      return
    for index, variable in enumerate(self._weights):
      value = np.asarray(variable)
      if not np.array_equal(value, self._loaded[index]):
        self._driver.store.assign(index, value)
    self._loaded = None


@contextlib.contextmanager
def _one_line_op_errors() -> Iterator[None]:
  """Makes a context that shortens errors of ops of the user's model or data.

  It raises a ValueError with one line. TensorFlow's error, whose message has up
  to 100 lines, is the cause of the ValueError.
  """
  try:
    yield
  except (
    tf.errors.InvalidArgumentError,
    tf.errors.UnimplementedError,
    tf.errors.UnknownError,  # What a function of the user's raised in an op.
  ) as error:
    found = re.search(r"Detected at node (\S+)", error.message)
    if found is None:
      raise
    skipped = (" ", "\t", "<", "Graph execution error", "Detected at node")
    lines = [line for line in error.message.splitlines() if line.strip()]
    reasons = [line for line in lines if not line.startswith(skipped)]
    raise ValueError(
      "an op of the model or of its data failed:"
      f" {reasons[0] if reasons else type(error).__name__} (node"
      f" {found[1]})"
    ) from error


def _rates(model: keras.Model) -> list[float]:
  """Returns the learning rates of the model's optimizers without a schedule.

  Only these rates can be set by a callback. With one optimizer that has a
  schedule, the list is empty.
  """
  optimizers = compiled_model.optimizers(model)
  return [
    float(optimizer.learning_rate)
    for optimizer in optimizers
    if not keras_internals.has_schedule(optimizer)
  ]


def _sees_batches(callback: keras.callbacks.Callback) -> bool:
  """Returns whether a callback does something before or after a batch.

  If no callback does, one call of the training function makes several batches.
  """
  hooks = ("on_train_batch_begin", "on_train_batch_end")
  hooks += ("on_batch_begin", "on_batch_end")
  for kind, frequency in (
    (keras.callbacks.ModelCheckpoint, "save_freq"),
    (keras.callbacks.BackupAndRestore, "save_freq"),
    (keras.callbacks.TensorBoard, "update_freq"),
  ):
    if isinstance(callback, kind):
      # Keras' own hooks then do nothing; a subclass may have others.
      return getattr(callback, frequency) != "epoch" or any(
        getattr(type(callback), hook) is not getattr(kind, hook)
        for hook in hooks
      )
  return not all(
    keras_internals.is_default(getattr(callback, hook)) for hook in hooks
  )
