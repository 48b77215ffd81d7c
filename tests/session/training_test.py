"""Tests of `session.training`."""

import datetime
import math
import os
import signal
import threading
import time

import numpy as np
import pytest
import tensorflow as tf

from tf_replicas.runtime import processes
from tf_replicas.runtime import waiting
from tf_replicas.session import checkpoints
from tf_replicas.session import interrupts
from tf_replicas.session import training

START = 1.7e9


class Toy:
  """A model of one number, with a clock that each step moves."""

  def __init__(self, *, step=0, secs_per_step=0.5, shape=(2,)):
    self.weights = np.zeros(shape, np.float32)
    self.step = step
    self.now = START
    self.secs_per_step = secs_per_step
    self.num_calls = 0

  def clock(self):
    return self.now

  def state(self):
    return {
      "variables/w": tf.constant(self.weights),
      "global_step": tf.constant(self.step, tf.int64),
      "examples_seen": tf.constant(self.step * 32, tf.int64),
    }

  def load_state(self, values):
    self.weights = values["variables/w"]
    self.step = int(values["global_step"])

  def advance(self):
    self.num_calls += 1
    self.step += 1
    self.weights = self.weights + 1
    self.now += self.secs_per_step
    return training.StepResult(self.step, loss=8 / self.step, num_examples=32)

  def session(self, train_dir, **kwargs):
    kwargs = {"state": self, "clock": self.clock, **kwargs}
    return training.Session(train_dir, **kwargs)


def when(secs):
  return str(datetime.datetime.fromtimestamp(START + secs))


def checkpoint_steps(train_dir):
  return sorted(
    int(path.stem.rpartition("-")[2]) for path in train_dir.glob("*.index")
  )


def contents(directory):
  return {path.name: path.read_bytes() for path in directory.iterdir()}


def test_output_of_a_whole_run(tmp_path, capsys):
  toy = Toy()
  session = toy.session(tmp_path, max_steps=25)
  assert session.restore_or_initialize() == 0
  report = ["worker 0: 25 applied", "worker 1: 24 applied"]
  assert session.run(toy.advance, report=lambda: report) == 25
  rates = "(64.0 examples/sec; 0.500 sec/batch)"
  assert capsys.readouterr().out.splitlines() == [
    "training from step 0 to 25",
    f"{when(5)}: step 10, loss = 0.80 {rates}; 0:00:08 left to step 25",
    f"{when(10)}: step 20, loss = 0.40 {rates}; 0:00:02 left to step 25",
    f"{when(12.5)}: step 25, loss = 0.32 {rates}",
    f"saved {tmp_path}/model.ckpt-25",
    "finished at step 25: 800 examples in 12.5 s (64.0 examples/sec)",
    *report,
  ]
  assert checkpoints.read_finished(tmp_path) == checkpoints.Finished(
    25, f"{tmp_path}/model.ckpt-25", when(12.5)
  )


def test_time_before_the_first_call_does_not_count(capsys):
  toy = Toy()
  session = toy.session(None, max_steps=1)
  session.restore_or_initialize()
  toy.now += 1000.0
  session.run(toy.advance)
  assert "(64.0 examples/sec; 0.500 sec/batch)" in capsys.readouterr().out


class Large(Toy):
  """A model of 64 MiB, which its steps change in place."""

  def __init__(self):
    super().__init__()
    self.variable = tf.Variable(tf.zeros([1 << 24]))

  def state(self):
    return super().state() | {"variables/w": self.variable.read_value()}

  def advance(self):
    self.variable.assign_add(tf.ones([1 << 24]))
    return super().advance()


def test_training_goes_on_while_a_checkpoint_is_written(tmp_path, monkeypatch):
  large = Large()
  save = checkpoints.save
  seen, goes_on = [], threading.Event()

  def save_later(*args, **kwargs):
    goes_on.wait(60)
    return save(*args, **kwargs)

  monkeypatch.setattr(checkpoints, "save", save_later)

  def step_fn():
    if large.step == 2:
      seen.append(checkpoints.is_complete(tmp_path / "model.ckpt-2"))
      goes_on.set()
    return large.advance()

  session = large.session(tmp_path, max_steps=3, checkpoint_every_steps=2)
  assert session.run(step_fn) == 3
  assert seen == [False]
  for step in (2, 3):
    saved = checkpoints.read(tmp_path / f"model.ckpt-{step}")
    assert saved["global_step"] == step
    np.testing.assert_array_equal(saved["variables/w"], step)


