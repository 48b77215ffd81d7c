"""Collects all claims on one page: verdicts, numbers, pictures and commands.

  python -m experiments.report [--quick] [--num_seeds=1] [--output=DIR]
  python -m experiments.report --render_only --output=experiments/results

Runs every experiment in a process of its own, which writes NAME.json and
NAME.png into DIR. Then it makes report.html and report.md, which refers to the
picture files. With `--render_only` no experiment runs. The page names the
experiments that have failed. A failure does not stop the other experiments, and
the exit status is then 1.

report.html is one file that needs no network: plotly.js, all pictures and all
raw data are in it. Curves are interactive plots, drawn from the stored
measurements; other pictures are those of the experiments. Some claims have a
panel with sliders (`support.report_panels`) too. If DIR has race.json, the page
shows the race. `report_page.html` has the style and the script of the page.
"""

import base64
import datetime
import html
import importlib
import json
import os
import pathlib
import re
import subprocess
import sys
from collections.abc import Mapping
from collections.abc import Sequence

from absl import flags

from experiments import race
from experiments.support import claims
from experiments.support import plotly_charts
from experiments.support import report_panels
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
  "staleness_by_layer",
  "zhang_softsync",
  "dutta_error_time",
  "ho_bounded_staleness",
  "zhang_easgd",
  "update_once",
  "sharding",
  "sixteen_or_eight",
  "in_graph_or_between_graph",
  "one_node_feeds",
  "validation",
  "advice",
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
_RACE_TITLE = "The race to a precision"
_RACE = (
  "Every update rule trains the same network, in virtual time, until its"
  " precision is at least {}. One second is the mean time of a batch of a"
  " usual worker. “/ sync” is the time divided by that of synchronous training"
  " with the same workers. ± and brackets are 95% intervals over the seeds."
)
_RENDER = "python -m experiments.report --render_only --output=DIR"
# The panel that follows a claim: its name on the page, and what makes it.
_PANELS = {
  "stale_ball": ("ball", report_panels.ball),
  "scale_out": ("cluster", report_panels.cluster),
}
_TIMELINE = "overwrite_and_idle"
_TEMPLATE = pathlib.Path(__file__).with_name("report_page.html")


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
  """Returns the page with all claims as HTML, which needs no other file.

  Args:
    reports: The reports of the experiments.
    missing: Names of experiments without a report, which the page mentions.
    directory: The directory of the pictures, and of race.json.
  """
  page = _Page(directory)
  for report in reports:
    page.add_claim(report)
  page.add_race()
  data = {
    "charts": page.charts,
    "panels": page.panels,
    "timeline": page.timeline,
  }
  parts = {
    "title": html.escape(TITLE),
    "summary": _prose(_summary(reports)),
    "index": "".join(page.index + [_row_without_result(n) for n in missing]),
    "sections": "".join(page.sections),
    # No text in it may end the script.
    "data": json.dumps(data, allow_nan=False).replace("<", "\\u003c"),
    "plotly": _plotly(),
  }
  template = _TEMPLATE.read_text(encoding="utf-8")
  return re.sub(r"{{(\w+)}}", lambda match: parts[match[1]], template)


def _row_without_result(name: str) -> str:
  words = '<span class="verdict open">has no result</span>'
  return f"<tr><td>{html.escape(name)}</td> <td>{words}</td></tr>"


def _plotly() -> str:
  """Returns the source of plotly.js."""
  try:
    from plotly import offline
  except ImportError:
    raise ValueError("The page needs plotly: pip install plotly") from None
  return offline.get_plotlyjs()


