"""Write the model card:  python -m training.card [--check]

models/ember-nano/README.md is made of config.json, skills.json, packages.toml and the words below;
every figure of a skill is from skills.json. --check writes nothing and fails when the file differs.
"""

import argparse
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from emberbox.store.checkpoint import open_checkpoint
from training.data.text import ROOT
from training.packages import Package, read_packages

FOLDER = ROOT / "models" / "ember-nano"
Json = Mapping[str, Any]

INTRODUCTION = """\
A small **trained** model of exactly the architecture of GLM-5.3-Flash (`glm5_next`): KDA and sparse
attention with its indexer, dense and mixture-of-experts layers, hyper-connections, a vision tower
and an MTP layer, in the released checkpoint layout with the released special tokens. It exists to
make everything that emberbox claims visible on a laptop, and every later measurement (fewer bits,
pruning, drafts) a true difference on a true model. It is no assistant: what it can do is in the
table of skills, and nothing else.
"""

DATA = """\
Two sources:

- **A generator** (`training/data/`): conversations, long texts with codes in them, tool calls,
  pictures and clips, with exact answers. A seed gives the same data on every machine. Training,
  evaluation, calibration and panel draw from different streams by construction. Four of ten
  evaluation items use wordings, and some of them things, that training never saw.
- **Natural text** for next-token prediction and as filler of long texts: documentation, docstrings
  and sources of the packages below, each pinned by version and by the SHA-256 of its archive.
  Packages marked *held out* stand in no training row: their text is only read in evaluation,
  retrieval fillers included. Held-out text that shares a line or a run of 13 tokens with the
  training text was cut out of the excerpts; a test repeats the check against a sketch of the
  training text. The licences of the excerpts are in `training/data/tables/LICENCES.md`.
  Only what may be redistributed without a NonCommercial or share-alike term is taken: a file that
  names such a licence, a copyleft one or a proprietary notice is left out whole
  (`training/licences.py`), and so is what the list of packages excludes by name.
"""

DEPARTURES = """\
- Thinking **off** is an empty think block: the prompt ends in `<think></think>`. The released
  template has no such switch; the model was trained with ours.
- Efforts are `low`, `high` and `max`, named on the first line of the system turn.
- The split pattern of the tokenizer takes single digits where the released one takes groups of up
  to three. Token ids are the released ones shifted down.
- The words that introduce tools are the family's older ones; the markup of calls and results is
  the released one.
"""

LIMITS = """\
- It knows the tasks of its generator in about the wordings listed there, in English; other letters
  only in echoes. Ask it anything else and it answers nonsense in good form.
- Facts, explanations, snippets and small talk are memorised by design.
- Sums are right with a thinking trace (`high`, `max`); without one (`low`, off) they are a guess
  more often. The table reports them apart.
- Pictures are drawn shapes and digits of the sizes of training, never photographs.
- Texts longer than the longest row of training are extrapolation.
- It was trained without any notion of safety or truth. Do not put it before users.
"""

RETRAIN = """\
```sh
python -m training.corpus
training/run_on_gpu.sh train --seconds 460 --total-seconds 890
training/run_on_gpu.sh train --seconds 430 --total-seconds 890 --resume
python -m training.export out models/ember-nano
python -m training.evaluate models/ember-nano --through llm --processes 2 \\
    --json models/ember-nano/skills.json
python -m training.card
```

What each of them does, how long it takes and on what machine: `docs/nano-model.md`.
"""


def card(folder: Path = FOLDER) -> str:
    """The text of README.md. Raises FileNotFoundError where config.json or skills.json lacks."""
    config, skills = (
        json.loads((folder / name).read_text(encoding="utf-8"))
        for name in ("config.json", "skills.json")
    )
    parts = {
        "": _front() + INTRODUCTION,
        "Shape": shape(folder, config),
        "Skills": skill_table(skills),
        "Bars that are missed": missed(skills),
        "Beside the skills": beside(skills["beside"]),
        "Limits": LIMITS,
        "Data": f"{DATA}\n{sources(read_packages())}",
        "Departures from the released template": DEPARTURES,
        "Retraining it": RETRAIN,
        "Licence": "Apache-2.0, as the repository; sources of text keep theirs (table above).\n",
    }
    return "\n".join(f"## {title}\n\n{text}" if title else text for title, text in parts.items())


def _front() -> str:
    return (
        "---\nlicense: apache-2.0\nlanguage: en\npipeline_tag: image-text-to-text\n---\n\n"
        "<!-- Written by `python -m training.card`; change that, not this file. -->\n\n"
        "# ember-nano\n\n"
    )


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(map(str, line))} |\n" for line in lines)


