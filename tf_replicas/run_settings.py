"""The settings of a run, recorded in its directory for whoever reads it."""

import dataclasses
import json
import os
from typing import Protocol
from typing import TypeVar

_RECORD = "config.json"


class Settings(Protocol):
  """A dataclass of what JSON can hold, with defaults.

  Attributes:
    train_dir: The run's directory.
  """

  train_dir: str


_Settings = TypeVar("_Settings", bound=Settings)


def record(settings: Settings) -> None:
  """Writes the settings into the run's directory, for `of_run`."""
  os.makedirs(settings.train_dir, exist_ok=True)
  path = os.path.join(settings.train_dir, _RECORD)
  temporary = f"{path}.tmp"
  with open(temporary, "w", encoding="utf-8") as file:
    json.dump(dataclasses.asdict(settings), file, indent=2)
  os.replace(temporary, path)


def of_run(
  settings_class: type[_Settings], train_dir: str, **given
) -> _Settings:
  """The settings that a run was last started with.

  Args:
    settings_class: Whose instance was recorded.
    train_dir: The run's directory; the defaults hold where it has no record.
    **given: What to take instead.

  Raises:
    ValueError: If the record is damaged, or what is given is out of range.
  """
  path = os.path.join(train_dir, _RECORD)
  recorded = settings_class()
  if os.path.exists(path):
    try:
      with open(path, encoding="utf-8") as file:
        recorded = settings_class(**json.load(file))
    except (TypeError, ValueError) as error:
      raise ValueError(f"{path} is damaged: {error}") from None
  return dataclasses.replace(recorded, train_dir=train_dir, **given)


def require(name: str, value: object, holds: bool, rule: str) -> None:
  """Checks a setting.

  Raises:
    ValueError: Unless it `holds`, with the setting, the rule and the value.
  """
  if not holds:
    raise ValueError(f"`{name}` must be {rule}. Received: {value!r}.")
