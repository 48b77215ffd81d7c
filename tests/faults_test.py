"""Tests of what becomes of a training when something dies or goes wrong."""

import pathlib
import signal

import numpy as np
import pytest

from tests.support import trials
from tf_replicas import cluster
from tf_replicas.drivers import cluster_status
from tf_replicas.session import checkpoints

# The learning rate of `cluster_task.constant_gradients`.
RATE = 2.0
_CHIEF = cluster.Task("chief", 0)


def _worker(index):
  return cluster.Task("worker", index)


def _assert_steps(report, steps, mean):
  """`steps` updates of v0 by `mean`, each of exactly its contributions."""
  assert [s["global_step"] for s in report["steps"]] == [*range(1, steps + 1)]
  np.testing.assert_allclose(
    [s["state"]["variables/v0"] for s in report["steps"]],
    [-RATE * mean * step for step in range(1, steps + 1)],
    rtol=1e-5,
  )


def _report_after_a_restart(start_trial, scenario, replication):
  """Of two workers, the second was killed after two steps, and restarted."""
  trial = start_trial(
    scenario,
    trials.document(1, 2, chief=1),
    replication=replication,
    lost_after_secs=3,
  )
  trial.await_mark("step 2 is made")
  trial.kill(_worker(1))
  trial.mark("worker 1 is dead")
  trial.tasks.start(_worker(1))
  trial.await_success()
  return trial.report()


def _assert_seen_from_outside(trial):
  """Three updates are made, and worker 1 has died."""
  reader = cluster_status.ClusterReader(trial.spec, timeout_secs=60)
  status = reader.read()
  reader.close()
  assert (status.state, status.global_step) == ("running", 3)
  assert status.rule["replicas_to_aggregate"] == status.needed == 3
  assert status.parameter_bytes == 7 * 4
  assert [task.error for task in status.serving] == ["", ""]
  assert all(task.memory_bytes > 1 << 20 for task in status.serving)
  assert sum(task.queued_gradients for task in status.serving) == 4
  assert [c.presence for c in status.clients] == ["alive", "silent", "alive"]
  assert [r.applied for r in status.replicas] == [3, 3, 3]
  assert status.waits == (
    "update 4 has 2 of 3 contributions; worker 0 and worker 2 wait for worker 1"
    " (lost)",
  )
  (fault,) = status.faults
  assert "worker 1: no heartbeat for" in fault
  assert "declared lost" in fault


def _assert_warned_of_open_ports(trial):
  """The spec says localhost, and the servers listen everywhere."""
  for address in trial.spec.addresses("ps"):
    port = f":{int(address.rpartition(':')[2]):04X}"
    rows = [
      line.split()
      for name in ("tcp", "tcp6")
      for line in pathlib.Path("/proc/net", name).read_text().splitlines()
    ]
    listening = [row[1] for row in rows if row[3] == "0A"]  # Its state.
    (host,) = {
      local.partition(":")[0] for local in listening if local.endswith(port)
    }
    assert not int(host, 16)
  assert trial.all_logs().count("without authentication") == 1


def test_training_waits_for_the_restart_of_a_worker(start_trial):
  trial = start_trial(
    "killed_after_delivery", trials.document(2, 3), lost_after_secs=3
  )
  trial.await_mark("worker 1 has delivered")
  trial.kill(_worker(1))
  trial.mark("worker 1 is dead")
  trial.await_log(_worker(0), "worker 1: no heartbeat for")
  trial.await_log(_worker(0), "step 3: waiting for")
  for task in (_worker(0), cluster.Task("ps", 0)):
    trial.tasks.kill(task, signal.SIGUSR1)
    trial.await_log(task, "Current thread 0x")
  assert not (trial.directory / "over").exists()
  _assert_seen_from_outside(trial)
  _assert_warned_of_open_ports(trial)
  trial.tasks.start(_worker(1))
  trial.await_success()
  report = trial.report()
  _assert_steps(report, 6, (0.1 + 0.3 + 0.5) / 3)
  # What was delivered before the death counts.
  assert [applied for applied, _, _ in report["counts"]] == [6, 6, 6]
  log = trial.log("worker", 0)
  assert trials.SECRET not in trial.all_logs()
  assert "2 of 3 contributions received" in log
  assert "worker 1: lost" in log


