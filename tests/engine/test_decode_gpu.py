"""Decoding on a GPU through CUDA graphs: the same as calls, and as the network elsewhere."""

import pytest
import torch

from emberbox.engine.decode_runner import DecodeRunner
from emberbox.engine.llm import LLM
from emberbox.engine.plan import Work
from emberbox.engine.request import SamplingParams
from emberbox.model.batch import Batch, SequenceRows
from emberbox.model.cache import FP8, CacheSize
from emberbox.ops.numerics import relative_error
from emberbox.ops.scratch import _pieces
from emberbox.settings import EngineSettings
from tests.engine.engine_schedules import run_schedules
from tests.helpers.gpu import gpu_or_skip
from tests.helpers.nano import NANO

pytestmark = pytest.mark.gpu
BASE2 = NANO.with_name("ember-nano-base2")
LENGTHS = (1, 63, 66, 130)
# Of logits, against the same network in float32 on the CPU.
TOLERANCE = {"float32": 4e-3, "bfloat16": 4e-2}
QUESTIONS = ("Count from 3 to 9.", "Count down from 12 to 4.", "Say hello.")
SMALL = {"max_model_len": 512, "cache_tokens": 4096, "snapshot_bytes": 0, "max_running": 4}
SCHEDULES = 200


def llm_of(folder, dtype, device="cuda"):
    return LLM(folder, EngineSettings(device=device, dtype=dtype, **SMALL))


def tokens(num, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(200, (num,), generator=generator).tolist()


@pytest.mark.parametrize("folder", [NANO, BASE2], ids=["plain", "base2"])
@pytest.mark.parametrize("latents", [None, FP8], ids=["wide", "fp8"])
@pytest.mark.parametrize("dtype", list(TOLERANCE))
@torch.inference_mode()
def test_steps_equal_calls_and_the_network_on_a_cpu(folder, latents, dtype):
    device = gpu_or_skip()
    network = llm_of(folder, dtype).network
    truth = llm_of(folder, "float32", "cpu").network
    cache = network.new_cache(CacheSize(32, 5), latents)
    runner = DecodeRunner(network, cache, max_running=4, max_model_len=256)
    assert len(runner._graphs) == len(runner.shapes) == 12
    pages = [tuple(range(4 * b + 3, 4 * b - 1, -1)) for b in range(4)]
    for b, n in enumerate(LENGTHS):
        rows = [SequenceRows(tokens(n, b), 0, b, pages[b])]
        network.forward(Batch.of(rows, device), cache)
    for members, num in (((0,), 1), ((1, 3), 3), ((0, 1, 2), 2), ((3,), 8), ((0, 1, 2, 3), 8)):
        works = [
            Work(b, tuple(tokens(num, b + 9)), LENGTHS[b], b, pages[b], num - 1, samples=True)
            for b in members
        ]
        states = [tensor.clone() for tensor in cache.of_slots]
        found = {b: each.logits.clone() for b, each in runner.run(works).items()}
        cache.commit({b: 0 for b in members if num > 1})
        for tensor, before in zip(cache.of_slots, states, strict=True):
            tensor.copy_(before)
        again = called(runner, works)
        cache.commit({b: 0 for b in members if num > 1})
        for tensor, before in zip(cache.of_slots, states, strict=True):
            tensor.copy_(before)
        allowed = TOLERANCE[dtype] * (1 if latents is None else 10)
        for b in members:
            assert torch.equal(found[b], again[b]), "a graph and its calls differ"
            ids = torch.tensor([tokens(LENGTHS[b], b) + tokens(num, b + 9)])
            expected = truth.full(ids)[0, -num:]
            assert relative_error(found[b].cpu(), expected) < allowed


def called(runner, works):
    """The same step without its graph."""
    graphs, runner._graphs = runner._graphs, {}
    try:
        return {b: each.logits.clone() for b, each in runner.run(works).items()}
    finally:
        runner._graphs = graphs


@pytest.mark.parametrize("folder", [NANO, BASE2], ids=["plain", "base2"])
def test_answers_are_those_of_the_cpu(folder):
    gpu_or_skip()
    greedy = SamplingParams(max_tokens=48)
    here, there = llm_of(folder, "float32"), llm_of(folder, "float32", "cpu")
    for question in QUESTIONS:
        messages = [{"role": "user", "content": question}]
        assert here.chat(messages, greedy).text == there.chat(messages, greedy).text


def test_what_a_draw_needs_is_taken_at_start():
    device = gpu_or_skip()
    _pieces.pop(("sample", torch.int64, device), None)
    llm = llm_of(NANO, "bfloat16")
    taken = _pieces["sample", torch.int64, device]
    llm.chat([{"role": "user", "content": "Say hello."}], SamplingParams(temperature=1, top_p=0.9))
    assert _pieces["sample", torch.int64, device] is taken


@pytest.mark.timeout(900)
def test_random_schedules_give_each_request_its_own_reply():
    gpu_or_skip()
    counters = run_schedules(0, SCHEDULES, llm=LLM(NANO, EngineSettings(dtype="float32")))
    print(dict(counters))
    assert counters["schedules"] == SCHEDULES
    assert counters["accepted drafts"] > 500
    assert counters["preemptions"] > 50