class SlowRows:
  """A tensor that is saved in blocks of rows, slowly.

  Attributes:
    begin_read: Called first when rows are read.
  """

  shape, dtype, num_parts = (4, 2), tf.float32, 1

  def __init__(self):
    self.num_reads = 0
    self.begin_read = lambda: None

  def read(self, begin, end):
    self.num_reads += 1
    self.begin_read()
    time.sleep(5)
    return np.ones([end - begin, 2], np.float32)


def test_an_interrupt_does_not_begin_a_checkpoint_that_is_being_written(
  tmp_path, capsys
):
  toy = Toy()
  rows = SlowRows()
  toy.row_tensors = lambda: {"table": rows}

  session = toy.session(tmp_path, max_steps=9, checkpoint_every_steps=2)

  def interrupt():
    rows.begin_read = lambda: None  # A second signal would end the process.
    waiting.await_value(
      lambda: session._writer, timeout_secs=60, what="waiting for the session"
    )
    time.sleep(0.5)  # Now the main thread waits.
    os.kill(os.getpid(), signal.SIGTERM)

  rows.begin_read = interrupt
  with pytest.raises(KeyboardInterrupt):
    session.run(toy.advance)
  assert rows.num_reads == 1
  saved = f"{tmp_path}/model.ckpt-2"
  lines = capsys.readouterr().out.splitlines()
  assert lines[-2:] == [
    f"saved {saved}",
    f"training stops; last checkpoint: {saved}",
  ]
  assert checkpoints.is_complete(checkpoints.tables_of(saved))


def test_a_checkpoint_that_cannot_be_written_ends_training(tmp_path, capsys):
  toy = Toy()
  train_dir = tmp_path / "train"

  def step_fn():
    if toy.step == 2:
      train_dir.rename(tmp_path / "moved")
      train_dir.write_text("in the way")
    return toy.advance()

  session = toy.session(train_dir, max_steps=9, checkpoint_every_steps=2)
  with pytest.raises((OSError, tf.errors.OpError)):
    session.run(step_fn)
  assert toy.step < 9
  assert "model.ckpt-4" not in capsys.readouterr().out


def test_steps_of_others_come_between(tmp_path, capsys):
  toy = Toy()
  results = iter([(3, 96), (3, 32), (9, 64), (12, 64), (21, 64)])

  def step_fn():
    step, num_examples = next(results)
    toy.now += 1.0
    toy.step = step
    # What did not advance may have no loss.
    loss = math.nan if num_examples == 32 else 1.0
    return training.StepResult(step, loss, num_examples)

  session = toy.session(tmp_path, max_steps=20, checkpoint_every_steps=10)
  assert session.run(step_fn) == 21
  lines = capsys.readouterr().out.splitlines()
  # (96 + 32 + 64 + 64) examples and 12 steps in 4 s.
  assert lines[1] == (
    f"{when(4)}: step 12, loss = 1.00 (64.0 examples/sec; 0.333 sec/batch)"
    "; 0:00:03 left to step 20"
  )
  # The checkpoint of step 12 is written meanwhile.
  assert f"saved {tmp_path}/model.ckpt-12" in lines[2:4]
  assert any(line.startswith(f"{when(5)}: step 21") for line in lines[2:4])
  assert checkpoint_steps(tmp_path) == [12, 21]


def test_number_of_a_checkpoint_is_the_step_of_the_state(tmp_path):
  toy = Toy()

  def state():
    return Toy.state(toy) | {"global_step": tf.constant(toy.step + 2, tf.int64)}

  toy.state = state
  toy.session(tmp_path, max_steps=5).run(toy.advance)
  assert checkpoint_steps(tmp_path) == [7]


def test_without_state_the_first_result_tells_the_step(capsys):
  toy = Toy(step=500)
  session = toy.session(None, max_steps=510, state=None)
  assert session.restore_or_initialize() == 0
  assert session.run(toy.advance) == 510
  assert toy.num_calls == 10
  assert "step 510" in capsys.readouterr().out.splitlines()[0]