@pytest.mark.exhaustive
def test_two_workers_die_at_once(start_trial):
  trial = start_trial(
    "killed_between_steps", trials.document(1, 3), lost_after_secs=3
  )
  trial.await_mark("step 2 is made")
  for index in (1, 2):
    trial.kill(_worker(index))
  trial.mark("worker 1 is dead")
  dead = {1, 2}

  def reported():
    log = trial.tasks.log(_worker(0))
    return [i for i in dead if f"worker {i}: no heartbeat for" in log]

  # A worker that had delivered its gradients is missed only in the next step.
  while dead:
    trial.await_that(reported, f"the report that one of {dead} is lost")
    for index in reported():
      trial.tasks.start(_worker(index))
      dead.remove(index)
  trial.await_success()
  report = trial.report()
  _assert_steps(report, 6, (0.1 + 0.3 + 0.5) / 3)
  assert [applied for applied, _, _ in report["counts"]] == [6, 6, 6]
  for index in range(3):
    assert "threads that are left: []" in trial.log("worker", index)


def test_in_graph_training_waits_for_the_restart_of_a_worker(start_trial):
  report = _report_after_a_restart(
    start_trial, "killed_between_steps", "in_graph"
  )
  _assert_steps(report, 6, (0.1 + 0.3) / 2)
  assert [applied for applied, _, _ in report["counts"]] == [6, 6]


def test_in_graph_worker_that_hangs_is_given_up(start_trial):
  trial = start_trial(
    "killed_between_steps",
    trials.document(1, 2, chief=1),
    replication="in_graph",
    lost_after_secs=3,
  )
  trial.await_mark("step 2 is made")
  # The system still accepts connections for it.
  trial.tasks.kill(_worker(1), signal.SIGSTOP)
  trial.mark("worker 1 is dead")
  trial.await_log(_CHIEF, "worker 1: no heartbeat for")
  trial.tasks.kill(_worker(1), signal.SIGCONT)
  trial.await_success()
  report = trial.report()
  _assert_steps(report, 6, (0.1 + 0.3) / 2)
  assert [applied for applied, _, _ in report["counts"]] == [6, 6]


@pytest.mark.exhaustive
@pytest.mark.parametrize("is_gated", [False, True])
def test_in_graph_worker_that_hangs_from_the_start_is_given_up(
  start_trial, is_gated
):
  """To trace anything then would silence the client until it goes on."""
  trial = start_trial(
    "stands_still_early",
    trials.document(1, 2, chief=1),
    replication="in_graph",
    lost_after_secs=8,
    is_gated=is_gated,
  )
  trial.await_mark("it has begun")
  trial.tasks.kill(_worker(1), signal.SIGSTOP)
  trial.mark("worker 1 stands still")
  trial.await_log(_CHIEF, "worker 1: no heartbeat for")
  trial.mark("that was told")
  trial.await_log(_CHIEF, "not all workers have stopped")
  trial.kill(_worker(1))
  trial.await_end(_CHIEF)
  assert trial.tasks.returncode(_CHIEF) == 0


def test_a_parameter_server_that_stands_still_is_told_of(start_trial):
  trial = start_trial("killed_between_steps", trials.document(1, 2))
  trial.await_mark("step 2 is made")
  ps = cluster.Task("ps", 0)
  trial.tasks.kill(ps, signal.SIGSTOP)
  trial.mark("worker 1 is dead")
  for worker in (0, 1):
    trial.await_log(_worker(worker), "waiting for an answer of ps 0: 1")
  reader = cluster_status.ClusterReader(trial.spec, timeout_secs=0.5)
  status = reader.read()
  assert [task.error for task in status.serving] == ["no answer for 0.5 s"]
  assert "ps 0 at localhost:" in status.faults[0]
  trial.tasks.kill(ps, signal.SIGCONT)
  trial.await_success()
  _assert_steps(trial.report(), 6, (0.1 + 0.3) / 2)
  assert reader.read().serving[0].error  # It has ended.


def test_a_parameter_server_that_never_answers_ends_its_clients(start_trial):
  """It is connected, so nothing fails; the clients wait in TensorFlow."""
  trial = start_trial(
    "killed_between_steps", trials.document(1, 2), recovery_timeout_secs=6
  )
  trial.await_mark("step 2 is made")
  trial.tasks.kill(cluster.Task("ps", 0), signal.SIGSTOP)
  for index in (0, 1):
    assert trial.ends_within(_worker(index), 60), trial.all_logs()
    assert trial.tasks.returncode(_worker(index)) == 1
    message = "error: waiting for an answer of ps 0: gave up after 6 s"
    assert message in trial.log("worker", index)


