"""Speed of the engine on a CPU, as ratios taken side by side in one run.

    python -m benchmarks.engine [--repeats 5] [--only two_bits] [--out FILE]

Six questions, five with a bar: decode against transformers' `generate` with cache; eight streams
against one; the first token of a second turn against a cold one; decode over HTTP against the
engine alone; the longest silence of a running stream while a newcomer's long prompt is read; and,
without a bar, decode of the same model compressed to two bits, which a CPU decodes once. What
is compared runs in turn, not one after the other; figures are medians. One torch thread. Where both
sides give tokens they must be the same tokens, or there is no figure.
"""

import argparse
import http.client
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch

from benchmarks.machine import ROOT, about, write
from benchmarks.reference import Reference
from emberbox.engine.llm import LLM
from emberbox.engine.request import Prompt, SamplingParams
from emberbox.settings import EngineSettings

NANO = ROOT / "models" / "ember-nano"
TWO_BITS = ROOT / "models" / "ember-nano-base2"
NUM_TOKENS = 128  # of a reply
HISTORY_TOKENS = 4000
GREEDY = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True)
SETTINGS = EngineSettings(device="cpu", dtype="float32")
DECODED_ONCE = "decoded once, at load"
clock = time.perf_counter


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "engine.json")
    parser.add_argument(
        "--only", nargs="+", metavar="QUESTION", choices=[q.__name__ for q in QUESTIONS]
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    llm = LLM(NANO, SETTINGS)
    results = {}
    for ask in QUESTIONS:
        if options.only and ask.__name__ not in options.only:
            continue
        results[ask.__name__] = ask(llm, options.repeats)
        print(ask.__name__, json.dumps(results[ask.__name__]["summary"]), flush=True)
    receipt = {**about(NANO), "repeats": options.repeats, "raw": results}
    receipt["results"] = {name: result["summary"] for name, result in results.items()}
    write(receipt, options.out)
    missed = [name for name, result in results.items() if not _holds(result["summary"])]
    if missed:
        raise SystemExit(f"below the bar: {', '.join(missed)}")


def chat_prompt(llm: LLM, text: str) -> Prompt:
    return llm.prepare_chat([{"role": "user", "content": text}], enable_thinking=False)


def long_prompt(llm: LLM, num_tokens: int, first: int) -> Prompt:
    """A prompt of exactly so many tokens that no other `first` shares a prefix with."""
    body = [100 + (first * 7919 + i * 31) % 3000 for i in range(num_tokens)]
    return llm.prepare(body)


def token_times(llm: LLM, prompt: Prompt, params: SamplingParams) -> tuple[list[int], list[float]]:
    """Tokens of one stream and when each came."""
    ids, times = [], []
    for event in llm.stream(prompt, params):
        ids.append(event.token_id or 0)
        times.append(clock())
    return ids, times


def decode_rate(times: list[float]) -> float:
    """Tokens per second after the first."""
    return (len(times) - 1) / (times[-1] - times[0])


def against_transformers(llm: LLM, repeats: int) -> dict[str, Any]:
    """Single-stream decode. Bar: 2 times, aim 5."""
    prompt, reference = chat_prompt(llm, "Count from 1 to 60."), Reference(NANO)
    ours, theirs = [], []
    for _ in range(repeats + 1):
        ids, times = token_times(llm, prompt, GREEDY)
        expected, other = reference.generate(list(prompt.token_ids), NUM_TOKENS)
        if ids != expected:
            raise SystemExit("transformers gives other tokens: no figure")
        ours.append(decode_rate(times))
        theirs.append(decode_rate(other))
    return _ratio("engine_tokens_per_second", ours[1:], "transformers", theirs[1:], bar=2.0)


def eight_streams(llm: LLM, repeats: int) -> dict[str, Any]:
    """Eight streams together against one. Bar: 3 times."""
    prompt = chat_prompt(llm, "Count from 1 to 60.")
    eight: list[float] = []
    one: list[float] = []
    for _ in range(repeats + 1):
        for count, rates in ((1, one), (8, eight)):
            began = clock()
            done = llm.complete_all([prompt] * count, GREEDY)
            rates.append(sum(len(d.token_ids) for d in done) / (clock() - began))
            if len({d.token_ids for d in done}) != 1:
                raise SystemExit("streams of one prompt differ: no figure")
    return _ratio("eight_tokens_per_second", eight[1:], "one", one[1:], bar=3.0)


def second_turn(llm: LLM, repeats: int) -> dict[str, Any]:
    """First token of a turn after 4,000 tokens of history, cold and from a snapshot. Bar: 10."""
    one, cold, warm = SamplingParams(max_tokens=1), [], []
    for i in range(repeats):
        history = long_prompt(llm, HISTORY_TOKENS, first=i + 1)
        began = clock()
        first = llm.complete(history, one)
        cold.append(clock() - began)
        again = Prompt((*history.token_ids, *first.token_ids, 200 + i, 201, 202, 203))
        began = clock()
        second = llm.complete(again, one)
        warm.append(clock() - began)
        if second.num_cached_tokens < HISTORY_TOKENS:
            raise SystemExit(f"{second.num_cached_tokens} tokens from a snapshot: no figure")
    return _ratio("cold_seconds", cold, "second_turn", warm, bar=10.0)


def over_http(llm: LLM, repeats: int) -> dict[str, Any]:
    """Decode over HTTP against the engine alone, one stream. Bar: at least 0.9 (aim 0.95)."""
    alone, http = [], []
    prompt = chat_prompt(llm, "Count from 1 to 60.")
    body = json.dumps(
        {
            "prompt": list(prompt.token_ids),
            "max_tokens": NUM_TOKENS,
            "stream": True,
            "temperature": 0,
            "ignore_eos": True,
        }
    )
    with served() as url:
        for _ in range(repeats + 1):
            ids, times = token_times(llm, prompt, GREEDY)
            alone.append(decode_rate(times))
            text, times = line_times(url, body)
            http.append((len(ids) - 1) / (times[-1] - times[0]))
            if text != "".join(llm.token_text(token)[0] for token in ids):
                raise SystemExit("over HTTP comes another text: no figure")
    return _ratio("http_tokens_per_second", http[1:], "engine_alone", alone[1:], bar=0.9)


def while_prefilling(llm: LLM, repeats: int) -> dict[str, Any]:
    """Silence of a running stream while 4,000 tokens prefill: p99 over (chunk + step). Bar: 3."""
    chunks, steps, gaps = [], [], []
    prompt = chat_prompt(llm, "Count from 1 to 60.")
    stream = SamplingParams(max_tokens=400, ignore_eos=True)
    for i in range(repeats):
        llm.submit(-1, prompt, stream)
        for _ in range(20):
            began = clock()
            llm.step()
            steps.append(clock() - began)
        chunks += _prefill_alone(llm, long_prompt(llm, HISTORY_TOKENS, first=100 + 2 * i))
        llm.submit(-2, long_prompt(llm, HISTORY_TOKENS, first=101 + 2 * i), GREEDY)
        last, is_prefilling = clock(), True
        while is_prefilling:
            events = llm.step()
            now = clock()
            if any(event.request_id == -1 for event in events):
                gaps.append(now - last)
                last = now
            is_prefilling = not any(event.request_id == -2 for event in events)
        llm.abort(-1)
        llm.abort(-2)
    chunk, step = statistics.median(chunks), statistics.median(steps[1:])
    p99 = sorted(gaps)[min(len(gaps) - 1, int(0.99 * len(gaps)))]
    summary = {"p99_gap_seconds": p99, "chunk_seconds": chunk, "step_seconds": step}
    summary |= {"ratio": p99 / (chunk + step), "at_most": 3.0}
    return {"summary": _rounded(summary), "gaps": gaps, "chunks": chunks, "steps": steps}


def two_bits(llm: LLM, repeats: int) -> dict[str, Any]:
    """Single-stream decode of ember-nano-base2 against ember-nano: both are float32 by then."""
    other = LLM(TWO_BITS, SETTINGS)
    if other.memory.lines[0].note != DECODED_ONCE:
        raise SystemExit("the two-bit weights were not decoded at load: no figure")
    prompt = chat_prompt(llm, "Count from 1 to 60.")
    rates: dict[LLM, list[float]] = {llm: [], other: []}
    for _ in range(repeats + 1):
        for model, found in rates.items():
            ids, times = token_times(model, prompt, GREEDY)
            if len(ids) != NUM_TOKENS:
                raise SystemExit(f"{len(ids)} tokens, expected {NUM_TOKENS}: no figure")
            found.append(decode_rate(times))
    result = _ratio(
        "two_bits_tokens_per_second", rates[other][1:], "bf16", rates[llm][1:], bar=None
    )
    return result | {"two_bits_weights_sha256": about(TWO_BITS)["weights_sha256"]}


def _prefill_alone(llm: LLM, prompt: Prompt) -> list[float]:
    """Seconds of each full chunk of a prompt without company, in a cache of its own."""
    times = []
    hidden = llm.hidden(prompt, chunk=llm.memory.prefill_tokens)
    for _ in range(len(prompt.token_ids) // llm.memory.prefill_tokens):
        began = clock()
        next(hidden)
        times.append(clock() - began)
    return times


@contextmanager
def served() -> Iterator[str]:
    """`emberbox serve` in a process of its own; its address."""
    command = [sys.executable, "-m", "emberbox", "serve", str(NANO), "--port", "0", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        try:
            assert process.stdout is not None
            ready = json.loads(process.stdout.readline())
            yield ready["url"]
        finally:
            process.terminate()


def line_times(url: str, body: str) -> tuple[str, list[float]]:
    """The text of a streamed completion, and when each event came, read line by line."""
    at = urlsplit(url)
    connection = http.client.HTTPConnection(at.hostname or "", at.port or 0, timeout=120)
    headers = {"Content-Type": "application/json"}
    connection.request("POST", "/v1/completions", body, headers)
    lines, times = [], []
    for line in connection.getresponse():
        if line.startswith(b"data: {"):
            lines.append(line)
            times.append(clock())
    connection.close()
    texts = [json.loads(line[6:])["choices"][0]["text"] for line in lines]
    return "".join(texts), times


def _ratio(
    name: str, upper: list[float], other: str, lower: list[float], *, bar: float | None
) -> dict[str, Any]:
    """Median of the pairwise ratios, and the medians of both sides."""
    ratios = [a / b for a, b in zip(upper, lower, strict=True)]
    summary = {name: statistics.median(upper), other: statistics.median(lower)}
    summary["ratio"] = statistics.median(ratios)
    if bar is not None:
        summary["at_least"] = bar
    return {"summary": _rounded(summary), name: upper, other: lower}


def _holds(summary: dict[str, float]) -> bool:
    ratio = summary["ratio"]
    return summary.get("at_least", ratio) <= ratio <= summary.get("at_most", ratio)


def _rounded(summary: dict[str, float]) -> dict[str, float]:
    return {name: round(value, 4) for name, value in summary.items()}


QUESTIONS = (
    against_transformers,
    eight_streams,
    second_turn,
    over_http,
    while_prefilling,
    two_bits,
)

if __name__ == "__main__":
    main()
