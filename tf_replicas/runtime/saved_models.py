"""Writes SavedModels: into new directories, and with variables of many rows.

A SavedModel has the values of its variables in files `variables/variables.*`,
in the format of a TensorFlow checkpoint. `tf.saved_model.save` writes them from
memory. `fill` replaces some of them by values that are written in blocks of
rows, so that no such value is ever whole in this process.
"""

import contextlib
import itertools
import os
import shutil
import tempfile
from collections.abc import Iterator
from collections.abc import Mapping

import tensorflow as tf
from tensorflow.core.protobuf import trackable_object_graph_pb2

from tf_replicas.runtime import row_files

_VARIABLES = "variables"
# It has a hash of the files of the variables. Readers do without it.
_FINGERPRINT = "fingerprint.pb"


@contextlib.contextmanager
def new_directory(path: str, argument: str) -> Iterator[str]:
  """Context that makes a directory, which appears only when it is complete.

  It yields the path of a temporary directory, which the caller must create and
  fill. At the end of the context, this directory is renamed to `path`; after an
  error it is deleted. Other files beside it are temporary, and always deleted.

  Args:
    path: The path. Its parent directories are made if they do not exist.
    argument: The name of the caller's argument, for error messages.

  Raises:
    FileExistsError: If `path` is a file, or a directory that is not empty.
  """
  if os.path.isdir(path) and os.listdir(path):
    raise FileExistsError(
      f"`{argument}` must not exist or must be empty; nothing is overwritten."
      f" Received: {path}."
    )
  if os.path.lexists(path) and not os.path.isdir(path):
    raise FileExistsError(
      f"`{argument}` must be a directory. Received: {path}."
    )
  parent = os.path.dirname(os.path.abspath(path))
  os.makedirs(parent, exist_ok=True)
  with tempfile.TemporaryDirectory(dir=parent, prefix=".export-") as directory:
    complete = os.path.join(directory, "model")
    yield complete
    # Replaces an empty directory, and fails if it was filled meanwhile.
    os.rename(complete, path)


def fill(directory: str, values: Mapping[str, row_files.Source]) -> None:
  """Replaces the values of some variables of a SavedModel, block by block.

  Args:
    directory: The directory of the SavedModel.
    values: The new values, by the names of the variables.

  Raises:
    KeyError: If the SavedModel has no variable of such a name.
  """
  folder = os.path.join(directory, _VARIABLES)
  old = folder + ".old"
  os.rename(folder, old)
  os.mkdir(folder)
  reader = tf.train.load_checkpoint(os.path.join(old, _VARIABLES))
  graph = trackable_object_graph_pb2.TrackableObjectGraph.FromString(
    reader.get_tensor(row_files.OBJECT_GRAPH)
  )
  keys = {
    attribute.full_name: attribute.checkpoint_key
    for node in graph.nodes
    for attribute in node.attributes
  }
  replaced = {keys[name]: value for name, value in values.items()}
  kept = {
    key: reader.get_tensor(key)
    for key in reader.get_variable_to_shape_map()
    if key not in replaced
  }
  writers = row_files.local_writers(replaced)
  row_files.write(
    os.path.join(folder, _VARIABLES),
    itertools.chain([lambda path: row_files.save_whole(path, kept)], writers),
  )
  shutil.rmtree(old)
  with contextlib.suppress(FileNotFoundError):
    os.remove(os.path.join(directory, _FINGERPRINT))
