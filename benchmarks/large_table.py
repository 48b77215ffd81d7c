"""Measures the traffic and the memory of tables of different sizes.

  python -m benchmarks.large_table [--part=bytes|memory] [--rows=ROWS]
    [--output=experiments/results/large_table.json]

Bytes: for 100,000, 1,000,000 and 10,000,000 rows of 32 floats on 2 PS tasks
(parameter servers), the bytes that all tasks send to each other per update,
read with `ss` (package iproute2). 2 workers train on batches of 256 examples
of 10 random ids, synchronously and asynchronously, as in
`benchmarks.embedding`.

Memory: `fit` trains a model with a table of 33,554,432 rows of 32 floats, with
Adagrad, whose state has as many floats: 8 GiB together, on 2 PS tasks and 2
workers of this machine. Then it saves a checkpoint of 8 GiB in a temporary
directory. Each task reads its resident memory every 0.1 s. This part needs
about 11 GiB of memory.
"""

import argparse
import json
import os
import pathlib
import subprocess
import sys
import tempfile

from benchmarks import commits
from benchmarks import embedding
from benchmarks import large_table_task
from benchmarks import stored
from experiments.support import traffic

SIZES = (100_000, 1_000_000, 10_000_000)
ROWS = 1 << 25
UPDATES, WARM_UP = 100, 20


def bytes_per_update(kind: str, rows: int) -> float:
  """Returns the bytes that all tasks together send per update.

  Args:
    kind: `synchronous` or `asynchronous`.
    rows: The number of rows of the table.
  """
  with embedding.Cluster(kind, rows, commits.ROOT) as live:
    names = dict(zip(live.pids, live.names, strict=True))
    live.updates_per_sec(WARM_UP)
    before = sum(traffic.sent(names).values())
    live.updates_per_sec(UPDATES)
    return (sum(traffic.sent(names).values()) - before) / UPDATES


def memory(rows: int) -> dict:
  """Trains with a table of so many rows, and watches the memory of all tasks.

  Returns:
    For each task, the resident MiB when training had ended and before the save
    (`trained_mib`), and the largest until the end of training (`training_mib`)
    and during the save (`saving_mib`); the seconds of the save; the sizes of
    the table and of the checkpoint; and the losses of the epochs.

  Raises:
    RuntimeError: If training fails.
  """
  columns = large_table_task.COLUMNS
  with tempfile.TemporaryDirectory() as directory:
    process = subprocess.run(
      [
        *(sys.executable, "-m", "tf_replicas.launch", "--ps=2", "--workers=2"),
        *(large_table_task.__file__, directory, str(rows)),
      ],
      env={
        **os.environ,
        "PYTHONPATH": str(commits.ROOT),
        "CUDA_VISIBLE_DEVICES": "",
      },
      stdout=subprocess.PIPE,
      stderr=subprocess.STDOUT,
      text=True,
      check=False,
    )
    if process.returncode:
      raise RuntimeError(f"status {process.returncode}: {process.stdout}")
    root = pathlib.Path(directory)
    chief = json.loads((root / "chief.json").read_text())
    ended = chief["training_ended"]
    found = {"trained_mib": {}, "training_mib": {}, "saving_mib": {}}
    for path in root.glob("*.txt"):
      samples = [
        tuple(map(float, line.split()))
        for line in path.read_text().splitlines()[:-1]
      ]
      before = [mib for when, mib in samples if when <= ended]
      found["trained_mib"][path.stem] = before[-1]
      found["training_mib"][path.stem] = max(before)
      after = [mib for when, mib in samples if when > ended]
      found["saving_mib"][path.stem] = max(after)
    size = sum(p.stat().st_size for p in (root / "train").rglob("*ckpt*"))
  return {
    "rows": rows,
    "table_and_state_gib": 2 * rows * columns * 4 / 2**30,
    **found,
    "save_secs": chief["returned"] - ended,
    "checkpoint_gib": size / 2**30,
    "losses": chief["losses"],
    "row_updates": chief["row_updates"],
  }


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--output", help="File for the raw results")
  parser.add_argument(
    "--part", choices=("bytes", "memory"), help="Run this part only"
  )
  parser.add_argument(
    "--rows", type=int, default=ROWS, help="Rows of the part `memory`"
  )
  arguments = parser.parse_args()
  document: dict = {}
  if arguments.part != "memory":
    document["bytes_per_update"] = {
      kind: {str(rows): bytes_per_update(kind, rows) for rows in SIZES}
      for kind in ("synchronous", "asynchronous")
    }
    print(json.dumps(document["bytes_per_update"], indent=2), flush=True)
  if arguments.part != "bytes":
    document["memory"] = memory(arguments.rows)
    print(json.dumps(document["memory"], indent=2), flush=True)
  stored.write(arguments.output, document)


if __name__ == "__main__":
  main()
