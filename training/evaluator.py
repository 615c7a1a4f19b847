"""One piece of an evaluation at a time: a job goes in, counts that JSON can hold come out.

What a job gives depends on the checkpoint and the job alone, not on the process that does it or on
what that process did before.
"""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache, cached_property
from pathlib import Path

import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer

from emberbox.engine.llm import LLM
from emberbox.model.config import Glm5NextConfig
from emberbox.model.layers import Operand
from emberbox.model.weights import parameters_from_dict
from emberbox.ops.table import bind_all
from emberbox.settings import EngineSettings
from emberbox.store.checkpoint import open_checkpoint
from training.context import Context
from training.data.cases import CaseMaker
from training.data.text import TOKENIZER, Text, held_out
from training.export import checkpoint_tensors
from training.judges import GraphJudge, Judge, LlmJudge
from training.measures import selection_recall, text_figures, with_random_indexer
from training.network import TrainingNetwork
from training.parameters import released, stacked
from training.pointwise import Pointwise
from training.shape import config_json
from training.skills import SKILLS, Skill, Verdict
from training.state import load_weights

RECALL_TOKENS = 4 * 1024  # of text on which the choice of pools is compared
CHUNK, LONG_CHUNK = 100, 20  # cases of one job; of texts above 1,000 tokens
CPU_TOKENS, GPU_TOKENS = 4096, 32768  # of one batch on the graph
TRAINED, RANDOM, DENSE = "trained", "random", "dense"  # indexer: as it is, as it began, unused
LOOK_UPS = ("retrieval_1000", "retrieval_4000")  # judged with each indexer
LOOK_UP_ITEMS = 20
DRAFTED = ("count_json", "count_aloud", "lists")  # JSON and counting answers: chains of drafts


@dataclass(frozen=True, slots=True)
class Setup:
    """What is evaluated, and on what. `through`: the judge of the skills, "llm" or "graph"."""

    folder: Path
    through: str
    device: str
    is_wide: bool = True  # float32 activations

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32 if self.is_wide or self.device == "cpu" else torch.bfloat16

    @property
    def activations(self) -> str:
        return str(self.dtype).removeprefix("torch.")


@dataclass(frozen=True, slots=True)
class Job:
    """`kind`: "skill" by the judge of the setup, "graph" a skill by the training graph, "text",
    "recall". `what`: skill or kind of text. Cases `first` .. `last` - 1."""

    kind: str
    what: str = ""
    indexer: str = TRAINED
    first: int = 0
    last: int = 0

    @property
    def name(self) -> str:
        return "/".join(map(str, (self.kind, self.what, self.indexer, self.first, self.last)))

    @property
    def cost(self) -> int:
        """Roughly, in tokens: the dearest jobs go first, so that processes end together."""
        if self.kind == "text":
            return 100_000
        skill = SKILL_OF.get(self.what)
        return 1 if skill is None else (self.last - self.first) * max(100, skill.length)


SKILL_OF = {skill.name: skill for skill in SKILLS}


def skill_jobs(skills: Iterable[Skill], kind: str = "skill", indexer: str = TRAINED) -> list[Job]:
    """All items of `skills`, in pieces."""
    out = []
    for skill in skills:
        step = LONG_CHUNK if skill.length > 1000 else CHUNK
        out += [
            Job(kind, skill.name, indexer, first, min(first + step, skill.items))
            for first in range(0, skill.items, step)
        ]
    return out


def beside_jobs(kinds: Iterable[str], items: int | None = None) -> list[Job]:
    """What the training graph says beside the skills."""
    jobs = [Job("text", kind, indexer) for kind in kinds for indexer in (TRAINED, RANDOM, DENSE)]
    drafted = [SKILL_OF[name] for name in DRAFTED]
    jobs += skill_jobs([replace(s, items=min(items or s.items, s.items)) for s in drafted], "graph")
    most = min(items or LOOK_UP_ITEMS, LOOK_UP_ITEMS)
    look_ups = [replace(SKILL_OF[name], items=most) for name in LOOK_UPS]
    for indexer in (TRAINED, RANDOM, DENSE):
        jobs += skill_jobs(look_ups, "graph", indexer)
    return [*jobs, Job("recall", "prose")]


