"""The oracle: Kimi Delta Attention token by token in float64, with gradients derived by hand.

Nothing here comes from the library or from JAX, so that a mistake in one is not repeated in the other.
A state S is [N, HV, K, V]; one token does

    D = exp(g) S        e = v - k^T D        S' = D + beta k e^T        o = scale * S'^T q

and its adjoint, with dS' holding everything that comes from later tokens plus scale * q do^T,

    dq = scale * S' do    de = beta k^T dS'    dk = beta dS' e - D de    dv = de    dbeta = k^T dS' e
    dD = dS' - k de^T     dg = sum_V dD D      dS = exp(g) dD

Arrays are named and shaped as in the library: q, k [B, T, H, K]; v [B, T, HV, V]; g [B, T, HV, K]; beta [B, T, HV].
"""

import numpy as np

EPSILON = 1e-6  # of the L2 norm, inside the square root


def sigmoid(x):
    return np.exp(-np.logaddexp(0.0, -x))


def repeat_heads(x, value_heads):
    """Value head j reads key head j // (HV // H)."""
    return np.repeat(x, value_heads // x.shape[2], axis=2)


def sum_heads(dx, heads):
    """Adjoint of `repeat_heads`."""
    batch, length, value_heads, channels = dx.shape
    return dx.reshape(batch, length, heads, value_heads // heads, channels).sum(3)


def sequences(batch, length, segment_ids=None, cu_seqlens=None):
    """Every sequence as lists (rows, tokens, states read, states written); no state read means zeros."""
    if cu_seqlens is not None:
        starts, ends = list(cu_seqlens[:-1]), list(cu_seqlens[1:])
        return [([0], list(range(s, e)), [n], [n]) for n, (s, e) in enumerate(zip(starts, ends, strict=True))]
    if segment_ids is None:
        return [(list(range(batch)), list(range(length)), list(range(batch)), list(range(batch)))]
    found = []
    for b in range(batch):
        runs, last = [[]], 0
        for t in range(length):
            if segment_ids[b, t] == 0:  # padding belongs to no sequence and interrupts none
                continue
            if last not in (0, segment_ids[b, t]):
                runs.append([])
            runs[-1].append(t)
            last = segment_ids[b, t]
        ends = len(runs) - 1
        found += [([b], run, [b] if n == 0 else [], [b] if n == ends else []) for n, run in enumerate(runs)]
    return found


def recurrence(q, k, v, g, beta, scale, state):
    """One sequence a row, as many key heads as value heads: o, the last state, and (D, e, S') of every token."""
    o, trace = np.zeros_like(v), []
    for t in range(v.shape[1]):
        decayed = np.exp(g[:, t])[..., None] * state
        error = v[:, t] - np.einsum("nhk,nhkv->nhv", k[:, t], decayed)
        state = decayed + (beta[:, t, :, None] * k[:, t])[..., None] * error[..., None, :]
        o[:, t] = scale * np.einsum("nhk,nhkv->nhv", q[:, t], state)
        trace.append((decayed, error, state))
    return o, state, trace


def recurrence_adjoint(q, k, v, g, beta, scale, trace, do, dstate):
    """Gradients of q, k, v, g, beta and of the initial state."""
    dq, dk, dv, dg, dbeta = (np.zeros_like(x) for x in (q, k, v, g, beta))
    for t in reversed(range(v.shape[1])):
        decayed, error, state = trace[t]
        dq[:, t] = scale * np.einsum("nhkv,nhv->nhk", state, do[:, t])
        dstate = dstate + scale * q[:, t, :, :, None] * do[:, t, :, None, :]
        dwrite = np.einsum("nhkv,nhv->nhk", dstate, error)
        derror = beta[:, t, :, None] * np.einsum("nhk,nhkv->nhv", k[:, t], dstate)
        dk[:, t] = beta[:, t, :, None] * dwrite - np.einsum("nhkv,nhv->nhk", decayed, derror)
        dv[:, t] = derror
        dbeta[:, t] = (k[:, t] * dwrite).sum(-1)
        ddecayed = dstate - k[:, t, :, :, None] * derror[..., None, :]
        dg[:, t] = (ddecayed * decayed).sum(-1)
        dstate = np.exp(g[:, t])[..., None] * ddecayed
    return dq, dk, dv, dg, dbeta, dstate


def kda(
    q, k, v, g, beta, initial_state=None, *, scale=None, segment_ids=None, cu_seqlens=None, do=None, dfinal_state=None
):
    """(o, final_state), or with cotangents ((o, final_state), gradients of q, k, v, g, beta, initial_state)."""
    q, k, v, g, beta = (np.asarray(x, np.float64) for x in (q, k, v, g, beta))
    (batch, length, heads, key_channels), (value_heads, value_channels) = q.shape, v.shape[2:]
    scale = key_channels**-0.5 if scale is None else scale
    shape = (batch if cu_seqlens is None else len(cu_seqlens) - 1, value_heads, key_channels, value_channels)
    initial_state = np.zeros(shape) if initial_state is None else np.asarray(initial_state, np.float64)
    inputs = (repeat_heads(q, value_heads), repeat_heads(k, value_heads), v, g, beta)
    o, final_state = np.zeros_like(v), np.zeros(shape)
    grads = [np.zeros_like(x) for x in inputs]
    dinitial_state = np.zeros(shape)
    for rows, tokens, read, written in sequences(batch, length, segment_ids, cu_seqlens):
        at = np.ix_(rows, tokens)
        local = [x[at] for x in inputs]
        start = initial_state[read] if read else np.zeros((len(rows), *shape[1:]))
        o[at], end, trace = recurrence(*local, scale, start)
        if written:
            final_state[written] = end
        if do is None:
            continue
        dend = np.asarray(dfinal_state, np.float64)[written] if written else np.zeros_like(end)
        *parts, dstart = recurrence_adjoint(*local, scale, trace, np.asarray(do, np.float64)[at], dend)
        for whole, part in zip(grads, parts, strict=True):
            whole[at] = part
        if read:
            dinitial_state[read] = dstart
    if do is None:
        return o, final_state
    dq, dk, *rest = grads
    return (o, final_state), (sum_heads(dq, heads), sum_heads(dk, heads), *rest, dinitial_state)


def l2_normalize(x):
    return x / np.sqrt((x**2).sum(-1, keepdims=True) + EPSILON)


def l2_normalize_adjoint(x, dy):
    y = l2_normalize(x)
    return (dy - y * (y * dy).sum(-1, keepdims=True)) / np.sqrt((x**2).sum(-1, keepdims=True) + EPSILON)


def decay(g_raw, A_log, dt_bias, lower_bound=None):
    """Softplus decay, or with a lower bound the bounded one. A_log [HV]; dt_bias [HV, K]."""
    x, rate = g_raw + dt_bias, np.exp(A_log)[:, None]
    return -rate * np.logaddexp(0.0, x) if lower_bound is None else lower_bound * sigmoid(rate * x)


def decay_adjoint(g_raw, A_log, dt_bias, lower_bound, dg):
    """Gradients of g_raw, A_log, dt_bias."""
    x, rate = g_raw + dt_bias, np.exp(A_log)[:, None]
    if lower_bound is None:
        dx = -rate * sigmoid(x) * dg
        dA_log = (dg * decay(g_raw, A_log, dt_bias)).sum((0, 1, 3))
    else:
        dx = lower_bound * sigmoid(rate * x) * sigmoid(-rate * x) * rate * dg
        dA_log = (dx * x).sum((0, 1, 3))
    return dx, dA_log, dx.sum((0, 1))


def kda_raw(
    q,
    k,
    v,
    g_raw,
    beta_raw,
    A_log,
    dt_bias,
    initial_state=None,
    *,
    lower_bound=None,
    beta_scale=1.0,
    do=None,
    **options,
):
    """`kda` on l2_normalize(q), l2_normalize(k), decay(g_raw), beta_scale * sigmoid(beta_raw).

    With cotangents also the gradients of q, k, v, g_raw, beta_raw, A_log, dt_bias, initial_state.
    """
    q, k, v, g_raw, beta_raw, A_log, dt_bias = (
        np.asarray(x, np.float64) for x in (q, k, v, g_raw, beta_raw, A_log, dt_bias)
    )
    g = decay(g_raw, A_log, dt_bias, lower_bound)
    beta = beta_scale * sigmoid(beta_raw)
    out = kda(l2_normalize(q), l2_normalize(k), v, g, beta, initial_state, do=do, **options)
    if do is None:
        return out
    (o, final_state), (dq, dk, dv, dg, dbeta, dinitial_state) = out
    dg_raw, dA_log, ddt_bias = decay_adjoint(g_raw, A_log, dt_bias, lower_bound, dg)
    dbeta_raw = dbeta * beta * sigmoid(-beta_raw)
    dq, dk = l2_normalize_adjoint(q, dq), l2_normalize_adjoint(k, dk)
    return (o, final_state), (dq, dk, dv, dg_raw, dbeta_raw, dA_log, ddt_bias, dinitial_state)


def diagonal_plus_low_rank(q, k, v, g, a, b, initial_state, *, scale, do=None, dfinal_state=None):
    """S' = (Diag exp(g) + b a^T) S + k v^T, o = scale * S'^T q, with as many key heads as value heads.

    The delta rule is a = exp(g) k, b = -beta k; plain linear attention with decay is a = b = 0.

    With cotangents also the gradients of q, k, v, g, a, b, initial_state.
    """
    q, k, v, g, a, b, state = (np.asarray(x, np.float64) for x in (q, k, v, g, a, b, initial_state))
    o, states = np.zeros_like(v), [state]
    for t in range(v.shape[1]):
        transition = np.exp(g[:, t])[..., None] * np.eye(k.shape[-1]) + b[:, t, :, :, None] * a[:, t, :, None, :]
        state = np.einsum("nhij,nhjv->nhiv", transition, state) + k[:, t, :, :, None] * v[:, t, :, None, :]
        o[:, t] = scale * np.einsum("nhk,nhkv->nhv", q[:, t], state)
        states.append(state)
    if do is None:
        return o, state
    dstate, (dq, dk, dv, dg, da, db) = dfinal_state, [np.zeros_like(x) for x in (q, k, v, g, a, b)]
    for t in reversed(range(v.shape[1])):
        before, after = states[t], states[t + 1]
        dq[:, t] = scale * np.einsum("nhkv,nhv->nhk", after, do[:, t])
        dstate = dstate + scale * q[:, t, :, :, None] * do[:, t, :, None, :]
        dk[:, t] = np.einsum("nhkv,nhv->nhk", dstate, v[:, t])
        dv[:, t] = np.einsum("nhkv,nhk->nhv", dstate, k[:, t])
        dtransition = np.einsum("nhiv,nhjv->nhij", dstate, before)
        dg[:, t] = np.exp(g[:, t]) * np.einsum("nhii->nhi", dtransition)
        db[:, t] = np.einsum("nhij,nhj->nhi", dtransition, a[:, t])
        da[:, t] = np.einsum("nhij,nhi->nhj", dtransition, b[:, t])
        transition = np.exp(g[:, t])[..., None] * np.eye(k.shape[-1]) + b[:, t, :, :, None] * a[:, t, :, None, :]
        dstate = np.einsum("nhij,nhiv->nhjv", transition, dstate)
    return (o, state), (dq, dk, dv, dg, da, db, dstate)
