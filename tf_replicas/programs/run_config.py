"""Writes the settings of a training run into its directory, and reads them."""

from __future__ import annotations

import dataclasses
import json
import os
from typing import Protocol
from typing import TypeVar

_RECORD = "config.json"


class Settings(Protocol):
  """The interface of the settings that this module writes and reads.

  They are a dataclass. Each field has a default, and a value that JSON can
  represent.

  Attributes:
    train_dir: The directory of the run.
    data_dir: The directory of the data set; None if none is set.
  """

  train_dir: str
  data_dir: str | None


_Settings = TypeVar("_Settings", bound=Settings)


def record(settings: Settings) -> None:
  """Writes the settings of a run to a file in `settings.train_dir`.

  If the file exists, it first prints the settings that differ from those in the
  file. So the user notices a flag that was forgotten when the run was resumed.

  Args:
    settings: The settings.
  """
  os.makedirs(settings.train_dir, exist_ok=True)
  values = dataclasses.asdict(settings)
  if settings.data_dir:  # A reader may have another working directory.
    values["data_dir"] = os.path.abspath(os.path.expanduser(settings.data_dir))
  path = os.path.join(settings.train_dir, _RECORD)
  _print_changes(path, values)
  temporary = f"{path}.tmp"
  with open(temporary, "w", encoding="utf-8") as file:
    json.dump(values, file, indent=2)
  os.replace(temporary, path)


def is_recorded(train_dir: str) -> bool:
  """Returns whether `record` has written settings to `train_dir`."""
  return os.path.exists(os.path.join(train_dir, _RECORD))


def _print_changes(path: str, values: dict[str, object]) -> None:
  """Prints which settings of a resumed run differ from the recorded ones.

  It leaves out `train_dir` and `max_steps`.

  Args:
    path: The file with the recorded settings. If it is missing or damaged,
      nothing is printed.
    values: The new settings by name.
  """
  try:
    with open(path, encoding="utf-8") as file:
      before = dict(json.load(file))
  except (OSError, TypeError, ValueError):
    return
  changes = [
    f"{name} {before[name]!r} -> {value!r}"
    for name, value in values.items()
    if name not in ("train_dir", "max_steps")
    and name in before
    and before[name] != value
  ]
  if changes:
    print(f"settings changed on resuming: {', '.join(changes)}", flush=True)


def of_run(
  settings_class: type[_Settings], train_dir: str, **given
) -> _Settings:
  """Reads the settings with which a run was last started.

  Args:
    settings_class: The class of the settings.
    train_dir: The directory of the run. If it has no recorded settings, they
      are the defaults of the class.
    **given: Settings that replace the recorded ones.

  Returns:
    The settings. Their `train_dir` is the argument `train_dir`.

  Raises:
    ValueError: If the file with the settings cannot be read, or if a setting in
      `given` is out of range.
  """
  path = os.path.join(train_dir, _RECORD)
  recorded = settings_class()
  if os.path.exists(path):
    try:
      with open(path, encoding="utf-8") as file:
        recorded = settings_class(**json.load(file))
    except (TypeError, ValueError) as error:
      raise ValueError(
        f"cannot read the settings of the run in {path}: {error}. Another"
        " version of this program may have written it. Repair it, or delete it"
        " to use the defaults."
      ) from None
  return dataclasses.replace(recorded, train_dir=train_dir, **given)
