"""Finds the traced ops that have no GPU kernel. It needs no GPU.

TensorFlow keeps a registry of the kernels that it was built with. On Linux, the
wheels of TensorFlow 2.19 to 2.21 register their GPU kernels on every machine,
also where there is neither a GPU nor CUDA. A build without CUDA, such as
`tensorflow-cpu`, registers hardly any.

If a function asks for a GPU and an op in it has no GPU kernel, TensorFlow
silently runs the op on the CPU ("soft placement"). The name of the GPU in the
function need not exist while the function is traced, and so a machine without
GPUs can tell which ops this will happen to.
"""

import collections
import contextlib
from collections.abc import Callable
from collections.abc import Iterator
from typing import Any
from typing import NamedTuple

import tensorflow as tf
from tensorflow.python.eager import context
from tensorflow.python.framework import kernels

# Kernels for "DEFAULT" serve every device that has none of its own.
_GPU_KINDS = ("GPU", "DEFAULT")
# Functions with this attribute transform data sets, always on the CPU.
_OF_DATASETS = "_tf_data_function"
# TensorFlow wraps each op that it runs eagerly in such a function.
_EAGER = "__wrapped__"


class Fallback(NamedTuple):
  """A kind of op that traced functions place on a GPU, but that has no kernel.

  Attributes:
    op: The type of the op, such as "Conv2D".
    types: The dtypes for which it has no GPU kernel, such as "T=int32"; empty
      if it has no GPU kernel for any dtype.
    count: The number of ops of this kind.
    example: The name of one of them. It often begins with the name of a layer.
  """

  op: str
  types: str
  count: int
  example: str


class Scan(NamedTuple):
  """The result of `scan`: ops on GPUs, and those of them without a kernel.

  Attributes:
    num_ops: The number of ops that functions place on a GPU, including those
      that have no GPU kernel and fall back to the CPU.
    num_functions: The number of functions that contain these ops.
    fallbacks: The kinds of ops that fall back to the CPU, the most frequent
      kind first.
  """

  num_ops: int
  num_functions: int
  fallbacks: list[Fallback]


def check_build() -> None:
  """Checks that the installed TensorFlow knows its GPU kernels.

  Raises:
    RuntimeError: If it was built without them.
  """
  if not _has_kernel("MatMul", {"T": tf.float32.as_datatype_enum}):
    raise RuntimeError(
      "a GPU check needs a TensorFlow that was built with CUDA, such as the"
      " package `tensorflow` for Linux, as others do not know which GPU kernels"
      f" exist. Received: TensorFlow {tf.__version__}, which has no GPU kernel"
      " of MatMul."
    )


def scan(is_gpu: Callable[[str], bool]) -> Scan:
  """Looks for ops without a GPU kernel in all functions that were traced.

  These are all functions that this process has traced, also for devices of
  other tasks, with the functions that they call and the bodies of their
  conditionals and loops. Functions of data sets are left out.

  Args:
    is_gpu: Maps the name of a device, such as
      "/job:worker/task:0/device:GPU:0", to whether it counts as a GPU. The name
      is "" for ops without a device.

  Returns:
    The number of ops on a GPU, and the kinds of them without a kernel.
  """
  library = _library()
  called = {
    name
    for function in library.values()
    for node in function.node_def
    for name in _functions_of(node, library)
  }
  pending = [(name, "") for name in library if name not in called]
  seen = set(pending)
  nodes: dict[tuple[str, str], Any] = {}  # By function and node.
  while pending:
    name, caller = pending.pop()
    if _OF_DATASETS in library[name].attr:
      continue
    for node in library[name].node_def:
      device = _merged(caller, node.device)
      inner = [(f, device) for f in _functions_of(node, library)]
      pending += [call for call in inner if call not in seen]
      seen.update(inner)
      if node.op not in library and is_gpu(device):
        nodes[name, node.name] = node
  return Scan(
    len(nodes), len({name for name, _ in nodes}), _fallbacks(nodes.values())
  )


def _fallbacks(nodes) -> list[Fallback]:
  counts = collections.Counter()
  examples: dict[tuple[str, str], str] = {}
  for node in nodes:
    types = {k: v.type for k, v in node.attr.items() if v.type}
    lists = {k: set(v.list.type) for k, v in node.attr.items() if v.list.type}
    if _has_kernel(node.op, types, lists):
      continue
    dtypes = {k: [v] for k, v in types.items()} | lists
    described = ", ".join(
      f"{name}={'/'.join(tf.as_dtype(t).name for t in sorted(found))}"
      for name, found in sorted(dtypes.items())
    )
    kind = node.op, described if _gpu_kernels(node.op) else ""
    counts[kind] += 1
    examples.setdefault(kind, node.name)
  return [
    Fallback(op, described, count, examples[op, described])
    for (op, described), count in counts.most_common()
  ]


def _library() -> dict[str, Any]:
  """Returns the `FunctionDef` of each traced function, by name."""
  here: Any = context.context()
  library = {}
  for name in sorted(map(tf.compat.as_str, here.list_function_names())):
    if name.startswith(_EAGER):
      continue
    # The garbage collector may delete a function after its name was listed.
    with contextlib.suppress(tf.errors.NotFoundError):
      library[name] = here.get_function_def(name)
  return library


def _functions_of(node, library) -> Iterator[str]:
  """Yields the names of the functions that an op calls.

  Args:
    node: The op, a `NodeDef`.
    library: All functions by name, as `_library` returns them.
  """
  if node.op in library:
    yield node.op
  for value in node.attr.values():
    for function in (value.func, *value.list.func):
      if function.name in library:
        yield function.name


def _merged(caller: str, device: str) -> str:
  """Returns the device on which an op of a called function runs.

  Args:
    caller: The device on which the function is called; may be "".
    device: The device that the op asks for, which may be incomplete or "".
  """
  if not device or not caller:
    return device or caller
  inner = tf.DeviceSpec.from_string(device)
  return tf.DeviceSpec.from_string(caller).make_merged_spec(inner).to_string()


def _gpu_kernels(op: str):
  found = kernels.get_registered_kernels_for_op(op).kernel
  return [kernel for kernel in found if kernel.device_type in _GPU_KINDS]


def _has_kernel(op, types, lists=None) -> bool:
  """Returns whether an op has a GPU kernel for given dtypes.

  Args:
    op: The type of the op, such as "Conv2D".
    types: Maps each attribute that is a dtype, such as "T", to its value, a
      number of TensorFlow's enum `DataType`.
    lists: Maps each attribute that is a list of dtypes to the set of them. None
      if there are no such attributes.
  """
  lists = lists or {}
  for kernel in _gpu_kernels(op):
    allowed = {
      c.name: set(c.allowed_values.list.type) for c in kernel.constraint
    }
    if not kernel.label and all(
      types.get(name) in dtypes or (name in lists and lists[name] <= dtypes)
      for name, dtypes in allowed.items()
    ):
      return True
  return False
