"""From token features [n, t, d] to one embedding a row, as torch tensors."""

from typing import Any

from experiments.optional import require

Tensor = Any
"""A torch tensor: torch is imported only when an encoder is loaded."""


def first(tokens: Tensor) -> Tensor:
    """The first token, CLS [n, d]."""
    return tokens[:, 0]


def cls_patch(tokens: Tensor, registers: int) -> Tensor:
    """CLS ++ mean of the patches [n, 2 d]; tokens are CLS, then registers, then patches."""
    return _joined(tokens[:, 0], tokens[:, 1 + registers :].mean(1))


def authors(tokens: Tensor, registers: int) -> Tensor:
    """CLS ++ mean of tokens[1:-registers] [n, 2 d], as SOTAlign's authors pool DINOv3.

    Registers come second in these models, not last, so this averages them with all patches but
    the last few. It is here to reproduce the authors' embeddings.
    """
    return _joined(tokens[:, 0], tokens[:, 1 : tokens.shape[1] - registers].mean(1))


def mean(tokens: Tensor, mask: Tensor) -> Tensor:
    """Mean [n, d] of the tokens where mask [n, t] is 1."""
    weights = mask[:, :, None].to(tokens.dtype)
    return (tokens * weights).sum(1) / weights.sum(1)


def last(tokens: Tensor, mask: Tensor) -> Tensor:
    """The last token [n, d] where mask [n, t] is 1, whichever side is padded."""
    torch = require("torch")
    places = torch.arange(mask.shape[1], device=mask.device)
    return tokens[torch.arange(len(tokens), device=mask.device), (mask * places).argmax(1)]


def _joined(a: Tensor, b: Tensor) -> Tensor:
    return require("torch").cat([a, b], dim=1)
