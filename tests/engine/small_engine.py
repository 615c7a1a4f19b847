"""A small engine over the nano model, its prompts, and what its steps gave."""

from dataclasses import replace

from torch import Tensor

from emberbox.engine.core import Engine
from emberbox.engine.plan import Limits
from emberbox.engine.request import Prompt, RequestEvent, SamplingParams
from emberbox.model.batch import Span
from tests.helpers.nano import nano_llm

WORDS = "The keeper counted the lamps in the hall and wrote a letter about the weather. "
TINY = Limits(
    num_pages=6,
    num_slots=3,
    num_snapshots=4,
    prefill_tokens=100,
    max_model_len=256,
    snapshot_every=64,
    min_snapshot_tokens=16,
)


def engine_of(drafter=None, **changes) -> Engine:
    limits = replace(TINY, **changes)
    names = ("num_pages", "num_slots", "num_snapshots", "max_model_len")
    llm = nano_llm()
    memory = replace(llm.memory, **{name: getattr(limits, name) for name in names})
    return Engine(llm.network, memory, llm._detokenizer, drafter=drafter, limits=limits)


def ids(num_tokens: int, first: int = 0) -> tuple[int, ...]:
    """Tokens of plain words; other `first` tokens begin another text."""
    text = nano_llm().format.tokenizer.encode_template(WORDS * 20)
    return tuple([100 + first, *text][:num_tokens])


def params(max_tokens: int, **changes) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True, **changes)


def drain(engine: Engine) -> dict[int, list[RequestEvent]]:
    events: dict[int, list[RequestEvent]] = {}
    while engine.has_work:
        for event in engine.step():
            events.setdefault(event.request_id, []).append(event)
    return events


def tokens_of(events: list[RequestEvent]) -> list[int]:
    return [event.event.token_id for event in events]


def run(engine: Engine, token_ids, max_tokens: int, images=()) -> list[int]:
    """One request to its end."""
    engine.submit(0, Prompt(tuple(token_ids), tuple(images)), params(max_tokens))
    return tokens_of(drain(engine)[0])


def poison_free(engine: Engine) -> None:
    """A freed page or slot would else still hold what its next user forgets to write."""
    cache, scheduler = engine.runner.cache, engine.scheduler
    for tensor in (cache.latents, cache.pooled):
        tensor[:, scheduler.pool._free] = float("nan")
    for tensor in (cache.state, cache.conv, cache.ring_keys, cache.ring_gates):
        tensor[:, scheduler._free_slots] = float("nan")


def left_behind(engine: Engine, request_id: int) -> list[Tensor]:
    """Everything a running request has in the cache."""
    sequence, cache = engine.scheduler._sequences[request_id], engine.runner.cache
    span = Span(0, 1, sequence.num_computed, sequence.slot, sequence.pages)
    kda = [cache.read_kda(layer, span) for layer in range(cache.state.shape[0])]
    sparse = [cache.read_sparse(layer, span) for layer in range(cache.latents.shape[0])]
    found = [tensor for past in kda for tensor in (past.state, past.conv)]
    found += [t for past in sparse for t in (past.latents, past.pooled, past.keys, past.gates)]
    return [tensor.clone() for tensor in found]