@pytest.mark.parametrize(
  "replication",
  [
    "between_graph",
    pytest.param("in_graph", marks=pytest.mark.exhaustive),
  ],
)
def test_steps_go_on_without_a_worker_that_exceeds_their_deadline(
  start_trial, replication
):
  trial = start_trial(
    "exceeds_deadline",
    trials.document(1, 2, chief=int(replication == "in_graph")),
    replication=replication,
    step_timeout_secs=5,
    min_contributions=1,
    lost_after_secs=60,
  )
  trial.await_mark("step 2 is made")
  trial.tasks.kill(_worker(1), signal.SIGSTOP)
  trial.mark("worker 1 stands still")
  trial.await_log(trial.spec.chief, "missing: worker 1. Updates go on without")
  trial.await_mark("step 4 is made")
  trial.tasks.kill(_worker(1), signal.SIGCONT)
  trial.mark("worker 1 goes on")
  trial.await_success()
  steps = trial.report()["steps"]
  values = [step["state"]["variables/v0"] for step in steps]
  # Both workers, or worker 0 alone. The frozen one may have sent a gradient.
  changes = np.diff([0.0, *values]) / -RATE
  kinds = [0.1 if abs(change - 0.1) < 1e-4 else 0.2 for change in changes]
  np.testing.assert_allclose(changes, kinds, rtol=1e-4)
  assert kinds[:2] == [0.2, 0.2]
  assert kinds[3] == 0.1
  assert len(steps) == 6


def test_workers_come_and_go(start_trial):
  """Worker 2 comes late, and worker 1 dies and is restarted."""
  trial = start_trial(
    "come_and_go",
    trials.document(1, 3),
    absent=[_worker(2)],
    min_contributions=1,
    lost_after_secs=2,
  )
  trial.await_mark("moment 0")
  trial.tasks.start(_worker(2))
  trial.await_mark("moment 1")
  trial.kill(_worker(1))
  trial.await_mark("moment 2")
  trial.tasks.start(_worker(1))
  trial.await_success()
  steps, counts, values = zip(*trial.report()["steps"], strict=True)
  assert [*steps] == [*range(1, len(steps) + 1)]
  # The means of the gradients of some workers, by their number.
  means = {1: [0.1, 0.3, 0.5], 2: [0.2, 0.3, 0.4], 3: [0.3]}
  for count, change in zip(counts, np.diff([0.0, *values]), strict=True):
    assert min(abs(-change / RATE - mean) for mean in means[count]) < 1e-3
  log = trial.log("worker", 0)
  assert "worker 2: no heartbeat yet; from step 0 on, updates do not" in log
  assert "worker 1: no heartbeat for" in log
  assert "worker 2: takes part from step" in log


def _come_back(start_trial, scenario, job, replication):
  """A task that stood still goes on beside its successor, and ends."""
  trial = start_trial(
    scenario, trials.document(2, 1, chief=1), replication=replication
  )
  task = cluster.Task(job, 0)
  trial.await_mark("chief 0 has made steps")
  trial.await_mark(f"{task} has joined_0")  # The chief may step without it.
  trial.tasks.kill(task, signal.SIGSTOP)
  with trial.replaced(task) as first:
    trial.await_mark(f"{task} has joined_1")
    first.send_signal(signal.SIGCONT)
    assert first.wait(60)
    trial.await_log(task, "this process was replaced: another one")
    trial.mark("the first has ended")
    trial.await_success()
  return trial.report()


@pytest.mark.parametrize(
  ("job", "replication", "mean"),
  [
    pytest.param(
      "worker",
      "between_graph",
      (0.1 + 0.3) / 2,
      marks=pytest.mark.exhaustive,
    ),
    ("chief", "between_graph", (0.1 + 0.3) / 2),
    pytest.param("chief", "in_graph", 0.1, marks=pytest.mark.exhaustive),
  ],
)
def test_who_comes_back_beside_a_successor_ends(
  start_trial, job, replication, mean
):
  report = _come_back(start_trial, "replaced", job, replication)
  steps, values = zip(*report["steps"], strict=True)
  assert [*steps] == [*range(steps[0], steps[-1] + 1)]
  np.testing.assert_allclose(values, -RATE * mean * np.array(steps), rtol=1e-5)


@pytest.mark.exhaustive
@pytest.mark.parametrize("job", ["worker", "chief"])
def test_who_comes_back_ends_where_nobody_waits(start_trial, job):
  _come_back(start_trial, "replaced_asynchronous", job, "between_graph")


