"""One decoder that is GPT-2 or Llama 3, as its ModelConfig says, and that every layout can take apart.

Shapes: B batch, T time, C width, H heads, K heads of keys and values, D head width, F width inside the MLP,
V vocabulary. Nothing here knows of ranks. What layouts rely on:
- reshapes leave the number of heads open (-1), so the same line works on a tensor-parallel shard;
- blocks have names ("0", "1", ...) that survive when a pipeline stage drops others, and the ends may be None;
- `attention.core` and `loss` may be replaced from outside, by context and by vocabulary parallelism, and `run_blocks`
  by what computes blocks again in the backward;
- `positions` says where in the sequence these tokens stand;
- building the model decides shapes only (also on the meta device); `init_weights` fills it.
"""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.config import ModelConfig
from models.init import initialise
from models.rope import Rotation, frequencies, make_rotation, rotate, scale_frequencies

IGNORED = -100  # a target that counts nowhere


class AttentionCore(nn.Module):
    """Causal softmax attention and nothing else: no weights, no heads of its own."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.dropout = dropout

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q (B, H, T, D), k and v (B, K, T, D), where H is a multiple of K; returns (B, H, T, D)."""
        dropout = self.dropout if self.training else 0.0
        # enable_gqa keeps the flash kernel, on a CPU too, and is quicker there than repeating k and v.
        grouped = q.shape[1] != k.shape[1]
        return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True, enable_gqa=grouped)


class Attention(nn.Module):
    """Multi-head causal self-attention, with rotary positions if given and grouped queries if K < H."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        kv_dim = config.num_kv_heads * config.head_dim
        self.q = nn.Linear(config.dim, config.dim, bias=config.bias)
        self.k = nn.Linear(config.dim, kv_dim, bias=config.bias)
        self.v = nn.Linear(config.dim, kv_dim, bias=config.bias)
        self.core: nn.Module = AttentionCore(config.dropout)  # context parallelism puts its own here
        self.out = nn.Linear(config.dim, config.dim, bias=config.bias)

    def forward(self, x: Tensor, rotation: Rotation | None) -> Tensor:
        # -1 and not H or K: a tensor-parallel shard holds only some of the heads.
        q = self.q(x).unflatten(-1, (-1, self.head_dim))  # (B, T, H, D)
        k = self.k(x).unflatten(-1, (-1, self.head_dim))  # (B, T, K, D)
        v = self.v(x).unflatten(-1, (-1, self.head_dim))  # (B, T, K, D)
        if rotation is not None:
            q, k = rotate(q, rotation), rotate(k, rotation)
        y = self.core(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))  # (B, H, T, D)
        return self.out(y.transpose(1, 2).flatten(2))  # (B, T, H D) to (B, T, C)


class MLP(nn.Module):
    """GPT-2's two matrices with tanh-GELU between, or Llama's three: silu(gate) * up, then down."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.up = nn.Linear(config.dim, config.hidden_dim, bias=config.bias)
        self.gate = nn.Linear(config.dim, config.hidden_dim, bias=config.bias) if config.mlp == "swiglu" else None
        self.down = nn.Linear(config.hidden_dim, config.dim, bias=config.bias)

    def forward(self, x: Tensor) -> Tensor:
        if self.gate is None:
            hidden = F.gelu(self.up(x), approximate="tanh")  # (B, T, F)
        else:
            hidden = F.silu(self.gate(x)) * self.up(x)  # (B, T, F)
        return self.down(hidden)  # (B, T, C)