class _Page:
  """Collects the parts of the HTML page.

  Attributes:
    index: The rows of the table of contents.
    sections: The sections, as HTML.
    charts: The interactive charts of a claim, by its name.
    panels: The panels by name.
    timeline: The animated timeline; None without its claim.
  """

  def __init__(self, directory: str):
    self._directory = pathlib.Path(directory)
    self.index, self.sections = [], []
    self.charts, self.panels, self.timeline = {}, {}, None

  def add_claim(self, report: Mapping) -> None:
    """Adds the section of a claim, with its panel if it has one."""
    name, more = report["name"], ""
    charts = _charts(report)
    if charts:
      self.charts[name] = charts
    if name in _PANELS:
      panel, make = _PANELS[name]
      self.panels[panel] = make()
      more = _panel(panel, self.panels[panel], _source(_RENDER, "", panel))
    elif name == _TIMELINE:
      self.timeline = report_panels.timeline(report["measurements"][0])
      more = _timeline(self.timeline, report)
    self._add_to_index(
      name, report["title"], report["verdict"], len(report["measurements"])
    )
    picture = self._directory / f"{name}.png"
    self.sections.append(_section(report, picture, charts, more))

  def add_race(self) -> None:
    """Adds the section of the race, if it has results."""
    path = self._directory / "race.json"
    cells = race.read(str(path))
    if not cells:
      return
    findings = race.find(cells)
    verdict = claims.verdict(findings) if findings else claims.UNCLEAR
    self.panels["race_cells"] = report_panels.race_of(cells)
    how = "; ".join(
      ", ".join(sorted({cell[name] for cell in cells.values()}))
      for name in ("date", "machine", "commit")
    )
    raw = json.loads(path.read_text(encoding="utf-8"))
    source = _source(
      "python -m experiments.race --output=DIR", how, "race", raw
    )
    about = _RACE.format(raw["task"]["precision"])
    judged = "".join(f"<li>{_prose(str(f))}</li>" for f in findings)
    self._add_to_index("race", _RACE_TITLE, verdict, len(race.SEEDS))
    self.sections.append(
      f'<section id="race">\n<h2>{_RACE_TITLE}</h2>\n<p><em>Even workers:'
      " synchronous; uneven workers: asynchronous</em> (a usual advice)</p>\n"
      f"<p>{_badge(verdict)}</p>\n<p>{about}</p>\n"
      f"{_panel('race_cells', self.panels['race_cells'], source)}"
      "<details><summary>The numbers that are judged</summary>"
      f"<ul>{judged}</ul></details></section>\n"
    )

  def _add_to_index(
    self, name: str, title: str, verdict: str, num_seeds: int
  ) -> None:
    self.index.append(
      f'<tr><td><a href="#{name}">{html.escape(title)}</a></td>'
      f"<td>{_badge(verdict)}</td><td>{num_seeds}</td></tr>"
    )


def _charts(report: Mapping) -> list[dict]:
  """Returns the interactive charts of a claim, if its picture is of curves."""
  if not report["measurements"]:
    return []
  module = importlib.import_module(f"experiments.claims.{report['name']}")
  return plotly_charts.convert(module.CLAIM.draw(report["measurements"]))


def _summary(reports: Sequence[Mapping]) -> str:
  count = len(reports)
  parts = []
  for kind, verbs in (
    (claims.HOLDS, ("holds", "hold")),
    (claims.FAILS, ("does not hold", "do not hold")),
    (claims.UNCLEAR, ("is unclear", "are unclear")),
    (
      claims.ILLUSTRATION,
      (
        "only illustrates how something works",
        "only illustrate how something works",
      ),
    ),
  ):
    number = sum(report["verdict"] == kind for report in reports)
    if number:
      parts.append(f"{number} {verbs[number > 1]}")
  words = f"Of {count} claim{'s' * (count > 1)}: {', '.join(parts)}. "
  if any("--quick" in report["command"] for report in reports):
    words += "Made with --quick, which measures too little for some of them. "
  return (
    f"{words if count else ''}A claim holds if each of its numbers is within"
    " the bounds that the claim sets, for every seed. A verdict with one seed"
    " rests on one run, and cannot be *unclear*. Numbers are medians over"
    " the seeds, with the smallest and the largest value in parentheses. An"
    " illustration has no verdict, because its numbers follow from how it is"
    f" built. The page was made on {datetime.date.today().isoformat()}."
  )


def _badge(verdict: str) -> str:
  sign = _SIGNS[verdict]
  return f'<span class="verdict {_CLASSES[verdict]}">{sign} {verdict}</span>'


