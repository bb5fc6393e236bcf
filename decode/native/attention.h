/* Attention of a few queries over many slots of a cache: scores, weights, and the weighed sum of the values.

   Queries that share keys and values are multiplied with them as the rows of `panels.h` are with weights: a block of
   keys is turned into a panel once for all of them, values are one already. A score sums over the head's elements in
   order, an output over the slots in order, for one query as for many, so that their bits do not depend on how many
   there are. */

#ifndef DRAFTSMITH_ATTENTION_H
#define DRAFTSMITH_ATTENTION_H

#include <float.h>

#include "activation.h"
#include "panels.h"

#define TOGETHER (5 * TILE) /* queries that share one reading of keys and values */

/* One half of the exchange of a transposition. Lane l of the result is `a`'s where l has not the bit `width`, and `b`'s
   where it has. Of the lower half, what comes from `b` is its lane l ^ width; of the upper half, what comes from `a`. */
INLINE vec exchanged(vec a, vec b, int width, const int upper) {
#if LANES == 16
    /* Written out: the shuffles that the compiler finds need a register of places each, which there are not. */
    const __m512 stays = (__m512)(upper ? b : a), moves = (__m512)(upper ? a : b);
    const __mmask16 other = upper ? 0xFFFF : 0;
    switch (width) {
        case 1: return (vec)_mm512_mask_permute_ps(stays, other ^ 0xAAAA, moves, 0xB1);
        case 2: return (vec)_mm512_mask_permute_ps(stays, other ^ 0xCCCC, moves, 0x4E);
        case 4: return (vec)_mm512_mask_shuffle_f32x4(stays, other ^ 0xF0F0, moves, moves, 0xB1);
        default: return (vec)_mm512_mask_shuffle_f32x4(stays, other ^ 0xFF00, moves, moves, 0x4E);
    }
#else
    words from;
#pragma GCC unroll 16
    for (int lane = 0; lane < LANES; lane++) {
        int of_b = (lane & width) != 0, crossed = of_b != upper;
        from[lane] = (uint32_t)((of_b ? LANES : 0) + (crossed ? lane ^ width : lane));
    }
#if defined(__GNUC__) && !defined(__clang__)
    return __builtin_shuffle(a, b, from);
#else
    vec out;
    for (int lane = 0; lane < LANES; lane++) out[lane] = from[lane] < LANES ? a[from[lane]] : b[from[lane] - LANES];
    return out;
#endif
#endif
}

/* keys [count][size] -> columns [size][PANEL], of which `count` are filled, up to a multiple of LANES with copies of the
   last. So a block of keys is a panel that queries are multiplied with as rows are with weights. Meanwhile the keys two
   blocks ahead are fetched into the second-level cache; behind the last, the fetches fall on nothing. */
static void transposed(const float *keys, size_t count, size_t size, float *columns) {
    for (size_t begin = 0; begin < count; begin += LANES) {
        const float *from[LANES];
        for (size_t k = 0; k < LANES; k++) from[k] = keys + (begin + k < count ? begin + k : count - 1) * size;
        const char *ahead = (const char *)(keys + (begin + 2 * PANEL) * size);
        for (size_t at = 0; at < LANES * size * sizeof(float); at += 64) __builtin_prefetch(ahead + at, 0, 2);
        size_t e = 0;
        for (; e + LANES <= size; e += LANES) {
            vec row[LANES];
#pragma GCC unroll 16
            for (int k = 0; k < LANES; k++) row[k] = at(from[k] + e);
#pragma GCC unroll 4
            for (int width = LANES / 2; width; width /= 2)
#pragma GCC unroll 16
                for (int k = 0; k < LANES; k++)
                    if (!(k & width)) {
                        vec a = row[k], b = row[k + width];
                        row[k] = exchanged(a, b, width, 0);
                        row[k + width] = exchanged(a, b, width, 1);
                    }
#pragma GCC unroll 16
            for (int k = 0; k < LANES; k++) *(vec *)(columns + (e + (size_t)k) * PANEL + begin) = row[k];
        }
        for (; e < size; e++)
            for (size_t k = 0; k < LANES; k++) columns[e * PANEL + begin + k] = from[k][e];
    }
}

