"""Checks the arguments of `fit` before a model is built or data is read."""

import inspect
import math
import numbers
import os
from collections.abc import Callable
from collections.abc import Collection
from collections.abc import Mapping
from collections.abc import Sequence
from typing import cast

import keras
import tensorflow as tf

_VERBOSE = ("auto", 0, 1, 2)


def count(name: str, value: object, minimum: int = 1) -> None:
  """Checks an argument that is a number of things, or None.

  Args:
    name: Name of the argument.
    value: The value of the argument.
    minimum: Smallest valid number.

  Raises:
    TypeError: If the value is neither an integer nor None.
    ValueError: If the value is less than `minimum`.
  """
  if value is None:
    return
  if not isinstance(value, numbers.Integral):
    raise TypeError(f"`{name}` must be an integer. Received: {short(value)}.")
  if value < minimum:
    raise ValueError(f"`{name}` must be at least {minimum}. Received: {value}.")


def check_loop(
  *,
  epochs: object,
  initial_epoch: object,
  verbose: object,
  callbacks: object,
  validation_steps: object,
  validation_batch_size: object,
  validation_freq: object,
  checkpoint_every_secs: object,
  start_timeout_secs: object,
  train_dir: object,
  log: object,
) -> None:
  """Checks the arguments of `fit` about Keras' loop, checkpoints and log.

  Raises:
    TypeError: If an argument has a wrong type.
    ValueError: If an argument is out of range.
  """
  for name, value in (("epochs", epochs), ("initial_epoch", initial_epoch)):
    if value is None:
      raise TypeError(f"`{name}` must be an integer. Received: None.")
  count("epochs", epochs)
  count("initial_epoch", initial_epoch, 0)
  if cast(int, initial_epoch) >= cast(int, epochs):
    raise ValueError(
      f"`initial_epoch` must be less than `epochs`, {epochs}: nothing would be"
      f" trained. Received: {initial_epoch}."
    )
  if not isinstance(verbose, str | int) or verbose not in _VERBOSE:
    raise ValueError(
      f"`verbose` must be one of {', '.join(map(repr, _VERBOSE))}. Received:"
      f" {short(verbose)}."
    )
  _check_callbacks(callbacks)
  count("validation_steps", validation_steps)
  count("validation_batch_size", validation_batch_size)
  _check_validation_freq(validation_freq)
  _seconds("checkpoint_every_secs", checkpoint_every_secs)
  _seconds("start_timeout_secs", start_timeout_secs)
  if train_dir is not None:
    if not isinstance(train_dir, str | os.PathLike):
      raise TypeError(
        f"`train_dir` must be a path. Received: {short(train_dir)}."
      )
    path = os.fspath(train_dir)
    if not path or "\0" in path:
      raise ValueError(
        "`train_dir` must be a path that is not empty and has no null"
        f" character. Received: {path!r}."
      )
  if not callable(log):
    raise TypeError(f"`log` must be a function. Received: {short(log)}.")


def make_directory(train_dir: str | os.PathLike[str] | None) -> None:
  """Makes the train directory, so that an error does not come hours later.

  Args:
    train_dir: Path of the directory; None does nothing.

  Raises:
    ValueError: If the directory cannot be made, or is not writable.
  """
  if train_dir is None:
    return
  reason = None
  try:
    os.makedirs(train_dir, exist_ok=True)
  except OSError as error:
    reason = error.strerror
  if reason is None and not os.access(train_dir, os.W_OK | os.X_OK):
    reason = "Permission denied"
  if reason is not None:
    raise ValueError(
      f"`train_dir` must be a directory that can be written ({reason})."
      f" Received: {os.fspath(train_dir)!r}."
    )


def _check_callbacks(callbacks: object) -> None:
  if callbacks is None:
    return
  is_one = isinstance(callbacks, keras.callbacks.Callback | str)
  if is_one or not isinstance(callbacks, Sequence):
    raise TypeError(
      "`callbacks` must be a list of `keras.callbacks.Callback`s. Received:"
      f" {short(callbacks)}."
    )
  for callback in callbacks:
    if not isinstance(callback, keras.callbacks.Callback):
      raise TypeError(
        "`callbacks` must have only objects of `keras.callbacks.Callback`."
        f" Received: {short(callback)} in it."
      )


def _check_validation_freq(value: object) -> None:
  """Checks a number of epochs between validations, or the epochs with one."""
  if isinstance(value, Collection) and not isinstance(value, str):
    for epoch in value:
      count("validation_freq", epoch)
  elif value is None:
    raise TypeError("`validation_freq` must be an integer. Received: None.")
  else:
    count("validation_freq", value)


