/* Products of a model that computes in bf16, by the instruction that multiplies pairs of bf16 numbers and adds in fp32.

   x is rounded to bf16, as such a model rounds it in torch. Each instruction does the work of two of linear.c, and
   nothing has to be widened. The order of a sum depends on the inputs only, so a row has the same bits in any company.
   Numbers below 2^-126 count as zero.

   The matrix is packed as in tiles.c: of two inputs, the values lie side by side for each output. So for linear.c a pair
   of inputs is one value of 32 bits, and only rounding and multiplying are other. */

#ifndef DRAFTSMITH_PAIRS_H
#define DRAFTSMITH_PAIRS_H

#include "packing.h"

#define TILE 6 /* rows whose sums stay in registers */

INLINE size_t pair_count(size_t inputs) { return group_count(inputs) * GROUP / 2; }

#if defined(__AVX512BF16__) && LANES == 16
#define MULTIPLIES_PAIRS 1

/* sum + w . x: a pair of weights in each lane, and a pair of inputs. */
INLINE vec add_pairs(vec w, float x, vec sum) {
    return (vec)_mm512_dpbf16_ps((__m512)sum, (__m512bh)w, (__m512bh)_mm512_set1_ps(x));
}

/* A row of x; zeros fill its last group. */
INLINE void round_row(const float *x, size_t inputs, uint16_t *to) {
    for (size_t i = 0; i < 2 * pair_count(inputs); i += LANES) {
        __m512 value = _mm512_maskz_loadu_ps(filled(i < inputs ? inputs - i : 0), x + i);
        __m256bh values = _mm512_cvtneps_pbh(value);
        _mm256_storeu_si256((__m256i *)(to + i), (__m256i)values);
    }
}

/* Where a thread finds all rows of x as pairs. Few rows are rounded by each thread for itself: it would wait longer for
   another to do it. */
INLINE const float *rounded(const float *x, size_t rows, size_t inputs, uint16_t *room) {
    size_t stride = 2 * pair_count(inputs);
    if (rows <= TILE) {
        room += (size_t)omp_get_thread_num() * rows * stride;
        for (size_t r = 0; r < rows; r++) round_row(x + r * inputs, inputs, room + r * stride);
        return (const float *)room;
    }
#pragma omp for schedule(static)
    for (size_t r = 0; r < rows; r++) round_row(x + r * inputs, inputs, room + r * stride);
    return (const float *)room;
}
#else
#define MULTIPLIES_PAIRS 0

INLINE vec add_pairs(vec w, float x, vec sum) { return sum; }

INLINE const float *rounded(const float *x, size_t rows, size_t inputs, uint16_t *room) { return x; }
#endif

/* bf16 values of room for `rounded`, of so many rows or fewer. */
INLINE size_t rounded_values(size_t rows, size_t inputs) {
    size_t copied = (size_t)omp_get_max_threads() * (rows < TILE ? rows : TILE);
    return (rows > copied ? rows : copied) * 2 * pair_count(inputs);
}

#endif
