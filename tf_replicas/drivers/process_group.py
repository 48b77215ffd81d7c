"""Connects the processes of a training in which each has all variables.

The engine is `tf.distribute.MultiWorkerMirroredStrategy`. There is no server.
The processes communicate only by all-reduce, a sum over all processes. They
send commands in this way too, not only gradients.
"""

import contextlib
import hashlib
import json
from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from tf_replicas import cluster
from tf_replicas.cluster import addresses
from tf_replicas.cluster import exposure
from tf_replicas.drivers import connection
from tf_replicas.drivers import versions
from tf_replicas.runtime import devices as runtime_devices
from tf_replicas.runtime import waiting

_LEAVE_SECS = 10.0


def connect(
  spec: cluster.ClusterSpec,
  task: cluster.Task,
  devices: Sequence[str],
  *,
  timeout_secs: float,
  log: Callable[[str], None] = print,
) -> tf.distribute.Strategy:
  """Waits for all processes of the cluster, and connects this one to them.

  Args:
    spec: The cluster. No port may be 0: `cluster.resolve_ports` replaces such
      ports.
    task: The task of this process.
    devices: The GPUs of this process, the same number in every process; or one
      CPU.
    timeout_secs: Seconds to wait for the other processes.
    log: Receives each line of the log.

  Returns:
    A `MultiWorkerMirroredStrategy` for these processes and devices.

  Raises:
    cluster.ClusterError: If the port of `task` is in use.
    RuntimeError: If TensorFlow is already initialized.
    TimeoutError: If a process does not accept connections in time. The message
      names the first such process.
  """
  runtime_devices.start_quietly()
  _await_all(spec, task, timeout_secs, log)
  on_gpus = any(":GPU:" in device for device in devices)
  resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
    tf.train.ClusterSpec(spec.as_dict()),
    task_type=task.job,
    task_id=task.index,
    num_accelerators={"GPU": len(devices)} if on_gpus else {},
    rpc_layer="grpc",
  )
  try:
    return tf.distribute.MultiWorkerMirroredStrategy(resolver)
  except RuntimeError as error:
    if "at program startup" not in str(error):
      raise
    raise RuntimeError(
      "mirrored variables of several processes need a process that has made no"
      " tensor, variable or data set before: make these in the functions that"
      f" build model and data. TensorFlow: {error}"
    ) from None


def _await_all(
  spec: cluster.ClusterSpec,
  task: cluster.Task,
  timeout_secs: float,
  log: Callable[[str], None],
) -> None:
  """Waits until all other processes accept connections.

  Meanwhile, this process accepts connections too. (The strategy's constructor
  also waits for the others, but it does not log that, has no time limit, and
  does not react to signals in TensorFlow 2.21.)

  Args:
    spec: The cluster.
    task: The task of this process.
    timeout_secs: Seconds to wait.
    log: Receives each line of the log.

  Raises:
    cluster.ClusterError: If the port of `task` is in use.
    TimeoutError: If a process does not accept connections in time.
  """
  address = spec.address(task)
  cluster.check_private(spec, [task])
  cluster.check_port_free(address)
  if task == spec.chief:
    log(exposure.warning(task))
  with addresses.bound_socket(addresses.split(address)[1]) as listener:
    listener.listen()
    for job in ("chief", "worker"):
      connection.await_servers(
        spec,
        job,
        timeout_secs=timeout_secs,
        log=log,
        is_there=connection.listens,
      )


def local_number(strategy: tf.distribute.Strategy) -> int:
  """Returns the index, in this process, of the replica that calls this.

  It must be called in a function that `strategy.run` runs once for each device
  of this process. The index is that of the device, from 0 on.
  """
  context = tf.distribute.get_replica_context()
  number = tf.get_static_value(context.replica_id_in_sync_group)
  return int(number) % len(strategy.extended.worker_devices)


def all_reduce(
  values: Sequence[tf.Tensor | tf.IndexedSlices],
  options: tf.distribute.experimental.CommunicationOptions | None = None,
) -> list[tf.Tensor | tf.IndexedSlices]:
  """Returns the sum of each of `values` over all replicas of all processes.

  It must be called in a function that `strategy.run` runs. It makes one
  all-reduce for each dtype, since TensorFlow 2.21 fails if there are several
  dtypes and `IndexedSlices`.

  Args:
    values: The values of this replica.
    options: Options of the all-reduce; None: the defaults.

  Returns:
    One sum per value. The sum of `IndexedSlices` is their concatenation.
  """
  context = tf.distribute.get_replica_context()
  # A tensor from outside the function has no device, which the strategy needs.
  values = [
    value if isinstance(value, tf.IndexedSlices) else tf.identity(value)
    for value in values
  ]
  sums = list(values)
  for dtype in sorted({value.dtype.name for value in values}):
    same = [i for i, value in enumerate(values) if value.dtype.name == dtype]
    summed = context.all_reduce(
      tf.distribute.ReduceOp.SUM, [values[i] for i in same], options
    )
    for i, total in zip(same, summed, strict=True):
      sums[i] = total
  return sums


