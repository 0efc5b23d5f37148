"""The sizes and choices that make one decoder, checked before anything is built. No torch in here."""

import math
from dataclasses import dataclass

from checks import around, at_most, divisors, one_of

NORMS = ("layernorm", "rmsnorm")
MLPS = ("gelu", "swiglu")
POSITIONS = ("learned", "rope")


@dataclass
class ModelConfig:
    """One decoder-only transformer; the defaults live in conf/model/base.yaml.

    Raises ValueError, in one line that names the key, its value and what would be valid.
    """

    layers: int
    dim: int
    heads: int
    kv_heads: int | None  # None: as many as heads
    ffn_dim: int | None  # None: 4 dim for gelu, 8/3 dim for swiglu
    vocab_size: int
    context: int  # longest sequence, in tokens
    norm: str
    norm_eps: float
    mlp: str
    positions: str
    bias: bool
    tie_embeddings: bool
    dropout: float
    rope_theta: float
    rope_factor: float  # 1.0: no scaling, and the three below do nothing
    rope_low_freq: float
    rope_high_freq: float
    rope_original_context: int

    def __post_init__(self) -> None:
        for key in ("layers", "dim", "heads", "vocab_size", "context", "rope_original_context"):
            _require(getattr(self, key) >= 1, key, getattr(self, key), "at least 1")
        at_most("model", self, 10_000, "layers")
        at_most("model", self, 2**31 - 1, "dim", "vocab_size", "context")
        one_of("model.norm", self.norm, NORMS)
        one_of("model.mlp", self.mlp, MLPS)
        one_of("model.positions", self.positions, POSITIONS)
        _require(self.ffn_dim is None or self.ffn_dim >= 1, "ffn_dim", self.ffn_dim, "at least 1, or null")
        _require(0 < self.norm_eps < math.inf, "norm_eps", self.norm_eps, "above 0")
        _require(0 <= self.dropout < 1, "dropout", self.dropout, "in [0, 1)")
        _require(0 < self.rope_theta < math.inf, "rope_theta", self.rope_theta, "above 0")
        _require(1 <= self.rope_factor < math.inf, "rope_factor", self.rope_factor, "at least 1 (1 is no scaling)")
        _require(0 < self.rope_low_freq < math.inf, "rope_low_freq", self.rope_low_freq, "above 0")
        above_low = f"above model.rope_low_freq={self.rope_low_freq}"
        _require(self.rope_low_freq < self.rope_high_freq < math.inf, "rope_high_freq", self.rope_high_freq, above_low)
        self._check_heads()

    def _check_heads(self) -> None:
        rope = self.positions == "rope"
        even = [h for h in divisors(self.dim) if self.dim // h % 2 == 0]
        if self.dim % self.heads:
            valid = around(self.heads, even if rope and even else divisors(self.dim))
            raise ValueError(f"model.heads={self.heads} does not divide model.dim={self.dim}; nearest valid: {valid}")
        if rope and self.head_dim % 2:
            odd = f"gives heads of odd width {self.head_dim}; model.positions=rope needs an even one"
            if even:
                raise ValueError(f"model.heads={self.heads} {odd}; nearest valid: {around(self.heads, even)}")
            pair = 2 * self.heads
            below = self.dim // pair * pair
            raise ValueError(f"model.dim={self.dim} {odd}; nearest valid: {around(self.dim, [below, below + pair])}")
        if self.num_kv_heads < 1 or self.heads % self.num_kv_heads:
            raise ValueError(
                f"model.kv_heads={self.kv_heads} does not divide model.heads={self.heads}"
                f"; nearest valid: {around(self.num_kv_heads, divisors(self.heads))}"
            )

    @property
    def head_dim(self) -> int:
        """Width of one head, D."""
        return self.dim // self.heads

    @property
    def num_kv_heads(self) -> int:
        """Heads of keys and values, K; below `heads`, each serves a group of query heads."""
        return self.heads if self.kv_heads is None else self.kv_heads

    @property
    def hidden_dim(self) -> int:
        """Width inside the MLP. The swiglu default rounds up to a multiple of 32, which matrix units like."""
        if self.ffn_dim is not None:
            return self.ffn_dim
        return 4 * self.dim if self.mlp == "gelu" else -(-8 * self.dim // 96) * 32


def _require(valid: bool, key: str, value: object, must_be: str) -> None:
    if not valid:
        raise ValueError(f"model.{key}={value} must be {must_be}")
