"""The processes of mirrored training: how they find each other and agree.

The engine is `tf.distribute.MultiWorkerMirroredStrategy`. What the processes
have to tell each other beside gradients, they tell by all-reduce as well: there
is no server that all could ask.
"""

import contextlib
import hashlib
import json
from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from tf_replicas import addresses
from tf_replicas import cluster
from tf_replicas import connection

_LEAVE_SECS = 10.0


def connect(
  spec: cluster.ClusterSpec,
  task: cluster.Task,
  devices: Sequence[str],
  *,
  timeout_secs: float,
  log: Callable[[str], None] = print,
) -> tf.distribute.Strategy:
  """The strategy of several processes, once all are there.

  Args:
    spec: The cluster, ports chosen.
    task: This process.
    devices: Its GPUs, of which each process has as many; or a CPU.
    timeout_secs: How long to wait for the others.
    log: Where words go.

  Raises:
    cluster.ClusterError: If the port of `task` is in use.
    TimeoutError: Naming who is missing.
  """
  _meet(spec, task, timeout_secs, log)
  on_gpus = any(":GPU:" in device for device in devices)
  resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
    tf.train.ClusterSpec(spec.as_dict()),
    task_type=task.job,
    task_id=task.index,
    num_accelerators={"GPU": len(devices)} if on_gpus else {},
    rpc_layer="grpc",
  )
  return tf.distribute.MultiWorkerMirroredStrategy(resolver)


def _meet(spec, task, timeout_secs, log) -> None:
  """Waits until every process listens, as this one does meanwhile.

  The strategy's constructor would wait too, but without words, without an end,
  and deaf to signals (TensorFlow 2.21).
  """
  address = spec.address(task)
  cluster.check_port_free(address)
  with addresses.bound_socket(addresses.split(address)[1]) as listener:
    listener.listen()
    for job in ("chief", "worker"):
      connection.await_servers(spec, job, timeout_secs=timeout_secs, log=log)


def local_number(strategy: tf.distribute.Strategy) -> int:
  """Which of this process's replicas runs; inside `strategy.run`."""
  context = tf.distribute.get_replica_context()
  number = tf.get_static_value(context.replica_id_in_sync_group)
  return int(number) % len(strategy.extended.worker_devices)


def all_reduce(
  values: Sequence[tf.Tensor | tf.IndexedSlices],
  options: tf.distribute.experimental.CommunicationOptions | None = None,
) -> list[tf.Tensor | tf.IndexedSlices]:
  """The sums over all replicas; inside `strategy.run`.

  Slices are put one after the other. Values of one dtype travel together;
  those of several in one call fail beside slices (TensorFlow 2.21).
  """
  context = tf.distribute.get_replica_context()
  # What comes from outside has no device, and the strategy looks for one.
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


class WorkerGroup:
  """What processes tell each other; each call is one of all of them."""

  def __init__(
    self,
    strategy: tf.distribute.Strategy,
    peers: Sequence[str],
    *,
    is_chief: bool,
    log: Callable[[str], None] = print,
  ):
    """Takes part.

    Args:
      strategy: As `connect` gives it.
      peers: The addresses of the other processes.
      is_chief: Whether the others hear this one.
      log: Where words go.
    """
    self._strategy = strategy
    self._peers = list(peers)
    self._is_chief = is_chief
    self._log = log
    self._words = connection.Words(log=log)
    self._sum_fn = tf.function(self._sum, autograph=False)

  def saying(self, what: str) -> contextlib.AbstractContextManager[None]:
    """Says every ten seconds that `what` goes on, while a block lasts.

    A process that dies or stands still is noticed by TensorFlow, which sends
    heartbeats and ends what waits for it; one that is slow only keeps the
    others waiting.
    """
    return self._words.during(what)

  def sum(self, values: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Sums the processes' `values`, which have the same shapes everywhere."""
    return [total.numpy() for total in self._sum_fn(list(values))]

  def _sum(self, values, options=None) -> list[tf.Tensor]:
    def sum_one(values):
      if local_number(self._strategy):  # The first speaks for its process.
        values = [tf.zeros_like(value) for value in values]
      return all_reduce(values, options)

    values = [tf.convert_to_tensor(value) for value in values]
    results = self._strategy.run(sum_one, args=(values,))
    return [self._strategy.experimental_local_results(r)[0] for r in results]

  def agree(self, what: object, *, timeout_secs: float) -> None:
    """Waits for all, and compares what they are going to do.

    Args:
      what: A JSON document that must be the same everywhere.
      timeout_secs: How long to wait for the others.

    Raises:
      TimeoutError: If another one does not come.
      RuntimeError: If it differs from another one's.
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
      # Who leaves at once takes the sum from those who still receive it. That
      # they take part again tells that they have it.
      with contextlib.suppress(tf.errors.OpError):
        compare()
      raise RuntimeError(
        "the workers differ in their variables, in which gradients are sparse,"
        " or in the update rule"
      )

  def broadcast(self, state: Mapping[str, tf.Tensor]) -> dict[str, np.ndarray]:
    """The chief's `state`; everyone's has the same names and shapes."""
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
    """Waits until no other process listens: the chief serves them.

    Raises:
      TimeoutError: After ten seconds.
    """
    connection.await_value(
      lambda: not any(map(connection.listens, self._peers)),
      timeout_secs=_LEAVE_SECS,
      what="waiting for the other workers to leave",
      log=self._log,
    )

  def close(self) -> None:
    """Ends the thread that says what goes on."""
    self._words.stop()
