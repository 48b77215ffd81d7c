"""Tests of `session.checkpoints`."""

import functools
import glob
import json
import os
import pathlib
import resource

import numpy as np
import pytest
import tensorflow as tf

from tf_replicas.runtime import row_files
from tf_replicas.session import checkpoints


class FakeState:
  """Named arrays in the place of a model."""

  def __init__(self, **values):
    self.values = {k.replace("__", "/"): np.array(v) for k, v in values.items()}
    self.values.setdefault("global_step", np.array(0, np.int64))

  def state(self):
    return {name: tf.constant(value) for name, value in self.values.items()}

  def load_state(self, values):
    assert values.keys() <= self.values.keys()
    self.values.update(values)


def save_steps(train_dir, steps, **kwargs):
  return [
    checkpoints.save(
      train_dir, FakeState(global_step=np.int64(step)).state(), **kwargs
    )
    for step in steps
  ]


def contents(directory):
  return {
    path.name: path.read_bytes() for path in pathlib.Path(directory).iterdir()
  }


def test_read_returns_what_save_was_given(tmp_path):
  values = {
    "variables/conv1/kernel": np.arange(6, dtype=np.float32).reshape(2, 3),
    "slots/a.b/c.Sd..e/.ATTRIBUTES/VARIABLE_VALUE": np.ones(2, np.float64),
    "averages/größe_1:0": np.array([True, False]),
    "variables/half": tf.constant([1.5, -2.0], tf.bfloat16),
    "variables/empty": np.zeros((0, 3), np.float16),
    "items": np.array(7, np.uint64),
    "save_counter": np.array(3, np.int32),
    "global_step": np.int64(2**53 + 1),
  }
  path = checkpoints.save(tmp_path, values)
  assert path == str(tmp_path / f"model.ckpt-{2**53 + 1}")
  read = checkpoints.read(path)
  assert read.keys() == values.keys()
  for name, value in values.items():
    assert read[name].dtype == np.asarray(value).dtype, name
    np.testing.assert_array_equal(read[name], np.asarray(value), name)


def test_tensorflow_restores_the_variables(tmp_path):
  path = checkpoints.save(
    tmp_path,
    {
      "variables/conv1/kernel": np.array([1.0, 2.0], np.float32),
      "slots/a.b/c": np.array(["x", b"y\0"], np.object_),
      "global_step": np.int64(3),
    },
  )
  kernel = tf.Variable([0.0, 0.0])
  slot, step = tf.Variable(["", ""]), tf.Variable(0, dtype=tf.int64)
  state = {
    "variables/conv1/kernel": kernel,
    "slots/a.b/c": slot,
    "global_step": step,
  }
  restored = tf.train.Checkpoint(state=state).restore(path)
  restored.assert_consumed()
  np.testing.assert_array_equal(kernel, [1.0, 2.0])
  assert slot.numpy().tolist() == [b"x", b"y\0"]
  assert int(step) == 3
  assert tf.train.latest_checkpoint(tmp_path) == path


def test_a_damaged_index_file_ends_no_save(tmp_path):
  save_steps(tmp_path, [1])
  (tmp_path / "checkpoint").write_bytes(b"\xff\xfe")
  save_steps(tmp_path, [2])
  assert checkpoints.latest(tmp_path) == str(tmp_path / "model.ckpt-2")


def test_save_takes_variables_and_ignores_the_device_of_the_caller(tmp_path):
  variable = tf.Variable([1.0, 2.0])
  with tf.device("/job:elsewhere/task:1"):
    path = checkpoints.save(
      tmp_path, {"variables/v": variable, "global_step": np.int64(1)}
    )
  np.testing.assert_array_equal(
    checkpoints.read(path)["variables/v"], [1.0, 2.0]
  )


def test_only_the_newest_are_kept_even_by_a_new_process(tmp_path):
  (tmp_path / "notes.txt").write_text("mine")
  save_steps(tmp_path, [1, 2, 3, 4], keep_checkpoints=2)
  names = {os.path.basename(p) for p in glob.glob(str(tmp_path / "*.index"))}
  assert names == {"model.ckpt-3.index", "model.ckpt-4.index"}
  assert (tmp_path / "notes.txt").read_text() == "mine"


