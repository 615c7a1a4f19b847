"""The prompts that schedules ask: they share prefixes, have pictures, or are next turns."""

from dataclasses import dataclass, replace
from random import Random

import numpy as np
from PIL import Image

from emberbox.chat.media import Patches
from emberbox.engine.llm import LLM
from emberbox.engine.request import Prompt, SamplingParams

MAX_PROMPT = 166
MOST_TOKENS = 24  # of a reply
IMAGE_TOKEN = 4090  # of ember-nano
COLOURS = ((220, 30, 30), (30, 60, 220), (40, 170, 60), (240, 220, 40), (20, 20, 20))
WHO = ("The keeper", "A visitor", "The older clerk", "One of the guides", "The night crew")
DID = (
    "wrote a short letter about the weather and put it on the shelf",
    "carried the wooden boxes up the stairs and opened every window",
    "counted the lamps in the hall and turned off those not needed",
    "found the old map behind the clock and showed it to the others",
    "made tea for everyone and talked about the long road to the hills",
    "read the first chapter aloud while the rain fell on the roof",
)
QUESTIONS = (
    "What is 12 + 7?",
    "Count from 3 to 9.",
    'List the numbers 4 to 11 as JSON {"numbers":[...]}.',
    "What is 31 - 8?",
)
SAMPLED = SamplingParams(temperature=0.8, top_k=8, seed=3, ignore_eos=True)
PENALISED = SamplingParams(
    temperature=0.7, top_p=0.9, seed=11, frequency_penalty=0.3, repetition_penalty=1.1
)


@dataclass(frozen=True, slots=True)
class Ask:
    """A request."""

    prompt: Prompt
    params: SamplingParams

    @property
    def images(self) -> tuple[Patches, ...]:
        return self.prompt.images

    @property
    def end_of_images(self) -> int:
        """Tokens up to the last one of a picture. 0 without pictures."""
        if not self.images:
            return 0
        return max(i for i, each in enumerate(self.prompt.token_ids) if each == IMAGE_TOKEN) + 1


class World:
    """Prompts made from a seed. Of a family any two share a prefix."""

    def __init__(self, seed: int, llm: LLM) -> None:
        self.llm, self.rng = llm, Random(f"world {seed}")
        texts = [self._text_family() for _ in range(3)]
        self.families = [*texts, self._picture_family(), self._picture_family()]

    def next_turn(self, ask: Ask, reply: list[int]) -> Ask | None:
        """The prompt, its reply and a next question, which depends on these alone; None: too long.

        A reply that was cut by its budget is gone on with as it stands.
        """
        tokenizer = self.llm.format.tokenizer
        question = QUESTIONS[(len(reply) + len(ask.prompt.token_ids)) % len(QUESTIONS)]
        more = tokenizer.encode_template(f"<|user|>{question}<|assistant|><think>")
        ends = self.llm.config.text.eos_token_ids
        kept = reply[:-1] if reply[-1] in ends else reply
        token_ids = (*ask.prompt.token_ids, *kept, *more)
        if len(token_ids) > MAX_PROMPT:
            return None
        params = SamplingParams(max_tokens=MOST_TOKENS)
        return Ask(Prompt(token_ids, ask.images, num_suffix_tokens=2), params)

    def _text_family(self) -> list[Ask]:
        """A conversation, cuts of it, edits in its middle; one of them is sampled."""
        question = self.rng.choice(QUESTIONS)
        whole = self.llm.prepare_chat([{"role": "user", "content": f"{self._story(4)} {question}"}])
        silent = self.llm.prepare_chat(
            [{"role": "user", "content": f"{self._last_story} {question}"}], enable_thinking=False
        )
        ids = whole.token_ids
        # Just below the end of a page, so that a reply needs another one.
        cuts = [self.rng.choice([58, 61]), 64, self.rng.randrange(20, len(ids))]
        at, other = self.rng.randrange(20, len(ids) - 10), self.rng.randrange(300, 3000)
        edited = (*ids[:at], other, *ids[at + 1 :])
        ways = (SamplingParams(ignore_eos=True), SAMPLED, SamplingParams(ignore_eos=True))
        cut_asks = [Ask(Prompt(ids[:cut]), way) for cut, way in zip(cuts, ways, strict=True)]
        return [
            Ask(whole, SamplingParams()),
            Ask(whole, self.rng.choice([SAMPLED, PENALISED])),
            Ask(silent, SamplingParams()),
            *cut_asks,
            Ask(Prompt(edited), SamplingParams()),
        ]

    def _picture_family(self) -> list[Ask]:
        """Two pictures behind the same token ids, and each with other words behind it."""
        texts = [f"{self._story(3)} Describe the image."]
        texts.append(f"{self._last_story} What colour is it?")
        pictures = [_picture(colour) for colour in self.rng.sample(COLOURS, 2)]
        prompts = [self._with_picture(picture, text) for text in texts for picture in pictures]
        asks = [Ask(prompt, SamplingParams()) for prompt in prompts]
        assert asks[0].prompt.token_ids == asks[1].prompt.token_ids
        cuts = [Prompt(prompt.token_ids[:60], prompt.images) for prompt in prompts[:2]]
        cut_asks = [Ask(cut, SamplingParams(ignore_eos=True)) for cut in cuts]
        return [*asks, *cut_asks, replace(asks[0], params=SAMPLED)]

    def _with_picture(self, picture: Image.Image, text: str) -> Prompt:
        content = [{"type": "image", "image": picture}, {"type": "text", "text": text}]
        return self.llm.prepare_chat([{"role": "user", "content": content}])

    def _story(self, num_sentences: int) -> str:
        chosen = [f"{self.rng.choice(WHO)} {self.rng.choice(DID)}." for _ in range(num_sentences)]
        self._last_story = " ".join(chosen)
        return self._last_story


def _picture(colour: tuple[int, int, int]) -> Image.Image:
    pixels = np.full((84, 112, 3), 235, dtype=np.uint8)
    pixels[20:64, 28:84] = colour
    return Image.fromarray(pixels)
