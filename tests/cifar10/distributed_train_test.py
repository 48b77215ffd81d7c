"""The binary as a user runs it: whole clusters, bad input, Ctrl-C."""

import collections
import contextlib
import functools
import json
import os
import pathlib
import re
import shutil
import signal
import socket
import subprocess
import time
from typing import NamedTuple

import pytest

from experiments.simulator import recorded_run
from tests.support import binaries
from tests.support import trials
from tf_replicas import cluster
from tf_replicas.session import checkpoints

# How long a parameter server that received SIGTERM waits for a checkpoint.
PS_SECS = 8
MODULE = "cifar10.distributed_train"
run = functools.partial(binaries.run, MODULE)


def train_flags(train_dir, *more: str) -> list[str]:
  """Flags of a quick run on a local cluster."""
  return [
    "--cluster_spec=cluster_specs/local_1ps_2workers.json",
    "--dataset=synthetic",
    f"--train_dir={train_dir}",
    "--batch_size=16",
    "--learning_rate=0.05",
    *more,
  ]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
  """A run of both drivers: 20 steps between-graph, 20 more in-graph."""
  train_dir = tmp_path_factory.mktemp("train")
  first = run(*train_flags(train_dir, "--max_steps=20", "--timeline"))
  second = run(
    *train_flags(
      train_dir, "--max_steps=40", "--replication=in_graph", "--timeline"
    )
  )
  return train_dir, first, second


class TestTraining:
  def test_both_drivers_end_by_themselves_with_status_0(self, trained):
    _, first, second = trained
    assert first.returncode == 0, first.stdout + first.stderr
    assert second.returncode == 0, second.stdout + second.stderr

  def test_log_lines_have_the_tutorials_form(self, trained):
    _, first, second = trained
    assert binaries.logged_steps(first.stdout) == [10, 20]
    assert binaries.logged_steps(second.stdout) == [30, 40]

  def test_each_line_is_there_once(self, trained):
    train_dir, first, _ = trained
    binaries.assert_tidy(first.stdout)
    assert not first.stderr
    for line in (
      "cluster: ps 0 at localhost:",
      "[worker 0] replication: between_graph; 2 replicas with 1 tower of batch"
      " 16 each; sync updates of 2 contributions: effective batch 32\n",
      "[worker 0] training from step 0 to 20\n",
      f"[worker 0] saved {train_dir}/model.ckpt-20\n",
    ):
      assert first.stdout.count(line) == 1, (line, first.stdout)
    pattern = r"; learning rate 0\.05; \d+:\d\d:\d\d left to step 20\n"
    assert len(re.findall(pattern, first.stdout)) == 1

  def test_every_contribution_is_accounted_for(self, trained):
    _, first, second = trained
    for output in (first.stdout, second.stdout):
      for worker in (0, 1):
        line = f"worker {worker}: 20 contributions applied, 0 refused"
        assert line in output

  def test_the_second_run_resumed_the_first(self, trained):
    train_dir, _, second = trained
    assert f"restored {train_dir}/model.ckpt-20" in second.stdout
    state = checkpoints.read(checkpoints.latest(train_dir))
    assert state["global_step"] == 40
    assert state["examples_seen"] == 40 * 2 * 16

  def test_timelines_of_both_drivers_have_every_turn(self, trained):
    events = recorded_run.read(str(trained[0] / "timeline"))
    turns = collections.Counter((e.task, e.step, e.kind) for e in events)
    for step in range(40):
      assert turns["chief", step, "apply"] == 1
      for worker in ("worker:0", "worker:1"):
        for kind in ("compute", "hand_over"):
          # What the first run's end overtook, the second did again.
          most = 2 if step == 20 else 1
          assert 1 <= turns[worker, step, kind] <= most, (worker, step, kind)
        # What was read at the end of a run is not used.
        assert step in (0, 20) or turns[worker, step, "read"] >= 1
    updated = {e.step: e.end for e in events if e.kind == "apply"}
    for event in events:
      if event.kind == "compute" and event.step < 40:
        assert event.end <= updated[event.step]
        assert event.step in (0, 20) or event.start >= updated[event.step - 1]

  def test_placement_table_is_printed(self, trained):
    _, first, _ = trained
    assert "Total: 10 variables, 1,068,298 parameters, 4.1 MiB" in first.stdout

  def test_each_task_has_a_log_of_its_own(self, trained):
    """Beside the spec with the ports, for `tf_replicas.status`."""
    train_dir, _, _ = trained
    names = {path.name for path in (train_dir / "logs").iterdir()}
    expected = {"ps_0.log", "worker_0.log", "worker_1.log", "chief_0.log"}
    expected.add("cluster.json")
    assert names == expected

  def test_eval_counts_each_image_once(self, trained):
    train_dir, _, _ = trained
    output = binaries.succeed(
      "cifar10.eval", f"--train_dir={train_dir}", "--run_once"
    )
    pattern = r"precision @ 1 = 0\.\d{4} \[1000 examples\]"
    assert re.search(pattern, output)

  def test_continuous_eval_ends_with_the_finished_run(self, trained):
    train_dir, _, _ = trained
    output = binaries.succeed("cifar10.eval", f"--train_dir={train_dir}")
    assert output.count("precision @ 1") == 1

  def test_a_finished_run_ends_at_once(self, trained, tmp_path):
    """Nobody takes a step; the workers, who are slower to begin, leave too."""
    shutil.copytree(trained[0], tmp_path / "run")
    result = run(*train_flags(tmp_path / "run", "--max_steps=40"))
    assert result.returncode == 0, result.stdout + result.stderr
    assert binaries.logged_steps(result.stdout) == []
    assert "lost touch" not in result.stdout
    assert "shutting down anyway" not in result.stdout
    state = checkpoints.read(checkpoints.latest(tmp_path / "run"))
    assert state["global_step"] == 40

  def test_a_directory_of_another_model_is_refused_untouched(
    self, trained, tmp_path
  ):
    state = {
      "global_step": 7,
      "examples_seen": 7,
      "variables/conv1/kernel": [1.0, 2.0],
    }
    import numpy as np

    checkpoints.save(
      str(tmp_path), {name: np.asarray(v) for name, v in state.items()}
    )
    before = {p.name: p.read_bytes() for p in tmp_path.glob("model.ckpt*")}
    result = run(*train_flags(tmp_path, "--max_steps=9"))
    assert result.returncode == 2
    assert "error: train_dir" in result.stdout
    assert "another model" in result.stdout
    # The others are told, and tell, why.
    for words in re.findall(r"\[worker 1\] error: (.*)", result.stdout):
      assert "another model" in words
    after = {p.name: p.read_bytes() for p in tmp_path.glob("model.ckpt*")}
    assert after == before


