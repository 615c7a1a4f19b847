"""LLM on the shipped, trained nano model: it answers, stops, streams, scores and refuses."""

import json

import numpy as np
import pytest
import torch

from emberbox.engine.llm import LLM
from emberbox.engine.request import FinishReason, Prompt, SamplingParams
from emberbox.errors import (
    CheckpointError,
    ContextLengthError,
    LoadRefused,
    NonFiniteLogits,
    RequestError,
    SettingsError,
)
from emberbox.store.checkpoint import INDEX_NAME
from tests.helpers.nano import NANO, nano_llm

QUESTION = [{"role": "user", "content": 'List the numbers 3 to 9 as JSON {"numbers":[...]}.'}]
ANSWER = '{"numbers":[3,4,5,6,7,8,9]}'


def test_chat_answers_and_stops_by_itself():
    done = nano_llm().chat(QUESTION)
    assert done.text == ANSWER
    assert done.finish is FinishReason.STOP
    assert done.token_ids[-1] in nano_llm().config.text.eos_token_ids
    assert done.num_prompt_tokens == len(nano_llm().prepare_chat(QUESTION).token_ids)


def test_reasoning_is_apart_from_the_text():
    question = [{"role": "user", "content": "What is 12 + 7?"}]
    thinking = nano_llm().chat(question)
    assert thinking.text.strip() == "19"
    assert thinking.reasoning
    assert "think>" not in thinking.text + thinking.reasoning
    silent = nano_llm().chat(question, enable_thinking=False)
    assert silent.reasoning is None


def test_stream_gives_the_same_text_token_by_token():
    llm = nano_llm()
    prompt = llm.prepare_chat(QUESTION, enable_thinking=False)
    events = list(llm.stream(prompt, SamplingParams()))
    assert "".join(e.text for e in events) == ANSWER
    assert [e.finish for e in events[:-1]] == [None] * (len(events) - 1)
    assert events[-1].finish is FinishReason.STOP


def test_max_tokens_cuts_with_length():
    prompt = nano_llm().prepare_chat(QUESTION, enable_thinking=False)
    done = nano_llm().complete(prompt, SamplingParams(max_tokens=3))
    assert len(done.token_ids) == 3
    assert done.finish is FinishReason.LENGTH
    assert ANSWER.startswith(done.text)


def test_a_stop_string_ends_before_itself_across_token_borders():
    prompt = nano_llm().prepare_chat(QUESTION, enable_thinking=False)
    done = nano_llm().complete(prompt, SamplingParams(stop=("5,6",)))
    assert done.text == '{"numbers":[3,4,'
    assert done.finish is FinishReason.STOP


def test_a_sampled_reply_repeats_with_its_seed():
    params = SamplingParams(max_tokens=12, temperature=3.0, seed=5, ignore_eos=True)
    first, second = nano_llm().generate(["<|user|>Hello", "<|user|>Hello"], params)
    assert first == second
    assert len(first.token_ids) == 12
    other = SamplingParams(max_tokens=12, temperature=3.0, seed=6, ignore_eos=True)
    assert nano_llm().generate("<|user|>Hello", other)[0].token_ids != first.token_ids


def test_an_abort_ends_after_one_step():
    llm = nano_llm()
    asked = iter([False, False, True])
    prompt = llm.prepare_chat(QUESTION, enable_thinking=False)
    events = list(llm.stream(prompt, SamplingParams(), lambda: next(asked)))
    assert [e.finish for e in events] == [None, None, FinishReason.ABORT]


@pytest.mark.parametrize("chunk", [1, 7, 512])
def test_score_does_not_depend_on_the_chunk(chunk):
    ids = list(range(100, 190))
    whole = nano_llm().network.full(torch.tensor([ids]))[0]
    parts = list(nano_llm().score(ids, chunk=chunk))
    assert [p.shape[0] for p in parts] == [min(chunk, 90 - i) for i in range(0, 90, chunk)]
    assert parts[0].dtype == torch.float32
    assert (torch.cat(parts) - whole).abs().max() < 2e-4


def test_generate_equals_greedy_by_score():
    prompt = nano_llm().prepare_chat(QUESTION, enable_thinking=False)
    done = nano_llm().complete(prompt, SamplingParams())
    ids = [*prompt.token_ids, *done.token_ids]
    best = nano_llm().score_all(ids).argmax(-1).tolist()
    assert best[len(prompt.token_ids) - 1 : -1] == list(done.token_ids)


def test_score_does_not_switch_gradients_off_for_its_caller():
    parts = nano_llm().score(list(range(100, 120)), chunk=8)
    next(parts)
    assert not torch.is_inference_mode_enabled()
    assert torch.is_grad_enabled()


