"""Kills tasks of real trainings at random moments, again and again.

  python -m benchmarks.kills [--rounds=20] [--replication=in_graph] [--seed=1]
    [-- --update=async …]

A round is a training by `cifar10.distributed_train` on 2 PS (parameter
servers), a chief and 2 workers. The chief and the workers are killed (SIGKILL)
and started again, at random moments, also while the tasks start. Then the chief
is interrupted, or a PS task is killed. After a kill, the training must go on,
or every task must end by itself, within `--deadline_secs`. After the last one,
clients (chief and workers) must say why they end. The newest checkpoint must be
complete, and not older than the last one that was announced. A round that fails
ends the program and leaves its directory, where the logs say what the tasks
were doing.
"""

import contextlib
import pathlib
import random
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable

from absl import app
from absl import flags

from experiments.support import programs
from tf_replicas import cluster
from tf_replicas.cluster import local_cluster
from tf_replicas.session import checkpoints

FLAGS = flags.FLAGS
flags.DEFINE_integer("rounds", 20, "The number of trainings", lower_bound=1)
flags.DEFINE_integer(
  "kills",
  3,
  "The number of kills before the end of each training",
  lower_bound=1,
)
flags.DEFINE_integer(
  "seed", 0, "The seed that decides what is killed, and when"
)
flags.DEFINE_float(
  "deadline_secs",
  120,
  "How many seconds a training may take to recover, or to end",
)
flags.DEFINE_enum(
  "replication",
  "between_graph",
  ["between_graph", "in_graph"],
  "The driver of the training",
)

_CHIEF = cluster.Task("chief", 0)
_SAVED = re.compile(r"^saved .*-(\d+)$", re.MULTILINE)
# Of a chief that was killed in its first update, before any checkpoint.
_CANNOT_GO_ON = "the chief was killed in the middle of an update"
_INTERRUPTED = "interrupted; last checkpoint: "
# After a step was logged, and after the tasks were started.
_LATEST_SECS, _LATEST_START_SECS = 1.5, 8.0


class Failed(Exception):
  """Reports that a training did not react to a kill as it should."""


