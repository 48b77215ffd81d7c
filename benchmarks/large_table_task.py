"""Trains a table with `fit`, and records the memory of each task.

  python large_table_task.py DIRECTORY ROWS

`benchmarks.large_table` launches it. Each task writes lines of (time, resident
MiB) to a file of its own. The chief writes when its training ended and the last
save began, when `fit` returned, and the losses.
"""

import json
import os
import pathlib
import sys
import threading
import time

import keras
import numpy as np

import tf_replicas
from tf_replicas.cluster import environment

EXAMPLES, IDS, COLUMNS, BATCH = 12_800, 10, 32, 512
SAMPLE_SECS = 0.1


def resident_mib() -> float:
  """Returns the resident memory of this process in MiB."""
  pages = int(pathlib.Path("/proc/self/statm").read_text().split()[1])
  return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def sample(path: pathlib.Path) -> None:
  """Writes the resident memory of this process to a file, again and again."""
  with path.open("w") as out:
    while True:
      print(time.time(), resident_mib(), file=out, flush=True)
      time.sleep(SAMPLE_SECS)


class EndOfEpoch(keras.callbacks.Callback):
  """Stores when the last epoch ended.

  Attributes:
    time: The time of the end, in seconds since the epoch of Unix.
  """

  time = 0.0

  def on_epoch_end(self, epoch: int, logs: dict | None = None) -> None:
    """Stores the time."""
    self.time = time.time()


def main(directory: str, rows: int) -> None:
  """Trains, as a task of the cluster of the environment.

  Args:
    directory: Where to write files, and the directory `train` for checkpoints.
    rows: The number of rows of the table.
  """
  role = environment.role(os.environ)
  assert role is not None
  task = role[1]
  path = pathlib.Path(directory, f"{task.job}_{task.index}.txt")
  threading.Thread(target=sample, args=[path], daemon=True).start()

  def model_fn():
    model = keras.Sequential(
      [
        keras.Input([IDS], dtype="int32"),
        tf_replicas.Embedding(rows, COLUMNS),
        keras.layers.GlobalAveragePooling1D(),
        keras.layers.Dense(1),
      ]
    )
    model.compile(keras.optimizers.Adagrad(0.05), "mse")
    return model

  random = np.random.default_rng(0)
  x = random.integers(0, rows, [EXAMPLES, IDS], dtype=np.int32)
  y = random.normal(size=[EXAMPLES, 1]).astype(np.float32)
  ended = EndOfEpoch()
  history = tf_replicas.fit(
    model_fn,
    x,
    y,
    batch_size=BATCH,
    epochs=4,
    verbose=0,
    callbacks=[ended],
    train_dir=os.path.join(directory, "train"),
    start_timeout_secs=600,
  )
  document = {
    "training_ended": ended.time,
    "returned": time.time(),
    "losses": history.history["loss"],
    "row_updates": history.row_updates,
  }
  pathlib.Path(directory, "chief.json").write_text(json.dumps(document))


if __name__ == "__main__":
  main(sys.argv[1], int(sys.argv[2]))
