"""A small decoder-only Transformer language model over bytes, in Flax NNX.

Pre-norm blocks, rotary positions, squared-ReLU feed-forward. Whatever writes to the residual stream
or the logits starts at zero, so training begins at a loss of exactly ln 256. There are no biases:
the gradient of a key's bias is zero but for rounding, and Adam would blow that rounding up to a
whole step, so that runs differing only in the order of their sums would drift apart.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.typing import DTypeLike

VOCABULARY = 256  # a token is a byte


@dataclass(frozen=True)
class Config:
    """Sizes, and dtypes: `dtype` is computed in, `param_dtype` is stored.

    Norms, attention weights and logits are float32 always.
    """

    layers: int = 3
    width: int = 128
    heads: int = 4
    feed_forward: int = 4  # times the width
    dtype: DTypeLike = jnp.float32
    param_dtype: DTypeLike = jnp.float32

    def __post_init__(self) -> None:
        if min(self.layers, self.width, self.heads, self.feed_forward) < 1:
            raise ValueError(f"sizes must be at least 1, but found {self}")
        if self.width % (2 * self.heads):
            raise ValueError(
                f"width={self.width} must be a multiple of 2 * heads = {2 * self.heads}: rotary "
                "positions turn pairs"
            )


SIZES = {
    "tiny": Config(layers=1, width=32, heads=2),  # for tests
    "mini": Config(layers=2, width=96, heads=3),
    "small": Config(layers=3, width=128, heads=4),
    "base": Config(layers=6, width=256, heads=8),
}


def rotate(x: jax.Array, base: float = 10_000.0) -> jax.Array:
    """Rotary positions (Su et al. 2021): [batch, time, heads, size] to the same shape and dtype."""
    half = x.shape[-1] // 2
    frequency = base ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angle = jnp.arange(x.shape[1], dtype=jnp.float32)[:, None, None] * frequency
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    sin, cos = jnp.sin(angle), jnp.cos(angle)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


class Attention(nnx.Module):
    """Causal self-attention, [batch, time, width] to the same."""

    def __init__(self, config: Config, *, rngs: nnx.Rngs):
        linear: dict[str, Any] = dict(
            use_bias=False, dtype=config.dtype, param_dtype=config.param_dtype, rngs=rngs
        )
        self.heads = config.heads
        self.qkv = nnx.Linear(config.width, 3 * config.width, **linear)
        self.out = nnx.Linear(
            config.width, config.width, kernel_init=nnx.initializers.zeros, **linear
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        batch, time, width = x.shape
        qkv = self.qkv(x).reshape(batch, time, 3, self.heads, width // self.heads)
        q, k, v = rotate(qkv[:, :, 0]), rotate(qkv[:, :, 1]), qkv[:, :, 2]
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k, preferred_element_type=jnp.float32)
        causal = jnp.tril(jnp.ones((time, time), bool))
        scores = jnp.where(causal, scores * q.shape[-1] ** -0.5, -jnp.inf)
        mixed = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores).astype(v.dtype), v)
        return self.out(mixed.reshape(batch, time, width))


class FeedForward(nnx.Module):
    """Two layers with a squared ReLU (So et al. 2021) between, [..., width] to the same."""

    def __init__(self, config: Config, *, rngs: nnx.Rngs):
        linear: dict[str, Any] = dict(
            use_bias=False, dtype=config.dtype, param_dtype=config.param_dtype, rngs=rngs
        )
        inner = config.feed_forward * config.width
        self.up = nnx.Linear(config.width, inner, **linear)
        self.down = nnx.Linear(inner, config.width, kernel_init=nnx.initializers.zeros, **linear)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(jnp.square(jax.nn.relu(self.up(x))))


class Block(nnx.Module):
    """x + attention(norm(x)), then x + feed_forward(norm(x))."""

    def __init__(self, config: Config, *, rngs: nnx.Rngs):
        norm: dict[str, Any] = dict(dtype=jnp.float32, param_dtype=config.param_dtype, rngs=rngs)
        self.attention_norm = nnx.RMSNorm(config.width, **norm)
        self.attention = Attention(config, rngs=rngs)
        self.feed_forward_norm = nnx.RMSNorm(config.width, **norm)
        self.feed_forward = FeedForward(config, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.feed_forward_norm(x))


class Transformer(nnx.Module):
    """Bytes to logits of the byte that follows each.

    [batch, time] of any integer dtype to float32 [batch, time, 256].
    """

    def __init__(self, config: Config, *, rngs: nnx.Rngs):
        width = config.width
        stored: dict[str, Any] = dict(param_dtype=config.param_dtype, rngs=rngs)
        table: dict[str, Any] = dict(dtype=config.dtype, **stored)
        normal, zeros = nnx.initializers.normal(1.0), nnx.initializers.zeros
        self.embed = nnx.Embed(VOCABULARY, width, embedding_init=normal, **table)
        self.blocks = nnx.List([Block(config, rngs=rngs) for _ in range(config.layers)])
        self.norm = nnx.RMSNorm(width, dtype=jnp.float32, **stored)
        self.head = nnx.Linear(width, VOCABULARY, use_bias=False, kernel_init=zeros, **table)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.embed(tokens.astype(jnp.int32))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)).astype(jnp.float32)


def loss(model: Transformer, text: jax.Array) -> jax.Array:
    """Mean cross-entropy, in nats, of the bytes of `text` [batch, time + 1] but the first."""
    logits, following = model(text[:, :-1]), text[:, 1:].astype(jnp.int32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, following).mean()


def parameters(model: nnx.Module) -> int:
    """The number of trainable numbers in `model`."""
    return sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model, nnx.Param)))
