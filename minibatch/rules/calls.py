"""Primitives that call a function: jit and checkpoint, functions with derivative rules of their own, linear solves."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.tree_util import tree_flatten, tree_structure, tree_unflatten

from minibatch import _jax
from minibatch._batched import Axis, Batched, apart, front, is_batched, lanes, together
from minibatch._divergence import STAGED
from minibatch._interpreter import batch_closed, batch_jaxpr, captured_by, known, lifted_avals
from minibatch._jax import rebind, rebind_as
from minibatch._registry import rule
from minibatch.rules.fallback import one_by_one

# --- calls of a jaxpr -------------------------------------------------------------------------------------------------


@rule("jit", anywhere=True, inside=True)
def jit(axis: Axis, eqn: Any, *operands: Any) -> list:
    """jit(f)(x)   lifts to   jit(lifted f)(x). Loops that were given stages over other lanes get none over these too."""
    if eqn.params["name"] == STAGED:
        axis = axis._replace(divergence=axis.divergence._replace(loops="lockstep"))
    arrays, bdims = apart(operands)
    jaxpr, out_bdims = batch_closed(axis, eqn.params["jaxpr"], bdims)
    placed = _placed(axis, eqn, bdims, out_bdims) if _jax.is_placed(eqn.params) else {}
    return together(rebind_as(jaxpr.out_avals, eqn, *arrays, jaxpr=jaxpr, **placed), out_bdims)


def _placed(axis: Axis, eqn: Any, bdims: Sequence[int | None], out_bdims: Sequence[int | None]) -> dict[str, tuple]:
    """The shardings that a jit was given, each with a dimension for the lanes."""
    changed = {}
    for side, dims in (("in", bdims), ("out", out_bdims)):
        shardings, layouts = eqn.params[f"{side}_shardings"], eqn.params[f"{side}_layouts"]
        if any(layout is not None and d is not None for layout, d in zip(layouts, dims, strict=True)):
            raise NotImplementedError(f"minibatch: jit with {side}_layouts={layouts} on what differs by lane")
        changed[f"{side}_shardings"] = tuple(_jax.lift_sharding(axis, s, d) for s, d in zip(shardings, dims, strict=True))
    return changed


@rule("closed_call eval_jaxpr composite custom_partitioning", anywhere=True, inside=True)
def inlined(axis: Axis, eqn: Any, *operands: Any) -> list:
    """f(x)   lifts to   the equations of the lifted f. What was said about f as a whole held for one lane of it."""
    return batch_jaxpr(axis, _jax.called(eqn), operands)


@rule("compute_on fused_call xla_metadata_call", anywhere=True, inside=True)
def remarked(axis: Axis, eqn: Any, *operands: Any) -> list:
    """f(x) with a remark for the compiler   lifts to   the lifted f(x) with the same remark."""
    arrays, bdims = apart(operands)
    jaxpr, out_bdims = batch_closed(axis, eqn.params["jaxpr"], bdims)
    return together(rebind(eqn, *arrays, jaxpr=jaxpr), out_bdims)


@rule("remat2", anywhere=True, inside=True)
def remat(axis: Axis, eqn: Any, *operands: Any) -> list:
    """checkpoint(f)(x)   lifts to   checkpoint(lifted f)(x), with the same policy."""
    arrays, bdims = apart(operands)
    jaxpr, out_bdims = batch_closed(axis, eqn.params["jaxpr"], bdims)
    return together(_jax.checkpoint_of(eqn, jaxpr, arrays), out_bdims)


# --- functions with derivative rules ----------------------------------------------------------------------------------
#
# The lifted function has the lifted rules, so that a derivative of the mapped function is still the one its author gave.
# An output is batched if the function makes it so, or if the rule for its derivatives does. What the rules captured of the
# mapped function's values the lifted function takes as arguments more, constant in every derivative, behind the others.


def _own(axis: Axis, jaxpr: Any, bdims: Sequence[int | None]) -> bool:
    """Whether lanes differ in a call of `jaxpr`."""
    return any(d is not None for d in bdims) or _jax.names_axis(jaxpr, axis.name)


def _differing(axis: Axis, out_bdims: Sequence[int | None], by_rule: Callable[[Axis], Sequence[bool]]) -> list[bool]:
    """Which outputs differ by lane: of a function that shares some, its rule is asked; one that fails might do anything.

    A rule may call the function that it is the rule of: there its value alone matters.
    """
    if None not in out_bdims or axis.probing:
        return [d is not None for d in out_bdims]
    try:
        ruled = by_rule(axis._replace(probing=True))
    except Exception:  # the user's own code, run here only to look: where it is needed it is run again
        ruled = [True] * len(out_bdims)
    return [d is not None or differs for d, differs in zip(out_bdims, ruled, strict=True)]


@rule("custom_jvp_call", anywhere=True, always=True)
def custom_jvp_call(axis: Axis, eqn: Any, *operands: Any) -> list:
    """f with tangent rule f'   lifts to   lifted f with lifted f'."""
    params = eqn.params
    captured, values = captured_by(params["jvp_jaxpr_fun"])
    arrays, bdims = apart([*operands, *values])
    primals = bdims[params["num_consts"] :]
    own = _own(axis, params["call_jaxpr"], bdims)
    if axis.name is None and not own and not captured:
        return rebind(eqn, *arrays)
    count, arguments = len(eqn.outvars), len(primals) - len(captured)
    fun = known(_jax.with_captured(params["call_jaxpr"], captured, len(operands)))

    def lane_rule(zeros: Sequence[bool]) -> tuple[Any, list, Sequence[bool]]:
        with _jax.axis_env(axis):
            jaxpr, consts, out_zeros = params["jvp_jaxpr_fun"].call_wrapped(*zeros[:arguments])
        moving = [var for var, zero in zip(captured, zeros[arguments:], strict=True) if not zero]
        jaxpr = _jax.with_captured(_jax.closed(jaxpr, consts), captured, arguments, unread=moving)
        return jaxpr, [*primals, *(d for d, zero in zip(primals, zeros, strict=True) if not zero)], out_zeros

    def tangents_differ(axis: Axis) -> list[bool]:
        jaxpr, given, out_zeros = lane_rule([False] * len(primals))
        found = batch_closed(axis, jaxpr, given)[1]
        tangents = iter(found[count:])
        return [d is not None or not (zero or next(tangents) is None) for d, zero in zip(found, out_zeros, strict=False)]

    found = batch_closed(axis, fun, bdims)[1]
    differs = _differing(axis, found, tangents_differ)
    places = [(d or 0) if differ else None for d, differ in zip(found, differs, strict=True)]
    jaxpr, out_bdims = batch_closed(axis, fun, bdims, places)

    @functools.cache
    def jvp(*zeros: bool) -> tuple[Any, Sequence[Any], Sequence[bool]]:
        jaxpr, given, out_zeros = lane_rule(zeros)
        tangents = [place for place, zero in zip(places, out_zeros, strict=True) if not zero]
        jaxpr, _ = batch_closed(axis, jaxpr, given, [*places, *tangents])
        return _jax.open_jaxpr(jaxpr), _jax.consts_of(jaxpr), out_zeros

    tangents = _jax.wrapped(jvp, params["jvp_jaxpr_fun"])
    return together(rebind_as(jaxpr.out_avals, eqn, *arrays, call_jaxpr=jaxpr, jvp_jaxpr_fun=tangents), out_bdims)


@rule("custom_vjp_call", anywhere=True, always=True)
def custom_vjp_call(axis: Axis, eqn: Any, *operands: Any) -> list:
    """f with rules fwd, bwd   lifts to   lifted f with lifted fwd, bwd; a cotangent of what lanes share is their sum."""
    params = eqn.params
    captured, values = captured_by(params["fwd_jaxpr_thunk"], params["bwd"])
    arrays, bdims = apart([*operands, *values])
    given = len(operands)  # what the rules keep, as `trees` does, outlives the trace: it holds none of its values
    primals = bdims[params["num_consts"] :]
    own = _own(axis, params["call_jaxpr"], bdims)
    if axis.name is None and not own and not captured:
        return rebind(eqn, *arrays)
    arguments = len(primals) - len(captured)
    fun = known(_jax.with_captured(params["call_jaxpr"], captured, given))
    constants = map(_jax.no_cotangent, arrays[given:])
    back = Backward(axis, params["bwd"], len(eqn.outvars), primals[:arguments], captured, constants)
    residuals: list[int | None] = []

    def lane_rule(nonzeros: Sequence[bool]) -> Any:
        with _jax.axis_env(axis):
            jaxpr, consts = params["fwd_jaxpr_thunk"].call_wrapped(*nonzeros[:arguments])
        return _jax.with_captured(_jax.closed(jaxpr, consts), captured, arguments)

    def trees() -> tuple[Any, Any, list[int | None]]:
        out_tree, res_tree, forwarded = params["out_trees"]()
        res_tree = tree_structure([0] * (res_tree.num_leaves + len(captured)))
        return out_tree, res_tree, [*forwarded, *range(given, len(bdims))]

    def outputs_differ(axis: Axis) -> list[bool]:
        jaxpr = lane_rule([True] * len(primals))
        found = batch_closed(axis, jaxpr, primals)[1]
        computed = len(found) - len(eqn.outvars)
        kept = [*found[:computed], *(bdims[i] for i in trees()[2] if i is not None)]
        if any(d is not None for d in kept):  # bwd may weigh the cotangents of lanes differently: it needs each by itself
            return [_jax.has_cotangent(v.aval) for v in eqn.outvars]
        return [d is not None for d in found[computed:]]

    force = _differing(axis, batch_closed(axis, fun, bdims)[1], outputs_differ)
    jaxpr, out_bdims = batch_closed(axis, fun, bdims, force)

    @functools.cache
    def fwd(*nonzeros: bool) -> tuple[Any, Sequence[Any]]:
        jaxpr = lane_rule(nonzeros)
        computed = [False] * (len(jaxpr.out_avals) - len(force))
        jaxpr, found = batch_closed(axis, jaxpr, primals, [*computed, *force])
        found = iter(found)
        residuals[:] = [next(found) if i is None else bdims[i] for i in trees()[2]]
        return _jax.open_jaxpr(jaxpr), _jax.consts_of(jaxpr)

    changed = {
        "call_jaxpr": jaxpr,
        "fwd_jaxpr_thunk": _jax.wrapped(fwd, params["fwd_jaxpr_thunk"]),
        "bwd": _jax.wrapped(lambda *args: back(args, [*residuals, *out_bdims]), params["bwd"]),
        "out_trees": trees,
    }
    return together(rebind_as(jaxpr.out_avals, eqn, *arrays, **changed), out_bdims)


@rule("custom_lin", anywhere=True)
def custom_lin(axis: Axis, eqn: Any, *operands: Any) -> list:
    """The linear function that bwd transposes   lifts to   the one that lifted bwd transposes."""
    params, (captured, values) = eqn.params, captured_by(eqn.params["bwd"])
    own = params["num_res"]
    count = own + len(captured)
    arrays, bdims = apart([*operands[:own], *values, *operands[own:]])
    tangents = iter(bdims[count:])
    primals = [None if zero else next(tangents) for zero in params["in_zeros"]]
    out_bdims = [0] * len(eqn.outvars)
    back = Backward(axis, params["bwd"], len(out_bdims), primals, captured)
    bwd = _jax.wrapped(lambda *args: back(args, [*bdims[:count], *out_bdims]), params["bwd"])
    avals = [_jax.batched_aval(aval, axis.size, 0, axis.mesh_name) for aval in params["out_avals"]]
    return together(rebind(eqn, *arrays, out_avals=avals, bwd=bwd, num_res=count), out_bdims)


class Backward:
    """The backward rule of a custom_vjp of so many `outputs`, lifted: from residuals and cotangents to those of the `primals`.

    What it captured comes behind the other residuals; the cotangents of `constants` behind the others.
    """

    def __init__(
        self, axis: Axis, bwd: Any, outputs: int, primals: Sequence[int | None], captured: Iterable, constants: Iterable = ()
    ) -> None:
        self.axis, self.bwd, self.outputs, self.primals = axis, bwd, outputs, primals
        self.captured, self.constants = list(captured), list(constants)
        self.traced: dict[tuple, tuple] = {}

    def trace(self, avals: Sequence[Any]) -> tuple[Any, list, Any]:
        """The rule for one lane as a jaxpr, its zeros, and the treedef of what it logs; an aval may be a symbolic zero."""
        key = tuple((_jax.is_zero(aval), aval.aval if _jax.is_zero(aval) else aval) for aval in avals)
        if key not in self.traced:
            answer: list = []
            place = len(avals) - self.outputs - len(self.captured)
            own = [*avals[:place], *avals[place + len(self.captured) :]]

            def one_lane(*values: Any) -> list:
                rest = iter(values)
                cotangents, logs = _jax.pull_back(self.bwd, [x if _jax.is_zero(x) else next(rest) for x in own])
                leaves, tree = tree_flatten(logs)
                answer[:] = [x if _jax.is_zero(x) else None for x in cotangents], tree
                return [*(x for x in cotangents if not _jax.is_zero(x)), *leaves]

            with _jax.axis_env(self.axis):
                jaxpr = _jax.trace_jaxpr(one_lane, [aval for aval in own if not _jax.is_zero(aval)])
            self.traced[key] = _jax.with_captured(jaxpr, self.captured, place), *answer
        return self.traced[key]

    def __call__(self, args: Sequence[Any], bdims: Sequence[int | None]) -> Any:
        """Residuals and cotangents, with lanes at `bdims` -> cotangents, with lanes where the primals have them."""
        axis, own = self.axis, any(d is not None for d in bdims)
        given = [(x, d) for x, d in zip(args, bdims, strict=True) if not _jax.is_zero(x)]
        jaxpr, zeros, tree = self.trace([self._of_lane(x, d) for x, d in zip(args, bdims, strict=True)])
        outs = iter(batch_jaxpr(axis, jaxpr, [x if d is None else Batched(x, d) for x, d in given]))
        cotangents = [
            _of_primal(axis, next(outs), d, own) if zero is None else _jax.zero_of_lanes(zero, axis.size, d, axis.mesh_name)
            for zero, d in zip(zeros, self.primals, strict=True)
        ]
        logs = tree_unflatten(tree, [lanes(axis, x) if own else x for x in outs])
        return _jax.pulled_back([*cotangents, *self.constants], logs)

    def _of_lane(self, x: Any, bdim: int | None) -> Any:
        return _jax.zero_of_lane(x, self.axis.size, bdim) if _jax.is_zero(x) else _jax.lane_aval(x, bdim)


def _of_primal(axis: Axis, cotangent: Any, bdim: int | None, own: bool) -> Any:
    """The cotangent of a primal with its lanes at `bdim`; of one that the lanes share, the sum of all lanes'."""
    if bdim is not None:
        return lanes(axis, cotangent, bdim)
    if not own:
        if is_batched(cotangent):
            raise ValueError(
                "minibatch: a custom_vjp function of nothing that differs by lane has a backward rule that does, so that "
                "the sum of its cotangents over the lanes cannot be told. Give it an argument that differs by lane."
            )
        return cotangent
    if is_batched(cotangent):
        return lax.reduce_sum(cotangent.value, (cotangent.bdim,))
    return cotangent * jnp.asarray(axis.size).astype(cotangent.dtype)


