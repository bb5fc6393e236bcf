/* Tokens drawn without replacement from a distribution, by inverse CDF: a uniform u draws the first token up to which
   the masses sum to more than u times their total. Sums are in double, by blocks, and of what is left anew after each
   draw: so the largest mass, once drawn, takes nothing from the smallest. */

#include "blocks.h"

/* The mass of a block without the tokens taken. */
INLINE double mass_left(const float *p, size_t begin, size_t end, const int64_t *taken, size_t count) {
    double mass = 0;
    for (size_t i = begin; i < end; i++)
        if (p[i] > 0 && !is_among((int64_t)i, taken, count)) mass += p[i];
    return mass;
}

/* The mass of a whole block: by lanes, which does not change with what is drawn. */
INLINE double mass_of(const float *p, size_t begin, size_t end) {
    if (end - begin < SEARCHED) return mass_left(p, begin, end, NULL, 0);
    doubles sum = {0};
    for (size_t i = begin; i < end; i += LANES) sum += __builtin_convertvector(*(const vec *)(p + i), doubles);
    double mass = 0;
    for (int lane = 0; lane < LANES; lane++) mass += sum[lane];
    return mass;
}

/* The first token of a block at which `reached` plus the masses so far exceeds `point`, else the last with a mass: the
   block's own sum may round otherwise. */
INLINE int64_t token_at(
    const float *p, size_t begin, size_t end, double reached, double point, const int64_t *taken, size_t count) {
    int64_t token = -1;
    for (size_t i = begin; i < end && reached <= point; i++) {
        if (!(p[i] > 0) || is_among((int64_t)i, taken, count)) continue;
        reached += p[i];
        token = (int64_t)i;
    }
    return token;
}

static void row_draws(const float *p, const double *u, size_t width, size_t count, int64_t *tokens) {
    size_t blocks = (width + SEARCHED - 1) / SEARCHED;
    double masses[blocks];
    for (size_t b = 0; b < blocks; b++) {
        size_t begin = b * SEARCHED;
        masses[b] = mass_of(p, begin, block_end(begin, width));
    }
    for (size_t k = 0; k < count; k++) {
        double total = 0, reached = 0;
        size_t last = blocks;
        for (size_t b = 0; b < blocks; b++) {
            total += masses[b];
            if (masses[b] > 0) last = b;
        }
        tokens[k] = -1;
        if (last == blocks) continue;
        double point = u[k] * total;
        size_t b = 0;
        while (b < last && reached + masses[b] <= point) reached += masses[b++];
        size_t begin = b * SEARCHED, end = block_end(begin, width);
        tokens[k] = token_at(p, begin, end, reached, point, tokens, k);
        masses[b] = mass_left(p, begin, end, tokens, k + 1);
    }
}

/* Of masses p [rows][width], by uniforms u [rows][count]: tokens [rows][count] in drawing order, -1 where nothing is
   left. */
void draftsmith_draws(const float *p, const double *u, size_t rows, size_t width, size_t count, int64_t *tokens) {
#pragma omp parallel for schedule(static) if (rows > 1)
    for (size_t r = 0; r < rows; r++) row_draws(p + r * width, u + r * count, width, count, tokens + r * count);
}