/* Add to outputs [rows][size] what `slots` slots contribute, WIDE vectors from each on. */
INLINE void mix(
    const int WIDE, size_t rows, float *to, const float *weights, size_t weight_stride, const float *values, size_t slots,
    size_t size) {
    struct slice s = {
        .x = weights,
        .x_stride = weight_stride,
        .panel = (const char *)values,
        .panel_stride = size,
        .inputs = slots,
        .sums = to,
        .sums_stride = size};
    rows_over_slice(FP32, NULL, rows, WIDE, s);
}

/* The same of whole outputs: each one's sum runs over the slots in order. */
static void mix_slots(
    size_t rows, float *to, const float *weights, size_t weight_stride, const float *values, size_t slots, size_t size) {
    size_t e = 0;
    for (; e + PANEL <= size; e += PANEL) mix(VECTORS, rows, to + e, weights, weight_stride, values + e, slots, size);
    for (; e + 2 * LANES <= size; e += 2 * LANES) mix(2, rows, to + e, weights, weight_stride, values + e, slots, size);
    for (; e + LANES <= size; e += LANES) mix(1, rows, to + e, weights, weight_stride, values + e, slots, size);
    for (size_t t = 0; t < rows && e < size; t++)
        for (size_t p = 0; p < slots; p++)
            for (size_t rest = e; rest < size; rest++)
                to[t * size + rest] += values[p * size + rest] * weights[t * weight_stride + p];
}

/* scores [count][stride] of queries [count][size], which share keys; `top` gets the largest of each. */
static void score(
    size_t slots, size_t size, float scale, float cap, const float *queries, const float *const *masks, size_t count,
    const float *keys, float *columns, float *scores, size_t stride, float *top) {
    float sums[TOGETHER * PANEL] __attribute__((aligned(64)));
    vec most[TOGETHER];
    for (size_t t = 0; t < count; t++) most[t] = (vec){0} - FLT_MAX;
    for (size_t p = 0; p < slots; p += PANEL) {
        size_t here = slots - p < PANEL ? slots - p : PANEL;
        transposed(keys + p * size, here, size, columns);
        memset(sums, 0, count * PANEL * sizeof(float));
        struct slice s = {
            .x = queries,
            .x_stride = size,
            .panel = (const char *)columns,
            .panel_stride = PANEL,
            .inputs = size,
            .sums = sums,
            .sums_stride = PANEL};
        rows_over_slice(FP32, NULL, count, VECTORS, s);
        for (size_t t = 0; t < count; t++)
            for (size_t v = 0; v < PANEL; v += LANES) {
                vec score = scale * at(sums + t * PANEL + v);
                if (cap > 0) score = capped(score, cap);
                size_t left = here < v ? 0 : here - v;
                if (masks[t] && left >= LANES)
                    score += at(masks[t] + p + v);
                else if (masks[t])
                    for (size_t k = 0; k < left; k++) score[k] += masks[t][p + v + k];
                if (left < LANES)
                    for (size_t k = 0; k < LANES; k++) score[k] = k < left ? score[k] : -FLT_MAX;
                words more = (words)(score > most[t]);
                most[t] = (vec)(((words)score & more) | ((words)most[t] & ~more));
                *(vec *)(scores + t * stride + p + v) = score;
            }
    }
    for (size_t t = 0; t < count; t++) {
        top[t] = most[t][0];
        for (int lane = 1; lane < LANES; lane++) top[t] = most[t][lane] > top[t] ? most[t][lane] : top[t];
    }
}

/* scores -> exp(score - top), in place; returns their sum. Multiples of 2^-35 up to 2^17 add up without rounding, so
   that the sum by lanes does not depend on where in the cache a token lies. The largest weight is 1. */
static float weighed(float *scores, size_t slots, float top) {
    doubles total = {0};
    for (size_t p = 0; p < slots; p += LANES) {
        vec *score = (vec *)(scores + p);
        *score = exponential(*score - top);
        total += (__builtin_convertvector(*score, doubles) + 0x1.8p17) - 0x1.8p17;
    }
    double sum = 0;
    for (int lane = 0; lane < LANES; lane++) sum += total[lane];
    return (float)sum;
}

#endif