@pytest.fixture(scope="module")
def relaxed(trained, tmp_path_factory):
  """The synchronous run, continued by asynchronous rules of both drivers."""
  train_dir = tmp_path_factory.mktemp("relaxed") / "train"
  shutil.copytree(trained[0], train_dir)
  first = run(
    *train_flags(
      train_dir,
      "--max_steps=61",
      "--update=drop_stale,staleness_aware",
      "--max_staleness=9",
      "--use_locking",
      "--wire_dtype=bfloat16",
      "--timeline",
    )
  )
  second = run(
    *train_flags(
      train_dir,
      "--max_steps=70",
      "--replication=in_graph",
      "--update=softsync",
      "--softsync_n=1",
      "--refresh_every=2",
      "--snapshot_reads",
    )
  )
  return train_dir, first, second


@pytest.fixture(
  scope="module",
  params=[
    "between_graph",
    pytest.param("in_graph", marks=pytest.mark.exhaustive),
  ],
)
def switched(request, trained, tmp_path_factory):
  """The synchronous run, continued by one that becomes asynchronous."""
  train_dir = tmp_path_factory.mktemp("switched") / "train"
  shutil.copytree(trained[0], train_dir)
  more = ["--then_update=async", "--switch_at_step=45", "--max_steps=50"]
  return train_dir, run(
    *train_flags(train_dir, f"--replication={request.param}", *more)
  )


class TestSwitching:
  def test_ends_at_the_very_step(self, switched):
    train_dir, result = switched
    assert result.returncode == 0, result.stdout + result.stderr
    assert "shutting down anyway" not in result.stdout
    state = checkpoints.read(checkpoints.latest(train_dir))
    assert state["global_step"] == 50
    # 45 updates of two batches, 5 of one.
    assert state["examples_seen"] == (90 + 5) * 16

  def test_every_gradient_is_accounted_for(self, switched):
    pattern = r"worker \d: (\d+) contributions applied"
    assert sum(map(int, re.findall(pattern, switched[1].stdout))) == 10 + 5


