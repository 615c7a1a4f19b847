"""How far decoding on a GPU is from the network in float32, beside plain torch in BF16.

    python -m benchmarks.decode_quality --out receipts/h200/decode_quality.json

For each checkpoint: windows of the panel nano-25, then one long text, are fed token by token to the
decode step that serves (CUDA graphs, BF16 activations, latents in BF16 or FP8), and to the same
network with every op the plain reference: in float32, whose logits are the truth, and in BF16.
Quantised weights decode to the same values in all of them. Mean KL from the float32 logits; the
bar is 1.5 times that of plain BF16, 3 times with FP8 latents, in the last 1,024 tokens too (BF16).
"""

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.machine import ROOT, about_run, write
from emberbox.engine.decode_once import decode_once, prepare_once
from emberbox.engine.decode_runner import DecodeRunner
from emberbox.engine.plan import Work
from emberbox.measure.panel import load_panel
from emberbox.model.batch import Batch, SequenceRows
from emberbox.model.cache import FP8, CacheSize
from emberbox.model.config import PAGE_TOKENS, Glm5NextConfig
from emberbox.model.network import Network
from emberbox.model.weights import assign, load_parameters
from emberbox.ops.table import OpTable, bind_all
from emberbox.store.checkpoint import open_checkpoint

CHECKPOINTS = ("ember-nano", "ember-nano-base2")
SHORT, LONG, LAST = 4_096, 32_768, 1_024
CHUNK = 512
BARS = {"bfloat16": 1.5, "fp8": 3.0}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=ROOT / "receipts/h200/decode_quality.json")
    parser.add_argument("--tokens", type=int, default=LONG, help="of the long text")
    options = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = False
    every = [list(window.token_ids) for window in load_panel("nano-25").windows]
    joined = [token for window in every for token in window]
    windows = every[:: -(-len(joined) // SHORT)]
    long = (joined * (1 + options.tokens // len(joined)))[: options.tokens]
    cases = [case for name in CHECKPOINTS for case in measured(name, [*windows, long])]
    facts = {"benchmark": "decode_quality", **about_run("cuda"), "long_tokens": len(long)}
    results = {f"{c['checkpoint']}.{c['latents']}": c["ratio"] for c in cases}
    write({**facts, "cases": cases, "results": results}, options.out)


def measured(name: str, texts: Sequence[list[int]]) -> Iterator[dict[str, Any]]:
    """One case for each kind of latents; the last text is the long one."""
    folder = ROOT / "models" / name
    with torch.inference_mode():
        truth = [*plain(network_of(folder, torch.float32, is_plain=True), texts)]
        rounded = kl_of(truth, plain(network_of(folder, torch.bfloat16, is_plain=True), texts))
        network = network_of(folder, torch.bfloat16, is_plain=False)
        for latents, dtype in (("bfloat16", None), ("fp8", FP8)):
            read = texts if dtype is None else texts[:-1]
            found = kl_of(truth[: len(read)], decoded(network, read, dtype))
            short = [mean(each[: len(texts) - 1]) for each in (found, rounded)]
            case = {"checkpoint": name, "latents": latents, "bar": BARS[latents]}
            case |= {"kl": short[0], "kl_plain_bf16": short[1], "ratio": short[0] / short[1]}
            if dtype is None:
                whole, last = compared(found[-1], rounded[-1]), compared(*tails(found, rounded))
                case |= {"long": whole, "last": last}
            print(case, flush=True)
            yield case


def network_of(folder: Path, dtype: torch.dtype, *, is_plain: bool) -> Network:
    """On the GPU: references on decoded weights, or what serves."""
    checkpoint = open_checkpoint(folder)
    config = Glm5NextConfig.from_dict(checkpoint.config, checkpoint.mtp_config)
    assignment = assign(config, checkpoint.tensors)
    device = torch.device("cuda")
    params = load_parameters(checkpoint, assignment, device=device, dtype=dtype)
    if is_plain:
        params = decode_once(params, dtype, str(folder))
        return Network(config, params, OpTable.reference())
    ops = bind_all(device, torch.cuda.get_device_capability(device))
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


def compared(found: Tensor, rounded: Tensor) -> dict[str, float]:
    """Mean KL of both, and their ratio."""
    a, b = float(found.mean()), float(rounded.mean())
    return {"kl": a, "kl_plain_bf16": b, "ratio": a / b}


def tails(*texts: Sequence[Tensor]) -> list[Tensor]:
    """The end of the long text of each."""
    return [text[-1][-LAST:] for text in texts]


def mean(pieces: Sequence[Tensor]) -> float:
    """Over the positions of all texts."""
    return float(torch.cat(list(pieces)).mean())


if __name__ == "__main__":
    main()
