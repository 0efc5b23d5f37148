"""What a model's forward saves for its backward, in closed form. No torch in here."""

from models.config import ModelConfig


def mlp_activations(config: ModelConfig) -> int:
    """Numbers that one MLP saves per token, without dropout.

    Its normed input, C wide; each tensor of width F that a later gradient needs: what `up` gives and what goes into
    `down`; in SwiGLU also what `gate` gives, and silu of that.
    """
    return config.dim + (4 if config.mlp == "swiglu" else 2) * config.hidden_dim