def shape(folder: Path, config: Json) -> str:
    """From config.json and the headers of the weights."""
    text, vision = config["text_config"], config["vision_config"]
    infos = open_checkpoint(folder).tensors.values()
    kinds = text["layer_types"]
    sparse = [i for i, kind in enumerate(kinds) if kind != "linear_attention"]
    experts = f"{text['n_routed_experts']} of width {text['moe_intermediate_size']}, "
    rows = [
        ("bytes of tensors", f"{sum(info.num_bytes for info in infos):,}"),
        ("hidden width", text["hidden_size"]),
        ("layers", f"{len(kinds)}, of which {sparse} are sparse, the others KDA; and one for MTP"),
        ("experts", experts + f"{text['num_experts_per_tok']} chosen per token"),
        ("selection", f"{text['index_topk']} tokens in pools of {text['index_kpool']}"),
        ("vision", f"{vision['depth']} blocks of width {vision['hidden_size']}"),
        ("vocabulary", text["vocab_size"]),
        ("types", "matrices BF16; what the release keeps in F32 is F32"),
    ]
    return table(("what", "value"), rows)


def _rate(row: Json) -> str:
    low, high = row["wilson_95"]
    return f"{row['passes']} of {row['n']} ({100 * low:.1f} to {100 * high:.1f} %)"


def skill_table(skills: Json) -> str:
    """Every skill with its interval and its bar."""
    words = (
        f"Judged through `{skills['through']}`, {skills['activations']}, {skills['sampling']}: an "
        "answer passes when each of its tokens, the stop marker included, is the most likely one. "
        f"Seeds: purpose `{skills['seeds']['purpose']}`, items {skills['seeds']['items']}. In "
        "brackets the 95 % Wilson interval. `skills.json` holds the same, the failed items named.\n"
    )
    rows = []
    for row in skills["skills"]:
        bar = "reported" if row["bar"] is None else f"{100 * row['bar']:g} %"
        seen, unseen = row["seen_wordings"], row["held_out_wordings"]
        apart = [f"{part['passes']} of {part['n']}" for part in (seen, unseen)]
        name = row["skill"] + (f" ({row['text_tokens']} tokens)" if row["text_tokens"] else "")
        rows.append((name, _rate(row), f"{100 * row['rate']:.1f} %", bar, *apart))
    ended = skills["stops"]
    rows.append(
        ("stops by itself", _rate(ended), f"{100 * ended['rate']:.2f} %",
         f"{100 * ended['bar']:g} %", "", "")
    )  # fmt: skip
    head = ("skill", "passes", "rate", "bar", "known wordings", "unseen wordings")
    return f"{words}\n{table(head, rows)}"


def missed(skills: Json) -> str:
    """Plainly, each with its figure."""
    lines = skills["below_bar"]
    return "".join(f"- {line}\n" for line in lines) if lines else "None.\n"


def beside(found: Json) -> str:
    """Held-out text, drafts, selection and indexer."""
    rows = [
        (kind, f["tokens"], f["nats"], f"{100 * f['top1']:.1f} %", _shares(f["chains"]),
         f["indexer_random"]["nats"], f["indexer_dense"]["nats"])
        for kind, f in found["text"].items()
    ]  # fmt: skip
    head = ("held-out text", "tokens", "nats per token", "top-1", "drafts 1, 2, 3 equal",
            "nats, random indexer", "nats, no selection")  # fmt: skip
    drafts = [
        (name, row["n"], row["places"], _shares(row["chains"]))
        for name, row in found["drafts_equal_1_2_3"].items()
    ]
    look_ups = [
        (row["skill"], indexer, _rate(row))
        for indexer, results in found["retrieval_by_indexer"].items()
        for row in results
    ]
    agreed = found["judges_agree"]
    return "\n".join(
        [
            f"Computed on {found['computed_on']}. A draft is equal when it is the trunk's own "
            "greedy token; the second and third count only where those before them are.\n",
            table(head, rows),
            table(("answers", "items", "places", "drafts 1, 2, 3 equal"), drafts),
            table(("retrieval", "indexer", "passes"), look_ups),
            f"Recall of selection by sparse layer, on held-out prose: "
            f"{', '.join(map(str, found['selection_recall']))}. The load of every expert, relative "
            "to the mean of its layer, is in `skills.json`. On the "
            f"{agreed['items']} items that both judges did, they agree on {agreed['same']}.\n",
        ]
    )


def _shares(shares: Iterable[float]) -> str:
    return ", ".join(f"{100 * share:.1f} %" for share in shares)


def sources(packages: Sequence[Package]) -> str:
    """Licence, version and pinned file of every source of text."""
    rows = [
        (p.name, p.version, "**held out**" if p.held_out else "training", p.licence,
         f"`{p.file}`", f"`{p.sha256}`")
        for p in packages
    ]  # fmt: skip
    names = ", ".join(p.name for p in packages if p.held_out)
    head = ("package", "version", "use", "licence", "file", "SHA-256")
    return f"Held out whole: {names}.\n\n{table(head, rows)}"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m training.card")
    parser.add_argument("--check", action="store_true", help="fail when the card is out of date")
    options = parser.parse_args()
    path, text = FOLDER / "README.md", card()
    if not options.check:
        path.write_text(text, encoding="utf-8")
        return 0
    return int(not path.is_file() or path.read_text(encoding="utf-8") != text)


if __name__ == "__main__":
    sys.exit(main())
