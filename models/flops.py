"""Parameters and FLOPs of a model in closed form, for the planner and for MFU. No torch in here."""

from models.config import ModelConfig


def num_parameters(config: ModelConfig) -> int:
    """Parameters of the whole model, a tied head counted once."""
    norm = config.dim * (2 if config.norm == "layernorm" and config.bias else 1)
    total = config.layers * (_block_matmul(config) + 2 * norm) + norm
    if config.bias:
        attention = 2 * config.dim + 2 * config.num_kv_heads * config.head_dim  # q and out, k and v
        mlp = config.dim + config.hidden_dim * (2 if config.mlp == "swiglu" else 1)
        total += config.layers * (attention + mlp)
    if config.positions == "learned":
        total += config.context * config.dim
    return total + config.vocab_size * config.dim * (1 if config.tie_embeddings else 2)


def flops_per_token(config: ModelConfig, seq_len: int) -> int:
    """Floating-point operations to train on one token of sequences of `seq_len` tokens.

    The only convention of this repository, whatever the hardware really does:
    - training is 3 forwards (backward is 2); recomputed activations do not count;
    - forward is 2 per parameter in a matrix product: the head is one, also when tied; the embeddings, norms
      and biases are not;
    - attention is causal: a token sees (T + 1) / 2 positions on average, each 2 H D for its score and 2 H D for
      its value, so 4 H D (T + 1) / 2 per layer. Elementwise work is left out.
    """
    return 3 * (config.layers * block_flops_per_token(config, seq_len) + 2 * config.vocab_size * config.dim)


def block_flops_per_token(config: ModelConfig, seq_len: int) -> int:
    """Those of one block's forward, by the same convention."""
    return 2 * _block_matmul(config) + 2 * config.heads * config.head_dim * (seq_len + 1)


def head_layers(config: ModelConfig) -> float:
    """What the head costs beside one block, attention left out."""
    return config.vocab_size * config.dim / _block_matmul(config)


def _block_matmul(config: ModelConfig) -> int:
    """Weights of one block's matrices: q and out, k and v, and the MLP's two or three."""
    attention = 2 * config.dim * config.dim + 2 * config.dim * config.num_kv_heads * config.head_dim
    return attention + (3 if config.mlp == "swiglu" else 2) * config.dim * config.hidden_dim
