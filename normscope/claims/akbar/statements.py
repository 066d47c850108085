"""What Akbar states, in our words: source, place, quantifier, assumptions, statement, correction, hedge."""

from __future__ import annotations

from normscope.claims.statement import AKBAR, CAN, DOUBTED, EXISTS, FOR_ALL, OBSERVED, SUGGESTED, Statement

BATCH_STATISTICS = "statistics of the batch, ε = 0"
ONE_UNIT = "one BN unit, a batch of m, a = γẑ + β, δ = ∂L/∂a"
APPENDIX = f"{ONE_UNIT}, no ε"

STATEMENTS = {
    "A-P4.1": Statement(
        AKBAR, "Proposition 4.1, second version", FOR_ALL, f"c > 0, {BATCH_STATISTICS}",
        "With BN, (W, b) → (cW, cb) leaves the output unchanged.",
    ),
    "A-P4.1-gamma": Statement(
        AKBAR, "Section 2.1, key property of BN (as Proposition 4.1's first version, which Section 4.1 withdraws)", FOR_ALL,
        f"c > 0, {BATCH_STATISTICS}", "With BN, scaling the weights by c and γ by 1/c leaves the output unchanged.",
        "γ stays as it is, as Proposition 4.1 then says: BN has removed the scale already. Section 2.1 still has the first "
        "version.", DOUBTED,
    ),
    "A-S4.1-group": Statement(
        AKBAR, "Section 4.1, geometry of BN's invariance", FOR_ALL, f"{BATCH_STATISTICS}, independent layers",
        "With BN in k layers the group of scale symmetries might be (ℝ⁺)^k.",
        "Every neuron has a scale of its own, as Section 3.1 and Table 1 say: the group is (ℝ⁺)^N for N neurons with BN.",
        SUGGESTED,
    ),
    "A-S9.1-bias": Statement(
        AKBAR, "Section 9.1, first paragraph", FOR_ALL, "a bias before BN",
        "Leaving it out slightly reduces the model's capacity.",
        "It represents exactly the same functions: BN subtracts b in training, and in eval mode the running mean holds it. (The "
        "same "
        "sentence says that BN would remove it anyway.)",
    ),
    "A-C4.1.1": Statement(
        AKBAR, "Corollary 4.1.1", FOR_ALL, BATCH_STATISTICS, "With BN, ⟨∇_W L, W⟩ + ⟨∇_b L, b⟩ = 0.",
    ),
    "A-P4.2": Statement(
        AKBAR, "Proposition 4.2 and the third paragraph after its proof", FOR_ALL, "c > 0, ε = 0 (the proof writes ε and drops it)",
        "With LN, one common scale of (W, b) and one common shift of b leave the output unchanged.",
    ),
    "A-P4.3": Statement(
        AKBAR, "Proposition 4.3; also Sections 2.2 and 3.1 and Table 1", FOR_ALL, "α > 0, g > 0",
        "In weight normalization (v, g) → (αv, g/α) leaves w = gv/‖v‖ unchanged.",
        "It gives w/α; the symmetry is v → αv with g fixed, since w depends on the direction of v alone. Example: v = (1, 0), g "
        "= 2, "
        "α = 2 gives w = (1, 0) instead of (2, 0).",
    ),
    "A-Tab1": Statement(
        AKBAR, "Table 1", FOR_ALL, "ε = 0; per BN neuron, LN layer, WN vector",
        "The free directions are scale and shift for BN, scale and common shift for LN, one scale for WN.",
        "They are free, but for LN there are more: W → W + 1vᵀ adds the same number to every neuron, so (W, b) has 2 + d_in.",
    ),
    "A-Eq1": Statement(
        AKBAR, "Section 3.2, Eq. (1)", FOR_ALL, f"{ONE_UNIT}, σ with ε inside", "∂L/∂z_n = (1/mσ)[mδ_n − Σδ_k − ẑ_n Σδ_kẑ_k].",
        "The factor γ is missing: ∂L/∂z_n = (γ/mσ)[mδ_n − Σδ_k − ẑ_n Σδ_kẑ_k], as Appendix A.1.1 ends: γ = 2 doubles it.",
    ),
    "A-A.1.1-end": Statement(
        AKBAR, "Appendix A.1.1, last formula for ∂L/∂z", FOR_ALL, APPENDIX, "∂L/∂z_k = (γ/σ)[δ_k − mean δ − ẑ_k mean(δẑ)].",
    ),
    "A-A.1.1-W": Statement(
        AKBAR, "Appendix A.1.1, ∂L/∂W", FOR_ALL, APPENDIX,
        "∂L/∂W_j = (γ/σ)[Σ_k δ_k x_kj − (1/m) Σ_k Σ_n δ_n x_kj − (1/m) Σ_k ẑ_k x_kj Σ_n δ_n ẑ_n], orthogonal to W.",
    ),
    "A-A.1.1": Statement(
        AKBAR, "Appendix A.1.1, ∂ẑ_n/∂z_k", FOR_ALL, APPENDIX, "∂ẑ_n/∂z_k = δ_nk/σ − 1/(mσ) − (z_n − μ)(z_k − μ)/σ³.",
        "The last term lacks 1/m: it is (z_n − μ)(z_k − μ)/(mσ³), for ∂σ/∂z_k = (z_k − μ)/(mσ). Example: z = (1, −1), where ẑ does "
        "not move along (1, −1); as printed it would, by −1·(1, −1).",
    ),
    "A-LN-backward": Statement(
        AKBAR, "Section 3.2, formula of LN", FOR_ALL, "one sample, d neurons, δ = ∂L/∂a",
        "∂L/∂z_i = (1/dσ)[dδ_i − Σδ_j − ẑ_j Σδ_jẑ_j].",
        "The index is a slip: the last term is ẑ_i Σγ_jδ_jẑ_j, and every δ_j carries its γ_j. Example: ẑ = (1, −1), δ = (1, 0), "
        "γ = 1 has ∂L/∂z = 0; with ẑ_2 in place of ẑ_1 the first entry would be 1/σ.",
    ),
    "A-WN-3.2": Statement(
        AKBAR, "Section 3.2, weight norm", FOR_ALL, "w = gv/‖v‖",
        "∂L/∂v_k = ∂L/∂w_k (g/‖v‖ − g v_k²/‖v‖³), and ∂L/∂g = Σ_k ∂L/∂w_k v_k/‖v‖.",
        "∂L/∂g is right. ∂L/∂v_k lacks the cross terms, for every w_j depends on v_k through ‖v‖: "
        "∂L/∂v = (g/‖v‖)(I − vvᵀ/‖v‖²) ∂L/∂w, as Section 4.3 has it. Example: v = (1, 1), g = √2, ∂L/∂w = (0, 1): stated "
        "∂L/∂v_1 = 0, true −½.",
    ),
    "A-WN-4.3": Statement(
        AKBAR, "Section 4.3, after Proposition 4.3", FOR_ALL, "w = gv/‖v‖; given as something like this",
        "∂L/∂v = (g/‖v‖)P_⊥v ∂L/∂w, and ∂L/∂g = (1/‖v‖)(∂L/∂w·v/‖v‖).",
        "∂L/∂v is right. ∂L/∂g has a spare 1/‖v‖; it is ∂L/∂w·v/‖v‖, as Section 3.2 has it.", SUGGESTED,
    ),
    "A-WN-radial": Statement(
        AKBAR, "Section 4.3, after Proposition 4.3", FOR_ALL, "w = gv/‖v‖", "∇_v L·v = g ∂L/∂g.",
        "∇_v L·v = 0, for w does not depend on ‖v‖; g ∂L/∂g = ∂L/∂w·w is free. Example: v = (1, 0), g = 1, ∂L/∂w = (1, 0): 0 "
        "against 1.",
    ),
    "A-A.1.2": Statement(
        AKBAR, "Appendix A.1.2, last paragraph", FOR_ALL, "one BN unit at δ = 0, squared error ½Σ(a − y)²",
        "The Hessian in z has the eigenvalues 0 and 0, along 1 and ẑ, and m − 2 times γ²/σ².",
    ),
    "A-A.1.2-matrix": Statement(
        AKBAR, "Appendix A.1.2, matrix and eigenvector ẑ", FOR_ALL, "as A-A.1.2, γ fixed",
        "That Hessian is (γ²/σ²)(I − 11ᵀ/m − ẑẑᵀ), up to a term I/m that is written and then left out, with 1 − m along ẑ.",
        "It is (γ²/σ²)(I − 11ᵀ/m − ẑẑᵀ/m), with 0 along ẑ, γ fixed or not. The appendix doubts 1 − m and ends with 0.", DOUBTED,
    ),
    "A-A.1.2-gradient": Statement(
        AKBAR, "Appendix A.1.2, first paragraph", FOR_ALL, "one BN unit with Σδ = 0 and Σδ(z − μ) = 0",
        "∂L/∂z = 0 for all samples.",
        "There ∂L/∂z = (γ/σ)δ, which vanishes only where every δ does. Example: z = (−1, −1, 1, 1), δ = (1, −1, 1, −1).",
    ),
    "A-S3.2-flat": Statement(
        AKBAR, "Section 3.2, Hessian considerations", FOR_ALL, f"a BN neuron, {BATCH_STATISTICS}",
        "The second derivative of L along w is 0: wᵀHw = 0.",
    ),
    "A-S3.2-eigen": Statement(
        AKBAR, "Section 1.4, item 3; Sections 3.2 and 5.1", FOR_ALL, f"a BN neuron, {BATCH_STATISTICS}, any w",
        "The Hessian has eigenvalue 0 along w: Hw = 0.",
        "At critical points. Elsewhere differentiating ∇L(w)·w = 0 gives Hw = −∇L(w); only wᵀHw = 0. Example: L = w_1²/‖w‖² "
        "at w = (1, 1) "
        "has ∇L = (½, −½) and Hw = (−½, ½).",
    ),
    "A-S6.1": Statement(
        AKBAR, "Section 6.1", FOR_ALL, "a BN neuron a, μ and σ treated as constant, which the paper calls inexact",
        "∇_w a = (x − x̄)/σ is orthogonal to w.",
        "w·(x − x̄)/σ = ẑ, which is not 0: it is the change of σ with w that makes the gradient orthogonal to w, by the term "
        "−ẑ mean(ẑx)/σ. Without it the Hessian has no zero along w.", DOUBTED,
    ),
    "A-S7.1": Statement(
        AKBAR, "Section 7.1, convergence speed", FOR_ALL, "a linear model on inputs normalized by BN",
        "The inputs have unit variance in each direction.",
        "They have unit variance along each axis: along u it is uᵀRu with R the correlations, from 1 − |ρ| to 1 + |ρ| for two "
        "features. κ = 1 is said of whitening, to which BN is called akin; with BN κ = (1 + |ρ|)/(1 − |ρ|).",
    ),
    "A-metric": Statement(
        AKBAR, "Section 4.1, metric tensor, after Cho & Lee", FOR_ALL, "k > 0",
        "g_y(Δ₁, Δ₂) = Δ₁ᵀΔ₂/yᵀy satisfies g_ky(kΔ₁, kΔ₂) = g_y(Δ₁, Δ₂), and the gradient on the sphere is the projected one.",
    ),
    "A-grad-scale": Statement(
        AKBAR, "Section 3.2 after Eq. (1), end of Section 4.3, Section 5", FOR_ALL, BATCH_STATISTICS,
        "With BN the gradient scales as 1/‖w‖ and the curvature as 1/‖w‖².",
    ),
    "A-Ex5.1": Statement(
        AKBAR, "Example 5.1", FOR_ALL, f"{BATCH_STATISTICS}, large ‖w‖",
        "With BN ‖∇_w L‖ is about O(1) and does not grow with ‖w‖.",
        "It falls: the rate is Θ(1/‖w‖), as the paper itself says elsewhere, so that small weights get large gradients.",
    ),
    "A-L5.1": Statement(
        AKBAR, "Lemma 5.1", FOR_ALL, f"one neuron before BN, {BATCH_STATISTICS}, gradient flow without decay",
        "d‖w‖²/dt = 0.",
    ),
    "A-L5.1-LN": Statement(
        AKBAR, "Section 5.1, paragraph after Lemma 5.1", FOR_ALL, "LN with weights and biases, ε = 0, gradient flow",
        "‖W‖_F of the layer is conserved.",
        "With a bias only ‖W‖² + ‖b‖² is conserved: W·∇_W L = −b·∇_b L need not vanish. Without a bias it is right. "
        "Example: x = 1, W = (1, 0, 0)ᵀ, b = (0, 0, −1), so z = (1, 0, −1): ∂L/∂W = ∂L/∂b is a multiple of (1, −2, 1), and its "
        "product with W is not 0.",
    ),
    "A-L5.1-WN": Statement(
        AKBAR, "Section 5.1, paragraph after Lemma 5.1", FOR_ALL, "weight normalization, gradient flow in (v, g)",
        "d‖v‖²/dt = 0.",
    ),
    "A-WD": Statement(
        AKBAR, "Section 5.1, after the remark", FOR_ALL, "the penalty (λ/2)‖w‖² added to a scale-invariant loss, gradient flow",
        "d‖w‖²/dt = −λ‖w‖².", "d‖w‖²/dt = 2w·dw/dt = −2λ‖w‖²; it is ½‖w‖² that has the rate −λ‖w‖². Example: L = 0 gives "
        "w = e^(−λt)w_0 and ‖w‖² = e^(−2λt)‖w_0‖².",
    ),
    "A-R5.1": Statement(
        AKBAR, "Remark after Lemma 5.1, (iii)", FOR_ALL, "mini-batches with their own statistics",
        "Mini-batch noise may give the gradient a small component along w, and ‖w‖ a random walk.",
        "The loss of every batch is itself scale-invariant at ε = 0, so each gradient is orthogonal to w (at ε > 0 up to about "
        "ε/σ²); what grows ‖w‖² is the finite step, by exactly η²‖∇L‖².", SUGGESTED,
    ),
    "A-S4.3-fisher": Statement(
        AKBAR, "Section 4.3, metric and natural gradient viewpoint", FOR_ALL, f"a BN network, {BATCH_STATISTICS}",
        "The Fisher information has the directions of scale in its null space, so that a natural gradient has no part along them.",
        hedge=SUGGESTED,
    ),
    "A-S7.1-rate": Statement(
        AKBAR, "Section 7.1, convergence to critical points", FOR_ALL,
        "L convex and L-smooth, κ = L/μ with μ > 0 the constant of strong convexity, which Section 5.1 names and this place "
        "does not",
        "Gradient descent converges in O(κ ln(1/ε)) iterations.",
    ),
    "A-S7.1-saddles": Statement(
        AKBAR, "Section 7.1, paragraph on strict saddle points, as something one might prove", FOR_ALL,
        f"linear networks with BN, {BATCH_STATISTICS}",
        "BN removes the pathological saddles: every critical point is a global minimum on the sphere, up to the invariances.",
        "Not for one neuron: where γ = 0 and w is uncorrelated with the target, the gradient is 0, the loss that of a "
        "constant, and the "
        "Hessian has a negative eigenvalue. With γ held at 1 the maximum, −w, is critical as well.", SUGGESTED,
    ),
    "A-S7.2-norms": Statement(
        AKBAR, "Section 7.2, formal bound attempt", FOR_ALL,
        "L layers with BN, a linear output; roughly, for some norms, and plus terms for BN's parameters that are not given",
        "GenGap ≤ O((1/N) Σ_l ‖W_l‖²_{2,1} ∏_{j≠l} ‖W_j‖²_{2,∞}).",
        "W → cW before BN leaves the function as it is and multiplies the sum by c^2L: no constant of O makes it a bound. It "
        "would have to "
        "be in scale-free quantities, such as D⁻¹W.", SUGGESTED,
    ),
    "A-S7.2-margin": Statement(
        AKBAR, "Section 7.2, generalization bound via margin", FOR_ALL, "the complexity of the network stays as it is",
        "The bound is about (1/margin)√(complexity/N): twice the margin, half of the bound.",
        "At fixed complexity. The margin of raw outputs doubles with the last layer, and so does the complexity ∏‖W_k‖: their "
        "quotient stays. Only the normalized margin counts.", SUGGESTED,
    ),
    "A-S10-VC": Statement(
        AKBAR, "Section 10, future work, asked as a question", FOR_ALL, "parameters that give one function are counted once",
        "BN may lower the VC dimension by identifying parameters of equal functions.",
        "No: the VC dimension depends on the set of functions alone. A linear threshold shatters d points in ℝ^d whether w is any "
        "vector or a unit one.", SUGGESTED,
    ),
    "A-S9.2-noise": Statement(
        AKBAR, "Section 9.2, first item", FOR_ALL, "BN with the statistics of mini-batches, ε = 0 here",
        "Mini-batch estimates add noise and break the exact invariances.",
        "The loss of every mini-batch is itself invariant, as Section 3.1 says of the batch (z = (w, −w) has ẑ = (1, −1) for "
        "every w > 0). What the estimates do is bias "
        "the gradient: "
        "the mean over mini-batches is not the gradient of all data.",
    ),
    "A-S9.3-shift": Statement(
        AKBAR, "Section 9.3", FOR_ALL, f"BN without γ and β, {BATCH_STATISTICS}, every σ > 0",
        "BN keeps the inputs of the next layer at mean 0 and variance 1, whatever the weights.",
    ),
    "A-S9.5-tangent": Statement(
        AKBAR, "Section 9.5, normalization in different spaces", FOR_ALL, f"a neuron before BN, {BATCH_STATISTICS}",
        "Updates in the tangent plane of the sphere, without the radial part of the gradient, would do as BN does.",
        hedge=SUGGESTED,
    ),
    "A-S5.1-saddle": Statement(
        AKBAR, "Section 5.1, saddle-point escape, second item", CAN,
        "a stationary point of the loss of all data; here a saddle of one neuron, so that no units are equal",
        "There the gradient of a mini-batch need not be 0, for samples, μ and σ fluctuate, and descent can leave by it.",
        hedge=SUGGESTED,
    ),
    "A-S9.5-clipping": Statement(
        AKBAR, "Section 9.5, normalization in different spaces", CAN,
        "gradient flow without BN, by the norm of the whole gradient; read as: ‖w‖ is kept, as BN keeps it",
        "Normalizing or clipping gradients could do to the geometry what BN does.",
        "It changes the clock and not the curves, whatever L is: the fields −∇L, −∇L/‖∇L‖ and the clipped one have the same "
        "direction, so their flows run along the same curves, and ‖w‖ changes as it does without. BN changes the curves: it keeps "
        "‖w‖. What they share is that a step no longer grows with some scale: with BN that of w, with normalized gradients that of "
        "L. Normalized layer by layer they bend the curves, and do not keep ‖w‖ either: ½(a² + b²) from (2, 1) "
        "goes by (1, 0), with a and b as layers.", SUGGESTED,
    ),
    "A-S9.5-free": Statement(
        AKBAR, "Section 9.5, BN in extremely deep networks, of normalizer-free networks", EXISTS,
        "at initialization; ReLU chains here, in which a start alone is enough and no activation is scaled",
        "A careful start and scaled activations can do what BN does: signals and gradients neither explode nor vanish with depth.",
        hedge=SUGGESTED,
    ),
    "A-S9.5-training": Statement(
        AKBAR, "Section 9.5, BN in extremely deep networks, last sentence", EXISTS,
        "no normalizer, finite width; the paper says if, read as: for every task there may be such a start; linear chains here",
        "BN could be spared if a start were proved to hold the variance of activations at 1 until training ends.",
        "Not for every task: at the minimum the variance is that of what the layer has to give. x = ±1 with targets 2x: w = 1 has "
        "variance 1, and descent brings w to 2 and the variance to 4. Nor in hidden layers: v·w·x from v = w = 1 ends at √2 each, "
        "the hidden variance at 2; gradient flow keeps v² − w², so w stays only where v does. "
        "It takes a constraint, such as BN, or ‖w‖ = 1 on whitened inputs.", SUGGESTED,
    ),
    "A-E1": Statement(
        AKBAR, "Section 8, Experiment 1", OBSERVED, "a linear classifier in the plane",
        "With BN the norm of w changes by less than 1 % in training; without, it moves.",
    ),
    "A-E2": Statement(
        AKBAR, "Section 8, Experiment 2", OBSERVED, "3 layers of 10 units, regression",
        "With BN λ_max is 5 times smaller, κ about 20 instead of 200, and training takes under 100 iterations.",
    ),
    "A-S6-others": Statement(
        AKBAR, "Sections 2.2 and 6, introduction, after Salimans & Kingma of WN; expected of LN", OBSERVED,
        "3 layers of 10 units, regression here",
        "WN improves the conditioning and often the speed of descent, and LN has a qualitatively similar effect.",
        hedge=SUGGESTED,
    ),
    "A-S7.3-decay": Statement(
        AKBAR, "Section 7.3, third implication; Section 9.1, regularization and BN", OBSERVED, "a 5-layer network on digits here",
        "Weight decay and BN are complementary: together they are often best, and with BN a smaller decay is enough.",
        hedge=SUGGESTED,
    ),
    "A-E3": Statement(
        AKBAR, "Section 8, Experiment 3", OBSERVED, "a 50-20-1 ReLU network",
        "With BN the mean margin is 1.8 instead of 1.2 and training accuracy survives more noise in the weights.",
    ),
    "A-E4": Statement(
        AKBAR, "Section 8, Experiment 4", OBSERVED, "5 layers, ReLU, weights far too large or too small everywhere",
        "With BN training goes smoothly from weights far too large or too small; without, it fails or starts late.",
    ),
    "A-noise": Statement(
        AKBAR, "Section 5.1, saddle-point escape", OBSERVED, "mini-batch statistics; two equal tanh neurons here",
        "The noise of BN's statistics can push parameters off saddles.",
        "Not off a saddle of symmetry: equal neurons see the same noise and stay equal. What leaves it is a difference that is "
        "there "
        "already, and it grows without noise too.", SUGGESTED,
    ),
    "A-large-lr": Statement(
        AKBAR, "Sections 1.1, 2.3, 5.1 and 7.1, after Bjorck et al.", OBSERVED, "a 5-layer network on digits here",
        "BN widens the range of learning rates at which training is stable; without it a small rate can reach a similar accuracy.",
    ),
    "A-smooth": Statement(
        AKBAR, "Sections 2.3 and 6, after Santurkar et al.", OBSERVED, "a 5-layer network on digits here",
        "With BN the loss and the gradient vary less along the descent direction.",
    ),
}  # fmt: skip
