/* Multi-candidate speculative sampling at one node: the siblings are tried in the order in which they were drawn from q
   without replacement. See `mcsd` in decode/verify/siblings.py, whose steps these are. */

#include <float.h>

#include "vectors.h"

/* (p - share q)+ of LANES tokens. */
INLINE vec above(const float *p, const float *q, float share) {
    vec rest = at(p) - share * at(q);
    return (vec)((words)rest & (words)(rest > 0));
}

/* p = (p - share q)+, unless nothing is left of it. Returns the mass that is left; `of_q`: the sum of q. */
INLINE double refused(float *p, const float *q, float share, size_t width, double *of_q) {
    doubles left = {0}, drawn = {0};
    double mass = 0, sum = 0;
    size_t i = 0;
    for (; i + LANES <= width; i += LANES) {
        left += __builtin_convertvector(above(p + i, q + i, share), doubles);
        drawn += __builtin_convertvector(at(q + i), doubles);
    }
    for (int lane = 0; lane < LANES; lane++) {
        mass += left[lane];
        sum += drawn[lane];
    }
    for (size_t k = i; k < width; k++) {
        float rest = p[k] - share * q[k];
        mass += rest > 0 ? rest : 0;
        sum += q[k];
    }
    *of_q = sum;
    /* Where p and q differ by rounding only, p stays. */
    if (!(mass > 0)) return 0;
    for (i = 0; i + LANES <= width; i += LANES) *(vec *)(p + i) = above(p + i, q + i, share);
    for (; i < width; i++) p[i] = p[i] - share * q[i] > 0 ? p[i] - share * q[i] : 0;
    return mass;
}

static int64_t row_tried(float *p, float *q, const int64_t *tokens, const double *u, size_t width, size_t count) {
    double p_mass = 1, q_mass = 1;
    for (size_t k = 0; k < count; k++) {
        int64_t x = tokens[k];
        if (x < 0) continue;
        /* u q(x) < p(x): no division, and a token with p(x) = 0 is refused even at u = 0. */
        if (u[k] * q[x] * p_mass < p[x] * q_mass) return (int64_t)k;
        /* x leaves q, and p: of what was refused nothing is left. */
        float share = (float)(p_mass / q_mass), before = p[x];
        p[x] = q[x] = 0;
        double of_q, mass = refused(p, q, share, width, &of_q);
        if (mass > 0)
            p_mass = mass;
        else
            p[x] = before;
        q_mass = of_q > FLT_MIN ? of_q : FLT_MIN;
    }
    return -1;
}

/* p, q [rows][width], tokens [rows][count], -1 for none, and uniforms u [rows][count]: to ranks [rows] of the siblings
   accepted, -1 for none. p becomes what is left to draw from, not normalised; q is spoiled. Returns 0, or 1, with nothing
   done, for a token that does not exist. */
int draftsmith_siblings(
    float *p, float *q, const int64_t *tokens, const double *u, size_t rows, size_t width, size_t count, int64_t *ranks) {
    for (size_t i = 0; i < rows * count; i++)
        if (tokens[i] >= (int64_t)width) return 1;
#pragma omp parallel for schedule(static) if (rows > 1)
    for (size_t r = 0; r < rows; r++)
        ranks[r] = row_tried(p + r * width, q + r * width, tokens + r * count, u + r * count, width, count);
    return 0;
}
