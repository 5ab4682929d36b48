"""Cases for rules/contractions.py."""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from oracle import Case, Draw, c64, f32, i32


def sizes(*shape: int, high: int = 3) -> Draw:
    """Group sizes [*p, g]."""
    return i32(*shape, low=0, high=high)


def ragged(dot: Any, ragged: int, group: tuple = ()) -> Any:
    """A ragged dot of these dimension numbers."""
    numbers = lax.RaggedDotDimensionNumbers(dot, (ragged,), group)
    return lambda x, y, g: lax.ragged_dot_general(x, y, g, numbers)


def conv(layout: tuple, **params: Any) -> Any:
    """A convolution, strided, padded and dilated, of arrays laid out so."""

    def apply(x: Any, kernel: Any) -> Any:
        return lax.conv_general_dilated(
            x, kernel, (2, 1), [(1, 2), (0, 1)], lhs_dilation=(1, 2), rhs_dilation=(2, 1), dimension_numbers=layout, **params
        )

    return apply


# Which dimensions a ragged dot contracts, and which are batch dimensions.
ROWS = ((2,), (2,)), ((1,), (1,))
COLUMNS = ((1,), (0,)), ((), ())
BOTH = ((2, 3), (0, 2)), ((1,), (1,))
PAIRS = ((2,), (2,)), ((0, 1), (0, 1))
BF16 = jnp.bfloat16

CASES = [
    Case(
        "dot_general",
        lambda x, y: lax.dot_general(x, y, (((2,), (1,)), ((0,), (np.int64(2),)))),
        (f32(2, 3, 4), f32(5, 4, 2)),
        "dot_general",
        grad=True,
    ),
    Case(
        "dot_general-free",
        lambda x, y: lax.dot_general(x, y, (((1,), (1,)), ((), ()))),
        (c64(2, 3, 4), c64(5, 3)),
        grad=True,
    ),
    Case("dot_general-none", lambda x, y: lax.dot_general(x, y, (((0,), (0,)), ((), ()))), (f32(3), f32(3)), grad=True),
    Case("dot_general-outer", lambda x, y: lax.dot_general(x, y, (((), ()), ((), ()))), (f32(3), f32())),
    Case(
        "dot_general-int8",
        lambda x, y: lax.dot_general(x, y, (((1,), (0,)), ((), ())), preferred_element_type=jnp.int32),
        (Draw((2, 3), np.int8, -99, 99), Draw((3, 2), np.int8, -99, 99)),
    ),
    Case(
        "ragged_dot",
        lambda x, y, g: lax.ragged_dot(x, y, g),
        (f32(5, 3), f32(2, 3, 4), sizes(2)),
        "ragged_dot_general",
        grad=True,
        jax=False,
    ),
    Case("ragged_dot-free", ragged(ROWS, 3, (0,)), (f32(2, 3, 4, 5), f32(2, 3, 4, 2), sizes(3, 2, 2)), jax=False),
    Case("ragged_dot-alike", ragged(ROWS, 0, (0,)), (f32(5, 3, 4), f32(2, 3, 4, 2), sizes(2)), jax=False),
    Case("ragged_dot-contracting", ragged(COLUMNS, 1), (f32(2, 5), f32(5, 3), sizes(2)), jax=False),
    Case("ragged_dot-inner", ragged(BOTH, 3), (f32(2, 3, 2, 5), f32(2, 3, 5), sizes(3, 2, 2)), jax=False),
    Case("ragged_dot-batch", ragged(PAIRS, 1), (f32(2, 3, 4), f32(2, 3, 4), sizes(2, 2)), jax=False),
    Case("conv", conv(("NHWC", "HWIO", "NHWC")), (f32(2, 4, 5, 2), f32(3, 2, 2, 3)), "conv_general_dilated", grad=True),
    Case("conv-turned", conv(("CHWN", "HIOW", "HNWC")), (f32(2, 4, 5, 2), f32(3, 2, 3, 2))),
    Case("conv-features", conv(("NCHW", "OIHW", "NCHW"), feature_group_count=2), (f32(1, 4, 4, 5), f32(4, 2, 3, 2)), grad=True),
    Case("conv-batches", conv(("WCNH", "IWHO", "CNHW"), batch_group_count=2), (f32(5, 2, 4, 4), f32(2, 2, 3, 4))),
    Case(
        "conv-none",
        lambda x, y: lax.conv_general_dilated(x, y, (), [], preferred_element_type=jnp.float32),
        (Draw((2, 3), BF16), Draw((4, 3), BF16)),
    ),
    Case("convolve", lambda x, y: jnp.convolve(x, y, "full"), (c64(5), c64(3))),
    Case(
        "scaled_dot",
        lambda x, y, a, b: lax.scaled_dot(
            x, y, lhs_scale=a, rhs_scale=b, dimension_numbers=(((2,), (1,)), ((1,), (2,))), preferred_element_type=jnp.float32
        ),
        (Draw((3, 2, 4), BF16), Draw((5, 4, 2), BF16), Draw((3, 2, 2), BF16), Draw((5, 1, 2), BF16)),
        "scaled_dot",
        tol=1e-2,
    ),
]
