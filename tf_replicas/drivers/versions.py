"""Compares the versions of software in the tasks of a training.

Tasks send each other TensorFlow functions, and tensors in an order that this
library defines. So all tasks must have the same minor releases of TensorFlow
and Keras (such as 2.21), and the same version of this library. A difference
between patch releases of TensorFlow or Keras (such as 2.21.0 and 2.21.1) is
only logged.
"""

from collections.abc import Callable
from collections.abc import Mapping

import keras
import tensorflow as tf

import tf_replicas

_LIBRARY = "tf_replicas"


def here() -> dict[str, str]:
  """Returns the versions in this process, by name of the package.

  The packages are TensorFlow, Keras and this library.
  """
  return {
    "TensorFlow": tf.__version__,
    "Keras": keras.__version__,
    _LIBRARY: tf_replicas.__version__,
  }


def required(versions: Mapping[str, str]) -> dict[str, str]:
  """Returns the parts of version numbers that must be equal in all tasks.

  Args:
    versions: Versions by name of the package, such as the result of `here`.

  Returns:
    By name of the package, the minor release, such as "2.21"; for this library,
    the whole version.
  """
  return {
    name: version if name == _LIBRARY else ".".join(version.split(".")[:2])
    for name, version in versions.items()
  }


def compare(
  theirs: Mapping[str, str], task: str, *, log: Callable[[str], None]
) -> None:
  """Checks that another task's versions are compatible with those here.

  Args:
    theirs: The result of `here()` in the other task.
    task: The name of the other task.
    log: Receives a line that names the differences between compatible versions.

  Raises:
    RuntimeError: If a version is not compatible. The message names all versions
      that differ.
  """
  ours = here()
  differences = ", ".join(
    f"{name} is {version} here and {theirs.get(name)} there"
    for name, version in ours.items()
    if version != theirs.get(name)
  )
  if required(ours) != required(theirs):
    raise RuntimeError(
      f"this task has other versions than {task}: {differences}; install the"
      " same in all tasks"
    )
  if differences:
    log(
      f"this task has other patch releases than {task}: {differences};"
      " training goes on"
    )
