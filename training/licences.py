"""Which text may stand in the corpus, by the words in it.

A file that names a licence we do not take is left out whole, header and all.

Not taken: Creative Commons with NC, SA or ND, copyleft, licences for a purpose, proprietary
notices, text lent by an author, and what says that it comes from a share-alike site. The rule asks
for words, not for meaning: it also drops files that merely speak of such a licence.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

_SITES = r"(?:stack ?overflow|stack ?exchange|wikipedia|wikimedia|rosettacode)"
_WORDS = (
    # Creative Commons with strings attached
    r"non-?commercial", r"share[- ]?alike", r"no[- ]?derivatives?\b",
    r"\bCC[- ]BY[- ](?:NC|SA|ND)\b", r"creativecommons\.org/licenses/by-",
    # copyleft
    r"\b[AL]?GPL(?:[- ]?v?\d[\w.]*)?\b", r"copyleft", r"\bGFDL\b",
    r"\bGNU\s+(?:(?:lesser|library|affero|general|free)\s+)+(?:public|documentation)\s+licen[cs]e",
    r"mozilla\s+public\s+licen[cs]e", r"\bMPL(?:[- ]v?|v)\d", r"\bEUPL\b", r"\bCeCILL\b",
    r"common\s+development\s+and\s+distribution\s+licen[cs]e", r"eclipse\s+public\s+licen[cs]e",
    # for a purpose, or for whom the licensor likes
    r"server\s+side\s+public\s+licen[cs]e", r"\bSSPL\b", r"business\s+source\s+licen[cs]e",
    r"community\s+licen[cs]e", r"open\s?rail", r"responsible\s+ai\s+licen[cs]e",
    r"\b(?:research|academic|personal|evaluation|educational)\s+use\s+only\b",
    r"\b(?:research|academic|evaluation)\s+purposes\s+only\b",
    # proprietary notices
    r"proprietary\s+and\s+confidential", r"confidential\s+and\s+proprietary",
    r"(?:proprietary|trade\s+secret)\s+(?:licen[cs]e|information|notice|software\s+of)",
    r"retains?\s+all\s+(?:intellectual|rights?)",
    r"unauthori[sz]ed\s+(?:copying|reproduction|use)\s+of",
    r"may\s+not\s+be\s+(?:copied|reproduced|redistributed|disclosed)",
    # lent by an author, without a licence
    r"permission\s+(?:of|from|by)\s+(?:the\s+)?(?:original\s+)?author",
    # copied from a share-alike site
    r"\b(?:copied|taken|adapted|borrowed|stolen|modified|derived|lifted|inspired|based|material|"
    rf"comes)\b[^\n]{{0,60}}\n?[^\n]{{0,60}}\b{_SITES}",
    rf"\bfrom:?[\s#*]+(?:the\s+)?(?:https?://)?(?:\w+\.)?{_SITES}",
)  # fmt: skip
_FORBIDDEN = re.compile("|".join(_WORDS), re.IGNORECASE)


def forbidden(text: str) -> str | None:
    """The first words that keep `text` out of the corpus, None when there are none."""
    found = _FORBIDDEN.search(text)
    return None if found is None else " ".join(found.group().split())


@dataclass(frozen=True, slots=True)
class Exclusion:
    """What of a package is left out by name: a file, or a folder that ends in "/"; and why."""

    path: str
    reason: str

    def covers(self, path: str) -> bool:
        return path.startswith(self.path) if self.path.endswith("/") else path == self.path


def unused(exclusions: Iterable[Exclusion], paths: Sequence[str]) -> list[str]:
    """Paths of exclusions that cover none of `paths`: a name that has changed."""
    return [each.path for each in exclusions if not any(map(each.covers, paths))]
