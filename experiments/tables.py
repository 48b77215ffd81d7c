"""Writes the tables of README and docs that come from stored results.

  python -m experiments.tables

A page has such a table between two comments,

    <!-- generated: NAME -->
    <!-- end -->

where NAME is a key of `TABLES`. Run the command after results have changed: a
test fails if a page is not up to date. `experiments.numbers` looks for no
sources of the numbers in between.
"""

import json
import pathlib
import re
from collections.abc import Callable
from collections.abc import Sequence

from experiments import numbers
from experiments import race
from experiments.claims import validation

_RESULTS = numbers.ROOT / "experiments" / "results"
_BLOCK = re.compile(
  r"(<!-- generated: (\S+) -->\n).*?(<!-- end -->)", re.DOTALL
)


def _validation() -> list[str]:
  path = _RESULTS / "validation.json"
  return validation.table(json.loads(path.read_text(encoding="utf-8")))


def _race() -> list[str]:
  return race.short_table(race.read(str(_RESULTS / "race.json")))


# Each makes the lines of a block.
TABLES: dict[str, Callable[[], Sequence[str]]] = {
  "race": _race,
  "validation": _validation,
}


def fill(text: str) -> str:
  """Returns a page with all its blocks as the stored results are now.

  Args:
    text: The page.

  Raises:
    KeyError: If a block has a name that is not in `TABLES`.
  """

  def block(match: re.Match) -> str:
    begin, name, end = match.groups()
    return "\n".join([begin, *TABLES[name](), "", end])

  return _BLOCK.sub(block, text)


def pages() -> list[pathlib.Path]:
  """Returns the pages that may have blocks."""
  return [
    path for pattern in numbers.PAGES for path in numbers.ROOT.glob(pattern)
  ]


def main() -> None:
  for path in pages():
    text = path.read_text(encoding="utf-8")
    if (filled := fill(text)) != text:
      path.write_text(filled, encoding="utf-8")
      print(path)


if __name__ == "__main__":
  main()
