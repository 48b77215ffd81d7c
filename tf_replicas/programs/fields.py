"""Declares settings as dataclass fields, which also define command-line flags.

A field has the default, the help text, the range of valid values and the flag:

    @dataclasses.dataclass(frozen=True)
    class Config:
      momentum: float = setting(0.9, "SGD momentum", "[0, 1)", group="Model")

      def __post_init__(self):
        validate(self)

    define_flags(Config, ["Model"])  # --momentum, in the group Model of --help
    config = Config(**given(Config))

A field without a group has no flag.
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
  """An instance of any dataclass."""

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
    within: The interval of valid numbers, such as `"[0, 1)"`; None for any.
    group: The group of `--help` that lists the flag; None for no flag.
    flag: The flag's name; None for the field's name.
    choices: The valid strings; None for any.
    **metadata: Further metadata of the field.
  """
  metadata |= dict(
    help=help, group=group, flag=flag, within=within, choices=choices
  )
  return dataclasses.field(default=default, metadata=metadata)


def flag_name(field: dataclasses.Field) -> str:
  """Returns the name of a setting's flag, without dashes."""
  return field.metadata["flag"] or field.name


def validate(instance: Dataclass, error: type[ValueError] = ValueError) -> None:
  """Checks every setting against the valid values that its field declares.

  Args:
    instance: The dataclass instance. A value of None is always valid.
    error: The type of the exception.

  Raises:
    ValueError: If a setting is out of range; of the type `error`.
  """
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
  """Raises `error`, naming setting, rule and value, unless `holds` is true."""
  if not holds:
    raise error(f"`{name}` must be {rule}. Received: {value!r}.")


def define_flags(
  settings_class: type,
  groups: Collection[str],
  *,
  unset: Collection[str] = (),
) -> None:
  """Defines the flags of a dataclass's settings in some groups.

  Args:
    settings_class: The dataclass.
    groups: The groups whose flags are defined.
    unset: The names of fields whose flags have the default None.
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
  """Defines a flag in a group of `--help`.

  Args:
    name: The flag's name, without dashes.
    kind: The type: bool, int, float, str, or tuple for a list of strings.
    default: The default value.
    help: The help text: one line, with the unit.
    group: The group of `--help` that lists the flag.
    choices: The valid strings; None for any.
  """
  if kind is tuple:
    default = list(default)
  where = {"module_name": group, "flag_values": FLAGS}
  if choices and kind is str:
    flags.DEFINE_enum(name, default, list(choices), help, **where)
  else:
    _DEFINE[kind](name, default, help, **where)


def given(settings_class: type) -> dict[str, typing.Any]:
  """Maps field names to the values of their flags; leaves out unset flags."""
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
  """Reduces `int | None` to `int`, and `tuple[str, ...]` to `tuple`."""
  if isinstance(annotation, types.UnionType):
    annotation = typing.get_args(annotation)[0]
  return typing.get_origin(annotation) or annotation


def _is_within(value: float, interval: str) -> bool:
  low, high = map(float, interval[1:-1].split(", "))
  above = value >= low if interval[0] == "[" else value > low
  below = value <= high if interval[-1] == "]" else value < high
  return above and below
