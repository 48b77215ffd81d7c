"""`fit` on real clusters, by the launcher, against Keras in one process."""

import json
import pathlib
import re
import signal
import sys

import keras
import numpy as np
import pytest

from tests.fitting import models
from tests.fitting import oracle
from tests.support import binaries
from tests.support import trials
from tf_replicas.cluster import addresses
from tf_replicas.programs import script_launcher

_ROOT = pathlib.Path(__file__).resolve().parents[2]
_MIRRORED = str(_ROOT / "cluster_specs" / "mirrored_2workers.json")
_TASK = _ROOT / "tests" / "tasks" / "fit_task.py"


def _launch(*flags: str, case: str, **arguments) -> tuple[dict, str]:
  """What the chief printed, and the whole output."""
  result = trials.python(
    *("-m", "tf_replicas.launch", "--preload", *flags),
    *(str(_TASK), case, json.dumps(arguments)),
    environ=trials.SPEAKING_ENVIRON,
  )
  output = result.stdout + result.stderr
  assert result.returncode == 0, output
  (line,) = [s for s in result.stdout.splitlines() if " RESULT {" in s]
  return json.loads(line.split(" RESULT ", 1)[1]), output


def _assert_same(
  ours: dict, history: dict, model: keras.Model, tolerance: float
) -> None:
  """The history, the weights and the optimizer's state."""
  assert sorted(ours["history"]) == sorted(history)
  for key, values in history.items():
    np.testing.assert_allclose(
      ours["history"][key], values, rtol=1e-4, atol=max(1e-4, tolerance)
    )
  for key, theirs in (
    ("weights", model.get_weights()),
    ("slots", models.optimizer_variables(model)),
  ):
    for one, other in zip(ours[key], theirs, strict=True):
      np.testing.assert_allclose(one, other, atol=tolerance, err_msg=key)


def _compare(flags: list[str], replication: str, name: str, **more) -> dict:
  """Trains in two epochs, with `fit` and with Keras; returns `fit`'s result."""
  case = (models.CASES | models.KINDS)[name]
  arguments = {"batch_size": 16, "epochs": 2, "shuffle": False, **more}
  then = arguments.pop("then", [])
  ours, _ = _launch(
    *flags, case=name, replication=replication, then=then, **arguments
  )
  theirs = case.model_fn().fit(**case.arguments, verbose=0, **arguments)
  _assert_same(ours, theirs.history, theirs.model, case.tolerance)
  assert ours["epochs"] == [0, 1]
  return ours


@pytest.mark.parametrize(
  ("flags", "replication", "name"),
  [
    (["--workers=2"], "between_graph", "several_outputs"),
    (["--workers=2", "--chief"], "in_graph", "recurrent"),
    pytest.param(
      ["--workers=3", "--ps=2"],
      "between_graph",
      "own_step",
      marks=pytest.mark.exhaustive,
    ),
    (["--cluster_spec", _MIRRORED], "mirrored", "momentum"),
  ],
)
def test_replicas_train_as_one_process(flags, replication, name):
  """44 examples by 16 and 3 replicas: no batch is divided evenly."""
  ours = _compare(flags, replication, name)
  assert ours["examples"] == [models.NUM_EXAMPLES] * 2


_BOTH_DRIVERS = {
  "between_graph": ["--workers=2"],
  "in_graph": ["--workers=2", "--chief"],
}


@pytest.mark.exhaustive
@pytest.mark.parametrize(
  ("replication", "name"),
  [("between_graph", "kinds_rmsprop"), ("in_graph", "kinds_adam")],
)
def test_many_kinds_of_models_train_as_in_one_process(replication, name):
  """With weights and metrics by output, and with validation.

  Then the same tasks train three times more, other models with other data.
  """
  then = [
    ("momentum", "data set"),
    ("momentum", "go on"),
    ("recurrent", "arrays"),
  ]
  ours = _compare(
    _BOTH_DRIVERS[replication],
    replication,
    name,
    then=then,
    validation_split=0.26,
  )
  assert "val_attention_mae" in ours["history"]
  weights = None
  for (other, how), found in zip(then, ours["then"], strict=True):
    case = models.CASES[other]
    model = case.model_fn()
    if how == "go on":
      model.set_weights(weights)
    model.fit(
      **case.arguments, batch_size=16, epochs=2, shuffle=False, verbose=0
    )
    weights = model.get_weights()
    for one, theirs in zip(found, weights, strict=True):
      np.testing.assert_allclose(one, theirs, atol=case.tolerance)


