"""The demonstration compresses: seven matrices live, all others are compared by their hashes."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console

from emberbox.errors import CheckpointError

LAYERS = "model.language_model.layers."
# Two experts of a layer with experts, and the output projection of a KDA layer.
LIVE = (
    f"{LAYERS}0.self_attn.o_proj",
    *(
        f"{LAYERS}1.mlp.experts.{expert}.{projection}_proj"
        for expert in (0, 1)
        for projection in ("gate", "up", "down")
    ),
)
TOLERANCE = 0.03  # of the proxy error: other machines sum in another order
HASHES = "{name}.decoded.json"  # beside the folder: module -> sha256 of the decoded matrix


@dataclass(frozen=True, slots=True)
class Compressed:
    """What the live part found."""

    num_hashes: int
    differing: tuple[str, ...]
    matrices: tuple[dict[str, object], ...]
    is_right: bool

    def to_dict(self) -> dict[str, object]:
        """For JSON."""
        return asdict(self)


def compress_live(source: Path, made: Path, console: Console) -> Compressed:
    """Compare `made` with its hashes, then compress LIVE from `source` again and compare errors."""
    from emberbox.compress import trellis_search_cpu
    from emberbox.compress.replay import compress_again, decoded_hashes

    trellis_search_cpu.kernel()
    stored = _hashes(made.with_name(HASHES.format(name=made.name)))
    found = decoded_hashes(made)
    differing = tuple(n for n in sorted({*stored, *found}) if stored.get(n) != found.get(n))
    verdict = f"{len(differing)} differ: {', '.join(differing[:3])}" if differing else "all equal"
    console.print(f"{made}: {len(found)} decoded matrices against their hashes: {verdict}")
    console.print("compressing seven of them again from the source's weights: half a minute")
    console.print("  matrix, proxy error now (in the folder)", style="dim")
    matrices: list[dict[str, object]] = []
    is_right = not differing
    for again in compress_again(source, made, LIVE, trellis_search_cpu.search):
        is_near = abs(again.ratio - 1) <= TOLERANCE
        is_right &= is_near
        mark = "[green]near[/green]" if is_near else "[red]too far[/red]"
        name = again.name.removeprefix(LAYERS)
        console.print(f"  layer {name}: {again.now:.5f} ({again.then:.5f})  {mark}")
        matrices.append({**asdict(again), "ratio": again.ratio})
    return Compressed(len(found), differing, tuple(matrices), is_right)


def _hashes(path: Path) -> dict[str, str]:
    try:
        found: dict[str, str] = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from error
    return found
