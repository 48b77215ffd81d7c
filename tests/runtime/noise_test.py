"""Tests for runtime.noise; `tests/fitting/cluster_test.py` has real output."""

import os

import pytest
import tensorflow  # noqa: F401  Its import starts a process, so not in a test.

from tf_replicas.runtime import noise

_VARIABLE = "TF_CPP_MIN_LOG_LEVEL"
_CUDA = (
  "[ps 0] E0000 00:00:1 7 cuda_platform.cc:51] failed call to cuInit: INTERNAL:"
  " CUDA error: Failed call to cuInit: UNKNOWN ERROR (303)"
)
_LOST = (
  "[worker 1] E0000 00:00:1 7 eager_cluster_function_library_runtime.cc:1] "
  "Failed to remove function remotely due to UNAVAILABLE: Socket closed"
)


def test_errors_are_shown_by_default(monkeypatch):
  monkeypatch.delenv(_VARIABLE, raising=False)
  assert noise.environ()[_VARIABLE] == "2"
  assert _VARIABLE not in os.environ
  noise.hide()
  assert os.environ[_VARIABLE] == "2"


def test_the_users_level_wins(monkeypatch):
  monkeypatch.setenv(_VARIABLE, "0")
  noise.hide()
  assert os.environ[_VARIABLE] == noise.environ()[_VARIABLE] == "0"
  assert not noise.is_noise(_LOST)


@pytest.mark.parametrize(
  ("line", "expected"),
  [
    (_CUDA, True),
    (_LOST, True),
    ("[chief 0] I0000 00:00:1 7 port.cc:153] oneDNN custom operations", True),
    ("[worker 0] WARNING: All log messages before absl::InitializeLog()", True),
    # As of TensorFlow 2.19.
    (
      "[ps 0] 2026-11-25 03:41:10.1: E a/cuda.cc:5] failed call to cuInit",
      True,
    ),
    ("[ps 0] 2026-11-25 03:41:10.1: I a/b.cc:463] Started server", True),
    (
      "[ps 0] E0000 00:00:1 7 x.cc:1] Unable to register cuDNN factory: a",
      True,
    ),
    (
      "[ps 0] W0000 00:00:1 7 x.cc:1] computation placer already registered",
      True,
    ),
    ("[ps 0] 2026-11-25 03:41:10.1: E a/ops.cc:5] INVALID_ARGUMENT", False),
    ("[worker 0] E0000 00:00:1 7 ops.cc:1] INVALID_ARGUMENT: bad shape", False),
    ("[worker 0] error: ps 0 at a:1 does not answer", False),
    ("[launcher] worker 1 was killed by SIGKILL; restarting it", False),
    ("[worker 0] my program reports: failed call to cuInit", False),
  ],
)
def test_noise_has_no_errors(monkeypatch, line, expected):
  monkeypatch.setenv(_VARIABLE, "2")
  monkeypatch.setattr(noise, "_has_gpu", lambda: False)
  assert noise.is_noise(line) == expected


def test_a_gpu_that_fails_is_no_noise(monkeypatch):
  monkeypatch.setenv(_VARIABLE, "2")
  monkeypatch.setattr(noise, "_has_gpu", lambda: True)
  assert not noise.is_noise(_CUDA)


def test_the_level_of_tensorflow_is_set():
  function = noise._set_min_log_level()
  assert function is not None  # TensorFlow 2.16 to 2.22 have it.