class ProcessGroup:
  """Sums, compares and broadcasts values among the processes of a training.

  All processes must make the same calls in the same order.
  """

  def __init__(
    self,
    strategy: tf.distribute.Strategy,
    peers: Sequence[str],
    *,
    is_chief: bool,
    log: Callable[[str], None] = print,
  ):
    """Makes the object, for processes that are connected already.

    Args:
      strategy: The result of `connect`.
      peers: The addresses of the other processes.
      is_chief: Whether this process is the chief, whose values `broadcast`
        sends.
      log: Receives each line of the log.
    """
    self._strategy = strategy
    self._peers = list(peers)
    self._is_chief = is_chief
    self._log = log
    self._wait_logger = waiting.WaitLogger(log=log)
    self._sum_fn = tf.function(self._sum, autograph=False)

  def log_wait(self, what: str) -> contextlib.AbstractContextManager[None]:
    """Returns a context that logs `what` every ten seconds while it lasts.

    It is for waits for the other processes, which have no time limit. If a
    process dies or hangs, TensorFlow's heartbeats detect that, and end the wait
    with an error. They do not end the wait for a slow process.
    """
    return self._wait_logger.during(what)

  def sum(self, values: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Returns the sum of each of `values` over all processes.

    The shapes and dtypes of the values must be the same in every process.
    """
    return [total.numpy() for total in self._sum_fn(list(values))]

  def _sum(self, values, options=None) -> list[tf.Tensor]:
    def sum_one(values):
      if local_number(self._strategy):  # Only the first replica contributes.
        values = [tf.zeros_like(value) for value in values]
      return all_reduce(values, options)

    values = [tf.convert_to_tensor(value) for value in values]
    results = self._strategy.run(sum_one, args=(values,))
    return [self._strategy.experimental_local_results(r)[0] for r in results]

  def agree(self, what: object, *, timeout_secs: float) -> None:
    """Waits for all processes, and checks that `what` is equal in all of them.

    Args:
      what: A description of the training, of types that JSON can represent.
      timeout_secs: Seconds to wait for the other processes.

    Raises:
      TimeoutError: If another process does not call `agree` in time.
      RuntimeError: If the descriptions differ.
    """
    digest = hashlib.sha256(json.dumps(what).encode()).digest()
    # Short enough for a sum to be exact.
    mine = np.float64(int.from_bytes(digest[:4], "big"))
    options = tf.distribute.experimental.CommunicationOptions(
      timeout_seconds=timeout_secs
    )
    compare = tf.function(lambda: self._sum([mine], options), autograph=False)
    try:
      (total,) = compare()
    except tf.errors.DeadlineExceededError:
      raise TimeoutError(
        f"another worker did not build its model in {timeout_secs:.0f} s"
      ) from None
    if total.numpy() != mine * (len(self._peers) + 1):
      # A second all-reduce: a process that ended now could keep slower ones
      # from receiving the result of the first.
      with contextlib.suppress(tf.errors.OpError):
        compare()
      here = ", ".join(f"{k} {v}" for k, v in versions.here().items())
      raise RuntimeError(
        "the workers differ in their variables, in the update rule, in which"
        f" of the gradients are sparse, or in their versions (here {here}):"
        " start every worker with the same code and flags"
      )

  def broadcast(self, state: Mapping[str, tf.Tensor]) -> dict[str, np.ndarray]:
    """Sends the chief's values to all processes. All processes call it.

    Args:
      state: Tensors by name. Names, shapes and dtypes must be the same in every
        process. The values of processes other than the chief are not used.

    Returns:
      The chief's values by name, in every process.
    """
    names, values = zip(*sorted(state.items()), strict=True)
    # Not every device sums integers.
    wire = [
      value.numpy() if value.dtype.is_floating else np.float64(value)
      for value in values
    ]
    if not self._is_chief:
      wire = [np.zeros_like(value) for value in wire]
    return {
      name: total.astype(value.dtype.as_numpy_dtype)
      for name, value, total in zip(names, values, self.sum(wire), strict=True)
    }

  def await_leave(self) -> None:
    """Waits until the other processes have closed their ports.

    The chief calls this before it ends, since the other processes need it until
    they have ended.

    Raises:
      TimeoutError: If a process still accepts connections after ten seconds.
    """
    waiting.await_value(
      lambda: not any(map(connection.listens, self._peers)),
      timeout_secs=_LEAVE_SECS,
      what="waiting for the other workers to close their connections",
      log=self._log,
    )

  def close(self) -> None:
    """Ends the thread that logs long waits for the other processes."""
    self._wait_logger.stop()
