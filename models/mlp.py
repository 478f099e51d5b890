"""A multilayer perceptron for classification, in Flax NNX: features to logits of classes."""

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.typing import DTypeLike


@dataclass(frozen=True)
class Config:
    """Sizes, and dtypes: `dtype` is computed in, `param_dtype` is stored; logits are float32.

    The defaults are those of scikit-learn's handwritten digits: 8 x 8 pixels, ten classes.
    """

    features: int = 64
    hidden: tuple[int, ...] = (128, 64)
    classes: int = 10
    dtype: DTypeLike = jnp.float32
    param_dtype: DTypeLike = jnp.float32

    def __post_init__(self) -> None:
        if min(self.features, self.classes, *self.hidden) < 1:
            raise ValueError(f"sizes must be at least 1, but found {self}")


class MLP(nnx.Module):
    """[..., features] to float32 [..., classes], with a ReLU after each layer but the last."""

    def __init__(self, config: Config = Config(), *, rngs: nnx.Rngs):
        linear: dict[str, Any] = dict(dtype=config.dtype, param_dtype=config.param_dtype, rngs=rngs)
        sizes = (config.features, *config.hidden)
        self.hidden = nnx.List([nnx.Linear(a, b, **linear) for a, b in pairwise(sizes)])
        self.head = nnx.Linear(sizes[-1], config.classes, **linear)

    def __call__(self, x: jax.Array) -> jax.Array:
        for layer in self.hidden:
            x = nnx.relu(layer(x))
        return self.head(x).astype(jnp.float32)


def loss(model: MLP, x: jax.Array, label: jax.Array) -> jax.Array:
    """Mean cross-entropy, in nats: `x` [batch, features], `label` integer [batch]."""
    return optax.softmax_cross_entropy_with_integer_labels(model(x), label).mean()


def accuracy(model: MLP, x: jax.Array, label: jax.Array) -> jax.Array:
    """The share, 0 to 1, of examples for which the greatest logit is that of their label."""
    return (model(x).argmax(axis=-1) == label).mean()
