"""The verdict of every claim. What changes of a statement do to it stands in normscope/claims/mutants.py; the laws are in test_verdicts.py."""

from normscope.claims.verdicts import BOUND, FALSE, GAP, HEDGED, HOLDS, MEASURED

_IDS = {
    HOLDS: "T-L2 T-L23 T-D4 T-L5 T-T6 T-T9 T-C11 T-T12 T-T13-y T-T15 T-R16 T-T20 T-T20-local T-C21 T-S-T1 T-S-errors T-C22 T-Eq66 "
    "A-P4.1 A-C4.1.1 A-P4.2 A-A.1.1-end A-A.1.1-W A-A.1.2 A-S3.2-flat A-metric A-grad-scale A-L5.1 A-L5.1-WN A-S4.3-fisher T-S5.1 T-S-adversarial A-S7.1-rate A-S9.3-shift A-S9.5-tangent A-S5.1-saddle A-S9.5-free "
    "L-explosion L-rank O-floor-BN O-floor-LN O-affine O-residual O-small-variance O-batch-noise",
    BOUND: "T-L1 T-S-BN T-L3 T-C10 A-Tab1 A-Ex5.1 O-depth",
    FALSE: "T-S-LN T-S-GN T-D-LN T-T13 T-C14 T-R17 T-C22-labels A-S9.1-bias A-S9.2-noise A-P4.3 A-Eq1 A-A.1.1 A-LN-backward "
    "A-WN-3.2 A-WN-radial A-A.1.2-gradient A-S3.2-eigen A-S7.1 A-L5.1-LN A-WD",
    GAP: "T-L5-residual T-C11-reduction T-C14-11 T-headline T-C18 T-C19 T-T20-partition T-HKK T-LLA",
    HEDGED: "T-C10-variance A-P4.1-gamma A-S7.1-saddles A-S7.2-norms A-S4.1-group A-WN-4.3 A-A.1.2-matrix A-S6.1 A-R5.1 A-S7.2-margin A-S10-VC A-S9.5-clipping A-S9.5-training",
    MEASURED: "T-S5.2-guide A-S6-others A-S7.3-decay T-F1 T-F2 T-F3 T-S-data A-E1 A-E2 A-E3 A-E4 A-noise A-large-lr A-smooth",
}
VERDICTS = {id: verdict for verdict, ids in _IDS.items() for id in ids.split()}
LONG = ("T-F1-resnet18", "T-F2-resnet18")
EXACT = tuple(id for id, verdict in VERDICTS.items() if verdict != MEASURED)
QUICK = ("T-F1", "T-F2", "A-smooth")  # measurements that make test runs
LATE = tuple(id for id, verdict in VERDICTS.items() if verdict == MEASURED and id not in QUICK)
DISAGREE = ("T-S-data", "A-noise")  # measurements that contradict a statement with a correction, which the page therefore prints
SLOW = (
    "T-T20",
    "T-T20-local",
    "T-C21",
    "T-S-T1",
    "T-Eq66",
    "O-floor-BN",
    "O-affine",
    "O-floor-LN",
    "T-C11",
    "T-D4",
)  # seconds per run
