"""Tests of `drivers.between_graph` on real processes."""

import json
import shutil
import socket
import subprocess
import sys
import types

import numpy as np
import pytest
import tensorflow as tf

from tests.support import trials
from tf_replicas import cluster
from tf_replicas.cluster import addresses
from tf_replicas.drivers import between_graph
from tf_replicas.drivers import versions
from tf_replicas.rules import step_token

# The learning rate of `cluster_task.constant_gradients`.
RATE = 2.0


def _variables(recorded, prefix="variables"):
  names = ("v0", "v1", "v2", "nobody", "only_1")
  state = recorded["state"]
  return {name: np.array(state[f"{prefix}/{name}"]) for name in names}


def _assert_equal(actual, expected):
  assert actual.keys() == expected.keys()
  for name, value in expected.items():
    np.testing.assert_allclose(
      actual[name], value, rtol=1e-6, atol=1e-6, err_msg=name
    )


def test_refuses_a_cluster_without_the_other_workers():
  """Each of them would count as the only replica, and so as replica 0."""
  document = {"ps": ["localhost:1"], "worker": {"1": "localhost:2"}}
  with pytest.raises(cluster.ClusterError, match=r"must list all.*\[1\]"):
    between_graph.BetweenGraph(
      cluster.parse({"cluster": document}),
      cluster.Task("worker", 1),
      lambda: None,
      lambda _: None,
    )


@pytest.mark.parametrize(
  ("restored", "count", "goes_back"),
  [(100, 7, True), (99, 7, True), (105, 7, False), (99, 1, False)],
)
def test_notices_that_the_step_went_back_within_a_call(
  restored, count, goes_back
):
  """A call began at step 99; its last contribution was refused at a step."""

  def token(step, tag):
    return step_token.LAYOUT.pack(
      step_token.first(tf.constant(step, tf.int64))._replace(
        preadmitted_tag=tf.constant(tag, tf.int64)
      )
    )

  driver = object.__new__(between_graph.BetweenGraph)
  driver.rule = types.SimpleNamespace(repeats_refused=True)
  driver._must_stop = lambda: False

  def run(max_steps, last):
    del max_steps, last
    return tf.constant(count), token(restored, step_token.NO_TAG)

  def ask(max_steps, last):
    del max_steps, last
    return tf.constant(1), token(step_token.ENDED, step_token.NO_TAG)

  driver._begin = lambda: ([token(99, 5)], ask, run)
  assert driver._run_from_here() == goes_back


@pytest.fixture(scope="module")
def two_workers(start_trial):
  trial = start_trial("constant_gradients", trials.document(2, 2), steps=3)
  trial.await_success()
  return trial


def test_two_workers_make_three_steps_by_hand(two_workers):
  first, second, third = two_workers.report()["steps"]
  _assert_equal(
    _variables(first),
    {
      "v0": 0.0 - RATE * (0.1 + 0.3) / 2,
      "v1": 1.0 - RATE * (0.9 + 1.1) / 2,
      # Each row concerns one worker, and still is divided by two.
      "v2": [[3.0 - RATE * 0.1 / 2], [4.0 - RATE * 0.3 / 2], [5.0]],
      "nobody": 6.0,
      # Worker 0 has no gradient for it, which counts as zero.
      "only_1": 7.0 - RATE * (0.0 + 0.7) / 2,
    },
  )
  _assert_equal(
    _variables(second),
    {
      "v0": 0.0 - 2 * RATE * (0.1 + 0.3) / 2,
      "v1": 1.0 - 2 * RATE * (0.9 + 1.1) / 2,
      "v2": [[3.0 - 2 * RATE * 0.1 / 2], [4.0 - 2 * RATE * 0.3 / 2], [5.0]],
      "nobody": 6.0,
      "only_1": 7.0 - 2 * RATE * 0.7 / 2,
    },
  )
  _assert_equal(
    _variables(third),
    {
      "v0": 0.0 - 3 * RATE * (0.1 + 0.3) / 2,
      "v1": 1.0 - 3 * RATE * (0.9 + 1.1) / 2,
      "v2": [[3.0 - 3 * RATE * 0.1 / 2], [4.0 - 3 * RATE * 0.3 / 2], [5.0]],
      "nobody": 6.0,
      "only_1": 7.0 - 3 * RATE * 0.7 / 2,
    },
  )


