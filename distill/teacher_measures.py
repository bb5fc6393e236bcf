"""Do teacher rows know anything, and do two servers agree?

Legend: R positions, N kept tokens and the rest, V vocabulary.
"""

import numpy as np

from draftsmith.core.teacher_rows import Array, TeacherRows

# Nats of a position below which one token has all.
LEAST_NATS = 1e-3


def entropies(rows: TeacherRows) -> Array:
    """Nats at each position `[R]`; all other tokens count as one."""
    mass_RN = np.column_stack([np.exp(rows.logprobs_RK), rows.tail_R])
    nats: Array = -(mass_RN * np.log(np.maximum(mass_RN, 1e-30))).sum(-1)
    return nats


def distance(a: TeacherRows, b: TeacherRows) -> float:
    """Total variation between the first positions; 0 if they agree."""
    away_V = np.zeros(1 + max(a.ids_RK[0].max(), b.ids_RK[0].max()))
    away_V[a.ids_RK[0]] += np.exp(a.logprobs_RK[0])
    away_V[b.ids_RK[0]] -= np.exp(b.logprobs_RK[0])
    return float(np.abs(away_V).sum()) / 2
