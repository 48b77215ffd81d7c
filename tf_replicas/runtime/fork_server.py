"""Starts Python programs by forking a process that has imported TensorFlow.

Importing TensorFlow 2.21 takes about three seconds of processor time. In a
cluster on one machine, every task would spend this time, and all at once on the
same cores. A `ForkServer` is a process that imports TensorFlow once, and forks
for each task; a task then begins within some milliseconds. TensorFlow allows
this because an import starts none of its threads and touches no GPU.

A forked program is a process like others, with its own session, environment,
arguments and output. But environment variables that are read during the import
of TensorFlow, such as `TF_ENABLE_ONEDNN_OPTS`, have the server's values in all
of its programs.

This module does not import TensorFlow, except in the process of the server.
"""

import collections
import contextlib
import ctypes
import fcntl
import gc
import importlib
import importlib.abc as abc
import importlib.util
import json
import os
import pathlib
import random
import selectors
import signal
import socket
import subprocess
import sys
import threading
import traceback
import types
from collections.abc import Mapping
from collections.abc import Sequence
from typing import cast
from typing import IO
from typing import NamedTuple
from typing import NoReturn

from tf_replicas.runtime import processes

_PR_SET_PDEATHSIG = 1
_MAX_MESSAGE = 1 << 20
_MAX_DESCRIPTORS = 16
_COMMAND_LINE_SIZE = 4000
# TensorFlow on a busy machine takes this long to import at most.
_IMPORT_SECS = 300.0


class _Program(NamedTuple):
  """Describes a program that a `ForkServer` is asked to run.

  Attributes:
    arguments: What follows the name of the interpreter in a command line:
      [script, *arguments], ["-m", module, *arguments] or ["-c", code,
      *arguments].
    environ: The environment variables of the program.
    directory: The working directory of the program.
    descriptors: The file descriptors that the program inherits, by their
      numbers in the process that asked for the program. The first one becomes
      the program's output.
  """

  arguments: list[str]
  environ: dict[str, str]
  directory: str
  descriptors: list[int]


class ForkedProcess:
  """A process that a `ForkServer` has started.

  The class has those methods and attributes of `subprocess.Popen` that
  launchers use.

  Attributes:
    args: The command line.
    pid: The process id.
    stdout: The process's output, standard error included; a text stream.
    returncode: The exit status, negative for a signal; None while the process
      runs.
  """

  def __init__(self, args: Sequence[str], stdout: IO[str]):
    self.args = args
    self.stdout = stdout
    self.pid = 0
    self.returncode: int | None = None
    self._has_begun = threading.Event()
    self._has_ended = threading.Event()

  def poll(self) -> int | None:
    """Returns the exit status of the process, or None while it runs.

    The status is negative if a signal ended the process.
    """
    return self.returncode

  def wait(self, timeout: float | None = None) -> int:
    """Waits for the end of the process.

    Args:
      timeout: The longest time to wait, in seconds; None waits forever.

    Returns:
      The exit status, negative if a signal ended the process.

    Raises:
      subprocess.TimeoutExpired: If the process still runs after `timeout`.
    """
    if not self._has_ended.wait(timeout):
      raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
    assert self.returncode is not None
    return self.returncode

  def send_signal(self, sig: int) -> None:
    """Sends the signal `sig` to the process, unless it has ended."""
    if self.returncode is None:
      with contextlib.suppress(ProcessLookupError):
        os.kill(self.pid, sig)

  def terminate(self) -> None:
    """Sends SIGTERM to the process, unless it has ended."""
    self.send_signal(signal.SIGTERM)

  def kill(self) -> None:
    """Sends SIGKILL to the process, unless it has ended."""
    self.send_signal(signal.SIGKILL)


