"""Text that others wrote (names of layers, messages, paths), made safe for the place where it is shown; one function per place.

A name may hold anything. Nothing of it may move a cursor, turn text around, open a link or give an order to a CI server: whatever
does not print is shown as its escape, as `repr` shows it. JSON keeps names as they are.

terminal, notebook   `core.rendering`: Text and Table, which take strings for what they are and never as rich's markup
a log of CI          `inert`
HTML                 `report.markup.element`; figures: `report.theme.escaped`
GitHub annotations   `annotation`
SARIF                `sarif_message`, `uri`
JSON                 `encodable`
"""

from __future__ import annotations

import re
from urllib.parse import quote

COMMANDS = re.compile(r"^(\s*):(?=:)|#(?=#\w*\[)", re.MULTILINE)  # ::error::, ##[error], ##vso[…], ##teamcity[…]


def visible(text: str, keep: str = "") -> str:
    r"""With every character that does not print as its escape: controls, line breaks, turns of direction, halves of characters.

    >>> print(visible("block\x1b[31m\u202e[a]\n::error::"))
    block\x1b[31m\u202e[a]\n::error::
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in keep else c.encode("unicode_escape").decode() for c in text)


def lines(text: str) -> str:
    """`visible`, of text that may have several lines."""
    return visible(text, keep="\n")


def inert(text: str) -> str:
    r"""Lines of a log in which no CI server finds a command.

    >>> print(inert("a::b\n  ::error::stop\n##[error]"))
    a::b
      \x3a:error::stop
    \x23#[error]
    """
    return COMMANDS.sub(lambda found: f"{found[1]}\\x3a" if found[1] is not None else "\\x23", text)


def annotation(text: str, name: bool = False) -> str:
    """The message of a GitHub workflow command; name: the value of one of its properties, which ends at a comma or a colon."""
    made = visible(text).replace("%", "%25")
    return made.replace(":", "%3A").replace(",", "%2C") if name else made


def sarif_message(text: str) -> str:
    r"""A plain text message of SARIF, where [text](target) would be a link and {0} a placeholder (2.1.0, 3.11.5 and 3.11.6).

    >>> print(sarif_message("[a](javascript:x) {0}"))
    \[a\](javascript:x) {{0}}
    """
    escaped = visible(text).replace("\\", "\\\\").replace("[", "\\[").replace("]", "\\]")
    return escaped.replace("{", "{{").replace("}", "}}")


def uri(path: str) -> str:
    """A path as a relative reference, percent-encoded, so that nothing in it is a scheme."""
    return quote(path.encode("utf-8", "surrogateescape" if _is_path(path) else "backslashreplace"), safe="/")


def encodable(json: str) -> str:
    r"""JSON text that UTF-8 can write: half a character, which a name may hold, as its escape.

    >>> print(encodable('"\ud800"'))
    "\ud800"
    """
    return json.encode("utf-8", "backslashreplace").decode()


def _is_path(text: str) -> bool:
    """Whether its halves of characters are bytes that a file system gave."""
    return all("\udc80" <= c <= "\udcff" for c in text if "\ud800" <= c <= "\udfff")
