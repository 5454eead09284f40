"""Small-head Hutch++ and the quantities of its theorem, straight from dense matrices."""

import numpy as np


def spectra(rng, count, size):
    """Eigenvalues with sum 1, largest first, of many shapes; (count, size)."""
    power = rng.choice([0.05, 0.3, 1.0, 3.0, 10.0], size=(count, 1))
    values = rng.gamma(1.0 / power, size=(count, size)) + 1e-12
    return -np.sort(-values / values.sum(1, keepdims=True), axis=1)


def head(values, sketch, *, powered=True):
    """Q = orth(O S), or of one side only, in the eigenbasis; (count, size, r)."""
    scale = values if powered else np.sqrt(values)
    return np.linalg.qr(scale[:, :, None] * sketch)[0]


def residual(values, basis):
    """(I − QQᵀ) O (I − QQᵀ); (count, size, size)."""
    size = values.shape[1]
    keep = np.eye(size) - basis @ basis.transpose(0, 2, 1)
    return keep @ (values[:, :, None] * keep)


def ratios(rng, values, rank, num_probes, count, *, powered=True, reuse=False):
    """Samples of R = n̂²/n² of one spectrum.

    reuse: take the sketch S for the tail's first probes, a mistake.
    """
    values = np.broadcast_to(values, (count, len(values)))
    sketch = rng.standard_normal((count, values.shape[1], rank))
    basis = head(values, sketch, powered=powered)
    probes = rng.standard_normal((count, values.shape[1], num_probes))
    if reuse:
        probes[:, :, :rank] = sketch
    probes -= basis @ (basis.transpose(0, 2, 1) @ probes)
    tail = np.einsum("ns,nsk->n", values, probes**2) / num_probes
    return np.einsum("ns,nsr->n", values, basis**2) + tail


def bound(values, sketch):
    """μ_0 … μ_{r−1}, c and t_0 of the theorem, with the h_i that this sketch has.

    The top r rows of S are made lower triangular by a rotation of its columns: column i then is
    (0, …, 0, χ_i, g), and h_i = ⟨g, O g⟩/χ_i².
    """
    rank = sketch.shape[2]
    rotation = np.linalg.qr(sketch[:, :rank].transpose(0, 2, 1))[0]
    rotated = sketch @ rotation
    above = rotated[:, :rank] * np.triu(np.ones((rank, rank)), 1)
    assert np.abs(above).max() < 1e-9 * np.abs(rotated).max()
    c = np.minimum(values[:, rank - 1], 1.0 - values[:, :rank].sum(1))
    following = np.concatenate([values[:, 1:rank], c[:, None]], axis=1)
    mu, trace, weights = c.copy(), 1.0 - values[:, :rank].sum(1), []
    for i in range(rank - 1, -1, -1):
        g = rotated[:, i + 1 :, i]
        h = (values[:, i + 1 :] * g**2).sum(1) / rotated[:, i, i] ** 2
        largest, after = values[:, i], following[:, i]
        p = after * h / (largest**2 + after * h)
        mu = mu + p * (largest - mu)
        trace = trace + best_trade(largest, after, h)
        weights.insert(0, mu)
    return np.stack(weights, axis=1), c, trace


def best_trade(largest, after, h, points=400):
    """Max over 0 ≤ y ≤ λ_{i+1} of (λ_i − y)·y·h/(λ_i² + y·h), on a grid and a finer one."""
    y = after * np.geomspace(1e-6, 1.0, points)[:, None]
    value = (largest - y) * y * h / (largest**2 + y * h)
    best = y[np.argmax(value, axis=0), np.arange(y.shape[1])]
    y = np.minimum(best * np.linspace(0.95, 1.05, points)[:, None], after)
    return np.maximum(value.max(0), ((largest - y) * y * h / (largest**2 + y * h)).max(0))


def bound_ratios(rng, values, num_probes, count):
    """Samples of R^λ for λ_1 ≥ … ≥ λ_r, as the theorem defines it."""
    rank = len(values)
    rest = 1.0 - np.cumsum(values)
    c = min(values[-1], rest[-1])
    following = [*values[1:], c]
    mu, trace, weights = np.full(count, c), np.full(count, rest[-1]), []
    for i in range(rank - 1, -1, -1):
        h = rest[i] / rng.chisquare(rank - i, count)
        p = following[i] * h / (values[i] ** 2 + following[i] * h)
        mu = mu + p * (values[i] - mu)
        trace = trace + best_trade(np.full(count, values[i]), np.full(count, following[i]), h, 60)
        weights.insert(0, mu)
    left, total = trace.copy(), 1.0 - trace
    for weight in weights:
        used = np.minimum(weight, left)
        left, total = left - used, total + used * rng.chisquare(num_probes, count) / num_probes
    shape = np.maximum(num_probes * left / (2 * c), 1e-12)
    return total + 2 * c / num_probes * rng.gamma(shape)


def puts(samples, strikes):
    """Means of (x − R)₊ − (x − 1)₊, and their standard errors."""
    gain = np.maximum(strikes[:, None] - samples, 0.0)
    # The mean of R is 1: that much of the variance is known.
    slope = np.array([np.cov(row, samples)[0, 1] for row in gain]) / samples.var()
    gain = gain + slope[:, None] * (1.0 - samples)
    return gain.mean(1) - np.maximum(strikes - 1.0, 0.0), gain.std(1) / np.sqrt(samples.size)
