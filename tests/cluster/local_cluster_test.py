"""Tests for cluster.local_cluster; no task of them loads TensorFlow."""

import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized

from tf_replicas import cluster
from tf_replicas.cluster import local_cluster

ROOT = pathlib.Path(__file__).resolve().parents[2]
DEADLINE_SECS = 30.0
PS = cluster.Task("ps", 0)
CHIEF = cluster.Task("worker", 0)
WORKER = cluster.Task("worker", 1)
SPEC = cluster.parse(
  {
    "cluster": {
      "worker": ["localhost:1001", "localhost:1002"],
      "ps": ["localhost:1000"],
    }
  }
)
WAIT = "print('here', flush=True); import time; time.sleep(300)"
SLOW_TO_LEAVE = (
  "import signal, sys, time; signal.signal(signal.SIGTERM,"
  " lambda *_: (time.sleep(6), sys.exit(7)));" + WAIT
)
DEFIANT = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN);" + WAIT


def _await(condition, what):
  deadline = time.monotonic() + DEADLINE_SECS
  while not condition():
    if time.monotonic() > deadline:
      raise TimeoutError(what)
    time.sleep(0.02)


def _is_running(pid):
  try:
    status = pathlib.Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
  except (FileNotFoundError, ProcessLookupError):
    return False
  return "\nState:\tZ" not in status


