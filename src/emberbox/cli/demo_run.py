"""Runs the demonstration: a server on a free port in this process, the real client against it."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from emberbox.cli.chat_client import ChatClient, Reply, connect, need_openai
from emberbox.cli.demo_questions import Question, follow_up, questions
from emberbox.cli.loading import LoadScreen
from emberbox.cli.local_server import local_server
from emberbox.settings import EngineSettings

OPTIONS = {"max_tokens": 200, "temperature": 0}


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One question asked, and whether what came is right."""

    name: str
    question: str
    expected: str
    is_right: bool
    reply: Reply

    def to_dict(self) -> dict[str, object]:
        """All fields for JSON."""
        fields = {name: value for name, value in asdict(self).items() if name != "reply"}
        return {**fields, "answer": self.reply.content, **self.reply.to_dict()}


def ask_all(
    folder: Path, settings: EngineSettings, screen: LoadScreen, show: Callable[[Answer], None]
) -> tuple[Answer, ...]:
    """Load, serve, ask every question in order. Raises EnvironmentProblem without `openai`."""
    need_openai()
    answers: list[Answer] = []
    with local_server(folder, settings, screen) as url, connect(url, None) as client:
        listing, code, picture = questions()
        said: list[dict[str, object]] = []
        for question, before in ((listing, ()), (code, ()), (follow_up(), said), (picture, ())):
            answers.append(_ask(client, question, before))
            show(answers[-1])
            if question is code:
                said.append({"role": "user", "content": code.content})
                said.append({"role": "assistant", "content": answers[-1].reply.content})
    return tuple(answers)


def _ask(client: ChatClient, question: Question, before: Sequence[dict[str, object]]) -> Answer:
    asked: dict[str, object] = {"role": "user", "content": question.content}
    with client.ask([*before, asked], OPTIONS) as stream:
        for _ in stream:
            pass
    reply = stream.reply()
    return Answer(
        name=question.name,
        question=question.shown,
        expected=question.expected,
        is_right=question.is_right(reply.content),
        reply=reply,
    )
