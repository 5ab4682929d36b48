"""Cases for rules/calls.py."""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import linear_call, zero_from_primal
from jax.experimental import compute_on
from jax.experimental.custom_partitioning import custom_partitioning
from jax.experimental.scheduling_groups import scheduling_group
from jax.extend.core.primitives import closed_call_p
from oracle import Case, f32, i32


@jax.custom_jvp
def bent(x, w):
    """A function whose derivative is deliberately not its own."""
    return jnp.sin(x) * w, w * 2


@bent.defjvp
def _(primals, tangents):
    (x, w), (dx, dw) = primals, tangents
    return bent(x, w), (7 * dx * w + dw * x, dw + jnp.cos(w))


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def applied(f, x):
    """A function of a function, with an integer output."""
    return f(x), jnp.sign(x).astype(jnp.int32)


@functools.partial(applied.defjvp, symbolic_zeros=True)
def _(f, primals, tangents):
    y, s = applied(f, *primals)
    return (y, s), (3 * tangents[0], zero_from_primal(s, symbolic_zeros=True))


@jax.custom_vjp
def scaled(x, k, n):
    """A function with a backward rule of its own; one residual is an argument, and one argument is an integer."""
    return jnp.sin(x) * k, x.sum() * n


scaled.defvjp(
    lambda x, k, n: (scaled(x, k, n), (x, jnp.cos(k), n)),
    lambda res, cts: (7.0 * cts[0] + res[2] * cts[1], (jnp.sin(res[0]) * cts[0]).sum() * res[1], None),
)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def summed(f, x, w):
    """A function of a function, that is told which arguments matter."""
    return (f(x) * w).sum()


summed.defvjp(
    lambda f, x, w: (summed(f, x.value, w.value), (x.value, w.value if w.perturbed else None)),
    lambda f, res, ct: (5.0 * ct * f(res[0]), None if res[1] is None else ct * res[1]),
    symbolic_zeros=True,
)


@functools.partial(jax.custom_vjp)
def light(x, w):
    """A function whose forward rule runs only where its residuals are read."""
    return x * w


light.defvjp(lambda x, w: (x * w, (x, w + 1)), lambda res, ct: (ct * res[1], 2 * ct * res[0]), optimize_remat=True)


@jax.custom_batching.custom_vmap
def many(x, y):
    """A function that says how it maps."""
    return jnp.sin(x) * y, y


@many.def_vmap
def _(size, batched, x, y):
    assert all(v.shape[0] == size for v, b in zip((x, y), batched, strict=True) if b)
    return (jnp.sin(x) * y, y), (any(batched), batched[1])


@functools.partial(jax.checkpoint, policy=jax.checkpoint_policies.dots_saveable)
def block(x, w):
    """A checkpointed block."""
    return jnp.sin(w @ jnp.cos(x)) + x


@custom_partitioning
def parted(x, w):
    """A function that says how it is partitioned over devices."""
    return x * 2 + w


parted.def_partition(
    partition=lambda mesh, args, out: (mesh, lambda x, w: x * 2 + w, out.sharding, tuple(a.sharding for a in args)),
    infer_sharding_from_operands=lambda mesh, args, out: args[0].sharding,
    sharding_rule="i, i -> i",
)


@functools.partial(lax.composite, name="mine.norm")
def norm(x, w, *, eps=1e-6):
    """An operation with a name and a decomposition."""
    return x * w / jnp.sqrt((x * x).sum() + eps)


def linear(k, x):
    """A linear function with a transpose of its own."""
    return linear_call(lambda k, x: k * x, lambda k, ct: 3 * k * ct, k, x)


def solve(a, b, *, symmetric=False):
    """A solve with derivatives of its own, and auxiliary output."""
    a = a @ a.T / 4 + 2 * jnp.eye(2) if symmetric else a / 4 + 2 * jnp.eye(2)
    by = lambda matvec, b: (jnp.linalg.inv(jax.jacobian(matvec)(b)) @ b, {"rounds": 3})
    return lax.custom_linear_solve(lambda x: a @ x, b, by, by, symmetric=symmetric, has_aux=True)


