"""What Than 2025, its slides and a digest of it state, in our words, and what is true instead."""

from __future__ import annotations

from normscope.claims.statement import CAN, DIGEST, EXISTS, FOR_ALL, LIKELY, OBSERVED, SLIDES, SUGGESTED, THAN, Statement

CHAIN = "a feedforward network of Definition 4: K layers, no biases, activations of slope at most 1"
NORMALIZED = "a feedforward network of Definition 8, a normalizer without γ and β behind every weight"
PARTITION = (
    "i.i.d. samples, m of them, a partition into N cells (read as fixed before the sample), C = sup f and 0 ≤ f (not written "
    "down), f L_i-Lipschitz on cells with data"
)

STATEMENTS = {
    "T-L1": Statement(
        THAN, "Lemma 1; proof in Appendix A.1", FOR_ALL, "statistics held fixed, ε > 0, no γ",
        "‖BN‖_Lip = ‖1/σ‖, the ℓ2 norm of the vector of (σ_k² + ε)^-½.",
        "It is max_k (σ_k² + ε)^-½, for the Jacobian is diagonal; the ℓ2 norm is that matrix's Frobenius norm, an upper bound "
        "that is "
        "larger by up to √n.",
    ),
    "T-S-BN": Statement(
        SLIDES, "slide on Lipschitz continuity", FOR_ALL, "statistics held fixed, with γ",
        "‖BN‖_Lip = ‖γ/σ‖, the ℓ2 norm of the vector of γ_k(σ_k² + ε)^-½.", "It is max_k |γ_k|(σ_k² + ε)^-½.",
    ),
    "T-L2": Statement(
        THAN, "Lemma 2; proof in Appendix A.2", FOR_ALL, "every x in ℝⁿ, ε > 0, no γ",
        "‖∂LN/∂x‖ ≤ (σ_n² + ε)^-½ at x, and ‖LN‖_Lip ≤ 1/σ with σ the least √(σ_n² + ε) over ℝⁿ.",
    ),
    "T-L23": Statement(
        THAN, "Lemma 23 (Appendix A.2); proof in Eq. (15) to (18)", FOR_ALL, "every x in ℝⁿ, ε > 0, no γ",
        "∂LN/∂x = (σ_n² + ε)^-½ (I − yyᵀ/(‖y‖² + nε))(I − 11ᵀ/n) with y = x − μ.",
    ),
    "T-L3": Statement(
        THAN, "Lemma 3; proof in Appendix A.3, (26) to (28)", FOR_ALL,
        "disjoint groups of at least two entries, ε > 0, no γ; σ_k² the least variance of group k over ℝⁿ, and at x in the proof",
        "‖GN‖_Lip ≤ Σ over groups of (σ_k² + ε)^-½, and ‖∂GN/∂x‖ is at most the same sum of σ_k(x).",
        "The sharp constant is the maximum over the groups, for the Jacobian is block diagonal.",
    ),
    "T-S-LN": Statement(
        SLIDES, "slide on Lipschitz continuity", FOR_ALL, "a layer of n neurons, with γ", "‖LN‖_Lip ≤ (1 − 1/n)‖γ/σ‖.",
        "‖LN‖_Lip ≤ max|γ|/σ, and that is reached for every n ≥ 3 at γ = 1: no factor 1 − 1/n belongs there. The slides' form "
        "fails where one γ is large; where all are equal, ‖γ/σ‖ is √n times too large and hides it.",
    ),
    "T-S-GN": Statement(
        SLIDES, "slide on Lipschitz continuity", FOR_ALL, "groups of n_g neurons, with γ", "‖GN‖_Lip ≤ (1 − 1/n_g)‖γ/σ‖.",
        "‖GN‖_Lip ≤ max|γ|/σ with the least σ of the groups: no factor 1 − 1/n_g belongs there. Example: T-S-LN's, as one of two "
        "groups.",
    ),
    "T-D-LN": Statement(
        DIGEST, "architecture onboarding, component map and design tradeoffs", FOR_ALL, "a layer of n neurons, no γ",
        "‖LN‖_Lip ≤ (1 − 1/n)/σ, so that smaller layers are penalized more; groups of GN likewise.",
        "‖LN‖_Lip ≤ 1/σ, reached for every n ≥ 3: no size is penalized more. Example: at x = (1, 0, −1) the direction (1, −2, "
        "1) is "
        "orthogonal to 1 and to x, and LN multiplies it by 1/σ, not by ⅔/σ. The paper as "
        "we have it (Lemmas 2 and 3) has no such factor; the digest goes by the title of an earlier version, which may have "
        "had it.",
    ),
    "T-D4": Statement(
        THAN, "Section 4.1, after Definition 4", FOR_ALL, "ReLU, leaky ReLU, tanh, sigmoid, softmax",
        "Their Lipschitz constants are at most 1.",
    ),
    "T-L5": Statement(
        THAN, "Lemma 5; proof in Appendix B", FOR_ALL, CHAIN, "‖h, x‖_Lip ≤ P_w(h) = ∏‖W_k‖.",
    ),
    "T-L5-residual": Statement(
        THAN, "Remark 7, first item, with Figure 1", CAN, "ResNet-18 and other modern networks, which are not of Definition 4",
        "As a bound for such networks too, the product ∏s_k of Lemma 5 can become astronomically high, 10^50 for ResNet-18.",
        "Lemma 5 is about chains. For residual blocks x + F(x) the bound is ∏(1 + ‖F‖), which the product of norms may lie "
        "under: W_k = 2I in K blocks x + W_k x has the constant 3^K against 2^K.",
    ),
    "T-T6": Statement(
        THAN, "Theorem 6; proof in Appendix C", EXISTS, "for all a_k in [0, s_k]; ReLU networks of Definition 4",
        "A member h⋆ of the family has ‖h⋆, x‖_Lip = ∏a_k.",
    ),
    "T-T9": Statement(
        THAN, "Theorem 9; proof in Appendix B", FOR_ALL, NORMALIZED, "‖h_no, x‖_Lip ≤ P_w(h_no) ∏‖NO_k‖_Lip.",
    ),
    "T-C10": Statement(
        THAN, "Corollary 10", FOR_ALL, f"{NORMALIZED}: BN with fixed statistics",
        "‖h_no, x‖_Lip ≤ P_w ∏‖1/σ_k‖ ≤ σ^-K P_w with σ = min_k ‖1/σ_k‖^-1.",
        "True, but P_w ∏max 1/σ_k is far sharper: the ℓ2 norms cost up to √n per layer.",
    ),
    "T-C10-variance": Statement(
        THAN, "Section 4.2, paragraph after Corollary 10", FOR_ALL, "BN; nothing is said of what else changes with the variance",
        "As the input variances increase, ‖h_no, x‖_Lip tends to be smaller.",
        "Not where they increase with the weights: σ_k is measured behind W_k, so W_k → cW_k makes σ_k → cσ_k and leaves h_no, and "
        "∏‖W_k‖∏1/σ_k, as they are. What counts is the ratio ‖W_k‖/σ_k, which no scale of the weights changes.", SUGGESTED,
    ),
    "T-C11": Statement(
        THAN, "Corollary 11", FOR_ALL, f"{NORMALIZED}: LN, σ_k the least √(σ² + ε) over all inputs",
        "‖h_no, x‖_Lip ≤ P_w ∏1/σ_k.",
    ),
    "T-C11-reduction": Statement(
        THAN, "Section 4.2, potentially exponential reduction, and bound (LN) of Corollary 22", CAN,
        "LN; σ_k as Lemma 2 defines it, and values of σ_k much greater than 1",
        "By Corollary 11 LN reduces the constant by the order of ∏1/σ_k, potentially exponentially.",
        "σ_k of Lemma 2 is a minimum over all of ℝⁿ, which is √ε (take x with equal entries): Corollary 11 is P_w ε^(−K/2), "
        "which exceeds P_w. Large σ_k can be meant on data or on a region only, and then the bound is a local one.",
    ),
    "T-headline": Statement(
        THAN, "Remark 7 (10^50), Section 4.2 (10^-25) and Remark 17", CAN,
        "ResNet-18 with 20 BN layers, the paper's own numbers, which it does not multiply; 'bounded' is read as at most 10^10",
        "The product of norms, 10^50, is reduced by ∏1/σ_k ≈ 10^-25, so that normalized networks keep bounded smoothness.",
        "10^50 · 10^-25 = 10^25: what is left of the bound is astronomical still. (And for a residual network neither is a bound.)",
    ),
    "T-T12": Statement(
        THAN, "Theorem 12, Eq. (6) and (7); proof in Appendix B", FOR_ALL, f"{NORMALIZED}; A_{{i−1}} = sup_x ‖h_{{i−1}}(x)‖ finite",
        "‖h_no, W_i‖_Lip ≤ A_{i−1}‖h_no, y_i‖_Lip and ‖h_no, y_i‖_Lip ≤ ∏_{k>i}‖W_k‖ ∏_{k≥i}‖NO_k‖_Lip.",
    ),
    "T-T13": Statement(
        THAN, "Theorem 13, Eq. (8); proof in Appendix C, (58) to (59)", EXISTS,
        "for all i in [1, K) and a_j in [0, s_j], j > i; ReLU networks of Definition 4; one member for (8), at all x, and (9)",
        "A member has ‖h⋆(x), W_i‖_Lip = a_{i+1}⋯a_K ‖h_{i−1}(x) truncated to (n_{i+1}, …, n_K)‖ at every x.",
        "The truncation acts on the rows of W_i: the paper's member has ∏a_j ‖h_{i−1}(x)‖. For i = 1 and n_0 > min(n_2, …, n_K) no "
        "member satisfies (8) and (9) with ∏a_j > 0: at x = e_{n_0} (8) gives 0, yet W_1x takes every direction. For i ≥ 2 another "
        "member does: let the rows of W_{i−1} beyond the truncation be 0.",
    ),
    "T-T13-y": Statement(
        THAN, "Theorem 13, Eq. (9); proof in Appendix C", EXISTS, "as for Eq. (8)",
        "The same member has ‖h⋆, y_i‖_Lip = a_{i+1}⋯a_K.",
    ),
    "T-C14": Statement(
        THAN, "Section 4.3, the sentence before Corollary 14", FOR_ALL, "the ℓ1 loss, networks with several outputs",
        "‖f, W_i‖_Lip = ‖h, W_i‖_Lip.",
        "ℓ1 is √n_K-Lipschitz in ℓ2; for the extremal member the factor is √min(n_i, …, n_K). With one output it is right. "
        "Example: "
        "h = (w_1x, w_2x) at x = 1 has ‖∂h/∂W‖ = 1, and ∂f/∂W = (±1, ±1) has norm √2.",
    ),
    "T-C14-11": Statement(
        THAN, "Corollary 14, Eq. (11)", EXISTS, "for any i in [1, K) and any x, then all a_j in [0, s_j], j > i; from Theorem "
        "13; the ℓ1 "
        "loss, one output here",
        "A member has ‖f(h⋆, x), W_i‖_Lip = a_{i+1}⋯a_K ‖h_{i−1}(x) truncated‖.",
        "(8)'s truncation is inherited: with one output the member of Theorem 13 has ∏a_j ‖h_{i−1}(x)‖. Example: x = (0, 1), h = "
        "relu(w·x), K = 2, a_2 = 1: stated 0, true 1. No member has (11) at every x (T-T13, i = 1); but x comes first here, "
        "and for one x "
        "some other member has it: multiply its W_K by ‖h_{i−1}(x) truncated‖/‖h_{i−1}(x)‖.",
    ),
    "T-T15": Statement(
        THAN, "Theorem 15, Eq. (12); proof in Appendix C", EXISTS,
        "for all i in [1, K), a_j in (0, s_j], c > 0; one output g(Wh_K), g and f differentiable",
        "A member's training loss has ∂L/∂W_it = (c a_K⋯a_{i+1}/m) Σ_x I_it (f∘g)'(u) h_{i−1}(x)ᵀ for t ≤ min(n_{i+1}, …, n_K), "
        "else 0.",
    ),
    "T-R16": Statement(
        THAN, "Remark 16, first item", CAN, "s_i > 1 for all i, a_i in (1, s_i]; W_i is free",
        "By (12) ∂L/∂W_i can be of size Ω(a_K⋯a_{i+1}), and uncountably many weights make it so.",
    ),
    "T-R17": Statement(
        THAN, "Remark 17; Section 5.1, paragraph after Corollary 18", FOR_ALL,
        "unnormalized networks, i < K, bounded inputs; the constant of O depends on none of the s_k (Section 2.2)",
        "The training loss is O(s_K⋯s_{i+1})-Lipschitz in W_i, so that weights of deeper layers may need fewer iterations.",
        "For i = 1 it is right; and for all i if O may hold A_{i−1} = sup ‖h_{i−1}‖, as in (10), but then layers cannot be "
        "compared. "
        "Else the norms before layer i count as well, through ‖h_{i−1}‖ ≤ s_1⋯s_{i−1}‖x‖: the constant "
        "is up to "
        "∏_{j≠i} s_j · ‖x‖, which for equal norms is the same in every layer. LN, GN and IN bound ‖h_{i−1}‖ by √n and make it "
        "right; "
        "BN with fixed statistics bounds nothing.",
    ),
    "T-S5.1": Statement(
        THAN, "Section 5.1, iteration complexity, after Bubeck 2015", FOR_ALL,
        "methods that start at 0 and stay in the span of the subgradients they have seen; the worst function of that constant on a "
        "ball of fixed radius R",
        "To come within α of the minimum takes Ω(L²/α²) iterations for convex and Ω(L/α) for strongly convex functions.",
    ),
    "T-C18": Statement(
        THAN, "Corollary 18", FOR_ALL, "any generalized gradient method, i < K, an unnormalized network and its training loss",
        "At least Ω(s_{i+1}⋯s_K/α) iterations are needed to an α-stationary point in W_i.",
        "A lower bound over all Lipschitz functions says that some function is slow, not that this loss is: where the first "
        "layer is "
        "dead, every start is stationary at step 0. And Zhang et al. 2020, the source, prove that for the whole class no finite "
        "number of steps suffices for an α-stationary point; what they count are steps to (δ, α)-stationary points, and δ is "
        "in the rate.",
    ),
    "T-C19": Statement(
        THAN, "Corollary 19, from Davis et al. 2022 and Tian et al. 2022", FOR_ALL, "BN, σ as in Corollary 10, i < K",
        "O(σ^{−K+i−1} s_{i+1}⋯s_K/α²) evaluations find an α-stationary point with BN, O(s_{i+1}⋯s_K/α²) without.",
        "The slides quote the same source with error ∛(L²/T), that is L²/α³ evaluations, which exceeds L/α² without limit as L/α "
        "grows (L = 10, α = 1: 100 against 10); what can be found in finite time are (δ, α)-stationary points; and a smaller upper "
        "bound does not make training faster.",
    ),
    "T-T20": Statement(
        THAN, "Theorem 20, Eq. (13); proof in Appendix D", LIKELY,
        f"{PARTITION}; λ_i the mean distance between a sample of cell i and a draw from it",
        "F(P, h) ≤ F(D, h) + Σ_T (m_i/m) λ_i L_i + g(D, δ), g = C(√2 + 1)√(|T| ln(2N/δ)/m) + 2C|T| ln(2N/δ)/m.",
    ),
    "T-T20-local": Statement(
        THAN, "Section 5.2.1, second paragraph after Theorem 20", FOR_ALL,
        "small areas around the samples: the cells that hold them",
        "Local Lipschitzness of f on those areas is all that the theorem assumes of f's slopes.",
    ),
    "T-T20-partition": Statement(
        THAN, "Theorem 20, its second sentence", FOR_ALL,
        "any partition; it is introduced after D, and whether it may depend on D is not said",
        "The bound (13) holds for the partition into X_1, …, X_N.",
        "The partition must not depend on the sample. Cells drawn after it refute (13): X_1 = tiny balls around the samples, X_2 = "
        "the rest, f = 0 on X_1 and 1 on X_2, so |T| = 1, L = 0, and the bound goes to 0 with m while the risk is about 1.",
    ),
    "T-C21": Statement(
        THAN, "Corollary 21; proof in Appendix D", LIKELY, f"{PARTITION}; the set of jumps has probability 0 and is no cell's "
        "inside",
        "The bound of Theorem 20 holds.",
    ),
    "T-S-T1": Statement(
        SLIDES, "Theorem 1, Eq. (6)", LIKELY, f"{PARTITION}; λ_i the cells' diameters",
        "|F(P, h) − F(D, h)| ≤ Σ_T (m_i/m) λ_i L_i + g.",
    ),
    "T-S-adversarial": Statement(
        SLIDES, "slide on generalization, last item under Eq. (6)", FOR_ALL,
        "read as: attacks whose radius is at least the cells' diameter; a small loss under attack makes the sum small that (6) "
        "bounds by F(D, h) + Σ (m_i/m) λ_i L_i",
        "(6) gives a reason to train against attacks.",
    ),
    "T-S-errors": Statement(
        SLIDES, "slide on the errors of a trained model", FOR_ALL, "any family of models that has minimizers of both risks",
        "|F(P, h_o) − F(P, h⋆)| ≤ |F(D, h_o) − F(D, h_o⋆)| + 2 sup_h |F(P, h) − F(D, h)|.",
    ),
    "T-C22": Statement(
        THAN, "Corollary 22, Eq. (14), (BN), (LN)", LIKELY, f"{PARTITION}; f is L_f-Lipschitz in h, one label here",
        "F(P, h) − F(D, h) ≤ g + L_f P_w Σ_T (m_i/m) λ_i, the last term times σ^-K with BN and ∏1/σ_k with LN.",
    ),
    "T-Eq66": Statement(
        THAN, "Appendix D, Eq. (66), from Than et al. 2025", LIKELY, "as for Theorem 20, without Lipschitz constants",
        "F(P, h) ≤ F(D, h) + Σ_T (m_i/m) ε̄_i + g with ε̄_i the mean change of the loss in cell i, and ε̄_i ≤ λ_i L_i.",
    ),
    "T-C22-labels": Statement(
        THAN, "Section 5.2.2, first sentence", FOR_ALL, "f is L_f-Lipschitz in h; the label is a function ŷ(x) of the input",
        "‖f, x‖_Lip ≤ L_f ‖h, x‖_Lip.",
        "Of f∘h it is right. But f(h, x) depends on x through the label too (h = 0 is constant, and |h − ŷ(x)| goes from 0 to "
        "1) and jumps where that does, however gentle h is. "
        "Inside of cells of pairs "
        "(x, y), "
        "where the label is one, it holds; across labels only a loss that is L_y-Lipschitz in y moves by at most "
        "L_f‖h‖_Lip‖x − x'‖ + L_y‖y − y'‖. Cross-entropy has no L_y: at z = (100, 0) it moves by 100 with the label.",
    ),
    "T-HKK": Statement(
        THAN, "Section 5.2.1, related bounds, (HKK)", FOR_ALL, "partitions of diameter λ with N cells; (HKK)'s constant left out",
        "√(N/m) gives (HKK) the curse of dimensionality, which Theorem 20 does not have.",
        "Where every cell has data, |T| = N and g ≥ C(√2 + 1)√(N ln(2N/δ)/m) exceeds √(N/m): the number of cells counts in both. "
        "Where every sample has a cell of its own, |T| = m and g > C. Theorem 20 gains where few of many cells have data, and "
        "by local "
        "constants. (HKK) has one more constant, which is not written "
        "out and makes it larger; with it, no comparison of values follows at all.",
    ),
    "T-LLA": Statement(
        THAN, "Section 5.2.2, comparison, (LLA)", FOR_ALL, "(LLA) bounds a smoothed risk, as the paper says, so rates are compared",
        "(LLA) is less sample-efficient than Theorem 20.",
        "(LLA), at its best μ, falls as m^-1/3 up to a logarithm; Theorem 20 on a partition that is chosen for m as m^-1/(n+2), "
        "and on "
        "a fixed one not at all. For more than one dimension n it is the slower. Both bound different risks.",
    ),
    "T-S5.2-guide": Statement(
        THAN, "Section 5.2.1, first paragraph after Theorem 20", OBSERVED,
        "a 5-layer network on 300 digits, `ns.optim.LogCapacity` here",
        "The bound is a guide to training: fit the sample well and keep the loss's local constants small.", hedge=SUGGESTED,
    ),
    "T-F1": Statement(
        THAN, "Figure 1, 10-layer ReLU network", OBSERVED, "CIFAR-10; digits here",
        "Norms of the weights exceed 1 and their product grows by orders of magnitude in training.",
    ),
    "T-F2": Statement(
        THAN, "Figure 2, 10-layer ReLU network", OBSERVED, "CIFAR-10; digits here",
        "Input variances grow past 1 in training, so that ∏1/σ_k becomes exponentially small.",
    ),
    "T-F1-resnet18": Statement(
        THAN, "Figure 1 and Remark 7, first item, ResNet-18", OBSERVED, "CIFAR-10; digits here",
        "The product of ResNet-18's weight norms reaches 10^50.",
    ),
    "T-F2-resnet18": Statement(
        THAN, "Figure 2 and Section 4.2, ResNet-18", OBSERVED, "CIFAR-10; digits here",
        "∏1/σ_k of ResNet-18's 20 BN layers is about 10^-25 (the slides give 1.35·10^-8 for ∏‖γ/σ‖).",
    ),
    "T-F3": Statement(
        THAN, "Figure 3 and Appendix E.2, EfficientNet-B3", OBSERVED, "CIFAR-10; digits and three of its blocks here",
        "Weight norms and input variances grow in training and end large.",
    ),
    "T-S-data": Statement(
        SLIDES, "slides on the benefits for generalization", OBSERVED, "bounds are taken for what networks need",
        "A normalized network may need exponentially less training data, and a deeper one saves more.",
        "It follows only from the value of the bound, which is vacuous here; what networks need is measured.", SUGGESTED,
    ),
}  # fmt: skip