class ForkServer:
  """Starts Python programs by forking a process that has imported TensorFlow.

  So a program need not import TensorFlow itself, which takes seconds. The
  process with TensorFlow is called the server. It starts when the first program
  is requested. An object of this class is a context manager. When the context
  is left, or when this process ends for any reason, the server and all its
  programs end.
  """

  def __init__(self, environ: Mapping[str, str] | None = None):
    """Stores the environment; the server starts with the first program.

    Args:
      environ: The environment in which TensorFlow is imported; by default that
        of this process.
    """
    self._environ = dict(os.environ if environ is None else environ)
    self._lock = threading.Lock()
    self._process: subprocess.Popen | None = None
    self._connection: socket.socket
    # Those that the server was asked for and has not started, in order.
    self._asked: collections.deque[ForkedProcess] = collections.deque()

  def __enter__(self) -> "ForkServer":
    return self

  def __exit__(self, *_) -> None:
    self.close()

  def popen(
    self,
    command: Sequence[str],
    *,
    env: Mapping[str, str],
    pass_fds: Sequence[int] = (),
  ) -> ForkedProcess | None:
    """Starts a program of this Python interpreter.

    Args:
      command: The command line, of the form `[env NAME=VALUE...] PYTHON [-u]
        (SCRIPT | -m MODULE | -c CODE) [ARGUMENT...]`, where PYTHON is this
        interpreter and brackets mark what may be missing.
      env: The environment.
      pass_fds: File descriptors that the process inherits.

    Returns:
      The process. None if `command` is not of this form; nothing is started
      then.

    Raises:
      RuntimeError: If TensorFlow cannot be imported, if the server has ended,
        or if command line and environment are too long for a message to it.
    """
    arguments, settings = _parse(command)
    if arguments is None:
      return None
    reading, writing = os.pipe()
    process = ForkedProcess(
      command, open(reading, encoding="utf-8", errors="replace")
    )
    try:
      descriptors = [writing, *pass_fds]
      program = _Program(
        arguments, {**env, **settings}, os.getcwd(), descriptors
      )
      with self._lock:
        self._start()
        self._asked.append(process)
        try:
          socket.send_fds(
            self._connection, [json.dumps(program).encode()], descriptors
          )
        except OSError:  # It has ended, or the message is too long.
          with contextlib.suppress(ValueError):  # `_listen` was faster.
            self._asked.remove(process)
          process._has_begun.set()
    finally:
      os.close(writing)
    if not process._has_begun.wait(_IMPORT_SECS) or not process.pid:
      process.stdout.close()
      raise RuntimeError(
        f"the process that starts {' '.join(arguments[:2])} has ended, or"
        " cannot take so long a command line and environment"
      )
    return process

  def _start(self) -> None:
    """Starts the server, and a thread that listens to it, unless they run."""
    if self._process is not None:
      return
    self._connection, theirs = socket.socketpair(
      socket.AF_UNIX, socket.SOCK_SEQPACKET
    )
    with theirs:
      self._process = subprocess.Popen(
        [
          *(sys.executable, "-u", "-m", __name__, str(theirs.fileno())),
          "-" * _COMMAND_LINE_SIZE,  # See `_show_command_line`.
        ],
        stdin=subprocess.DEVNULL,
        env={
          **self._environ,
          "PYTHONPATH": os.pathsep.join(p or os.getcwd() for p in sys.path),
        },
        pass_fds=[theirs.fileno()],
        start_new_session=True,  # Ctrl-C is for its user to handle.
      )
    threading.Thread(target=self._listen, daemon=True).start()

  def _listen(self) -> None:
    """Sets process ids and exit statuses as the server reports them.

    The server reports which processes have begun and ended. This method runs in
    a thread until the connection to the server is closed.
    """
    running: dict[int, ForkedProcess] = {}
    with contextlib.suppress(OSError):
      while message := self._connection.recv(_MAX_MESSAGE):
        pid, status = json.loads(message)
        if status is None:
          process = self._asked.popleft()
          process.pid, running[pid] = pid, process
          process._has_begun.set()
        else:
          process = running.pop(pid)
          process.returncode = os.waitstatus_to_exitcode(status)
          process._has_ended.set()
    for process in running.values():  # The kernel ends them with the server.
      process.returncode = -signal.SIGTERM
      process._has_ended.set()
    while self._asked:
      self._asked.popleft()._has_begun.set()

  def close(self) -> None:
    """Ends the server process and, with it, all programs that it started."""
    with self._lock:
      if self._process is not None:
        with contextlib.suppress(OSError):
          self._connection.shutdown(socket.SHUT_RDWR)
        self._process.wait()
        self._connection.close()
        self._process = None


