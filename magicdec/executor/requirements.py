"""What a model must be for `executor.Executor`. Imports no torch."""

from __future__ import annotations

from magicdec.model.config import ModelConfig


def layer_obstacle(config: ModelConfig) -> str | None:
    """What in the model's layers the library does not compute; None if it computes all."""
    obstacles = {
        f"{config.norm} norms": config.norm != "rms",
        f"{config.positions} positions": config.positions != "rope",
        f"{config.residual} residuals": config.residual != "sequential",
        "an MLP without a gate": not config.gated_mlp,
        f"{config.activation} activations": config.activation != "silu",
        "a norm after the embedding": config.embedding_norm,
        f"hidden size {config.hidden_size}, which is odd": config.hidden_size % 2 == 1,
    }
    return next((part for part, is_there in obstacles.items() if is_there), None)