def _seconds(name: str, value: object) -> None:
  if not isinstance(value, numbers.Real):
    raise TypeError(
      f"`{name}` must be a number of seconds. Received: {short(value)}."
    )
  if not float(value) > 0:
    raise ValueError(f"`{name}` must be more than 0. Received: {value}.")


def check_data(
  *,
  batch_size: object,
  steps_per_epoch: object,
  shuffle: object,
  seed: object,
  class_weight: object,
) -> None:
  """Checks the arguments of `data.make` that say how data is used.

  Raises:
    TypeError: If an argument has a wrong type.
    ValueError: If an argument is out of range.
  """
  count("batch_size", batch_size)
  count("steps_per_epoch", steps_per_epoch)
  if not isinstance(shuffle, bool | int) or shuffle not in (False, True):
    raise TypeError(
      f"`shuffle` must be True or False. Received: {short(shuffle)}."
    )
  if not isinstance(seed, numbers.Integral) or abs(int(seed)) >= 2**63:
    raise TypeError(
      f"`seed` must be an integer of 64 bits. Received: {short(seed)}."
    )
  if class_weight is None:
    return
  if not isinstance(class_weight, Mapping) or not all(
    isinstance(key, numbers.Integral)
    and 0 <= int(key) < 2**63
    and isinstance(value, numbers.Real)
    and math.isfinite(value)
    for key, value in class_weight.items()
  ):
    raise TypeError(
      "`class_weight` must map class numbers, from 0 on, to finite numbers."
      f" Received: {short(class_weight)}."
    )


def check_devices(devices: object, *, is_alone: bool) -> None:
  """Checks the argument `devices` of `fit`.

  Args:
    devices: See `fit`.
    is_alone: Whether this process has no cluster. Then the devices must exist.
      On a cluster this is not checked, as TensorFlow must not look for devices
      before it is connected.

  Raises:
    TypeError: If `devices` is not a list of strings.
    ValueError: If a string is not the name of a device, or there is no such
      device.
  """
  if devices is None:
    return
  if isinstance(devices, str) or not isinstance(devices, Sequence):
    raise TypeError(
      '`devices` must be a list of names, such as ["/device:GPU:0"]. Received:'
      f" {short(devices)}."
    )
  for device in devices:
    if not isinstance(device, str):
      raise TypeError(
        f"`devices` must have only strings. Received: {short(device)} in it."
      )
    _check_device(device, is_alone)


def _check_device(device: str, is_alone: bool) -> None:
  try:
    wanted = tf.DeviceSpec.from_string(device)
  except ValueError:
    wanted = tf.DeviceSpec()
  if not wanted.device_type:
    raise ValueError(
      '`devices` must have names such as "/device:GPU:0". Received:'
      f" {device!r}."
    )
  if not is_alone:
    return
  found = [d.name for d in tf.config.list_logical_devices()]
  specs = [tf.DeviceSpec.from_string(name) for name in found]
  if not any(_matches(wanted, spec) for spec in specs):
    raise ValueError(
      f"`devices` must exist: this process has {', '.join(found)}. Received:"
      f" {device!r}."
    )


def _matches(wanted: tf.DeviceSpec, spec: tf.DeviceSpec) -> bool:
  """Returns whether `spec` agrees with every field that `wanted` has."""
  names = ("job", "replica", "task", "device_type", "device_index")
  pairs = [(getattr(wanted, name), getattr(spec, name)) for name in names]
  return all(want is None or want == has for want, has in pairs)


def check_function(name: str, function: Callable, num_arguments: int) -> None:
  """Checks that a function can be called with `num_arguments` arguments.

  Args:
    name: Name of the argument that was given the function.
    function: The function.
    num_arguments: Number of positional arguments.

  Raises:
    TypeError: If the function cannot be called with this number of arguments.
  """
  try:
    signature = inspect.signature(function)
  except ValueError:  # Written in C.
    return
  try:
    signature.bind(*[None] * num_arguments)
  except TypeError as error:
    what = getattr(function, "__name__", type(function).__name__)
    raise TypeError(
      f"`{name}` must be a function of {num_arguments} arguments. Received:"
      f" {what}{signature}: {error}."
    ) from None


def short(value: object) -> str:
  """Returns the start of the `repr` of `value`, as one line."""
  text = f"{value!r}"
  return text.splitlines()[0][:60] if text else text