@rule("remat_opt", anywhere=True, inside=True)
def remat_opt(axis: Axis, eqn: Any, *operands: Any) -> list:
    """A custom_vjp's fwd, and its primal for where residuals are not needed   lifts to   both lifted."""
    arrays, bdims = apart(operands)
    params = eqn.params
    jaxpr, out_bdims = batch_closed(axis, params["fwd_jaxpr"], bdims)
    consts, jaxpr = _jax.hoisted(jaxpr)
    kept = [d is not None for d in out_bdims[params["num_res"] :]]

    def primal() -> tuple[Any, Sequence[Any]]:
        jaxpr, _ = batch_closed(axis, _jax.closed(*params["fun_jaxpr_thunk"]()), bdims[params["num_consts"] :], kept)
        return _jax.open_jaxpr(jaxpr), _jax.consts_of(jaxpr)

    changed = {"fwd_jaxpr": jaxpr, "fun_jaxpr_thunk": primal, "num_consts": params["num_consts"] + len(consts)}
    return together(rebind(eqn, *consts, *arrays, **changed), out_bdims)


@rule("linear_call", anywhere=True)
def linear_call(axis: Axis, eqn: Any, *operands: Any) -> list:
    """f linear in x, with its transpose   lifts to   both lifted; a cotangent of what lanes share is their sum."""
    arrays, bdims = apart(operands)
    params, own = eqn.params, eqn.params["num_callee_consts"]
    residuals, linear = bdims[own:][: params["num_res"]], bdims[own:][params["num_res"] :]
    callee, out_bdims = batch_closed(axis, params["callee"], bdims, [True] * len(eqn.outvars))
    consts, callee = _jax.hoisted(callee)

    def transpose() -> tuple[Any, Sequence[Any]]:
        jaxpr, captured = params["transpose_thunk"]()
        given = [*[None] * len(captured), *residuals, *out_bdims]

        def summed(*args: Any) -> list:
            outs = batch_jaxpr(axis, jaxpr, together(args, given))
            return [_of_primal(axis, x, d, own=True) for x, d in zip(outs, linear, strict=True)]

        consts, jaxpr_of_lanes = _jax.hoisted(_jax.trace_jaxpr(summed, lifted_avals(axis, jaxpr, given)))
        return jaxpr_of_lanes, [*consts, *captured]

    changed = {"callee": callee, "transpose_thunk": transpose, "num_callee_consts": len(consts) + own}
    return together(rebind(eqn, *consts, *arrays, **changed), out_bdims)


