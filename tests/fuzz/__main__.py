"""Runs the command that the docstring of `tests.fuzz` describes."""

import argparse
import pathlib
import random
import resource
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from unittest import mock

from tests.fuzz import kinds

# A case that takes longer hangs.
CASE_SECS = 60.0
# By how much the memory of a process may grow after its first cases.
MEMORY_BYTES = 1 << 30
# The cases after which the growth of memory counts: caches are full then.
_WARM_CASES = 50


def _peak_bytes() -> int:
  return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def run_kind(name: str, cases: int, seed: int, folder: pathlib.Path) -> None:
  """Reads damaged inputs of one kind in this process.

  Before each case, writes it to the file `case`; at the end, writes the counts
  to stdout.

  Args:
    name: The kind.
    cases: The number of cases.
    seed: Decides what is drawn.
    folder: A directory for this kind.

  Raises:
    AssertionError: If a case fails.
  """
  counts = {"read": 0, "refused": 0}
  before = 0
  try:
    kind = kinds.KINDS[name](folder)
    for number in range(cases):
      case = kind.draw(random.Random(f"{name} {seed} {number}"))
      (folder / "case").write_text(ascii(case), encoding="utf-8")
      try:
        kind.read(case)
      except kind.documented as error:
        message = str(error)
        if not _is_of_tensorflow(error):
          assert message and "\n" not in message, f"not one line: {message!r}"
        counts["refused"] += 1
      else:
        counts["read"] += 1
      if number == _WARM_CASES:
        before = _peak_bytes()
  finally:
    mock.patch.stopall()
  grown = _peak_bytes() - before if before else 0
  assert grown < MEMORY_BYTES, f"memory grew by {grown} bytes"
  print(
    f"{counts['read']} read, {counts['refused']} refused,"
    f" {grown >> 20} MiB more memory"
  )


def _is_of_tensorflow(error: BaseException) -> bool:
  """Whether the programs shorten the error's message to one line."""
  return any(c.__module__.startswith("tensorflow") for c in type(error).__mro__)


def _supervise(name: str, cases: int, seed: int) -> bool:
  """Runs one kind in a process of its own, and prints the result.

  Returns:
    Whether all cases have passed.
  """
  with tempfile.TemporaryDirectory() as folder:
    command = [sys.executable, "-m", "tests.fuzz", f"--kind={name}"]
    command += [f"--cases={cases}", f"--seed={seed}", f"--folder={folder}"]
    begin = time.monotonic()
    with subprocess.Popen(
      command,
      stdout=subprocess.PIPE,
      stderr=subprocess.PIPE,
      text=True,
      errors="replace",
    ) as process:
      hung = threading.Event()
      watch = threading.Thread(
        target=_end_if_it_hangs, args=(process, pathlib.Path(folder), hung)
      )
      watch.start()
      output, errors = process.communicate()
      watch.join()
    secs = time.monotonic() - begin
    if process.returncode == 0:
      print(f"{name}: {output.strip()}, {secs:.0f} s", flush=True)
      return True
    what = f"exit status {process.returncode}"
    if hung.is_set():
      what = f"a case took longer than {CASE_SECS:.0f} s"
    case = pathlib.Path(folder, "case")
    text = case.read_text(encoding="utf-8") if case.exists() else "none"
    print(f"{name}: {what}\n{errors[-4000:]}\nlast case: {text}", flush=True)
    return False


def _end_if_it_hangs(
  process: subprocess.Popen, folder: pathlib.Path, hung: threading.Event
) -> None:
  """Kills a process whose file `case` does not change for `CASE_SECS`."""
  changed, seen = time.monotonic(), None
  while process.poll() is None:
    time.sleep(0.2)
    case = folder / "case"
    now = case.stat().st_mtime_ns if case.exists() else None
    if now != seen:
      changed, seen = time.monotonic(), now
    elif time.monotonic() - changed > CASE_SECS:
      hung.set()
      process.kill()
      return


def main() -> None:
  parser = argparse.ArgumentParser(prog="python -m tests.fuzz")
  parser.add_argument("--cases", type=int, default=100_000, help="of all kinds")
  parser.add_argument("--seed", type=int, default=0)
  parser.add_argument("--kinds", default=",".join(kinds.KINDS))
  parser.add_argument("--kind", choices=kinds.KINDS, help=argparse.SUPPRESS)
  parser.add_argument("--folder", type=pathlib.Path, help=argparse.SUPPRESS)
  options = parser.parse_args()
  if options.kind:
    try:
      run_kind(options.kind, options.cases, options.seed, options.folder)
    except Exception:
      traceback.print_exc()
      sys.exit(1)
    return
  names = options.kinds.split(",")
  unknown = sorted(set(names) - set(kinds.KINDS))
  if unknown:
    parser.error(f"--kinds must be of {', '.join(kinds.KINDS)}: {unknown[0]!r}")
  each = -(-options.cases // len(names))
  results = [_supervise(name, each, options.seed) for name in names]
  sys.exit(0 if all(results) else 1)


if __name__ == "__main__":
  main()
