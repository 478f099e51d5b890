"""A decoder-only Transformer language model, in Flax NNX: small ones over bytes, larger over tokens.

Pre-norm blocks, rotary positions, squared-ReLU feed-forward. Whatever writes to the residual stream
or the logits starts at zero, so training begins at a loss of exactly ln of the vocabulary. There are
no biases: the gradient of a key's bias is zero but for rounding, and Adam would blow that rounding
up to a whole step, so that runs differing only in the order of their sums would drift apart.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.typing import DTypeLike


@dataclass(frozen=True)
class Config:
    """Sizes, and dtypes: `dtype` is computed in, `param_dtype` is stored.

    Norms, attention weights and logits are float32 always. `vocabulary`: 256 where a token is a
    byte. `scan`: the blocks are one, its parameters stacked [layers, ...], and run in a loop, so
    that compiling costs the same for any number of layers. `remat`: the backward pass computes each
    block again, and the logits of each example, of which the loss then holds one at a time.
    """

    layers: int = 3
    width: int = 128
    heads: int = 4
    feed_forward: int = 4  # times the width
    dtype: DTypeLike = jnp.float32
    param_dtype: DTypeLike = jnp.float32
    vocabulary: int = 256
    scan: bool = False
    remat: bool = False

    def __post_init__(self) -> None:
        if min(self.layers, self.width, self.heads, self.feed_forward, self.vocabulary) < 1:
            raise ValueError(f"sizes must be at least 1, but found {self}")
        if self.width % (2 * self.heads):
            raise ValueError(
                f"width={self.width} must be a multiple of 2 * heads = {2 * self.heads}: rotary "
                "positions turn pairs"
            )


def _trained(width: int) -> Config:
    """24 layers as people train them: bfloat16 computed in, float32 stored, 50,304 tokens."""
    return Config(
        layers=24,
        width=width,
        heads=16,
        dtype=jnp.bfloat16,
        vocabulary=50_304,  # GPT-2's 50,257, rounded up to a multiple of 128
        scan=True,
        remat=True,
    )


SIZES = {
    "tiny": Config(layers=1, width=32, heads=2),  # for tests
    "mini": Config(layers=2, width=96, heads=3),
    "small": Config(layers=3, width=128, heads=4),
    "base": Config(layers=6, width=256, heads=8),
    "medium": _trained(1024),  # 405 million parameters
    "large": _trained(2048),  # 1.4 billion
}

OnLayer = Callable[[Any], Any]


def _as_they_are(params: Any) -> Any:
    return params


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
    """Tokens to logits of the token that follows each.

    [batch, time] of any integer dtype to float32 [batch, time, vocabulary]. `on_layer`: what is done
    to the parameters just before they are used, once for the embedding, once for each block, without
    its layer dimension, and once for the last norm with the head: a pytree like them is given and
    taken. So a function whose derivative reduces is applied layer by layer, and one that puts shards
    together has one layer whole at a time.
    """

    def __init__(self, config: Config, *, rngs: nnx.Rngs):
        width = config.width
        stored: dict[str, Any] = dict(param_dtype=config.param_dtype, rngs=rngs)
        table: dict[str, Any] = dict(dtype=config.dtype, **stored)
        normal, zeros = nnx.initializers.normal(1.0), nnx.initializers.zeros
        self.scan, self.remat = config.scan, config.remat
        self.embed = nnx.Embed(config.vocabulary, width, embedding_init=normal, **table)
        self.blocks: Any = (
            _stacked(config, rngs)
            if config.scan
            else nnx.List([Block(config, rngs=rngs) for _ in range(config.layers)])
        )
        self.norm = nnx.RMSNorm(width, dtype=jnp.float32, **stored)
        self.head = nnx.Linear(width, config.vocabulary, use_bias=False, kernel_init=zeros, **table)

    def __call__(self, tokens: jax.Array, on_layer: OnLayer = _as_they_are) -> jax.Array:
        x = self.hidden(tokens, on_layer)
        return self.readout(on_layer)(x)

    def hidden(self, tokens: jax.Array, on_layer: OnLayer = _as_they_are) -> jax.Array:
        """What the last block leaves: [batch, time] to [batch, time, width]."""
        x = _used(self.embed, on_layer)(tokens.astype(jnp.int32))
        if self.scan:
            block, params = self._layer(self.blocks, on_layer)
            return jax.lax.scan(lambda x, params: (block(x, params), None), x, params)[0]
        for each in self.blocks:
            block, params = self._layer(each, on_layer)
            x = block(x, params)
        return x

    def readout(self, on_layer: OnLayer = _as_they_are) -> Callable[[jax.Array], jax.Array]:
        """The function of [..., width] to logits, float32 [..., vocabulary], for any number of calls."""
        norm, head = _used((self.norm, self.head), on_layer)
        return lambda x: head(norm(x)).astype(jnp.float32)

    def _layer(self, block: nnx.Module, on_layer: OnLayer) -> tuple[Callable[..., jax.Array], Any]:
        """A block as a function of its input and its parameters, and those."""
        graph, params = nnx.split(block)

        def run(x: jax.Array, params: Any) -> jax.Array:
            return nnx.merge(graph, on_layer(params))(x)

        # A loop's body is computed again in another loop, with which XLA merges nothing.
        return jax.checkpoint(run, prevent_cse=not self.scan) if self.remat else run, params


def _used(modules: Any, on_layer: OnLayer) -> Any:
    """The modules, with what `on_layer` makes of their parameters."""
    graph, params = nnx.split(modules)
    return nnx.merge(graph, on_layer(params))


def _stacked(config: Config, rngs: nnx.Rngs) -> Block:
    """A block whose parameters are those of all layers, [layers, ...]."""

    @nnx.split_rngs(splits=config.layers)
    @nnx.vmap(in_axes=0, out_axes=0)
    def stack(rngs: nnx.Rngs) -> Block:
        return Block(config, rngs=rngs)

    return stack(rngs)


def loss(model: Transformer, text: jax.Array, on_layer: OnLayer = _as_they_are) -> jax.Array:
    """Mean cross-entropy, in nats, of the tokens of `text` [batch, time + 1] but the first."""
    x = model.hidden(text[:, :-1], on_layer)
    logits = model.readout(on_layer)  # once, not again for each example

    def entropies(x: jax.Array, text: jax.Array) -> jax.Array:
        following = text[..., 1:].astype(jnp.int32)
        return optax.softmax_cross_entropy_with_integer_labels(logits(x), following)

    if not model.remat:
        return entropies(x, text).mean()
    again = jax.checkpoint(entropies, prevent_cse=False)
    return jax.lax.map(lambda example: again(*example), (x, text)).mean()


def parameters(model: nnx.Module) -> int:
    """The number of trainable numbers in `model`."""
    return sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model, nnx.Param)))