@rule("custom_linear_solve", anywhere=True)
def custom_linear_solve(axis: Axis, eqn: Any, *operands: Any) -> list:
    """solve(A, b) = x   lifts to   the lifted solve, with lanes in all of b and x if in any of A and b."""
    jaxprs, counts = eqn.params["jaxprs"], eqn.params["const_lengths"]
    total = sum(counts)
    b = [Batched(lanes(axis, x), 0) for x in operands[total:]]
    arrays, bdims = apart([*operands[:total], *b])
    out_bdims: list[int | None] = []
    lifted = []
    for jaxpr, start, count in zip(jaxprs, np.cumsum([0, *counts]), counts, strict=False):
        if jaxpr is not None:
            given = [*bdims[start : start + count], *[0] * len(b)]
            auxiliary = [False] * (len(_jax.open_jaxpr(jaxpr).outvars) - len(b))
            jaxpr, found = batch_closed(axis, jaxpr, given, [*[True] * len(b), *auxiliary])
            out_bdims = list(found) if jaxpr is not None and len(lifted) == 2 else out_bdims
        lifted.append(jaxpr)
    return together(rebind(eqn, *arrays, jaxprs=type(jaxprs)(*lifted)), out_bdims)


# --- functions that say how they map, and one that cannot -------------------------------------------------------------