def _parse(command: Sequence[str]) -> tuple[list[str] | None, dict[str, str]]:
  """Splits a command line into arguments for Python and environment variables.

  Args:
    command: A command line as `ForkServer.popen` takes it.

  Returns:
    A pair. First, the arguments that follow the interpreter; None if the
    command has not the form that `popen` documents. Second, the environment
    variables that a leading `env` sets, by name.
  """
  settings = {}
  interpreter, *arguments = command
  if interpreter == "env":
    interpreter, *arguments = arguments
    while "=" in interpreter:
      name, _, settings[name] = interpreter.partition("=")
      interpreter, *arguments = arguments
  if interpreter != sys.executable:
    return None, {}
  if arguments and arguments[0] == "-u":
    del arguments[0]
  is_known = bool(arguments) and (
    arguments[0] in ("-m", "-c") or not arguments[0].startswith("-")
  )
  return (arguments if is_known else None), settings


# The server.


def _serve(connection: socket.socket) -> _Program:
  """Forks a process for every program that `ForkServer.popen` requests.

  This is the loop of the server process. It returns only in the forked
  processes. The server itself ends when the connection is closed. It ignores
  SIGTERM: a cluster manager sends it to all processes, and the programs, which
  end with the server, may have to save something first.

  Args:
    connection: The socket by which the server is asked for programs, and
      reports which processes have begun and ended.

  Returns:
    The program that the forked process is to run.
  """
  awake, wakeup = os.pipe()
  os.set_blocking(wakeup, False)
  signal.set_wakeup_fd(wakeup, warn_on_full_buffer=False)
  signal.signal(signal.SIGCHLD, lambda *_: None)
  signal.signal(signal.SIGTERM, lambda *_: None)
  selector = selectors.DefaultSelector()
  selector.register(connection, selectors.EVENT_READ)
  selector.register(awake, selectors.EVENT_READ)
  while True:
    ready = {key.fileobj for key, _ in selector.select()}
    if awake in ready:
      os.read(awake, 4096)
      _report_ended(connection)
    if connection not in ready:
      continue
    message, received, _, _ = socket.recv_fds(
      connection, _MAX_MESSAGE, _MAX_DESCRIPTORS
    )
    if not message:  # Its user has ended.
      os._exit(0)
    server = os.getpid()
    # A signal for the new process must not be lost.
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    pid = os.fork()
    if pid:
      signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
      for descriptor in received:
        os.close(descriptor)
      connection.send(json.dumps([pid, None]).encode())
      continue
    signal.set_wakeup_fd(-1)
    for signum in (signal.SIGCHLD, signal.SIGTERM):
      signal.signal(signum, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
    selector.close()
    for descriptor in (awake, wakeup):
      os.close(descriptor)
    connection.close()
    program = _Program(*json.loads(message))
    _become(program, received, server)
    return program


def _report_ended(connection: socket.socket) -> None:
  """Reports all programs that have ended since the last call of this function.

  The server sends their process ids and exit statuses over `connection` to the
  process that started it.
  """
  with contextlib.suppress(ChildProcessError):
    while True:
      pid, status = os.waitpid(-1, os.WNOHANG)
      if not pid:
        return
      with contextlib.suppress(OSError):
        connection.send(json.dumps([pid, status]).encode())


def _become(program: _Program, received: list[int], server: int) -> None:
  """Prepares a forked process to run its program.

  The process gets a session of its own, and the output, environment, file
  descriptors and working directory of the program. It ends when the server
  ends.

  Args:
    program: The program.
    received: The file descriptors as the server received them: the output, then
      those that the program inherits.
    server: The process id of the server.
  """
  os.setsid()
  if sys.platform == "linux":
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != server:  # It ended before the call.
      os._exit(1)
    _show_command_line(program.arguments)
  output, *inherited = received
  for number in (1, 2):
    os.dup2(output, number)
  os.close(output)
  _renumber(inherited, program.descriptors[1:])
  os.environ.clear()
  os.environ.update(program.environ)
  os.chdir(program.directory)
  # Fresh processes have different seeds.
  random.seed()
  if "numpy" in sys.modules:
    importlib.import_module("numpy").random.seed()


def _show_command_line(arguments: Sequence[str]) -> None:
  """Makes the tool `ps` show this interpreter and `arguments` for this process.

  It overwrites the command line of the process in memory. The server was
  started with a long unused argument, which leaves room for that.
  """
  text = b"".join(os.fsencode(a) + b"\0" for a in [sys.executable, *arguments])
  stat = pathlib.Path("/proc/self/stat").read_text()
  fields = stat.rpartition(")")[2].split()  # From the third field on.
  begin, end = (int(fields[number - 3]) for number in (48, 49))
  size = end - begin
  ctypes.memmove(begin, text[: size - 1].ljust(size, b"\0"), size)


def _renumber(descriptors: Sequence[int], numbers: Sequence[int]) -> None:
  """Gives file descriptors the numbers that the program expects.

  Args:
    descriptors: The present numbers, which become invalid unless they are also
      among the new ones.
    numbers: The new number of each file descriptor, in the same order.
  """
  above = 1 + max([*descriptors, *numbers, 2])
  copies = [fcntl.fcntl(d, fcntl.F_DUPFD_CLOEXEC, above) for d in descriptors]
  for descriptor in descriptors:
    os.close(descriptor)
  for copy, number in zip(copies, numbers, strict=True):
    os.dup2(copy, number)
    os.close(copy)


def _run(arguments: Sequence[str]) -> None:
  """Runs a script, a module or code in this process, as `python` would.

  Args:
    arguments: [script, *arguments], ["-m", module, *arguments] or ["-c", code,
      *arguments].
  """
  name, *rest = arguments
  main = types.ModuleType("__main__")
  if name == "-m":
    name, *rest = rest
    spec = importlib.util.find_spec(name)
    if spec is not None and spec.submodule_search_locations is not None:
      spec = importlib.util.find_spec(f"{name}.__main__")
    if spec is None:
      sys.exit(f"{sys.executable}: No module named {name}")
    main.__file__, main.__spec__ = spec.origin, spec
    main.__package__ = spec.parent
    code = cast(abc.InspectLoader, spec.loader).get_code(spec.name) or ""
  elif name == "-c":
    code, *rest = rest
  else:
    main.__file__ = name
    sys.path[0] = str(pathlib.Path(name).resolve().parent)
    code = compile(pathlib.Path(name).read_bytes(), name, "exec")
  sys.argv[:] = [getattr(main, "__file__", name), *rest]
  sys.modules["__main__"] = main
  exec(code, main.__dict__)


def _main() -> NoReturn:
  """Imports TensorFlow, and runs the loop of the server.

  `ForkServer` starts this module with the number of its socket's file
  descriptor as an argument. In a forked process the loop returns, and the
  process runs its program.
  """
  connection = socket.socket(fileno=int(sys.argv[1]))
  if sys.platform == "linux":
    _show_command_line(["-m", __spec__.name])
  try:
    with processes.importing_tensorflow():
      import keras  # noqa: F401
      import tensorflow  # noqa: F401
  except BaseException:
    traceback.print_exc()
    os._exit(1)
  # The programs' garbage collector spares what was imported here. This saves
  # time, and memory: what a program does not write, it shares with the server.
  gc.collect()
  gc.freeze()
  program = _serve(connection)
  _run(program.arguments)
  sys.exit(0)


if __name__ == "__main__":
  _main()
