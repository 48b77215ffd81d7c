"""The role of a process in a Slurm step, and a real job on this machine."""

import os
import re
import subprocess
import sys
import time

import pytest

from tests.support import slurm as slurm_support
from tests.support import trials
from tf_replicas import cluster
from tf_replicas.cluster import environment
from tf_replicas.cluster import slurm
from tf_replicas.runtime import waiting

# 5 processes on 3 nodes, of which this is the fourth.
STEP = {
  "SLURM_JOB_ID": "4207",
  "SLURM_PROCID": "3",
  "SLURM_NODEID": "1",
  "SLURM_STEP_NUM_TASKS": "5",
  "SLURM_STEP_NODELIST": "gpu[09-10],login",
  "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
}
HOST_LISTS = {
  "node": ["node"],
  "node[01-03,07]": ["node01", "node02", "node03", "node07"],
  "b,a[9-11]": ["b", "a9", "a10", "a11"],
  "r[1-2]n[08,10]": ["r1n08", "r1n10", "r2n08", "r2n10"],
}


@pytest.mark.parametrize("text", HOST_LISTS)
def test_host_lists(text):
  assert slurm.host_names(text) == HOST_LISTS[text]


def test_a_process_alone_has_no_role():
  batch_script = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "3", "SLURM_PROCID": "0"}
  assert slurm.role(batch_script) is None
  assert slurm.role({**STEP, "SLURM_STEP_NUM_TASKS": "1"}) is None


def test_the_rank_decides():
  spec, task = slurm.role(STEP)
  assert task == cluster.Task("worker", 2)
  assert spec.chief == cluster.Task("worker", 0)
  assert spec.variables.on == "ps"
  assert spec.as_dict() == {
    "ps": ["gpu09:12700"],
    "worker": ["gpu09:12701", "gpu10:12702", "gpu10:12703", "login:12704"],
  }
  first = {**STEP, "SLURM_PROCID": "0", "SLURM_NODEID": "0"}
  assert slurm.role(first) == (spec, cluster.Task("ps", 0))


def test_settings():
  spec, task = slurm.role(
    {
      **STEP,
      "TF_REPLICAS_NUM_PS": "2",
      "TF_REPLICAS_BASE_PORT": "5000",
      "SLURM_GPUS_PER_TASK": "a100:2",
    }
  )
  assert task == cluster.Task("worker", 1)
  assert spec.addresses("ps") == ["gpu09:5000", "gpu09:5001"]
  assert spec.gpus(task) == (0, 1)
  assert spec.gpus(cluster.Task("ps", 0)) == ()


def test_without_parameter_servers_variables_are_mirrored():
  spec, task = slurm.role({**STEP, "TF_REPLICAS_NUM_PS": "0"})
  assert spec.variables.on == "mirrored"
  assert task == cluster.Task("worker", 3)


def test_ranks_may_go_around_the_nodes():
  cyclic = {**STEP, "SLURM_DISTRIBUTION": "cyclic", "SLURM_NODEID": "0"}
  spec, _ = slurm.role(cyclic)
  hosts = [a.partition(":")[0] for a in spec.addresses("worker")]
  assert hosts == ["gpu10", "login", "gpu09", "gpu10"]


@pytest.mark.parametrize(
  ("changed", "words"),
  [
    (
      {"TF_REPLICAS_NUM_PS": "5"},
      "TF_REPLICAS_NUM_PS: must leave at least one of the 5 processes",
    ),
    ({"TF_REPLICAS_NUM_PS": "-1"}, "must be a number. Received: '-1'"),
    ({"TF_REPLICAS_BASE_PORT": "65532"}, "must be the first of 5"),
    ({"SLURM_STEP_TASKS_PER_NODE": "2(x2)"}, "must give the 3 nodes"),
    ({"SLURM_STEP_TASKS_PER_NODE": "2,2,2"}, "must give the 3 nodes"),
    ({"SLURM_STEP_NODELIST": "gpu[a-b]"}, "must be a host list"),
    ({"SLURM_STEP_NODELIST": ""}, "`SLURM_STEP_NODELIST` must be set"),
    ({"SLURM_NODEID": "2"}, "must be block or cyclic: process 3 is on node 2"),
  ],
)
def test_refused(changed, words):
  with pytest.raises(cluster.ClusterError, match=re.escape(words)):
    slurm.role({**STEP, **changed})


def test_tf_config_comes_first():
  assert environment.role({**STEP, "TF_CONFIG": "{}"}) is None
  assert environment.role(STEP) == slurm.role(STEP)


