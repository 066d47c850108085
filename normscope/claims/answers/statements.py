"""Later work, and our answers to open questions: source, place, quantifier, assumptions, statement, correction."""

from __future__ import annotations

from normscope.claims.statement import ANSWER, EXISTS, FOR_ALL, LATER, Statement

STATEMENTS = {
    "L-explosion": Statement(
        LATER, "against Than 2025, Section 4.2; of random networks, Yang et al. 2019 (Akbar, Section 2.3)", EXISTS,
        "ReLU chains with BN of the data's statistics, held fixed; all ‖W_k‖ = 1",
        "The constants of a network with BN in its input and in W_1 grow exponentially with depth; without BN they are at most 1 "
        "and ‖x‖.",
    ),
    "L-rank": Statement(
        LATER, "against Than 2025, Section 4.2", EXISTS, "one BN layer, ε = 0, data close to a line; ‖W‖ = 1",
        "What leaves the data's line is amplified by 1/σ of the missing direction, without limit as the data approach the line.",
    ),
    "O-floor-BN": Statement(
        ANSWER, "docs/laws.md, Floors, Theorem 1", FOR_ALL,
        "a chain Linear → BN → 1-Lipschitz activation, statistics of the data, ε = 0, every σ > 0; any weights, biases and depth",
        "∏‖D_k⁻¹W_k‖ ≥ L ≥ √(n_K/tr Cov x), L the constant up to the last BN.",
    ),
    "O-floor-LN": Statement(
        ANSWER, "docs/laws.md, Floors, Theorem 2", FOR_ALL,
        "a chain Linear → LN → activation that is 1-Lipschitz and 0 at 0; no biases, β = 0, ε = 0; every x with σ_k(x) > 0",
        "∏‖Γ_kPW_k‖/σ_k(x) ≥ ‖Γ_K z_K(x)‖/‖x‖, which is √n_K/‖x‖ at γ = 1.",
    ),
    "O-affine": Statement(
        ANSWER, "docs/laws.md, Floors, Theorem 3 (question 1 of Than 2025, Section 6)", FOR_ALL,
        "as O-floor-BN, with any γ_k and β_k",
        "∏‖Γ_kD_k⁻¹W_k‖ ≥ L ≥ ‖γ_K‖/√tr Cov x: β and all γ but the last leave the floor where it is.",
    ),
    "O-residual": Statement(
        ANSWER, "docs/laws.md, Floors, Theorem 4 (question 2 of Than 2025, Section 6)", FOR_ALL,
        "pre-norm blocks x + F_l(LN x), F_l with constant ℓ_l on what LN returns, σ_l(x) the least over tokens",
        "The local constant at x is at most ∏(1 + ℓ_l/σ_l(x)) ≤ exp Σℓ_l/σ_l(x).",
    ),
    "O-depth": Statement(
        ANSWER, "docs/laws.md, Floors, corollary of Theorem 4", FOR_ALL, "as O-residual, ℓ_l ≤ ℓ and σ_l ≥ c√l",
        "log L ≤ 2(ℓ/c)√depth: not exponential in the depth.",
    ),
    "O-small-variance": Statement(
        ANSWER, "docs/laws.md, Floors, Theorem 5 (question 3 of the digest)", FOR_ALL,
        "BN with the data's statistics, ε > 0, any σ ≥ 0",
        "‖D⁻¹W‖ ≤ min(‖S⁻¹W‖, ‖W‖/√ε), S = diag σ, D = (S² + ε)^½: both are reached, for W → cW at c → ∞ and c → 0.",
    ),
    "O-batch-noise": Statement(
        ANSWER, "docs/laws.md, Noise, Theorem 6 (a limit in Akbar, Section 9.2; future work in Section 10)", FOR_ALL,
        "a linear neuron with BN without γ and β, squared error, ‖w‖ = 1; Gaussian inputs of covariance I, targets linear in them "
        "up to Gaussian noise; mini-batches of m ≥ 3 (variance: m ≥ 4), ε = 0; τ the descent of all data along a unit v ⟂ w, ν the "
        "deviation of what neither w·x nor v·x explains of the targets",
        "The descent of a mini-batch along v has the mean a_mτ with a_m = √(2/m)Γ(m/2)/Γ((m − 1)/2) ≈ 1 − 3/(4m) and the variance "
        "(m − 2)(mτ² + ν²)/(m(m − 3)) − a_m²τ². So the noise biases the learning rate of w and no critical point of it, and bias² "
        "is at most 0.36/m of the variance (m ≥ 4).",
    ),
}  # fmt: skip
