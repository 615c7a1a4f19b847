"""What the benchmark of the trellis kernels times, one record per case, and the check before it.

Records hold every repeat and nothing that follows from them; names are those of tools/summarise.py.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.kernel_timing import (
    DEVICE,
    ROTATED_BYTES,
    launched,
    num_distinct,
    random_bank,
    random_weight,
    recorded,
    replayed,
    weight_bytes,
)
from emberbox.ops.linear_exl3.kernel_cuda import linear_exl3
from emberbox.ops.moe_experts import reference
from emberbox.ops.moe_experts.bank import ExpertBank
from emberbox.ops.moe_experts.decode_cuda import MAX_TOKENS, Logits, decode
from emberbox.ops.moe_experts.kernel_cuda import moe_experts
from emberbox.ops.moe_experts.prefill_cuda import prefill

HIDDEN, WIDTH, TOP, LIMIT, SCALING = 4096, 2048, 8, 7.0, 2.5
EXPERTS, BANKS = 64, 8  # banks in turn: no call finds the experts of the one before
ALL_EXPERTS = 288
MOE_RATES = (2, 2.5, 3, 4)
MOE_TOKENS = (1, 2, 4, 8, 16)
MOE_CALLS = 48
KERNEL_TOKENS = (1, 8)  # of which each expert kernel is timed alone
RATES = (2, 3, 4, 6)
ROWS = (1, 2, 4, 8, 16)
MIN_CALLS = 40
# Of the released model, inputs x outputs; the last one is the head.
LINEARS = (
    (4096, 24576), (8192, 4096), (16384, 4096), (4096, 2048), (2048, 4096), (4096, 12288),
    (12288, 4096), (4096, 1536), (1536, 16384), (4096, 512), (1536, 4096), (4096, 154880),
)  # fmt: skip
PREFILL_RATE = 2
PREFILL_TOKENS = (256, 1024, 4096, 8192)
PREFILL_AT_ONCE = MAX_TOKENS
TOLERANCE = 1e-2  # relative, of bfloat16 results: two roundings
Case = dict[str, Any]


def check() -> None:
    """Every kernel that is timed against float64, at small sizes. Raises SystemExit."""
    k: float
    for k in RATES:
        weight = random_weight(384, 640, k)
        for rows in ROWS:
            x = torch.randn(rows, 640, device=DEVICE, dtype=torch.bfloat16)
            _require(
                linear_exl3(x, weight), x.double() @ weight.decode().double().T, f"linear K={k}"
            )
    for k in MOE_RATES:
        bank = random_bank(12, 512, 256, k)
        for tokens in (*MOE_TOKENS, *((300,) if k == PREFILL_RATE else ())):
            _check_experts(bank, tokens, f"experts K={k}, {tokens} tokens")


def _check_experts(bank: ExpertBank, tokens: int, what: str) -> None:
    x = torch.randn(tokens, 512, device=DEVICE, dtype=torch.bfloat16)
    logits = torch.randn(tokens, len(bank), device=DEVICE)
    chosen, weights = routed(logits)
    expected = reference.moe_experts(x.double(), chosen, weights.double(), bank, LIMIT)
    if tokens > PREFILL_AT_ONCE:
        _require(prefill(x, chosen, weights, bank, LIMIT), expected, what)
        return
    _require(decode(x, bank, LIMIT, routing(logits)), expected, what)


def routed(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Experts and weights of each token, by plain torch; a bias of zero."""
    scores = torch.sigmoid(logits)
    weights, chosen = scores.topk(TOP, -1)
    return chosen, weights / (weights.sum(-1, keepdim=True) + 1e-20) * SCALING


def routing(logits: Tensor) -> Logits:
    """As the kernel takes it."""
    return Logits(logits, torch.zeros(logits.shape[-1], device=DEVICE), TOP, SCALING)


def _require(found: Tensor, expected: Tensor, what: str) -> None:
    error = float((found.double() - expected).norm() / expected.norm())
    if not error <= TOLERANCE:
        raise SystemExit(
            f"{what}: relative error {error:.2e}, at most {TOLERANCE} allowed: no figure"
        )


def moe_cases() -> Iterator[Case]:
    """Routed experts of a few tokens, and each of their kernels alone."""
    for k in MOE_RATES:
        banks = [random_bank(EXPERTS, HIDDEN, WIDTH, k) for _ in range(BANKS)]
        facts = {
            "k": float(k),
            "shape": [HIDDEN, WIDTH],
            "experts": EXPERTS,
            "banks": BANKS,
            "top": TOP,
            "calls": MOE_CALLS,
            "expert_bytes": 3 * weight_bytes(WIDTH, HIDDEN, k),
        }
        for tokens in MOE_TOKENS:
            yield {"op": "moe_decode", "tokens": tokens, **facts, **_moe(banks, tokens)}
        for tokens in KERNEL_TOKENS:
            yield from _expert_kernels(banks, tokens, facts)
        del banks
        torch.cuda.empty_cache()