def test_two_workers_averages_by_hand(two_workers):
  # decay = min(0.9, (1 + step) / (10 + step))
  shadow, averages = 0.0, []
  for step, value in enumerate([-0.4, -0.8, -1.2], start=1):
    decay = (1 + step) / (10 + step)
    shadow = decay * shadow + (1 - decay) * value
    averages.append(shadow)
  for recorded, expected in zip(
    two_workers.report()["steps"], averages, strict=True
  ):
    np.testing.assert_allclose(
      recorded["state"]["averages/v0"], expected, rtol=1e-5
    )
    assert recorded["state"]["averages/nobody"] == 6.0


def test_two_workers_report_what_they_did(two_workers):
  report = two_workers.report()
  steps = report["steps"]
  assert [s["global_step"] for s in steps] == [1, 2, 3]
  assert [s["state"]["global_step"] for s in steps] == [1, 2, 3]
  assert [s["num_examples"] for s in steps] == [2, 2, 2]
  assert report["state"]["examples_seen"] == 6
  # The mean over both workers, from the variables before the step.
  first_loss = (
    (0.1 * 0.0 + 0.9 * 1.0 + 0.1 * 3.0)
    + (0.3 * 0.0 + 1.1 * 1.0 + 0.3 * 4.0 + 0.7 * 7.0)
  ) / 2
  np.testing.assert_allclose(steps[0]["loss"], first_loss, rtol=1e-6)
  assert [applied for applied, _, _ in report["counts"]] == [3, 3]
  assert report["refused"] == [0, 0]


def test_two_workers_leave_by_themselves(two_workers):
  assert set(two_workers.codes().values()) == {0}


@pytest.fixture(scope="module")
def backup(start_trial):
  trial = start_trial("backup_in_order", trials.document(2, 3), aggregate=2)
  trial.await_success()
  return trial


def test_backup_takes_the_first_two_of_three(backup):
  steps = backup.report()["steps"]
  by_0_and_2 = RATE * (0.1 + 0.5) / 2
  by_0_and_1 = RATE * (0.1 + 0.3) / 2
  expected = [-by_0_and_2, -2 * by_0_and_2, -3 * by_0_and_2]
  expected.append(expected[-1] - by_0_and_1)
  for _ in range(13):
    expected.append(expected[-1] - by_0_and_2)
  np.testing.assert_allclose(
    [s["state"]["variables/v0"] for s in steps], expected, rtol=1e-5
  )
  assert {s["num_examples"] for s in steps} == {2}


def test_backup_skips_what_none_of_the_two_has_a_gradient_for(backup):
  values = [s["state"]["variables/only_1"] for s in backup.report()["steps"]]
  after_4 = 7.0 - RATE * 0.7 / 2
  np.testing.assert_allclose(values, [7.0] * 3 + [after_4] * 14, rtol=1e-6)


def test_backup_counts_what_it_refuses(backup):
  worker_0, worker_1, worker_2 = backup.report()["counts"]
  assert worker_0 == [17, 0, [0] * 10]
  # Late by one in step 2; too many in step 3; late by twelve at the end,
  # which is counted with all that are ten late or more.
  assert worker_1 == [1, 1, [1] + [0] * 8 + [1]]
  assert worker_2 == [16, 1, [0] * 10]


def test_backup_tells_a_refused_replica_where_to_go_on(backup):
  assert backup.report("worker_1")["releases"] == [
    [False, 1],
    [False, 3],
    [True, 4],
    [False, 16],
  ]


def test_backup_sends_no_bytes_of_what_it_refuses(backup):
  for recorded in backup.report()["steps"]:
    assert [row[1] for row in recorded["bytes_waiting"]] == [0, 0]


def test_chief_task_and_several_batches_per_step(start_trial):
  trial = start_trial(
    "constant_gradients", trials.document(1, 1, chief=1), steps=6, aggregate=4
  )
  trial.await_success()
  report = trial.report()
  by_chief, by_worker = (applied for applied, _, _ in report["counts"])
  num_steps = len(report["steps"])  # More than 6 if the worker came late.
  assert by_chief + by_worker == num_steps * 4
  # Until the second replica makes its first offer the first fills the steps;
  # from then on everyone has a place in each.
  assert min(report["refused"]) == 0
  assert min(by_chief, by_worker) >= 1
  assert [s["num_examples"] for s in report["steps"]] == [4] * num_steps
  # The chief task is replica 0, worker 0 is replica 1.
  np.testing.assert_allclose(
    report["state"]["variables/v0"],
    -RATE * (by_chief * 0.1 + by_worker * 0.3) / 4,
    rtol=1e-5,
  )


