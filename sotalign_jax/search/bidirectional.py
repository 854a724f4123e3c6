"""Decoders with bidirectional attention, and the latent attention of NV-Embed-v2.

The checkpoints of NV-Embed-v2 and llama-embed-nemotron-8b come with modelling code that was written
for older versions of transformers. NV-Embed's does not import on later ones, and Nemotron's becomes
causal there without an error. Both models are decoders of transformers with another mask, so the
code here computes them from the weights alone. This module needs torch, so that it is imported when
one of these models is loaded.

References:
    Lee et al., "NV-Embed: Improved Techniques for Training LLMs as Generalist Embedding Models",
    2024, section 3.1.
    Babakhin et al., "Llama-Embed-Nemotron-8B", 2025.
"""

from typing import Any, ClassVar

import torch
import transformers
from torch import nn

from sotalign_jax import checks

LATENT_DEFAULTS = {
    "num_latents_value": 512,
    "num_cross_heads": 8,
    "hidden_dim": 4096,
    "latent_dim": 4096,
    "cross_dim_head": 4096,
    "output_normalize": True,
}
"""Sizes of the published NV-Embed-v2, whose config.json leaves out those equal to the defaults."""


def see_all(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Converts a mask of tokens to one with which a decoder attends to every real token.

    Every version of transformers passes a mask with four dimensions on to the attention unchanged,
    whereas it would combine one with two dimensions with a causal mask.

    Args:
        mask: 1 for tokens and 0 for padding, shape [n, t].
        dtype: Dtype of the model.

    Returns:
        Values to add to the attention's logits, shape [n, 1, t, t].
    """
    added = torch.zeros(mask.shape, dtype=dtype, device=mask.device)
    added = added.masked_fill(mask == 0, torch.finfo(dtype).min)
    return added[:, None, None, :].expand(-1, 1, mask.shape[1], -1)


class CrossAttention(nn.Module):
    """Multi-head attention of the tokens to the latents, without biases."""

    def __init__(self, width: int, latent_width: int, heads: int, head_width: int) -> None:
        super().__init__()
        self.heads = heads
        self.to_q = nn.Linear(width, heads * head_width, bias=False)
        self.to_kv = nn.Linear(latent_width, 2 * heads * head_width, bias=False)
        self.to_out = nn.Linear(heads * head_width, width, bias=False)

    def forward(self, tokens: torch.Tensor, latents: torch.Tensor) -> torch.Tensor:
        """Maps tokens [n, t, d] and latents [r, l] to [n, t, d]."""
        keys, values = self.to_kv(latents)[None].chunk(2, dim=-1)
        # Every head has the shape [batch, heads, length, width] in PyTorch's attention.
        split = [
            x.unflatten(-1, (self.heads, -1)).transpose(1, 2).expand(len(tokens), -1, -1, -1)
            for x in (self.to_q(tokens), keys, values)
        ]
        mixed = nn.functional.scaled_dot_product_attention(*split)
        return self.to_out(mixed.transpose(1, 2).flatten(2))


class GatedGelu(nn.Module):
    """Multiplies the first half of the features by the GELU of the second half."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        value, gate = x.chunk(2, dim=-1)
        return value * nn.functional.gelu(gate)


class FeedForward(nn.Module):
    """Two linear layers with a gated GELU between them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(width, 8 * width), GatedGelu(), nn.Linear(4 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)


class Normalized(nn.Module):
    """Residual layer `fn` with LayerNorms in front of its inputs."""

    def __init__(self, fn: nn.Module, width: int, context_width: int | None = None) -> None:
        super().__init__()
        self.fn, self.norm = fn, nn.LayerNorm(width)
        self.norm_context = nn.LayerNorm(context_width) if context_width else None

    def forward(self, x: torch.Tensor, context: torch.Tensor | None = None) -> torch.Tensor:
        if self.norm_context is None:
            return x + self.fn(self.norm(x))
        return x + self.fn(self.norm(x), self.norm_context(context))


class LatentAttention(nn.Module):
    """Mixes learned latent vectors into every token. The checkpoint fixes the attributes' names."""

    def __init__(self, sizes: dict[str, Any]) -> None:
        super().__init__()
        width, latent_width = sizes["hidden_dim"], sizes["latent_dim"]
        heads, head_width = sizes["num_cross_heads"], sizes["cross_dim_head"]
        self.latents = nn.Parameter(torch.empty(sizes["num_latents_value"], latent_width))
        attention = CrossAttention(width, latent_width, heads, head_width)
        layers = [
            Normalized(attention, width, latent_width),
            Normalized(FeedForward(width), width),
        ]
        self.cross_attend_blocks = nn.ModuleList(layers)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        attention, feed_forward = self.cross_attend_blocks
        return feed_forward(attention(tokens, self.latents))


class NVEmbed(transformers.PreTrainedModel):
    """NV-Embed-v2: a bidirectional Mistral decoder, followed by latent attention."""

    config_class = transformers.MistralConfig
    _no_split_modules: ClassVar = ["MistralDecoderLayer", "LatentAttention"]
    _supports_sdpa = True

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.embedding_model = transformers.MistralModel(config)
        self.latent_attention_model = LatentAttention(config.latent_attention)
        self.post_init()

    def forward(self, input_ids: torch.Tensor, mask: torch.Tensor, latent: bool) -> torch.Tensor:
        """Returns the features of the tokens, shape [n, t, d], with or without the latents."""
        attention_mask = see_all(mask, self.dtype)
        outputs = self.embedding_model(
            input_ids=input_ids, attention_mask=attention_mask, use_cache=False
        )
        tokens = outputs.last_hidden_state
        return self.latent_attention_model(tokens) if latent else tokens


def load(place: str, kind: str, **options: Any) -> Any:
    """Loads a decoder from a checkpoint whose config names a class that transformers lacks.

    Args:
        place: Local folder or name on the hub.
        kind: "nvembed" or "llama_bidirec", the model type in the checkpoint's config.
        **options: Options of `from_pretrained`: revision, dtype and device_map.

    Returns:
        The model.

    Raises:
        InputError: The checkpoint is of another model, or lacks weights.
    """
    revision = options["revision"]
    described, _ = transformers.LlamaConfig.get_config_dict(place, revision=revision)
    if described.get("model_type") != kind:
        text = f"encoder needs a model of type {kind}, got {described.get('model_type')!r}"
        raise checks.InputError(f"{text} in {place!r}; check --weights")
    decoder = described["text_config"] if kind == "nvembed" else described
    own = ("model_type", "architectures", "auto_map", "dtype", "torch_dtype")
    sizes = {key: value for key, value in decoder.items() if key not in own}
    sizes["dtype"] = described.get("dtype") or described.get("torch_dtype")
    if kind == "nvembed":
        config = transformers.MistralConfig.from_dict(sizes)
        given = described.get("latent_attention_config") or {}
        config.latent_attention = LATENT_DEFAULTS | given
    else:
        config = transformers.LlamaConfig.from_dict(sizes)
    make = NVEmbed if kind == "nvembed" else transformers.LlamaModel
    model, found = make.from_pretrained(
        place, config=config, attn_implementation="sdpa", output_loading_info=True, **options
    )
    # transformers would only log missing weights, and fill them with random numbers.
    if missing := sorted(found["missing_keys"]):
        raise checks.InputError(
            f"encoder weights in {place!r} lack {missing[0]} and {len(missing) - 1} others; "
            "download them again"
        )
    return model
