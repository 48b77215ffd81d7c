"""Tests for experiments.support.slow_down."""

import os
import subprocess
import sys
import time

import pytest

from experiments.support import slow_down

_COUNT = "print(flush=True)\nwhile True: pass"


def _cpu_secs(pid):
  """Processor time that a process has used."""
  with open(f"/proc/{pid}/stat", encoding="utf-8") as file:
    fields = file.read().rpartition(")")[2].split()
  return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _state(pid):
  with open(f"/proc/{pid}/stat", encoding="utf-8") as file:
    return file.read().rpartition(")")[2].split()[0]


def test_gets_its_share_and_goes_on_as_it_was():
  with subprocess.Popen(
    [sys.executable, "-c", _COUNT, "this-one"], stdout=subprocess.PIPE
  ) as process:
    try:
      process.stdout.readline()
      pid = slow_down.descendant(os.getpid(), ["this-one"])
      assert pid == process.pid
      start = time.monotonic()
      with slow_down.SlowDown(pid, 5):
        before = _cpu_secs(pid)
        time.sleep(2)
        used = _cpu_secs(pid) - before
      # A busy machine gives it less, never more.
      assert used < 0.35 * (time.monotonic() - start)
      assert _state(pid) != "T"
    finally:
      process.kill()


def test_a_process_that_ends_meanwhile_does_no_harm():
  with subprocess.Popen([sys.executable, "-c", ""]) as process:
    process.wait()
    with slow_down.SlowDown(process.pid, 2):
      time.sleep(0.2)


def test_bad_factor():
  with pytest.raises(ValueError, match="at least 1. Received: 0.5"):
    slow_down.SlowDown(1, 0.5)


def test_no_such_child():
  with pytest.raises(LookupError, match="the arguments --never"):
    slow_down.descendant(os.getpid(), ["--never"])
