"""How docstrings are shown on the documentation site: sections, literal blocks, names of pages."""

import re
from pathlib import Path
from typing import Any

from griffe import Extension
from markdown.extensions.toc import slugify

DOCS = Path(__file__).parent.parent / "docs"
# "Guarantee: words" over several lines: the first line would be taken for a title.
_SECTION = re.compile(r"^(Guarantee|Source): (.+)$", re.MULTILINE)
# "Raises:" wants a name and a colon in each line.
_OTHERS = re.compile(r"^( +)Else as for\b", re.MULTILINE)
_PAGE = re.compile(r"\bdocs/(\w+\.md)\b")


def _link(match: re.Match[str]) -> str:
    """Name a page of docs/ by its title's anchor, which is found from every page."""
    title = (DOCS / match[1]).read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")
    return f"[{match[1]}][{slugify(title, '-')}]"


def readable(text: str) -> str:
    """Return a docstring as Markdown that Google-style parsers read as it is meant."""
    text = _SECTION.sub(r"\1:\n    \2", text)
    text = _OTHERS.sub(r"\1others: As for", text)
    text = re.sub(r"::$", ":", text, flags=re.MULTILINE)
    return _PAGE.sub(_link, text)


class ReadableDocstrings(Extension):
    """Rewrites each docstring before it is parsed."""

    def on_object(self, *, obj: Any, **_: Any) -> None:
        """Rewrite the docstring of a module, class, function or attribute."""
        if obj.docstring is not None:
            obj.docstring.value = readable(obj.docstring.value)
