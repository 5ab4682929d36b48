"""The programs that are measured, by name.

`WORKLOADS` are whole programs; tests check each of them against its lanes. `EMITTED` are single operations; tests count
their equations. `TRACED` are what makes tracing slow.
"""

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


# --- what single operations become ------------------------------------------------------------------------------------


def transformer_block(params: dict[str, Any], x: Any) -> Any:
    """A block of attention and a perceptron on x [length, 64], each after a normalization."""

    def normalized(x: Any) -> Any:
        return (x - x.mean(-1, keepdims=True)) / jnp.sqrt(x.var(-1, keepdims=True) + 1e-5)

    q, k, v = (jnp.reshape(normalized(x) @ params[name], (len(x), 4, 16)) for name in "qkv")
    scores = jnp.where(jnp.tri(len(x), dtype=bool), jnp.einsum("qhd,khd->hqk", q, k) / 4, -jnp.inf)
    x = x + jnp.einsum("hqk,khd->qhd", jax.nn.softmax(scores), v).reshape(len(x), 64) @ params["o"]
    return x + jax.nn.gelu(normalized(x) @ params["up"]) @ params["down"]


def block_params() -> dict[str, Any]:
    """The weights of `transformer_block`."""
    square = {name: normal(i, 64, 64) / 8 for i, name in enumerate("qkvo")}
    return {**square, "up": normal(5, 64, 256) / 8, "down": normal(6, 256, 64) / 16}


def lstm(params: dict[str, Any], xs: Any) -> Any:
    """The states [time, 32] of an LSTM over xs [time, 16]."""

    def step(state: tuple, x: Any) -> tuple:
        hidden, cell = state
        i, f, o, u = jnp.split(x @ params["w"] + hidden @ params["u"] + params["b"], 4)
        cell = jax.nn.sigmoid(f) * cell + jax.nn.sigmoid(i) * jnp.tanh(u)
        hidden = jax.nn.sigmoid(o) * jnp.tanh(cell)
        return (hidden, cell), hidden

    return lax.scan(step, (jnp.zeros(32), jnp.zeros(32)), xs)[1]


def lstm_params() -> dict[str, Any]:
    """The weights of `lstm`."""
    return {"w": normal(0, 16, 128) / 4, "u": normal(1, 32, 128) / 6, "b": normal(2, 128)}


def ring(buffer: Any, start: Any) -> Any:
    """100 values written to a ring buffer [128], from `start` on."""

    def step(state: tuple, value: Any) -> tuple:
        buffer, at = state
        return (lax.dynamic_update_index_in_dim(buffer, value, at, 0), (at + 1) % 128), buffer[at - 1]

    return lax.scan(step, (buffer, start), jnp.arange(100.0))


def stack(buffer: Any, xs: Any) -> Any:
    """Of `xs` those above zero, put on a stack one after the other."""

    def step(carry: tuple, x: Any) -> tuple[tuple, None]:
        return lax.cond(x > 0, lambda b, top: (b.at[top].set(x), top + 1), lambda b, top: (b, top), *carry), None

    return lax.scan(step, (buffer, 0), xs)[0]


def solved(a: Any, b: Any) -> Any:
    """The solution of (a a' + 8) x = b by Cholesky's factors."""
    return jax.scipy.linalg.cho_solve(jax.scipy.linalg.cho_factor(a @ a.T + 8 * jnp.eye(8)), b)


