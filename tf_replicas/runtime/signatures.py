"""Checks how functions of the user can be called."""

import inspect
from collections.abc import Callable


def check_call(function: Callable, *arguments: object, rule: str) -> None:
  """Checks that a function can be called with these positional arguments.

  Args:
    function: The function; one that is written in C is not checked.
    *arguments: The arguments; only their number counts.
    rule: What the function must be or take; the error begins with it.

  Raises:
    TypeError: If the function cannot be called so.
  """
  try:
    signature = inspect.signature(function)
  except ValueError:  # Written in C.
    return
  try:
    signature.bind(*arguments)
  except TypeError as error:
    name = getattr(function, "__name__", type(function).__name__)
    raise TypeError(f"{rule}. Received: {name}{signature}: {error}.") from None
