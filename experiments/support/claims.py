"""Defines an experiment: a claim, measurements of it, and a computed verdict.

An experiment's module defines one `Claim` and ends in

    if __name__ == "__main__":
      claims.start(CLAIM)

The command

    python -m experiments.claims.NAME [--quick] [--num_seeds=3] [--output=DIR]

runs it, writes NAME.json and NAME.png into DIR, and prints the verdict. With
`--judge_only`, it judges the measurements in DIR/NAME.json again. Whether
a claim holds is decided by its `Finding`s alone: numbers, and the bounds within
which the claim says that they are. A claim whose numbers follow from how its
experiment is built has no verdict: it is an illustration.
"""

import dataclasses
import datetime
import json
import math
import os
import pathlib
import platform
import re
import statistics
import subprocess
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
ILLUSTRATION = "illustration, no verdict"

# In JSON with indentation; the line break is never one of a string.
_LIST_OF_NUMBERS = re.compile(r"\[\n[-+.\deE,\s]*\]")

# Told apart by the color-blind as well (Okabe and Ito 2008); use the line
# styles or markers too.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#000000")
MARKERS = ("o", "s", "^", "D", "v", "x")


@dataclasses.dataclass(frozen=True)
class Finding:
  """A number that a claim is about, measured once per seed.

  Attributes:
    what: What the number is, in words.
    values: The measured values, one per seed.
    unit: The unit of the number; empty for a ratio or a count.
    least: The smallest value for which the claim holds.
    most: The largest value for which the claim holds.
  """

  what: str
  values: Sequence[float]
  unit: str = ""
  least: float = -math.inf
  most: float = math.inf

  @property
  def verdict(self) -> str:
    """Verdict on the claim, as far as this number decides it.

    It is HOLDS if the values of all seeds are within the bounds, FAILS if none
    is, and UNCLEAR otherwise.
    """
    inside = [self.least <= value <= self.most for value in self.values]
    return HOLDS if all(inside) else UNCLEAR if any(inside) else FAILS

  @property
  def value(self) -> str:
    """Text with the median, the least and the largest value over all seeds."""
    values = [float(value) for value in self.values]
    words = f"{statistics.median(values):.4g}{self.unit and f' {self.unit}'}"
    if len(values) > 1:
      least, most = f"{min(values):.4g}", f"{max(values):.4g}"
      same = f" (all {len(values)} alike)"
      words += same if least == most else f" ({least} to {most})"
    return words

  @property
  def bounds(self) -> str:
    """Bounds of the number according to the claim, as text; empty if none."""
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
  """A claim about distributed training, and how to find out whether it holds.

  Attributes:
    name: The name of the experiment's module and of its files.
    title: The title of the experiment, a few words.
    claim: The claim, as a sentence.
    source: Who claims this, and where.
    explanation: What the picture shows, for a reader to whom it is new.
    measure: Called with (quick, seed); makes a measurement, and returns what
      JSON can hold. Where the program does not control chance, the seed is just
      the number of the repetition.
    find: Called with the measurements of all seeds; returns the findings.
    draw: Called with the measurements of all seeds; returns a
      `matplotlib.figure.Figure`.
    is_illustration: Whether the numbers follow from how the experiment is
      built. Then they show how something works, and judge nothing.
  """

  name: str
  title: str
  claim: str
  source: str
  explanation: str
  measure: Callable[[bool, int], dict]
  find: Callable[[Sequence[dict]], Sequence[Finding]]
  draw: Callable[[Sequence[dict]], object]
  is_illustration: bool = False


def verdict(findings: Sequence[Finding]) -> str:
  """Returns the verdict on a whole claim: it holds if every finding holds.

  Args:
    findings: The findings, each with a verdict of its own. Those without bounds
      do not count.

  Returns:
    FAILS if any finding has this verdict, else UNCLEAR if any has this one or
    if none has bounds, else HOLDS.
  """
  verdicts = {finding.verdict for finding in findings if finding.bounds}
  if not verdicts:
    return UNCLEAR
  for worst in (FAILS, UNCLEAR):
    if worst in verdicts:
      return worst
  return HOLDS