def test_a_worker_of_another_version_does_not_join(start_trial):
  """The others train without it; another patch release only warns."""
  version = ".".join(versions.here()["TensorFlow"].split(".")[:2])
  trial = start_trial(
    "other_versions",
    trials.document(1, 3),
    aggregate=1,
    versions={"worker 1": "2.19.1", "worker 2": f"{version}.99"},
  )
  trial.await_end()
  assert trial.codes() == {
    "ps 0": 0,
    "worker 0": 0,
    "worker 1": 1,
    "worker 2": 0,
  }, trial.all_logs()
  assert trial.log("worker", 1).rstrip().splitlines()[-1] == (
    "RuntimeError: this task has other versions than ps 0: TensorFlow is 2.19.1"
    f" here and {tf.__version__} there; install the same in all tasks"
  )
  warning = f"patch releases than ps 0: TensorFlow is {version}.99 here and"
  assert warning in trial.log("worker", 2)
  applied = [applied for applied, _, _ in trial.report()["counts"]]
  assert applied[1] == 0
  assert sum(applied) == len(trial.report()["steps"])


def _has_own_mounts() -> bool:
  """Whether a process can have a file /etc/hosts of its own."""
  command = ["unshare", "--mount", "mount", "--bind", "/etc/hosts"]
  return bool(shutil.which("unshare")) and not subprocess.call(
    [*command, "/etc/hosts"], stderr=subprocess.DEVNULL
  )


@pytest.mark.exhaustive
def test_host_names_may_resolve_late(start_trial, tmp_path):
  """That of a PS task for its client, and then the other way round."""
  if not _has_own_mounts():
    pytest.skip("only root can give a process a file /etc/hosts of its own")
  ports = addresses.free_ports(2, taken=set())
  document = {
    "ps": [f"ps.late.test:{ports[0]}"],
    "worker": [f"worker.late.test:{ports[1]}"],
  }
  hosts = {job: tmp_path / job for job in document}
  for job, path in hosts.items():
    path.write_text(f"127.0.0.1 localhost {job}.late.test\n")
  bind = 'mount --bind "$0" /etc/hosts && exec "$@"'
  trial = start_trial(
    "constant_gradients",
    document,
    prefix=lambda t: [
      *("unshare", "--mount", "sh", "-c", bind, str(hosts[t.job])),
    ],
    steps=3,
  )
  worker = cluster.Task("worker", 0)
  trial.await_log(worker, "waiting for ps 0 at ps.late.test")
  with hosts["worker"].open("a") as file:
    file.write("127.0.0.1 ps.late.test\n")
  trial.await_log(worker, "waiting for ps 0 to connect to this task: ")
  with hosts["ps"].open("a") as file:
    file.write("127.0.0.1 worker.late.test\n")
  trial.await_success()
  assert len(trial.report()["steps"]) == 3


@pytest.fixture(scope="module")
def other_variables(start_trial):
  trial = start_trial(
    "other_variables", trials.document(1, 4), lost_after_secs=3
  )
  trial.await_end(*[cluster.Task("worker", w) for w in (1, 2, 3)])
  return trial


@pytest.mark.parametrize(
  ("worker", "words"),
  [(1, ["first", "[4]", "[3]"]), (2, ["other", "first"]), (3, ["second"])],
)
def test_other_variables_end_the_worker_with_words(
  other_variables, worker, words
):
  log = other_variables.log("worker", worker)
  assert f"worker {worker} differs from the chief" in log
  message = log.rstrip().splitlines()[-1]
  assert all(word in message for word in words), message
  assert other_variables.codes()[f"worker {worker}"] == 1


def test_other_variables_end_the_chief(other_variables):
  assert other_variables.ends_within(cluster.Task("worker", 0), 100)


def test_other_variables_end_the_cluster(other_variables):
  assert other_variables.tasks.wait(timeout_secs=100) == 1


def test_a_closed_queue_is_not_the_end_of_a_data_set():
  queue = tf.queue.FIFOQueue(1, [tf.int64])
  queue.close()
  with pytest.raises(tf.errors.OutOfRangeError) as closed:
    queue.dequeue()
  assert between_graph._is_of_closed_queue(closed.value)
  iterator = iter(tf.data.Dataset.range(0))
  with pytest.raises(tf.errors.OutOfRangeError) as ended:
    iterator.get_next()
  assert not between_graph._is_of_closed_queue(ended.value)