@pytest.mark.exhaustive
@pytest.mark.parametrize("replication", sorted(_BOTH_DRIVERS))
@pytest.mark.parametrize(
  "name", sorted((models.CASES.keys() - {"adversaries"}) | models.KINDS.keys())
)
def test_every_model_trains_as_in_one_process(replication, name):
  _compare(_BOTH_DRIVERS[replication], replication, name)


@pytest.mark.exhaustive
@pytest.mark.parametrize("replication", sorted(_BOTH_DRIVERS))
def test_layers_and_masks_see_one_part_at_a_time(replication):
  """Against training by hand. What a dropout draws is known by its mean only.

  "dropped" is the mean square error of 704 means, each of 64 numbers that are 0
  or 2. It has a standard deviation of 5% of its expected value.
  """
  case = models.PARTS["parts"]
  # Keras' means of the losses by output count every batch alike in a graph, and
  # every example in `oracle`: the batches must be equally large.
  sizes = {"batch_size": models.NUM_EXAMPLES // 2, "epochs": 2}
  ours, _ = _launch(
    *_BOTH_DRIVERS[replication],
    case="parts",
    replication=replication,
    shuffle=False,
    **sizes,
  )
  model, history = oracle.train(case, num_parts=2, **sizes)
  history.pop("dropped_loss")
  dropped = ours["history"].pop("dropped_loss")
  _assert_same(ours, history, model, case.tolerance)
  np.testing.assert_allclose(dropped, 1 / 64, rtol=0.3)
  assert dropped[0] != dropped[1]


@pytest.mark.exhaustive
def test_asynchronous_updates_count_their_metrics():
  """Each epoch has all its updates; the rate of a callback is used."""
  ours, _ = _launch(
    case="momentum",
    rule={"policies": ["bounded_staleness"], "max_staleness": 2},
    batch_size=4,
    epochs=3,
    rate=0.0,
  )
  assert ours["epochs"] == [0, 1, 2]
  # A rate of 0 from the second epoch on, of which at most the updates under
  # way at its start escape.
  assert ours["slots"][1] == 0.0
  # Updates cross the ends of epochs, and each is counted once. An epoch that
  # has none left to count repeats the metrics of the epoch before.
  counted = ours["examples"]
  assert 3 * models.NUM_EXAMPLES in (sum(counted), sum(dict.fromkeys(counted)))


def test_metrics_count_every_example_once_after_a_switch():
  """From the second epoch on, an update has one contribution instead of two."""
  ours, _ = _launch(
    case="momentum",
    rule={"then_update": "async", "switch_at_step": 11},
    batch_size=4,
    epochs=2,
  )
  assert models.NUM_EXAMPLES == 44  # 11 updates.
  assert ours["examples"] == [44.0, 22.0]


def test_the_chief_waits_for_parameter_servers_in_vain():
  (port,) = addresses.free_ports(1, taken=set())
  jobs = {"ps": ["ps.absent.test:2222"], "worker": [f"localhost:{port}"]}
  config = {"cluster": jobs, "task": {"type": "worker", "index": 0}}
  arguments = json.dumps({"start_timeout_secs": 1})
  result = trials.python(
    *(str(_TASK), "momentum", arguments),
    environ={**trials.ENVIRON, "TF_CONFIG": json.dumps(config)},
  )
  assert result.returncode == 1
  assert result.stderr.rstrip().splitlines()[-1] == (
    "TimeoutError: waiting for ps 0 at ps.absent.test:2222: gave up after 1 s"
  )


_SERIES = """
import os, pathlib, signal, sys
import keras, numpy as np, tensorflow as tf
import tf_replicas

pathlib.Path(str(os.getpid())).write_text(os.environ["TF_REPLICAS_TASK"])
x = np.linspace(0.0, 1.0, 8, dtype="float32")[:, None]


def train(rate, x=x, **more):
  def model_fn():
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input([1]), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(rate), "mse")
    return model

  y = None if more else x
  history = tf_replicas.fit(
    model_fn, x, y, shuffle=False, epochs=2, verbose=0, **more
  )
  print("WEIGHT", rate, float(history.model.get_weights()[0][0, 0]))


def refused(**arguments):
  try:
    train(0.1, **arguments)
  except (ImportError, TypeError, tf_replicas.ClusterError) as error:
    print("REFUSED", error)


def batches():
  for begin in (0, 0):
    yield x[begin:], x[begin:]


train(0.1, x=batches(), steps_per_epoch=1)
refused(x=batches(), steps_per_epoch=1)
refused(replication="in_graph")
sys.modules["cloudpickle"] = None
refused()
del sys.modules["cloudpickle"]
(victim,) = [
  int(path.name)
  for path in pathlib.Path().iterdir()
  if path.name.isdecimal() and path.read_text() == "worker:1"
]
os.kill(victim, signal.SIGKILL)
for rate in (0.2, 0.3):
  train(rate)


class Line(tf.Module):
  def __init__(self):
    super().__init__()
    self.slope = tf.Variable(0.0)


trained = tf_replicas.run(
  lambda: tf_replicas.module_replica(
    Line(),
    lambda line, x: tf.reduce_mean((line.slope * x - 3.0 * x) ** 2),
    lambda *_: tf.data.Dataset.from_tensors(tf.ones([4])).repeat(),
  ),
  lambda: keras.optimizers.SGD(0.25),
  max_steps=2,
  log_every_steps=None,
  start_timeout_secs=6.0,  # The launcher waits 15 s for a last error.
)
print("SLOPE", trained.values["slope"], flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def _assert_weight_of_keras(output: str, rate: float, epochs: int) -> None:
  x = np.linspace(0.0, 1.0, 8, dtype="float32")[:, None]
  keras.utils.set_random_seed(1)
  model = keras.Sequential([keras.Input([1]), keras.layers.Dense(1)])
  model.compile(keras.optimizers.SGD(rate), "mse")
  model.fit(x, x, shuffle=False, epochs=epochs, verbose=0)
  (found,) = re.findall(rf" WEIGHT {rate} (.*)", output)
  expected = model.get_weights()[0][0, 0]
  assert float(found) == pytest.approx(expected, abs=1e-5), output


def test_a_series_with_failures(tmp_path):
  """A worker and then the chief are killed between two trainings."""
  script = tmp_path / "train.py"
  script.write_text(_SERIES, encoding="utf-8")
  result = trials.python(
    *("-m", "tf_replicas.launch", "--workers=2", script.name), cwd=tmp_path
  )
  output = result.stdout + result.stderr
  for rate in (0.1, 0.2, 0.3):
    _assert_weight_of_keras(output, rate, epochs=2)
  generator, driver, package = re.findall(r" REFUSED (.*)", output)
  assert re.fullmatch(
    "`x` of a second `fit` must be what cloudpickle can pickle.*pass a function"
    r" of `tf\.distribute\.InputContext`.*generator.*",
    generator,
  )
  assert "needs a `chief` task" in driver
  assert "pip install cloudpickle" in package
  assert "worker 1 was killed by SIGKILL; restarting it" in output
  assert " SLOPE 2.25\n" in output
  assert re.search(
    r"\[worker 1\] error: the chief was lost after training 4: no heartbeat",
    output,
  ), output
  assert result.returncode == 128 + 9, output


_LOST_TOGETHER = """
import os, pathlib, signal, subprocess, sys
import keras, numpy as np
import tf_replicas

(pathlib.Path("tasks") / str(os.getpid())).write_text(
  os.environ["TF_REPLICAS_TASK"]
)
x = np.linspace(0.0, 1.0, 8, dtype="float32")[:, None]


class LoseTwoTasks(keras.callbacks.Callback):
  def on_epoch_end(self, epoch, logs=None):
    lost = [
      path.name
      for path in pathlib.Path("tasks").iterdir()
      if path.read_text() in sys.argv[1:]
    ]
    if epoch == 1 and len(lost) == 2:
      here = os.getpid()  # This process is the chief.
      others = [pid for pid in lost if pid != str(here)]
      commands = f"kill -KILL {' '.join(others)}"
      if len(others) == 1:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGALRM])
        # The launcher restarts a chief that this signal killed.
        commands += f"; kill -ALRM {here}"
      else:
        commands += f"; kill -STOP {here}; sleep 20; kill -CONT {here}"
      subprocess.Popen(["sh", "-c", commands])


