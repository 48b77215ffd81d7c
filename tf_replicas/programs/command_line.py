"""Implements what all command-line programs share: flags, errors and `main`.

A training program calls one of the functions that define flags, and `train`. An
evaluation program calls `define_evaluation_flags` and `evaluate`. Errors of the
user are printed as one line. TensorFlow is imported only if this process needs
it: the process that starts the tasks does not.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import os
import shutil
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable
from collections.abc import Sequence
from typing import NoReturn
from typing import TypeVar

from absl import app
from absl import flags
from absl import logging

from tf_replicas import cluster
from tf_replicas.programs import fields
from tf_replicas.programs import launcher
from tf_replicas.programs import run_config
from tf_replicas.programs import run_options
from tf_replicas.programs import tfds_builder
from tf_replicas.programs import update_options
from tf_replicas.runtime import noise
from tf_replicas.runtime import processes
from tf_replicas.session import checkpoint_errors

FLAGS = flags.FLAGS
EVALUATION = "Evaluation"  # A group of flags.
_flag = functools.partial(fields.setting, group=EVALUATION)

# Flags of the TF1 programs that are gone -> what to use instead.
_SUCCESSORS = {
  "checkpoint_dir": "use --train_dir",
  "fine_tune": "use --pretrained_model_checkpoint_path",
  "initial_learning_rate": "use --learning_rate",
  "input_queue_memory_factor": "use --shuffle_examples of inception_mini",
  "num_examples": "evaluation counts every image once; training has"
  " --max_steps and --num_epochs",
  "num_gpus": "use --num_gpus of cifar10.multi_gpu_train or"
  " inception_mini.train; on a cluster, `devices` of --cluster_spec",
  "num_preprocess_threads": "tf.data chooses the number of threads",
  "num_readers": "tf.data chooses the number of readers",
  "num_replicas_to_aggregate": "use --replicas_to_aggregate of the programs"
  " that take a cluster",
  "protocol": "it is always grpc",
  "ps_hosts": 'use --cluster_spec with {"ps": ["host:port"], ...}',
  "save_interval_secs": "use --checkpoint_every_secs",
  "save_summaries_secs": "use --summary_every_steps",
  "subset": "training uses the training images; use --eval_data of"
  " cifar10.eval or --subset of inception_mini.eval",
  "sync_replicas": "use --update=sync or --update=async",
  "task_id": "use --task_index",
  "use_fp16": "use --compute_dtype=float16 or --compute_dtype=bfloat16",
  "worker_hosts": 'use --cluster_spec with {"worker": ["host:port"], ...}',
}


_Config = TypeVar("_Config")
_Result = TypeVar("_Result")


@dataclasses.dataclass(frozen=True)
class EvaluationOptions:
  """Holds the command-line settings of a program that evaluates checkpoints.

  Attributes:
    eval_dir: The directory of TensorBoard files. None: a directory within the
      one that holds the checkpoints.
    run_once: Whether to evaluate the newest checkpoint only, and then end.
      Otherwise, the program evaluates checkpoints as training saves them.
    interval_secs: Seconds between two evaluations.
    timeout_secs: Seconds without a new checkpoint after which the program ends.
      None: it never ends.
  """

  eval_dir: str | None = _flag(
    None, "Directory of TensorBoard files; default: within --train_dir"
  )
  run_once: bool = _flag(False, "Measure the newest checkpoint only")
  interval_secs: float = _flag(
    10.0, "Seconds between measurements", flag="eval_interval_secs"
  )
  timeout_secs: float | None = _flag(
    None,
    "Seconds without a new checkpoint after which to end; default: never end",
  )


def define_one_device_flags() -> None:
  """Defines the flags of a binary that trains on one device."""
  fields.define_flags(run_options.Options, [run_options.RUN])
  fields.define_flags(update_options.UpdateSettings, [update_options.GRADIENTS])
  flags.DEFINE_alias(
    "log_frequency", "log_every_steps", module_name=run_options.RUN
  )


def define_towers_flags() -> None:
  """Defines the flags of a binary that trains several copies of a model.

  All copies are on one machine, normally one on each GPU.
  """
  define_one_device_flags()
  _define_device_flags()
  fields.define_flag(
    "num_gpus",
    int,
    None,
    "Towers, on GPUs 0 to N - 1; default: 1",
    group=run_options.DEVICES,
  )


def define_cluster_flags() -> None:
  """Defines the flags of a binary that trains on a cluster."""
  define_one_device_flags()
  _define_device_flags()
  for name, kind, text in (
    ("job_name", str, "This task's job; default: start all tasks"),
    ("task_index", int, "This task's index in its job"),
  ):
    fields.define_flag(name, kind, None, text, group=run_options.CLUSTER)
  fields.define_flag(
    "allow_public_addresses",
    bool,
    False,
    "Accept addresses in public networks, where everyone can use the tasks",
    group=run_options.CLUSTER,
  )
  fields.define_flags(run_options.Options, [run_options.CLUSTER])
  fields.define_flags(update_options.UpdateSettings, [update_options.GROUP])


def define_evaluation_flags(train_dir: str, *, batch_size: int) -> None:
  """Defines the flags of a binary that evaluates checkpoints.

  Args:
    train_dir: The default of `--train_dir`, the directory of the training whose
      checkpoints are evaluated.
    batch_size: The default of `--batch_size`, the number of images in a batch.
  """
  fields.define_flags(EvaluationOptions, [EVALUATION])
  for name, kind, default, text in (
    ("train_dir", str, train_dir, "The run to measure"),
    ("batch_size", int, batch_size, "Images at a time"),
    ("dataset", str, None, "As in training; default: the run's"),
    ("data_dir", str, None, "As in training; default: the run's"),
  ):
    fields.define_flag(name, kind, default, text, group=EVALUATION)


def define_count(name: str, default: int | None, text: str) -> None:
  """Defines a command-line flag whose value is an integer of at least 1.

  Args:
    name: The name of the flag, without dashes.
    default: The default value.
    text: The help text.
  """
  flags.DEFINE_integer(name, default, text, lower_bound=1)


def given(*names: str) -> dict[str, object]:
  """Returns the values of some command-line flags by name.

  Args:
    *names: The names of the flags, without dashes.

  Returns:
    The values. Flags whose value is None are left out.
  """
  values = {name: FLAGS[name].value for name in names}
  return {name: value for name, value in values.items() if value is not None}


def start(main: Callable[[Sequence[str]], None]) -> NoReturn:
  """Parses the command line, calls `main`, and ends the process.

  If a flag is invalid or unknown, it prints the error as one line and does not
  call `main`. For `--help`, it prints the help.

  Args:
    main: Does the work of the program. Its argument is a list that contains
      only the name of the program.
  """
  noise.hide()
  app.run(main, flags_parser=_parse)


def one_device_options() -> run_options.Options:
  """Makes the options of a training on one device, from command-line flags.

  `define_one_device_flags` defines the flags.
  """
  return _options(run_options.one_machine_spec(0))


def towers_options(cluster_module: str) -> run_options.Options:
  """Makes the options of a training in one process, from command-line flags.

  The process trains copies of the model (towers) on several devices.
  `define_towers_flags` defines the flags.

  Args:
    cluster_module: The name of the program that trains on a cluster. An error
      message recommends it if the cluster spec has several tasks.

  Raises:
    cluster.ClusterError: If the flags contradict each other, or if the cluster
      spec has several tasks.
  """
  return _options(_towers_spec(cluster_module))


def cluster_options() -> run_options.Options:
  """Makes the options of a training on a cluster.

  They come from command-line flags, which `define_cluster_flags` defines, and
  from the environment variables of `cluster.environment`, such as TF_CONFIG.

  Raises:
    cluster.ClusterError: If the flags or the environment variables are invalid.
  """
  spec, task = run_options.choose_task(
    FLAGS.cluster_spec,
    FLAGS.job_name,
    FLAGS.task_index,
    dict(os.environ),
    FLAGS.max_workers,
  )
  if FLAGS.allow_public_addresses:
    spec = dataclasses.replace(spec, allow_public_addresses=True)
  return _options(spec, task=task)


def train(
  module: str,
  options_fn: Callable[[], run_options.Options],
  config_fn: Callable[[run_options.Options], _Config],
  workload_fn: Callable[[_Config, run_options.Options], run_options.Workload],
) -> NoReturn:
  """Does all the work of a training binary, and ends the process.

  It starts the tasks of this machine, or runs the task that the options name.
  Errors of the user are printed as one line.

  Args:
    module: The name of the binary's module, with which it starts other tasks.
    options_fn: Makes the options, which say how to train, from the flags.
    config_fn: Makes the program's own settings, from the flags and the options.
    workload_fn: Makes the workload, which is what to train, from the program's
      settings and the options. It also checks that the data is there. It is
      not called in a task that only serves, and may import TensorFlow.
  """
  with processes.one_line_errors(
    usage=(ValueError,), run_time=run_options.RUN_TIME_ERRORS
  ):
    options = options_fn()
    if options.check_gpu:
      options = _for_gpu_check(options)
    config = config_fn(options)
  if not options.launches:
    with processes.importing_tensorflow():
      from tf_replicas.programs import task_runner  # noqa: F401

  with processes.one_line_errors(
    usage=(
      cluster.ClusterError,
      checkpoint_errors.CheckpointError,
      tfds_builder.DataError,
    ),
    run_time=run_options.RUN_TIME_ERRORS,
  ):
    # A dry run of one task describes all tasks.
    needs_workload = options.dry_run or not options.only_serves
    status = launcher.run(
      options,
      workload_fn(config, options) if needs_workload else None,
      command=functools.partial(_command, module, sys.argv[1:]),
    )
  processes.exit_now(status)


def _for_gpu_check(options: run_options.Options) -> run_options.Options:
  """Returns the options of a training with which `--check_gpu` checks ops.

  The training makes one update, in a temporary directory.

  Args:
    options: The options of the training to check.
  """
  with processes.importing_tensorflow():
    from tf_replicas.programs import gpu_check

  FLAGS.train_dir = tempfile.mkdtemp()
  processes.at_exit(
    functools.partial(shutil.rmtree, FLAGS.train_dir, ignore_errors=True)
  )
  options = dataclasses.replace(options, train_dir=FLAGS.train_dir)
  return gpu_check.options_for(options)


def evaluate(evaluate_fn: Callable[[], _Result | None]) -> _Result:
  """Does the work of an evaluation binary.

  Without `--run_once`, it first waits for the training to begin. If an error is
  the user's, it prints one line and ends the process. It is also an error if
  there is no checkpoint in time.

  Args:
    evaluate_fn: Evaluates checkpoints as the flags say. It returns the result,
      or None if there was no checkpoint in time.

  Returns:
    What `evaluate_fn` returned; never None.
  """
  with processes.importing_tensorflow():
    import tensorflow as tf

    from tf_replicas.runtime import devices
    from tf_replicas.session import evaluation

  with processes.one_line_errors(
    usage=(ValueError, tfds_builder.DataError),
    run_time=run_options.RUN_TIME_ERRORS,
  ):
    # Take GPU memory as needed, since training may run beside this.
    devices.configure(None)
    result = None
    if FLAGS.run_once:
      # Fails before data is downloaded that would not be used.
      evaluation.newest_checkpoint(FLAGS.train_dir)
    if FLAGS.run_once or await_run(
      FLAGS.train_dir, timeout_secs=FLAGS.timeout_secs
    ):
      try:
        result = evaluate_fn()
      except tf.errors.OpError as error:
        # Data that cannot be read, or a full memory.
        message = processes.shortened(f"TensorFlow failed: {error.message}")
        raise RuntimeError(message) from error
    if result is None:
      raise TimeoutError(f"No checkpoint file found in {FLAGS.train_dir}")
    return result


def _define_device_flags() -> None:
  fields.define_flag(
    "cluster_spec",
    str,
    None,
    "Path of a cluster-spec JSON, or the name of one that the package holds,"
    " such as local_1ps_2workers",
    group=run_options.DEVICES,
  )
  fields.define_flags(run_options.Options, [run_options.DEVICES])


def _options(spec: cluster.ClusterSpec, **more) -> run_options.Options:
  update = fields.given(update_options.UpdateSettings)
  return run_options.Options(
    spec,
    FLAGS.train_dir,
    update=update_options.UpdateSettings(**update),
    **fields.given(run_options.Options),
    **more,
  )


def _towers_spec(cluster_module: str) -> cluster.ClusterSpec:
  num_gpus = FLAGS.num_gpus
  if num_gpus is not None and num_gpus < 1:
    raise cluster.ClusterError(
      f"`--num_gpus` must be at least 1. Received: {num_gpus}."
    )
  if FLAGS.cluster_spec is None:
    return run_options.one_machine_spec(num_gpus or 1)
  if num_gpus is not None:
    raise cluster.ClusterError(
      "`--num_gpus` must not be given with `--cluster_spec`, which names the"
      f" GPUs. Received: {num_gpus}."
    )
  spec = cluster.load(FLAGS.cluster_spec)
  if spec.is_distributed:
    raise cluster.ClusterError(
      f"{spec.source}: `cluster` must be absent for one machine;"
      f" {cluster_module} trains on a cluster. Received jobs:"
      f" {', '.join(spec.jobs)}."
    )
  return spec


def _parse(argv: Sequence[str]) -> list[str]:
  if "--help" in argv:
    print(_help())
    sys.exit(0)
  with processes.one_line_errors(usage=(flags.Error,)):
    try:
      rest = FLAGS(argv)
    except flags.UnrecognizedFlagError as error:
      successor = _SUCCESSORS.get(error.flagname)
      if successor is None:
        raise
      raise flags.Error(
        f"`--{error.flagname}` of the TF1 programs is gone: {successor}."
      ) from None
    if len(rest) > 1:
      raise flags.Error(f"Unknown arguments: {' '.join(rest[1:])}")
  if not FLAGS["verbosity"].present:
    logging.set_verbosity(logging.WARNING)
  return rest


def _help() -> str:
  """Returns the text of `--help`.

  It has the docstring of the program, and its flags by group.
  """
  lines = [inspect.getdoc(sys.modules["__main__"]) or ""]
  for group, members in FLAGS.flags_by_module_dict().items():
    if group.partition(".")[0] == "absl":
      continue
    # Without a group, absl has the path of the binary.
    lines += ["", "Flags:" if group.endswith(".py") else f"{group}:"]
    for flag in members:
      name = f"--[no]{flag.name}" if flag.boolean else f"--{flag.name}"
      text = f"{name}: {flag.help}"
      if flag.default not in (None, False, []):
        text += f"; default: {flag.default_as_str.strip(chr(39))}"
      lines += textwrap.wrap(
        text, initial_indent="  ", subsequent_indent="      "
      )
  return "\n".join([*lines, "", "--helpfull lists the flags of absl too."])


def _command(
  module: str,
  arguments: Sequence[str],
  path: str,
  task: cluster.Task,
  threads: int,
) -> list[str]:
  """Returns the command line that starts one task of a training.

  Args:
    module: The name of the training program's module.
    arguments: The arguments that the user gave to this process. They are
      repeated, followed by flags that name the task.
    path: The path of the file with the cluster spec.
    task: The task to start.
    threads: The number of threads that one op of the task may use.
  """
  return [
    sys.executable,
    "-m",
    module,
    *arguments,
    f"--cluster_spec={path}",
    f"--job_name={task.job}",
    f"--task_index={task.index}",
    f"--intra_op_threads={threads}",
  ]


def await_run(
  train_dir: str | os.PathLike[str], *, timeout_secs: float | None = None
) -> bool:
  """Waits until a training has begun, and prints that it waits.

  A training has begun when its directory has a file with its settings, or a
  checkpoint. Evaluation programs read the network and the data set from the
  settings.

  Args:
    train_dir: The directory of the training, which need not exist yet.
    timeout_secs: The time limit in seconds; None: no limit.

  Returns:
    Whether a training has begun in time.
  """
  from tf_replicas.session import checkpoints

  train_dir = os.fspath(train_dir)
  deadline = float("inf")
  if timeout_secs is not None:
    deadline = time.monotonic() + timeout_secs
  has_printed = False
  while not run_config.is_recorded(train_dir):
    if checkpoints.latest(train_dir):
      break  # That training records no settings.
    if time.monotonic() >= deadline:
      return False
    if not has_printed:
      print(f"waiting for a training to begin in {train_dir}", flush=True)
      has_printed = True
    time.sleep(1.0)
  return True