@pytest.mark.parametrize(
  "replication",
  [
    "between_graph",
    pytest.param("in_graph", marks=pytest.mark.exhaustive),
  ],
)
def test_a_restarted_worker_goes_on_where_the_training_is(
  start_trial, replication
):
  report = _report_after_a_restart(
    start_trial, "killed_while_counting", replication
  )
  # Each is the mean over the workers. In-graph, what the killed worker had
  # delivered may be used after its successor has read where to begin. The
  # successor then draws that one batch again.
  losses = [step["loss"] for step in report["steps"]]
  expected = [[0, 1, 2, 3, 4, 5]]
  if replication == "in_graph":
    expected.append([0, 1, 2, 2.5, 3.5, 4.5])
  assert losses in expected


def test_a_restarted_chief_makes_the_update_from_the_same_batches(start_trial):
  trial = start_trial(
    "killed_chief_while_counting", trials.document(1, 1, chief=1)
  )
  trial.await_mark("step 3 is made")
  trial.kill(_CHIEF)
  trial.tasks.start(_CHIEF)
  trial.await_success()
  steps = trial.report()["steps"]
  assert [step["loss"] for step in steps] == [3, 4, 5]


def test_a_worker_gives_up_its_chief_and_both_can_be_started_again(start_trial):
  trial = start_trial(
    "killed_chief", trials.document(1, 1, chief=1), lost_after_secs=2
  )
  trial.await_mark("step 3 is made")
  trial.kill(_CHIEF)
  trial.await_end(_worker(0))
  assert "the chief was lost" in trial.log("worker").splitlines()[-1]
  trial.tasks.start(_CHIEF)
  # Until then, the last heartbeat of a chief is that of the killed one.
  trial.await_mark("chief 0 has joined_1")
  trial.tasks.start(_worker(0))
  trial.await_success()
  assert trial.report()["global_step"] == 6


@pytest.mark.parametrize("replication", ["between_graph", "in_graph"])
def test_a_chief_that_cannot_begin_tells_everyone(start_trial, replication):
  trial = start_trial(
    "chief_cannot_begin",
    trials.document(1, 1, chief=1),
    replication=replication,
  )
  trial.await_end(_CHIEF)
  for task in trial.spec.tasks():
    assert trial.ends_within(task, 30), task
    assert trial.tasks.returncode(task) == 1
    assert "no such optimizer" in trial.log(task.job), task


def _killed_while_updating(start_trial, replication, saves):
  """The chief died in the middle of an update, and is started again."""
  trial = start_trial(
    "killed_while_updating",
    trials.document(2, 2, chief=1),
    replication=replication,
    saves=saves,
  )
  trial.await_mark("half of step 3 is made")
  trial.kill(_CHIEF)
  trial.tasks.start(_CHIEF)
  return trial


@pytest.mark.parametrize(
  ("replication", "mean"),
  [
    ("between_graph", (0.1 + 0.3 + 0.5) / 3),
    pytest.param("in_graph", (0.1 + 0.3) / 2, marks=pytest.mark.exhaustive),
  ],
)
def test_half_an_update_is_taken_back(start_trial, replication, mean):
  """It was killed in the third; the checkpoint of the second is restored."""
  trial = _killed_while_updating(start_trial, replication, saves=True)
  trial.await_success()
  assert f"restored {trial.directory}/train/model.ckpt-2" in trial.log("chief")
  report = trial.report()
  assert report["global_step"] == 6
  np.testing.assert_allclose(
    report["state"]["variables/v0"], -RATE * mean * 6, rtol=1e-5
  )
  np.testing.assert_allclose(
    report["state"]["variables/v1"], 1 - RATE * (mean + 0.8) * 6, rtol=1e-5
  )