class LocalClusterTest(parameterized.TestCase):
  def _tempdir(self):
    return pathlib.Path(self.enter_context(tempfile.TemporaryDirectory()))

  def _cluster(self, programs=None, *, default="pass", **kwargs):
    """A cluster whose tasks run these Python programs."""
    programs = programs or {}
    self.lines = []
    self.log_dir = self._tempdir() / "logs"
    result = local_cluster.LocalCluster(
      SPEC,
      lambda task: [sys.executable, "-c", programs.get(task, default)],
      log_dir=self.log_dir,
      echo=self.lines.append,
      **kwargs,
    )
    self.addCleanup(result.stop, grace_secs=0.1)
    return result

  def _await_here(self, tasks, *which):
    for task in which:
      _await(lambda task=task: f"[{task}] here" in self.lines, f"{task}")

  def test_all_end_well(self):
    tasks = self._cluster()
    tasks.start()
    self.assertEqual(tasks.wait(DEADLINE_SECS), 0)
    self.assertEqual([tasks.returncode(t) for t in SPEC.tasks()], [0] * 3)

  def test_output_is_prefixed_and_logged(self):
    tasks = self._cluster(
      {
        PS: "import sys; print('to stderr', file=sys.stderr)",
        CHIEF: "print('one'); print('  two  ')",
        WORKER: "import sys; sys.stdout.buffer.write(b'\\xff last')",
      }
    )
    tasks.start()
    tasks.wait(DEADLINE_SECS)
    self.assertCountEqual(
      self.lines,
      [
        "[ps 0] to stderr",
        "[worker 0] one",
        "[worker 0]   two",
        "[worker 1] \N{REPLACEMENT CHARACTER} last",
      ],
    )
    self.assertEqual(tasks.log(CHIEF), "one\n  two  \n")
    self.assertEqual(
      sorted(path.name for path in self.log_dir.iterdir()),
      ["ps_0.log", "worker_0.log", "worker_1.log"],
    )

  def test_environment(self):
    tasks = self._cluster(
      default="import os; print(os.environ.get('MARK'))",
      environ={**os.environ, "MARK": "yes"},
    )
    tasks.start(CHIEF)
    tasks.wait(DEADLINE_SECS)
    self.assertEqual(self.lines, ["[worker 0] yes"])

  def test_some_tasks_only(self):
    tasks = self._cluster()
    tasks.start(WORKER)
    self.assertEqual(tasks.wait(DEADLINE_SECS), 0)
    self.assertEqual(len(list(self.log_dir.iterdir())), 1)

  def test_a_failure_ends_the_others_and_is_the_status(self):
    tasks = self._cluster(
      {WORKER: "import sys; sys.exit(7)", CHIEF: WAIT, PS: WAIT}
    )
    tasks.start(PS, CHIEF)
    self._await_here(tasks, PS, CHIEF)
    pids = [tasks.pid(PS), tasks.pid(CHIEF)]
    tasks.start(WORKER)
    with _last_errors_secs(0.3):
      self.assertEqual(tasks.wait(DEADLINE_SECS), 7)
    self.assertFalse(any(map(_is_running, pids)))
    self.assertIn(
      "[launcher] worker 1 failed with exit status 7; ending the others",
      self.lines,
    )
    self.assertIn("[launcher] ps 0 is still running; stopping it", self.lines)

  def test_a_signal_is_128_and_its_number(self):
    tasks = self._cluster(default=WAIT)
    tasks.start(PS)
    self._await_here(tasks, PS)
    tasks.kill(PS)
    self.assertEqual(tasks.wait(DEADLINE_SECS), 128 + 9)
    self.assertIn("was killed by SIGKILL", "\n".join(self.lines))

  @parameterized.named_parameters(
    ("a_worker", WORKER, signal.SIGKILL),
    ("a_ps", PS, signal.SIGKILL),
    ("the_chief_after_its_time_limit", CHIEF, signal.SIGALRM),
  )
  def test_a_killed_task_is_started_again(self, task, sig):
    mark = self._tempdir() / "mark"
    second_time = textwrap.dedent(f"""
      import pathlib, time
      mark = pathlib.Path({str(mark)!r})
      if mark.exists():
        print("again", flush=True)
      else:
        mark.touch()
        print("here", flush=True)
        time.sleep(300)
    """)
    tasks = self._cluster({task: second_time}, max_restarts=1)
    tasks.start(task)
    self._await_here(tasks, task)
    pid = tasks.pid(task)
    tasks.kill(task, sig)
    self.assertEqual(tasks.wait(DEADLINE_SECS), 0)
    self.assertNotEqual(tasks.pid(task), pid)
    self.assertEqual(tasks.log(task), "here\nagain\n")

  @parameterized.named_parameters(
    ("the_chief", CHIEF, 1), ("too_often", WORKER, 0)
  )
  def test_is_not_started_again(self, task, max_restarts):
    tasks = self._cluster(default=WAIT, max_restarts=max_restarts)
    tasks.start(task)
    self._await_here(tasks, task)
    pid = tasks.pid(task)
    tasks.kill(task)
    self.assertEqual(tasks.wait(DEADLINE_SECS), 137)
    self.assertEqual(tasks.pid(task), pid)

  def test_restarts_are_counted_from_zero(self):
    with self.assertRaisesRegex(cluster.ClusterError, "Received: -1"):
      self._cluster(max_restarts=-1)

  def test_one_that_failed_by_itself_is_not_started_again(self):
    tasks = self._cluster({WORKER: "import sys; sys.exit(3)"}, max_restarts=5)
    tasks.start(WORKER)
    self.assertEqual(tasks.wait(DEADLINE_SECS), 3)

  def test_timeout_names_who_runs_and_stops_them(self):
    tasks = self._cluster({CHIEF: "pass"}, default=WAIT)
    tasks.start()
    self._await_here(tasks, PS, WORKER)
    pids = [tasks.pid(PS), tasks.pid(WORKER)]
    _await(lambda: tasks.returncode(CHIEF) == 0, "the end of the chief")
    with self.assertRaises(TimeoutError) as raised:
      tasks.wait(0.1)
    self.assertIn("ps 0", str(raised.exception))
    self.assertIn("worker 1", str(raised.exception))
    self.assertNotIn("worker 0", str(raised.exception))
    self.assertFalse(any(map(_is_running, pids)))
    for task in (PS, WORKER):  # What they have said is not lost.
      self.assertEqual(tasks.log(task), "here\n")

  def test_tasks_that_outlive_the_chief_are_stopped(self):
    """A worker that was cut off while training ended may wait for long."""
    tasks = self._cluster({WORKER: WAIT})
    tasks.start()
    self._await_here(tasks, WORKER)
    _await(lambda: tasks.returncode(PS) == 0, "the end of the ps")
    with mock.patch.object(local_cluster, "_AFTER_CHIEF_SECS", 1.0):
      self.assertEqual(tasks.wait(DEADLINE_SECS), 0)
    self.assertIn("stopping what still runs: worker 1", self.lines[-1])
    self.assertFalse(_is_running(tasks.pid(WORKER)))

  def test_stop_leaves_nothing_behind(self):
    tasks = self._cluster({PS: DEFIANT}, default=WAIT)
    tasks.start()
    self._await_here(tasks, PS, CHIEF, WORKER)
    pids = [tasks.pid(task) for task in SPEC.tasks()]
    self.assertTrue(all(map(_is_running, pids)))
    tasks.stop(grace_secs=2.0)
    self.assertFalse(any(map(_is_running, pids)))
    self.assertEqual(tasks.returncode(PS), -signal.SIGKILL)
    self.assertEqual(tasks.returncode(WORKER), -signal.SIGTERM)

  def test_a_parameter_server_has_time_for_a_checkpoint(self):
    """The chief is on another machine, and saves one."""
    tasks = self._cluster({PS: SLOW_TO_LEAVE})
    tasks.start(PS)
    self._await_here(tasks, PS)
    tasks.stop(grace_secs=5.0)  # It has twice as long, and takes 6 s.
    self.assertEqual(tasks.returncode(PS), 7)

  def test_leaving_the_context_stops_them(self):
    with self._cluster(default=WAIT) as tasks:
      tasks.start(WORKER)
      self._await_here(tasks, WORKER)
      pid = tasks.pid(WORKER)
    self.assertFalse(_is_running(pid))

  @absltest.skipUnless(sys.platform == "linux", "prctl is of Linux")
  def test_tasks_end_when_their_launcher_is_killed(self):
    program = textwrap.dedent(f"""
      import sys, tempfile, time
      from tf_replicas import cluster
      from tf_replicas.cluster import local_cluster
      spec = cluster.parse({{"worker": ["localhost:1", "localhost:2"]}})
      tasks = local_cluster.LocalCluster(
        spec,
        lambda task: [sys.executable, "-c", {WAIT!r}],
        log_dir=tempfile.mkdtemp(),
        echo=lambda line: None,
      )
      tasks.start()
      while not all(tasks.log_path(t).exists() for t in spec.tasks()):
        time.sleep(0.02)
      while not all("here" in tasks.log(t) for t in spec.tasks()):
        time.sleep(0.02)
      print(*[tasks.pid(t) for t in spec.tasks()], flush=True)
      time.sleep(300)
    """)
    directory = str(self._tempdir())
    launcher = subprocess.Popen(
      [sys.executable, "-c", program],
      stdout=subprocess.PIPE,
      text=True,
      env={**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": directory},
    )
    self.addCleanup(launcher.stdout.close)
    self.addCleanup(launcher.wait)
    self.addCleanup(launcher.kill)
    pids = [int(pid) for pid in launcher.stdout.readline().split()]
    self.assertLen(pids, 2)
    self.assertTrue(all(map(_is_running, pids)))
    launcher.kill()
    launcher.wait()
    _await(lambda: not any(map(_is_running, pids)), "the end of the tasks")


def _last_errors_secs(secs):
  return mock.patch.object(local_cluster, "_LAST_ERRORS_SECS", secs)


class DescribeTest(absltest.TestCase):
  def test_exit_status_and_signal(self):
    describe = local_cluster.describe
    self.assertEqual(describe(3), "failed with exit status 3")
    self.assertEqual(describe(-15), "was killed by SIGTERM")


if __name__ == "__main__":
  absltest.main()
