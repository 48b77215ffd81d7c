"""Tests of `session.reports`."""

import datetime
import io
import sys

import numpy as np
import pytest
import tensorflow as tf

from tf_replicas.session import console as console_lib
from tf_replicas.session import reports

START = 1.7e9


def when(secs):
  return str(datetime.datetime.fromtimestamp(START + secs))


def make_reporter(*, log_every_steps=10, summaries=None, **kwargs):
  return reports.Reporter(
    console_lib.Console(has_bar=False),
    summaries or reports.Summaries(None),
    log_every_steps=log_every_steps,
    summary_every_steps=kwargs.pop("summary_every_steps", None),
    max_steps=kwargs.pop("max_steps", 0),
    now=START,
  )


def advance(reporter, previous, step, secs, *, is_last=False, **kwargs):
  fields = {"loss": 4.685, "num_examples": 128, "scalars": {}, **kwargs}
  reporter.advance(
    previous, global_step=step, now=START + secs, is_last=is_last, **fields
  )


def read_scalars(directory):
  """Returns {(tag, step): value} of every event file in `directory`."""
  scalars = {}
  for path in sorted(directory.glob("events.out.tfevents.*")):
    for event in tf.compat.v1.train.summary_iterator(str(path)):
      for value in event.summary.value:
        scalars[value.tag, event.step] = tf.make_ndarray(value.tensor).item()
  return scalars


@pytest.mark.parametrize(
  ("previous", "step", "every", "expected"),
  [
    (0, 1, 10, False),
    (8, 9, 10, False),
    (9, 10, 10, True),
    (10, 11, 10, False),
    (8, 12, 10, True),  # Passed by other replicas.
    (10, 10, 10, False),
    (12, 8, 10, False),  # Set back.
    (0, 1, 1, True),
    (9, 10, None, False),
  ],
)
def test_is_due(previous, step, every, expected):
  assert reports.is_due(previous, step, every) == expected


@pytest.mark.parametrize("every", [1, 3, 10, None])
def test_nothing_is_due_in_between(every):
  for step in range(25):
    found = [k for k in range(1, 11) if reports.is_due(step, step + k, every)]
    left = reports.steps_until_due(step, every)
    assert left == (found[0] if found else float("inf"))


def test_last_step_is_due_unless_switched_off():
  assert reports.is_due(3, 4, 10, is_last=True)
  assert not reports.is_due(3, 4, None, is_last=True)


def test_log_line(capsys):
  reporter = make_reporter(log_every_steps=2)
  advance(reporter, 0, 1, 64.0)
  advance(reporter, 1, 2, 64.25)
  assert capsys.readouterr().out == (
    f"{when(64.25)}: step 2, loss = 4.68 (4.0 examples/sec; 32.125 sec/batch)\n"
  )
  # 2 steps, 3 * 128 examples in half a second.
  advance(reporter, 2, 3, 64.4, loss=-0.004, num_examples=256)
  advance(reporter, 3, 4, 64.75, loss=1000.0)
  assert capsys.readouterr().out == (
    f"{when(64.75)}: step 4, loss = 1000.00 "
    "(768.0 examples/sec; 0.250 sec/batch)\n"
  )


def test_learning_rate_and_time_left(capsys):
  reporter = make_reporter(log_every_steps=1, max_steps=200)
  rate = {"learning_rate": 0.0125}
  advance(reporter, 0, 1, 0.5, scalars=rate)
  # 190 steps at the 0.5 s of the last 9.
  advance(reporter, 1, 10, 5.0, scalars=rate)
  advance(reporter, 10, 11, 9.0, scalars={"learning_rate": float("nan")})
  advance(reporter, 11, 200, 20.0, scalars=rate)
  found = [
    x.split(" sec/batch)")[1] for x in capsys.readouterr().out.split("\n")[:-1]
  ]
  assert found == [
    "; learning rate 0.0125; 0:01:40 left to step 200",
    "; learning rate 0.0125; 0:01:35 left to step 200",
    "; 0:12:36 left to step 200",
    "; learning rate 0.0125",
  ]


def test_the_bar_shows_loss_and_learning_rate(monkeypatch):
  monkeypatch.setattr(sys, "stdout", terminal := Terminal())
  console = console_lib.Console()
  console.open_bar(0, 2)
  reporter = reports.Reporter(
    console,
    reports.Summaries(None),
    log_every_steps=None,
    summary_every_steps=None,
    max_steps=2,
    now=START,
  )
  advance(reporter, 0, 2, 1.0, scalars={"learning_rate": 0.0125})
  reporter.close()
  assert "2/2" in terminal.getvalue()
  assert "loss = 4.68, learning rate 0.0125" in terminal.getvalue()


