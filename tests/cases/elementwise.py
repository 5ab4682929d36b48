"""Cases for rules/elementwise.py."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax._src.lax.lax import tie_p
from jax._src.pallas import core as pallas_core
from jax._src.state import primitives as state_primitives
from jax.ad_checkpoint import checkpoint_name
from jax.experimental.xla_metadata import set_xla_metadata
from jax.extend.core import primitives
from oracle import Case, Draw, bools, c64, f32, i32, keys, u32

bf16 = jnp.bfloat16
memory_space_p = next(
    module.with_memory_space_constraint_p
    for module in (state_primitives, pallas_core)
    if hasattr(module, "with_memory_space_constraint_p")
)


def all_of(*funs):
    """x -> (fun(x) for each of `funs`)."""
    return lambda *args: [fun(*args) for fun in funs]


def barrier(x, y):
    """Both through one optimization barrier, and their sum."""
    a, b = lax.optimization_barrier((x, y))
    return a.sum() + b


CASES = [
    Case(
        "smooth",
        all_of(
            *(lax.sin, lax.cos, lax.tan, lax.sinh, lax.cosh, lax.tanh, lax.asinh, lax.atan, lax.exp, lax.exp2, lax.expm1),
            *(lax.erf, lax.erfc, lax.logistic, lax.neg, lax.square, lax.bessel_i0e, lax.bessel_i1e, lambda x: x**3),
        ),
        (f32(2, 3),),
        "sin cos tan sinh cosh tanh asinh atan exp exp2 expm1 erf erfc logistic neg square bessel_i0e bessel_i1e integer_pow",
        grad=True,
    ),
    Case(
        "positive",
        all_of(lax.log, lax.log1p, lax.sqrt, lax.rsqrt, lax.cbrt, lax.lgamma, lax.digamma, lambda x: lax.acosh(x + 1)),
        (f32(3, low=0.2, high=2.0),),
        "log log1p sqrt rsqrt cbrt lgamma digamma acosh",
        grad=True,
    ),
    Case(
        "small",
        all_of(lax.asin, lax.acos, lax.atanh, lax.erf_inv),
        (f32(3, low=-0.9, high=0.9),),
        "asin acos atanh erf_inv",
        grad=True,
    ),
    Case(
        "stepwise",
        all_of(lax.floor, lax.ceil, lax.round, lax.sign, lax.abs, lax.is_finite, lambda x: lax.reduce_precision(x, 5, 10)),
        (f32(3),),
        "floor ceil round sign abs is_finite reduce_precision",
    ),
    Case("integers", all_of(lax.bitwise_not, lax.population_count, lax.clz, lax.abs), (i32(3),), "not population_count clz"),
    Case(
        "parts",
        all_of(lax.real, lax.imag, lax.conj, lax.abs, lambda z: lax.complex(lax.imag(z), lax.real(z))),
        (c64(3),),
        "real imag conj complex",
        grad=True,
    ),
    Case(
        "identities",
        all_of(
            *(lambda x: checkpoint_name(x, "here"), lax.stop_gradient, lambda x: jnp.array(x, copy=True)),
            *(lambda x: x.astype(bf16), lambda x: x.astype(jnp.complex64), lambda x: set_xla_metadata(x, note="here")),
        ),
        (f32(2, 3),),
        "name stop_gradient copy convert_element_type xla_metadata_value stage",
    ),
    Case(
        "memory-space",
        lambda x: memory_space_p.bind(x, memory_space=jax.typeof(x).memory_space),
        (f32(2),),
        "with_memory_space_constraint",
        jax=False,
    ),
    Case(
        "newer",
        all_of(
            jnp.log2,
            lambda x: jnp.polyval(jnp.stack([x, x, jnp.float32(2)]), x),
            getattr(lax, "one_minus_square", lambda x: 1 - x * x),
        ),
        (f32(low=0.5),),
        "log2 polynomial one_minus_square",
        grad=True,
    ),
    Case("polynomial", lambda c, x: jnp.polyval(c, x), (f32(3), f32(2)), "polynomial"),
    Case(
        "narrow",
        all_of(lambda x, y: x * y, lambda x, y: lax.max(x, y), lambda x, y: x.astype(np.float16) / 3),
        (Draw((3,), bf16), Draw((), bf16)),
        "mul max",
        tol=1e-2,
    ),
    Case(
        "bitcast",
        all_of(
            *(lambda x: lax.bitcast_convert_type(x, np.int32), lambda x: lax.bitcast_convert_type(x, np.uint8)),
            lambda x: lax.bitcast_convert_type(lax.bitcast_convert_type(x, np.uint16), np.float32),
        ),
        (f32(2),),
        "bitcast_convert_type",
    ),
    Case(
        "two",
        all_of(lax.add, lax.sub, lax.mul, lax.atan2, lax.max, lax.min),
        (f32(2, 3), f32(2, 3)),
        "add sub mul atan2 max min",
        grad=True,
    ),
    Case("quotient", all_of(lax.div, lax.pow), (f32(3, low=0.5), f32(3, low=0.5)), "div pow", grad=True),
    Case("add-scalar", lambda x, y: x + y, (f32(2, 3), f32()), "add", grad=True),
    Case("mixed", lambda x, y, z: x * y + x * 2.0 - z, (f32(2, 3), f32(2, 1), f32()), "mul"),
    Case(
        "compare",
        all_of(lax.eq, lax.ne, lax.lt, lax.le, lax.gt, lax.ge, lax.rem, lax.nextafter),
        (f32(3), f32()),
        "eq ne lt le gt ge rem nextafter",
    ),
    Case(
        "total-order",
        lambda x, y: [p.bind(x, y) for p in (primitives.eq_to_p, primitives.le_to_p, primitives.lt_to_p)],
        (f32(3), f32(3)),
        "eq_to le_to lt_to",
    ),
    Case(
        "bits",
        all_of(lax.bitwise_and, lax.bitwise_or, lax.bitwise_xor, lax.shift_left, lax.shift_right_logical, lax.mulhi),
        (u32(3), u32(3, high=8)),
        "and or xor shift_left shift_right_logical mulhi",
    ),
    Case("arithmetic-shift", lax.shift_right_arithmetic, (i32(3), i32(3, low=0)), "shift_right_arithmetic"),
    Case("logic", lambda x, y: (x & y, x | y, x ^ y, ~x), (bools(3), bools(3)), "and or xor not"),
    Case(
        "gamma-functions",
        all_of(lax.igamma, lax.igammac, lax.igamma_grad_a, lambda a, x: lax.zeta(a + 1, x), lambda a, x: lax.polygamma(2.0, x)),
        (f32(3, low=0.5), f32(low=0.5)),
        "igamma igammac igamma_grad_a zeta polygamma",
        tol=1e-3,
    ),
    Case(
        "incomplete-beta",
        lax.betainc,
        (f32(low=0.5), f32(3, low=0.5), f32(3, low=0.1, high=0.9)),
        "regularized_incomplete_beta",
    ),
    Case("where", lambda p, x, y: jnp.where(p, x, y), (bools(3), f32(3), f32(3)), "select_n", grad=True),
    Case("select-scalar-which", lax.select, (bools(), f32(3), f32(3)), "select_n"),
    Case("select-scalars", lax.select_n, (i32(low=0, high=3), i32(), i32(), i32()), "select_n"),
    Case("select-keys", lax.select, (bools(), keys(2), keys(2)), "select_n"),
    Case("clamp", lax.clamp, (f32(high=0.0), f32(2, 3), f32(low=0.0)), "clamp"),
    Case("clamp-arrays", lax.clamp, (f32(3, high=0.0), f32(3), f32(3, low=0.0)), "clamp", grad=True),
    Case("clamp-integers", lambda x: lax.clamp(np.int32(-1), x, np.int32(2)), (i32(3),), "clamp"),
    Case("clamp-scalar", lambda x, y: lax.clamp(np.float32(-1), x, y), (f32(), f32(low=0.0)), "clamp", grad=True, jax=False),
    Case("clamp-scalars", lax.clamp, (f32(high=0.0), f32(), f32(low=0.0)), "clamp", grad=True, jax=False),
    Case("add_any", primitives.add_jaxvals_p.bind, (f32(2, 3), f32(2, 3)), "add_any", grad=True),
    Case("optimization_barrier", barrier, (f32(2), f32(2, 3)), "optimization_barrier"),
    Case("tie", lambda x, y: (tie_p.bind(x, y), lax.dce_sink(x))[0], (f32(2), f32(2, 3)), "tie dce_sink", jax=False),
]