def _section(
  report: Mapping, path: pathlib.Path, charts: Sequence[Mapping], more: str
) -> str:
  """Returns the section of a claim.

  Args:
    report: The report of the experiment.
    path: The picture.
    charts: Interactive charts, which replace the picture.
    more: HTML that follows the figure.
  """
  escape = html.escape
  name = report["name"]
  if charts:
    plots = "".join(_plot(chart["title"], chart["title"]) for chart in charts)
    picture = f'<div class="plots">{plots}</div>'
  else:
    picture = _picture(path, report["title"])
  rows = "".join(
    f"<tr><td>{_prose(finding['what'])}</td>"
    f'<td data-label="found">{escape(_value(finding))}</td>'
    f'<td data-label="claimed">{escape(_bounds(finding))}</td>'
    f"<td>{_badge(finding['verdict']) if _bounds(finding) else ''}</td></tr>"
    for finding in report["findings"]
  )
  return (
    f'<section id="{name}">\n<h2>{escape(report["title"])}</h2>\n'
    f"<p><em>{_prose(_sentence(report['claim']))}</em>"
    f" ({_prose(report['source'])})</p>\n"
    f"<p>{_badge(report['verdict'])}</p>\n"
    f"<p>{_prose(report['explanation'])}</p>\n"
    f"<figure><figcaption>{_prose(_conclusion(report))}</figcaption>{picture}"
    f"{_source(report['command'], _how(report), name, report)}</figure>{more}"
    '<table class="findings"><thead><tr><th>Number</th><th>Found</th>'
    f"<th>Claimed</th><th>Verdict</th></tr></thead>{rows}</table>\n</section>\n"
  )


def _conclusion(report: Mapping) -> str:
  """Returns the verdict in words, with the first number that decides it."""
  judged = [f for f in report["findings"] if _bounds(f)]
  verdict = report["verdict"]
  if verdict == claims.ILLUSTRATION or not judged:
    first, _, _ = report["claim"].partition(". ")
    return f"Illustration: {first.rstrip('.')}"
  deciding = [f for f in judged if f["verdict"] == verdict]
  finding = deciding[0] if deciding else judged[0]
  count = len(judged)
  few = {1: "the number is", 2: "both numbers are"}
  subject = few.get(count, f"all {count} numbers are")
  words = f"{subject} as claimed"
  if verdict != claims.HOLDS:
    others = sum(f["verdict"] != claims.HOLDS for f in judged)
    verb = "are" if others > 1 else "is"
    words = f"{others} of {count} numbers {verb} not as claimed"
  return (
    f"{_sentence(verdict)}: {words}. {_sentence(finding['what'])}:"
    f" {_value(finding)}, claimed {_bounds(finding)}"
  )


def _picture(path: pathlib.Path, title: str) -> str:
  data = base64.b64encode(path.read_bytes()).decode("ascii")
  return (
    f'<div class="picture"><img alt="Plots: {html.escape(title)}"'
    f' src="data:image/png;base64,{data}"></div>'
  )


def _source(command: str, how: str, name: str, data: object = None) -> str:
  """Returns the command and the raw data of a figure, each one click away.

  Args:
    command: The command that makes the data.
    how: Where and when it was run; may be empty.
    name: The name of the data, or of the panel.
    data: The raw data, which JSON can hold; None: those of the panel.
  """
  target = f'data-panel="{name}"'
  if data is not None:
    text = json.dumps(data, allow_nan=False).encode("utf-8")
    encoded = base64.b64encode(text).decode("ascii")
    target = f'href="data:application/json;base64,{encoded}"'
  more = f'<p class="how">{html.escape(how)}</p>' if how else ""
  return (
    f"<details><summary>Command</summary><pre>{html.escape(command)}</pre>"
    f'<button type="button" class="copy">Copy</button>{more}</details>'
    f'<p class="how"><a {target} download="{name}.json">Raw data'
    f" ({name}.json)</a></p>\n"
  )


