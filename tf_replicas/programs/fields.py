"""Declares settings as dataclass fields, which also define command-line flags.

A *setting* is such a field. It declares a default, a help text, the valid
values, and the group of `--help` that lists its flag:

    @dataclasses.dataclass(frozen=True)
    class Config:
      momentum: float = setting(0.9, "SGD momentum", "[0, 1)", group="Model")

      def __post_init__(self):
        validate(self)

    define_flags(Config, ["Model"])  # --momentum, in the group Model of --help
    config = Config(**given(Config))

A setting without a group has no flag.
"""

import dataclasses
import numbers
import types
import typing
from collections.abc import Collection

from absl import flags

FLAGS = flags.FLAGS

COUNT = "[1, inf)"
SEEDS = f"[0, {2**63})"  # TensorFlow takes 63 bits.
EPOCHS = "(0, 1e9]"  # Their examples are counted in 64 bits.

_DEFINE = {
  bool: flags.DEFINE_boolean,
  int: flags.DEFINE_integer,
  float: flags.DEFINE_float,
  str: flags.DEFINE_string,
  tuple: flags.DEFINE_list,
}


class Dataclass(typing.Protocol):
  """The type of an instance of any dataclass, for annotations."""

  __dataclass_fields__: typing.ClassVar[dict[str, dataclasses.Field]]


def setting(
  default: object,
  help: str,
  within: str | None = None,
  *,
  group: str | None = None,
  flag: str | None = None,
  choices: Collection[str] | None = None,
  **metadata: object,
) -> typing.Any:
  """Returns a dataclass field that declares a setting.

  Args:
    default: The default value.
    help: The help text: one line, with the unit.
    within: The interval of valid numbers, such as "[0, 1)". None: all numbers
      are valid.
    group: The group of `--help` that lists the flag. None: there is no flag.
    flag: The name of the flag. None: the name of the field.
    choices: The valid strings. None: all are valid.
    **metadata: More entries of the field's metadata, for other modules.
  """
  metadata |= dict(
    help=help, group=group, flag=flag, within=within, choices=choices
  )
  return dataclasses.field(default=default, metadata=metadata)


def flag_name(field: dataclasses.Field) -> str:
  """Returns the name, without dashes, of the flag of a setting."""
  return field.metadata["flag"] or field.name


def validate(instance: Dataclass, error: type[ValueError] = ValueError) -> None:
  """Checks that all settings of a dataclass instance have valid values.

  None is valid for each setting. An empty string is not valid.

  Args:
    instance: The instance. Its fields were made by `setting`.
    error: The type of the exception to raise.

  Raises:
    ValueError: If a setting has an invalid value. The exception is of the type
      `error`.
  """
  types_by_name = typing.get_type_hints(type(instance))
  for field in _settings(type(instance)):
    value = getattr(instance, field.name)
    name = flag_name(field)
    within, choices = field.metadata["within"], field.metadata["choices"]
    if value is None:
      continue
    if within:
      holds = isinstance(value, numbers.Real) and _is_within(
        float(value), within
      )
      require(name, value, holds, f"in {within}", error)
      if _flag_type(types_by_name[field.name]) is int:
        holds = isinstance(value, numbers.Integral)
        require(name, value, holds, "an integer", error)
    elif choices:
      rule = f"one of {', '.join(choices)}"
      require(name, value, value in choices, rule, error)
    elif isinstance(value, str):
      require(name, value, bool(value), "not empty", error)


def require(
  name: str,
  value: object,
  holds: bool,
  rule: str,
  error: type[ValueError] = ValueError,
) -> None:
  """Raises an error that says what a setting must be, unless `holds` is True.

  Args:
    name: The name of the setting, for the message.
    value: The value of the setting, for the message.
    holds: Whether the value is valid.
    rule: What the value must be, for the message, such as "in [0, 1)".
    error: The type of the exception.
  """
  if not holds:
    raise error(f"`{name}` must be {rule}. Received: {value!r}.")


def define_flags(
  settings_class: type,
  groups: Collection[str],
  *,
  unset: Collection[str] = (),
) -> None:
  """Defines the command-line flags of the settings of a dataclass.

  Args:
    settings_class: The dataclass, whose fields are made by `setting`.
    groups: The groups of settings for which flags are defined.
    unset: The names of settings whose default depends on a *recipe*, which is a
      set of published settings that the user chooses by another flag. The flags
      of these settings have the default None, and "default: the recipe's" is
      added to their help texts.
  """
  types_by_name = typing.get_type_hints(settings_class)
  for field in _settings(settings_class):
    group = field.metadata["group"]
    if group in groups:
      has_default = field.name not in unset
      text = field.metadata["help"]
      define_flag(
        flag_name(field),
        _flag_type(types_by_name[field.name]),
        field.default if has_default else None,
        text if has_default else f"{text}; default: the recipe's",
        group=group,
        choices=field.metadata["choices"],
      )


def define_flag(
  name: str,
  kind: type,
  default: object,
  help: str,
  *,
  group: str,
  choices: Collection[str] | None = None,
) -> None:
  """Defines one command-line flag, which `--help` lists in a group.

  Args:
    name: The flag's name, without dashes.
    kind: The type of the value: bool, int, float, str, or tuple for a list of
      strings.
    default: The default value.
    help: The help text: one line, with the unit.
    group: The group of `--help` that lists the flag.
    choices: The valid strings. None: all are valid.
  """
  if kind is tuple:
    default = list(default)
  where = {"module_name": group, "flag_values": FLAGS}
  if choices and kind is str:
    flags.DEFINE_enum(name, default, list(choices), help, **where)
  else:
    _DEFINE[kind](name, default, help, **where)


def given(settings_class: type) -> dict[str, typing.Any]:
  """Returns the values of the command-line flags of a dataclass's settings.

  Args:
    settings_class: The dataclass, whose fields are made by `setting`.

  Returns:
    The values by name of the field, as keyword arguments for the dataclass.
    Settings are left out if their flag has the value None, or if they have no
    flag.
  """
  values = {}
  for field in _settings(settings_class):
    name = flag_name(field)
    if field.metadata["group"] and name in FLAGS:
      value = FLAGS[name].value
      if value is not None:
        values[field.name] = tuple(value) if isinstance(value, list) else value
  return values


def _settings(settings_class: type) -> list[dataclasses.Field]:
  return [f for f in dataclasses.fields(settings_class) if "help" in f.metadata]


def _flag_type(annotation: object) -> type:
  """Returns the type of the flag of a field with a given type annotation.

  For `int | None` it is `int`, and for `tuple[str, ...]` it is `tuple`.
  """
  if isinstance(annotation, types.UnionType):
    annotation = typing.get_args(annotation)[0]
  return typing.get_origin(annotation) or annotation


def _is_within(value: float, interval: str) -> bool:
  low, high = map(float, interval[1:-1].split(", "))
  above = value >= low if interval[0] == "[" else value > low
  below = value <= high if interval[-1] == "]" else value < high
  return above and below
