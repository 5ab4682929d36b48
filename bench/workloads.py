"""The programs that are measured, by name; tests check each of them against its lanes."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from minibatch.tour.programs import logistic_loss, posterior, sample, van_der_pol


class Workload(NamedTuple):
    """A function of one lane, and how to draw the arguments of many.

    `fun(vmap)` is the function of one lane: it gets the `vmap` to use where it maps something itself. `args(lanes)` are
    the arguments, of which those with 0 in `in_axes` have lanes on their first axis. `lanes` is how many are measured.
    """

    name: str
    fun: Callable[[Callable], Callable]
    in_axes: tuple[int | None, ...]
    args: Callable[[int], tuple]
    lanes: int

    def lane(self, args: Sequence[Any], i: int) -> list:
        """The arguments of lane `i` alone."""
        return [x if d is None else jax.tree.map(lambda leaf: leaf[i], x) for x, d in zip(args, self.in_axes, strict=True)]


def normal(seed: int, *shape: int) -> Any:
    """Standard normal numbers."""
    return jax.random.normal(jax.random.key(seed), shape)


# --- dispatch and tracing ---------------------------------------------------------------------------------------------


def elementwise(x: Any, y: Any) -> Any:
    """A few operations on small arrays: what a call costs by itself."""
    return jnp.tanh(x) * y + 1


def flat(x: Any, w: Any) -> Any:
    """300 equations, one after the other."""
    for _ in range(60):
        x = jnp.tanh(x @ w + 0.1) * 0.9 - 0.2
    return x


# --- networks ---------------------------------------------------------------------------------------------------------


def layers(seed: int, *widths: int) -> list[dict[str, Any]]:
    """Weights w [n, m] and b [m] of a multi-layer perceptron."""
    pairs = enumerate(itertools.pairwise(widths))
    return [{"w": normal(seed + i, n, m) / n**0.5, "b": jnp.zeros(m)} for i, (n, m) in pairs]


def perceptron(params: list[dict[str, Any]], x: Any) -> Any:
    """Logits [classes] of one sample x [n]."""
    for layer in params[:-1]:
        x = jax.nn.relu(x @ layer["w"] + layer["b"])
    return x @ params[-1]["w"] + params[-1]["b"]


def perceptron_loss(params: list[dict[str, Any]], x: Any, label: Any) -> Any:
    """Cross-entropy of one sample."""
    return -jax.nn.log_softmax(perceptron(params, x))[label]


def filters(seed: int, classes: int = 10) -> dict[str, Any]:
    """Weights of a small convolutional network on images [8, 8]."""
    return {
        "first": normal(seed, 3, 3, 1, 8) / 3,
        "second": normal(seed + 1, 3, 3, 8, 16) / 72**0.5,
        "out": layers(seed + 2, 64, classes),
    }


def network_loss(params: dict[str, Any], image: Any, label: Any) -> Any:
    """Cross-entropy of one image [8, 8] under a network of two convolutions, each followed by pooling."""
    x = image[None, :, :, None]
    for name in ("first", "second"):
        x = jax.nn.relu(lax.conv_general_dilated(x, params[name], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")))
        x = lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
    return perceptron_loss(params["out"], x.reshape(-1), label)


def members(count: int) -> list[dict[str, Any]]:
    """The weights of many perceptrons, stacked."""
    return jax.tree.map(lambda *xs: jnp.stack(xs), *[layers(10 * i, 16, 32, 1) for i in range(count)])


def attention(vmap: Callable) -> Callable:
    """Causal attention of q, k, v [heads, length, width]: a map over heads, to be mapped over sequences."""

    def head(q: Any, k: Any, v: Any) -> Any:
        scores = q @ k.T / q.shape[-1] ** 0.5
        scores = jnp.where(jnp.tri(len(q), dtype=bool), scores, -jnp.inf)
        return jax.nn.softmax(scores) @ v

    return vmap(head)


# --- filters and fits -------------------------------------------------------------------------------------------------


def kalman(observations: Any, noise: Any) -> tuple[Any, Any]:
    """The filtered states [time, 2] of a body seen at observations [time], and its log-likelihood."""
    move, see = jnp.array([[1.0, 1.0], [0.0, 1.0]]), jnp.array([[1.0, 0.0]])
    shaken = 0.01 * jnp.eye(2)

    def step(state: tuple, observed: Any) -> tuple:
        mean, cov = move @ state[0], move @ state[1] @ move.T + shaken
        spread = see @ cov @ see.T + noise
        gain = jnp.linalg.solve(spread, see @ cov).T
        off = observed - see @ mean
        mean, cov = mean + gain @ off, cov - gain @ see @ cov
        likely = -0.5 * (off @ jnp.linalg.solve(spread, off) + jnp.linalg.slogdet(2 * jnp.pi * spread)[1])
        return (mean, cov), (mean, likely)

    _, (means, likely) = lax.scan(step, (jnp.zeros(2), jnp.eye(2)), observations)
    return means, likely.sum()


def levenberg_marquardt(times: Any, values: Any) -> tuple[Any, Any]:
    """The parameters [3] of a decaying exponential through values [n] at times [n], and the number of steps."""

    def residual(p: Any) -> Any:
        return p[0] * jnp.exp(-p[1] * times) + p[2] - values

    def step(state: tuple) -> tuple:
        p, damping, steps, _ = state
        r, slopes = residual(p), jax.jacfwd(residual)(p)
        normal_matrix = slopes.T @ slopes
        change = jnp.linalg.solve(normal_matrix + damping * jnp.diag(jnp.diag(normal_matrix)), slopes.T @ r)
        better = (residual(p - change) ** 2).sum() < (r**2).sum()
        size = jnp.abs(change).max()
        return jnp.where(better, p - change, p), damping * jnp.where(better, 0.3, 5.0), steps + 1, size

    start = (jnp.array([1.0, 1.0, 0.0]), 1e-2, 0, 1.0)
    p, _, steps, _ = lax.while_loop(lambda state: (state[3] > 1e-3) & (state[2] < 50), step, start)
    return p, steps


def decays(lanes: int) -> Any:
    """Noisy exponentials [lanes, 20], each with its own rate."""
    rate = jnp.linspace(0.5, 3.0, lanes)[:, None]
    return 2 * jnp.exp(-rate * jnp.linspace(0, 3, 20)) + 0.5 + 0.01 * normal(5, lanes, 20)


def chain(key: Any) -> Any:
    """Draws [20, 4] of a logistic regression's posterior."""
    return sample(posterior(normal(0, 50, 3), normal(1, 50) > 0), jnp.zeros(4), key, draws=20)


