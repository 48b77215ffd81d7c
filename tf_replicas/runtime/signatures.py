"""Checks whether functions that the user passes can be called as needed."""

import inspect
from collections.abc import Callable


def check_call(function: Callable, *arguments: object, rule: str) -> None:
  """Checks that a function can be called with these positional arguments.

  Args:
    function: The function. A function that is written in C is not checked.
    *arguments: The arguments, of which only the number counts.
    rule: What the function must be or take; the error message begins with it.

  Raises:
    TypeError: If the function cannot be called with so many arguments.
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
