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
  other modules are pickled as names, and imported when they are unpickled.

  Args:
    value: The value.
    needs: The beginning of the error message if cloudpickle is missing, such as
      "`LocalTraining` needs".
    reduce: A function that is called with each object in `value`. It returns
      how to pickle the object, in the form that `__reduce__` returns; or
      `NotImplemented`, to pickle it as usual.

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
      f"{needs} the package cloudpickle: pip install cloudpickle"
    ) from None

  reducers = cloudpickle.CloudPickler.dispatch_table

  def reduce_code(code: types.CodeType) -> tuple:
    """Returns how to pickle a code object, with its file name.

    cloudpickle 3.1 drops the file name, which tracebacks and AutoGraph need.

    Args:
      code: The code object.

    Returns:
      (function, arguments), as for `__reduce__`.
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
  """Makes a code object with a given file name. Called while unpickling.

  Args:
    constructor: The function with which cloudpickle makes the code object.
    arguments: The arguments of `constructor`.
    name: The file name of the code.
  """
  return constructor(*arguments).replace(co_filename=name)
