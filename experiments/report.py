"""Collects all claims on one page: verdicts, numbers, pictures and commands.

  python -m experiments.report [--quick] [--num_seeds=1] [--output=DIR]
  python -m experiments.report --render_only --output=experiments/results

Runs every experiment in a process of its own, which writes NAME.json and
NAME.png into DIR. Then it makes report.html, which contains the pictures, and
report.md, which refers to the picture files. With `--render_only` no experiment
runs. The page names the experiments that have failed. A failure does not stop
the other experiments, and the exit status is then 1.
"""

import base64
import datetime
import html
import json
import os
import pathlib
import subprocess
import sys
from collections.abc import Mapping
from collections.abc import Sequence

from absl import flags

from experiments.support import claims
from tf_replicas.programs import command_line
from tf_replicas.runtime import processes

FLAGS = flags.FLAGS

# In the order of the page; each is a module with a `claims.Claim`.
EXPERIMENTS = (
  "overwrite_and_idle",
  "stale_ball",
  "partial_updates",
  "smooth_or_fast",
  "linear_scaling",
  "straggler",
  "backup_workers",
  "backup_curves",
  "scale_out",
  "staleness_hurts",
  "zhang_softsync",
  "dutta_error_time",
  "update_once",
  "sharding",
  "sixteen_or_eight",
  "in_graph_or_between_graph",
  "one_node_feeds",
  "validation",
)
TITLE = "Synchronous and asynchronous training: what was claimed, what we found"
_FIELDS = ("title", "claim", "source", "explanation", "verdict", "findings")
# Not by color alone.
_SIGNS = {
  claims.HOLDS: "✓",
  claims.FAILS: "✗",
  claims.UNCLEAR: "≈",
  claims.ILLUSTRATION: "◦",
}
_CLASSES = {
  claims.HOLDS: "holds",
  claims.FAILS: "fails",
  claims.UNCLEAR: "open",
  claims.ILLUSTRATION: "open",
}
_STYLE = """
body { font: 17px/1.5 Georgia, serif; color: #111; background: #fff;
  max-width: 52rem; margin: 0 auto; padding: 1rem; }
h1, h2, th, .verdict, nav { font-family: Helvetica, Arial, sans-serif; }
h1 { font-size: 1.6rem; line-height: 1.25; }
h2 { font-size: 1.25rem; margin: 2.5rem 0 .5rem; }
.picture { overflow-x: auto; }
img { width: 100%; height: auto; }
table { border-collapse: collapse; width: 100%; font-size: .85rem; }
th, td { text-align: left; vertical-align: top; padding: .3rem .5rem;
  border-bottom: 1px solid #ccc; overflow-wrap: break-word; }
.findings th:nth-child(2), .findings th:nth-child(3) { min-width: 7rem; }
.verdict { font-weight: bold; padding: .1rem .4rem; border-radius: .2rem;
  white-space: nowrap; border: 2px solid; }
.holds { color: #00507a; } .fails { color: #9c4300; }
.open { color: #444; border-style: dashed; }
.how { font-size: .8rem; color: #444; overflow-wrap: anywhere; }
code { font-size: .9em; }
@media (max-width: 36rem) {
  body { font-size: 16px; padding: .6rem; }
  img { width: 46rem; }
  .findings thead { display: none; }
  .findings tr { display: block; border-bottom: 1px solid #ccc;
    padding: .3rem 0; }
  .findings td { display: block; border: 0; padding: .1rem 0; }
  .findings td[data-label]:before { content: attr(data-label) ": ";
    color: #444; }
}
@media print {
  body { font-size: 10pt; max-width: none; padding: 0; }
  h2 { break-after: avoid; } img, tr { break-inside: avoid; }
  img { max-height: 20cm; object-fit: contain; }
}
"""


def load(
  directory: str, failed: Sequence[str] = ()
) -> tuple[list[dict], list[str]]:
  """Reads the reports of all experiments.

  Args:
    directory: The directory of the reports, NAME.json and NAME.png.
    failed: Names of experiments whose files are of an earlier run, and not to
      be shown.

  Returns:
    The reports, and the names of the experiments without a report.

  Raises:
    ValueError: If a file is not the report of an experiment.
  """
  reports, missing = [], []
  for name in EXPERIMENTS:
    path = pathlib.Path(directory, f"{name}.json")
    has_both = path.exists() and path.with_suffix(".png").exists()
    if name in failed or not has_both:
      missing.append(name)
      continue
    try:
      report = json.loads(path.read_text(encoding="utf-8"))
      absent = [field for field in _FIELDS if field not in report]
    except ValueError:
      absent = _FIELDS
    if absent:
      raise ValueError(
        f"{path} must be written by an experiment. Received: no"
        f" {', '.join(absent)}."
      )
    reports.append(report)
  return reports, missing