@pytest.mark.parametrize(
  ("kwargs", "expected"),
  [
    ({}, [20]),
    ({"checkpoint_every_steps": 8}, [8, 16, 20]),
    ({"checkpoint_every_steps": 10}, [10, 20]),
    # Half a second per step.
    ({"checkpoint_every_secs": 3.0}, [6, 12, 18, 20]),
    (
      {"checkpoint_every_secs": 3.0, "checkpoint_every_steps": 8},
      # Seconds count from the last checkpoint, whatever caused it.
      [6, 8, 14, 16, 20],
    ),
    ({"checkpoint_every_secs": None}, [20]),
  ],
)
def test_checkpoint_cadence(tmp_path, kwargs, expected):
  toy = Toy()
  toy.session(tmp_path, max_steps=20, keep_checkpoints=None, **kwargs).run(
    toy.advance
  )
  assert checkpoint_steps(tmp_path) == expected


def test_newest_checkpoints_are_kept_over_restarts(tmp_path):
  for max_steps in [2, 4, 5]:
    toy = Toy()
    toy.session(
      tmp_path,
      max_steps=max_steps,
      checkpoint_every_steps=1,
      keep_checkpoints=3,
    ).run(toy.advance)
  assert checkpoint_steps(tmp_path) == [3, 4, 5]


def test_resume(tmp_path, capsys):
  toy = Toy()
  toy.session(tmp_path, max_steps=4).run(toy.advance)
  capsys.readouterr()
  toy = Toy()
  session = toy.session(tmp_path, max_steps=9)
  assert checkpoints.read_finished(tmp_path) is not None
  assert session.restore_or_initialize() == 4
  assert checkpoints.read_finished(tmp_path) is None
  assert session.run(toy.advance) == 9
  assert toy.num_calls == 5
  np.testing.assert_array_equal(toy.weights, [9.0, 9.0])
  assert checkpoints.read_finished(tmp_path).global_step == 9
  lines = capsys.readouterr().out.splitlines()
  assert lines[0] == f"restored {tmp_path}/model.ckpt-4"
  assert lines[1] == "training from step 4 to 9"
  # One window of 5 steps although the step before was 4.
  assert lines[2] == (
    f"{when(2.5)}: step 9, loss = 0.89 (64.0 examples/sec; 0.500 sec/batch)"
  )


def test_a_damaged_checkpoint_gives_way_to_the_next_older(tmp_path, caplog):
  """The newest has a flipped bit, and a file of the next one is missing."""
  toy = Toy()
  toy.session(tmp_path, max_steps=4, checkpoint_every_steps=1).run(toy.advance)
  data = tmp_path / "model.ckpt-4.data-00000-of-00001"
  content = bytearray(data.read_bytes())
  content[content.index(toy.weights.tobytes())] ^= 1
  data.write_bytes(content)
  os.remove(tmp_path / "model.ckpt-3.data-00000-of-00001")
  toy = Toy()
  session = toy.session(tmp_path, max_steps=6, checkpoint_every_steps=1)
  assert session.restore_or_initialize() == 2
  np.testing.assert_array_equal(toy.weights, [2.0, 2.0])
  damaged, missing = [record.getMessage() for record in caplog.records]
  assert damaged.startswith(f"checkpoint {tmp_path}/model.ckpt-4 is damaged: ")
  assert damaged.endswith(
    f"; the older checkpoint {tmp_path}/model.ckpt-3 is tried"
  )
  assert missing.startswith(f"checkpoint {tmp_path}/model.ckpt-3: files are")
  assert session.run(toy.advance) == 6
  assert checkpoints.read(checkpoints.latest(tmp_path))["global_step"] == 6
  assert checkpoints.read(tmp_path / "model.ckpt-4")["global_step"] == 4


def test_without_a_checkpoint_that_can_be_read_nothing_begins(tmp_path):
  toy = Toy()
  toy.session(tmp_path, max_steps=2, checkpoint_every_steps=1).run(toy.advance)
  for step in (1, 2):
    os.truncate(tmp_path / f"model.ckpt-{step}.index", 20)
  session = Toy().session(tmp_path, max_steps=4)
  with pytest.raises(
    checkpoints.UnreadableCheckpointError, match="model.ckpt-2 is damaged"
  ):
    session.restore_or_initialize()


def test_run_restores_by_itself(tmp_path):
  for max_steps in [4, 6]:
    toy = Toy()
    toy.session(tmp_path, max_steps=max_steps).run(toy.advance)
  assert toy.num_calls == 2


