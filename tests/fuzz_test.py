"""A few damaged inputs of every kind; `python -m tests.fuzz` reads many."""

import pytest

from tests.fuzz import __main__ as fuzz
from tests.fuzz import kinds
from tests.support import trials

# Defines the flags of a program, so it needs a process of its own.
_FLAGS = "flags"


@pytest.mark.parametrize("name", sorted(kinds.KINDS.keys() - {_FLAGS}))
def test_damaged_inputs_end_in_documented_errors(name, tmp_path, capsys):
  fuzz.run_kind(name, 40, 0, tmp_path)
  words = capsys.readouterr().out.splitlines()[-1].split()
  assert int(words[2]) > 9, "hardly anything was damaged"


def test_damaged_flags_end_in_documented_errors():
  process = trials.python("-m", "tests.fuzz", "--kinds=flags", "--cases=40")
  assert process.returncode == 0, process.stdout + process.stderr
  assert process.stdout.startswith("flags: ")


def _refuse_two(case):
  if case == 2:
    raise ValueError("two\nlines")


@pytest.mark.parametrize("documented", [ValueError, KeyError])
def test_other_errors_and_long_messages_are_failures(
  monkeypatch, tmp_path, documented
):
  kind = kinds.Kind(lambda rng: rng.randrange(4), _refuse_two, (documented,))
  monkeypatch.setitem(kinds.KINDS, "two", lambda folder: kind)
  with pytest.raises((ValueError, AssertionError), match="two") as error:
    fuzz.run_kind("two", 40, 0, tmp_path)
  is_documented = documented is ValueError
  assert isinstance(error.value, AssertionError) == is_documented


def test_a_process_that_crashes_is_a_failure(monkeypatch, capsys):
  monkeypatch.setattr(fuzz.sys, "executable", "false")
  assert not fuzz._supervise("finished", 1, 0)
  assert "exit status 1" in capsys.readouterr().out