class TestAsynchronousTraining:
  def test_resumes_and_ends_at_the_very_step(self, relaxed):
    train_dir, first, second = relaxed
    assert first.returncode == 0, first.stdout + first.stderr
    assert f"restored {train_dir}/model.ckpt-40" in first.stdout
    assert second.returncode == 0, second.stdout + second.stderr
    assert f"restored {train_dir}/model.ckpt-61" in second.stdout
    state = checkpoints.read(checkpoints.latest(train_dir))
    assert state["global_step"] == 70
    # 40 updates of two batches, 21 of one, 9 of two.
    assert state["examples_seen"] == (80 + 21 + 18) * 16

  def test_the_timeline_has_every_update(self, relaxed):
    events = recorded_run.read(str(relaxed[0] / "timeline"))
    applied = [e for e in events if e.kind == "apply" and e.task != "chief"]
    assert len(applied) == 21
    # The first worker up may make them all.
    pattern = r"worker (\d): (\d+) contributions applied"
    told = re.findall(pattern, relaxed[1].stdout)
    assert collections.Counter(e.task for e in applied) == collections.Counter(
      {f"worker:{worker}": int(number) for worker, number in told}
    )

  @pytest.mark.parametrize("number, applied", [(1, 21), (2, 18)])
  def test_every_gradient_is_accounted_for(self, relaxed, number, applied):
    output = relaxed[number].stdout
    pattern = r"worker \d: (\d+) contributions applied.*; staleness [\d.]+ on"
    assert sum(map(int, re.findall(pattern, output))) == applied


@pytest.mark.parametrize(
  ("signum", "hangs"),
  [
    (signal.SIGINT, False),
    pytest.param(signal.SIGTERM, True, marks=pytest.mark.exhaustive),
  ],
)
def test_an_interrupt_saves_and_leaves_no_process(tmp_path, signum, hangs):
  """Also if the step waits for a worker that does not answer any more."""
  flags = train_flags(tmp_path, "--max_steps=100000")
  with trials.running(
    binaries.command(MODULE, *flags), environ=binaries.environ()
  ) as process:
    output = trials.read_until("step 10,", process)
    _, *tasks = trials.descendants(process.pid)  # After the fork server.
    assert len(tasks) == 3, output
    if hangs:
      os.kill(tasks[-1], signal.SIGSTOP)
      time.sleep(1)  # The chief has nothing else to do by then.
    process.send_signal(signum)
    rest, _ = process.communicate(timeout=60)
  assert process.returncode == 128 + signum, output + rest
  assert checkpoints.latest(str(tmp_path)) is not None, rest
  for pid in tasks:
    assert not pathlib.Path(f"/proc/{pid}").exists()


@pytest.mark.parametrize(
  "replication",
  [
    "between_graph",
    pytest.param("in_graph", marks=pytest.mark.exhaustive),
  ],
)
def test_sigterm_for_all_processes_saves(tmp_path, replication):
  """As a cluster manager sends it: to the launcher and to all tasks."""
  flags = train_flags(
    tmp_path, f"--replication={replication}", "--max_steps=100000"
  )
  with trials.running(
    binaries.command(MODULE, *flags), environ=binaries.environ()
  ) as process:
    output = trials.read_until("step 10,", process)
    tasks = trials.descendants(process.pid)
    signaled = time.monotonic()
    for pid in (process.pid, *tasks):
      with contextlib.suppress(ProcessLookupError):  # It has just ended.
        os.kill(pid, signal.SIGTERM)
    rest, _ = process.communicate(timeout=trials.DEADLINE_SECS)
    secs = time.monotonic() - signaled
  output += rest
  assert process.returncode == 128 + signal.SIGTERM, output
  assert re.search(r"training stops; last checkpoint: .*ckpt-\d+", output)
  # On a slow machine, the parameter server may end before all workers have.
  if secs < PS_SECS:
    assert "not all workers have stopped in time" not in output
  assert "Traceback" not in output
  for pid in tasks:
    assert not pathlib.Path(f"/proc/{pid}").exists()


class _End(NamedTuple):
  """How a training went whose parameter server got a signal at step 10.

  Attributes:
    status: The exit status.
    output: What the training printed.
    tasks: The processes.
    save_secs: The seconds from SIGTERM until the next checkpoint was seen to be
      saved: at least as many as it took. None after another signal.
  """

  status: int
  output: str
  tasks: list[int]
  save_secs: float | None


