"""How far decoding on a GPU is from the network in float32, beside plain torch in BF16.

    python -m benchmarks.decode_quality --out receipts/h200/decode_quality.json

For each checkpoint: windows of the panel nano-25, then one long text, are fed token by token to the
decode step that serves (CUDA graphs, BF16 activations, latents in BF16 or FP8), and to the same
network with every op the plain reference: in float32, whose logits are the truth, and in BF16.
Quantised weights decode to the same values in all of them. Mean KL from the float32 logits; the
bar is 1.5 times that of plain BF16, 3 times with FP8 latents, in the last 1,024 tokens too (BF16).

The receipt holds sums of KL over blocks of 512 tokens; every mean and ratio follows from them.
"""

import argparse
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.machine import ROOT, about, about_run, write
from emberbox.engine.decode_once import decode_once, prepare_once
from emberbox.engine.decode_runner import DecodeRunner
from emberbox.engine.plan import Work
from emberbox.measure.panel import load_panel
from emberbox.measure.receipt import seal_of
from emberbox.model.batch import Batch, SequenceRows
from emberbox.model.cache import FP8, CacheSize
from emberbox.model.config import PAGE_TOKENS, Glm5NextConfig
from emberbox.model.network import Network
from emberbox.model.weights import assign, load_parameters
from emberbox.ops.table import OpTable, bind_all
from emberbox.store.checkpoint import open_checkpoint

CHECKPOINTS = ("ember-nano", "ember-nano-base2")
PANEL = "nano-25"
SHORT, LONG, LAST = 4_096, 32_768, 1_024
CHUNK = 512  # tokens at once, and of a block
PLAIN = "plain_bf16"
BARS = {"bfloat16": 1.5, "fp8": 3.0}
Texts = Sequence[tuple[str, list[int]]]
Raw = Sequence[Mapping[str, Any]]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=ROOT / "receipts/h200/decode_quality.json")
    parser.add_argument("--tokens", type=int, default=LONG, help="of the long text")
    parser.add_argument("--device", default="cuda", help="cpu: to see that it runs")
    options = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = False
    texts = texts_of(options.tokens)
    raw = [measured(name, texts, torch.device(options.device)) for name in CHECKPOINTS]
    facts = {"benchmark": "decode_quality", **about_run(options.device)}
    facts |= {"panel_sha256": load_panel(PANEL).sha256, "long_tokens": options.tokens}
    write({**facts, **receipt_of(raw)}, options.out)