def test_nothing_left_to_do(tmp_path, capsys):
  toy = Toy()
  toy.session(tmp_path, max_steps=4).run(toy.advance)
  before = contents(tmp_path)
  capsys.readouterr()
  toy = Toy()
  assert toy.session(tmp_path, max_steps=3).run(toy.advance) == 4
  assert toy.num_calls == 0
  assert "finished at step 4: 0 examples in 0.0 s" in capsys.readouterr().out
  assert checkpoint_steps(tmp_path) == [4]
  after = contents(tmp_path)
  assert before.items() - after.items() <= {
    ("finished.json", before["finished.json"])
  }
  assert checkpoints.read_finished(tmp_path).checkpoint.endswith("ckpt-4")


@pytest.mark.parametrize("step", [4, 6])
def test_state_not_behind_the_checkpoint_is_kept(tmp_path, capsys, step):
  toy = Toy()
  toy.session(tmp_path, max_steps=4).run(toy.advance)
  survivor = Toy(step=step)
  session = survivor.session(tmp_path, max_steps=8)
  assert session.restore_or_initialize() == step
  assert survivor.step == step
  assert not survivor.weights.any()
  assert f"kept the state at step {step}" in capsys.readouterr().out


def test_checkpoint_of_another_model_is_refused(tmp_path):
  toy = Toy()
  toy.session(tmp_path, max_steps=4).run(toy.advance)
  before = contents(tmp_path)
  other = Toy(shape=(3, 2))
  with pytest.raises(checkpoints.CheckpointError) as info:
    other.session(tmp_path, max_steps=8).run(other.advance)
  assert str(info.value) == (
    f"train_dir {tmp_path} holds a checkpoint of another model: "
    "variables/w has shape [2] in the checkpoint and [3, 2] in the model"
  )
  assert contents(tmp_path) == before
  assert other.num_calls == 0
  assert not other.weights.any()


def test_optional_names_reach_the_checkpoint(tmp_path, capsys):
  toy = Toy()
  toy.session(tmp_path, max_steps=4).run(toy.advance)

  class WithSlots(Toy):
    def state(self):
      return super().state() | {"slots/w/momentum": np.zeros(2, np.float32)}

  toy = WithSlots()
  session = toy.session(
    tmp_path, max_steps=8, is_optional=lambda name: name.startswith("slots/")
  )
  assert session.restore_or_initialize() == 4
  assert "initialized: slots/w/momentum" in capsys.readouterr().out


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_loss_that_is_not_finite(tmp_path, loss):
  toy = Toy()

  def step_fn():
    result = toy.advance()
    return result._replace(loss=loss) if toy.step == 7 else result

  session = toy.session(tmp_path, max_steps=20, checkpoint_every_steps=5)
  with pytest.raises(FloatingPointError) as info:
    session.run(step_fn)
  assert str(info.value) == (
    f"Model diverged with loss = {loss} at step 7; training stops, "
    f"last good checkpoint: {tmp_path}/model.ckpt-5"
  )
  assert checkpoint_steps(tmp_path) == [5]
  assert checkpoints.read_finished(tmp_path) is None


def test_first_loss_that_is_not_finite(tmp_path):
  toy = Toy()
  with pytest.raises(FloatingPointError, match="last good checkpoint: none"):
    toy.session(tmp_path, max_steps=20).run(
      lambda: toy.advance()._replace(loss=math.nan)
    )


def test_variable_that_is_not_finite_is_not_saved(tmp_path):
  toy = Toy()

  def step_fn():
    if toy.step == 7:
      toy.weights[0] = math.nan
    return toy.advance()

  session = toy.session(tmp_path, max_steps=20, checkpoint_every_steps=4)
  with pytest.raises(FloatingPointError) as info:
    session.run(step_fn)
  assert str(info.value) == (
    "Model diverged with non-finite values in variables/w at step 8; "
    "training stops, "
    f"last good checkpoint: {tmp_path}/model.ckpt-4"
  )
  assert checkpoint_steps(tmp_path) == [4]


def test_a_step_that_was_not_made_in_time_loses_no_other(tmp_path, capsys):
  toy = Toy()

  def step_fn():
    if toy.step == 3:
      raise training.StepExpired("step 3: too late")
    return toy.advance()

  with pytest.raises(training.StepExpired, match="too late"):
    toy.session(tmp_path, max_steps=20).run(step_fn)
  assert checkpoint_steps(tmp_path) == [3]
  last = f"training stops; last checkpoint: {tmp_path}/model.ckpt-3"
  assert last in capsys.readouterr().out


def interrupt_with_ctrl_c():
  raise KeyboardInterrupt


