"""What `docs/first_steps.md` says happens, when its commands are run."""

import os
import re
import shlex
import signal
import sys

import keras
import tensorflow as tf

from tests.support import trials

PAGE = (trials.ROOT / "docs" / "first_steps.md").read_text(encoding="utf-8")
_ENVIRON = {**trials.ENVIRON, "TF_CPP_MIN_LOG_LEVEL": "2"}


def block(mark: str, language: str) -> str:
  """The block of a language that is marked so."""
  pattern = rf"<!-- {re.escape(mark)} -->\n```{language}\n(.*?)```"
  (found,) = re.findall(pattern, PAGE, re.DOTALL)
  return found


def command(beginning: str) -> list[str]:
  """The command that begins so, with this Python."""
  (line,) = re.findall(rf"^({re.escape(beginning)}.*)$", PAGE, re.MULTILINE)
  return [sys.executable, *shlex.split(line)[1:]]


def without_numbers(line: str) -> tuple[str, str]:
  """The task of a line, and its text with 0 for each number."""
  line = re.sub(r"\b\d+(us|s|ms)/step", "0ms/step", line.rstrip())
  task, text = re.fullmatch(r"(\[.*?\])? ?(.*)", line).groups()
  return task or "", re.sub(r"\d+(\.\d+)?(e-\d+)?", "0", text)


def assert_shown(mark: str, output: str) -> None:
  """What the page shows is in the output, in this order for each task."""
  lines = list(map(without_numbers, output.splitlines()))
  rest = {}
  for line in block(f"output of: {mark}", "output").splitlines():
    task, text = without_numbers(line)
    left = rest.setdefault(task, iter(lines))
    assert (task, text) in left, f"{line}\n\n{output}"


def accuracy(output: str) -> float:
  return float(re.findall(r"accuracy: ([\d.]+)$", output, re.MULTILINE)[-1])


def test_the_first_steps(tmp_path):
  """One cluster for the steps 4 and 5, which ends sooner than there."""
  script = tmp_path / "train.py"
  script.write_text(block("example: train.py", "python"), encoding="utf-8")
  _, *arguments = command("python train.py")
  alone = trials.python(*arguments, cwd=tmp_path, environ=_ENVIRON)
  assert alone.returncode == 0, alone.stderr
  assert_shown("alone", alone.stdout + alone.stderr)
  assert accuracy(alone.stdout) > 0.9
  assert keras.models.load_model(tmp_path / "model.keras").count_params() == 129
  (tmp_path / "model.keras").unlink()

  (line,) = re.findall(r"^python (.*--log_dir=.*)$", PAGE, re.MULTILINE)
  assert command("python -m tf_replicas.launch --ps=1 --workers=2 train.py")
  arguments = shlex.split(line.replace("--epochs=100", "--epochs=12"))
  with trials.running([sys.executable, *arguments], cwd=tmp_path) as training:
    output = trials.read_until("Epoch 3/", training)
    kill = shlex.split(re.search(r"^kill -9 .*$", PAGE, re.MULTILINE).group())
    assert kill[2:5] == ["$(grep", "^process ", "logs/worker_1.log"]
    log = (tmp_path / "logs" / "worker_1.log").read_text(encoding="utf-8")
    numbers = re.findall(r"^process (\d+)$", log, re.MULTILINE)
    os.kill(int(numbers[-1]), signal.SIGKILL)
    output += training.stdout.read()
  assert training.wait() == 0, output
  assert_shown("cluster", output)
  assert_shown("killed", output)
  assert accuracy(output) > 0.9
  assert (tmp_path / "model.keras").exists()

  tags = set()
  for path in (tmp_path / "board" / "train").glob("events.*"):
    for event in tf.compat.v1.train.summary_iterator(str(path)):
      tags |= {value.tag for value in event.summary.value}
  assert {"epoch_loss", "epoch_accuracy"} <= tags