def _panel(name: str, panel: Mapping, source: str) -> str:
  """Returns a figure with sliders, which the script of the page draws.

  Args:
    name: The name of the panel.
    panel: The panel, as `report_panels` returns it.
    source: Its command and raw data, as HTML.
  """
  controls = "".join(_control(c) for c in panel["controls"])
  heads = "".join(f"<th>{html.escape(c)}</th>" for c in panel["columns"])
  lookup = panel["title"]
  starts = {c["name"]: str(c["start"]) for c in panel["controls"]}
  title = lookup["of"][",".join(starts[by] for by in lookup["by"])]
  return (
    f'<figure class="panel" id="{name}"><figcaption aria-live="polite">'
    f'{html.escape(title)}</figcaption><div class="controls">{controls}</div>'
    f'<div class="plot" role="img" aria-label="Plot of the table below"></div>'
    f'<div class="wide"><table><thead><tr>{heads}</tr></thead><tbody></tbody>'
    f"</table></div>{source}</figure>\n"
  )


def _control(control: Mapping) -> str:
  values, start = control["values"], control["start"]
  label = html.escape(control["label"])
  common = f'data-control="{control["name"]}"'
  if control["is_list"]:
    options = "".join(
      f'<option value="{i}"{" selected" * (i == start)}>{html.escape(value)}'
      "</option>"
      for i, value in enumerate(values)
    )
    field = f"<select {common}>{options}</select>"
  else:
    field = (
      f'<input type="range" min="0" max="{len(values) - 1}" value="{start}"'
      f" {common}>"
    )
  return f"<label>{label}: <output>{values[start]}</output>{field}</label>"


def _timeline(timeline: Mapping, report: Mapping) -> str:
  """Returns the animated timeline, which the script of the page draws."""
  secs = timeline["secs"]
  runs = timeline["runs"].values()
  plots = "".join(
    _plot(run["title"], f"{run['title']}: what each task does when")
    for run in runs
  )
  heads = "".join(f"<th>{run['title']}</th>" for run in runs)
  return (
    '<figure class="panel" id="timeline"><figcaption>'
    f"{html.escape(timeline['title'])}</figcaption>"
    f'<p class="how">{html.escape(timeline["note"])}</p>'
    '<div class="controls"><button type="button">▶ Play</button>'
    f'<label>Time: <output>{secs} s</output><input type="range" min="0"'
    f' max="{secs}" step="0.01" value="{secs}"></label></div>{plots}'
    f'<div class="wide"><table><thead><tr><th>At this time</th>{heads}</tr>'
    "</thead><tbody></tbody></table></div>"
    f"{_source(report['command'], _how(report), 'timeline')}</figure>\n"
  )


def _plot(title: str, words: str) -> str:
  """Returns a place where the script draws, below a title."""
  return (
    f'<div><p class="plot-title">{html.escape(title)}</p><div class="plot"'
    f' role="img" aria-label="{html.escape(words)}"></div></div>'
  )


def _prose(text: str) -> str:
  """Returns text as HTML, with Markdown's `code` and *emphasis*."""

  def element(match: re.Match) -> str:
    code, emphasis = match.groups()
    return f"<code>{code}</code>" if code else f"<em>{emphasis}</em>"

  return re.sub(r"`([^`]+)`|(?<!\w)\*(\w+)\*", element, html.escape(text))


def _sentence(words: str) -> str:
  return words[:1].upper() + words[1:]


def _how(report: Mapping) -> str:
  words = f"{report['date']}; {report['machine']}"
  if "commit" in report:
    load = report["load_average"][0]
    words += f"; commit {report['commit']}; load at the start {load}"
  if "judged_with" in report:
    words += f"; judged again with commit {report['judged_with']}"
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
  lines += ["| claim | verdict | seeds |", "|---|---|---|"]
  lines += [
    f"| [{r['title']}](#{r['name']}) | {_SIGNS[r['verdict']]} {r['verdict']} |"
    f" {len(r['measurements'])} |"
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
    lines += ["", f"`{report['command']}`; {_how(report)}", ""]
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
    _plotly()  # If it is missing, better before the experiments than after.
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
