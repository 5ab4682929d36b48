"""Calls whose cost is the call itself, and loops that map a new function at every turn."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from workloads import elementwise, layers, normal, perceptron

from minibatch import if_array


class Call(NamedTuple):
    """A function, its `in_axes`, and arguments. `beside` is what jit is given, where it cannot be given the same."""

    name: str
    fun: Callable
    in_axes: Any
    args: tuple
    beside: tuple[Callable, Any, tuple] | None = None
    static: tuple[int, ...] = ()


X, Y = normal(0, 8, 4), normal(1, 4)


def tree(count: int) -> dict[str, Any]:
    """A dict of small arrays."""
    return {f"w{i:02}": normal(i, 3) for i in range(count)}


def total(x: Any, params: dict[str, Any]) -> Any:
    """Uses every leaf."""
    return x * sum(w[0] for w in params.values())


class Model:
    """A plain object that holds its parameters."""

    def __init__(self) -> None:
        self.w, self.b = normal(2, 4), normal(3, 4)

    def predict(self, x: Any) -> Any:
        """One lane."""
        return jnp.tanh(x) * self.w + self.b


def with_activation(x: Any, model: dict[str, Any]) -> Any:
    """A model with a function and a number among its leaves."""
    return model["act"](x) * model["scale"] * sum(w[0] for w in model["params"].values())


def calls() -> Iterator[Call]:
    """What is called again and again."""
    model, weight = Model(), normal(4, 4)
    static = {"act": jnp.tanh, "scale": 2.0}
    yield Call("one array", lambda x: jnp.tanh(x) + 1, 0, (X,))
    yield Call("two arrays", elementwise, (0, None), (X, Y))
    for count in (6, 20, 50):
        yield Call(f"pytree of {count} leaves", total, (0, None), (X, tree(count)))
    yield Call("shared scalar", lambda x, n: x * n, (0, None), (X, 2.0))
    yield Call("static string", lambda x, how: getattr(x, how)(), (0, None), (X, "sum"), static=(1,))
    yield Call("static function", lambda x, fun: fun(x), (0, None), (X, jnp.tanh), static=(1,))
    yield Call(
        "pytree of 20 leaves, scalar, string",
        lambda x, params, n, how: getattr(total(x, params) * n, how)(),
        (0, None, None, None),
        (X, tree(20), 2.0, "sum"),
        static=(3,),
    )
    yield Call(
        "pytree of 20 leaves, function and scalar inside",
        with_activation,
        (0, if_array(5)),  # no array has so many dims: all are shared
        (X, {"params": tree(20), **static}),
        beside=(lambda x, params: with_activation(x, {"params": params, **static}), (0, None), (X, tree(20))),
    )
    yield Call("captured array", lambda x: x * weight, 0, (X,))
    yield Call("bound method", model.predict, 0, (X,))


# --- loops ------------------------------------------------------------------------------------------------------------

PARAMS, BATCH = layers(0, 16, 32, 32, 4), normal(9, 64, 16)


def loops() -> Iterator[tuple[str, Callable[[Callable], Callable]]]:
    """What one turn of each loop does, given the `vmap` to use."""
    for size, f in (("", lambda x: x), ("perceptron, ", lambda x: perceptron(PARAMS, x))):
        numbers = itertools.count(2)

        def fresh(vmap: Callable, f: Callable = f) -> Callable:
            weight = normal(3, 1)
            return lambda: vmap(lambda x: f(x) * weight)(BATCH)

        def constant(vmap: Callable, f: Callable = f, numbers: Iterator[int] = numbers) -> Callable:
            def turn() -> Any:
                step = next(numbers) / 4
                return vmap(lambda x: f(x) * step)(BATCH)

            return turn

        def argument(vmap: Callable, f: Callable = f, numbers: Iterator[int] = numbers) -> Callable:
            mapped = vmap(lambda x, n: f(x) * n, in_axes=(0, None))
            return lambda: mapped(BATCH, next(numbers))

        def rebound(vmap: Callable, f: Callable = f) -> Callable:
            weight = normal(3, 1)
            mapped = vmap(lambda x: f(x) * weight)

            def turn() -> Any:
                nonlocal weight
                weight = weight + 0
                return mapped(BATCH)

            return turn

        yield f"{size}a new function over an array", fresh
        yield f"{size}a new Python constant in a new function", constant
        yield f"{size}another shared int", argument
        yield f"{size}a captured array set anew", rebound


def jitted(call: Call) -> Callable:
    """The call as a careful user compiles it with jax.vmap."""
    fun, in_axes, args = call.beside or (call.fun, call.in_axes, call.args)
    mapped = jax.jit(jax.vmap(fun, in_axes), static_argnums=call.static)
    return lambda: mapped(*args)
