"""Finds out, without a GPU, which ops of a training would not run on its GPUs.

With `--check_gpu` a program makes one update, with all tasks on this machine.
The functions are traced as for the GPUs of the cluster spec, and TensorFlow
runs them on the CPU. Afterwards, the ops that the chief has traced are compared
with the GPU kernels of the installed TensorFlow. The other tasks run the same
ops.
"""

import dataclasses

import tensorflow as tf

from tf_replicas.programs import run_options
from tf_replicas.runtime import gpu_kernels


def options_for(options: run_options.Options) -> run_options.Options:
  """Returns the options of the training of one update.

  If this process starts all tasks:

  * All tasks are on this machine.
  * If the cluster spec gives no GPU to any task, every replica gets one.
  * With mirrored variables, CPU devices replace the GPUs, since TensorFlow
    cannot mirror variables on devices that do not exist. With several
    processes, each has one such device.

  In one task that was started by such a process, the options need no change,
  except that CPU devices replace the GPUs with mirrored variables.

  Args:
    options: The options of the training to check.

  Raises:
    RuntimeError: If the installed TensorFlow does not know its GPU kernels.
  """
  gpu_kernels.check_build()
  options = dataclasses.replace(options, emulate_gpus=options.is_mirrored)
  if options.task is not None:
    return options
  spec = options.spec
  devices = {f"{t.job}:{t.index}": spec.gpus(t) or () for t in spec.tasks()}
  if not any(devices.values()):
    gpus = tuple(range(options.devices_per_tower))
    devices |= {f"{t.job}:{t.index}": gpus for t in options.replicas}
  if options.is_mirrored and spec.is_distributed:
    devices = {name: gpus[:1] for name, gpus in devices.items()}
  jobs = {
    job: {index: "localhost:0" for index in tasks}
    for job, tasks in spec.jobs.items()
  }
  spec = dataclasses.replace(spec, jobs=jobs, devices=devices)
  return dataclasses.replace(options, spec=spec)


def report(options: run_options.Options) -> str:
  """Describes the ops that this process has traced for GPUs.

  Args:
    options: The options with which the update was made.

  Returns:
    A line with the number of these ops and of those without a GPU kernel, then
    a line for each kind of op without a GPU kernel.
  """

  def is_gpu(device: str) -> bool:
    if options.is_mirrored:  # CPU 0 may be a replica's device or the host.
      return ":CPU:" in device
    stands_in = "/job:ps" in device and device.endswith(":CPU:1")
    return stands_in or ":GPU:" in device

  found = gpu_kernels.scan(is_gpu)
  lines = [
    f"GPU check: {found.num_ops:,} traced ops are for GPUs;"
    f" {sum(f.count for f in found.fallbacks):,} of them have no GPU kernel in"
    f" TensorFlow {tf.__version__}"
  ]
  for fallback in found.fallbacks:
    types = f" with {fallback.types}" if fallback.types else ""
    lines.append(
      f"GPU check: {fallback.count:,} x {fallback.op}{types} would run on the"
      f" CPU, for example {fallback.example}"
    )
  return "\n".join(lines)
