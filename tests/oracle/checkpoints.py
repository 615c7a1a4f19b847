"""Small random glm5_next checkpoints in the released layout, and transformers' reading of them.

Two sets of weights. *sharp*: every mechanism matters, so that a mistake anywhere moves the logits
by far more than float32 noise. *calm*: the same, but sublayers are small against the residual, so
that noise is small too. Both hold one KDA layer with small queries and keys and one sparse layer
with small latents: without them an epsilon mistake is invisible end to end (architecture.md 11).

The weights of a name depend on the seed and that name alone. Needs transformers; knows no emberbox.
"""

import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import Glm5NextConfig, Glm5NextForConditionalGeneration
from transformers.models.glm5_next import modeling_glm5_next as modeling
from transformers.utils import logging

NUM_LAYERS = 9
SPARSE_LAYERS = (3, 7)
SMALL_QK_LAYER, SMALL_LATENT_LAYER, NARROW_BIAS_LAYER = 4, 7, 5
NUM_TEXT_TOKENS = 480  # ids below are ordinary; pad, eos and media tokens follow
IMAGE_TOKEN = 490
MTP_PREFIX = f"model.language_model.layers.{NUM_LAYERS}."

TEXT = {
    "vocab_size": 503,
    "hidden_size": 68,
    "intermediate_size": 100,
    "moe_intermediate_size": 36,
    "num_hidden_layers": NUM_LAYERS,
    "layer_types": [
        "indexed_attention" if i in SPARSE_LAYERS else "linear_attention" for i in range(NUM_LAYERS)
    ],
    "mlp_layer_types": ["dense"] * 2 + ["sparse"] * (NUM_LAYERS - 2),
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "q_lora_rank": 40,
    "kv_lora_rank": 28,
    "qk_nope_head_dim": 20,
    "v_head_dim": 12,
    "n_routed_experts": 10,
    "num_experts_per_tok": 3,
    "index_topk": 32,
    "index_n_heads": 16,  # with few heads ties occur: pools that no head matches score exactly 0
    "index_head_dim": 22,
    "index_kpool": 4,
    "linear_attn_config": {
        "num_heads": 3,
        "head_dim": 24,
        "short_conv_kernel_size": 4,
        "gate_lower_bound": -5.0,
    },
    "swiglu_limit": 1.5,
    "max_position_embeddings": 1024,
    "num_nextn_predict_layers": 1,
    "index_share_for_mtp_iteration": True,
    "pad_token_id": 480,
    "eos_token_id": [480, 481, 482],
}
VISION = {
    "depth": 2,
    "hidden_size": 48,
    "num_heads": 3,
    "intermediate_size": 60,
    "out_hidden_size": 68,
    "projection_intermediate_size": 92,
    "swiglu_limit": 1.5,
}

Fill = Callable[[Tensor], Tensor]  # standard normal noise of a parameter's shape -> its value


def linear(gain: float) -> Fill:
    """Weights [out, ...in] that turn unit inputs into outputs of about `gain`."""
    return lambda noise: noise * gain / noise[0].numel() ** 0.5


def normal(scale: float, mean: float = 0.0) -> Fill:
    return lambda noise: mean + scale * noise


# Released names; the first match wins.
SHARP: tuple[tuple[str, Fill], ...] = (
    (r"embed_tokens\.weight", normal(3e-3)),  # below sqrt(1e-5): the stream norm's epsilon shows
    (r"lm_head\.weight", linear(2.0)),
    (r"hc_(attn|ffn)_fn", linear(1.5)),
    (r"hc_(attn|ffn)_base", normal(2.0)),
    (r"hc_(attn|ffn)_scale", normal(0.2, 1.0)),
    (rf"layers\.{SMALL_QK_LAYER}\..*\.[qk]_proj", linear(6e-4)),
    (r"layers\.\d+\.self_attn\.[qkv]_proj", linear(1.5)),
    (r"conv1d", normal(0.5)),
    (r"A_log", normal(0.5)),
    (r"dt_bias", normal(1.5, -2.5)),
    (r"f_a_proj|g_a_proj", linear(1.0)),
    (r"f_b_proj|g_b_proj|b_proj", linear(1.5)),
    (rf"layers\.{SMALL_LATENT_LAYER}\..*(q_a_proj|kv_a_proj_with_mqa)", linear(3e-3)),
    (rf"layers\.{SMALL_LATENT_LAYER}\..*indexer\.wk\.", linear(3e-3)),
    (r"q_a_proj|kv_a_proj_with_mqa|wk\.|wq_b|weights_proj", linear(1.0)),
    (r"q_b_proj|kv_b_proj", linear(1.6)),
    (r"index_kpool_compress_gate", linear(2.0)),
    (r"index_kpool_compress_ape", normal(1.0)),
    # As in the release: a band so narrow and so far from 0 that BF16 reorders the experts.
    (rf"layers\.{NARROW_BIAS_LAYER}\..*e_score_correction_bias", normal(0.1, 10.0)),
    (r"e_score_correction_bias", normal(0.2)),
    (r"mlp\.gate\.weight", linear(1.0)),
    (r"language_model.*(gate_proj|up_proj)", linear(1.1)),  # beyond swiglu_limit one time in six
    (r"norm\d?\.weight", normal(0.3, 1.0)),
    (r"bias", normal(0.3)),
    (r"o_proj|down_proj|eh_proj|visual", linear(1.0)),
)
CALM: tuple[tuple[str, Fill], ...] = (
    (r"embed_tokens\.weight", normal(0.2)),
    (r"language_model.*(o_proj|down_proj)", linear(0.02)),
    *SHARP,
)
WEIGHTS = {"sharp": SHARP, "calm": CALM}


