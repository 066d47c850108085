"""Markdown as far as the tests of the docs need it: links, anchors as GitHub and the site make them, blocks of code."""

from __future__ import annotations

import re
from pathlib import Path

FENCE = re.compile(r"^(```+|~~~+) *([\w-]*)[^\n]*\n(.*?)^\1 *$", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"`[^`\n]*`")
LINK = re.compile(r"!?\[[^\]\n]*\]\(\s*<?([^)\s>]+)>?[^)\n]*\)")
HEADING = re.compile(r"^#{1,6} +(.*?) *#*$", re.MULTILINE)


def prose(text: str) -> str:
    """The text without code, in which nothing is a link."""
    return INLINE.sub("", FENCE.sub("", text))


def links(text: str) -> list[str]:
    """Where the links and pictures of a page lead."""
    return LINK.findall(prose(text))


def slug(heading: str) -> str:
    """The anchor of a heading: small letters, what is neither letter nor digit left out, spaces as hyphens."""
    plain = LINK.sub(lambda match: match[0].split("]")[0].lstrip("!["), heading)
    return re.sub(r"[^\w\- ]", "", plain).strip().lower().replace(" ", "-")


def anchors(text: str) -> set[str]:
    """Every anchor of a page; a heading that returns gets a number."""
    found: set[str] = set()
    for heading in HEADING.findall(FENCE.sub("", text)):
        name, number = slug(heading), 0
        while (anchor := f"{name}-{number}" if number else name) in found:
            number += 1
        found.add(anchor)
    return found


def broken(page: Path) -> list[str]:
    """The links of a page that lead nowhere. Links to other sites are not followed."""
    text, wrong = page.read_text(encoding="utf-8"), []
    for link in links(text):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        known = target.exists() and (not anchor or target.suffix != ".md" or anchor in anchors(target.read_text(encoding="utf-8")))
        wrong += [] if known else [link]
    return wrong


def blocks(text: str, *languages: str) -> list[str]:
    """Blocks of code in one of these languages, in order."""
    return [body for _, language, body in FENCE.findall(text) if language in languages]
