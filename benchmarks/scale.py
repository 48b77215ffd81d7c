"""Runs large clusters of a small model on this machine, and what they cost.

  python -m benchmarks.scale --output=experiments/results/scale.json

1. The memory of a task is measured with 1 PS (parameter server) and 2 workers.
   The larger clusters are refused where they would not fit.
2. 1 PS and 2, 4, 8 and 16 workers, and 8 PS and 8 workers, train synchronously,
   between-graph. Each run must end with status 0, and count one contribution of
   each worker in each update.
3. The ledger, which admits and counts contributions for the chief, and the
   report of all replicas are timed alone, in this process: for 2 to 16
   replicas, and for more, to check step 4.
4. A line through the costs for 2 to 16 replicas gives those for 1,000, which
   are also measured: the costs are not linear if the two differ. The simulator
   (`experiments.simulator`) then finds what this does to the rate of a
   synchronous cluster whose batches take a second.
"""

import argparse
import json
import os
import pathlib
import sys
import tempfile
import time
from collections.abc import Sequence

import numpy as np

from benchmarks import scale_task
from benchmarks import small_model
from benchmarks import stored

SIZES = ((1, 2), (1, 4), (1, 8), (1, 16), (8, 8))  # PS tasks, workers.
STEPS = 200
MEASURED, LARGE = (2, 4, 6, 8, 12, 16), (64, 256, 1000)
TARGET = 1000
_SPARE_MIB = 1024


def run_cluster(num_ps: int, num_workers: int) -> dict:
  """Trains on a new cluster, checks what it counted, and returns its costs.

  Args:
    num_ps: The number of PS tasks.
    num_workers: The number of workers.

  Raises:
    RuntimeError: If a task fails, or the counts are wrong.
  """
  from tf_replicas.programs import launcher

  spec = launcher.local_spec(
    None, ps=num_ps, workers=num_workers, chief=False, needs_all=True
  )
  began = time.perf_counter()
  with tempfile.TemporaryDirectory() as log_dir:
    status = launcher.run_tasks(
      spec,
      lambda path, task: [
        *(sys.executable, "-m", "benchmarks.scale_task"),
        *(path, task.job, str(task.index), str(STEPS)),
      ],
      preloads=True,
      variables={"CUDA_VISIBLE_DEVICES": ""},
      log_dir=log_dir,
    )
    logs = {
      task: pathlib.Path(log_dir, f"{task.job}_{task.index}.log").read_text()
      for task in spec.tasks()
    }
  if status:
    raise RuntimeError(
      f"status {status}: " + "\n".join(log[-2000:] for log in logs.values())
    )
  reports = {}
  for task, log in logs.items():
    # TensorFlow may log after the report of the task.
    (line,) = (line for line in log.splitlines() if line.startswith("{"))
    reports[str(task)] = scale_task.Report(**json.loads(line))
  chief = reports[str(spec.chief)]
  steps = scale_task.WARM_UP_STEPS + STEPS
  counted = (chief.global_step, chief.examples, chief.applied)
  expected = (
    steps,
    steps * num_workers * small_model.BATCH,
    [steps] * num_workers,
  )
  if counted != expected:
    raise RuntimeError(f"counted {counted} in place of {expected}")
  cpu = {}
  for name, report in reports.items():
    times, secs = zip(*report.samples, strict=True)
    first, last = np.interp(chief.window, times, secs)
    cpu[name] = float(last - first) / STEPS
  workers = [cpu[f"worker {i}"] for i in range(1, num_workers)]
  return {
    "ps": num_ps,
    "workers": num_workers,
    "total_secs": time.perf_counter() - began,
    "secs_per_step": (chief.window[1] - chief.window[0]) / STEPS,
    "cpu_secs_per_step": {
      "chief": cpu["worker 0"],
      "other_worker": float(np.mean(workers)),
      "ps_0": cpu["ps 0"],
    },
    "counts_secs": chief.counts_secs,
    "mib": {name: r.pss_mib for name, r in reports.items()},
  }


def check_memory(run: dict) -> None:
  """Checks that the largest cluster fits into the free memory.

  Args:
    run: The result of `run_cluster` for a small cluster.

  Raises:
    RuntimeError: If it does not fit.
  """
  with open("/proc/meminfo", encoding="ascii") as file:
    lines = dict(line.split(":") for line in file)
  free = int(lines["MemAvailable"].split()[0]) / 1024
  tasks = max(ps + workers for ps, workers in SIZES)
  needed = tasks * max(run["mib"].values()) + _SPARE_MIB
  if needed > free:
    raise RuntimeError(
      f"{tasks} tasks need about {needed:.0f} MiB. Available: {free:.0f} MiB."
    )