def value(weights: str, seed: int, name: str, shape: Sequence[int]) -> Tensor:
    """The float32 parameter `name` of a set of weights."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))
    noise = torch.randn(*shape, generator=generator)
    for pattern, fill in WEIGHTS[weights]:
        if re.search(pattern, name):
            return fill(noise)
    raise LookupError(f"no rule for {name}")


def config() -> Glm5NextConfig:
    return Glm5NextConfig(
        text_config=dict(TEXT),
        vision_config=dict(VISION),
        image_token_id=IMAGE_TOKEN,
        video_token_id=491,
        image_start_token_id=492,
        image_end_token_id=493,
        video_start_token_id=494,
        video_end_token_id=495,
    )


def write_checkpoint(
    folder: Path,
    weights: str,
    *,
    seed: int = 2,
    overrides: Mapping[str, Callable[[Tensor], Tensor]] | None = None,
) -> None:
    """Save a model by transformers, then give every tensor its value and add the MTP layer.

    `overrides`: pattern of released names -> what to make of the value.
    """
    logging.disable_progress_bar()
    Glm5NextForConditionalGeneration(config()).save_pretrained(folder)
    file = folder / "model.safetensors"
    shapes = {name: tuple(tensor.shape) for name, tensor in load_file(file).items()}
    shapes |= mtp_shapes(shapes)
    tensors = {name: value(weights, seed, name, shape) for name, shape in shapes.items()}
    for pattern, change in (overrides or {}).items():
        for name in [name for name in tensors if re.search(pattern, name)]:
            tensors[name] = change(tensors[name]).contiguous()
    save_file(tensors, file, metadata={"format": "pt"})


def mtp_shapes(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """The tensors of an MTP layer: those of a sparse layer with experts but for the streams'."""
    like = f"model.language_model.layers.{SPARSE_LAYERS[0]}."
    hidden = TEXT["hidden_size"]
    own = dict.fromkeys(("enorm.weight", "hnorm.weight", "shared_head.norm.weight"), (hidden,))
    own["eh_proj.weight"] = (hidden, 2 * hidden)
    copied = {
        name.removeprefix(like): shape
        for name, shape in shapes.items()
        if name.startswith(like) and "hc_" not in name
    }
    return {MTP_PREFIX + name: shape for name, shape in (own | copied).items()}


def open_reference(folder: Path) -> Glm5NextForConditionalGeneration:
    """The checkpoint in transformers, float32, eager. The MTP layer is unknown to it."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    return Glm5NextForConditionalGeneration.from_pretrained(
        folder,
        dtype=torch.float32,
        experts_implementation="eager",
        attn_implementation="eager",
    ).eval()


class MtpReference(nn.Module):
    """The MTP layer out of transformers' own modules, wired as architecture.md 6 says.

    It shares that reading, it does not confirm it. As in vLLM, the embedding at position 0 is zero.
    """

    def __init__(self, reference: Glm5NextForConditionalGeneration, folder: Path) -> None:
        super().__init__()
        text = reference.config.text_config
        self.embed = reference.get_input_embeddings()
        self.head = reference.lm_head
        hidden, eps = text.hidden_size, text.rms_norm_eps
        for name in ("enorm", "hnorm", "input_layernorm", "post_attention_layernorm", "head_norm"):
            self.add_module(name, modeling.Glm5NextTextRMSNorm(hidden, eps))
        self.eh_proj = nn.Linear(2 * hidden, hidden, bias=False)
        self.self_attn = modeling.Glm5NextTextAttention(text, SPARSE_LAYERS[0])
        self.mlp = modeling.Glm5NextTextMoE(text)
        stored = load_file(folder / "model.safetensors")
        self._fill({k.removeprefix(MTP_PREFIX): v for k, v in stored.items() if MTP_PREFIX in k})

    def _fill(self, stored: dict[str, Tensor]) -> None:
        def experts(name: str) -> Tensor:
            count = sum(k.startswith("mlp.experts.") and name in k for k in stored)
            return torch.stack([stored.pop(f"mlp.experts.{e}.{name}.weight") for e in range(count)])

        gate, up, down = (experts(name) for name in ("gate_proj", "up_proj", "down_proj"))
        stored["mlp.experts.gate_up_proj"] = torch.cat([gate, up], dim=1)
        stored["mlp.experts.down_proj"] = down
        stored["head_norm.weight"] = stored.pop("shared_head.norm.weight")
        stored |= {f"embed.{k}": v for k, v in self.embed.state_dict().items()}
        stored |= {f"head.{k}": v for k, v in self.head.state_dict().items()}
        self.load_state_dict(stored)

    def forward(self, hidden: Tensor, next_token_ids: Tensor) -> tuple[Tensor, Tensor]:
        """h_t [B, T, hidden], x_{t+1} [B, T] -> d_t [B, T, hidden] and logits of x_{t+2}."""
        embeds = self.embed(next_token_ids).clone()
        embeds[:, 0] = 0
        z = self.eh_proj(torch.cat([self.enorm(embeds), self.hnorm(hidden)], dim=-1))
        real = torch.ones(z.shape[:2], dtype=torch.bool)
        z = z + self.self_attn(self.input_layernorm(z), real)[0]
        z = z + self.mlp(self.post_attention_layernorm(z))
        draft = self.head_norm(z)
        return draft, self.head(draft)
