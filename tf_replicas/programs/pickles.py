"""Pickles functions for other processes, with cloudpickle."""

import io
import types
from collections.abc import Callable

# Returns what `__reduce__` would return for an object, or `NotImplemented`.
Reducer = Callable[[object], object]


def dumps(
  value: object, needs: str, *, reduce: Reducer = lambda value: NotImplemented
) -> bytes:
  """Pickles a value with cloudpickle.

  Functions and classes of the main module are pickled with their code. Those of
  other modules are pickled as names to import.

  Args:
    value: The value.
    needs: Beginning of the error message if cloudpickle is missing, such as
      "`LocalTraining` needs".
    reduce: Called with each object. Returns what the object's `__reduce__`
      would return, or `NotImplemented` to pickle the object as usual.

  Returns:
    Bytes from which `pickle.loads` makes the value again.

  Raises:
    ImportError: If cloudpickle is not installed.
    Exception: What cloudpickle raises if the value cannot be pickled.
  """
  try:
    import cloudpickle
  except ImportError:
    raise ImportError(
      f"{needs} the package cloudpickle: pip install tf-replicas[notebook]"
    ) from None

  reducers = cloudpickle.CloudPickler.dispatch_table

  def reduce_code(code: types.CodeType) -> tuple:
    """Pickles a code object with its file name, which cloudpickle 3.1 drops.

    Tracebacks and AutoGraph need the file name.
    """
    constructor, arguments, *_ = reducers[types.CodeType](code)
    return code_of_file, (constructor, arguments, code.co_filename)

  class Pickler(cloudpickle.CloudPickler):
    dispatch_table = {**reducers, types.CodeType: reduce_code}

    def reducer_override(self, obj):
      found = reduce(obj)
      if found is NotImplemented:
        return super().reducer_override(obj)
      return found

  buffer = io.BytesIO()
  Pickler(buffer).dump(value)
  return buffer.getvalue()


def code_of_file(
  constructor: Callable[..., types.CodeType], arguments: tuple, name: str
) -> types.CodeType:
  """Makes a code object with a given file name, while a function is unpickled.

  Args:
    constructor: Makes the code object.
    arguments: The arguments of `constructor`.
    name: The file name of the code.
  """
  return constructor(*arguments).replace(co_filename=name)