@pytest.fixture(scope="module")
def slurm_environ(tmp_path_factory):
  """Slurm on this machine, and the environment of its commands."""
  if reason := slurm_support.missing():
    pytest.skip(reason)
  python = os.path.dirname(sys.executable)
  environ = {**trials.ENVIRON, "PATH": f"{python}:{os.environ['PATH']}"}
  with slurm_support.running(tmp_path_factory.mktemp("slurm")) as conf:
    yield {**environ, "SLURM_CONF": str(conf)}


class _Job:
  """The example's batch job, with all processes on this node.

  Attributes:
    id: The number of the job, as text.
  """

  def __init__(self, environ, directory, *command, processes=3):
    self._environ = environ
    self._output = directory / "job.out"
    self.id = self.run(
      *("sbatch", "--parsable", "--overcommit", f"--output={self._output}"),
      *(f"--ntasks={processes}", f"--chdir={directory}", "--time=7"),
      str(trials.ROOT / "examples" / "slurm" / "train.sbatch"),
      *command,
    ).strip()

  def run(self, *command) -> str:
    """Returns what a command of Slurm prints."""
    done = subprocess.run(
      command,
      env=self._environ,
      capture_output=True,
      text=True,
      timeout=30,
      check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout

  def printed(self) -> str:
    return self._output.read_text() if self._output.exists() else ""

  def end(self) -> tuple[str, str]:
    """Waits for the end of the job; returns its state and exit status."""

    def state():
      # First: the queue has a job that is still ending ("COMPLETING").
      if self.run("squeue", "--noheader", f"--jobs={self.id}"):
        return None
      shown = self.run("scontrol", "show", "job", self.id).replace("\n", " ")
      return re.search(r"JobState=(\w+) .*ExitCode=(\S+)", shown).groups()

    return waiting.await_value(
      state,
      timeout_secs=trials.DEADLINE_SECS,
      what="waiting for the end of the job",
      poll_secs=0.2,
    )


def _submit(environ, directory, *command, processes=3) -> str:
  """What the example's batch job printed, which has to end well."""
  job = _Job(environ, directory, *command, processes=processes)
  assert job.end() == ("COMPLETED", "0:0"), job.printed()
  return job.printed()


def test_a_job_trains_a_keras_model(slurm_environ, tmp_path):
  script = trials.ROOT / "examples" / "keras_fit.py"
  printed = _submit(slurm_environ, tmp_path, script, "--save_to=model.keras")
  assert re.search(r"^0: ps 0 serves at \S+:\d+$", printed, re.MULTILINE)
  (accuracy,) = re.findall(r"^1: accuracy: ([\d.]+)$", printed, re.MULTILINE)
  assert float(accuracy) > 0.9
  assert (tmp_path / "model.keras").stat().st_size > 0


@pytest.mark.exhaustive
def test_a_job_runs_a_program(slurm_environ, tmp_path):
  printed = _submit(
    slurm_environ,
    tmp_path,
    *("-m", "cifar10.distributed_train", "--dataset=synthetic"),
    *("--max_steps=3", "--batch_size=8", "--train_dir=run"),
    processes=2,
  )
  assert "1: finished at step 3" in printed
  assert (tmp_path / "run" / "checkpoint").exists()


def test_a_canceled_job_saves(slurm_environ, tmp_path):
  """Slurm sends SIGTERM to all processes at once."""
  job = _Job(
    slurm_environ,
    tmp_path,
    *("-m", "cifar10.distributed_train", "--dataset=synthetic"),
    *("--max_steps=100000", "--batch_size=8", "--train_dir=run"),
  )
  waiting.await_value(
    lambda: ": step 10," in job.printed() or "error" in job.printed(),
    timeout_secs=trials.DEADLINE_SECS,
    what="training",
  )
  canceled = time.monotonic()
  job.run("scancel", job.id)
  state, _ = job.end()
  secs = time.monotonic() - canceled
  printed = job.printed()
  assert state == "CANCELLED", printed
  assert re.search(r"^1: training stops; ", printed, re.M), printed
  # The parameter server waits 8 s for it, which a slow machine may exceed.
  if secs < 8 or "last checkpoint: none" not in printed:
    assert (tmp_path / "run" / "checkpoint").exists(), printed


def test_host_lists_are_those_of_scontrol(slurm_environ):
  for text, names in HOST_LISTS.items():
    shown = subprocess.run(
      ["scontrol", "show", "hostnames", text],
      env=slurm_environ,
      capture_output=True,
      text=True,
      timeout=30,
      check=True,
    )
    assert shown.stdout.split() == names