def run(
  claim: Claim,
  directory: str,
  *,
  num_seeds: int,
  is_quick: bool = False,
  revision: str = "unknown",
) -> dict:
  """Measures a claim, judges it, and writes NAME.json and NAME.png.

  Args:
    claim: The claim and how it is measured.
    directory: The directory of the files; created if it does not exist.
    num_seeds: How often the claim is measured.
    is_quick: Whether to measure less, for a first look.
    revision: The commit of this program, for the JSON file.

  Returns:
    The content of the JSON file.
  """
  start = time.monotonic()
  made_with = circumstances(revision)
  measurements = []
  for seed in range(num_seeds):
    measurements.append(claim.measure(is_quick, seed))
  command = [
    f"python -m experiments.claims.{claim.name}",
    f"--num_seeds={num_seeds}",
  ]
  return _write(
    claim,
    directory,
    {
      "command": " ".join(command + ["--quick"] * is_quick),
      **made_with,
      "seconds": round(time.monotonic() - start, 1),
      "measurements": measurements,
    },
  )


def judge(claim: Claim, directory: str, revision: str = "unknown") -> dict:
  """Judges a stored measurement again, and writes its files anew.

  It measures nothing. Texts, findings, verdict and picture are those of the
  present program; date, machine and commit remain those of the measurement.

  Args:
    claim: The claim.
    directory: The directory of NAME.json.
    revision: The commit of this program.

  Returns:
    The content of the JSON file.
  """
  path = pathlib.Path(directory, f"{claim.name}.json")
  stored = json.loads(path.read_text(encoding="utf-8"))
  kept = (
    "command",
    "commit",
    "machine",
    "date",
    "load_average",
    "seconds",
    "measurements",
  )
  measured = {k: stored[k] for k in kept if k in stored}
  return _write(claim, directory, {**measured, "judged_with": revision})


def _write(claim: Claim, directory: str, measured: dict) -> dict:
  """Judges measurements, and writes NAME.json and NAME.png.

  Args:
    claim: The claim.
    directory: The directory of the files; created if it does not exist.
    measured: The fields of the report that say what was measured, and how.

  Returns:
    The content of the JSON file.
  """
  measurements = measured["measurements"]
  findings = claim.find(measurements)
  report = {
    "name": claim.name,
    "title": claim.title,
    "claim": claim.claim,
    "source": claim.source,
    "explanation": claim.explanation,
    "verdict": ILLUSTRATION if claim.is_illustration else verdict(findings),
    "findings": [
      {"words": str(f), "verdict": f.verdict, **_numbers(f)} for f in findings
    ],
    **measured,
  }
  os.makedirs(directory, exist_ok=True)
  path = os.path.join(directory, claim.name)
  with open(path + ".json", "w", encoding="utf-8") as file:
    file.write(_to_json(report))
  figure = claim.draw(measurements)
  figure.savefig(path + ".png", dpi=110)
  return report


def commit() -> str:
  """Returns the commit of this tree, with a + if tracked files were changed.

  Stored results do not count as changes.

  Returns:
    The first digits of the commit's hash; "unknown" without git.
  """

  def git(*arguments: str) -> str:
    return subprocess.run(
      ["git", *arguments],
      cwd=pathlib.Path(__file__).parents[2],
      capture_output=True,
      text=True,
      check=True,
    ).stdout.strip()

  try:
    head = git("rev-parse", "--short", "HEAD")
    changed = git(
      "diff", "--name-only", "HEAD", "--", ".", ":!experiments/results"
    )
  except (OSError, subprocess.CalledProcessError):
    return "unknown"
  return head + "+" * bool(changed)


def machine() -> str:
  """Describes this machine: its processor, usable cores and Python version."""
  name = platform.machine()
  if os.path.exists("/proc/cpuinfo"):
    with open("/proc/cpuinfo", encoding="utf-8") as file:
      for line in file:
        if line.startswith("model name"):
          name = line.partition(":")[2].strip()
          break
  cores = len(os.sched_getaffinity(0))
  return f"{name}, {cores} cores, Python {platform.python_version()}"