@pytest.mark.exhaustive
@pytest.mark.parametrize(
  ("replication", "index", "mean"),
  [
    # The update is half-way on PS task 1; PS task 0 has made its part.
    ("between_graph", 1, (0.1 + 0.3 + 0.5) / 3),
    ("between_graph", 0, (0.1 + 0.3 + 0.5) / 3),
    ("in_graph", 1, (0.1 + 0.3) / 2),
  ],
)
def test_a_parameter_server_dies_in_the_middle_of_an_update(
  start_trial, replication, index, mean
):
  trial = start_trial(
    "killed_while_updating",
    trials.document(2, 2, chief=1),
    replication=replication,
    saves=True,
    recovery_timeout_secs=100,
  )
  trial.await_mark("half of step 3 is made")
  ps = cluster.Task("ps", index)
  trial.kill(ps)
  trial.await_log(_CHIEF, f"{ps} was lost at step 2")
  trial.tasks.start(ps)
  trial.await_success()
  assert f"restored {trial.directory}/train/model.ckpt-2" in trial.log("chief")
  report = trial.report()
  ((lost, step, resumed, _),) = report["recoveries"]
  assert (lost, step, resumed) == ([str(ps)], 2, 2)
  assert report["steps"] == [1, 2, 3, 4, 5, 6]
  assert report["global_step"] == 6
  state = report["state"]
  np.testing.assert_allclose(
    [state["variables/v0"], state["variables/v1"]],
    [-RATE * mean * 6, 1 - RATE * (mean + 0.8) * 6],
    rtol=1e-5,
  )


@pytest.mark.exhaustive
def test_half_an_update_that_cannot_be_taken_back_is_an_error(start_trial):
  trial = _killed_while_updating(start_trial, "between_graph", saves=False)
  trial.await_end(*trial.spec.tasks())
  message = "the chief was killed in the middle of an update"
  assert message in trial.log("chief")
  assert message in trial.log("worker")


@pytest.mark.exhaustive
@pytest.mark.parametrize("replication", ["between_graph", "in_graph"])
def test_what_was_read_is_saved_though_the_parameter_server_died(
  start_trial, replication
):
  trial = start_trial(
    "killed_while_saving",
    trials.document(1, 2, chief=1),
    replication=replication,
  )
  trial.await_mark("step 2 is read")
  trial.kill(cluster.Task("ps", 0))
  trial.mark("ps 0 is dead")
  assert trial.ends_within(_CHIEF, 60), trial.all_logs()
  assert trial.tasks.returncode(_CHIEF) == 1
  saved = checkpoints.read(checkpoints.latest(trial.directory / "train"))
  assert saved["global_step"] == 2


def _lose_ps(start_trial, replication, index, **options):
  """A parameter server is killed after step 6; step 4 was saved."""
  chief = int(replication == "in_graph")
  trial = start_trial(
    "parameter_server_lost",
    trials.document(2, 2, chief=chief),
    replication=replication,
    **options,
  )
  trial.await_mark("step 6 is made")
  ps = cluster.Task("ps", index)
  trial.kill(ps)
  trial.mark("it is dead")
  return trial, ps


@pytest.mark.parametrize(
  ("replication", "index", "is_async"),
  [
    ("between_graph", 1, False),
    pytest.param("between_graph", 0, True, marks=pytest.mark.exhaustive),
    ("in_graph", 1, True),
    pytest.param("in_graph", 0, False, marks=pytest.mark.exhaustive),
  ],
)
def test_training_goes_on_after_the_loss_of_a_parameter_server(
  start_trial, replication, index, is_async
):
  trial, ps = _lose_ps(
    start_trial,
    replication,
    index,
    is_async=is_async,
    recovery_timeout_secs=100,
  )
  chief = trial.spec.chief if replication == "between_graph" else _CHIEF
  trial.await_log(chief, f"{ps} was lost at step 6")
  trial.tasks.start(ps)
  trial.await_success()
  report = trial.report()
  assert report["global_step"] == 12
  ((lost, step, resumed, _),) = report["recoveries"]
  assert (lost, step) == ([str(ps)], 6)
  # Six asynchronous updates may be reported together, before the first save;
  # and replicas may go on while an asynchronous chief saves.
  assert resumed in ((0, 4, 5, 6) if is_async else (4,))
  again = f"so {6 - resumed} updates were made again"
  assert again in trial.tasks.log(chief)
  steps = report["steps"]
  if not is_async:
    assert steps == [*range(1, 7), *range(5, 13)]
  # Each worker's updates since the checkpoint can be counted in its own row. An
  # asynchronous checkpoint may hold a part of updates that were under way.
  saved = {"variables/v0": 0.0, "examples_seen": 0}
  saved["variables/v2"] = np.array([[3.0], [4.0]])
  if resumed:
    saved = checkpoints.read(trial.directory / f"train/model.ckpt-{resumed}")
  change = {
    name: np.array(report["state"][name]) - saved[name]
    for name in ("variables/v0", "examples_seen")
  }
  rows = np.array(report["state"]["variables/v2"])[:2, 0]
  gradients = np.array([0.1, 0.3])
  updates = (saved["variables/v2"][:2, 0] - rows) / (RATE * gradients)
  np.testing.assert_allclose(updates.sum(), 12 - resumed, rtol=1e-4)
  np.testing.assert_allclose(
    change["variables/v0"], -RATE * gradients @ updates, rtol=1e-4
  )
  share = 1 if is_async else 2  # How many gradients an update has.
  assert change["examples_seen"] == (12 - resumed) * share
  if not is_async:
    np.testing.assert_allclose(
      report["state"]["variables/v0"], -RATE * 0.2 * 12, rtol=1e-5
    )


