"""Runs one task of a cluster that trains the small model, and measures itself.

`benchmarks.scale` starts this program once per task. At its end it prints one
line, a JSON object, which `Report` describes.
"""

import dataclasses
import json
import re
import sys
import threading
import time

from benchmarks import small_model
from tf_replicas import cluster

WARM_UP_STEPS = 20
_SAMPLE_SECS = 0.1


@dataclasses.dataclass
class Report:
  """What a task found out about itself.

  Attributes:
    pss_mib: The memory of the process, in MiB. A page that n processes share
      counts as 1 / n page in each.
    samples: (time, CPU seconds of the process so far) pairs.
    window: The times at which the chief began and ended the measured updates;
      of the chief only.
    global_step: The last global step; of the chief only.
    examples: The number of examples of all updates; of the chief only.
    applied: The used contributions of each replica; of the chief only.
    counts_secs: Seconds that the chief takes to read the counts of all
      replicas; of the chief only.
  """

  pss_mib: float
  samples: list[tuple[float, float]]
  window: tuple[float, float] | None = None
  global_step: int | None = None
  examples: int | None = None
  applied: list[int] | None = None
  counts_secs: float | None = None


def _pss_mib() -> float:
  with open("/proc/self/smaps_rollup", encoding="ascii") as file:
    return int(re.search(r"^Pss: +(\d+) kB", file.read(), re.M)[1]) / 1024


def _train(spec, task, steps: int) -> Report:
  import keras

  from tf_replicas.drivers import between_graph
  from tf_replicas.replica import model_replica
  from tf_replicas.rules.sync import sync_replicas

  workers = len(spec.replicas)
  report = Report(0.0, [])
  with between_graph.BetweenGraph(
    spec,
    task,
    lambda: small_model.replica(model_replica.Replica),
    lambda: sync_replicas.SyncReplicasOptimizer(
      keras.optimizers.SGD(0.01), workers, workers
    ),
    start_timeout_secs=900.0,
    lost_after_secs=300.0,
    log=lambda line: print(line, flush=True),
  ) as driver:
    if not driver.is_chief:
      driver.run_replica()
      report.pss_mib = _pss_mib()
      return report
    driver.stop_at(WARM_UP_STEPS + steps)
    step, began = 0, 0.0
    while step < WARM_UP_STEPS + steps:
      last = WARM_UP_STEPS + (steps if step >= WARM_UP_STEPS else 0)
      began = time.time() if step == WARM_UP_STEPS else began
      step = driver.step(last - step).global_step
    report.window = began, time.time()
    first = time.perf_counter()
    counts = driver.counts()
    report.counts_secs = time.perf_counter() - first
    report.applied = [count.applied for count in counts]
    report.global_step = driver.global_step
    report.examples = int(driver.store.examples_seen.read_value())
    report.pss_mib = _pss_mib()
  return report


def main(path: str, job: str, index: str, steps: str) -> None:
  spec, task = cluster.load(path), cluster.Task(job, int(index))
  samples: list[tuple[float, float]] = []
  has_ended = threading.Event()

  def sample() -> None:
    while not has_ended.wait(_SAMPLE_SECS):
      samples.append((time.time(), time.process_time()))

  thread = threading.Thread(target=sample)
  thread.start()
  try:
    if job == "ps":
      from tf_replicas.drivers import server

      server.serve(
        spec,
        task,
        num_clients=len(spec.replicas),
        orphan_timeout_secs=900.0,
        log=lambda line: print(line, flush=True),
      )
      report = Report(_pss_mib(), [])
    else:
      report = _train(spec, task, int(steps))
  finally:
    has_ended.set()
    thread.join()
  report.samples = samples
  print(json.dumps(dataclasses.asdict(report)), flush=True)


if __name__ == "__main__":
  main(*sys.argv[1:])
