"""The skill table of a checkpoint or a run:

    python -m training.evaluate models/ember-nano [--through graph|llm] [--items 400] [--json FILE]

`graph` judges on the training graph, many cases at once, and adds drafts, held-out text, the
indexer and the experts; `llm` judges through emberbox.LLM. Both judge by teacher forcing.
Greedy throughout; items are those of the purpose `evaluation`, which training never uses.
"""

import argparse
import json
import logging
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer

from emberbox.engine.llm import LLM
from emberbox.model.config import Glm5NextConfig
from emberbox.model.layers import Operand
from emberbox.model.weights import parameters_from_dict
from emberbox.ops.table import bind_all
from emberbox.store.checkpoint import open_checkpoint
from training.context import Context
from training.data.cases import HELD_OUT_OF_TEN, CaseMaker
from training.data.seeds import Purpose
from training.data.text import TOKENIZER, Text, held_out
from training.export import checkpoint_tensors
from training.judges import GraphJudge, Judge, LlmJudge
from training.measures import selection_recall, text_figures, with_random_indexer
from training.network import TrainingNetwork
from training.parameters import released, stacked
from training.pointwise import Pointwise
from training.shape import config_json
from training.skills import SKILLS, STOPS_BAR, Skill, SkillResult, stops
from training.state import load_weights

log = logging.getLogger("training.evaluate")

RECALL_TOKENS = 4 * 1024  # of text on which the choice of pools is compared
INDEXER_SKILLS = ("retrieval_1000", "retrieval_4000")
INDEXER_ITEMS = 50


def select(names: Sequence[str], items: int | None, *, ci: bool) -> list[Skill]:
    """Skills whose name begins with one of `names` (all if there is none), `items` of each.

    Raises ValueError for a name that begins none.
    """
    for name in names:
        if not any(skill.name.startswith(name) for skill in SKILLS):
            raise ValueError(f"no skill begins with {name!r}")
    chosen = [s for s in SKILLS if not names or s.name.startswith(tuple(names))]
    chosen = [skill for skill in chosen if skill.in_ci or not ci]
    return [replace(s, items=min(items, s.items) if items else s.items) for s in chosen]


def run_skills(judge: Judge, maker: CaseMaker, skills: Sequence[Skill]) -> list[SkillResult]:
    """One result per skill; item numbers 0 .. items - 1."""
    results = []
    for skill in skills:
        cases = [maker.case(skill.case, i, skill.length) for i in range(skill.items)]
        result = SkillResult(skill, tuple(judge.judge(cases)))
        tally, unseen = result.tally, result.by_wording(held_out=True)
        log.info(
            "%-20s %4d of %4d, unseen wordings %3d of %3d  %s",
            *(skill.name, tally.passes, tally.n, unseen.passes, unseen.n, result.chains or ""),
        )
        results.append(result)
    return results


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


def beside_skills(ctx: Context, maker: CaseMaker, text: Text) -> dict[str, object]:
    """Held-out text, the indexer's part, the experts' load."""
    network = TrainingNetwork(ctx)
    untrained = TrainingNetwork(with_random_indexer(ctx))
    out: dict[str, object] = {}
    for kind, ids in text.kinds.items():
        figures = text_figures(network, ids)
        log.info(
            "%s: %.4f nats, top-1 %.4f, chains %s", kind, figures.nats, figures.top1, figures.chains
        )
        out[kind] = asdict(figures)
        other = {
            "dense": text_figures(network, ids, dense=True),
            "random": text_figures(untrained, ids),
        }
        out[f"{kind}_indexer_off"] = {
            name: {"nats": f.nats, "top1": f.top1} for name, f in other.items()
        }
    skills = [replace(s, items=INDEXER_ITEMS) for s in SKILLS if s.name in INDEXER_SKILLS]
    judges = {"random": GraphJudge(untrained), "dense": GraphJudge(network, dense=True)}
    out["retrieval_indexer_off"] = {
        name: [result.as_json() for result in run_skills(judge, maker, skills)]
        for name, judge in judges.items()
    }
    device = next(iter(ctx.params.values())).device
    operands: dict[str, Operand] = dict(
        parameters_from_dict(ctx.config, released(ctx.params), dtype=torch.float32)
    )
    ids = text.kinds["prose"][:RECALL_TOKENS]
    out["selection_recall"] = selection_recall(ctx.config, operands, bind_all(device), ids)
    return out


def report(results: Sequence[SkillResult], about: dict[str, object]) -> dict[str, object]:
    """skills.json."""
    ended = stops(results)
    return {
        **about,
        "sampling": "greedy, judged by teacher forcing",
        "seeds": {
            "purpose": Purpose.EVALUATION.value,
            "items": "0 .. n - 1 of each skill",
            "held_out_wordings": f"items whose number ends in 0..{HELD_OUT_OF_TEN - 1}",
        },
        "skills": [result.as_json() for result in results],
        "stops": {"bar": STOPS_BAR, **ended.as_json()},
        "below_bar": [line for result in results for line in result.misses()],
    }


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m training.evaluate")
    parser.add_argument("folder", type=Path, help="checkpoint folder, or for the graph a run")
    parser.add_argument("--through", choices=["graph", "llm"], default="graph")
    parser.add_argument("--items", type=int, help="of each skill; default as in the table")
    parser.add_argument("--skills", default="", help="beginnings of names, separated by commas")
    parser.add_argument("--ci", action="store_true", help="only what a processor does in time")
    parser.add_argument("--only-skills", action="store_true", help="leave out text and indexer")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--float32", action="store_true", help="activations, on the graph")
    parser.add_argument("--json", type=Path, help="write the report here")
    return parser.parse_args(arguments)


def main() -> int:
    options = parse_arguments()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    skills = select([s for s in options.skills.split(",") if s], options.items, ci=options.ci)
    tokenizer = Tokenizer.from_file(str(TOKENIZER))
    text = held_out(tokenizer)
    maker = CaseMaker(tokenizer, text)
    about: dict[str, object] = {"through": options.through}
    if options.through == "llm":
        llm = LLM(options.folder, device=options.device)
        about["activations"] = str(llm.dtype).removeprefix("torch.")
        results = run_skills(LlmJudge(llm), maker, skills)
    else:
        wide = options.float32 or options.device == "cpu"
        dtype = torch.float32 if wide else torch.bfloat16
        ctx = graph_context(options.folder, torch.device(options.device), dtype)
        about["activations"] = str(dtype).removeprefix("torch.")
        results = run_skills(GraphJudge(TrainingNetwork(ctx)), maker, skills)
        if not options.only_skills:
            about["beside"] = beside_skills(ctx, maker, text)
    done = report(results, about)
    if options.json is not None:
        options.json.write_text(json.dumps(done, indent=1) + "\n", encoding="utf-8")
    for line in done["below_bar"] if isinstance(done["below_bar"], list) else ():
        log.info("below its bar: %s", line)
    return 0


if __name__ == "__main__":
    sys.exit(main())
