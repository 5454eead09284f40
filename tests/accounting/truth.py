"""The privacy curve of one step by other means: quadrature over a given spectrum, closed forms."""

import math

import numpy as np
from scipy import optimize, special, stats

QUADRATURE_NODES = 60


def chi2_rule(num_probes, nodes=QUADRATURE_NODES):
    """Gauss quadrature for chi^2_k/k: exact for polynomials of degree 2*nodes-1."""
    points, weights = special.roots_genlaguerre(nodes, num_probes / 2 - 1)
    return points * 2.0 / num_probes, weights / weights.sum()


def spectrum_law(weights, exact_share, num_probes, *, dependence="independent"):
    """Ratios and masses of R = w_0 + sum_j w_j X_j, sum of all weights 1.

    dependence: "independent" sketches; "same" sketch for all parameters (X_j equal).
    """
    points, masses = chi2_rule(num_probes)
    if dependence == "same":
        return exact_share + sum(weights) * points, masses
    ratios, total = np.array([exact_share]), np.array([1.0])
    for weight in weights:
        ratios = (ratios[:, None] + weight * points).ravel()
        total = (total[:, None] * masses).ravel()
    kept = total > 1e-25
    return ratios[kept], total[kept]


def gaussian_curve(log_gamma, mu):
    return stats.norm.cdf(mu / 2 - log_gamma / mu) - math.exp(log_gamma) * stats.norm.cdf(
        -mu / 2 - log_gamma / mu
    )


def shared_curve(epsilon, sigma, rate, ratios, masses):
    """Delta in both directions when the adversary knows the sketch."""
    mu = 1 / (sigma * np.sqrt(ratios))

    def mean(gamma):
        return float(masses @ np.maximum(gaussian_curve(math.log(gamma), mu), 0.0))

    gamma = (math.exp(epsilon) - 1 + rate) / rate
    remove = rate * mean(gamma) if gamma > 0 else -math.expm1(epsilon)
    scale = 1 - (1 - rate) * math.exp(epsilon)
    add = scale * mean(rate * math.exp(epsilon) / scale) if scale > 0 else 0.0
    return remove, add


def per_sample_curve(epsilon, sigma, rate, ratios, masses):
    """Delta in both directions when S stays hidden: the best threshold test."""
    mu = 1 / (sigma * np.sqrt(ratios))

    def log_ratio(t):
        exponent = mu * t - 0.5 * mu * mu
        top = exponent.max()
        mixture = top + math.log(float(masses @ np.exp(exponent - top)))
        return np.logaddexp(math.log1p(-rate) if rate < 1 else -math.inf, math.log(rate) + mixture)

    def threshold(level):
        low, high = -60.0, 60.0
        if log_ratio(low) >= level:
            return -math.inf
        if log_ratio(high) <= level:
            return math.inf
        return optimize.brentq(lambda t: log_ratio(t) - level, low, high, xtol=1e-13)

    t = threshold(epsilon)
    power = float(masses @ stats.norm.cdf(mu - t))
    remove = rate * power + (1 - rate - math.exp(epsilon)) * stats.norm.cdf(-t)
    t = threshold(-epsilon)
    miss = (1 - rate) * stats.norm.cdf(t) + rate * float(masses @ stats.norm.cdf(t - mu))
    return remove, stats.norm.cdf(t) - math.exp(epsilon) * miss


def gaussian_epsilon(mu, delta):
    """Epsilon of a Gaussian mechanism with sensitivity mu noise standard deviations."""

    def log_delta(epsilon):
        a, b = mu / 2 - epsilon / mu, -mu / 2 - epsilon / mu
        first, second = stats.norm.logcdf(a), epsilon + stats.norm.logcdf(b)
        return first + math.log(max(-math.expm1(second - first), 1e-300))

    if log_delta(0.0) <= math.log(delta):
        return 0.0
    return optimize.brentq(
        lambda e: log_delta(e) - math.log(delta), 0.0, mu * mu / 2 + mu * 12 + 5, rtol=1e-12
    )
