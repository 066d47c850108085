"""Our docstrings as the site shows them: sessions as code, and `name: …` sentences as one line per parameter.

In the source a parameter is explained where it stands in the text, as "name: what it is." or "first, second: what they are."
`sections` collects these into the Google style that mkdocstrings reads.
"""

from __future__ import annotations

import re
from collections.abc import Collection


def sections(text: str, names: Collection[str], title: str) -> str:
    """The text with its sessions fenced and what it says of each of `names` in a section at the end.

    >>> print(sections("Add.\\n\\na: the first. b, c: others.", {"a", "b", "c"}, "Args"))
    Add.
    <BLANKLINE>
    Args:
        a: The first.
        b: Others.
        c: Others.
    """
    paragraphs, said = [], dict[str, str]()
    for paragraph in re.split(r"\n[ \t]*\n", text.strip()):
        if paragraph.lstrip().startswith(">>>"):
            paragraphs.append(f"```pycon\n{paragraph}\n```")
        elif paragraph.startswith("    ") or not names:
            paragraphs.append(paragraph)
        else:
            rest, found = _explained(paragraph, names)
            paragraphs += [rest] if rest else []
            said |= found
    if not said:
        return "\n\n".join(paragraphs)
    return "\n\n".join([*paragraphs, "\n".join([f"{title}:", *(f"    {name}: {said[name]}" for name in said)])])


def _explained(paragraph: str, names: Collection[str]) -> tuple[str, dict[str, str]]:
    """What a paragraph says before the first "name:", and of each name after it."""
    flat = " ".join(paragraph.split())
    either = "|".join(re.escape(name) for name in sorted(names, key=len, reverse=True))
    starts = [*re.finditer(rf"(?:(?<=^)|(?<=[.;] ))((?:{either})(?:, (?:{either}))*): ", flat)]
    if not starts:
        return paragraph, {}
    said = {}
    for start, following in zip(starts, [*starts[1:], None], strict=True):
        words = flat[start.end() : following.start() if following else None].strip().rstrip(";")
        sentence = f"{words[:1].upper()}{words[1:]}{'' if words.endswith('.') else '.'}"
        said |= dict.fromkeys(start[1].split(", "), sentence)
    return flat[: starts[0].start()].strip(), said
