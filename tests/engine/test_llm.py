"""LLM on the shipped, trained nano model: it answers, stops, streams, scores and refuses."""

import json
from itertools import islice, zip_longest

import numpy as np
import pytest
import torch
from PIL import Image

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
from emberbox.settings import EngineSettings
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


def test_a_stop_string_inside_the_thought_leaves_no_text():
    llm = nano_llm()
    question = [{"role": "user", "content": "What is 17 plus 25?"}]
    whole = llm.chat(question)
    assert whole.is_own_end
    cut = llm.chat(question, SamplingParams(stop=(whole.reasoning[-4:],)))
    assert (cut.finish, cut.is_own_end) == (FinishReason.STOP, False)
    assert (cut.text, cut.reasoning) == ("", whole.reasoning[:-4])


def test_a_chat_beyond_the_context_is_refused_with_both_numbers():
    llm = nano_llm()
    picture = {"type": "image", "image": Image.new("RGB", (2400, 2400))}
    with pytest.raises(ContextLengthError, match=r"holds 16384 tokens and the prompt has 22\d\d\d"):
        llm.prepare_chat([{"role": "user", "content": [picture] * 3}])


def test_what_a_token_adds_to_a_reply():
    llm = nano_llm()
    special = llm.format.tokenizer.special_id
    assert llm.reply_bytes(special("</think>")) == b"</think>"
    assert llm.reply_bytes(special("<|user|>")) == b""
    (letter,) = llm.format.tokenizer.encode("a")
    assert llm.reply_bytes(letter) == b"a"


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


def test_streams_read_in_turn_give_what_they_give_alone():
    llm = nano_llm()
    prompts = [llm.prepare_chat(QUESTION, enable_thinking=False), llm.prepare_chat(QUESTION)]
    prompts.append(llm.prepare("The keeper counted the lamps in the hall"))
    params = SamplingParams(max_tokens=15)
    alone = [list(llm.stream(prompt, params)) for prompt in prompts]
    streams = [llm.stream(prompt, params) for prompt in prompts]
    in_turn = list(zip_longest(*streams))
    assert [[e for e in events if e] for events in zip(*in_turn, strict=True)] == alone
    assert not llm.has_work


def test_scores_leave_running_streams_alone_and_each_other():
    llm = nano_llm()
    prompt = llm.prepare_chat(QUESTION, enable_thinking=False)
    expected = list(llm.stream(prompt, SamplingParams()))
    ids, others = list(range(100, 160)), list(range(500, 560))
    whole = [llm.score_all(ids), llm.score_all(others)]
    events, rows = [], ([], [])
    scores = llm.score(ids, chunk=5), llm.score(others, chunk=5)
    for event in llm.stream(prompt, SamplingParams()):
        events.append(event)
        for score, kept in zip(scores, rows, strict=True):
            kept += list(islice(score, 1))
    assert events == expected
    for score, kept, each in zip(scores, rows, whole, strict=True):
        assert kept
        assert (torch.cat([*kept, *score]) - each).abs().max() < 2e-4


def test_a_stream_that_is_closed_early_frees_its_pages():
    llm = nano_llm()
    llm.engine.scheduler.snapshots.clear()
    prompt = llm.prepare_chat(QUESTION)
    stream = llm.stream(prompt, SamplingParams())
    next(stream)
    assert (llm.stats().num_running, llm.stats().pages_used) == (1, 1)
    stream.close()
    assert (llm.stats().num_running, llm.stats().pages_used) == (0, 0)
    assert not llm.has_work
    assert not llm._mail


def test_eight_prompts_together_equal_one_by_one():
    llm = nano_llm()
    texts = [f"{QUESTION[0]['content']} The keeper counted {n} lamps" for n in range(8)]
    for params in (
        SamplingParams(max_tokens=10),
        SamplingParams(max_tokens=10, temperature=0.7, top_k=8, seed=4),
    ):
        together = llm.generate(texts, params)
        alone = [llm.generate(text, params)[0] for text in texts]
        assert [(d.token_ids, d.text, d.finish) for d in together] == [
            (d.token_ids, d.text, d.finish) for d in alone
        ]
        assert len({d.token_ids for d in together}) > 1


def test_one_bad_prompt_of_several_is_refused_before_any_work():
    llm = nano_llm()
    before = llm.stats()
    with pytest.raises(RequestError, match="token 4096 at position 1"):
        llm.generate([[5, 6], [5, 4096], [7]])
    assert llm.stats() == before
    assert not llm.has_work


def test_a_completion_tells_how_much_of_its_prompt_was_cached():
    llm = nano_llm()
    llm.engine.scheduler.snapshots.clear()
    question = [{"role": "user", "content": "The lamps in the hall. " * 20 + "What is 12 + 7?"}]
    first = llm.chat(question, enable_thinking=False)
    assert (first.num_cached_tokens, first.num_prompt_tokens > 100) == (0, True)
    turns = [
        *question,
        {"role": "assistant", "content": first.text},
        {"role": "user", "content": "Count from 3 to 9."},
    ]
    second = llm.chat(turns, enable_thinking=False)
    suffix = llm.prepare_chat(question, enable_thinking=False).num_suffix_tokens
    assert second.num_cached_tokens >= first.num_prompt_tokens - suffix


def test_a_folder_without_a_tokenizer_can_be_scored(tmp_path):
    for file in [*NANO.glob("*.safetensors"), NANO / "config.json", NANO / INDEX_NAME]:
        (tmp_path / file.name).symlink_to(file)
    llm = LLM(tmp_path, EngineSettings(dtype="float32", device="cpu", max_model_len=64))
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
        LLM(NANO, EngineSettings(**change))


def test_bfloat16_answers_too():
    assert (
        LLM(NANO, EngineSettings(dtype="bfloat16", max_model_len=512)).chat(QUESTION).text == ANSWER
    )


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


@pytest.mark.parametrize(("asked", "threads"), [(0, 1), (2, 2)])
def test_threads_are_those_asked_for_or_one_for_a_small_model(asked, threads):
    former = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        LLM(NANO, EngineSettings(device="cpu", num_threads=asked, max_model_len=64))
        assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(former)