def root(a):
    """A root with a derivative of its own."""
    f = lambda x: x**3 + x - a
    step = lambda f, x: lax.fori_loop(0, 25, lambda i, x: x - f(x) / (3 * x**2 + 1), x)
    return lax.custom_root(f, jnp.zeros_like(a), step, lambda g, y: y / g(1.0))


def called(x, w):
    """A call of a jaxpr, as JAX makes them when it drops what is not used."""
    jaxpr = jax.make_jaxpr(lambda x, w: (jnp.sin(x) * w, w))(x, w)
    return closed_call_p.bind(x, w, **closed_call_p.get_bind_params({"call_jaxpr": jaxpr}))


exported = jax.export.export(jax.jit(lambda x, w: jnp.tanh(x) * w))(*[jax.ShapeDtypeStruct((2,), jnp.float32)] * 2)


def remarked(x, w):
    """Calls with a remark for the compiler: a group to schedule them in, and the host to run them on."""
    on_host = getattr(compute_on, "compute_on2", compute_on.compute_on)  # the one that takes a function
    host = on_host(lambda x: jnp.sin(x).sum(), compute_type="device_host", out_memory_spaces=jax.memory.Space.Device)
    return scheduling_group(name="first")(lambda x: (x * w, w + 1))(x), host(x)


CASES = [
    Case("jit", lambda x, w: jax.jit(lambda x: (jnp.sin(x) * w, w))(x), (f32(2), f32(2)), "jit", grad=True),
    Case("jit inline", lambda x: jax.jit(lambda x: x * 2, inline=True)(x), (f32(2),), "jit"),
    Case("closed_call", called, (f32(2), f32(2)), "closed_call eval_jaxpr"),
    Case("custom_jvp", bent, (f32(2), f32(2)), "custom_jvp_call", grad=True),
    Case("custom_jvp symbolic zeros", lambda x: applied(jnp.sin, x), (f32(2),), "custom_jvp_call", grad=True),
    Case("custom_jvp in scan", lambda x, w: lax.scan(lambda c, _: (bent(c, w)[0], c), x, None, 2), (f32(), f32()), grad=True),
    Case("custom_vjp", scaled, (f32(2), f32(), i32()), "custom_vjp_call", jax=False),
    Case("custom_vjp symbolic zeros", lambda x, w: summed(jnp.sin, x, w), (f32(2), f32(2)), "custom_vjp_call"),
    Case("custom_vjp optimized for remat", light, (f32(2), f32(2)), "remat_opt custom_vjp_call"),
    Case("custom_vmap", many, (f32(2), f32(2)), "custom_vmap_call", grad=True),
    Case("remarked", remarked, (f32(2), f32(2)), "compute_on xla_metadata_call", grad=True),
    Case("remat", block, (f32(2), f32(2, 2)), "remat2", grad=True),
    Case("remat in scan", lambda x, w: lax.scan(lambda c, _: (block(c, w), 0), x, None, 2)[0], (f32(2), f32(2, 2)), grad=True),
    Case("remat differentiated", jax.grad(lambda x, w: block(x, w).sum()), (f32(2), f32(2, 2)), "remat2"),
    Case("custom_partitioning", parted, (f32(3), f32(3)), "custom_partitioning", jax=False),
    Case("composite", norm, (f32(3), f32(3)), "composite", jax=False),
    Case("linear_call", linear, (f32(2), f32(2)), "linear_call", jax=False),
    Case("custom_linear_solve", solve, (f32(2, 2), f32(2)), "custom_linear_solve", grad=True),
    Case("custom_linear_solve symmetric", functools.partial(solve, symmetric=True), (f32(2, 2), f32(2)), grad=True),
    Case("custom_root", root, (f32(),), "custom_jvp_call", grad=True),
    Case("call_exported", exported.call, (f32(2), f32(2)), "call_exported", jax=False),
]