def convolved(kernel: Any, x: Any) -> Any:
    """x [N, H, W, C] under a kernel [3, 3, C, O], rectified."""
    return jax.nn.relu(lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")))


def indices(seed: int, below: int, *shape: int) -> Any:
    """Random integers."""
    return jax.random.randint(jax.random.key(seed), shape, 0, below)


def plain(name: str, fun: Callable, in_axes: tuple, args: Callable[[int], tuple]) -> Workload:
    """A workload that maps nothing itself."""
    return Workload(name, lambda vmap: fun, in_axes, args, 64)


EMITTED = [
    plain("attention block", transformer_block, (None, 0), lambda n: (block_params(), normal(9, n, 32, 64))),
    plain("LSTM, scan", lstm, (None, 0), lambda n: (lstm_params(), normal(3, n, 40, 16))),
    plain(
        "gradient of an LSTM",
        jax.grad(lambda p, x: (lstm(p, x) ** 2).sum()),
        (None, 0),
        lambda n: (lstm_params(), normal(3, n, 40, 16)),
    ),
    plain("convolution, shared kernel", convolved, (None, 0), lambda n: (normal(0, 3, 3, 8, 16), normal(1, n, 2, 16, 16, 8))),
    plain(
        "gather, shared table", lambda t, i: t[i].sum(0), (None, 0), lambda n: (normal(0, 1000, 64), indices(1, 1000, n, 20))
    ),
    plain(
        "dynamic_slice, own starts",
        lambda x, i: lax.dynamic_slice(x, (i, 0), (8, 16)),
        (0, 0),
        lambda n: (normal(0, n, 128, 16), jnp.arange(n)),
    ),
    plain(
        "dynamic_update_slice, own starts",
        lambda x, u, i: lax.dynamic_update_slice(x, u, (i, 0)),
        (0, 0, 0),
        lambda n: (normal(0, n, 128, 16), normal(1, n, 8, 16), jnp.arange(n)),
    ),
    plain("ring buffer, scan", ring, (0, 0), lambda n: (normal(0, n, 128), jnp.arange(n))),
    plain("stack pushed in a branch, scan", stack, (0, 0), lambda n: (normal(0, n, 1024), normal(1, n, 1024))),
    plain("sort", jnp.sort, (1,), lambda n: (normal(0, 100, n),)),
    plain("argsort", jnp.argsort, (0,), lambda n: (normal(0, n, 100),)),
    plain("searchsorted", jnp.searchsorted, (None, 0), lambda n: (jnp.linspace(-3, 3, 100), normal(0, n, 50))),
    plain("Cholesky, own matrices", solved, (0, 0), lambda n: (normal(0, n, 8, 8), normal(1, n, 8))),
    plain("Cholesky, shared matrix", solved, (None, 0), lambda n: (normal(0, 8, 8), normal(1, n, 8))),
    plain("FFT", lambda x: jnp.fft.irfft(jnp.fft.rfft(x) * 2), (1,), lambda n: (normal(0, 128, n),)),
    plain("cumulative sums", lambda x: jnp.cumsum(x) + jnp.cumprod(x), (1,), lambda n: (normal(0, 100, n),)),
    plain(
        "Hessian",
        jax.hessian(lambda x, w: (jnp.tanh(x @ w) ** 2).sum()),
        (0, None),
        lambda n: (normal(0, n, 8), normal(3, 8, 8)),
    ),
    plain(
        "scatter, own indices",
        lambda x, i: jnp.zeros(50).at[i].add(x),
        (0, 0),
        lambda n: (normal(0, n, 30), indices(1, 50, n, 30)),
    ),
    plain(
        "switch, shared number",
        lambda i, x: lax.switch(i, [jnp.sin, jnp.cos], x),
        (None, 0),
        lambda n: (jnp.int32(1), normal(0, n, 8)),
    ),
]


# --- what makes tracing slow ------------------------------------------------------------------------------------------


def activations(x: Any, w: Any) -> Any:
    """Functions that are jitted each, or have a derivative of their own, many times."""
    for _ in range(15):
        x = jax.nn.softmax(jax.nn.gelu(x @ w))
        x = jax.nn.relu(jnp.where(x > 0, x + jax.nn.silu(x), jnp.linalg.norm(x)))
    return x


def normalized(params: list, x: Any) -> Any:
    """Residual layers, each after a normalization."""
    for w, b in params:
        x = x + jax.nn.relu((x - x.mean()) / jnp.sqrt(x.var() + 1e-5) @ w + b)
    return x


def deep_loss(params: list, x: Any) -> Any:
    """The energy of a network of plain layers."""
    for w in params:
        x = jnp.tanh(x @ w)
    return (x**2).sum()


def recurrence(x: Any, w: Any) -> Any:
    """A scan of a long body."""

    def step(state: Any, _: Any) -> tuple:
        for _ in range(10):
            state = jnp.tanh(state @ w) * 0.9 + 0.1
        return state, state.sum()

    return lax.scan(step, x, None, length=5)


def branches(x: Any, w: Any) -> Any:
    """Three choices of a lane between long branches."""

    def sines(x: Any) -> Any:
        for _ in range(10):
            x = jnp.sin(x @ w)
        return x

    def cosines(x: Any) -> Any:
        for _ in range(10):
            x = jnp.cos(x) * 2
        return x

    for _ in range(3):
        x = lax.cond(x.sum() > 0, sines, cosines, x)
    return x


def three_maps(vmap: Callable) -> Callable:
    """Thirty equations under three maps, of which two are here."""

    def waves(x: Any, y: Any) -> Any:
        for _ in range(10):
            x = jnp.sin(x) * y + 0.1
        return x

    return vmap(vmap(waves, (0, None)), (None, 0))


def rows(n: int) -> tuple:
    """Lanes [n, 8], and weights [8, 8]."""
    return normal(0, n, 8), normal(1, 8, 8)


def squares(count: int) -> list:
    """Weights [8, 8] of so many layers."""
    return [normal(i, 8, 8) for i in range(count)]


TRACED = [
    plain("many jits", activations, (0, None), rows),
    plain("normalized layers", normalized, (None, 0), lambda n: ([(w, w[0]) for w in squares(6)], normal(9, n, 8))),
    plain("gradient inside", jax.grad(deep_loss), (None, 0), lambda n: (squares(6), normal(9, n, 8))),
    plain("scan of a long body", recurrence, (0, None), rows),
    plain("branches, by lane", branches, (0, None), rows),
    Workload("three nested maps", three_maps, (0, 0), lambda n: (normal(0, n, 6), normal(1, n, 5)), 4),
]
