"""What the runner does beside running the network: content for measurements, choices of rows."""

from dataclasses import replace

import pytest
import torch

from emberbox.engine import runner as runner_module
from emberbox.engine.plan import Work
from emberbox.engine.runner import ModelRunner
from emberbox.errors import EnvironmentProblem
from emberbox.model.batch import MAX_VERIFY_TOKENS
from emberbox.model.cache import FP8
from emberbox.model.decode_step import MAX_ROWS
from tests.helpers.nano import nano_llm

SIZE = {"num_pages": 5, "num_slots": 3, "num_snapshots": 0}


def runner_of(latent_dtype=None):
    llm = nano_llm()
    return ModelRunner(llm.network, replace(llm.memory, **SIZE, latent_dtype=latent_dtype))


@pytest.mark.parametrize("latent_dtype", [None, FP8], ids=["wide", "fp8"])
def test_random_content_is_finite_and_only_where_it_is_asked_for(latent_dtype):
    cache = (runner := runner_of(latent_dtype)).cache
    paged = [each for each in (cache.latents, cache.pooled, cache.scales) if each is not None]
    kept = (cache.state, cache.conv, cache.ring_keys, cache.ring_gates)
    before = [tensor.float().clone() for tensor in (*paged, *kept)]
    runner.fill_random(1, (3, 0), seed=7)
    for tensor, old in zip((*paged, *kept), before, strict=True):
        new = tensor.float()
        changed = {i for i in range(new.shape[1]) if not torch.equal(new[:, i], old[:, i])}
        assert changed == ({0, 3} if any(tensor is each for each in paged) else {1})
        found = new[:, sorted(changed)]
        assert torch.isfinite(found).all()
        assert (found == 1).all() if tensor is cache.scales else found.std() > 0.05
    twin = runner_of(latent_dtype)
    twin.fill_random(1, (3, 0), seed=7)
    assert torch.equal(twin.cache.latents[:, 3].float(), cache.latents[:, 3].float())
    twin.fill_random(1, (3, 0), seed=8)
    assert not torch.equal(twin.cache.latents[:, 3].float(), cache.latents[:, 3].float())


@pytest.mark.parametrize(
    ("said", "error"),
    [("CUDA error: out of memory", EnvironmentProblem), ("misaligned address", RuntimeError)],
)
def test_only_missing_memory_is_told_as_such(monkeypatch, said, error):
    def fail(*_):  # a stand-in: a driver cannot be made to run out on purpose
        raise RuntimeError(said)

    monkeypatch.setattr(runner_module, "_decoder", fail)
    llm = nano_llm()
    with pytest.raises(error, match=said):
        ModelRunner(llm.network, replace(llm.memory, **SIZE), fixed_shapes=True)


def test_a_lone_image_token_at_the_end_of_a_prompt_keeps_its_picture():
    llm = nano_llm()
    token = llm.config.image_token_id
    generator = torch.Generator().manual_seed(5)
    features = {4: 0.1 * torch.randn(llm.config.text.hidden_size, generator=generator)}
    plain, fixed = (
        ModelRunner(llm.network, replace(llm.memory, **SIZE), fixed_shapes=kind)
        for kind in (False, True)
    )
    begin = Work(9, (31, 32, 33, 34), 0, 1, (2,), 0, samples=False)
    end = Work(9, (token,), 4, 1, (2,), 0, samples=True)
    found = []
    for runner in (plain, fixed):
        runner.forward([begin], {9: features})
        found.append(runner.forward([end], {9: features})[9].logits)
    assert torch.equal(found[0], found[1])
    plain.forward([begin], {})
    without = plain.forward([end], {})[9].logits
    assert (without - found[0]).abs().max() > 1e-2


def test_choices_of_more_rows_than_a_kernel_takes_belong_to_their_requests(monkeypatch):
    runner = runner_of()
    ops, taken = runner.network.ops, []

    def few_rows(logits):
        taken.append(len(logits))
        return ops.greedy_rows(logits)

    monkeypatch.setattr(runner.network, "ops", replace(ops, greedy_rows=few_rows))
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(90, runner.network.config.text.hidden_size, generator=generator)
    hidden[41] = torch.nan
    rows = MAX_VERIFY_TOKENS
    sampling = [(100 + i, rows * i, rows * i + rows) for i in range(90 // rows)]
    found = runner._sampled(hidden, sampling)
    assert list(found) == [request for request, _, _ in sampling]
    assert sum(taken) == rows * len(sampling) and max(taken) <= MAX_ROWS
    logits = runner.network.logits(hidden)
    for request, start, stop in sampling:
        if start <= 41 < stop:
            assert found[request].num_finite == 41 - start
            continue
        assert found[request].num_finite == rows
        assert found[request].greedy == tuple(logits[start:stop].argmax(-1).tolist())
