"""The programs of the tour: each maps a function of one lane over real input."""

from __future__ import annotations

import csv
import importlib.resources
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


class Program(NamedTuple):
    """A function of one lane, the arguments of many, and `lane(i)`: the arguments of one."""

    name: str
    fun: Callable
    in_axes: Any
    args: tuple
    lanes: int
    lane: Callable[[int], tuple]


def stops() -> Iterator[Program]:
    """The programs, in the order of the tour."""
    yield sample_gradients()
    yield particles()
    yield motors()
    yield oscillators()
    yield chains()


# --- per-sample gradients of a logistic regression, on Fisher's iris --------------------------------------------------


def iris() -> tuple[np.ndarray, np.ndarray]:
    """Fisher's iris: measurements [150, 4] in units of their standard deviation, and species [150] as 0, 1, 2."""
    file = importlib.resources.files("minibatch.tour") / "data" / "iris.csv"
    rows = list(csv.reader(line for line in file.read_text().splitlines() if not line.startswith("#")))[1:]
    x = np.array([row[:4] for row in rows], np.float32)
    species = {name: i for i, name in enumerate(dict.fromkeys(row[4] for row in rows))}
    return (x - x.mean(0)) / x.std(0), np.array([species[row[4]] for row in rows], np.int32)


def logistic_loss(params: dict[str, Any], x: Any, label: Any) -> Any:
    """Minus the log-likelihood of `label`, a class, for one sample x [n]; params w [n, classes] and b [classes]."""
    return -jax.nn.log_softmax(x @ params["w"] + params["b"])[label]


def sample_gradients() -> Program:
    """One gradient for each of the 150 flowers."""
    x, labels = map(jnp.asarray, iris())
    params = {"w": 0.1 * jax.random.normal(jax.random.key(0), (4, 3)), "b": jnp.zeros(3)}
    return Program(
        "per-sample gradients, iris",
        jax.grad(logistic_loss),
        (None, 0, 0),
        (params, x, labels),
        len(x),
        lambda i: (params, x[i], labels[i]),
    )


# --- a class that decides while flattening (https://github.com/jax-ml/jax/issues/16170) -------------------------------


@jax.tree_util.register_pytree_node_class
class Particle:
    """What holds an array is a child; anything else is static: the structure depends on the leaves."""

    def __init__(self, velocity: Any) -> None:
        self.velocity = velocity

    def tree_flatten(self) -> tuple:
        """The velocity as a child where it is an array, as a static value where not."""
        moving = isinstance(self.velocity, jax.Array)
        return ((self.velocity,), (True, None)) if moving else ((), (False, self.velocity))

    @classmethod
    def tree_unflatten(cls, static: tuple, children: tuple) -> Particle:
        """The inverse."""
        return cls(children[0] if static[0] else static[1])


def particles() -> Program:
    """Particles made in every lane, the moving ones from a key."""
    keys = jax.random.split(jax.random.key(1), 64)
    return Program(
        "class shaped by its leaves",
        lambda key: (Particle(jax.random.normal(key, (3,))), Particle("at rest")),
        0,
        (keys,),
        len(keys),
        lambda i: (keys[i],),
    )


# --- axes given as the argument's own class, whose static fields differ -----------------------------------------------


class Gear(NamedTuple):
    """Teeth of a gear."""

    teeth: Any


class Motor:
    """A motor: power and gear are children, the serial number is static."""

    def __init__(self, power: Any, gear: Any, serial: int | None = None) -> None:
        self.power, self.gear, self.serial = power, gear, serial


jax.tree_util.register_pytree_with_keys(
    Motor,
    lambda m: (((jax.tree_util.GetAttrKey("power"), m.power), (jax.tree_util.GetAttrKey("gear"), m.gear)), m.serial),
    lambda serial, children: Motor(*children, serial=serial),
)


def motors() -> Program:
    """in_axes is a Motor with another serial number, and None for everything under its gear."""
    power, gear = jnp.linspace(1.0, 2.0, 1000), Gear(jnp.arange(1.0, 33.0))
    return Program(
        "static fields differ in in_axes",
        lambda m: (m, jnp.tanh(m.power * m.gear.teeth).sum()),
        (Motor(0, None, serial=None),),
        (Motor(power, gear, serial=7),),
        len(power),
        lambda i: (Motor(power[i], gear, serial=7),),
    )


