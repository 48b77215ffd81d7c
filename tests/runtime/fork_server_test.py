"""Tests `fork_server` with real processes."""

import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

from tests.support import trials
from tf_replicas.runtime import fork_server


@pytest.fixture(scope="module")
def server():
  with fork_server.ForkServer(trials.ENVIRON) as server:
    yield server


def start(server, *arguments, env=None, **more):
  command = [sys.executable, "-u", *arguments]
  process = server.popen(command, env=env or trials.ENVIRON, **more)
  assert process is not None
  return process


def finish(process):
  """The exit status and the output."""
  with process.stdout:
    output = process.stdout.read()
  return process.wait(30), output


def test_a_program_begins_with_tensorflow_imported(server):
  code = "import sys; print('tensorflow' in sys.modules, len(sys.argv))"
  process = start(server, "-c", code, "more")
  assert finish(process) == (0, "True 2\n")


def test_the_garbage_collector_spares_what_was_imported(server):
  code = "import gc; print(gc.isenabled(), gc.get_freeze_count() > 10**5)"
  assert finish(start(server, "-c", code)) == (0, "True True\n")


def test_tensorflow_computes_in_every_program(server):
  code = (
    "import tensorflow as tf;"
    " print(int(tf.function(lambda x: x + 1)(tf.constant(41))))"
  )
  processes = [start(server, "-c", code) for _ in range(2)]
  assert [finish(process) for process in processes] == [(0, "42\n")] * 2


def test_a_script_is_the_main_module(server, tmp_path):
  (tmp_path / "beside.py").write_text("NAME = 'beside'\n")
  script = tmp_path / "script.py"
  script.write_text(
    "import sys, beside\n"
    "class Mine: pass\n"
    "if __name__ == '__main__':\n"
    "  print(sys.argv, beside.NAME, Mine.__module__, __file__)\n"
    "  print(sys.modules['__main__'].Mine is Mine)\n"
  )
  status, output = finish(start(server, str(script), "-x", "y"))
  assert status == 0, output
  assert output.splitlines() == [
    f"{[str(script), '-x', 'y']} beside __main__ {script}",
    "True",
  ]


def test_a_module_is_found_as_python_finds_it(server):
  assert finish(start(server, "-m", "this"))[1].startswith("The Zen of Python")
  status, output = finish(start(server, "-m", "cifar10"))
  assert (status, "cifar10.train" in output) == (0, True)
  status, output = finish(start(server, "-m", "nothing_like_it"))
  assert (status, output) == (
    1,
    f"{sys.executable}: No module named nothing_like_it\n",
  )


@pytest.mark.parametrize(
  ("code", "status", "words"),
  [
    ("import sys; sys.exit(7)", 7, ""),
    ("raise SystemExit('a message')", 1, "a message"),
    ("1 / 0", 1, "ZeroDivisionError"),
    ("import os; os._exit(3)", 3, ""),
    ("import atexit; atexit.register(print, 'at exit')", 0, "at exit"),
  ],
)
def test_exit_status(server, code, status, words):
  ended, output = finish(start(server, "-c", code))
  assert (ended, words in output) == (status, True), output


def test_environment_directory_and_descriptors(server, tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  read, write = os.pipe()
  code = (
    "import os; print(os.environ['A'], os.environ.get('HOME'), os.getcwd());"
    f"os.write({write}, b'through the pipe')"
  )
  command = ["env", "A=b=c", sys.executable, "-c", code]
  process = server.popen(command, env={"PATH": "/bin"}, pass_fds=[write])
  os.close(write)
  assert finish(process) == (0, f"b=c None {tmp_path}\n")
  with open(read, "rb") as pipe:  # Nobody else holds its other end.
    assert pipe.read() == b"through the pipe"


def test_programs_draw_different_random_numbers(server):
  code = (
    "import random, numpy, keras; print(random.random(), numpy.random.rand(),"
    " float(keras.random.uniform([])))"
  )
  outputs = [finish(start(server, "-c", code))[1].split() for _ in range(2)]
  assert len(outputs[0]) == 3
  assert not set(outputs[0]) & set(outputs[1])


def test_signals(server):
  process = start(server, "-c", "import time; print('up'); time.sleep(99)")
  assert process.stdout.readline() == "up\n"
  assert process.poll() is None
  with pytest.raises(subprocess.TimeoutExpired):
    process.wait(0.1)
  assert os.getsid(process.pid) == process.pid
  command = pathlib.Path(f"/proc/{process.pid}/cmdline").read_bytes()
  expected = [sys.executable, "-c", "import time"]
  assert command.startswith("\0".join(expected).encode())
  process.send_signal(signal.SIGTERM)
  assert finish(process) == (-signal.SIGTERM, "")
  process.kill()  # It has ended: nothing happens.


def test_the_server_outlives_sigterm(server):
  """A cluster manager sends it to all processes; only the programs end."""
  code = "import os, time; print(os.getppid(), flush=True); time.sleep(99)"
  first = start(server, "-c", code)
  os.kill(int(first.stdout.readline()), signal.SIGTERM)
  assert finish(start(server, "-c", "print('up')")) == (0, "up\n")
  assert first.poll() is None
  first.send_signal(signal.SIGTERM)
  assert finish(first) == (-signal.SIGTERM, "")


def test_other_commands_are_left_to_others(server):
  for command in (
    ["true"],
    [sys.executable, "-X", "dev", "x.py"],
    [sys.executable],
  ):
    assert server.popen(command, env={}) is None


def test_programs_end_with_their_server():
  with fork_server.ForkServer(trials.ENVIRON) as server:
    process = start(server, "-c", "import time; print('up'); time.sleep(99)")
    assert process.stdout.readline() == "up\n"
  assert finish(process) == (-signal.SIGTERM, "")


def test_programs_end_with_the_process_that_asked_for_them():
  code = f"""
import os, sys
from tf_replicas.runtime import fork_server
server = fork_server.ForkServer()
command = [{sys.executable!r}, "-c", "import time; print(1); time.sleep(99)"]
process = server.popen(command, env=os.environ)
process.stdout.readline()
print(process.pid, flush=True)
sys.stdin.read()
"""
  parent = subprocess.Popen(
    [sys.executable, "-c", code],
    env=trials.ENVIRON,
    stdin=subprocess.PIPE,
    stdout=subprocess.PIPE,
    text=True,
  )
  with parent:
    pid = int(parent.stdout.readline())
    parent.kill()
  deadline = time.monotonic() + 30
  while os.path.exists(f"/proc/{pid}"):
    assert time.monotonic() < deadline
    time.sleep(0.05)


def test_a_server_without_tensorflow_is_an_error(tmp_path, monkeypatch):
  (tmp_path / "tensorflow.py").write_text("raise ImportError('broken')\n")
  monkeypatch.syspath_prepend(tmp_path)
  with fork_server.ForkServer(trials.ENVIRON) as server:
    with pytest.raises(RuntimeError, match="has ended"):
      start(server, "-c", "1")