def test_none_keeps_every_checkpoint(tmp_path):
  save_steps(tmp_path, range(7), keep_checkpoints=None)
  assert len(glob.glob(str(tmp_path / "*.index"))) == 7


def test_latest(tmp_path):
  assert checkpoints.latest(tmp_path / "absent") is None
  assert checkpoints.latest(tmp_path) is None
  paths = save_steps(tmp_path, [9, 10])
  assert checkpoints.latest(tmp_path) == paths[-1]
  # Copied without the index file: the largest step, not the last name.
  os.remove(tmp_path / "checkpoint")
  assert checkpoints.latest(tmp_path) == paths[-1]


def test_latest_after_the_directory_was_moved(tmp_path):
  save_steps(tmp_path / "a", [3])
  os.rename(tmp_path / "a", tmp_path / "b")
  path = checkpoints.latest(tmp_path / "b")
  assert checkpoints.read(path)["global_step"] == 3


def truncate_data(path):
  os.truncate(path + ".data-00000-of-00001", 10)


def truncate_index(path):
  os.truncate(path + ".index", 20)


def flip_data(path):
  file = pathlib.Path(path + ".data-00000-of-00001")
  data = bytearray(file.read_bytes())
  data[20] ^= 255
  file.write_bytes(data)


def remove_data(path):
  os.remove(path + ".data-00000-of-00001")


def remove_index(path):
  os.remove(path + ".index")


@pytest.mark.parametrize("damage", [truncate_data, truncate_index, flip_data])
def test_damaged_checkpoint_is_named(tmp_path, damage):
  path = checkpoints.save(
    tmp_path, FakeState(variables__v=np.ones(100)).state()
  )
  damage(path)
  with pytest.raises(checkpoints.CheckpointError) as info:
    checkpoints.read(path)
  assert str(info.value).startswith(f"checkpoint {path} is damaged: ")
  assert "\n" not in str(info.value)
  assert not isinstance(info.value, checkpoints.MissingCheckpointError)


def test_a_save_removes_what_a_killed_process_has_left(tmp_path):
  for name in (".rows-abc", "model.ckpt-1_temp"):
    (tmp_path / name).mkdir()
    (tmp_path / name / "part").write_bytes(b"x")
  (path,) = save_steps(tmp_path, [2])
  assert checkpoints.latest(tmp_path) == path
  assert not [p for p in tmp_path.iterdir() if p.is_dir()]


class _Rows:
  """A tensor of this process that is saved in blocks of rows."""

  shape, dtype, num_parts = (4, 2), tf.float32, 1

  def __init__(self):
    self.values = np.zeros(self.shape, np.float32)

  def read(self, begin, end):
    return self.values[begin:end]

  def assign(self, begin, values):
    self.values[begin : begin + len(values)] = values


def test_tables_of_a_killed_save_do_not_harm_the_next(tmp_path):
  rows = {"variables/table": _Rows()}
  left = tmp_path / "model.ckpt-2.tables.data-00000-of-00003"
  left.write_bytes(b"x")
  (path,) = save_steps(tmp_path, [2], row_tensors=rows)
  assert not left.exists()
  assert checkpoints.saved_rows(path).keys() == rows.keys()
  left.write_bytes(b"x")  # Beside a checkpoint that is complete.
  save_steps(tmp_path, [2], row_tensors=rows)
  assert checkpoints.saved_rows(path).keys() == rows.keys()


@pytest.mark.parametrize("lost", [".tables.index", ".tables.*"])
def test_lost_tables_make_a_checkpoint_unreadable(tmp_path, lost):
  rows = {"variables/table": _Rows()}
  one, two = save_steps(tmp_path, [1, 2], row_tensors=rows)
  for name in glob.glob(glob.escape(two) + lost):
    os.remove(name)
  restore = functools.partial(
    checkpoints.restore, state=FakeState(), row_tensors=rows
  )
  with pytest.raises(
    checkpoints.MissingCheckpointError, match="2.tables: files are missing"
  ):
    restore(two)
  assert checkpoints.read_newest(tmp_path, restore).path == one


@pytest.mark.parametrize(
  ("saved", "here"),
  [({}, {"variables__v": 1.0}), ({"variables__table": 1}, {})],
)
def test_another_model_with_tables_is_named_as_such(tmp_path, saved, here):
  path = checkpoints.save(tmp_path, FakeState(**saved).state())
  with pytest.raises(checkpoints.CheckpointError, match="another model"):
    checkpoints.restore(
      path,
      FakeState(**here),
      row_tensors={"variables/table": _Rows()},
    )


