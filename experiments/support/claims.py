"""What an experiment is: a claim, measurements of it, and a computed verdict.

An experiment's module defines one `Claim` and ends in

    if __name__ == "__main__":
      claims.start(CLAIM)

and is run by

    python -m experiments.claims.NAME [--quick] [--num_seeds=3] [--output=DIR]

which writes NAME.json and NAME.png into DIR and prints the verdict. Whether a
claim holds is decided by its `Finding`s alone: numbers, and the bounds that the
claim sets them.
"""

import dataclasses
import datetime
import json
import math
import os
import platform
import re
import statistics
import sys
import time
from collections.abc import Callable
from collections.abc import Sequence
from typing import NoReturn

from absl import flags

from tf_replicas.programs import command_line
from tf_replicas.runtime import processes

FLAGS = flags.FLAGS
# `--help` shows the flags of the experiment, also those that it has from here.
flags.disclaim_key_flags()

HOLDS, FAILS, UNCLEAR = "holds", "does not hold", "unclear"

# In JSON with indentation; the line break is never one of a string.
_LIST_OF_NUMBERS = re.compile(r"\[\n[-+.\deE,\s]*\]")

# Told apart by the colour-blind as well (Okabe and Ito 2008); use the line
# styles or markers too.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#000000")
MARKERS = ("o", "s", "^", "D", "v", "x")


@dataclasses.dataclass(frozen=True)
class Finding:
  """A number that the claim is about, measured once per seed.

  Attributes:
    what: The number, in words.
    values: One per seed.
    unit: Of the number; empty for a ratio or a count.
    least: The claim holds where the value is at least that.
    most: And at most that.
  """

  what: str
  values: Sequence[float]
  unit: str = ""
  least: float = -math.inf
  most: float = math.inf

  @property
  def verdict(self) -> str:
    """HOLDS if it does for every seed, FAILS if for none, else UNCLEAR."""
    inside = [self.least <= value <= self.most for value in self.values]
    return HOLDS if all(inside) else UNCLEAR if any(inside) else FAILS

  @property
  def value(self) -> str:
    """The median over seeds, with the least and the largest, in words."""
    values = [float(value) for value in self.values]
    words = f"{statistics.median(values):.4g}{self.unit and f' {self.unit}'}"
    if len(values) > 1:
      least, most = f"{min(values):.4g}", f"{max(values):.4g}"
      same = f" (all {len(values)} alike)"
      words += same if least == most else f" ({least} to {most})"
    return words

  @property
  def bounds(self) -> str:
    """What is claimed, in words; empty if nothing is."""
    bounds = []
    if self.least > -math.inf:
      bounds.append(f"at least {self.least:.4g}")
    if self.most < math.inf:
      bounds.append(f"at most {self.most:.4g}")
    return " and ".join(bounds)

  def __str__(self) -> str:
    words = f"{self.what}: {self.value}"
    if self.bounds:
      words += f"; claimed {self.bounds}: {self.verdict}"
    return words


@dataclasses.dataclass(frozen=True)
class Claim:
  """A claim and how to find out whether it holds.

  Attributes:
    name: Of the experiment's module and files.
    title: A few words.
    claim: What is claimed, in a sentence.
    source: Who claims it, and where.
    explanation: What the picture shows, for somebody new to it.
    measure: Called with (quick, seed), returns what JSON can hold. The seed is
      the number of the repetition where chance is not ours to choose.
    find: Called with the measurements of all seeds, returns the findings.
    draw: Called with the measurements of all seeds, returns a
      `matplotlib.figure.Figure`.
  """

  name: str
  title: str
  claim: str
  source: str
  explanation: str
  measure: Callable[[bool, int], dict]
  find: Callable[[Sequence[dict]], Sequence[Finding]]
  draw: Callable[[Sequence[dict]], object]


def verdict(findings: Sequence[Finding]) -> str:
  """Of the whole claim: every finding must hold."""
  verdicts = {finding.verdict for finding in findings}
  for worst in (FAILS, UNCLEAR):
    if worst in verdicts:
      return worst
  return HOLDS


