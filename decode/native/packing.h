/* How a matrix is packed: in panels of PANEL outputs, input by input, so that it is read as one stream. */

#ifndef DRAFTSMITH_PACKING_H
#define DRAFTSMITH_PACKING_H

#include "vectors.h"

#define GROUP 32 /* inputs that TILES and PAIRS are packed in */

INLINE size_t group_count(size_t inputs) { return (inputs + GROUP - 1) / GROUP; }

/* How the values of a packed matrix are kept. The same numbers stand in __init__.py. TILES, PAIRS: bf16, see tiles.c and
   pairs.h. CODES: a table of 16 values, then the panels, each in blocks of BLOCK inputs: the block's PANEL scales, and of
   each input PANEL codes of four bits. A value is the table's entry times the scale. */
enum { FP32, BF16, FP16, CODES, TILES, PAIRS };
#define IN_PAIRS(kind) ((kind) == TILES || (kind) == PAIRS)
/* Of what is read at once: a pair in PAIRS. */
#define BYTES(kind) ((size_t)((kind) == FP32 || (kind) == PAIRS ? 4 : 2))
#define BLOCK 64
#define BLOCK_BYTES ((size_t)(PANEL * sizeof(float) + BLOCK * PANEL / 2))
#define TABLE_BYTES (16 * sizeof(float))

/* Where panel p begins, and how many bytes a panel has. */
INLINE size_t panel_bytes(const int kind, size_t inputs) {
    return kind == CODES ? inputs / BLOCK * BLOCK_BYTES : inputs * PANEL * BYTES(kind);
}

INLINE const char *panel_at(const int kind, const char *packed, size_t p, size_t inputs) {
    return packed + (kind == CODES ? TABLE_BYTES : 0) + p * panel_bytes(kind, inputs);
}

/* Vector v of the values from `place` on, in fp32. bf16 is the upper half of fp32. A word has a value of an even vector
   below one of the next, so that a shift or a mask widens it: converting takes a row's time on AMD's Zen. */
INLINE vec load(const int kind, const void *from, size_t place, int v) {
    if (BYTES(kind) == 4) return *(const vec *)((const float *)from + place + v * LANES);
    if (kind == BF16) {
        words both = *(const words *)((const uint16_t *)from + place + v / 2 * 2 * LANES);
        return (vec)(v % 2 ? both & 0xFFFF0000 : both << 16);
    }
    const uint16_t *half = (const uint16_t *)from + place + v * LANES;
#if LANES == 16
    return (vec)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)half));
#elif LANES == 8 && defined(__F16C__)
    return (vec)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)half));
#elif defined(__aarch64__)
    return (vec)vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(half)));
#else
    vec value;
    for (int lane = 0; lane < LANES; lane++) value[lane] = (float)((const _Float16 *)half)[lane];
    return value;
#endif
}

/* LANES table entries by the codes of vector v. The second half of the columns is in the upper halves of the bytes. */
INLINE vec decoded(const vec *table, const uint8_t *codes, int v) {
    const uint8_t *from = codes + v % (VECTORS / 2) * LANES;
    const int upper = v >= VECTORS / 2;
#if LANES == 16
    __m512i code = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)from));
    if (upper) code = _mm512_srli_epi32(code, 4);
    return (vec)_mm512_permutexvar_ps(code, (__m512)table[0]); /* looks at the lowest four bits only */
#elif LANES == 8
    __m256i code = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)from));
    if (upper) code = _mm256_srli_epi32(code, 4);
    __m256 low = _mm256_permutevar8x32_ps((__m256)table[0], code);
    __m256 high = _mm256_permutevar8x32_ps((__m256)table[1], code);
    return (vec)_mm256_blendv_ps(low, high, (__m256)_mm256_slli_epi32(code, 28));
#else
    vec value;
    for (int lane = 0; lane < LANES; lane++) value[lane] = ((const float *)table)[from[lane] >> (upper ? 4 : 0) & 15];
    return value;
#endif
}

/* Panels of a packed matrix; the surplus columns of the last are zero. */
INLINE size_t panel_count(size_t outputs) { return (outputs + PANEL - 1) / PANEL; }

/* Where panel p has input i of its output o. */
INLINE size_t place_in_tiles(size_t p, size_t i, size_t o, size_t inputs) {
    return (p * group_count(inputs) * GROUP + i / 2 * 2) * PANEL + 2 * o + i % 2;
}

#endif