def _end_ps_at_step_10(
  flags, signum=signal.SIGKILL, *, without_worker=False
) -> _End:
  """Trains, and sends a signal to the parameter server at step 10.

  Args:
    flags: The flags of the program.
    signum: The signal that the parameter server gets.
    without_worker: Whether the last worker stands still meanwhile.
  """
  save_secs = None
  with trials.running(
    binaries.command(MODULE, *flags),
    environ=binaries.environ(),
    deadline_secs=2 * trials.DEADLINE_SECS,
  ) as process:
    output = trials.read_until("step 10,", process)
    tasks = trials.descendants(process.pid)
    (ps,) = (
      task
      for task in tasks
      if b"--job_name=ps" in pathlib.Path(f"/proc/{task}/cmdline").read_bytes()
    )
    if without_worker:
      os.kill(tasks[-1], signal.SIGSTOP)
      time.sleep(1)  # The step waits for it by then.
    signaled = time.monotonic()
    os.kill(ps, signum)
    if signum == signal.SIGTERM:
      output += trials.read_until("saved", process)
      save_secs = time.monotonic() - signaled
    if without_worker:
      os.kill(tasks[-1], signal.SIGCONT)
    rest, _ = process.communicate(timeout=trials.DEADLINE_SECS)
  return _End(process.returncode, output + rest, tasks, save_secs)


def test_the_launcher_restarts_a_parameter_server(tmp_path):
  flags = train_flags(tmp_path, "--max_steps=60", "--checkpoint_every_steps=5")
  status, output, *_ = _end_ps_at_step_10(flags)
  assert status == 0, output
  assert "ps 0 was killed by SIGKILL; restarting it" in output
  assert output.count("recovered from the loss of ps 0 at step") == 2
  assert "Traceback" not in output
  assert checkpoints.read_finished(tmp_path).global_step == 60


@pytest.mark.parametrize(
  ("replication", "without_worker"),
  [
    pytest.param("between_graph", False, marks=pytest.mark.exhaustive),
    ("between_graph", True),
    pytest.param("in_graph", False, marks=pytest.mark.exhaustive),
  ],
)
def test_no_update_is_lost_if_a_parameter_server_gets_sigterm(
  tmp_path, replication, without_worker
):
  """Though no checkpoint is due, and even if the step waits for a worker."""
  flags = train_flags(
    tmp_path, f"--replication={replication}", "--max_steps=100"
  )
  status, output, _, save_secs = _end_ps_at_step_10(
    flags, signal.SIGTERM, without_worker=without_worker
  )
  assert status == 0, output
  assert "[ps 0] ps 0 received SIGTERM; it ends after a checkpoint" in output
  assert "ps 0 was killed by SIGTERM; restarting it" in output
  found = re.search(
    r"recovered from the loss of ps 0 at step (\d+) in .* s: resumed at step"
    r" (\d+), so (\d+) updates were made again",
    output,
  )
  assert found is not None, output
  step, resumed, repeated = map(int, found.groups())
  # On a slow machine, the parameter server may end before the checkpoint.
  if save_secs < PS_SECS:
    assert step == resumed >= 10, output
    assert repeated == 0, output
  assert "Traceback" not in output
  assert checkpoints.read_finished(tmp_path).global_step == 100


@pytest.mark.exhaustive
@pytest.mark.parametrize(
  ("replication", "clients"),
  [("between_graph", ["worker 0", "worker 1"]), ("in_graph", ["chief 0"])],
)
def test_the_death_of_a_parameter_server_ends_the_training(
  tmp_path, replication, clients
):
  """With words, not with pages of TensorFlow; what was saved stays."""
  flags = train_flags(
    tmp_path,
    f"--replication={replication}",
    "--max_steps=100000",
    "--checkpoint_every_steps=5",
    "--recovery_timeout_secs=0",
  )
  status, output, tasks, _ = _end_ps_at_step_10(flags)
  assert status not in (0, None), output
  assert "Traceback" not in output
  for task in clients:  # One that is slow to notice is stopped.
    stopped = rf"\[launcher\] {task} is still running; stopping it"
    assert re.search(rf"\[{task}\] error: .+|{stopped}", output), output
  for pid in tasks:
    assert not pathlib.Path(f"/proc/{pid}").exists()
  state = checkpoints.read(checkpoints.latest(tmp_path))
  assert state["global_step"] >= 5


def test_a_parameter_server_needs_no_data(tmp_path):
  spec = cluster.resolve_ports(
    cluster.parse({"ps": ["localhost:0"], "worker": ["localhost:0"]})
  )
  (tmp_path / "spec.json").write_text(spec.to_json())
  flags = train_flags(
    tmp_path / "run",
    f"--cluster_spec={tmp_path / 'spec.json'}",
    "--dataset=cifar10",
    f"--data_dir={tmp_path / 'nowhere'}",
    "--job_name=ps",
    "--task_index=0",
  )
  with trials.running(
    binaries.command(MODULE, *flags),
    environ=binaries.environ(),
    stderr=subprocess.DEVNULL,
  ) as process:
    assert process.stdout.readline().startswith("ps 0 serves at localhost:")


