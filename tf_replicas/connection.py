"""Connect a client to its parameter servers, with deadlines and words."""

import contextlib
import socket
import threading
import time
from collections.abc import Callable
from collections.abc import Iterator
from typing import TypeVar

import tensorflow as tf

from tf_replicas import cluster
from tf_replicas import parameter_store

T = TypeVar("T")
_WORDS_EVERY_SECS = 10.0


def connect_client(
  spec: cluster.ClusterSpec,
  task: cluster.Task,
  *,
  timeout_secs: float,
  log: Callable[[str], None] = print,
) -> list[str]:
  """Makes this process a client of all PS tasks.

  The cluster it names holds the PS tasks and itself only: naming the other
  workers would make every client wait for them.

  Returns:
    One device of each PS task.

  Raises:
    cluster.ClusterError: If the port of `task` is in use.
    TimeoutError: If a PS task does not answer in time.
  """
  address = spec.address(task)
  cluster.check_port_free(address)
  await_servers(spec, "ps", timeout_secs=timeout_secs, log=log)
  tf.config.experimental_connect_to_cluster(
    tf.train.ClusterSpec(
      {"ps": spec.addresses("ps"), task.job: {task.index: address}}
    ),
    job_name=task.job,
    task_index=task.index,
  )
  return [parameter_store.ps_device(i) for i in range(spec.num_tasks("ps"))]


def await_servers(
  spec: cluster.ClusterSpec,
  job: str,
  *,
  timeout_secs: float,
  log: Callable[[str], None] = print,
) -> None:
  """Waits until every task of `job` listens.

  Raises:
    TimeoutError: Naming the first task that does not.
  """
  since = time.monotonic()
  for task in spec.tasks(job):
    address = spec.address(task)
    await_value(
      lambda address=address: listens(address),
      timeout_secs=timeout_secs,
      since=since,
      what=f"waiting for {task} at {address}",
      log=log,
      poll_secs=0.1,
    )


def listens(address: str) -> bool:
  """Whether something accepts connections at "host:port"."""
  host, _, port = address.rpartition(":")
  try:
    with socket.create_connection((host.strip("[]"), int(port)), timeout=2.0):
      return True
  except OSError:
    return False


def await_value(
  poll: Callable[[], T | None],
  *,
  timeout_secs: float,
  what: str,
  log: Callable[[str], None] = print,
  poll_secs: float = 0.05,
  since: float | None = None,
) -> T:
  """Polls until there is something true; says so every ten seconds.

  Args:
    poll: Returns it.
    timeout_secs: How long it may take.
    what: What is waited for, in words.
    log: Where words go.
    poll_secs: How long to wait between two looks.
    since: `time.monotonic()` when the wait began; now, if not given.

  Raises:
    TimeoutError: After `timeout_secs`, with `what`.
  """
  said = time.monotonic()
  start = said if since is None else since
  while not (value := poll()):
    now = time.monotonic()
    if now - start > timeout_secs:
      raise TimeoutError(f"{what}: gave up after {timeout_secs:.0f} s")
    if now - said > _WORDS_EVERY_SECS:
      log(f"{what}: {now - start:.0f} s so far")
      said = now
    time.sleep(poll_secs)
  return value


class Words:
  """Says every ten seconds that a wait goes on, from a thread of its own."""

  def __init__(
    self,
    *,
    every_secs: float = _WORDS_EVERY_SECS,
    log: Callable[[str], None] = print,
  ):
    """Starts the thread.

    Args:
      every_secs: How often to speak while one wait goes on.
      log: Where words go.
    """
    self._every_secs = every_secs
    self._log = log
    self._wait: tuple[str, float] | None = None
    self._stop = threading.Event()
    self._thread = threading.Thread(target=self._watch, daemon=True)
    self._thread.start()

  @contextlib.contextmanager
  def during(self, what: str) -> Iterator[None]:
    """Speaks of `what` while the block lasts."""
    self._wait = (what, time.monotonic())
    try:
      yield
    finally:
      self._wait = None

  def stop(self) -> None:
    """Ends the thread."""
    self._stop.set()
    self._thread.join()

  def _watch(self) -> None:
    said = time.monotonic()
    while not self._stop.wait(min(self._every_secs, 1.0)):
      now, wait = time.monotonic(), self._wait
      if wait is None:
        continue
      what, since = wait
      if now - max(said, since) >= self._every_secs:
        self._log(f"{what}: {now - since:.0f} s so far")
        said = now


class Thread:
  """A thread whose error is raised where it is joined."""

  def __init__(self, run: Callable[[], None], *, on_error: Callable[[], None]):
    """Starts it.

    Args:
      run: What to do.
      on_error: Called after `run` failed, to wake whoever should join.
    """
    self._error: BaseException | None = None

    def guarded():
      try:
        run()
      except BaseException as error:  # pylint: disable=broad-except
        self._error = error
        on_error()

    self._thread = threading.Thread(target=guarded, daemon=True)
    self._thread.start()

  def is_alive(self) -> bool:
    """Whether it goes on."""
    return self._thread.is_alive()

  def raise_error(self) -> None:
    """Raises what `run` raised, once, if it did."""
    if self._error is not None:
      error, self._error = self._error, None
      raise error

  def join(self, timeout_secs: float | None = None) -> None:
    """Waits for the end, and raises what `run` raised, once."""
    self._thread.join(timeout_secs)
    self.raise_error()