def texts_of(long_tokens: int) -> Texts:
    """Some windows of the panel by their id, then all of them as one text of so many tokens."""
    windows = load_panel(PANEL).windows
    joined = [token for window in windows for token in window.token_ids]
    chosen = windows[:: -(-len(joined) // SHORT)]
    long = (joined * (1 + long_tokens // len(joined)))[:long_tokens]
    return [*((window.id, list(window.token_ids)) for window in chosen), ("long", long)]


# -- what is stored, and what follows from it ------------------------------------------------------


def receipt_of(raw: Raw) -> dict[str, Any]:
    """The sums, their seal, and every figure.

    raw: by checkpoint, and of each text the tokens of its blocks and the sums of KL over them, of
    each path that it went. The last text is the long one, which FP8 latents are not measured on.
    """
    cases = cases_of(raw)
    results = {f"{case['checkpoint']}.{case['latents']}": case["ratio"] for case in cases}
    sealed = {"raw": list(raw), "raw_sha256": seal_of({"raw": raw})}
    return {**sealed, "cases": cases, "results": results}


def cases_of(raw: Raw) -> list[dict[str, Any]]:
    """One for each checkpoint and kind of latents: mean KL of the windows, the long text, its end.

    Raises ValueError where a block has no sum.
    """
    cases = []
    for each in raw:
        *windows, long = each["texts"]
        for latents, bar in BARS.items():
            case = {"checkpoint": each["checkpoint"], "latents": latents, "bar": bar}
            case |= compared(windows, latents)
            if latents in long:
                case["long"] = compared([long], latents)
                case["last"] = compared([long], latents, LAST // CHUNK)
            cases.append(case)
    return cases


def compared(texts: Raw, latents: str, num_blocks: int = 0) -> dict[str, float]:
    """Mean KL of both, and their ratio; of the last blocks of each text, 0: of all."""

    def total(key: str) -> float:
        for text in texts:
            if len(text[key]) != len(text["counts"]):
                raise ValueError(f"{text['id']}, {key}: not a sum for each block")
        return math.fsum(value for text in texts for value in text[key][-num_blocks:])

    count = total("counts")
    a, b = total(latents) / count, total(PLAIN) / count
    return {"kl": a, "kl_plain_bf16": b, "ratio": a / b}


def block_sizes(num_tokens: int) -> list[int]:
    """Of the blocks of a text: counted from its end, so that its last tokens are whole ones."""
    first = num_tokens % CHUNK
    return [first] * (first > 0) + [CHUNK] * (num_tokens // CHUNK)


# -- what is measured ------------------------------------------------------------------------------


def measured(name: str, texts: Texts, device: torch.device) -> dict[str, Any]:
    """One checkpoint, as `receipt_of` takes it."""
    folder = ROOT / "models" / name
    ids = [token_ids for _, token_ids in texts]
    with torch.inference_mode():
        truth = [*plain(network_of(folder, torch.float32, device, is_plain=True), ids)]
        rounded = plain(network_of(folder, torch.bfloat16, device, is_plain=True), ids)
        kl = {PLAIN: kl_of(truth, rounded)}
        network = network_of(folder, torch.bfloat16, device, is_plain=False)
        kl["bfloat16"] = kl_of(truth, decoded(network, ids, None))
        kl["fp8"] = kl_of(truth[:-1], decoded(network, ids[:-1], FP8))
    rows = []
    for number, (text_id, token_ids) in enumerate(texts):
        sizes = block_sizes(len(token_ids))
        sums = {key: sums_of(own[number], sizes) for key, own in kl.items() if number < len(own)}
        rows.append({"id": text_id, "counts": sizes, **sums})
    print(name, flush=True)
    weights = about(folder)["weights_sha256"]
    return {"checkpoint": name, "weights_sha256": weights, "texts": rows}


def sums_of(kl: Tensor, sizes: Sequence[int]) -> list[float]:
    """Of each block. kl float64 [T]."""
    return [math.fsum(block.tolist()) for block in torch.split(kl, list(sizes))]


def network_of(
    folder: Path, dtype: torch.dtype, device: torch.device, *, is_plain: bool
) -> Network:
    """References on decoded weights, or what serves."""
    checkpoint = open_checkpoint(folder)
    config = Glm5NextConfig.from_dict(checkpoint.config, checkpoint.mtp_config)
    assignment = assign(config, checkpoint.tensors)
    params = load_parameters(checkpoint, assignment, device=device, dtype=dtype)
    if is_plain:
        params = decode_once(params, dtype, str(folder))
        return Network(config, params, OpTable.reference())
    is_cuda = device.type == "cuda"
    ops = bind_all(device, torch.cuda.get_device_capability(device) if is_cuda else (0, 0))
    return Network(config, prepare_once(params, ops), ops)


def plain(network: Network, texts: Sequence[list[int]]) -> Iterator[Tensor]:
    """Logits [T, V] of each text, in chunks against a cache."""
    device = network.embedding.device
    for text in texts:
        num_pages = -(-len(text) // PAGE_TOKENS)
        cache = network.new_cache(CacheSize(num_pages, 1))
        pages = tuple(range(num_pages))
        rows = []
        for at in range(0, len(text), CHUNK):
            row = SequenceRows(text[at : at + CHUNK], at, 0, pages)
            rows.append(network.logits(network.forward(Batch.of([row], device), cache)))
        yield torch.cat(rows)


def decoded(
    network: Network, texts: Sequence[list[int]], latent_dtype: torch.dtype | None
) -> Iterator[Tensor]:
    """The same by one decode step for each token but the first."""
    device = network.embedding.device
    most = max(map(len, texts))
    num_pages = -(-most // PAGE_TOKENS)
    cache = network.new_cache(CacheSize(num_pages, 1), latent_dtype)
    runner = DecodeRunner(network, cache, max_running=1, max_model_len=most)
    pages = tuple(range(num_pages))
    for text in texts:
        first = SequenceRows(text[:1], 0, 0, pages)
        rows = [network.logits(network.forward(Batch.of([first], device), cache))]
        for position, token in enumerate(text[1:], 1):
            found = runner.run([Work(0, (token,), position, 0, pages, 0, samples=True)])
            rows.append(found[0].logits.clone())  # the next step writes there
        yield torch.cat(rows)


def kl_of(truth: Sequence[Tensor], others: Iterator[Tensor]) -> list[Tensor]:
    """KL from the truth at each position of each text, float64 [T]."""
    out = []
    for expected, found in zip(truth, others, strict=True):
        pieces = []
        for e, f in zip(*(torch.split(t, CHUNK) for t in (expected, found)), strict=True):
            p, q = e.double().log_softmax(-1), f.double().log_softmax(-1)
            pieces.append((p.exp() * (p - q)).sum(-1))
        out.append(torch.cat(pieces).cpu())
    return out


if __name__ == "__main__":
    main()