# --- an adaptive solver: every lane takes its own steps ---------------------------------------------------------------


def solve(field: Callable, start: Any, end: float, tolerance: float = 1e-5) -> tuple[Any, Any]:
    """The solution of y' = field(y), y(0) = start [n], at `end`, and the number of steps tried.

    Bogacki and Shampine's embedded pair of orders 3 and 2 (Appl. Math. Lett. 2, 1989, 321-325).
    """

    def step(state: tuple) -> tuple:
        t, y, k1, h, steps = state
        h = jnp.minimum(h, end - t)
        k2 = field(y + h / 2 * k1)
        k3 = field(y + 3 * h / 4 * k2)
        new = y + h / 9 * (2 * k1 + 3 * k2 + 4 * k3)
        k4 = field(new)
        off = h * jnp.linalg.norm(-5 * k1 + 6 * k2 + 8 * k3 - 9 * k4) / 72
        error = off / (tolerance * (1 + jnp.linalg.norm(y)))
        accepted = error <= 1
        t, y, k1 = (jnp.where(accepted, a, b) for a, b in ((t + h, t), (new, y), (k4, k1)))
        return t, y, k1, h * jnp.clip(0.9 * error ** (-1 / 3), 0.2, 5.0), steps + 1

    state = (jnp.zeros_like(start[0]), start, field(start), jnp.full_like(start[0], 0.01), 0)
    _, y, _, _, steps = lax.while_loop(lambda state: state[0] < end, step, state)
    return y, steps


def van_der_pol(stiffness: Any, start: Any) -> tuple[Any, Any]:
    """The oscillator x'' = stiffness (1 - x^2) x' - x at time 5, from start [2]."""
    return solve(lambda y: jnp.stack([y[1], stiffness * (1 - y[0] ** 2) * y[1] - y[0]]), start, 5.0)


def oscillators(lanes: int = 128) -> Program:
    """Van der Pol oscillators from mild to stiff."""
    stiffness, start = jnp.linspace(0.1, 8.0, lanes), jnp.array([2.0, 0.0])
    return Program(
        "adaptive Runge-Kutta, while_loop",
        van_der_pol,
        (0, None),
        (stiffness, start),
        lanes,
        lambda i: (stiffness[i], start),
    )


# --- Hamiltonian Monte Carlo: one chain for each key ------------------------------------------------------------------


def sample(log_density: Callable, start: Any, key: Any, draws: int, step: float = 0.05, leaps: int = 8) -> Any:
    """A Markov chain [draws, n] of log_density's distribution, from start [n], by Hamiltonian Monte Carlo."""
    slope = jax.grad(log_density)

    def leap(_: Any, state: tuple) -> tuple:
        position, momentum = state
        momentum = momentum + step / 2 * slope(position)
        position = position + step * momentum
        return position, momentum + step / 2 * slope(position)

    def draw(position: Any, key: Any) -> tuple:
        for_momentum, for_choice = jax.random.split(key)
        momentum = jax.random.normal(for_momentum, position.shape)
        proposed, final = lax.fori_loop(0, leaps, leap, (position, momentum))
        gain = log_density(proposed) - log_density(position) + (momentum @ momentum - final @ final) / 2
        position = jnp.where(jnp.log(jax.random.uniform(for_choice)) < gain, proposed, position)
        return position, position

    return lax.scan(draw, start, jax.random.split(key, draws))[1]


def posterior(x: Any, positive: Any) -> Callable:
    """The log-density of a logistic regression's weights [n + 1], given samples x [m, n] and labels [m], true or not."""

    def log_density(weights: Any) -> Any:
        margin = jnp.where(positive, 1, -1) * (x @ weights[:-1] + weights[-1])
        return jax.nn.log_sigmoid(margin).sum() - weights @ weights / 2

    return log_density


def chains(lanes: int = 32, draws: int = 25) -> Program:
    """Chains of the posterior that tells virginica from the other two species."""
    x, species = iris()
    log_density = posterior(jnp.asarray(x), jnp.asarray(species == 2))
    keys = jax.random.split(jax.random.key(2), lanes)
    return Program(
        "Hamiltonian Monte Carlo, keys",
        lambda key: sample(log_density, jnp.zeros(5), key, draws),
        0,
        (keys,),
        lanes,
        lambda i: (keys[i],),
    )