def interrupt_with_sigterm():
  os.kill(os.getpid(), signal.SIGTERM)


def interrupt_with_sigint():
  os.kill(os.getpid(), signal.SIGINT)


def _run_until_interrupted(toy, directory, interrupt):
  """Lets `interrupt` come in the fourth step."""

  def step_fn():
    if toy.step == 3:
      interrupt()
    return toy.advance()

  with pytest.raises(KeyboardInterrupt):
    toy.session(directory, max_steps=20).run(step_fn)


@pytest.mark.parametrize(
  "interrupt, last",
  [
    (interrupt_with_ctrl_c, 3),
    # Python calls the handler of a signal, which waits for the step.
    (interrupt_with_sigint, 4),
    (interrupt_with_sigterm, 4),
  ],
)
def test_interrupted_run_saves_and_resumes(
  tmp_path, capsys, monkeypatch, interrupt, last
):
  monkeypatch.setattr(interrupts, "_STEP_SECS", 60.0)  # The step ends before.
  toy = Toy()
  _run_until_interrupted(toy, tmp_path, interrupt)
  assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
  assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
  assert signal.getsignal(signal.SIGALRM) is signal.SIG_DFL
  assert signal.getitimer(signal.ITIMER_REAL) == (0, 0)
  assert checkpoint_steps(tmp_path) == [last]
  assert checkpoints.read_finished(tmp_path) is None
  assert capsys.readouterr().out.splitlines()[-1] == (
    f"training stops; last checkpoint: {tmp_path}/model.ckpt-{last}"
  )
  assert Toy().session(tmp_path, max_steps=20).restore_or_initialize() == last


@pytest.mark.parametrize("times", [1, 2])
def test_interrupt_of_a_step_that_does_not_end(tmp_path, times):
  toy = Toy()

  def step_fn():
    if toy.step == 3:
      for _ in range(times):
        interrupt_with_sigint()
      time.sleep(60)
    return toy.advance()

  start = time.monotonic()
  with pytest.raises(KeyboardInterrupt):
    toy.session(tmp_path, max_steps=20).run(step_fn)
  assert time.monotonic() - start < 30
  assert checkpoint_steps(tmp_path) == [3]


def test_a_second_signal_does_not_stop_the_save(tmp_path, monkeypatch):
  """A cluster manager signals all processes, and then so does the launcher."""
  monkeypatch.setattr(interrupts, "_STEP_SECS", 0.1)
  toy = Toy()
  state = toy.state

  def slow_state():
    if toy.step:
      interrupt_with_sigterm()
      time.sleep(0.5)
    return state()

  toy.state = slow_state
  _run_until_interrupted(toy, tmp_path, interrupt_with_sigterm)
  assert checkpoint_steps(tmp_path) == [4]
  assert signal.getitimer(signal.ITIMER_REAL) == (0, 0)


def test_an_interrupt_outlives_a_step_that_fails(tmp_path, capsys):
  """The parameter servers get the signal too, and end first."""
  toy = Toy()

  def step_fn():
    if toy.step == 3:
      interrupt_with_sigterm()
      raise OSError("a parameter server has ended")
    return toy.advance()

  with pytest.raises(KeyboardInterrupt):
    toy.session(tmp_path, max_steps=20).run(step_fn)
  assert "training stops; last checkpoint: " in capsys.readouterr().out
  assert signal.getitimer(signal.ITIMER_REAL) == (0, 0)


def test_an_interrupt_during_a_recovery(tmp_path):
  """It is not delayed, and the time limit of the recovery stays in force."""
  toy = Toy()

  def step_fn():
    with processes.killed_after(60):
      assert signal.getsignal(signal.SIGALRM) is signal.SIG_DFL
      interrupt_with_sigterm()
      time.sleep(30)
    return toy.advance()

  start = time.monotonic()
  with pytest.raises(KeyboardInterrupt):
    toy.session(tmp_path, max_steps=20).run(step_fn)
  assert time.monotonic() - start < 20
  assert signal.getsignal(signal.SIGALRM) is signal.SIG_DFL
  assert signal.getitimer(signal.ITIMER_REAL) == (0, 0)


def test_interrupt_is_raised_even_if_saving_fails(tmp_path, capsys):
  toy = Toy()
  session = toy.session(tmp_path, max_steps=20)
  session.restore_or_initialize()

  def step_fn():
    toy.state = lambda: 1 / 0
    raise KeyboardInterrupt

  with pytest.raises(KeyboardInterrupt):
    session.run(step_fn)
  assert "could not save: division by zero" in capsys.readouterr().out


