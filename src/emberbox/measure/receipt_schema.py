"""The form of a fidelity receipt, key by key. What each key means is in docs/measuring.md."""

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from emberbox.measure.record import MAX_POSITIONS
from emberbox.measure.schema import (
    exactly,
    facts,
    flag,
    label,
    listing,
    mapping,
    matching,
    maybe,
    number,
    table,
    whole,
)
from emberbox.measure.summary import FIGURES

SCHEMA = "emberbox.fidelity.v1"
LANES = ("weights", "served")
DIRECTION = "reference||candidate"
HEAD_POLICY = "own"  # each artifact's hidden states meet its own head
ACCUMULATION = "float64"
RECORD_SUFFIX = ".record.xz"

_DIGEST = matching(r"[0-9a-f]{64}", "64 hex digits")
_SHARE = number(0, 1)
_BOUNDS = maybe(listing(number(), 2, 2))
_FIGURE = table({"value": maybe(number()), "interval": _BOUNDS})
_SPREAD_OF_ALL = table({key: number() for key in ("p50", "p95", "p99", "max", "cvar95")})
_SPREAD = maybe(_SPREAD_OF_ALL)  # null where no position of some windows is finite
_COUNTS = {"positions": whole(1), "non_finite": whole(0)}

_ARTIFACT = table(
    {
        "name": label,
        "map_sha256": _DIGEST,
        "num_bytes": whole(1),
        "num_tensors": whole(1),
        "storage": listing(
            table(
                {
                    "part": label,
                    "format": label,
                    "bits": number(0),
                    "weights": whole(1),
                    "bytes": whole(1),
                }
            ),
            1,
        ),
        "files": mapping(_DIGEST),
        "config_sha256": _DIGEST,
        "about": mapping(facts),
    }
)
_PANEL = table(
    {
        "name": label,
        "sha256": _DIGEST,
        "windows": listing(
            table(
                {
                    "id": label,
                    "document": label,
                    "domain": label,
                    "positions": whole(1, MAX_POSITIONS),
                    "token_sha256": _DIGEST,
                }
            ),
            1,
        ),
    }
)
_RESULTS = table(
    {
        **_COUNTS,
        "bootstrap": table({"resamples": whole(1), "seed": whole(0), "level": _SHARE}),
        **dict.fromkeys(FIGURES, _FIGURE),
        "kl_spread": _SPREAD_OF_ALL,
        "domains": listing(
            table(
                {
                    "domain": label,
                    "windows": whole(1),
                    **_COUNTS,
                    "kl": _FIGURE,
                    "kl_spread": _SPREAD,
                    "top1": _FIGURE,
                }
            ),
            1,
        ),
        "windows": listing(
            table(
                {
                    "id": label,
                    "domain": label,
                    **_COUNTS,
                    "kl": maybe(number()),
                    "kl_spread": _SPREAD,
                    "top1": maybe(_SHARE),
                }
            ),
            1,
        ),
    }
)
_RECEIPT = table(
    {
        "schema": exactly(SCHEMA),
        "metric_version": whole(1),
        "sha256": _DIGEST,
        "emberbox": table(
            {
                "version": label,
                "commit": matching(r"[0-9a-f]{40}|", "40 hex digits, or empty"),
                "is_clean": flag,
            }
        ),
        "command": label,
        "panel": _PANEL,
        "lane": exactly(*LANES),
        "direction": exactly(DIRECTION),
        "head_policy": exactly(HEAD_POLICY),
        "accumulation": exactly(ACCUMULATION),
        "reference": _ARTIFACT,
        "candidate": _ARTIFACT,
        "device": mapping(partial(facts, of_text=label)),  # shown as it is
        "op_table": mapping(label),
        "settings": mapping(facts),
        "runs": table(
            {
                "count": whole(1),
                "record_sha256": listing(_DIGEST, 1),
                "kl": listing(number(), 1),
                "kl_spread": number(0),
            }
        ),
        "record": table(
            {
                "file": matching(
                    r"[\w+-][\w.+-]{0,200}" + RECORD_SUFFIX.replace(".", r"\."),
                    f"a plain file name that ends in {RECORD_SUFFIX}",
                ),
                "sha256": _DIGEST,
                "bytes": whole(1),
            }
        ),
        "results": _RESULTS,
    }
)


def problems_of(document: Mapping[str, Any]) -> Iterator[str]:
    """What keeps `document` from being a receipt; nothing when it is one."""
    found = list(_RECEIPT(document, ""))
    yield from found
    if not found:
        yield from _window_problems(document)


def _window_problems(document: Mapping[str, Any]) -> Iterator[str]:
    """Windows are found by their ids, so each must be there once."""
    windows = document["panel"]["windows"]
    seen: set[str] = set()
    for index, window in enumerate(windows):
        if window["id"] in seen:
            yield f"panel.windows[{index}].id is {window['id']!r}, which stands there twice"
        seen.add(window["id"])
    total = sum(window["positions"] for window in windows)
    if total > MAX_POSITIONS:
        yield f"panel.windows have {total} positions, at most {MAX_POSITIONS}"
