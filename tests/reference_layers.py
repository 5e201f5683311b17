"""The layers' oracle: one sequence [T, D] through one layer in float64 NumPy, token by token.

Nothing here comes from the library or from JAX. Parameters are a nested dict, named as in the layer; linear maps are
[in, out].
"""

import numpy as np
import reference


def silu(x):
    return x * reference.sigmoid(x)


def linear(params, name, x):
    return x @ params[name]["kernel"]


def rms_norm(x, scale, epsilon=1e-5):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + epsilon) * scale


def softmax(x):
    weights = np.exp(x - x.max())
    return weights / weights.sum()


def short_convolution(weight, x):
    """weight [W, C], the current token's last."""
    y = np.zeros_like(x)
    for t in range(len(x)):
        for j in range(len(weight)):
            if t - j >= 0:
                y[t] += weight[len(weight) - 1 - j] * x[t - j]
    return silu(y)


def linear_mixer(
    params,
    x,
    *,
    heads,
    value_heads,
    channels,
    decay="channel",
    delta_rule=True,
    write="sigmoid",
    normalize=True,
    lower_bound=None,
    beta_scale=1.0,
    gate_activation=reference.sigmoid,
):
    """KDA and its relatives: every step in full, one token and one head at a time."""
    length, group = len(x), value_heads // heads
    q, k, v = (linear(params, f"{n}_proj", x) for n in "qkv")
    if "q_conv" in params:
        q, k, v = (short_convolution(params[f"{n}_conv"]["weight"], y) for n, y in zip("qkv", (q, k, v), strict=True))
    else:
        q, k, v = silu(q), silu(k), silu(v)
    q, k, v = q.reshape(length, heads, channels), k.reshape(length, heads, channels), v.reshape(length, value_heads, -1)
    if normalize:
        q, k = reference.l2_normalize(q), reference.l2_normalize(k)
    g = np.zeros((length, value_heads, channels))
    if decay == "channel":
        raw = linear(params, "f_b_proj", linear(params, "f_a_proj", x)).reshape(g.shape)
    elif decay == "head":
        raw = linear(params, "f_proj", x)[..., None]
    if decay is not None:
        g = g + reference.decay(raw, params["A_log"], params["dt_bias"], lower_bound)
    if write == "dt":
        beta = np.logaddexp(0.0, raw[..., 0] + params["dt_bias"][:, 0])
    else:
        beta = beta_scale * reference.sigmoid(linear(params, "b_proj", x))
    o = np.zeros_like(v)
    for j in range(value_heads):
        S = np.zeros((channels, v.shape[-1]))
        for t in range(length):
            key, query = k[t, j // group], q[t, j // group]
            S = np.exp(g[t, j])[:, None] * S
            removed = S.T @ key if delta_rule else 0.0
            S = S + beta[t, j] * np.outer(key, v[t, j] - removed)
            o[t, j] = S.T @ query / np.sqrt(channels)
    o = rms_norm(o, params["o_norm"]["scale"])
    if "g_b_proj" in params:
        o = o * gate_activation(linear(params, "g_b_proj", linear(params, "g_a_proj", x)).reshape(o.shape))
    elif "g_proj" in params:
        o = o * gate_activation(linear(params, "g_proj", x).reshape(o.shape))
    return linear(params, "o_proj", o.reshape(length, -1))


def causal(q, k, v):
    """Softmax attention of [T, H, K], [T, H, K], [T, H, V], one query at a time."""
    o = np.zeros_like(v)
    for t in range(len(q)):
        for h in range(q.shape[1]):
            o[t, h] = softmax(k[: t + 1, h] @ q[t, h] / np.sqrt(q.shape[-1])) @ v[: t + 1, h]
    return o.reshape(len(o), -1)


def rotate(x, theta):
    """Channels i and i + K/2 as a complex number, turned by t theta^(-2i/K)."""
    half = x.shape[-1] // 2
    turn = np.exp(1j * np.arange(len(x))[:, None] * theta ** (-2 * np.arange(half) / x.shape[-1]))
    z = (x[..., :half] + 1j * x[..., half:]) * turn[:, None]
    return np.concatenate([z.real, z.imag], -1)


def attention(params, x, *, heads, kv_heads, rope_theta=None):
    q = linear(params, "q_proj", x).reshape(len(x), heads, -1)
    k, v = (linear(params, f"{n}_proj", x).reshape(len(x), kv_heads, -1) for n in "kv")
    if rope_theta is not None:
        q, k = rotate(q, rope_theta), rotate(k, rope_theta)
    k, v = (np.repeat(y, heads // kv_heads, axis=1) for y in (k, v))
    return linear(params, "o_proj", causal(q, k, v))


def latent_attention(params, x, *, heads, latent_dim, key_dim):
    if "q_proj" in params:
        q = linear(params, "q_proj", x)
    else:
        q = linear(params, "q_b_proj", rms_norm(linear(params, "q_a_proj", x), params["q_a_norm"]["scale"], 1e-6))
    compressed = linear(params, "kv_a_proj", x)
    latent, shared = compressed[:, :latent_dim], compressed[:, latent_dim:]
    kv = linear(params, "kv_b_proj", rms_norm(latent, params["kv_a_norm"]["scale"], 1e-6)).reshape(len(x), heads, -1)
    k = np.concatenate([kv[..., :key_dim], np.repeat(shared[:, None], heads, axis=1)], -1)
    o = causal(q.reshape(k.shape), k, kv[..., key_dim:])
    if "g_proj" in params:
        o = o * reference.sigmoid(linear(params, "g_proj", x))
    return linear(params, "o_proj", o)


def swiglu(params, x):
    return linear(params, "down_proj", silu(linear(params, "gate_proj", x)) * linear(params, "up_proj", x))


def situ(gate, up, beta, linear_beta):
    return beta * np.tanh(gate / beta) * reference.sigmoid(gate) * linear_beta * np.tanh(up / linear_beta)


def choose_experts(choice, *, top_k, groups=1, top_groups=1):
    """The experts of one token, from the scores for the choice [E]."""
    members = np.split(np.arange(len(choice)), groups)
    best = [np.sort(choice[group])[-2:].sum() for group in members]
    allowed = np.concatenate([members[g] for g in np.argsort(best)[-top_groups:]])
    return allowed[np.argsort(choice[allowed])[-top_k:]]


def mixture_of_experts(params, x, *, activation, top_k, groups=1, top_groups=1, renormalize=True, scaling=1.0):
    """One token at a time, one expert at a time."""

    def expert(weights, token):
        gate, up, down = (weights[f"{n}_proj"] for n in ("gate", "up", "down"))
        return activation(token @ gate, token @ up) @ down

    latent = linear(params, "latent_down_proj", x) if "latent_down_proj" in params else x
    routed = np.zeros_like(latent)
    for t in range(len(x)):
        scores = reference.sigmoid(x[t] @ params["router"]["kernel"])
        chosen = choose_experts(scores + params["router"]["bias"], top_k=top_k, groups=groups, top_groups=top_groups)
        total = scores[chosen].sum() + 1e-20 if renormalize else 1.0
        for e in chosen:
            weights = {name: stack[e] for name, stack in params["experts"].items()}
            routed[t] += scaling * scores[e] / total * expert(weights, latent[t])
    if "latent_down_proj" in params:
        routed = linear(params, "latent_up_proj", rms_norm(routed, params["latent_norm"]["scale"]))
    if "shared" in params:
        routed = routed + expert({name: part["kernel"] for name, part in params["shared"].items()}, x)
    return routed


def attention_residual(params, sources):
    """A mixture of the sources [n, T, D] at every token."""
    y = np.zeros_like(sources[0])
    for t in range(len(y)):
        scores = [rms_norm(x[t], params["norm"]["scale"]) @ params["proj"]["kernel"][:, 0] for x in sources]
        y[t] = softmax(np.array(scores)) @ np.stack([x[t] for x in sources])
    return y
