"""The logical form of a statement: where it stands, its quantifier, its assumptions, how firmly it is said, and the formula."""

from __future__ import annotations

from dataclasses import dataclass

THAN, SLIDES, DIGEST, AKBAR, LATER, ANSWER = (
    "Than 2025",
    "Than 2023, slides",
    "digest of Than 2025",
    "Akbar",
    "later work",
    "normscope",
)
SOURCES = {
    THAN: "The Hidden Power of Normalization Layers in Neural Networks: Exponential Capacity Control (arXiv 2511.00958)",
    SLIDES: "Why do deep neural networks perform really well? A guarantee from normalization methods (talk, June 2023)",
    DIGEST: "a summary of the first paper, written by others",
    AKBAR: "Deep Network Normalization Through Gradient Flow Dynamics, Implicit Regularization, and Riemannian Geometry",
    LATER: "what others have found to the contrary",
    ANSWER: "answers to the questions that the papers leave open, proved in docs/laws.md",
}
FOR_ALL, EXISTS, CAN, LIKELY, OBSERVED = "for all", "there exists", "can", "with probability 1 − δ", "observed"
QUANTIFIERS = (FOR_ALL, EXISTS, CAN, LIKELY, OBSERVED)
STATED, SUGGESTED, DOUBTED = "stated", "suggested", "doubted"
HEDGES = {
    STATED: "said without reservation",
    SUGGESTED: 'said with "may", "might", "tends to", "akin to", "something like", as a question or as what some argue',
    DOUBTED: "doubted or withdrawn by the source itself",
}


@dataclass(frozen=True)
class Statement:
    """One statement of a source, in our words and its notation. correction: what is true instead, or what must be added."""

    source: str
    where: str
    quantifier: str
    assumptions: str
    statement: str
    correction: str = ""
    hedge: str = STATED
