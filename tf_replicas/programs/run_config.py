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

  The settings are a dataclass. Its fields have defaults and values for JSON.

  Attributes:
    train_dir: The run's directory.
    data_dir: Directory of the run's data set, if one is set.
  """

  train_dir: str
  data_dir: str | None


_Settings = TypeVar("_Settings", bound=Settings)


def record(settings: Settings) -> None:
  """Writes the settings of a run into its directory, where `of_run` reads them.

  If settings were recorded there before, prints which have changed: a flag
  forgotten when a run is resumed would otherwise go unnoticed.

  Args:
    settings: The settings. `settings.train_dir` is the run's directory.
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
  """Returns whether a run has recorded its settings in `train_dir`."""
  return os.path.exists(os.path.join(train_dir, _RECORD))


def _print_changes(path: str, values: dict[str, object]) -> None:
  """Prints which settings of a resumed run differ from the recorded ones.

  Changes of `train_dir` and `max_steps` are not printed.

  Args:
    path: The file with the recorded settings, which may be missing.
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
  """Reads the settings that a run was last started with.

  Args:
    settings_class: The class of the recorded settings.
    train_dir: The run's directory. If it has no record, the defaults of the
      class are used.
    **given: Settings that override the recorded ones.

  Returns:
    The settings, with `train_dir` as their directory.

  Raises:
    ValueError: If the record is damaged, or a given setting is out of range.
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
