"""Maps every measured number of README and docs to the data it comes from.

  python -m experiments.numbers [--list]

A block (a paragraph, a list or a table) with measured numbers has a comment
before it that says where they come from, one of

    <!-- measured: results/straggler.json, table race -->
    <!-- not measured: REASON -->

The first names files in `experiments/` with the stored measurements, and tables
that `experiments.tables` computes from such files, separated by commas. Each
file must say when it was made; else the comment must, after a semicolon. Each
number of the block must be one of

*   a value of a finding of a claim in these files, or the median of its values;
    or the difference of that from 1, as a share or as a percentage; rounded as
    it is written;
*   a number of these tables, or of a file that is not JSON, as it is written;
*   a number that the comment computes. `; computed: 0.34 = EXPRESSION; ...`
    does so in Python; `x` is the content of the first JSON file, `xs` that of
    all, and `_FUNCTIONS` may be called;
*   a setting or a goal. They follow after `; also:`, separated by commas.

The second comment says why the numbers are no measurements, but settings, goals
or theory. A comment whose text ends in "(section)" holds for all blocks up to
the next heading that have no comment. What `experiments.tables` writes needs
none.

The program prints numbers without such a comment or without data, and fails if
there are any. With `--list`, it prints all numbers with their sources.
"""

import functools
import json
import math
import pathlib
import re
import statistics
import sys
from collections.abc import Iterator
from collections.abc import Sequence
from typing import NamedTuple

from benchmarks import ratios

ROOT = pathlib.Path(__file__).resolve().parents[1]
PAGES = (
  "README.md",
  "docs/**/*.md",
  "experiments/README.md",
  "inception_mini/README.md",
)
_KINDS = ("measured", "not measured")
_MARK = re.compile(rf"<!-- ({'|'.join(_KINDS)}): (.*?) -->", re.DOTALL)
_COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
# A test of `benchmarks.versions` compares this page with its data.
_GENERATED = ("docs/versions.md",)
# A test of `experiments.tables` compares these blocks with their data.
_BLOCK = re.compile(
  r"<!-- generated: (?P<name>\S+) -->(?P<table>.*?)<!-- end -->", re.DOTALL
)
# What has numbers, but none that were measured.
_CODE = re.compile(r"```.*?```|`[^`]*`|\]\([^)]*\)|https?://\S+", re.DOTALL)
_NAMED = re.compile(
  r"\b(?:TensorFlow|TF|Keras|Python|Slurm|Kubernetes|Apache|version|seed)\s"
  r"\d[\d.]*(?:(?:,| to| and| or) \d+\.[\d.]+)*|95%(?= interval)"
)
_DIGITS = re.compile(r"[\d.,]*\d")
_DATE = re.compile(r"\d{4}-\d\d-\d\d")
_UNITS = (
  r"%|percent|points|times|s\b|ms\b|seconds?\b|minutes?\b|hours?\b|[kMG]i?B\b"
  r"|bytes\b|examples/sec|steps/sec|updates/sec|per second"
)
_NUMBER = re.compile(
  rf"(?<![\w.,-])(\d[\d,]*\.\d+|\d[\d,]*(?=[ \u00a0-]?(?:{_UNITS})))(?!\.\d)"
)


_FUNCTIONS = {
  "gmean": statistics.geometric_mean,
  "interval": ratios.interval,
  "len": len,
  "max": max,
  "mean": statistics.mean,
  "median": statistics.median,
  "min": min,
  "sum": sum,
}


class Number(NamedTuple):
  """A number in a page that looks like a measurement.

  Attributes:
    page: The path of the page in the repository.
    line: Its line.
    text: The number as written.
    is_percent: Whether it is a percentage.
    kind: `measured` or `not measured`; empty without a comment.
    source: The rest of the comment.
  """

  page: str
  line: int
  text: str
  is_percent: bool
  kind: str
  source: str

  def __str__(self) -> str:
    return f"{self.page}:{self.line}: {self.text}"


def _blank(text: str, pattern: re.Pattern) -> str:
  """Replaces all matches by spaces, and keeps the line breaks."""
  return pattern.sub(lambda m: re.sub(r"[^\n]", " ", m[0]), text)


def numbers(page: str, text: str) -> Iterator[Number]:
  """Finds the numbers of a page that look like measurements.

  Args:
    page: The path of the page in the repository.
    text: Its content.

  Yields:
    The numbers, with the comment that belongs to their block.
  """
  text = _blank(text, re.compile(r"```.*?```", re.DOTALL))
  text = _blank(text, _BLOCK)
  line, section, pending = 1, None, None
  for block in re.split(r"(\n\s*\n)", text):
    mark = _MARK.search(block)
    if re.match(r"\s*#", block):
      section = None
    if mark and mark[2].endswith("(section)"):
      section = mark
    elif mark:
      pending = mark
    plain = block
    for pattern in (_COMMENT, _CODE, _NAMED, _DATE):
      plain = _blank(plain, pattern)
    own = pending or section
    kind, source = (own[1], own[2]) if own else ("", "")
    for match in _NUMBER.finditer(plain):
      yield Number(
        page,
        line + plain.count("\n", 0, match.start()),
        match[1],
        plain[match.end() :].startswith("%"),
        kind,
        re.sub(r"\s+", " ", source),
      )
    if plain.strip():
      pending = None
    line += block.count("\n")


