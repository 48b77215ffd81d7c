"""Workers that the cluster spec does not list join a training of `fit`."""

import collections
import contextlib
import json
import pathlib
import subprocess
import sys

from tests.support import trials
from tf_replicas.cluster import environment
from tf_replicas.runtime import waiting

_TASK = pathlib.Path(__file__).parents[1] / "tasks" / "join_task.py"
_BATCH, _EPOCHS = 4, 10  # Of join_task.
# The batches that a replica may have leased and not used: in the data set's
# two stages, in its buffer of two, and under way.
_LEASED = 5


def _await(path: pathlib.Path) -> None:
  waiting.await_value(
    path.exists, timeout_secs=trials.DEADLINE_SECS, what=str(path)
  )


@contextlib.contextmanager
def _started(*command, **variables):
  """Starts a process, and kills it at the end if it still runs."""
  with subprocess.Popen(
    [sys.executable, "-u", *map(str, command)],
    cwd=trials.ROOT,
    env={**trials.ENVIRON, environment.MAX_WORKERS: "3", **variables},
    stdout=subprocess.PIPE,
    stderr=subprocess.STDOUT,
    text=True,
  ) as process:
    try:
      yield process
    finally:
      process.kill()


def test_two_join_and_one_is_killed(tmp_path):
  logs = tmp_path / "logs"
  launch = ("-m", "tf_replicas.launch", "--ps=1", "--workers=1")
  with contextlib.ExitStack() as stack:
    launched = stack.enter_context(
      _started(*launch, f"--log_dir={logs}", _TASK, tmp_path)
    )
    _await(tmp_path / "worker:0")
    spec = str(logs / "cluster.json")
    joined = []
    for number in (1, 2):
      task = {
        environment.CLUSTER_SPEC: spec,
        environment.TASK: f"worker:{number}",
      }
      joined.append(stack.enter_context(_started(_TASK, tmp_path, **task)))
    for number in (1, 2):
      _await(tmp_path / f"worker:{number}")
    joined[1].kill()
    (tmp_path / "go on").touch()
    output, _ = launched.communicate(timeout=trials.DEADLINE_SECS)
    assert launched.returncode == 0, output
    assert joined[0].wait(60) == 0, joined[0].stdout.read()
  (line,) = [s for s in output.splitlines() if " RESULT {" in s]
  result = json.loads(line.split(" RESULT ", 1)[1])
  uses = result["uses"]
  assert result["second"] == 20  # Updates of the second training.
  assert all(result["applied"].values()), result["applied"]
  # Each update used one batch.
  assert sum(result["applied"].values()) * _BATCH == sum(uses)
  assert sum(uses) == _EPOCHS * len(uses)
  # Batches that were leased and not used are missing, and may be of several
  # epochs. Others of the next epoch were used in their place, each one once.
  wrong = collections.Counter(number - _EPOCHS for number in uses)
  assert min(wrong) >= -3 * _LEASED
  assert max(wrong) <= 1
  missing = sum(-change * n for change, n in wrong.items() if change < 0)
  assert missing == wrong[1] <= 3 * _LEASED * _BATCH