def time_ledger(
  num_replicas: int, num_backups: int = 0, steps: int = 15
) -> dict[str, float]:
  """Times what the chief does for each step of R replicas, without gradients.

  The messages of the replicas are in the inbox already. Without backup
  replicas, that is one message of each replica, as every replica takes part in
  every step. With them, each replica asks first, and then those deliver that
  were admitted.

  Args:
    num_replicas: R.
    num_backups: The number of backup replicas among them.
    steps: The number of steps that are timed.

  Returns:
    Median seconds by name: `ledger`, to collect the messages of a step and to
    answer all replicas; and `report`, to read the counts of all replicas and to
    describe them in the log. `trace` has the seconds of the first step, most of
    which TensorFlow spends on tracing.
  """
  import tensorflow as tf

  from experiments.support import one_thread
  from tf_replicas.programs import task_runner
  from tf_replicas.rules import protocol
  from tf_replicas.rules.sync import contributions
  from tf_replicas.rules.sync import ledger
  from tf_replicas.rules.sync import quorum
  from tf_replicas.store import placement

  num_places = num_replicas - num_backups
  store = one_thread.local_store(
    [placement.VariableSpec("w", (2,), "float32", True)]
  )
  store.assign(0, np.zeros(2, np.float32))
  store.start()
  side = contributions.Contributions(
    store,
    num_replicas=num_replicas,
    quorum=quorum.Quorum(num_places, num_places),
    is_sparse=[False],
  )
  side.initialize()

  @tf.function(autograph=False)
  def send(kind, replica, tag, step):
    side._send(kind, replica, tag, step=step, report=(0.5, 1), present=[True])

  @tf.function(autograph=False)
  def make_step():
    step = side.collect().step
    step = store.advance(step, tf.constant(num_replicas))
    with tf.control_dependencies([step]):
      side.release_all(step)

  def send_all(kind, tag, number):
    numbers = [tf.constant(int(n), tf.int64) for n in (kind, tag)]
    step = store.read_global_step()
    for replica in range(number):
      send(numbers[0], tf.constant(replica, tf.int64), numbers[1], step)

  secs, reports = [], []
  names = [f"worker {replica}" for replica in range(num_replicas)]
  for number in range(steps + 1):
    tag = 100 + number
    if num_backups or number == 0:  # Else the last answer admits the next.
      send_all(protocol.MessageType.OFFER, tag, num_replicas)
    send_all(protocol.MessageType.DELIVERED, tag, num_places)
    began = time.perf_counter()
    make_step()
    secs.append(time.perf_counter() - began)
    began = time.perf_counter()
    counts = ledger.counts_from_ledger(side.snapshot())
    task_runner.report(counts, names)
    reports.append(time.perf_counter() - began)
    applied = [count.applied for count in counts]
    assert applied == [number + 1] * num_places + [0] * num_backups
  return {
    "trace": secs[0],
    "ledger": float(np.median(secs[1:])),
    "report": float(np.median(reports[1:])),
  }


def extrapolate(costs: Sequence[dict]) -> dict:
  """Predicts the costs of a large cluster from those of small ones.

  Args:
    costs: For each number of replicas, `replicas`, and the results of
      `time_ledger`.

  Returns:
    The coefficients of the lines, the costs that follow for `TARGET` replicas,
    and the simulated seconds of a step with and without them.
  """
  from experiments import simulator
  from experiments.simulator import compute_times

  found: dict = {"replicas": TARGET}
  used = [row for row in costs if row["replicas"] <= max(MEASURED)]
  sizes = [row["replicas"] for row in used]
  for name in ("ledger", "backup_ledger", "report"):
    line = np.polyfit(sizes, [row[name] for row in used], 1)
    found[name] = {
      "coefficients": line[::-1].tolist(),
      "secs": float(np.polyval(line, TARGET)),
    }
  for name, secs in (
    ("free_chief", 0.0),
    ("predicted", max(0.0, found["ledger"]["secs"])),
    *(("measured", r["ledger"]) for r in costs if r["replicas"] == TARGET),
  ):
    cluster = simulator.Cluster(
      TARGET, compute_times.Constant(1.0), apply_secs=secs
    )
    result = simulator.simulate(cluster, simulator.Sync(), 20)
    found[f"step_secs_{name}"] = float(result.step_secs.mean())
  return found


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--output", help="File for the raw results")
  parser.add_argument(
    "--part", choices=("clusters", "ledger"), help="Run this part only"
  )
  arguments = parser.parse_args()
  found = {"cores": os.cpu_count()}
  if arguments.part != "ledger":
    found["clusters"] = []
    for num_ps, num_workers in SIZES:
      run = run_cluster(num_ps, num_workers)
      if not found["clusters"]:
        check_memory(run)
      found["clusters"].append(run)
      cpu = {k: f"{v * 1e3:.2f}" for k, v in run["cpu_secs_per_step"].items()}
      print(
        f"{num_ps} PS + {num_workers} workers: counted right;"
        f" {run['secs_per_step'] * 1e3:.1f} ms per step, CPU ms per step {cpu},"
        f" at most {max(run['mib'].values()):.0f} MiB per task,"
        f" {run['total_secs']:.0f} s in all",
        flush=True,
      )
  if arguments.part != "clusters":
    found["chief"] = []
    for replicas in (*MEASURED, *LARGE):
      row = {"replicas": replicas, **time_ledger(replicas)}
      row["backup_ledger"] = time_ledger(replicas, 1)["ledger"]
      found["chief"].append(row)
      print(
        f"{replicas} replicas: ledger {row['ledger'] * 1e3:.2f} ms per step,"
        f" {row['backup_ledger'] * 1e3:.2f} ms with a backup replica;"
        f" report {row['report'] * 1e3:.2f} ms; trace {row['trace']:.0f} s",
        flush=True,
      )
    found["extrapolated"] = extrapolate(found["chief"])
    print(json.dumps(found["extrapolated"], indent=2))
  stored.write(arguments.output, found)


if __name__ == "__main__":
  main()