def run(
  claim: Claim, directory: str, *, num_seeds: int, is_quick: bool = False
) -> dict:
  """Measures, judges, and writes NAME.json and NAME.png.

  Args:
    claim: The experiment.
    directory: Where the files go; created if it does not exist.
    num_seeds: How often it is measured.
    is_quick: Whether to measure less, for a first look.

  Returns:
    What is in the JSON file.
  """
  start = time.monotonic()
  measurements = []
  for seed in range(num_seeds):
    measurements.append(claim.measure(is_quick, seed))
  findings = claim.find(measurements)
  report = {
    "name": claim.name,
    "title": claim.title,
    "claim": claim.claim,
    "source": claim.source,
    "explanation": claim.explanation,
    "verdict": verdict(findings),
    "findings": [
      {"words": str(f), "verdict": f.verdict, **_numbers(f)} for f in findings
    ],
    "command": " ".join(
      [f"python -m experiments.claims.{claim.name}", f"--num_seeds={num_seeds}"]
      + ["--quick"] * is_quick
    ),
    "machine": machine(),
    "date": datetime.date.today().isoformat(),
    "seconds": round(time.monotonic() - start, 1),
    "measurements": measurements,
  }
  os.makedirs(directory, exist_ok=True)
  path = os.path.join(directory, claim.name)
  with open(path + ".json", "w", encoding="utf-8") as file:
    file.write(_to_json(report))
  figure = claim.draw(measurements)
  figure.savefig(path + ".png", dpi=110)
  return report


def machine() -> str:
  """The processor, how many of its cores we may use, the Python."""
  name = platform.machine()
  if os.path.exists("/proc/cpuinfo"):
    with open("/proc/cpuinfo", encoding="utf-8") as file:
      for line in file:
        if line.startswith("model name"):
          name = line.partition(":")[2].strip()
          break
  cores = len(os.sched_getaffinity(0))
  return f"{name}, {cores} cores, Python {platform.python_version()}"


def require_matplotlib() -> None:
  """Raises ValueError, which says what to do, if it is not installed."""
  try:
    import matplotlib  # noqa: F401
  except ImportError:
    raise ValueError(
      "Pictures need matplotlib: pip install tf-replicas[plots]"
    ) from None


def new_figure(width: float, height: float, **more) -> tuple:
  """`pyplot.subplots` without a display, sizes in inches."""
  import matplotlib

  matplotlib.use("Agg")
  from matplotlib import pyplot

  pyplot.close("all")
  return pyplot.subplots(figsize=(width, height), layout="constrained", **more)


def _to_json(report: dict) -> str:
  """A line for each field, and one for a list of numbers."""
  text = json.dumps(report, indent=1, allow_nan=False)
  return _LIST_OF_NUMBERS.sub(lambda m: "".join(m[0].split()), text) + "\n"


def start(claim: Claim) -> NoReturn:
  """Runs an experiment as a program, by its flags."""
  flags.DEFINE_boolean("quick", False, "Measure less, for a first look")
  flags.DEFINE_integer("num_seeds", 3, "How often to measure", lower_bound=1)
  flags.DEFINE_string("output", "/tmp/experiments", "Where the files go")
  command_line.start(lambda argv: _main(claim))


def _main(claim: Claim) -> None:
  with processes.one_line_errors(usage=(ValueError,), run_time=(OSError,)):
    require_matplotlib()
    os.makedirs(FLAGS.output, exist_ok=True)
  with processes.one_line_errors(usage=(), run_time=(OSError,)):
    report = run(
      claim, FLAGS.output, num_seeds=FLAGS.num_seeds, is_quick=FLAGS.quick
    )
  print(f"{claim.title}. Claim: {claim.claim} ({claim.source})")
  for finding in report["findings"]:
    print(f"- {finding['words']}")
  print(
    f"The claim {report['verdict']}"
    f" ({report['seconds']} s; {FLAGS.output}/{claim.name}.png)"
  )
  sys.stdout.flush()


def _numbers(finding: Finding) -> dict:
  numbers = dataclasses.asdict(finding)
  numbers["values"] = [float(value) for value in finding.values]
  for bound in ("least", "most"):
    if math.isinf(numbers[bound]):
      del numbers[bound]
  return numbers
