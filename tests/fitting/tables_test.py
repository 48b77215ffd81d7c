"""`fit` with tables on real clusters, against Keras in one process."""

import json
import pathlib
import shutil
import subprocess

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.support import trials
from tests.tasks import tables_task
from tf_replicas.replica import embeddings
from tf_replicas.runtime import resources
from tf_replicas.runtime import row_files
from tf_replicas.session import checkpoints
from tf_replicas.store import tables

_ROOT = pathlib.Path(__file__).resolve().parents[2]
_TASK = _ROOT / "tests" / "tasks" / "tables_task.py"
_SETTINGS = {"batch_size": 16, "rate": 0.2}


def _launch(*flags: str, **arguments) -> subprocess.CompletedProcess:
  return trials.python(
    *("-m", "tf_replicas.launch", *flags, str(_TASK), json.dumps(arguments)),
    environ=trials.SPEAKING_ENVIRON,
  )


def _train(*flags: str, **arguments) -> dict:
  """What the chief printed."""
  result = _launch(*flags, **(_SETTINGS | arguments))
  assert result.returncode == 0, result.stdout + result.stderr
  (line,) = [s for s in result.stdout.splitlines() if " RESULT {" in s]
  return json.loads(line.split(" RESULT ", 1)[1])


def _first(count: int) -> np.ndarray:
  """The first values of a table of `count` rows, whatever its parts are."""
  home = tables.Home(resources.new_namespace(), 1, lambda _: "/device:CPU:0")
  with tables.home(home):
    table = embeddings.Table(
      count, tables_task.COLUMNS, name="first", initializer=tables_task.FIRST
    )
  rows = tables.rows_of(table.variable)
  rows.initialize()
  return tables.RowTensor(rows, rows.parts).read(0, count)


def _untrained(
  optimizer: str, first_of_words: np.ndarray, use_ema: bool = False
) -> keras.Model:
  """The model with ordinary embeddings."""
  model = tables_task.build(
    optimizer,
    _SETTINGS["rate"],
    keras.layers.Embedding,
    tables_task.DenseGradients,
    use_ema,
  )
  model.get_layer("user_rows").set_weights([_first(tables_task.ROWS)])
  model.get_layer("word_rows").set_weights([first_of_words])
  return model


def _keras(
  optimizer: str,
  epochs: int,
  first_of_words: np.ndarray,
  use_ema: bool = False,
) -> tuple[dict, list[np.ndarray]]:
  """History and weights of Keras with ordinary embeddings."""
  model = _untrained(optimizer, first_of_words, use_ema)
  x, y = tables_task.data()
  history = model.fit(
    x,
    y,
    shuffle=False,
    verbose=0,
    epochs=epochs,
    batch_size=_SETTINGS["batch_size"],
  )
  return history.history, model.get_weights()


def _assert_equal(
  ours: dict,
  optimizer: str,
  epochs: int,
  first_of_words=None,
  use_ema: bool = False,
) -> None:
  if first_of_words is None:
    first_of_words = _first(40)
  history, weights = _keras(
    optimizer, epochs, np.asarray(first_of_words), use_ema
  )
  found = ours["history"]["mae"]
  np.testing.assert_allclose(found, history["mae"][-len(found) :], rtol=1e-4)
  assert len(weights) == len(ours["weights"]) == 4
  for one, other in zip(ours["weights"], weights, strict=True):
    np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


def _assert_exported(ours: dict, train_dir: pathlib.Path) -> None:
  """The exported model computes what the chief has predicted."""
  loaded = tf.saved_model.load(str(train_dir / "exported"))
  x, _ = tables_task.data()
  outputs = loaded.serve({name: tf.constant(ids) for name, ids in x.items()})
  np.testing.assert_allclose(outputs, ours["predicted"], rtol=1e-5, atol=1e-6)


def _rows_by_parity(num_tables: int = 2) -> dict[str, int]:
  """The rows of tables that an epoch's batches have, on 2 PS tasks."""
  (x, _), size = tables_task.data(), _SETTINGS["batch_size"]
  counts = [0, 0]
  for begin in range(0, tables_task.EXAMPLES, size):
    users, words = (x[k][begin : begin + size] for k in ("users", "words"))
    for ids in ({*users, *words.flat}, {*words.flat})[:num_tables]:
      for row in ids:
        counts[row % 2] += 1
  return {"ps 0": counts[0], "ps 1": counts[1]}