def _run_alone(document, job, replication="between_graph", **options):
  """Runs one task without the rest of its cluster: (status, output)."""
  arguments = {
    "spec": document,
    "directory": "",
    "replication": replication,
    "options": options,
  }
  return subprocess.run(
    [
      sys.executable,
      str(trials.PROGRAM),
      "constant_gradients",
      json.dumps(arguments),
      job,
      "0",
    ],
    env=trials.ENVIRON,
    timeout=300,
    capture_output=True,
    text=True,
  )


@pytest.mark.parametrize(
  "replication",
  [
    "between_graph",
    pytest.param("in_graph", marks=pytest.mark.exhaustive),
  ],
)
def test_ps_that_does_not_come(replication):
  spec = cluster.resolve_ports(cluster.parse(trials.document(1, 1, chief=1)))
  run = _run_alone(
    json.loads(spec.to_json()),
    "chief",
    replication,
    start_timeout_secs=1,
  )
  assert run.returncode == 1
  message = run.stderr.rstrip().splitlines()[-1]
  assert message.startswith("TimeoutError: ")
  assert f"ps 0 at {spec.addresses('ps')[0]}" in message


@pytest.mark.parametrize(
  "job", ["ps", pytest.param("worker", marks=pytest.mark.exhaustive)]
)
def test_port_in_use(job):
  spec = cluster.resolve_ports(cluster.parse(trials.document(1, 1)))
  address = spec.address(cluster.Task(job, 0))
  with socket.create_server(("", int(address.rpartition(":")[2]))):
    run = _run_alone(json.loads(spec.to_json()), job)
  assert run.returncode == 1
  message = run.stderr.rstrip().splitlines()[-1]
  assert "ClusterError" in message and address in message
  assert "must have a port that is free" in message


@pytest.mark.parametrize(
  "replication",
  [
    "between_graph",
    pytest.param("in_graph", marks=pytest.mark.exhaustive),
  ],
)
def test_a_rule_for_another_number_of_replicas_is_refused(
  start_trial, replication
):
  """It would leave out worker 2, or wait for a fourth."""
  trial = start_trial(
    "constant_gradients",
    trials.document(1, 3, chief=1 if replication == "in_graph" else 0),
    replication=replication,
    total=2,
    aggregate=1,
    steps=1,
  )
  trial.await_end(trial.spec.chief)
  last = trial.tasks.log(trial.spec.chief).rstrip().splitlines()[-1]
  assert "`total_num_replicas` must be 3, as there are worker 0, " in last
  assert last.endswith("Received: 2.")


@pytest.mark.parametrize(
  "at_once", [pytest.param(False, marks=pytest.mark.exhaustive), True]
)
def test_two_trainings_on_one_cluster(start_trial, at_once):
  """Each in the same processes, with its own rate and number of updates."""
  trainings = {"first": (2.0, 3), "second/b": (0.5, 5)}
  trial = start_trial(
    "two_trainings",
    trials.document(1, 2),
    namespaces=[*trainings],
    trainings=trainings,
    at_once=at_once,
  )
  trial.await_success()
  for name, (rate, steps) in trainings.items():
    made = trial.report()[name]
    _assert_equal(
      _variables(made),
      {
        "v0": 0.0 - steps * rate * (0.1 + 0.3) / 2,
        "v1": 1.0 - steps * rate * (0.9 + 1.1) / 2,
        "v2": [
          [3.0 - steps * rate * 0.1 / 2],
          [4.0 - steps * rate * 0.3 / 2],
          [5.0],
        ],
        "nobody": 6.0,
        "only_1": 7.0 - steps * rate * 0.7 / 2,
      },
    )
    assert made["state"]["global_step"] == steps
    assert made["state"]["examples_seen"] == 2 * steps
    assert [applied for applied, _, _ in made["counts"]] == [steps, steps]


@pytest.mark.parametrize("replication", ["between_graph", "in_graph"])
def test_a_model_built_before_the_driver_is_refused(start_trial, replication):
  trial = start_trial(
    "built_too_early",
    trials.document(1, 1, chief=1),
    replication=replication,
  )
  chief = trial.spec.chief
  trial.await_end(chief)
  last = trial.tasks.log(chief).rstrip().splitlines()[-1]
  assert last.startswith("ValueError: the model was built before the driver")
  assert "inside `replica_fn`" in last
