"""The form of a speed receipt, key by key. What each key means is in docs/measuring.md."""

from collections.abc import Iterator
from functools import partial

from emberbox.measure.schema import (
    exactly,
    facts,
    flag,
    label,
    listing,
    mapping,
    matching,
    number,
    table,
    whole,
)

SCHEMA = "emberbox.speed.v1"
_MOST = 1 << 22  # runs, and steps of one: a file of the largest size has fewer
_NUMBERS = listing(whole(1))


def _named(value: object, at: str) -> Iterator[str]:
    """Any facts, and a name, which is shown as it is."""
    yield from mapping(partial(facts, of_text=label))(value, at)
    if isinstance(value, dict):
        yield from label(value.get("name"), f"{at}.name")


def _figures(value: object, at: str) -> Iterator[str]:
    """Numbers under names that are shown as they are."""
    yield from mapping(number(0))(value, at)
    for key in value if isinstance(value, dict) else ():
        yield from label(key, f"a name in {at}")


_RUN = table(
    {
        "kind": exactly("decode", "replies"),
        "context": whole(1),
        "step_tokens": whole(1),
        "num_requests": whole(1),
        "num_tokens": whole(1),
        "wall_ms": number(0),
        "step_ms": listing(number(0), 1, _MOST),
        "is_filled": flag,
    }
)
_OPTIONS = table(
    {
        **dict.fromkeys(("contexts", "step_tokens", "concurrency"), _NUMBERS),
        **dict.fromkeys(("tokens", "warm_up", "prompt_tokens", "reply_tokens", "seed"), whole(0)),
        "fill": label,
    }
)
_CODE = table(
    {
        "version": label,
        "commit": matching(r"[0-9a-f]{40}|", "40 hex digits, or empty"),
        "is_clean": flag,
    }
)
_RECEIPT = table(
    {
        "schema": exactly(SCHEMA),
        "sha256": matching(r"[0-9a-f]{64}", "64 hex digits"),
        "date": matching(r"\d{4}-\d\d-\d\d", "a date such as 2026-12-31"),
        "emberbox": _CODE,
        "command": label,
        "model": _named,
        "device": _named,
        "op_table": mapping(label),
        "settings": mapping(facts),
        "plan": mapping(whole(0)),
        "peak_bytes": whole(0),
        "options": _OPTIONS,
        "raw": listing(_RUN, 1, _MOST),
        "results": _figures,
    }
)


def problems_of(document: object) -> Iterator[str]:
    """A sentence for every place of the wrong form."""
    return _RECEIPT(document, "")