def to_html(
  reports: Sequence[Mapping], missing: Sequence[str], directory: str
) -> str:
  """Returns the page with all claims as HTML, with the pictures in it.

  Args:
    reports: The reports of the experiments.
    missing: Names of experiments without a report, which the page mentions.
    directory: The directory of the pictures.
  """
  escape = html.escape
  rows = "".join(
    f'<tr><td><a href="#{r["name"]}">{escape(r["title"])}</a></td>'
    f"<td>{_badge(r['verdict'])}</td></tr>"
    for r in reports
  )
  sections = "".join(_section(report, directory) for report in reports)
  failed = "".join(
    f"<p><strong>{escape(name)}</strong> has no result.</p>" for name in missing
  )
  return (
    '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
    '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
    f"<title>{escape(TITLE)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n"
    f"<h1>{escape(TITLE)}</h1>\n<p>{escape(_summary(reports))}</p>\n"
    f"<nav><table><tr><th>Claim</th><th>Verdict</th></tr>{rows}</table></nav>\n"
    f"{failed}{sections}</body>\n</html>\n"
  )


def _summary(reports: Sequence[Mapping]) -> str:
  count = len(reports)
  parts = []
  for kind, words in (
    (claims.HOLDS, "hold"),
    (claims.FAILS, "do not hold"),
    (claims.UNCLEAR, "are unclear"),
    (claims.ILLUSTRATION, "only illustrate how something works"),
  ):
    number = sum(report["verdict"] == kind for report in reports)
    if number:
      parts.append(f"{number} {words}")
  words = f"{count} claim{'s' * (count > 1)}: {', '.join(parts)}. "
  if any("--quick" in report["command"] for report in reports):
    words += "Made with --quick, which measures too little for some of them. "
  return (
    f"{words if count else ''}A claim holds if each of its numbers is within"
    " the bounds that the claim sets, for every seed. Numbers are medians over"
    " the seeds, with the smallest and the largest value in parentheses. An"
    " illustration has no verdict, because its numbers follow from how it is"
    f" built. The page was made on {datetime.date.today().isoformat()}."
  )


def _badge(verdict: str) -> str:
  sign = _SIGNS[verdict]
  return f'<span class="verdict {_CLASSES[verdict]}">{sign} {verdict}</span>'


def _section(report: Mapping, directory: str) -> str:
  escape = html.escape
  picture = pathlib.Path(directory, f"{report['name']}.png").read_bytes()
  data = base64.b64encode(picture).decode("ascii")
  rows = "".join(
    f"<tr><td>{escape(finding['what'])}</td>"
    f'<td data-label="found">{escape(_value(finding))}</td>'
    f'<td data-label="claimed">{escape(_bounds(finding))}</td>'
    f"<td>{_badge(finding['verdict']) if _bounds(finding) else ''}</td></tr>"
    for finding in report["findings"]
  )
  return (
    f'<section id="{report["name"]}">\n<h2>{escape(report["title"])}</h2>\n'
    f"<p><em>{escape(_sentence(report['claim']))}</em>"
    f" ({escape(report['source'])})</p>\n"
    f"<p>{_badge(report['verdict'])}</p>\n"
    f"<p>{escape(report['explanation'])}</p>\n"
    f'<div class="picture"><img alt="Plots: {escape(report["title"])}"'
    f' src="data:image/png;base64,{data}"></div>\n'
    '<table class="findings"><thead><tr><th>Number</th><th>Found</th>'
    f"<th>Claimed</th><th>Verdict</th></tr></thead>{rows}</table>\n"
    f'<p class="how">{_how(report, "<code>{}</code>")}</p>\n</section>\n'
  )


def _sentence(words: str) -> str:
  return words[:1].upper() + words[1:]


def _how(report: Mapping, code: str) -> str:
  command = code.format(report["command"])
  words = f"{command}; {report['date']}; {report['machine']}"
  if "commit" in report:
    load = report["load_average"][0]
    words += f"; commit {report['commit']}; load at the start {load}"
  return f"{words}; took {report['seconds']} s"


