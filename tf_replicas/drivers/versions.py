"""Compares the versions of software in the tasks of a training.

Tasks exchange functions, and tensors whose order the library fixes. So
TensorFlow and Keras must be of the same minor release, and the library of the
same version. Patch releases of TensorFlow and Keras only correct errors, so a
difference between patch releases is only logged.
"""

from collections.abc import Callable
from collections.abc import Mapping

import keras
import tensorflow as tf

import tf_replicas

_LIBRARY = "tf_replicas"


def here() -> dict[str, str]:
  """Returns this process's versions of TensorFlow, Keras and the library.

  Returns:
    The versions by the name of the package.
  """
  return {
    "TensorFlow": tf.__version__,
    "Keras": keras.__version__,
    _LIBRARY: tf_replicas.__version__,
  }


def required(versions: Mapping[str, str]) -> dict[str, str]:
  """Returns the parts of version numbers that must be equal in all tasks.

  Args:
    versions: Versions by name, such as the result of `here`.
  """
  return {
    name: version if name == _LIBRARY else ".".join(version.split(".")[:2])
    for name, version in versions.items()
  }


def compare(
  theirs: Mapping[str, str], task: str, *, log: Callable[[str], None]
) -> None:
  """Compares another task's versions with those of this process.

  Args:
    theirs: The result of `here()` in the other task.
    task: The name of the other task.
    log: Receives the differences that do no harm.

  Raises:
    RuntimeError: If the versions are not compatible. The message names all that
      differ.
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