class TestBadInput:
  refuse = functools.partial(binaries.refuse, MODULE)

  def test_unknown_dataset(self, tmp_path):
    flags = train_flags(tmp_path / "run", "--dataset=cifar11")
    self.refuse("cifar11", *flags)
    assert not (tmp_path / "run").exists()

  def test_truncated_file(self, tmp_path):
    for name in binaries.TEST_FILES:
      (tmp_path / name).write_bytes(bytes(3073 * 10_000))
    (tmp_path / "data_batch_3.bin").write_bytes(bytes(3073 * 10_000 - 1))
    flags = train_flags(
      tmp_path / "run", "--dataset=cifar10", f"--data_dir={tmp_path}"
    )
    self.refuse("data_batch_3.bin", *flags)

  def test_mistake_in_the_spec(self, tmp_path):
    spec = tmp_path / "spec.json"
    spec.write_text(json.dumps({"ps": ["localhost:99999"], "worker": ["a:1"]}))
    flags = train_flags(tmp_path / "run", f"--cluster_spec={spec}")
    self.refuse("ps[0]", *flags)

  def test_port_in_use(self, tmp_path):
    with socket.socket() as taken:
      taken.bind(("0.0.0.0", 0))
      taken.listen()
      port = taken.getsockname()[1]
      spec = tmp_path / "spec.json"
      jobs = {"ps": [f"localhost:{port}"], "worker": ["localhost:0"]}
      spec.write_text(json.dumps(jobs))
      flags = train_flags(tmp_path / "run", f"--cluster_spec={spec}")
      self.refuse(f"{port}", *flags)

  def test_an_optimizer_of_whole_variables(self, tmp_path):
    spec = "cluster_specs/local_2ps_3workers.json"
    flags = train_flags(
      tmp_path / "run", f"--cluster_spec={spec}", "--recipe=modern"
    )
    self.refuse(f"{spec}: `variables.placement` must be 'greedy'", *flags)

  def test_impossible_replica_count(self, tmp_path):
    flags = train_flags(tmp_path / "run", "--replicas_to_aggregate=0")
    self.refuse("replicas_to_aggregate", *flags)

  def test_rules_that_do_not_go_together(self, tmp_path):
    flags = train_flags(tmp_path / "run", "--update=sync,drop_stale")
    self.refuse("--update", *flags)

  @pytest.mark.parametrize(
    "flag",
    ["--no_such_flag", "--batch_size=0", "--keep_checkpoints=0", "surplus"],
  )
  def test_flags(self, tmp_path, flag):
    flags = train_flags(tmp_path / "run", flag)
    self.refuse(flag.strip("-").partition("=")[0], *flags)

  def test_dry_run_starts_nothing(self, tmp_path):
    spec = tmp_path / "spec.json"
    spec.write_text(json.dumps({"ps": ["h0:1", "h1:1"], "worker": ["h2:1"]}))
    flags = train_flags(tmp_path / "run", f"--cluster_spec={spec}")
    result = run(*flags, "--dry_run", timeout=300)
    assert result.returncode == 0, result.stderr
    assert "effective batch 16" in result.stdout
    assert "/job:ps/task:1" in result.stdout
    assert not (tmp_path / "run").exists()

  def test_dry_run_of_one_task_is_of_all(self, tmp_path):
    """Also of one that only serves."""
    spec = tmp_path / "spec.json"
    spec.write_text(json.dumps({"ps": ["h0:1"], "worker": ["h2:1"]}))
    flags = train_flags(tmp_path / "run", f"--cluster_spec={spec}")
    result = run(*flags, "--job_name=ps", "--task_index=0", "--dry_run")
    assert result.returncode == 0, result.stderr
    assert "/job:ps/task:0" in result.stdout
    assert not (tmp_path / "run").exists()

  @pytest.mark.parametrize(
    "more", [["--update=model_average"], ["--then_update=async"]]
  )
  def test_scaled_rates_are_of_one_number_of_batches(self, tmp_path, more):
    if "--then_update=async" in more:
      more = [*more, "--switch_at_step=5", "--max_steps=9"]
    flags = train_flags(tmp_path / "run", "--scale_learning_rate", *more)
    self.refuse("`--scale_learning_rate` needs", *flags)

  def test_a_cycle_ends_with_the_run(self, tmp_path):
    """By two rules, it would end elsewhere."""
    more = ["--then_update=async", "--switch_at_step=5", "--max_steps=9"]
    flags = train_flags(tmp_path / "run", "--recipe=modern", *more)
    self.refuse("`--then_update` with the recipe modern", *flags)
