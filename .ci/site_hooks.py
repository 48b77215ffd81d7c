"""Shows README.md and all files that pages link to on the web site.

Pages link to files by their paths in the repository, such as
`../examples/gan.py`, so that the links work there too. MkDocs knows only the
files in `docs`. These hooks add the other files, and rewrite the links.
"""

import pathlib
import posixpath
import re

from mkdocs.structure.files import File

ROOT = pathlib.Path(__file__).resolve().parent.parent
# Suffix -> language. Such a file becomes a page that shows it.
_SHOWN = {".py": "python", ".patch": "diff", ".sbatch": "bash", "": "text"}
_FENCE = re.compile(r"^(```.*?^```$)", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"(?<=\]\()[^)\s]+(?=\))")
_PRE = re.compile(r"(<pre.*?</pre>)", re.DOTALL)
_CODE = re.compile(r"<code>[^<]*</code>")
_FLAG = re.compile(r"(?<![\w-])--?[A-Za-z][\w-]*=?")
# Names in code that are so long that they may be broken, and where: behind a
# dot, a slash or a bracket, but not before the suffix of a file.
_LONG = re.compile(r"[^\s<>]{28,}")
_BREAK = re.compile(r"(?<=\w[./(\[=])(?=\w)(?!(?:ipynb|json|md|png|py)\b)")

# Path of each page in the site -> its path in the repository.
_pages: dict[str, str] = {}


def _uri(path: str) -> str:
  """Returns the path in the site of a file of the repository."""
  if path == "README.md":
    return "index.md"
  if path.startswith("docs/"):
    return path.removeprefix("docs/")
  return f"{path}.md" if pathlib.Path(path).suffix in _SHOWN else path


def _map_links(text: str, function) -> str:
  """Replaces each link to another file by what `function` returns for it."""

  def replace(match: re.Match[str]) -> str:
    path, hash_, anchor = match.group().partition("#")
    if not path or "://" in path or path.startswith("mailto:"):
      return match.group()
    return function(path) + hash_ + anchor

  parts = _FENCE.split(text)
  parts[::2] = [_LINK.sub(replace, part) for part in parts[::2]]
  return "".join(parts)


def _added(path: str, config) -> File:
  suffix = pathlib.Path(path).suffix
  if suffix not in _SHOWN:
    return File.generated(config, _uri(path), abs_src_path=str(ROOT / path))
  code = (ROOT / path).read_text(encoding="utf-8")
  content = f"# `{path}`\n\n````{_SHOWN[suffix]}\n{code.rstrip()}\n````\n"
  return File.generated(config, _uri(path), content=content)


def on_files(files, config):
  """Adds README.md and the files that pages link to, directly or not."""
  docs = ["docs/" + f.src_uri for f in files.documentation_pages()]
  left, seen = ["README.md", *docs], {"README.md", *docs}
  files.append(_added("README.md", config))
  while left:
    page = left.pop()
    _pages[_uri(page)] = page

    def visit(link: str, page: str = page) -> str:
      path = posixpath.normpath(posixpath.join(posixpath.dirname(page), link))
      if (ROOT / path).is_file() and path not in seen:
        seen.add(path)
        if not path.startswith("docs/"):
          files.append(_added(path, config))
        if path.endswith(".md"):
          left.append(path)
      return link

    _map_links((ROOT / page).read_text(encoding="utf-8"), visit)
  return files


def on_page_markdown(markdown, page, **_):
  """Rewrites the links from paths in the repository to those in the site."""
  uri = page.file.src_uri
  if uri not in _pages:
    return markdown
  here = posixpath.dirname(_pages[uri])

  def rewrite(link: str) -> str:
    target = _uri(posixpath.normpath(posixpath.join(here, link)))
    return posixpath.relpath(target, posixpath.dirname(uri) or ".")

  return _map_links(markdown, rewrite)


def on_page_content(html, **_):
  """Says where code in a text may be broken at the end of a line.

  A flag is not broken at its hyphens (`site.css`). A long name such as
  `tf.distribute.Strategy` may be broken behind each dot.
  """

  def mark(code: re.Match[str]) -> str:
    text = _LONG.sub(lambda m: _BREAK.sub("<wbr>", m.group()), code.group())
    return _FLAG.sub(r'<span class="flag">\g<0></span>', text)

  parts = _PRE.split(html)
  parts[::2] = [_CODE.sub(mark, part) for part in parts[::2]]
  return "".join(parts)