def test_a_prompt_that_lost_its_cache_to_another_is_refused_not_mixed_up():
    llm = nano_llm()
    first, second = llm.score([5] * 60, chunk=50), llm.score([7] * 60, chunk=50)
    next(first)
    kept = [next(second)]
    with pytest.raises(RequestError, match="another prompt took the cache"):
        next(first)
    kept.append(next(second))
    assert torch.equal(torch.cat(kept), torch.cat(list(llm.score([7] * 60, chunk=50))))
    stream = llm.stream(llm.prepare_chat(QUESTION), SamplingParams())
    next(stream)
    llm.chat(QUESTION)
    with pytest.raises(RequestError, match="another prompt took the cache"):
        list(stream)


def test_a_folder_without_a_tokenizer_can_be_scored(tmp_path):
    for file in [*NANO.glob("*.safetensors"), NANO / "config.json", NANO / INDEX_NAME]:
        (tmp_path / file.name).symlink_to(file)
    llm = LLM(tmp_path, dtype="float32", device="cpu", max_model_len=64)
    ids = list(range(100, 120))
    assert torch.equal(llm.score_all(ids), nano_llm().score_all(ids))
    with pytest.raises(CheckpointError, match="tokenizer"):
        llm.chat(QUESTION)


def test_too_long_is_refused_with_both_numbers():
    llm = nano_llm()
    prompt = Prompt(tuple([5] * 16_000))
    with pytest.raises(ContextLengthError, match=r"16384 .* 16000 .* 500"):
        next(llm.stream(prompt, SamplingParams(max_tokens=500)))
    with pytest.raises(ContextLengthError, match=r"16385"):
        list(llm.score([5] * 16_385))
    with pytest.raises(ContextLengthError):
        llm.check(Prompt(tuple([5] * 16_384)), SamplingParams())


def test_tokens_outside_the_vocabulary_are_refused_by_place():
    with pytest.raises(RequestError, match="token 4096 at position 2"):
        nano_llm().generate([[1, 2, 4096]])
    with pytest.raises(RequestError, match="no tokens"):
        nano_llm().generate([[]])


def test_image_tokens_without_images_are_refused():
    token = nano_llm().config.image_token_id
    with pytest.raises(RequestError, match="1 image tokens, its images make 0"):
        nano_llm().generate([[1, token, 2]])


@pytest.mark.parametrize(
    "change", [{"dtype": "float8"}, {"max_model_len": 0}, {"max_model_len": 16_385}]
)
def test_settings_out_of_range_are_refused_before_loading(change):
    with pytest.raises(SettingsError):
        LLM(NANO, **change)


def test_bfloat16_answers_too():
    assert LLM(NANO, dtype="bfloat16", max_model_len=512).chat(QUESTION).text == ANSWER


def damaged(tmp_path, name, change):
    """The nano folder with one JSON file changed."""
    for file in NANO.iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / name).unlink()
    document = json.loads((NANO / name).read_text("utf-8"))
    change(document)
    (tmp_path / name).write_text(json.dumps(document), "utf-8")
    return tmp_path


def test_files_of_different_models_are_refused_with_every_reason(tmp_path):
    folder = damaged(tmp_path, "config.json", lambda c: c.update(image_token_id=5))
    (folder / "preprocessor_config.json").unlink()
    document = json.loads((NANO / "preprocessor_config.json").read_text("utf-8"))
    (folder / "preprocessor_config.json").write_text(json.dumps(document | {"patch_size": 16}))
    (folder / "chat_template.jinja").unlink()
    (folder / "chat_template.jinja").write_text("[gMASK]<sop>hello")
    with pytest.raises(LoadRefused) as caught:
        LLM(folder).chat(QUESTION)
    assert caught.value.reasons == (
        "<|image|> is token 4090 in the tokenizer, image_token_id is 5",
        "preprocessor patch_size is 16, vision_config says 14",
        "the chat template leaves out the text of a user's message",
    )


def test_a_config_that_overflows_the_network_gives_no_answer(tmp_path):
    def change(config):
        config["text_config"]["hc_eps"] = 1e-5

    llm = LLM(damaged(tmp_path, "config.json", change))
    llm.network.norm.weight.fill_(float("nan"))
    with pytest.raises(NonFiniteLogits):
        llm.chat(QUESTION)


def test_token_ids_of_any_integer_type_are_taken_and_booleans_are_not():
    params = SamplingParams(max_tokens=3)
    ids = [5, 6, 7]
    expected = nano_llm().generate(ids, params)
    assert nano_llm().generate(np.array(ids), params) == expected
    assert nano_llm().generate([np.array(ids)], params) == expected
    with pytest.raises(RequestError, match="true or false"):
        nano_llm().generate([[True, 2]], params)