@rule("custom_vmap_call", anywhere=True, inside=True)
def custom_vmap_call(axis: Axis, eqn: Any, *operands: Any) -> list:
    """f with a rule for many lanes   lifts to   that rule; or to f, where lanes differ in what f closes over.

    Raises:
      ValueError: the rule returned something else than lanes of what f returns.
    """
    params, name = eqn.params, _jax.name_of_rule(eqn.params["rule"])
    batched = tree_unflatten(params["in_tree"], list(map(is_batched, operands)))
    if any(_closed_over(batched)) or not any(map(is_batched, operands)):
        return batch_jaxpr(axis, params["call"], operands)
    arrays = tree_unflatten(params["in_tree"], [front(x) if is_batched(x) else x for x in operands])
    out, out_batched = params["rule"](axis.size, list(batched), *arrays)
    (outs, tree), (flags, flag_tree) = tree_flatten(out), tree_flatten(out_batched)
    if tree != flag_tree:
        raise ValueError(
            f"structure of output value and output batching specification returned by custom vmap rule ({name}) do not "
            f"match: {tree} and {flag_tree}. The rule returns outputs, and for each whether it has lanes."
        )
    if tree != params["out_tree"]:
        raise ValueError(
            f"structure of output returned by custom vmap rule ({name}) does not match that of original custom-vmapped "
            f"function: {tree} and {params['out_tree']}."
        )
    for x, flag in zip(outs, flags, strict=True):
        if flag and np.shape(x)[:1] != (axis.size,):
            raise ValueError(f"custom vmap rule ({name}): an output of shape {np.shape(x)} has not {axis.size} lanes in front.")
    return [Batched(x, 0) if flag else x for x, flag in zip(outs, flags, strict=True)]


def _closed_over(flags: Any) -> list:
    """The flags of what a custom_vmap function closes over, in those of (closed over, arguments) or of two such, under jvp."""
    first, second = flags
    return first if isinstance(first, list) else [*_closed_over(first), *_closed_over(second)]


@rule("call_exported")
def call_exported(axis: Axis, eqn: Any, *operands: Any) -> list:
    """f(x), compiled elsewhere and sealed   lifts to   one call of f for each lane."""
    return one_by_one(axis, eqn, *operands)