def findings(data: object) -> Iterator[float]:
  """Yields the values of the findings of a claim, and their medians.

  Args:
    data: Decoded JSON, of a claim or not.
  """
  if isinstance(data, dict):
    for finding in data.get("findings", ()):
      yield statistics.median(finding["values"])
      yield from finding["values"]


def computed(comment: str, data: Sequence[object]) -> dict[str, float]:
  """Returns what the expressions of a comment give.

  Args:
    comment: The comment, or its part with the expressions.
    data: The decoded JSON files that the comment names.

  Returns:
    The values by the number that stands before the expression.

  Raises:
    ValueError: If there is no number before an expression, or an expression
      fails.
  """
  found = {}
  text = comment.partition("computed:")[2].partition("also:")[0]
  names = {"__builtins__": {}, "x": data[0] if data else None, "xs": data}
  for part in filter(str.strip, text.split(";")):
    written, _, expression = map(str.strip, part.partition("="))
    if not _DIGITS.fullmatch(written):
      raise ValueError(f"{part.strip()!r} must be NUMBER = EXPRESSION")
    try:
      # The pages are as much a part of this repository as this program.
      value = float(eval(expression, {**names, **_FUNCTIONS}))
    except Exception as error:
      raise ValueError(f"{expression!r} failed: {error!r}") from error
    found[written] = value
  return found


def is_in(number: Number, values: Sequence[float]) -> bool:
  """Returns whether a number of a page is one of the stored values.

  Args:
    number: The number.
    values: The stored values.
  """
  text = number.text.replace(",", "")
  written = float(text)
  digits = len(text.partition(".")[2])
  scale = 100 if number.is_percent else 1
  half = 0.501 * 10**-digits
  return any(
    abs(other * scale - written) <= half
    for value in values
    if math.isfinite(value)
    for other in (value, -value, 1 - value, value - 1)
  )


def problem(number: Number) -> str:
  """Returns what is wrong with the source of a number; empty if nothing is.

  Args:
    number: The number.
  """
  if not number.kind:
    return "has no source"
  if number.kind == "not measured":
    return ""
  source = number.source.removesuffix("(section)").strip()
  names, _, more = source.partition(";")
  values, files = [], []
  written: set[str] = set()
  for name in names.split(","):
    if name.strip().startswith("table "):
      table = generated().get(name.strip().removeprefix("table "))
      if table is None:
        return f"is said to be in the {name.strip()}, which is on no page"
      written |= set(_DIGITS.findall(table))
      continue
    path = ROOT / "experiments" / name.strip()
    if not path.exists():
      return f"is said to be in {name.strip()}, which does not exist"
    text = path.read_text(encoding="utf-8")
    data = None
    if path.suffix == ".json":
      data = json.loads(text)
      files.append(data)
    else:
      written |= set(_DIGITS.findall(text))
    has_own = isinstance(data, dict) and "date" in data
    if not (has_own or _DATE.search(more)):
      return f"has no date: neither {name.strip()} nor its comment has one"
    values += findings(data)
  written |= set(_DIGITS.findall(more.partition("also:")[2]))
  if number.text in written:
    return ""
  try:
    results = computed(more, files)
  except ValueError as error:
    return str(error)
  if number.text in results:
    values = [results[number.text]]
  return "" if is_in(number, values) else f"is not in {names}"


def pages() -> dict[str, str]:
  """Returns the text of each page, by its path in the repository."""
  return {
    str(path.relative_to(ROOT)): path.read_text(encoding="utf-8")
    for pattern in PAGES
    for path in sorted(ROOT.glob(pattern))
  }


@functools.cache
def generated() -> dict[str, str]:
  """Returns the tables that `experiments.tables` has written into the pages."""
  return {
    match["name"]: match["table"]
    for text in pages().values()
    for match in _BLOCK.finditer(text)
  }


def of_pages() -> list[Number]:
  """Returns the numbers of all pages."""
  return [
    number
    for page, text in pages().items()
    if page not in _GENERATED
    for number in numbers(page, text)
  ]


def main() -> int:
  found = of_pages()
  wrong = [(n, problem(n)) for n in found if problem(n)]
  if "--list" in sys.argv[1:]:
    for number in found:
      print(f"{number} <- {number.kind}: {number.source}")
  for number, what in wrong:
    print(f"{number} {what}", file=sys.stderr)
  kinds = {kind: sum(n.kind == kind for n in found) for kind in _KINDS}
  print(
    f"{len(found)} numbers: "
    + ", ".join(f"{count} {kind}" for kind, count in kinds.items())
    + f", {len(wrong)} wrong"
  )
  return 1 if wrong else 0


if __name__ == "__main__":
  sys.exit(main())