def circumstances(revision: str) -> dict[str, object]:
  """Describes when and where something is measured, and with which program.

  Args:
    revision: The commit of this program.
  """
  return {
    "commit": revision,
    "machine": machine(),
    "date": datetime.date.today().isoformat(),
    "load_average": [round(load, 1) for load in os.getloadavg()],
  }


def require_matplotlib() -> None:
  """Raises ValueError if matplotlib is not installed.

  The message says how to install it.
  """
  try:
    import matplotlib  # noqa: F401
  except ImportError:
    raise ValueError(
      "Pictures need matplotlib: pip install matplotlib"
    ) from None


def draw_equality(
  axes, least: float, most: float, error: float, *, is_log: bool = False
) -> None:
  """Draws the line on which a prediction is right, and a band around it.

  Args:
    axes: The axes, whose limits it sets.
    least: The smallest value that is drawn.
    most: The largest value that is drawn.
    error: Half of the width of the band, relative to the value.
    is_log: Whether both axes are logarithmic.
  """
  line = [0.8 * least, 1.25 * most]
  axes.plot(line, line, "-", color="black", linewidth=0.8)
  axes.fill_between(
    line,
    [value * (1 - error) for value in line],
    [value * (1 + error) for value in line],
    color="#DDDDDD",
    label=f"within {error:.0%}",
  )
  if is_log:
    axes.set_xscale("log")
    axes.set_yscale("log")
  axes.set_xlim(*line)
  axes.set_ylim(*line)


def new_figure(width: float, height: float, **more) -> tuple:
  """Calls `pyplot.subplots` without a display, and returns its result.

  Args:
    width: The width of the figure in inches.
    height: The height of the figure in inches.
    **more: More arguments of `pyplot.subplots`, such as `ncols`.
  """
  import matplotlib

  matplotlib.use("Agg")
  from matplotlib import pyplot

  pyplot.close("all")
  return pyplot.subplots(figsize=(width, height), layout="constrained", **more)


def _to_json(report: dict) -> str:
  """Formats a report as JSON, with one line per field or list of numbers."""
  text = json.dumps(report, indent=1, allow_nan=False)
  return _LIST_OF_NUMBERS.sub(lambda m: "".join(m[0].split()), text) + "\n"


def start(claim: Claim) -> NoReturn:
  """Runs an experiment as a program: parses the flags, measures, and exits.

  Args:
    claim: The claim and how it is measured.
  """
  flags.DEFINE_boolean("quick", False, "Measure less, for a first look")
  flags.DEFINE_integer(
    "num_seeds", 3, "How often each claim is measured", lower_bound=1
  )
  flags.DEFINE_boolean(
    "judge_only",
    False,
    "Judge the measurements in --output again; measure nothing",
  )
  flags.DEFINE_string(
    "output", "/tmp/experiments", "The directory for the files"
  )
  command_line.start(lambda argv: _main(claim))


def _main(claim: Claim) -> None:
  with processes.one_line_errors(usage=(ValueError,), run_time=(OSError,)):
    require_matplotlib()
    os.makedirs(FLAGS.output, exist_ok=True)
  with processes.one_line_errors(usage=(), run_time=(OSError,)):
    if FLAGS.judge_only:
      report = judge(claim, FLAGS.output, commit())
    else:
      report = run(
        claim,
        FLAGS.output,
        num_seeds=FLAGS.num_seeds,
        is_quick=FLAGS.quick,
        revision=commit(),
      )
  print(f"{claim.title}. Claim: {claim.claim} ({claim.source})")
  for finding in report["findings"]:
    print(f"- {finding['words']}")
  outcome = f"The claim {report['verdict']}"
  if claim.is_illustration:
    outcome = "This is an illustration"
  elif report["verdict"] == UNCLEAR:
    outcome = "The claim is unclear"
  print(f"{outcome} ({report['seconds']} s; {FLAGS.output}/{claim.name}.png)")
  sys.stdout.flush()


def _numbers(finding: Finding) -> dict:
  numbers = dataclasses.asdict(finding)
  numbers["values"] = [float(value) for value in finding.values]
  for bound in ("least", "most"):
    if math.isinf(numbers[bound]):
      del numbers[bound]
  return numbers
