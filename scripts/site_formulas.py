"""Hook of the documentation site: subscripts and exponents of formulas that are plain text.

Formulas are written so that they can be read in any editor: ``λ_{i+1}``, ``e^(ε−L)``. On the site
they get their indices in place, without a script.
"""

import re
from typing import Any

PAGES = ("theory.md", "small_head.md", "guarantee.md", "audit.md")
# Blocks and pieces of code, and targets of links, stay as they are.
_AS_IT_IS = re.compile(r"^```.*?^```|`[^`\n]*`|\]\([^)]*\)", re.MULTILINE | re.DOTALL)
# Of a letter, with its accents and powers: a group in braces, or one sign that begins no word.
_GROUP = r"\{((?:[^{}]|\{[^{}]*\})+)\}"
_SUBSCRIPT = re.compile(
    rf"(?<=[^\W\d_])([\u0300-\u036f²′″]*)_(?:{_GROUP}|(top\b|\w(?![a-z]{{2}})))"
)
_EXPONENT = re.compile(rf"(?<=[\w)|])\^(?:{_GROUP}|\(([^()]+)\)|(\w))")


def with_indices(text: str) -> str:
    """Set the indices of formulas as HTML."""
    text = _EXPONENT.sub(lambda m: f"<sup>{_escaped(m[1] or m[2] or m[3])}</sup>", text)
    return _SUBSCRIPT.sub(
        lambda m: f"{m[1]}<sub>{with_indices(_escaped(m[2] or m[3]))}</sub>", text
    )


def _escaped(index: str) -> str:
    return index.replace("<", "&lt;")


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Set the formulas of the pages that have some."""
    if page.file.src_uri not in PAGES:
        return markdown
    parts, end = [], 0
    for code in _AS_IT_IS.finditer(markdown):
        parts += [with_indices(markdown[end : code.start()]), code[0]]
        end = code.end()
    return "".join([*parts, with_indices(markdown[end:])])