def _moe(banks: list[ExpertBank], tokens: int) -> Case:
    """Microseconds of each repeat, and mean distinct experts of its calls."""
    logits = torch.randn(MOE_CALLS, tokens, EXPERTS, device=DEVICE)
    x = torch.randn(MOE_CALLS, tokens, HIDDEN, device=DEVICE, dtype=torch.bfloat16)
    given = [routing(each) for each in logits]
    distinct: list[float] = []

    def draw() -> None:
        logits.normal_()
        distinct.append(num_distinct(logits, TOP))

    def body(i: int) -> Tensor:
        return decode(x[i], banks[i % BANKS], LIMIT, given[i])

    return {"us": replayed(body, MOE_CALLS, draw), "distinct": distinct}


def _expert_kernels(banks: list[ExpertBank], tokens: int, facts: Case) -> Iterator[Case]:
    """Each kernel of the step alone, one launch after another with the arguments of a real step;
    all of a repeat share its routing, and take the matrices of the banks in turn."""
    logits = torch.randn(1, tokens, EXPERTS, device=DEVICE)
    x = torch.randn(tokens, HIDDEN, device=DEVICE, dtype=torch.bfloat16)
    inputs = (LIMIT, routing(logits[0]))
    decode(x, banks[0], *inputs)  # working memory has its size from here on
    with recorded() as launches:
        kept = [decode(x, bank, *inputs) for bank in banks]
    by_name: dict[str, list[Callable[[], None]]] = {}
    for name, again in launches:
        by_name.setdefault(name, []).append(again)
    for name, each in by_name.items():
        distinct: list[float] = []

        def draw(distinct: list[float] = distinct) -> None:
            logits.normal_()
            decode(x, banks[0], *inputs)  # leaves the runs of this routing behind
            distinct.append(num_distinct(logits, TOP))

        def body(i: int, each: list[Callable[[], None]] = each) -> None:
            each[i % len(each)]()

        times = replayed(body, MOE_CALLS, draw)
        yield {
            "op": "expert_kernel",
            "kernel": name,
            "tokens": tokens,
            **facts,
            "us": times,
            "distinct": distinct,
        }
    del kept


def linear_cases() -> Iterator[Case]:
    """Linear layers of the released shapes."""
    for inputs, outputs in LINEARS:
        for k in RATES:
            size = weight_bytes(outputs, inputs, k)
            num = max(2, -(-ROTATED_BYTES // size))
            weights = [random_weight(outputs, inputs, k) for _ in range(num)]
            calls = -(-max(MIN_CALLS, num) // num) * num
            for rows in ROWS:
                x = torch.randn(rows, inputs, device=DEVICE, dtype=torch.bfloat16)
                yield {
                    "op": "linear",
                    "k": float(k),
                    "shape": [inputs, outputs],
                    "rows": rows,
                    "buffers": num,
                    "calls": calls,
                    "weight_bytes": size,
                    "us": replayed(partial(_multiply, x, weights), calls),
                }
            del weights
    torch.cuda.empty_cache()


def _multiply(x: Tensor, weights: list[Any], i: int) -> Tensor:
    return linear_exl3(x, weights[i % len(weights)])


def prefill_cases() -> Iterator[Case]:
    """Routed experts of many tokens over all experts of a layer: as a graph, and eagerly."""
    bank = random_bank(ALL_EXPERTS, HIDDEN, WIDTH, PREFILL_RATE)
    for tokens in PREFILL_TOKENS:
        chosen, weights = routed(torch.randn(tokens, ALL_EXPERTS, device=DEVICE))
        x = torch.randn(tokens, HIDDEN, device=DEVICE, dtype=torch.bfloat16)
        run = partial(_prefill, x, chosen, weights, bank)
        yield {
            "op": "moe_prefill",
            "k": float(PREFILL_RATE),
            "tokens": tokens,
            "shape": [HIDDEN, WIDTH],
            "experts": ALL_EXPERTS,
            "top": TOP,
            "expert_bytes": 3 * weight_bytes(WIDTH, HIDDEN, PREFILL_RATE),
            "distinct": num_distinct_of(chosen),
            "eager_us": launched(run, 2),
            **_as_graph(run),
        }


def _prefill(x: Tensor, chosen: Tensor, weights: Tensor, bank: ExpertBank, _: int) -> Tensor:
    return moe_experts(x, chosen, weights, bank, LIMIT)


def num_distinct_of(chosen: Tensor) -> int:
    """Experts that any token chose."""
    return int(torch.unique(chosen).numel())


def _as_graph(run: Callable[[int], object]) -> Mapping[str, Any]:
    """Of graph replay, if it can be captured; else why not."""
    try:
        return {"us": replayed(run, 2)}
    except RuntimeError as refused:
        return {"us": None, "why_no_graph": str(refused).partition("\n")[0]}