class Round:
  """Runs one training, from its start to its end, and kills tasks of it."""

  def __init__(self, directory: str, dice: random.Random, train_flags):
    """Prepares the cluster of the training, and starts nothing yet.

    Args:
      directory: A directory for the files of this training only.
      dice: The source of random numbers, which decides what happens when.
      train_flags: More flags for the training program.
    """
    jobs = {"ps": 2, "worker": 2, "chief": 1}
    self._spec = cluster.resolve_ports(
      cluster.parse({job: ["localhost:0"] * n for job, n in jobs.items()})
    )
    self._dice = dice
    self._train_dir = pathlib.Path(directory, "train")
    path = pathlib.Path(directory, "spec.json")
    path.write_text(self._spec.to_json())

    def command(task):
      return [
        *[sys.executable, "-X", "faulthandler"],
        *["-m", "cifar10.distributed_train", f"--cluster_spec={path}"],
        f"--train_dir={self._train_dir}",
        f"--replication={FLAGS.replication}",
        *["--dataset=synthetic", "--batch_size=16", "--max_steps=1000000"],
        *["--checkpoint_every_steps=5", "--start_timeout_secs=60"],
        "--recovery_timeout_secs=0",  # The death of a PS is the end.
        *train_flags,
        *[f"--job_name={task.job}", f"--task_index={task.index}"],
      ]

    self._tasks = local_cluster.LocalCluster(
      self._spec, command, log_dir=directory
    )

  def run(self) -> list[str]:
    """Runs the training, kills tasks, and checks what happens then.

    Returns:
      What was done, in order, each with the seconds until all was well again.

    Raises:
      Failed: If the training did not go on, or end as it should, in time.
    """
    done = []
    with self._tasks:
      self._tasks.start()
      for _ in range(FLAGS.kills):
        victim = self._dice.choice([_CHIEF, *self._spec.tasks("worker")])
        self._await_moment()
        seen = len(self._log())
        done.append(self._act(f"{victim}", lambda v=victim: self._restart(v)))
        if not self._has_gone_on(seen):
          return done
      self._await_moment()
      if self._dice.random() < 0.5:
        done.append(self._act("Ctrl-C", self._interrupt))
      else:
        ps = self._dice.choice(self._spec.tasks("ps"))
        done.append(self._act(f"{ps}", lambda: self._lose(ps)))
    return done

  def _log(self) -> str:
    return self._tasks.log(_CHIEF)

  def _await_moment(self) -> None:
    """Waits until a random moment, at which a task is to be killed.

    It is while the tasks start, or soon after a step was logged.
    """
    if self._log() or self._dice.random() < 0.5:
      seen = len(self._log())
      self._await(lambda: self._has_gone_on(seen) or self._has_given_up())
      time.sleep(self._dice.uniform(0, _LATEST_SECS))
    else:
      time.sleep(self._dice.uniform(0, _LATEST_START_SECS))

  def _act(self, name: str, action: Callable[[], None]) -> str:
    since = time.monotonic()
    action()
    secs = time.monotonic() - since
    saved = self._last_saved()
    latest = checkpoints.latest(self._train_dir)
    step = checkpoints.read(latest)["global_step"] if latest else 0
    if step < saved:
      raise Failed(
        f"{name}: step {saved} was saved, but the newest checkpoint is of step"
        f" {step}"
      )
    return f"{name} {secs:.1f} s"

  def _last_saved(self) -> int:
    return max(map(int, _SAVED.findall(self._log())), default=0)

  def _has_gone_on(self, seen: int) -> bool:
    return bool(programs.LOG_LINE.search(self._log()[seen:]))

  def _has_given_up(self) -> bool:
    return _CANNOT_GO_ON in self._log() and not self._running()

  def _running(self) -> list[cluster.Task]:
    tasks = self._spec.tasks()
    return [t for t in tasks if self._tasks.returncode(t) is None]

  def _restart(self, victim: cluster.Task) -> None:
    self._tasks.kill(victim)
    seen = len(self._log())
    self._tasks.start(victim)
    self._await(lambda: self._has_gone_on(seen) or self._has_given_up())

  def _interrupt(self) -> None:
    self._tasks.kill(_CHIEF, signal.SIGTERM)
    self._await(lambda: not self._running())
    if _INTERRUPTED not in self._log():
      raise Failed("the chief was interrupted, and ended without a message")

  def _lose(self, ps: cluster.Task) -> None:
    self._tasks.kill(ps)
    self._await(lambda: not self._running())
    clients = [_CHIEF]
    if FLAGS.replication == "between_graph":
      clients += self._spec.tasks("worker")
    for client in clients:
      if "error: " not in self._tasks.log(client):
        raise Failed(f"{client} ended without a message after {ps} was killed")

  def _await(self, condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + FLAGS.deadline_secs
    while True:
      running = self._running()
      if condition():
        return
      if not running:
        raise Failed("all tasks have ended")
      if time.monotonic() > deadline:
        for task in running:  # They say where they are.
          self._tasks.kill(task, signal.SIGABRT)
        time.sleep(2)
        names = ", ".join(map(str, running))
        raise Failed(f"{names} still waited after {FLAGS.deadline_secs:.0f} s")
      time.sleep(0.02)


def main(argv: list[str]) -> None:
  dice = random.Random(FLAGS.seed)
  for number in range(1, FLAGS.rounds + 1):
    directory = tempfile.mkdtemp(prefix="kills")
    try:
      done = Round(directory, dice, argv[1:]).run()
    except (Failed, checkpoints.CheckpointError) as failure:
      sys.exit(f"round {number} failed: {failure}; logs: {directory}")
    with contextlib.suppress(OSError):
      shutil.rmtree(directory)
    print(f"round {number} of {FLAGS.rounds}: {', '.join(done)}", flush=True)


if __name__ == "__main__":
  app.run(main)