def train(rate, train_dir, **more):
  def model_fn():
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input([1]), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(rate), "mse")
    return model

  history = tf_replicas.fit(
    model_fn, x, x, shuffle=False, epochs=4, verbose=0, train_dir=train_dir,
    **more,
  )
  print("WEIGHT", rate, float(history.model.get_weights()[0][0, 0]))


train(0.1, "first")
train(0.2, "second", callbacks=[LoseTwoTasks()])
"""


@pytest.mark.exhaustive
def test_a_worker_and_ps_task_0_are_lost_in_a_later_training(tmp_path):
  """They are back before the chief tells PS task 0 which training it is."""
  (tmp_path / "tasks").mkdir()
  script = tmp_path / "train.py"
  script.write_text(_LOST_TOGETHER, encoding="utf-8")
  output = _run(tmp_path, "--workers=2", script.name, "ps:0", "worker:1")
  assert "recovered from the loss of ps 0" in output
  _assert_weight_of_keras(output, 0.2, epochs=4)


@pytest.mark.exhaustive
def test_the_chief_and_ps_task_0_are_lost_in_a_later_training(tmp_path):
  """The chief's script begins anew, and PS task 0 knows of no training."""
  (tmp_path / "tasks").mkdir()
  script = tmp_path / "train.py"
  script.write_text(_LOST_TOGETHER, encoding="utf-8")
  command = ["-m", "tf_replicas.launch", "--workers=2", script.name]

  def run(*lost: str) -> tuple[int, str]:
    result = trials.python(*command, *lost, cwd=tmp_path)
    return result.returncode, result.stdout + result.stderr

  code, output = run("ps:0", "worker:0")
  assert code == 1, output
  assert "worker 0 was killed by SIGALRM; restarting it" in output
  message = (
    "worker 1 takes part in training 2, and the chief in training 1: the chief"
    " was started again, or this task was too late. Start all tasks again."
  )
  assert f"[worker 1] error: {message}" in output
  assert re.search(rf"^\[worker 0\] RuntimeError: {message}", output, re.M)
  code, output = run()
  assert code == 0, output
  _assert_weight_of_keras(output, 0.2, epochs=4)


