"""The demonstration measures: how far the two-bit model is from its source, on a short panel."""

import shlex
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from rich.console import Console

from emberbox.cli.measure import MeasureBar, write_receipt

PANEL = "nano-short"
RECEIPT = "demo.json"
# Beyond it something is broken: three times the 0.121 nats of the shipped two bits (two Xeon cores,
# 2026-11-30).
MAX_KL = 0.36


@dataclass(frozen=True, slots=True)
class LiveMeasurement:
    """receipt: the whole document. problems: what is wrong with it; is_right: nothing is."""

    receipt: dict[str, object]
    problems: tuple[str, ...]
    is_right: bool

    def to_dict(self) -> dict[str, object]:
        """For JSON."""
        return asdict(self)


def measure_live(
    reference: Path, candidate: Path, device: str, console: Console
) -> LiveMeasurement:
    """Measure, write a receipt where nothing is kept, verify it, print it as `receipt show` does.

    Raises what a measurement raises. Sets torch's threads.
    """
    from emberbox.measure.fidelity import FidelityOptions, measure_fidelity
    from emberbox.measure.panel import load_panel
    from emberbox.measure.show import show
    from emberbox.measure.verify import verify

    panel = load_panel(PANEL)
    console.print(f"measuring {candidate} against {reference} on panel {panel.name}", markup=False)
    with MeasureBar(console) as bar:
        options = FidelityOptions(device=device)
        found = measure_fidelity(reference, candidate, panel, options, bar.moved)
    words = ["emberbox", "measure", "fidelity", str(reference), str(candidate)]
    words += ["--panel", PANEL, "-o", RECEIPT]
    words += [] if device == "auto" else ["--device", device]
    with TemporaryDirectory(prefix="emberbox-demo-") as folder:
        receipt = write_receipt(Path(folder) / RECEIPT, shlex.join(words), panel, found)
        problems = verify(receipt.path)
    kl = receipt["results"]["kl"]["value"]
    if not kl <= MAX_KL:
        problems.append(f"mean KL is {kl:.4g} nats, expected at most {MAX_KL}")
    console.print(show(receipt), soft_wrap=False)
    for problem in problems:
        console.print(problem, style="red", markup=False)
    if not problems:
        console.print("every figure was computed again from the record: the receipt is good")
    return LiveMeasurement(receipt.document, tuple(problems), not problems)
