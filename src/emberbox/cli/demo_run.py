"""Runs the demonstration: a server on a free port in this process, the real client against it."""

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from emberbox.cli.demo_questions import Question, questions
from emberbox.cli.open_engine import input_modalities, open_llm
from emberbox.errors import EnvironmentProblem
from emberbox.server.app import create_app
from emberbox.server.listen import BackgroundServer, bind
from emberbox.server.worker import EngineWorker
from emberbox.settings import EngineSettings, ServeSettings

if TYPE_CHECKING:
    from openai import OpenAI

MAX_TOKENS = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One question asked. Times in seconds; the first token ends the reading of the prompt."""

    name: str
    question: str
    answer: str
    expected: str
    is_right: bool
    num_prompt_tokens: int
    num_completion_tokens: int
    first_token_seconds: float
    total_seconds: float

    @property
    def tokens_per_second(self) -> float:
        """Decode speed: tokens after the first over the time they took."""
        elapsed = self.total_seconds - self.first_token_seconds
        return (self.num_completion_tokens - 1) / elapsed if elapsed > 0 else 0.0

    def speed(self) -> str:
        """One line for people."""
        decode = f"{self.tokens_per_second:.1f} tokens/s over {self.num_completion_tokens} tokens"
        prefill = f"first token of a {self.num_prompt_tokens}-token prompt"
        return f"speed:    {decode}; {prefill} after {self.first_token_seconds:.2f} s"

    def to_dict(self) -> dict[str, object]:
        """All fields for JSON."""
        return {**asdict(self), "tokens_per_second": round(self.tokens_per_second, 2)}


def ask_all(
    folder: Path, settings: EngineSettings, show: Callable[[Answer], None]
) -> tuple[Answer, ...]:
    """Load, serve, ask every question in order. Raises EnvironmentProblem without `openai`."""
    try:
        from openai import DefaultHttpxClient, OpenAI
    except ImportError:
        raise EnvironmentProblem(
            "the demonstration asks through the package openai, which is not installed",
            hint="pip install openai",
        ) from None
    serve_settings = ServeSettings(port=0)
    llm = open_llm(folder, settings)
    answers: list[Answer] = []
    with EngineWorker(llm, max_waiting=serve_settings.max_waiting) as worker:
        app = create_app(worker, serve_settings, input_modalities=input_modalities(llm))
        bound = bind(serve_settings.host, serve_settings.port)
        # The server is on this machine: proxies of the environment must not be asked.
        with (
            BackgroundServer(app, bound) as server,
            DefaultHttpxClient(trust_env=False) as http,
            OpenAI(base_url=f"{server.url}/v1", api_key="none", http_client=http) as client,
        ):
            for question in questions():
                answers.append(_ask(client, llm.model_id, question))
                show(answers[-1])
    return tuple(answers)


def _ask(client: "OpenAI", model: str, question: Question) -> Answer:
    started = time.perf_counter()
    first_token: float | None = None
    text, usage = "", None
    message: Any = {"role": "user", "content": question.content}
    chunks = client.chat.completions.create(
        model=model,
        messages=[message],
        max_tokens=MAX_TOKENS,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    for chunk in chunks:
        first_token = first_token or time.perf_counter()
        usage = chunk.usage or usage
        text += "".join(choice.delta.content or "" for choice in chunk.choices)
    ended = time.perf_counter()
    return Answer(
        name=question.name,
        question=question.shown,
        answer=text,
        expected=question.expected,
        is_right=question.is_right(text),
        num_prompt_tokens=usage.prompt_tokens if usage else 0,
        num_completion_tokens=usage.completion_tokens if usage else 0,
        first_token_seconds=round((first_token or ended) - started, 4),
        total_seconds=round(ended - started, 4),
    )