@pytest.mark.exhaustive
def test_a_parameter_server_dies_while_a_worker_comes_back(start_trial):
  trial = start_trial(
    "parameter_server_lost",
    trials.document(2, 2),
    replication="between_graph",
    is_async=False,
    recovery_timeout_secs=100,
  )
  trial.await_mark("step 6 is made")
  ps = cluster.Task("ps", 1)
  for task in (_worker(1), ps):
    trial.kill(task)
  trial.tasks.start(_worker(1))
  trial.mark("it is dead")
  trial.await_log(_worker(0), f"{ps} was lost at step 6")
  trial.tasks.start(ps)
  trial.await_success()
  report = trial.report()
  assert report["steps"] == [*range(1, 7), *range(5, 13)]
  np.testing.assert_allclose(
    report["state"]["variables/v0"], -RATE * 0.2 * 12, rtol=1e-5
  )


def test_a_parameter_server_that_does_not_come_back_ends_training(start_trial):
  trial, _ = _lose_ps(
    start_trial, "between_graph", 1, is_async=False, recovery_timeout_secs=6
  )
  for index in (0, 1):
    assert trial.ends_within(_worker(index), 60), trial.all_logs()
    last = trial.log("worker", index).rstrip().splitlines()[-1]
    assert "waiting for ps 1 at" in last
    assert "gave up after 6 s" in last


def test_backup_takes_the_place_of_a_worker_that_died_admitted(start_trial):
  trial = start_trial(
    "killed_after_admission",
    trials.document(1, 3),
    aggregate=2,
    lost_after_secs=3,
  )
  living = [task for task in trial.spec.tasks() if task != _worker(2)]
  trial.await_end(*living)
  codes = trial.codes()
  assert codes.pop("worker 2") == -9
  assert set(codes.values()) == {0}, trial.all_logs()
  report = trial.report()
  _assert_steps(report, 8, (0.1 + 0.3) / 2)
  assert [applied for applied, _, _ in report["counts"]] == [8, 8, 0]
  assert "worker 2: no heartbeat for" in trial.log("worker", 0)


def test_nothing_of_a_worker_that_died_handing_over_is_applied(start_trial):
  trial = start_trial(
    "killed_while_handing_over", trials.document(2, 2), max_restarts=3
  )
  status = trial.tasks.wait(timeout_secs=trials.DEADLINE_SECS)
  assert status == 0, trial.all_logs()
  assert len(list(trial.directory.glob("incarnation_*"))) == 4
  report = trial.report()
  _assert_steps(report, 3, (0.1 + 0.3) / 2)
  np.testing.assert_allclose(
    report["state"]["variables/v2"],
    [[3.0 - 3 * RATE * 0.1 / 2], [4.0 - 3 * RATE * 0.3 / 2], [5.0]],
    rtol=1e-6,
  )
  assert [applied for applied, _, _ in report["counts"]] == [3, 3]
  assert report["steps"][-1]["state"]["examples_seen"] == 6


@pytest.mark.parametrize(
  ("replication", "chief"),
  [
    ("between_graph", "worker 0"),
    pytest.param("in_graph", "chief 0", marks=pytest.mark.exhaustive),
  ],
)
def test_not_a_number_ends_every_task_with_words(
  start_trial, replication, chief
):
  is_in_graph = replication == "in_graph"
  trial = start_trial(
    "not_a_number",
    trials.document(2, 2, chief=int(is_in_graph)),
    replication=replication,
  )
  trial.await_end()
  for task in trial.spec.tasks():
    last = trial.tasks.log(task).rstrip().splitlines()[-1]
    assert "worker 1 computed a loss or a gradient that is not finite" in last
    assert "step 2" in last
    assert trial.tasks.returncode(task) == 1
  assert "NonFiniteGradientError" in trial.tasks.log(
    cluster.Task(*[chief.split()[0], 0])
  )
  assert (trial.directory / "step 2 is made").exists()
  assert not (trial.directory / "step 3 is made").exists()