def labels(lanes: int, classes: int) -> Any:
    """A class for each lane."""
    return jax.random.randint(jax.random.key(9), (lanes,), 0, classes)


WORKLOADS = [
    Workload("elementwise, small", lambda vmap: elementwise, (0, None), lambda n: (normal(0, n, 4), normal(1, 4)), 8),
    Workload("300 flat equations", lambda vmap: flat, (0, None), lambda n: (normal(0, n, 8), normal(1, 8, 8) / 3), 32),
    Workload(
        "per-sample gradients, logistic",
        lambda vmap: jax.grad(logistic_loss),
        (None, 0, 0),
        lambda n: (layers(0, 30, 3)[0], normal(1, n, 30), labels(n, 3)),
        256,
    ),
    Workload(
        "per-sample gradients, perceptron",
        lambda vmap: jax.grad(perceptron_loss),
        (None, 0, 0),
        lambda n: (layers(0, 64, 64, 10), normal(1, n, 64), labels(n, 10)),
        128,
    ),
    Workload(
        "per-sample gradients, convolutions",
        lambda vmap: jax.grad(network_loss),
        (None, 0, 0),
        lambda n: (filters(0), normal(1, n, 8, 8), labels(n, 10)),
        64,
    ),
    Workload(
        "ensemble of perceptrons",
        lambda vmap: lambda params, batch: vmap(perceptron, in_axes=(None, 0))(params, batch),
        (0, None),
        lambda n: (members(n), normal(1, 64, 16)),
        32,
    ),
    Workload("attention, nested", attention, (0, 0, 0), lambda n: tuple(normal(i, n, 4, 32, 16) for i in range(3)), 16),
    Workload("Kalman filter, scan", lambda vmap: kalman, (0, None), lambda n: (normal(0, n, 50).cumsum(1), jnp.eye(1)), 64),
    Workload(
        "adaptive Runge-Kutta, while",
        lambda vmap: van_der_pol,
        (0, None),
        lambda n: (jnp.linspace(0.1, 8.0, n), jnp.array([2.0, 0.0])),
        64,
    ),
    Workload("Hamiltonian Monte Carlo", lambda vmap: chain, (0,), lambda n: (jax.random.split(jax.random.key(2), n),), 32),
    Workload(
        "Levenberg-Marquardt, while",
        lambda vmap: levenberg_marquardt,
        (None, 0),
        lambda n: (jnp.linspace(0, 3, 20), decays(n)),
        64,
    ),
]