def _value(finding: Mapping) -> str:
  return claims.Finding("", finding["values"], finding["unit"]).value


def _bounds(finding: Mapping) -> str:
  bounds = {k: finding[k] for k in ("least", "most") if k in finding}
  return claims.Finding("", finding["values"], **bounds).bounds


def to_markdown(reports: Sequence[Mapping], missing: Sequence[str]) -> str:
  """Returns the page with all claims as Markdown, with links to the pictures.

  Args:
    reports: The reports of the experiments.
    missing: Names of experiments without a report, which the page mentions.
  """
  lines = [f"# {TITLE}", "", _summary(reports), ""]
  lines += ["| claim | verdict |", "|---|---|"]
  lines += [
    f"| [{r['title']}](#{r['name']}) | {_SIGNS[r['verdict']]} {r['verdict']} |"
    for r in reports
  ]
  lines += [""]
  lines += [f"**{name}** has no result.\n" for name in missing]
  for report in reports:
    lines += [
      f'<a id="{report["name"]}"></a>',
      "",
      f"## {report['title']}",
      "",
      f"*{_sentence(report['claim'])}* ({report['source']})",
      "",
      f"**{_SIGNS[report['verdict']]} {report['verdict']}**",
      "",
      report["explanation"],
      "",
      f"![Plots: {report['title']}]({report['name']}.png)",
      "",
      "| number | found | claimed | verdict |",
      "|---|---|---|---|",
    ]
    for finding in report["findings"]:
      bounds = _bounds(finding)
      judged = finding["verdict"] if bounds else ""
      lines.append(
        f"| {finding['what']} | {_value(finding)} | {bounds} | {judged} |"
      )
    lines += ["", _how(report, "`{}`"), ""]
  return "\n".join(lines)


def run_all(directory: str, *, num_seeds: int, is_quick: bool) -> list[str]:
  """Runs every experiment as a process, and returns the names of failed ones.

  Args:
    directory: The directory for the reports of the experiments.
    num_seeds: How often each experiment is measured.
    is_quick: Whether the experiments measure less, for a first look.
  """
  failed = []
  for name in EXPERIMENTS:
    command = [
      sys.executable,
      "-m",
      f"experiments.claims.{name}",
      f"--num_seeds={num_seeds}",
      f"--output={directory}",
    ] + ["--quick"] * is_quick
    print(f"== {name}", flush=True)
    if subprocess.run(command, check=False).returncode:
      failed.append(name)
  return failed


def render(directory: str, failed: Sequence[str] = ()) -> list[str]:
  """Writes the page with all claims, as report.html and report.md.

  Args:
    directory: The directory of the experiments' reports, and for the page.
    failed: Names of experiments whose files are of an earlier run, and not to
      be shown.

  Returns:
    The names of the experiments that have no result on the page.
  """
  reports, missing = load(directory, failed)
  root = pathlib.Path(directory)
  page = to_html(reports, missing, directory)
  root.joinpath("report.html").write_text(page, encoding="utf-8")
  text = to_markdown(reports, missing)
  root.joinpath("report.md").write_text(text, encoding="utf-8")
  return missing


def main(argv: Sequence[str]) -> None:
  del argv
  with processes.one_line_errors(usage=(ValueError,), run_time=(OSError,)):
    failed = []
    if not FLAGS.render_only:
      os.makedirs(FLAGS.output, exist_ok=True)
      failed = run_all(
        FLAGS.output, num_seeds=FLAGS.num_seeds, is_quick=FLAGS.quick
      )
    missing = render(FLAGS.output, failed)
  print(f"Report: {FLAGS.output}/report.html")
  if missing:
    print(f"error: no result of {', '.join(missing)}", file=sys.stderr)
    sys.exit(1)


if __name__ == "__main__":
  flags.DEFINE_boolean("quick", False, "Measure less, for a first look")
  flags.DEFINE_integer(
    "num_seeds", 1, "How often each claim is measured", lower_bound=1
  )
  flags.DEFINE_boolean(
    "render_only",
    False,
    "Make the page from the results in --output; measure nothing",
  )
  flags.DEFINE_string(
    "output", "/tmp/experiments", "The directory for the files"
  )
  command_line.start(main)