def test_examples_of_calls_that_did_not_advance_count(capsys):
  reporter = make_reporter(log_every_steps=1)
  reporter.add_examples(72)
  advance(reporter, 0, 1, 2.0)
  assert "(100.0 examples/sec; 2.000 sec/batch)" in capsys.readouterr().out
  assert reporter.final_line(1, START + 4.0) == (
    "finished at step 1: 200 examples in 4.0 s (50.0 examples/sec)"
  )


def test_clock_that_stands_still_divides_nothing_by_zero(capsys):
  reporter = make_reporter(log_every_steps=1)
  advance(reporter, 0, 1, 0.0)
  assert "(0.0 examples/sec; 0.000 sec/batch)" in capsys.readouterr().out


def test_summaries_are_in_the_event_file(tmp_path):
  reporter = make_reporter(
    log_every_steps=None,
    summary_every_steps=2,
    summaries=reports.Summaries(tmp_path),
  )
  advance(reporter, 5, 6, 4.0, loss=2.5, scalars={"learning_rate": 0.125})
  advance(reporter, 6, 7, 5.0, loss=9.0)
  advance(reporter, 7, 8, 6.0, loss=1.5, scalars={"a/worker_0/applied": 3})
  advance(reporter, 8, 9, 7.0, loss=0.5, is_last=True)
  reporter.close()
  assert read_scalars(tmp_path) == {
    ("loss", 6): 2.5,
    ("examples_per_sec", 6): 32.0,
    ("steps_per_sec", 6): 0.25,
    ("learning_rate", 6): 0.125,
    ("loss", 8): 1.5,
    ("examples_per_sec", 8): 128.0,
    ("steps_per_sec", 8): 1.0,
    ("a/worker_0/applied", 8): 3.0,
    ("loss", 9): 0.5,
    ("examples_per_sec", 9): 128.0,
    ("steps_per_sec", 9): 1.0,
  }


def test_histograms_and_images_are_those_of_tensorflow(tmp_path):
  values = np.random.default_rng(0).normal(size=[7, 3])
  picture = np.arange(24, dtype=np.uint8).reshape([2, 4, 3])
  summaries = reports.Summaries(tmp_path / "ours")
  summaries.write(5, {"s": 0.5}, {"a/h": values}, {"b": picture})
  summaries.close()
  with tf.summary.create_file_writer(str(tmp_path / "theirs")).as_default(5):
    tf.summary.scalar("s", 0.5)
    tf.summary.histogram("a/h", values)
    tf.summary.image("b", picture[np.newaxis])

  def read(name):
    (path,) = (tmp_path / name).glob("events.out.tfevents.*")
    return {
      (value.tag, event.step): (
        value.metadata.plugin_data.plugin_name,
        tf.make_ndarray(value.tensor).tolist(),
      )
      for event in tf.compat.v1.train.summary_iterator(str(path))
      for value in event.summary.value
    }

  ours, theirs = read("ours"), read("theirs")
  assert ours.keys() == theirs.keys()
  for key, (plugin, found) in theirs.items():
    assert ours[key][0] == plugin
    if plugin == "histograms":
      np.testing.assert_allclose(ours[key][1], found, rtol=1e-6)
    else:
      assert ours[key][1] == found


def test_a_missing_tensorboard_is_named_and_ends_nothing(
  tmp_path, monkeypatch, capsys
):
  monkeypatch.setitem(sys.modules, "tensorboard", None)
  summaries = reports.Summaries(tmp_path)
  summaries.write(1, {"loss": 1.0})
  summaries.close()
  assert capsys.readouterr().out == (
    "No summaries are written, as the package tensorboard is not installed:"
    " pip install tensorboard\n"
  )
  assert not list(tmp_path.iterdir())


def test_summaries_without_a_directory_write_nothing(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  summaries = reports.Summaries(None)
  summaries.write(1, {"loss": 1.0})
  summaries.close()
  assert not list(tmp_path.iterdir())


class Terminal(io.StringIO):
  def isatty(self):
    return True


def test_lines_do_not_garble_the_bar(monkeypatch):
  terminal = Terminal()
  monkeypatch.setattr(sys, "stdout", terminal)
  console = console_lib.Console()
  console.log("before")
  console.open_bar(5, 10)
  console.move_bar(7, "loss = 1.23")
  console.log("a line")
  console.close_bar()
  console.log("after")
  text = terminal.getvalue()
  # A terminal shows what follows the last carriage return of each line.
  shown = [line.rpartition("\r")[2] for line in text.split("\n")]
  assert shown[:2] == ["before", "a line"]
  assert "7/10" in shown[2] and "loss = 1.23" in shown[2]
  assert shown[3:] == ["after", ""]
  assert "5/10" in text


def test_no_bar_where_stdout_is_no_terminal(capsys):
  console = console_lib.Console()
  console.open_bar(0, 10)
  console.move_bar(1, "loss = 1.00")
  console.log("a line")
  console.close_bar()
  assert capsys.readouterr().out == "a line\n"