def test_equals_keras_and_resumes_on_fewer_parameter_servers(tmp_path):
  arguments = {"optimizer": "Adagrad", "train_dir": str(tmp_path)}
  ours = _train("--workers=2", "--ps=2", epochs=1, **arguments)
  _assert_equal(ours, "Adagrad", 1)
  _assert_exported(ours, tmp_path)
  shutil.rmtree(tmp_path / "exported")
  assert ours["counts"] == {"worker 0": [6, 0], "worker 1": [6, 0]}
  assert ours["row_updates"] == ours["rows_by_status"] == _rows_by_parity()
  assert "call `tf_replicas.load_tables(model, train_dir)`" in ours["refused"]
  ours = _train("--workers=2", "--ps=1", epochs=2, **arguments)
  _assert_equal(ours, "Adagrad", 2)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
  ("flags", "replication"),
  [
    (["--workers=2", "--ps=2", "--chief"], "in_graph"),
    (["--workers=2", "--ps=3"], "between_graph"),
  ],
)
def test_sgd(tmp_path, flags, replication):
  ours = _train(
    *flags,
    replication=replication,
    optimizer="SGD",
    partition="range",
    train_dir=str(tmp_path),
    epochs=1,
  )
  _assert_equal(ours, "SGD", 1)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
  ("flags", "replication"),
  [
    (["--workers=2", "--ps=2"], "between_graph"),
    (["--workers=2", "--ps=2", "--chief"], "in_graph"),
  ],
)
def test_averages_equal_those_of_keras(tmp_path, flags, replication):
  """The chief predicts with averages before the end, and loads them then."""
  arguments = {"optimizer": "SGD", "use_ema": True, "train_dir": str(tmp_path)}
  for epochs in (1, 2):  # Resumed.
    ours = _train(*flags, replication=replication, epochs=epochs, **arguments)
    _assert_equal(ours, "SGD", epochs, use_ema=True)
    _assert_exported(ours, tmp_path)
    shutil.rmtree(tmp_path / "exported")


@pytest.mark.exhaustive
def test_large_embeddings_of_keras_become_tables(tmp_path):
  """The smaller one, of 40 rows, is trained as any other variable."""
  ours = _train(
    *("--workers=2", "--ps=2"),
    optimizer="SGD",
    min_table_bytes=tables_task.ROWS * tables_task.COLUMNS * 4,
    train_dir=str(tmp_path),
    loads_rows=True,
    epochs=2,
  )
  saved = row_files.shapes(checkpoints.tables_of(checkpoints.latest(tmp_path)))
  assert [*saved] == ["variables/user_rows/embeddings"]
  rows = {task: 2 * n for task, n in _rows_by_parity(num_tables=1).items()}
  assert ours["row_updates"] == rows
  assert "call `tf_replicas.load_tables(model, train_dir)`" in ours["refused"]
  assert not [m for m in ours["layers"] if m.startswith("tf_replicas")]
  _assert_equal(ours, "SGD", 2, first_of_words=tables_task.FIRST([40, 4]))
  _assert_exported(ours, tmp_path)


@pytest.mark.exhaustive
@pytest.mark.parametrize("replication", ["in_graph", "between_graph"])
def test_asynchronous(tmp_path, replication):
  chief = ["--chief"] if replication == "in_graph" else []
  ours = _train(
    *("--workers=2", "--ps=2", *chief),
    replication=replication,
    optimizer="Adam",
    rate=0.05,  # Small: a gradient may be very stale.
    rule={"asynchronous": []},
    train_dir=str(tmp_path),
    epochs=8,
  )
  # Not the losses: a late epoch may repeat those of the first one.
  x, y = tables_task.data()
  untrained = _untrained("Adam", _first(40)).predict(x, verbose=0)
  # Each worker has every second batch of 16. On a busy machine, one worker may
  # make all updates; then nothing is learned from the other's batches.
  before, after = (
    np.mean(((np.asarray(predicted) - y) ** 2).reshape(3, 2, 16), axis=(0, 2))
    for predicted in (untrained, ours["predicted"])
  )
  applied = [applied for applied, _ in ours["counts"].values()]
  assert list(ours["counts"]) == ["worker 0", "worker 1"]
  busiest = np.argmax(applied)
  assert after[busiest] < 0.8 * before[busiest], (before, after, applied)
  assert sum(applied) == 48


@pytest.mark.exhaustive
@pytest.mark.parametrize("replication", ["in_graph", "between_graph"])
def test_an_id_out_of_range_ends_in_one_line(tmp_path, replication):
  chief = ["--chief"] if replication == "in_graph" else []
  result = _launch(
    *("--workers=2", "--ps=2", *chief),
    **_SETTINGS,
    replication=replication,
    optimizer="SGD",
    train_dir=str(tmp_path),
    bad_id=1500,
  )
  assert result.returncode
  lines = [s for s in result.stdout.splitlines() if "must be in [0, 1500)" in s]
  assert lines and len(lines) <= 4, result.stdout + result.stderr


@pytest.mark.exhaustive
def test_needs_a_directory():
  result = _launch("--workers=2", **_SETTINGS, optimizer="SGD", train_dir=None)
  assert result.returncode
  assert "`train_dir` must be given where the model has tables" in result.stdout
