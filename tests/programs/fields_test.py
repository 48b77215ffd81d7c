"""Tests of `programs.fields`."""

import dataclasses

import pytest
from absl import flags

from tf_replicas.programs import fields


@dataclasses.dataclass(frozen=True)
class Settings:
  """A field of every kind."""

  count: int | None = fields.setting(
    None, "A count", group="First", within="[1, 9)"
  )
  rate: float = fields.setting(0.5, "A rate", group="First", within="(0, 1]")
  names: tuple[str, ...] = fields.setting(
    ("a",), "Some names", group="Second", flag="name"
  )
  kind: str | None = fields.setting(
    None, "A kind", group="First", choices=("x", "y")
  )
  is_fast: bool = fields.setting(False, "Speed", group="First")
  hidden: float = fields.setting(1.0, "No flag", within="[0, inf)")
  place: str = "no setting"

  def __post_init__(self):
    fields.validate(self)


@pytest.fixture
def parse(monkeypatch):
  """Parses a command line with the flags of `Settings`."""
  values = flags.FlagValues()
  monkeypatch.setattr(fields, "FLAGS", values)
  fields.define_flags(Settings, ["First", "Second"], unset=["rate"])

  def parse(*arguments):
    values(["program", *arguments])
    return fields.given(Settings)

  return parse


def test_what_is_not_given_is_left_to_the_defaults(parse):
  assert parse() == {"names": ("a",), "is_fast": False}


def test_flags_become_fields(parse):
  given = parse("--count=3", "--name=b,c", "--kind=y", "--is_fast", "--rate=1")
  assert Settings(**given) == Settings(3, 1.0, ("b", "c"), "y", True)


def test_help_is_the_fields(parse):
  parse()
  by_group = fields.FLAGS.flags_by_module_dict()
  assert [f.name for f in by_group["Second"]] == ["name"]
  helps = {f.name: f.help for f in by_group["First"]}
  assert helps["count"] == "A count"
  assert helps["rate"] == "A rate; default: the recipe's"
  assert "hidden" not in fields.FLAGS and "place" not in fields.FLAGS


@pytest.mark.parametrize(
  "name, value, rule",
  [
    ("count", 0, r"in \[1, 9\)"),
    ("count", 9, r"in \[1, 9\)"),
    ("count", 2.5, "an integer"),
    ("rate", 0.0, r"in \(0, 1\]"),
    ("rate", float("nan"), r"in \(0, 1\]"),
    ("hidden", float("inf"), r"in \[0, inf\)"),
    ("count", "a", r"in \[1, 9\)"),
    ("rate", [1.0], r"in \(0, 1\]"),
    ("kind", "z", "one of x, y"),
    ("kind", "", "one of x, y"),
  ],
)
def test_refuses_what_is_out_of_range(name, value, rule):
  with pytest.raises(ValueError, match=f"^`{name}` must be {rule}. Received: "):
    Settings(**{name: value})


def test_bounds_are_those_of_the_interval():
  assert Settings(count=1, rate=1.0, hidden=0.0).count == 1
  assert Settings(count=8, rate=1e-300).count == 8
