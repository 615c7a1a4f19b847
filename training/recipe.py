"""Every number of the training recipe. Knows no tensors."""

from dataclasses import dataclass, replace

MICRO_TOKENS = 32768  # of one micro-batch, whatever its bucket
MAX_CHAIN = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """Rows of one shape: `rows` x `length` tokens, a share of the micro-batches.

    `image` is (width, height) in pixels, None for text. `chain`: MTP drafts trained, 1..3.
    """

    length: int
    share: float
    image: tuple[int, int] | None = None
    chain: int = 1
    rows: int = 0  # 0: as many as make MICRO_TOKENS

    @property
    def num_rows(self) -> int:
        return self.rows or MICRO_TOKENS // self.length

    @property
    def name(self) -> str:
        size = "" if self.image is None else f" picture {self.image[0]}x{self.image[1]}"
        return f"{self.length}{size}"


# Chains of three where answers are counting and JSON; elsewhere two more drafts cost a fifth of the
# step and nothing asks for them.
BUCKETS = (
    Bucket(length=256, share=0.17, chain=3),
    Bucket(length=512, share=0.22, chain=3),
    Bucket(length=1024, share=0.10),
    Bucket(length=2048, share=0.08),
    Bucket(length=4096, share=0.07),
    Bucket(length=8192, share=0.03),
    Bucket(length=128, share=0.20, image=(112, 112)),
    Bucket(length=128, share=0.13, image=(168, 112)),
)

# The last stage: longer rows, fewer pictures. The same shapes, so the same graphs.
REPAIR_BUCKETS = tuple(
    replace(bucket, share=share)
    for bucket, share in zip(BUCKETS, (0.16, 0.20, 0.16, 0.15, 0.11, 0.06, 0.09, 0.07), strict=True)
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """Optimiser, losses and balance. Rates are at the peak of the schedule."""

    adam_rate: float = 3e-3
    adam_betas: tuple[float, float] = (0.9, 0.98)
    adam_decay: float = 0.1  # embedding and head alone
    muon_rate: float = 6e-3
    muon_momentum: float = 0.95
    muon_decay: float = 0.05
    clip: float = 1.0
    micro_batches: int = 2
    draft_weights: tuple[float, ...] = (0.2, 0.1, 0.1)  # by depth of the chain
    index_weight: float = 0.5
    balance_rate: float = 2e-3  # of the router bias, per step, times the schedule


RECIPE = Recipe()


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """Rate and dense warm-up as functions of progress 0..1 within one stage.

    Flat at `peak` up to `flat`, then linear to zero; `warmup_steps` count from the start of the
    stage. Until `dense_until` attention sees everything. A last stage that repairs a finished run
    has flat = 0 and dense_until = 0: it never unlearns the selection.
    """

    peak: float = 1.0
    flat: float = 0.4
    warmup_steps: int = 150
    dense_until: float = 0.06

    @classmethod
    def repair(cls, peak: float) -> "Schedule":
        return cls(peak=peak, flat=0.0, warmup_steps=30, dense_until=0.0)

    def rate(self, progress: float, stage_step: int) -> float:
        """Factor on both learning rates for step `stage_step`, counted from 0."""
        warm = min(1.0, (stage_step + 1) / self.warmup_steps)
        left = max(0.0, 1.0 - progress)
        return self.peak * warm * min(1.0, left / (1.0 - self.flat))

    def is_dense(self, progress: float) -> bool:
        return progress < self.dense_until
