"""Reads resources of a running task by name, without joining the cluster.

A process that joins a cluster needs a port that the tasks can reach, and waits
for all of them. A session of TensorFlow 1 needs neither: the server of every
task executes its graph, on that task alone, and each call has a time limit. So
a task that hangs delays no other (TensorFlow 2.21).
"""

from collections.abc import Mapping
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from tf_replicas.runtime import resources


class TaskReader:
  """Reads the shared variables and queues of one task, and files of /proc.

  It changes nothing on the task, and creates no resource there.
  """

  def __init__(
    self, job: str, index: int, address: str, *, timeout_secs: float
  ):
    """Stores which task to read. Each method connects to it if needed.

    Args:
      job: The job of the task, such as "ps".
      index: The index of the task in its job.
      address: The address of the task, "host:port".
      timeout_secs: Seconds after which a call of the task fails.
    """
    self._job = job
    self._target = f"grpc://{address}"
    self._device = f"/job:{job}/task:{index}/device:CPU:0"
    self._config = tf.compat.v1.ConfigProto(
      operation_timeout_in_ms=int(timeout_secs * 1000)
    )
    self._reset()

  def _reset(self) -> None:
    self._graph = tf.Graph()
    self._tensors: dict[tuple, tuple[tf.Tensor, ...]] = {}
    self._session: tf.compat.v1.Session | None = None

  def _run(self, fetches: Sequence[tf.Tensor]) -> list:
    session = self._session
    if session is None:
      session = self._session = tf.compat.v1.Session(
        self._target, graph=self._graph, config=self._config
      )
    try:
      return session.run(list(fetches))
    except tf.errors.DeadlineExceededError:
      raise  # A task that hung knows the session when it goes on.
    except tf.errors.OpError:
      self._reset()  # A restarted task does not know the session.
      raise

  def _tensor(self, key: tuple, build) -> tuple[tf.Tensor, ...]:
    if key not in self._tensors:
      with self._graph.as_default(), tf.device(self._device):
        self._tensors[key] = build()
    return self._tensors[key]

  def time(self) -> float:
    """Returns the time of the task's clock, in seconds since 1970.

    Raises:
      tf.errors.OpError: If the task does not answer.
    """
    return float(self._run(self._tensor(("time",), _timestamp))[0])

  def variables(
    self, namespace: resources.Namespace, dtypes: Mapping[str, tf.DType]
  ) -> dict[str, np.ndarray]:
    """Reads some shared variables.

    Args:
      namespace: The namespace of the variables.
      dtypes: The dtype of each variable to read, by name.

    Returns:
      The values by name. Variables that do not exist, or have no value yet, are
      left out.

    Raises:
      tf.errors.OpError: If the task does not answer, or deletes a variable at
        this moment.
    """

    def build(name, dtype):
      handle = tf.raw_ops.VarHandleOp(
        shape=None,
        dtype=dtype,
        shared_name=namespace.prefix + name,
        container=namespace.container,
      )
      return (
        tf.raw_ops.VarIsInitializedOp(resource=handle),
        tf.raw_ops.ReadVariableOp(resource=handle, dtype=dtype),
      )

    pairs = {
      name: self._tensor((namespace, name), lambda n=name, d=dtype: build(n, d))
      for name, dtype in dtypes.items()
    }
    has_value = self._run([is_there for is_there, _ in pairs.values()])
    found = [name for name, has in zip(pairs, has_value, strict=True) if has]
    if not found:
      return {}
    values = self._run([pairs[name][1] for name in found])
    return dict(zip(found, map(np.asarray, values), strict=True))

  def queue_sizes(
    self, namespace: resources.Namespace, names: Sequence[str]
  ) -> list[int]:
    """Returns the number of elements in each of some shared queues.

    Args:
      namespace: The namespace of the queues.
      names: The names of the queues, which must exist.

    Raises:
      tf.errors.OpError: If the task does not answer, or a queue does not exist.
    """
    # The op that makes a handle of a queue would also make the queue. An older
    # op takes the names, from a mutable tensor.
    container = namespace.container or self._job

    def build(name):
      holder = tf.raw_ops.TemporaryVariable(
        shape=[2], dtype=tf.string, var_name=f"{container}:{name}"
      )
      names = tf.raw_ops.Assign(
        ref=holder, value=tf.constant([container, name])
      )
      return (tf.raw_ops.QueueSize(handle=names),)

    names = [namespace.prefix + name for name in names]
    tensors = [
      self._tensor((container, name), lambda n=name: build(n))[0]
      for name in names
    ]
    return [int(size) for size in self._run(tensors)] if tensors else []

  def files(self, paths: Sequence[str]) -> list[str]:
    """Reads text files on the machine of the task, such as those of /proc.

    Args:
      paths: The paths of the files.

    Returns:
      The text of each file.

    Raises:
      tf.errors.OpError: If the task does not answer, or a file does not exist.
    """
    tensors = [
      self._tensor(("file", path), lambda p=path: (resources.read_text(p),))[0]
      for path in paths
    ]
    return [text.decode() for text in self._run(tensors)]

  def close(self) -> None:
    """Closes the connection. It waits for an answer of the task."""
    if self._session is not None:
      self._session.close()
      self._reset()


def _timestamp() -> tuple[tf.Tensor, ...]:
  return (tf.timestamp(),)