def _run(directory, *arguments: str) -> str:
  """Runs the launcher in `directory`; what it printed."""
  result = trials.python(
    *("-m", "tf_replicas.launch", *arguments),
    cwd=directory,
    environ=trials.SPEAKING_ENVIRON,
  )
  assert result.returncode == 0, result.stdout + result.stderr
  return result.stdout


def test_the_example_learns_with_a_backup_worker(tmp_path):
  output = _run(
    tmp_path,
    "--workers=3",
    "--timeline=timeline",
    str(_ROOT / "examples" / "keras_fit.py"),
    "--replicas_to_aggregate=2",
    "--save_to=model.keras",
  )
  (accuracy,) = re.findall(r"accuracy: ([\d.]+)$", output, re.MULTILINE)
  assert float(accuracy) > 0.9
  assert (tmp_path / "model.keras").stat().st_size > 0
  files = {path.stem for path in (tmp_path / "timeline").iterdir()}
  # Two of the workers are enough: one that begins late may make no step.
  workers = files - {"chief"}
  assert "chief" in files
  assert workers <= {"worker_0", "worker_1", "worker_2"}
  assert len(workers) >= 2


def test_a_model_made_before_joining_is_refused(tmp_path):
  script = tmp_path / "train.py"
  script.write_text(
    """
import keras, numpy, tf_replicas
model = keras.Sequential([keras.Input([1]), keras.layers.Dense(1, name="a")])
model.compile("sgd", "mse")
x = numpy.ones([4, 1])
tf_replicas.fit(lambda: model, x, x)
""",
    encoding="utf-8",
  )
  result = trials.python(
    *("-m", "tf_replicas.launch", "--workers=1", script.name), cwd=tmp_path
  )
  assert result.returncode == 1
  assert re.search(
    r"ValueError: `model_fn` must make the model and its layers itself:.*"
    r" Received: 'sequential/a/kernel', which was made before\.\n",
    result.stdout,
  ), result.stdout + result.stderr


_TRAINS_COPIES = """
import keras, tensorflow as tf, tf_replicas

class Line(tf.Module):
  def __init__(self):
    self.slope = tf.Variable(0.0)

def replica():
  return tf_replicas.module_replica(
    Line(),
    lambda line, x: tf.reduce_mean(10.0 * line.slope * x),
    lambda *_: tf.data.Dataset.from_tensors(tf.ones([4])).repeat(),
  )

trained = tf_replicas.run(
  replica,
  lambda: keras.optimizers.SGD(0.25),
  max_steps=3,
  rule=tf_replicas.Periodic("model_average", period=2),
  clip_replica_norm=1.0,
)
print("slope:", trained.values["slope"])
"""


