/* The largest values of a row of logits, and their places. */

#include <math.h>

#include "blocks.h"

/* The place of the largest value of a block that is not among those taken, the first of equal ones; -1 if none is left. */
INLINE int64_t largest_left(const float *x, size_t begin, size_t end, const int64_t *taken, size_t count) {
    int64_t best = -1;
    for (size_t i = begin; i < end; i++)
        if ((best < 0 || x[i] > x[best]) && !is_among((int64_t)i, taken, count)) best = (int64_t)i;
    return best;
}

/* The largest value of each block, and whether the row has a value that is no number. */
INLINE int block_tops(const float *x, size_t width, float *tops) {
    words strange = {0};
    for (size_t begin = 0; begin < width; begin += SEARCHED) {
        size_t end = block_end(begin, width), i = begin;
        float top = x[begin];
        if (end - begin == SEARCHED) {
            vec most = *(const vec *)(x + begin);
            for (; i < end; i += LANES) {
                vec value = *(const vec *)(x + i);
                words larger = (words)(value > most);
                strange |= (words)(value != value);
                most = (vec)(((words)value & larger) | ((words)most & ~larger));
            }
            top = most[0];
            for (int lane = 1; lane < LANES; lane++) top = most[lane] > top ? most[lane] : top;
        }
        for (; i < end; i++) {
            strange[0] |= x[i] != x[i];
            top = x[i] > top ? x[i] : top;
        }
        tops[begin / SEARCHED] = top;
    }
    uint32_t any = 0;
    for (int lane = 0; lane < LANES; lane++) any |= strange[lane];
    return any != 0;
}

static void row_largest(const float *x, size_t width, size_t count, float *values, int64_t *places) {
    size_t blocks = (width + SEARCHED - 1) / SEARCHED;
    float tops[blocks];
    if (block_tops(x, width, tops)) {
        for (size_t k = 0; k < count; k++) {
            values[k] = NAN;
            places[k] = 0;
        }
        return;
    }
    for (size_t k = 0; k < count; k++) {
        size_t best = blocks;
        for (size_t b = 0; b < blocks; b++)
            if (tops[b] == tops[b] && (best == blocks || tops[b] > tops[best])) best = b;
        size_t begin = best * SEARCHED, end = block_end(begin, width);
        places[k] = largest_left(x, begin, end, places, k);
        values[k] = x[places[k]];
        int64_t next = k + 1 < count ? largest_left(x, begin, end, places, k + 1) : -1;
        tops[best] = next < 0 ? NAN : x[next]; /* NaN: nothing is left of the block */
    }
}

/* Of x [rows][width], which is not empty: values and places [rows][count], largest first, the first of equal values
   first; of a row with NaN, NaN at place 0. count <= width. */
void draftsmith_largest(const float *x, size_t rows, size_t width, size_t count, float *values, int64_t *places) {
#pragma omp parallel for schedule(static) if (rows > 1)
    for (size_t r = 0; r < rows; r++) row_largest(x + r * width, width, count, values + r * count, places + r * count);
}