class Evaluator:
    """Models and data, each made when a job first needs it."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        if setup.device == "cpu":
            torch.set_num_threads(1)

    def run(self, job: Job) -> object:
        if job.kind == "text":
            network = self._untrained if job.indexer == RANDOM else self._network
            ids = self._text.kinds[job.what]
            return asdict(text_figures(network, ids, dense=job.indexer == DENSE))
        if job.kind == "recall":
            return self._recall(job.what)
        skill = SKILL_OF[job.what]
        cases = [self._maker.case(skill.case, i, skill.length) for i in range(job.first, job.last)]
        judge = self._judge if job.kind == "skill" else self._graph_judge(job.indexer)
        return [verdict_json(verdict) for verdict in judge.judge(cases)]

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        return Tokenizer.from_file(str(TOKENIZER))

    @cached_property
    def _text(self) -> Text:
        return held_out(self._tokenizer)

    @cached_property
    def _maker(self) -> CaseMaker:
        return CaseMaker(self._tokenizer, self._text)

    @cached_property
    def _judge(self) -> Judge:
        if self.setup.through == "graph":
            return self._graph_judge(TRAINED)
        dtype = self.setup.activations
        settings = EngineSettings(device=self.setup.device, dtype=dtype)
        return LlmJudge(LLM(self.setup.folder, settings))

    def _graph_judge(self, indexer: str) -> GraphJudge:
        network = self._untrained if indexer == RANDOM else self._network
        tokens = CPU_TOKENS if self.setup.device == "cpu" else GPU_TOKENS
        return GraphJudge(network, dense=indexer == DENSE, tokens=tokens)

    @cached_property
    def _context(self) -> Context:
        return graph_context(self.setup.folder, torch.device(self.setup.device), self.setup.dtype)

    @cached_property
    def _network(self) -> TrainingNetwork:
        return TrainingNetwork(self._context)

    @cached_property
    def _untrained(self) -> TrainingNetwork:
        return TrainingNetwork(with_random_indexer(self._context))

    def _recall(self, kind: str) -> list[float]:
        ctx = self._context
        operands: dict[str, Operand] = dict(
            parameters_from_dict(ctx.config, released(ctx.params), dtype=torch.float32)
        )
        ops = bind_all(torch.device(self.setup.device))
        return selection_recall(ctx.config, operands, ops, self._text.kinds[kind][:RECALL_TOKENS])


def run_job(setup: Setup, job: Job) -> object:
    """What a worker process is asked for."""
    return _evaluator(setup).run(job)


@cache
def _evaluator(setup: Setup) -> Evaluator:
    return Evaluator(setup)


def verdict_json(verdict: Verdict) -> list[object]:
    return [*map(int, (verdict.held_out, verdict.passed, verdict.stopped, verdict.starts)),
            list(verdict.chains)]  # fmt: skip


def verdict_of(raw: Sequence[object]) -> Verdict:
    """The inverse of `verdict_json`."""
    held, passed, stopped, starts, chains = raw
    if not isinstance(starts, int) or not isinstance(chains, list):
        raise TypeError(f"{raw!r} is no verdict")
    return Verdict(bool(held), bool(passed), bool(stopped), starts, tuple(chains))


def graph_context(folder: Path, device: torch.device, dtype: torch.dtype) -> Context:
    """The training graph's parameters from a checkpoint folder or a run folder.

    A run's matrices are rounded to BF16 first: what is judged is what is exported.
    """
    if any(folder.glob("weights-*.safetensors")):
        config = Glm5NextConfig.from_dict(config_json())
        tensors = checkpoint_tensors(config, load_weights(folder))
    else:
        checkpoint = open_checkpoint(folder)
        config = Glm5NextConfig.from_dict(checkpoint.config, checkpoint.mtp_config)
        files = sorted({info.file for info in checkpoint.tensors.values()})
        tensors = {name: t for file in files for name, t in load_file(file).items()}
    params = {name: tensor.to(device) for name, tensor in stacked(tensors).items()}
    return Context(config, params, Pointwise(), dtype)


def weight_hashes(folder: Path) -> dict[str, str]:
    """SHA-256 of what answers depend on: weights, config, tokenizer and preprocessor."""
    names = ("config.json", "tokenizer.json", "preprocessor_config.json")
    files = [*folder.glob("*.safetensors"), *(folder / name for name in names)]
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(files)
        if path.is_file() and not path.name.startswith("optimiser")
    }
