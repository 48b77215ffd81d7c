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
  """The type of any dataclass instance, for annotations."""

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
  """Returns the name, without dashes, of the flag of a dataclass field."""
  return field.metadata["flag"] or field.name


def validate(instance: Dataclass, error: type[ValueError] = ValueError) -> None:
  """Checks the values of a settings dataclass against the valid ones.

  Args:
    instance: The dataclass instance. Its fields are made by `setting`, which
      declares the valid values. None is always valid.
    error: The type of the exception to raise.

  Raises:
    ValueError: If a setting has an invalid value. The exception is of the type
      `error`.
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
  """Raises an exception of the type `error` unless `holds` is true.

  Args:
    name: Name of the setting, for the message.
    value: Value of the setting, for the message.
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
  """Defines command-line flags for the fields of a settings dataclass.

  Args:
    settings_class: The dataclass, whose fields are made by `setting`.
    groups: The groups of `--help` whose flags are defined.
    unset: The names of fields whose flags have the default None. Their help
      texts say that the default is the recipe's.
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
  """Returns the values of the command-line flags of a settings dataclass.

  The keys of the dict are the names of the dataclass's fields. Flags that are
  None or not defined are left out.
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
  """Returns the type of a flag for the type annotation of a dataclass field.

  The annotation `int | None` gives `int`, and `tuple[str, ...]` gives `tuple`.
  """
  if isinstance(annotation, types.UnionType):
    annotation = typing.get_args(annotation)[0]
  return typing.get_origin(annotation) or annotation


def _is_within(value: float, interval: str) -> bool:
  low, high = map(float, interval[1:-1].split(", "))
  above = value >= low if interval[0] == "[" else value > low
  below = value <= high if interval[-1] == "]" else value < high
  return above and below
