"""Tests for fitting.progress."""

import io
import re
import sys

import keras
import numpy as np
import pytest

import tf_replicas
from tf_replicas.fitting import progress


class _Terminal(io.StringIO):
  def isatty(self):
    return True


def _progress(*, rate=0.0125, epochs=2, steps=10, verbose="auto"):
  """A callback, and a list whose last element is the time."""
  now = [0.0]
  callback = progress.Progress(lambda: rate, clock=lambda: now[-1])
  callback.set_params({"verbose": verbose, "epochs": epochs, "steps": steps})
  callback.on_train_begin()
  return callback, now


def _train(callback, now, *, epochs=2, steps=10, secs=1.0):
  for epoch in range(epochs):
    callback.on_epoch_begin(epoch)
    for batch in range(steps):
      now.append(now[-1] + secs)
      callback.on_train_batch_end(batch, {"loss": 0.25})
    callback.on_epoch_end(epoch, {"loss": 0.25, "val_loss": 0.5})


def test_lines_where_there_is_no_terminal(capsys):
  _train(*_progress(), secs=6.0)
  output = capsys.readouterr().out
  assert not re.search(r"[\b\r\x1b]", output)
  # Keras' line after an epoch has the time since its beginning.
  lines = re.sub(r" - \d+s - .*?/step", "", output).splitlines()
  end = "loss: 0.2500 - val_loss: 0.5000 - learning_rate: 0.0125"
  assert lines == [
    "Epoch 1/2",
    "1/10 - loss: 0.25 - learning_rate: 0.0125",
    "3/10 - 0:01:42 left - loss: 0.25 - learning_rate: 0.0125",
    "5/10 - 0:01:30 left - loss: 0.25 - learning_rate: 0.0125",
    "7/10 - 0:01:18 left - loss: 0.25 - learning_rate: 0.0125",
    "9/10 - 0:01:06 left - loss: 0.25 - learning_rate: 0.0125",
    f"10/10 - {end}",
    "Epoch 2/2 - 0:01:00 left",
    "1/10 - 0:00:54 left - loss: 0.25 - learning_rate: 0.0125",
    "3/10 - 0:00:42 left - loss: 0.25 - learning_rate: 0.0125",
    "5/10 - 0:00:30 left - loss: 0.25 - learning_rate: 0.0125",
    "7/10 - 0:00:18 left - loss: 0.25 - learning_rate: 0.0125",
    "9/10 - 0:00:06 left - loss: 0.25 - learning_rate: 0.0125",
    f"10/10 - {end}",
  ]


@pytest.mark.parametrize("verbose", [0, 2])
def test_fewer_lines_if_asked(verbose, capsys):
  _train(*_progress(verbose=verbose))
  lines = capsys.readouterr().out.splitlines()
  assert len(lines) == (4 if verbose else 0)
  assert all(line.startswith(("Epoch", "10/10")) for line in lines)


def test_a_bar_on_a_terminal(monkeypatch):
  monkeypatch.setattr(sys, "stdout", terminal := _Terminal())
  _train(*_progress())
  shown = [line.rpartition("\r")[2] for line in terminal.getvalue().split("\n")]
  assert shown[0] == "Epoch 1/2"
  assert "10/10" in shown[1] and "━" in shown[1]
  assert "learning_rate: 0.0125" in shown[1]
  assert shown[2] == "Epoch 2/2 - 0:00:10 left"


def test_the_mean_of_a_metric_with_several_numbers(capsys):
  callback, _ = _progress()
  callback.on_epoch_begin(0)
  callback.on_train_batch_end(0, {"f1_score": np.array([0.25, 0.75])})
  callback.on_epoch_end(0, {"f1_score": np.array([0.25, 1.25])})
  lines = capsys.readouterr().out.splitlines()
  assert lines[1] == "1/10 - f1_score: 0.5 - learning_rate: 0.0125"
  assert "f1_score: 0.7500" in lines[2]


def test_several_rates_are_none(capsys):
  _train(*_progress(rate=float("nan")))
  assert "learning_rate" not in capsys.readouterr().out


def test_fit_shows_the_rate_that_a_callback_sets(capsys):
  def model_fn():
    model = keras.Sequential([keras.Input([1]), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.5), "mse")
    return model

  x = np.ones([8, 1], np.float32)
  halve = keras.callbacks.LearningRateScheduler(lambda e, rate: rate / 2**e)
  history = tf_replicas.fit(
    model_fn, x, x, batch_size=4, epochs=2, callbacks=[halve]
  )
  output = capsys.readouterr().out
  rates = re.findall(r"^2/2 .*learning_rate: (\S+)", output, re.MULTILINE)
  assert rates == ["0.5000", "0.2500"]
  assert "Epoch 2/2" in output and "replicas" not in output
  assert history.epoch == [0, 1]
