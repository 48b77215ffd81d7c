"""The settings of a run, recorded in its directory for whoever reads it."""

import dataclasses
import json
import os
from typing import Protocol
from typing import TypeVar

_RECORD = "config.json"
# Examples are counted in 64 bits.
_MOST_EPOCHS = 1e9


class Settings(Protocol):
  """A dataclass of what JSON can hold, with defaults.

  Attributes:
    train_dir: The run's directory.
    data_dir: Where its data set lies, if that has a place of its own.
  """

  train_dir: str
  data_dir: str | None


_Settings = TypeVar("_Settings", bound=Settings)


def record(settings: Settings) -> None:
  """Writes the settings into the run's directory, for `of_run`.

  Says which of those recorded before have changed, since a flag that was
  forgotten at a restart goes unnoticed otherwise.
  """
  os.makedirs(settings.train_dir, exist_ok=True)
  values = dataclasses.asdict(settings)
  if settings.data_dir:  # Whoever reads it may be elsewhere.
    values["data_dir"] = os.path.abspath(os.path.expanduser(settings.data_dir))
  path = os.path.join(settings.train_dir, _RECORD)
  _tell_changes(path, values)
  temporary = f"{path}.tmp"
  with open(temporary, "w", encoding="utf-8") as file:
    json.dump(values, file, indent=2)
  os.replace(temporary, path)


def is_recorded(train_dir: str) -> bool:
  """Whether a run has recorded its settings there."""
  return os.path.exists(os.path.join(train_dir, _RECORD))


def _tell_changes(path: str, values: dict[str, object]) -> None:
  """Says what a record has otherwise, but for where it is and how long."""
  try:
    with open(path, encoding="utf-8") as file:
      before = dict(json.load(file))
  except (OSError, TypeError, ValueError):
    return
  changes = [
    f"{name} was {before[name]!r} and is {value!r}"
    for name, value in values.items()
    if name not in ("train_dir", "max_steps")
    and name in before
    and before[name] != value
  ]
  if changes:
    print(f"this run goes on otherwise: {'; '.join(changes)}", flush=True)


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


def require_seed(seed: int) -> None:
  """Checks that a seed is one to TensorFlow, which takes 63 bits.

  Raises:
    ValueError: If not.
  """
  require("seed", seed, 0 <= seed < 2**63, "in [0, 2**63)")


def require_epochs(name: str, config: object) -> None:
  """Checks a setting that counts epochs, of which examples are computed.

  Raises:
    ValueError: If it is not positive, or so large that there is no such number.
  """
  value = getattr(config, name)
  require(name, value, 0 < value <= _MOST_EPOCHS, f"in (0, {_MOST_EPOCHS:g}]")


def require(name: str, value: object, holds: bool, rule: str) -> None:
  """Checks a setting.

  Raises:
    ValueError: Unless it `holds`, with the setting, the rule and the value.
  """
  if not holds:
    raise ValueError(f"`{name}` must be {rule}. Received: {value!r}.")