class Block(nn.Module):
    """Attention, then MLP, each behind a norm and added to its input."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attention_norm = make_norm(config)
        self.attention = Attention(config)
        self.mlp_norm = make_norm(config)
        self.mlp = MLP(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, rotation: Rotation | None) -> Tensor:
        """x (B, T, C) to the same shape; `rotation` turns the heads for RoPE, None without it."""
        x = x + self.dropout(self.attention(self.attention_norm(x), rotation))
        return x + self.dropout(self.mlp(self.mlp_norm(x)))


class GPT(nn.Module):
    """The whole decoder, or a stage of it: blocks may be deleted and the four ends set to None.

    The weights hold nothing of use until `init_weights` (or a checkpoint) has filled them.
    """

    embedding: nn.Embedding | None
    position_embedding: nn.Embedding | None
    norm: nn.Module | None
    head: nn.Linear | None
    loss: Callable[[Tensor, Tensor], Tensor]  # (logits, targets) to the summed loss; see token_loss
    run_blocks: Callable[[Sequence[nn.Module], Tensor, Rotation | None], Tensor]  # may run some again in the backward

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.dim)
        learned = config.positions == "learned"
        self.position_embedding = nn.Embedding(config.context, config.dim) if learned else None
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleDict({str(index): Block(config) for index in range(config.layers)})
        self.norm = make_norm(config)
        self.head = nn.Linear(config.dim, config.vocab_size, bias=False)
        self.loss = token_loss
        self.run_blocks = run_blocks
        self.tie_weights()

    def tie_weights(self) -> None:
        """Make head and embedding one parameter where both are here; `to_empty` silently parts them."""
        if self.config.tie_embeddings and self.embedding is not None and self.head is not None:
            self.head.weight = self.embedding.weight

    def init_weights(self, seed: int) -> None:
        """Fill every parameter in place (there are no buffers); see models/init.py for the numbers.

        `__init__` only decides shapes, so after building on the meta device and `to_empty` memory is garbage
        until this ran. Parameters must be whole tensors: a layout fills shards from `initial_tensor` itself.
        """
        self.tie_weights()
        initialise(self, self.config, seed)

    def forward(self, tokens: Tensor, targets: Tensor | None = None, positions: Tensor | None = None) -> Tensor:
        """Logits (B, T, V) of the next tokens, or, with targets, their summed loss.

        tokens: (B, T) int64; on a stage without embedding, the hidden states (B, T, C) of the stage before.
        targets: (B, T) int64; the result is then the cross-entropy in nats, a float32 scalar summed over the
            targets other than -100, for the caller to divide by the token count of the whole global batch.
        positions: (T,) int64, the place of each column in its sequence; 0, 1, ... T-1 if None.
        A stage without head returns hidden states (B, T, C).
        """
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = tokens
        if self.embedding is not None:
            x = self.embedding(tokens)  # (B, T) to (B, T, C)
            if self.position_embedding is not None:
                x = x + self.position_embedding(positions)  # (T, C) over the batch
            x = self.dropout(x)
        rotation = self._rotation(positions)
        x = self.run_blocks(list(self.blocks.values()), x, rotation)
        if self.norm is not None:
            x = self.norm(x)
        if self.head is not None:
            x = self.head(x)  # (B, T, C) to (B, T, V)
        return x if targets is None else self.loss(x, targets)

    def _rotation(self, positions: Tensor) -> Rotation | None:
        """RoPE's cosines and sines, once per forward for all blocks; None with learned positions.

        The frequencies are a handful of numbers made anew each time: as a buffer they would be lost on the meta
        device and rounded when the model is cast to bf16.
        """
        config = self.config
        if config.positions != "rope":
            return None
        freqs = frequencies(config.head_dim, config.rope_theta, positions.device)  # (D/2,)
        if config.rope_factor != 1.0:
            low, high = config.rope_low_freq, config.rope_high_freq
            freqs = scale_frequencies(freqs, config.rope_factor, low, high, config.rope_original_context)
        return make_rotation(positions, freqs)


def run_blocks(blocks: Sequence[nn.Module], x: Tensor, rotation: Rotation | None) -> Tensor:
    """One after the other: (B, T, C) to (B, T, C)."""
    for block in blocks:
        x = block(x, rotation)
    return x


def make_norm(config: ModelConfig) -> nn.Module:
    """A norm over C. Both work in float32 inside whatever their input; on a CPU rms_norm is not fused and takes
    three times layer_norm's time, which is still small beside the matrices."""
    if config.norm == "layernorm":
        return nn.LayerNorm(config.dim, eps=config.norm_eps, bias=config.bias)
    return nn.RMSNorm(config.dim, eps=config.norm_eps)


def token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy in nats summed over the targets other than -100: (B, T, V) and (B, T) to at least a float32."""
    exact = logits.flatten(0, -2).to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(exact, targets.flatten(), ignore_index=IGNORED, reduction="sum")
