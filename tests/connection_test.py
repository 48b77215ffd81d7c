"""Tests of `connection`: waits have words."""

import threading
import time

import pytest

from tf_replicas import connection


@pytest.fixture
def words():
  logs, spoken = [], threading.Event()

  def log(line):
    logs.append(line)
    spoken.set()

  words = connection.Words(every_secs=0.05, log=log)
  yield words, logs, spoken
  words.stop()


class TestWords:
  def test_a_long_wait_has_words(self, words):
    words, logs, spoken = words
    with words.during("waiting for the chief"):
      assert spoken.wait(30)
    assert logs[0] == "waiting for the chief: 0 s so far"

  def test_an_end_of_the_wait_ends_the_words(self, words):
    words, logs, spoken = words
    with pytest.raises(ValueError), words.during("a step"):
      assert spoken.wait(30)
      raise ValueError
    count = len(logs)
    time.sleep(0.5)
    assert len(logs) <= count + 1  # One was perhaps being said.

  def test_short_waits_have_none(self):
    logs = []
    words = connection.Words(every_secs=2.0, log=logs.append)
    end = time.monotonic() + 3.0
    while time.monotonic() < end:
      with words.during("a step"):
        time.sleep(0.01)
    words.stop()
    assert not logs