def test_tables_of_a_killed_save_are_not_those_of_a_model_without(tmp_path):
  for name in ("data-00000-of-00001", "index"):
    (tmp_path / f"model.ckpt-2.tables.{name}").write_bytes(b"x")
  (path,) = save_steps(tmp_path, [2])
  assert not checkpoints.saved_rows(path)


def test_a_save_that_fails_leaves_the_earlier_checkpoint(tmp_path):
  """Files may not grow beyond a limit, as on a disk that is full."""
  (path,) = save_steps(tmp_path, [1])
  before = contents(tmp_path)
  large = FakeState(variables__v=np.ones(1 << 20)).state()
  limits = resource.getrlimit(resource.RLIMIT_FSIZE)
  resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))
  try:
    with pytest.raises(tf.errors.OpError):
      checkpoints.save(tmp_path, large)
  finally:
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
  assert contents(tmp_path) == before
  assert checkpoints.latest(tmp_path) == path
  assert checkpoints.read(path)["global_step"] == 1


@pytest.mark.parametrize("damage", [remove_data, remove_index])
def test_missing_files_are_told_from_damage(tmp_path, damage):
  (path,) = save_steps(tmp_path, [1])
  assert checkpoints.is_complete(path)
  damage(path)
  assert not checkpoints.is_complete(path)
  with pytest.raises(checkpoints.MissingCheckpointError, match=path):
    checkpoints.read(path)
  # It is still the latest: nobody may silently start afresh.
  assert checkpoints.latest(tmp_path) == path


def test_foreign_checkpoint_is_refused(tmp_path):
  path = tf.train.Checkpoint(v=tf.Variable(1.0)).write(str(tmp_path / "x"))
  with pytest.raises(
    checkpoints.CheckpointError, match="another program wrote it"
  ):
    checkpoints.read(path)


def test_restore(tmp_path):
  trained = FakeState(
    variables__w=[1.0, 2.0],
    slots__w__momentum=[3.0, 4.0],
    global_step=np.int64(12),
  )
  path = checkpoints.save(tmp_path, trained.state())
  fresh = FakeState(variables__w=[0.0, 0.0], slots__w__momentum=[0.0, 0.0])
  restored = checkpoints.restore(path, fresh)
  assert restored == checkpoints.Restored(path, 12, (), (), ())
  assert checkpoints.describe(restored) == f"restored {path}"
  for name, value in trained.values.items():
    np.testing.assert_array_equal(fresh.values[name], value)


@pytest.mark.parametrize(
  ("here", "what"),
  [
    (
      {"variables__w": np.zeros((4, 3)), "variables__b": np.zeros(3)},
      "variables/w has shape [2, 3] in the checkpoint and [4, 3] in the model",
    ),
    (
      {
        "variables__w": np.zeros((2, 3), np.float32),
        "variables__b": np.zeros(3),
      },
      "variables/w has dtype float64 in the checkpoint and float32 in the"
      " model",
    ),
    (
      {"variables__w": np.zeros((2, 3))},
      "variables/b is not in the model",
    ),
    (
      {"variables__w": np.zeros((2, 3)), "variables__c": np.zeros(3)},
      "variables/b is not in the model; variables/c is not in the checkpoint",
    ),
  ],
)
def test_checkpoint_of_another_model_is_refused(tmp_path, here, what):
  there = FakeState(variables__w=np.ones((2, 3)), variables__b=np.ones(3))
  path = checkpoints.save(tmp_path, there.state())
  before = contents(tmp_path)
  here = FakeState(**here)
  with pytest.raises(checkpoints.CheckpointError) as info:
    checkpoints.restore(path, here)
  assert str(info.value) == (
    f"train_dir {tmp_path} holds a checkpoint of another model: {what}"
  )
  assert contents(tmp_path) == before
  assert not any(value.any() for value in here.values.values())


def test_many_differences_are_counted(tmp_path):
  there = FakeState(**{f"variables__v{i}": 1.0 for i in range(7)})
  path = checkpoints.save(tmp_path, there.state())
  with pytest.raises(checkpoints.CheckpointError, match="; and 3 more$"):
    checkpoints.restore(path, FakeState())


