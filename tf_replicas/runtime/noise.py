"""Hides messages of TensorFlow that need no action; real errors stay visible.

This library sets TF_CPP_MIN_LOG_LEVEL to 2 by default, so that TensorFlow
prints errors only. Some of these messages report no real error, and are hidden
too. If the user sets the variable to 0 or 1, nothing is hidden.

This module does not import TensorFlow when it is imported.
"""

import contextlib
import ctypes
import functools
import glob
import os
import re
import sys
from collections.abc import Callable
from collections.abc import Iterator

_VARIABLE = "TF_CPP_MIN_LOG_LEVEL"
_ERRORS, _FATAL = 2, 3

# The beginnings of errors, warnings and other messages; the first form of each
# is that of TensorFlow up to 2.20.
_DATE = r"\d{4}-\d\d-\d\d [\d:.]+: "
_ERROR = rf"({_DATE}E |E0000 )"
_WARNING = rf"({_DATE}W |W0000 )"
_INFO = rf"({_DATE}I |I0000 )"

# Matches lines that TensorFlow prints, behind the name of the task: at every
# start, whatever its log level; and once per function of a lost task.
_NOISE = re.compile(
  r"\[[^]]*\] (WARNING: All log messages before absl::InitializeLog"
  rf"|{_INFO}|To enable the following instructions"
  rf"|{_ERROR}.*Failed to (register|remove) function remotely"
  rf"|{_ERROR}.*Unable to register cu\w+ factory"
  rf"|{_WARNING}.*computation placer already registered"
  r"|Additional GRPC error information|:UNKNOWN:Error received from peer"
  r"|This could happen if the remote target has been disconnected)"
)
_NO_GPU = re.compile(rf"\[[^]]*\] {_ERROR}.*failed call to cuInit")


def environ() -> dict[str, str]:
  """Returns a copy of this process's environment with TF_CPP_MIN_LOG_LEVEL.

  If the variable is not set, it is 2 in the copy: TensorFlow prints errors
  only.
  """
  return {_VARIABLE: str(_ERRORS), **os.environ}


def hide() -> None:
  """Hides TensorFlow's log messages below the level of errors from now on.

  Nothing is hidden if the user sets TF_CPP_MIN_LOG_LEVEL to 0 or 1. What
  TensorFlow prints while it is imported is hidden only by
  `processes.importing_tensorflow`.
  """
  os.environ.setdefault(_VARIABLE, str(_ERRORS))
  if "tensorflow" in sys.modules and _is_hidden():
    _set_level(_level())


def is_noise(line: str) -> bool:
  """Returns whether a line of a task's output should not be shown to the user.

  Such lines are messages of TensorFlow that need no action.

  Args:
    line: A line with the name of the task in front: "[worker 0] …".
  """
  if not _is_hidden():
    return False
  return bool(_NOISE.match(line) or (not _has_gpu() and _NO_GPU.match(line)))


@contextlib.contextmanager
def hidden_errors() -> Iterator[None]:
  """Context in which TensorFlow logs only fatal errors, in any thread.

  It needs TensorFlow 2.21 or later. Older ones have a log level of their own,
  which they read only once; with them, nothing is hidden. Python exceptions are
  not affected. If the user sets TF_CPP_MIN_LOG_LEVEL to 0 or 1, nothing is
  hidden.
  """
  if not _is_hidden():
    yield
    return
  _set_level(_FATAL)
  try:
    yield
  finally:
    _set_level(_level())


@contextlib.contextmanager
def hidden_lack_of_gpu() -> Iterator[None]:
  """Context that hides TensorFlow's log messages on a machine without GPUs.

  On such a machine, TensorFlow prints an error of CUDA when it looks for
  GPUs. On a machine with GPUs, nothing is hidden.
  """
  with contextlib.nullcontext() if _has_gpu() else hidden_errors():
    yield


def _level() -> int:
  """Returns the value of TF_CPP_MIN_LOG_LEVEL as a number.

  The result is 2 if the variable is not set, and 0 if it is not a number.
  """
  value = os.environ.get(_VARIABLE, str(_ERRORS))
  return int(value) if value.isdecimal() else 0


def _is_hidden() -> bool:
  return _level() >= _ERRORS


@functools.cache
def _has_gpu() -> bool:
  """Returns whether this process can see an NVIDIA GPU of its machine."""
  return bool(glob.glob("/dev/nvidia[0-9]*"))


def _set_level(level: int) -> None:
  """Sets TensorFlow's log level.

  TensorFlow reads TF_CPP_MIN_LOG_LEVEL only when it is imported, and has no
  Python function for this. TensorFlow up to 2.20 does not use the level that
  is set here. With a release that lacks the C++ function, nothing happens.

  Args:
    level: The lowest level that is printed: 2 for errors, 3 for fatal errors.
  """
  function = _set_min_log_level()
  if function is not None:
    function(level)


@functools.cache
def _set_min_log_level() -> Callable[[int], object] | None:
  """Returns the C++ function `absl::SetMinLogLevel` of TensorFlow's libraries.

  The function's mangled name contains the release of Abseil, such as
  `lts_20250814` in TensorFlow 2.21. TensorFlow's header files tell the release.

  Returns:
    The function. None if this release of TensorFlow has no such function, or no
    header files.
  """
  import tensorflow as tf

  options = os.path.join(tf.sysconfig.get_include(), "absl/base/options.h")
  library = os.path.join(tf.sysconfig.get_lib(), "libtensorflow_framework.so.2")
  try:
    with open(options, encoding="utf-8") as header:
      release = re.search(
        r"^#define ABSL_OPTION_INLINE_NAMESPACE_NAME (\w+)$",
        header.read(),
        re.MULTILINE,
      )
    if release is None:
      return None
    name = f"absl{len(release[1])}{release[1]}14SetMinLogLevel"
    return ctypes.CDLL(library)[f"_ZN4{name}ENS0_18LogSeverityAtLeastE"]
  except (OSError, AttributeError):
    return None