@pytest.mark.exhaustive
def test_replicas_train_copies_with_clipped_gradients(tmp_path):
  """In each of 3 updates, a replica makes 2 steps of 0.25 * 1."""
  (tmp_path / "train.py").write_text(_TRAINS_COPIES, encoding="utf-8")
  assert "[worker 0] slope: -1.5\n" in _run(tmp_path, "train.py")


def test_the_script_of_the_documentation_saves_once(tmp_path):
  text = (_ROOT / "docs" / "keras.md").read_text(encoding="utf-8")
  block, *_ = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
  (command,) = re.findall(
    r"```bash\npython -m tf_replicas.launch (.*?)\n", text
  )
  script = tmp_path / "train.py"
  script.write_text(block + "print('saved')\n", encoding="utf-8")
  output = _run(tmp_path, *command.split())
  assert output.count("] saved") == 1
  assert keras.models.load_model(tmp_path / "model.keras").built
  binaries.assert_tidy(output)
  lines = output.splitlines()
  assert (
    "[worker 0] replication: between_graph; 2 replicas with 1 tower of batch 32"
    " each; sync updates of 2 contributions"
  ) in lines
  assert "[worker 0] Epoch 1/3" in lines
  # The first line of all; a later one has the time left there.
  (line,) = [x for x in lines if x.startswith("[worker 0] 1/16 - loss")]
  assert line.endswith(" - learning_rate: 0.001")
  assert re.search(r"\] Epoch 3/3 - \d:\d\d:\d\d left$", output, re.MULTILINE)


def test_the_script_of_the_documentation_alone(tmp_path):
  """What TensorFlow prints at its import is beyond reach."""
  text = (_ROOT / "docs" / "keras.md").read_text(encoding="utf-8")
  block, *_ = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
  script = tmp_path / "train.py"
  begin = "import sys\nsys.stderr.write('imported\\n')\n"
  script.write_text(
    block.replace("import tf_replicas\n", f"import tf_replicas\n{begin}"),
    encoding="utf-8",
  )
  environ = dict(trials.ENVIRON)
  del environ["TF_CPP_MIN_LOG_LEVEL"], environ["CUDA_VISIBLE_DEVICES"]
  result = trials.python(script.name, cwd=tmp_path, environ=environ)
  assert result.returncode == 0, result.stderr
  assert result.stderr.partition("imported\n")[2] == ""
  assert "replication:" not in result.stdout
  binaries.assert_tidy(result.stdout)


@pytest.mark.parametrize(
  ("arguments", "words"),
  [
    (
      ["absent.py"],
      "the script must be a Python file that exists. Received: absent.py.",
    ),
    (
      [
        "--timeline=x",
        f"--cluster_spec={_MIRRORED}",
        __file__,
      ],
      f"{_MIRRORED}: `--timeline` needs a cluster with parameter servers."
      " Received: one without a `ps` task.",
    ),
    (["--ps=0", __file__], "`--ps` must be at least 1. Received: 0."),
    (
      ["--max_restarts=-1", __file__],
      "`max_restarts` must be at least 0. Received: -1.",
    ),
  ],
)
def test_the_launcher_refuses_in_one_line(arguments, words, capsys):
  with pytest.raises(SystemExit) as ended:
    script_launcher.main(arguments)
  assert ended.value.code == 2
  assert capsys.readouterr().err == f"error: {words}\n"


def test_sigterm_ends_the_launcher_and_its_tasks(tmp_path):
  """What a task prints last is seen, too."""
  (tmp_path / "wait.py").write_text(
    "import signal, time\n"
    "signal.signal(signal.SIGTERM, lambda *_: exit(print('bye')))\n"
    "print('here')\n"
    "time.sleep(600)\n"
  )
  with trials.running(
    [sys.executable, "-m", "tf_replicas.launch", tmp_path / "wait.py"]
  ) as process:
    trials.read_until("[worker 1] here", process)
    process.terminate()
    rest, _ = process.communicate(timeout=60)
  assert process.returncode == 128 + signal.SIGTERM
  assert "[launcher] interrupted; ending all tasks" in rest
  assert "[worker 1] bye" in rest
