"""Checks the arguments of `fit` before a model is built or data is read."""

import math
import numbers
import os
from collections.abc import Callable
from collections.abc import Collection
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any
from typing import NamedTuple

import keras
import tensorflow as tf

from tf_replicas.runtime import signatures
from tf_replicas.session import training


class _Rule(NamedTuple):
  """What one argument of `fit` must be.

  Attributes:
    text: The description for the error message, such as "True or False".
    kind: The type of the argument, for `isinstance`.
    holds: Returns whether a value of this type is valid.
    is_optional: Whether the argument may also be None.
  """

  text: str
  kind: Any
  holds: Callable[[Any], bool] = lambda value: True
  is_optional: bool = False


def _is_count(value: object) -> bool:
  return isinstance(value, numbers.Integral) and int(value) >= 1


def _are_epochs(value: numbers.Integral | Collection) -> bool:
  if isinstance(value, str | Mapping):
    return False
  return all(
    map(_is_count, [value] if isinstance(value, numbers.Integral) else value)
  )


def _are_weights(value: Mapping) -> bool:
  return all(
    isinstance(key, numbers.Integral)
    and 0 <= int(key) < 2**63
    and isinstance(weight, numbers.Real)
    and math.isfinite(weight)
    for key, weight in value.items()
  )


_COUNT = _Rule("an integer of at least 1", numbers.Integral, _is_count)
_SECONDS = _Rule("a number of seconds above 0", numbers.Real, lambda n: n > 0)
_RULES = {
  "batch_size": _COUNT._replace(is_optional=True),
  "callbacks": _Rule(
    "a list of `keras.callbacks.Callback`s",
    Sequence,
    lambda found: all(isinstance(c, keras.callbacks.Callback) for c in found),
    is_optional=True,
  ),
  "checkpoint_every_secs": _SECONDS,
  "class_weight": _Rule(
    "a dict from class numbers, from 0 on, to finite numbers",
    Mapping,
    _are_weights,
    is_optional=True,
  ),
  "epochs": _COUNT,
  "initial_epoch": _Rule(
    "an integer of at least 0", numbers.Integral, lambda n: n >= 0
  ),
  "log": _Rule("a function", Callable),
  "min_table_bytes": _COUNT._replace(is_optional=True),
  "recovery_timeout_secs": _Rule(
    "a number of seconds, of at least 0", numbers.Real, lambda n: n >= 0
  ),
  "seed": _Rule(
    "an integer of 64 bits", numbers.Integral, lambda n: abs(int(n)) < 2**63
  ),
  "shuffle": _Rule("True or False", bool | int, (False, True).__contains__),
  "start_timeout_secs": _SECONDS,
  "steps_per_epoch": _COUNT._replace(is_optional=True),
  "table_writer": _Rule(
    f"one of {', '.join(training.TABLE_WRITERS)}",
    str,
    training.TABLE_WRITERS.__contains__,
  ),
  "train_dir": _Rule(
    "a path that is not empty and has no null character",
    str | os.PathLike,
    lambda path: os.fspath(path) and "\0" not in os.fspath(path),
    is_optional=True,
  ),
  "validation_batch_size": _COUNT._replace(is_optional=True),
  "validation_freq": _Rule(
    "an integer of at least 1, or a list of epochs",
    numbers.Integral | Collection,
    _are_epochs,
  ),
  "validation_steps": _COUNT._replace(is_optional=True),
  "verbose": _Rule(
    "one of 'auto', 0, 1, 2", str | int, ("auto", 0, 1, 2).__contains__
  ),
}


def check(**given: object) -> None:
  """Checks arguments of `fit` whose type and range can be checked one by one.

  Args:
    **given: The arguments by name. Each name must be in `_RULES`. Other
      functions check the other arguments of `fit`.

  Raises:
    TypeError: If an argument has a wrong type.
    ValueError: If an argument is out of range.
  """
  for name, value in given.items():
    rule = _RULES[name]
    if value is None and rule.is_optional:
      continue
    is_kind = isinstance(value, rule.kind)
    if not is_kind or not rule.holds(value):
      error = ValueError if is_kind else TypeError
      raise error(f"`{name}` must be {rule.text}. Received: {short(value)}.")


def validation_freq(given: Any) -> int | list[int]:
  """Converts the argument `validation_freq` of `fit` to what Keras takes.

  Args:
    given: An integer, or a collection of integers, which may be those of NumPy.
      `check` has checked it.
  """
  is_one = isinstance(given, numbers.Integral)
  return int(given) if is_one else [int(epoch) for epoch in given]


def check_epochs(initial_epoch: int, epochs: int) -> None:
  """Raises ValueError unless `initial_epoch` is less than `epochs`.

  Otherwise there would be no epoch to train.
  """
  if initial_epoch >= epochs:
    raise ValueError(
      f"`initial_epoch` must be less than `epochs`, {epochs}: nothing would be"
      f" trained. Received: {initial_epoch}."
    )


def make_directory(train_dir: str | os.PathLike[str] | None) -> None:
  """Makes the directory for checkpoints and logs, unless it exists.

  This is done before the training, so that an error does not come hours later.

  Args:
    train_dir: The path of the directory. If None, does nothing.

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


def check_devices(devices: object, *, is_alone: bool) -> None:
  """Checks the argument `devices` of `fit`.

  Args:
    devices: The names of the devices that compute, or None.
    is_alone: Whether this process trains without a cluster. Only then is it
      checked that the devices exist: with a cluster, TensorFlow must connect to
      it before it looks for devices.

  Raises:
    TypeError: If `devices` is not a list of strings.
    ValueError: If a string does not have the form of a device name, or if
      `is_alone` and there is no such device.
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
  """Returns whether a device has all parts of a device name.

  Args:
    wanted: The name given by the user. Parts may be missing, as in
      "/device:GPU:0".
    spec: The full name of a device of this process.
  """
  names = ("job", "replica", "task", "device_type", "device_index")
  pairs = [(getattr(wanted, name), getattr(spec, name)) for name in names]
  return all(want is None or want == has for want, has in pairs)


def check_builder(
  name: str, function: object, what: str, product: type
) -> None:
  """Checks that an argument is a function that builds an object.

  Args:
    name: The name of the argument, such as "replica_fn".
    function: The value of the argument.
    what: What the function has to do, for the error message, such as "builds
      the replica".
    product: The type of the object. It is an error to give the object itself
      instead of the function, even if the object is callable.

  Raises:
    TypeError: If `function` is an instance of `product`, or is not a function
      without arguments.
  """
  if not callable(function) or isinstance(function, product):
    raise TypeError(
      f"`{name}` must be a function that {what}: it is called in every task."
      f" Received: {short(function)}."
    )
  check_function(name, function, 0)


def check_function(name: str, function: Callable, num_arguments: int) -> None:
  """Raises TypeError unless a function accepts a given number of arguments.

  Args:
    name: The name of the argument of `fit` whose value is the function, for the
      error message.
    function: The function. It is not called.
    num_arguments: The number of positional arguments.
  """
  signatures.check_call(
    function,
    *[None] * num_arguments,
    rule=f"`{name}` must be a function of {num_arguments} arguments",
  )


def short(value: object) -> str:
  """Returns the first 60 characters of the first line of the `repr` of `value`.

  It is for error messages.
  """
  text = f"{value!r}"
  return text.splitlines()[0][:60] if text else text
