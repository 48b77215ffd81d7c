"""Sets up the devices of this process, and names the devices of its towers.

A tower is a copy of the model's computation on one device. Every process calls
`configure` before its first tensor or variable, which initializes TensorFlow's
devices. Logical CPU devices can emulate GPUs, so that a cluster of machines
with GPUs can be tested on one machine without GPUs.
"""

from collections.abc import Sequence

import tensorflow as tf

from tf_replicas.runtime import noise


def find_gpus() -> list[tf.config.PhysicalDevice]:
  """Returns the GPUs of this machine, without an error message if it has none.

  Without GPUs, TensorFlow itself prints an error when it looks for them.
  """
  with noise.hidden_lack_of_gpu():
    return tf.config.list_physical_devices("GPU")


def start_quietly() -> None:
  """Hides TensorFlow's messages below errors, and that a machine has no GPU.

  Drivers call it before their first op, which would print an error on a machine
  without GPUs. Nothing is hidden if the user sets TF_CPP_MIN_LOG_LEVEL to 0 or
  1, or if TensorFlow's devices are already initialized.
  """
  noise.hide()
  find_gpus()


def configure(
  gpus: Sequence[int] | None,
  *,
  num_emulated: int = 0,
  memory_growth: bool = True,
) -> None:
  """Selects the GPUs of this process, or emulates them.

  It also enables soft placement, as some ops have no GPU kernel. It does
  nothing if TensorFlow's devices are already initialized in the same way.

  Args:
    gpus: The indices of the GPUs to use. None: all GPUs. Empty: no GPU, as for
      a parameter server, which then takes no GPU memory.
    num_emulated: If positive, this number of CPU devices emulates the GPUs
      `gpus`, which need not exist then.
    memory_growth: Whether to allocate GPU memory as needed, not all at once.

  Raises:
    ValueError: If a GPU does not exist or occurs twice, or `num_emulated` is
      negative.
    RuntimeError: If TensorFlow's devices are already initialized in another
      way.
  """
  if num_emulated < 0:
    raise ValueError(
      f"`num_emulated` must not be negative. Received: {num_emulated}."
    )
  existing = find_gpus()
  if num_emulated:
    visible = []
  elif gpus is None:
    visible = existing
  else:
    _check_gpus(gpus, len(existing))
    visible = [existing[number] for number in sorted(gpus)]
  try:
    tf.config.set_visible_devices(visible, "GPU")
    for gpu in visible:
      tf.config.experimental.set_memory_growth(gpu, memory_growth)
    if num_emulated > 1:
      _split_cpu(num_emulated)
  except RuntimeError as error:
    raise RuntimeError(
      "`configure` must be called before the first tensor or variable, which"
      " initializes TensorFlow's devices. Received:"
      f" gpus={gpus}, num_emulated={num_emulated}, memory_growth="
      f"{memory_growth}, after they were initialized with other settings."
    ) from error
  tf.config.set_soft_device_placement(True)


def tower_devices(
  gpus: Sequence[int],
  *,
  emulate: bool,
  job: str | None = None,
  task: int = 0,
) -> list[str]:
  """Returns the device of each tower of a task.

  A tower is a copy of the model's computation on one device. TensorFlow numbers
  the GPUs that a process uses from 0, in the machine's order: the towers on the
  machine's GPUs 5 and 2 run on the devices `GPU:1` and `GPU:0`.

  Args:
    gpus: The numbers of the task's GPUs on its machine. There is one tower per
      GPU, or one tower on the CPU if the task has no GPUs.
    emulate: Whether CPU devices emulate the GPUs.
    job: The job of the task; None without a cluster.
    task: The index of the task within the job.

  Returns:
    Device strings such as `/job:worker/task:1/device:GPU:0`, in the order of
    `gpus`.
  """
  kind = "GPU" if gpus and not emulate else "CPU"
  host = "" if job is None else f"/job:{job}/task:{task}"
  numbers = [sorted(gpus).index(gpu) for gpu in gpus] or [0]
  return [f"{host}/device:{kind}:{number}" for number in numbers]


def gpu_of_task(job: str, task: int) -> str:
  """Returns the name of the device that serves as the GPU of a task.

  It is the task's first GPU. If the task emulates a GPU, it is the task's
  second CPU device. An emulated GPU is recognized only if this process is
  connected to the task.

  Args:
    job: The job of the task.
    task: The index of the task within the job.
  """
  host = tf.DeviceSpec(job=job, replica=0, task=task)
  second = host.replace(device_type="CPU", device_index=1).to_string()
  if any(d.name == second for d in tf.config.list_logical_devices("CPU")):
    return f"/job:{job}/task:{task}/device:CPU:1"
  return f"/job:{job}/task:{task}/device:GPU:0"


def _check_gpus(gpus: Sequence[int], num_existing: int) -> None:
  if len(set(gpus)) < len(gpus):
    raise ValueError(f"`gpus` must be distinct. Received: {list(gpus)}.")
  if all(0 <= number < num_existing for number in gpus):
    return
  rule = "`gpus` must be empty, as TensorFlow finds no GPU on this machine"
  if num_existing:
    numbers = list(range(num_existing))
    rule = f"`gpus` must be among {numbers}, the GPUs of this machine"
  raise ValueError(
    f"{rule}. Received: {list(gpus)}. To use CPU devices instead, give"
    " --emulate_gpus."
  )


def _split_cpu(num_devices: int) -> None:
  cpu = tf.config.list_physical_devices("CPU")[0]
  logical = [tf.config.LogicalDeviceConfiguration()] * num_devices
  tf.config.set_logical_device_configuration(cpu, logical)