def test_handler_of_the_program_for_sigterm_stays():
  received = []
  before = signal.signal(signal.SIGTERM, lambda *_: received.append(1))
  try:
    toy = Toy()

    def step_fn():
      interrupt_with_sigterm()
      return toy.advance()

    assert toy.session(None, max_steps=2).run(step_fn) == 2
  finally:
    signal.signal(signal.SIGTERM, before)
  assert received == [1, 1]


@pytest.mark.parametrize(
  "interrupt", [interrupt_with_sigint, interrupt_with_sigterm]
)
def test_interrupt_of_a_program_with_an_alarm_of_its_own(tmp_path, interrupt):
  before = signal.signal(signal.SIGALRM, lambda *_: None)
  signal.setitimer(signal.ITIMER_REAL, 100)
  try:
    _run_until_interrupted(Toy(), tmp_path, interrupt)
    assert checkpoint_steps(tmp_path) == [3]
    assert signal.getitimer(signal.ITIMER_REAL)[0] > 0
  finally:
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def test_run_in_a_thread():
  toy = Toy()
  steps = []
  thread = threading.Thread(
    target=lambda: steps.append(toy.session(None, max_steps=3).run(toy.advance))
  )
  thread.start()
  thread.join(timeout=10)
  assert steps == [3]


@pytest.mark.parametrize("has_dir", [False, True])
def test_only_the_chief_writes(tmp_path, monkeypatch, capsys, has_dir):
  monkeypatch.chdir(tmp_path)
  train_dir = tmp_path / "train"
  toy = Toy()
  toy.session(
    train_dir if has_dir else None,
    max_steps=10,
    is_chief=not has_dir,
    checkpoint_every_steps=1,
    summary_every_steps=1,
  ).run(toy.advance)
  assert not list(tmp_path.iterdir())
  lines = capsys.readouterr().out.splitlines()
  assert len(lines) == 3
  assert ": step 10, loss" in lines[1]
  assert lines[2].startswith("finished at step 10: 320 examples")


def test_task_that_does_not_write_restores(tmp_path):
  toy = Toy()
  toy.session(tmp_path, max_steps=4).run(toy.advance)
  before = contents(tmp_path)
  other = Toy()
  other.session(tmp_path, max_steps=6, is_chief=False).run(other.advance)
  assert other.num_calls == 2
  assert contents(tmp_path) == before


def test_summaries(tmp_path):
  toy = Toy()
  toy.session(tmp_path, max_steps=250).run(
    lambda: toy.advance()._replace(scalars={"learning_rate": 0.5})
  )
  (path,) = tmp_path.glob("events.out.tfevents.*")
  scalars = {}
  for event in tf.compat.v1.train.summary_iterator(str(path)):
    for value in event.summary.value:
      number = tf.make_ndarray(value.tensor).item()
      scalars.setdefault(value.tag, {})[event.step] = number
  assert scalars == {
    "loss": {
      step: pytest.approx(8 / step, rel=1e-6) for step in (100, 200, 250)
    },
    "examples_per_sec": dict.fromkeys((100, 200, 250), 64.0),
    "steps_per_sec": dict.fromkeys((100, 200, 250), 2.0),
    "learning_rate": dict.fromkeys((100, 200, 250), 0.5),
  }


@pytest.mark.parametrize(
  ("kwargs", "message"),
  [
    ({"max_steps": -1}, "`max_steps` must be 0 or more. Received: -1."),
    *(
      (
        {name: value},
        f"`{name}` must be positive or None. Received: {value}.",
      )
      for name, value in [
        ("log_every_steps", 0),
        ("summary_every_steps", -1),
        ("checkpoint_every_steps", 0),
        ("checkpoint_every_secs", 0.0),
        ("keep_checkpoints", 0),
      ]
    ),
  ],
)
def test_arguments_out_of_range(kwargs, message):
  with pytest.raises(ValueError) as info:
    training.Session(None, **{"state": None, "max_steps": 1, **kwargs})
  assert str(info.value) == message


def test_train_dir_that_is_a_file(tmp_path):
  (tmp_path / "x").write_text("")
  with pytest.raises(ValueError, match="`train_dir` must be a directory"):
    training.Session(tmp_path / "x", state=None, max_steps=1)
