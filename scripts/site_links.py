"""Hooks of the documentation site: a link out of docs/ becomes a page of the site.

Pages of docs/ point to files beside it as they do on a forge, by a relative path. The site has no
such files, so each one that is pointed to is added: Markdown as a page with its own links put
right, anything else as a listing. A link to a file that does not exist fails the strict build.
"""

import logging
import posixpath
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, InclusionLevel

ROOT = Path(__file__).parent.parent
SHOWN_UNDER = "repository"
_LOG = logging.getLogger("mkdocs.plugins.site_links")
_FENCE = re.compile(r"^(```+).*?^\1`*\s*$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"(?<=\]\()([^)\s#:]+)(#[^)\s]*)?(?=\))")


def on_files(files: Any, config: Any) -> Any:
    """Add the files beside docs/ that pages point to, and those that these point to."""
    waiting = [
        (f"docs/{page.src_uri}", page.content_string) for page in files.documentation_pages()
    ]
    while waiting:
        name, text = waiting.pop()
        for target in _targets(name, text):
            uri = _uri(target)
            if target.startswith("docs/") or files.get_file_from_path(uri) is not None:
                continue
            if not (ROOT / target).is_file():
                _LOG.warning("%s points to %s, which is no file of the repository", name, target)
                continue
            content = (ROOT / target).read_text(encoding="utf-8")
            shown = _page(target, content)
            beside = InclusionLevel.NOT_IN_NAV
            files.append(File.generated(config, uri, content=shown, inclusion=beside))
            if target.endswith(".md"):
                waiting.append((target, content))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Point the links of a page to pages of the site."""
    uri = page.file.src_uri
    name = uri.removeprefix(f"{SHOWN_UNDER}/") if uri.startswith(SHOWN_UNDER) else f"docs/{uri}"

    def rewritten(match: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(name), match[1]))
        return posixpath.relpath(_uri(target), posixpath.dirname(uri) or ".") + (match[2] or "")

    return _outside_fences(markdown, lambda text: _LINK.sub(rewritten, text))


def _targets(name: str, text: str) -> Iterator[str]:
    """Yield what a file of the repository links to, as paths from the root."""
    for match in _LINK.finditer(_FENCE.sub("", text)):
        yield posixpath.normpath(posixpath.join(posixpath.dirname(name), match[1]))


def _uri(target: str) -> str:
    """Say where the site has a file of the repository."""
    if target.startswith("docs/"):
        return target.removeprefix("docs/")
    return f"{SHOWN_UNDER}/{target if target.endswith('.md') else target + '.md'}"


def _page(target: str, content: str) -> str:
    if target.endswith(".md"):
        return content
    language = {".py": "python", ".yaml": "yaml", ".toml": "toml"}.get(Path(target).suffix, "text")
    return f"# `{target}`\n\n`````{language}\n{content}\n`````\n"


def _outside_fences(text: str, change_fn: Callable[[str], str]) -> str:
    """Change what is not in a code block."""
    parts, end = [], 0
    for fence in _FENCE.finditer(text):
        parts += [change_fn(text[end : fence.start()]), fence[0]]
        end = fence.end()
    return "".join([*parts, change_fn(text[end:])])