def test_optional_names_start_afresh(tmp_path):
  there = FakeState(
    variables__w=[1.0, 2.0], slots__w__m=[3.0, 4.0], slots__w__k=[1.0]
  )
  path = checkpoints.save(tmp_path, there.state())
  here = FakeState(
    variables__w=[0.0, 0.0], slots__w__v=[7.0], slots__w__k=[9.0, 9.0]
  )
  restored = checkpoints.restore(
    path, here, is_optional=lambda name: name.startswith("slots/")
  )
  assert checkpoints.describe(restored) == (
    f"restored {path}; initialized: slots/w/k, slots/w/v; "
    "in the checkpoint, but not used: slots/w/k, slots/w/m"
  )
  np.testing.assert_array_equal(here.values["variables/w"], [1.0, 2.0])
  np.testing.assert_array_equal(here.values["slots/w/v"], [7.0])
  np.testing.assert_array_equal(here.values["slots/w/k"], [9.0, 9.0])


def test_new_averages_start_at_the_restored_variables(tmp_path):
  path = checkpoints.save(tmp_path, FakeState(variables__w=[1.0, 2.0]).state())
  here = FakeState(variables__w=[0.0, 0.0], averages__w=[0.0, 0.0])
  restored = checkpoints.restore(
    path, here, is_optional=lambda name: name.startswith("averages/")
  )
  np.testing.assert_array_equal(here.values["averages/w"], [1.0, 2.0])
  assert checkpoints.describe(restored) == (
    f"restored {path}; missing averages, which start at their variables:"
    " averages/w"
  )


def test_first_non_finite_looks_at_variables_only():
  values = {
    "slots/w/m": np.array([np.inf]),
    "variables/n": np.array([1]),
    "variables/w": tf.constant([1.0, np.nan], tf.bfloat16),
  }
  assert checkpoints.first_non_finite(values) == "variables/w"
  del values["variables/w"]
  assert checkpoints.first_non_finite(values) is None


def test_finished_record(tmp_path):
  assert checkpoints.read_finished(tmp_path) is None
  record = checkpoints.Finished(
    20, str(tmp_path / "a" / "model.ckpt-20"), "2024-05-06 07:08:09"
  )
  checkpoints.write_finished(tmp_path / "a", record)
  assert os.listdir(tmp_path / "a") == ["finished.json"]
  assert json.loads((tmp_path / "a" / "finished.json").read_text()) == {
    "global_step": 20,
    "checkpoint": "model.ckpt-20",
    "datetime": "2024-05-06 07:08:09",
  }
  assert checkpoints.read_finished(tmp_path / "a") == record
  checkpoints.remove_finished(tmp_path / "a")
  checkpoints.remove_finished(tmp_path / "a")
  assert checkpoints.read_finished(tmp_path / "a") is None


@pytest.mark.parametrize("text", ["", "[1]", '{"global_step": 1}'])
def test_malformed_finished_record(tmp_path, text):
  (tmp_path / "finished.json").write_text(text)
  with pytest.raises(
    checkpoints.CheckpointError, match="finished.json is damaged"
  ):
    checkpoints.read_finished(tmp_path)


class _RowsElsewhere:
  """A tensor whose rows are written where this process does not look."""

  shape, dtype, num_parts = (4, 2), tf.float32, 2

  def __init__(self, directory):
    self._directory = directory

  def remote_writers(self, name):
    def write(number, path):
      stored = row_files.stride_name(name, number, 2)
      place = row_files.slice_of((2, 2), 0, 2)
      path = os.path.join(self._directory, os.path.basename(path))
      row_files.save(path, stored, place, np.ones([2, 2], np.float32))

    return [functools.partial(write, number) for number in (0, 1)]


def test_servers_that_share_no_storage_cannot_write(tmp_path):
  train_dir = tmp_path / "train"
  rows = _RowsElsewhere(tmp_path / "elsewhere")
  values = {"global_step": np.int64(3)}
  message = "needs a `train_dir` on storage that all tasks share .*train"
  with pytest.raises(checkpoints.CheckpointError, match=message):
    checkpoints.save(
      train_dir, values, row_tensors={"table": rows}, written_by_ps=True
    )
  assert os.listdir(tmp_path / "elsewhere")
  assert checkpoints.latest(train_dir) is None
  assert not os.listdir(train_dir)
