/* y[rows][outputs] = x[rows][inputs] . w[outputs][inputs]^T (+ bias) (+ other), multiplied and added in fp32.

   A product with 1 to 64 rows should cost what it costs to read the weights once. The weights are packed beforehand in
   panels of PANEL outputs, input by input, so that they are read as one stream. They are kept in fp32, or in bf16 or
   fp16 where that holds every value exactly, or as the four-bit codes of a quantised checkpoint; they are widened to
   fp32 in registers, so the arithmetic and its order, and therefore every bit of the result, do not depend on how the
   weights are kept. Weights in bf16 are multiplied by tiles.c where the processor can, in another order, and those of a
   model that computes in bf16 by pairs.c. A slice of a panel stays in the first-level cache while all rows pass over it,
   TILE rows at a time with their sums in registers; in the meantime the next slice is fetched. Sums run over the inputs
   in order, by fused multiply-add where there is one.

   Plain C with GCC's vector types, so that the compiler picks the instructions of the machine it runs on. */

#include <omp.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#if defined(__F16C__) || defined(__AVX2__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

/* Sums, one input of all panel columns, and a broadcast value have to fit the registers. */
#if defined(__AVX512F__)
#define LANES 16
#define VECTORS 4
#elif defined(__AVX2__)
#define LANES 8
#define VECTORS 2
#else
#define LANES 4
#define VECTORS 4
#endif
#define PANEL (LANES * VECTORS)
#define TILE 6
#define SLICE 128
#define MOST_ROWS 256
#define INLINE static inline __attribute__((always_inline))
/* Up to so many rows the processor's own prefetching keeps up with the stream of weights, and fetches of ours only take
   its place: on AMD's Zen a row is 5 to 10 % faster without them in 16 bits, 15 % and more in fp32. Elsewhere not tried.
   Codes of four bits want them with any number of rows. */
#if defined(__znver1__) || defined(__znver2__) || defined(__znver3__) || defined(__znver4__) || defined(__znver5__)
#define STREAMED TILE
#else
#define STREAMED 0
#endif

typedef float vec __attribute__((vector_size(LANES * 4), aligned(4)));
typedef uint32_t words __attribute__((vector_size(LANES * 4), aligned(4)));

/* a * b + c, rounded once where the processor can. Written out: left to the compiler, it would depend on the loop
   around it whether a product is rounded before it is added, and rows would differ in their last bits. */
INLINE vec multiply_add(vec a, vec b, vec c) {
#if LANES == 16
    return (vec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif LANES == 8 && defined(__FMA__)
    return (vec)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
    return (vec)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
    return a * b + c;
#endif
}

/* How the values of a packed matrix are kept. The same numbers stand in __init__.py. TILES, PAIRS: bf16, see tiles.c and
   pairs.c. CODES: a table of 16 values, then the panels, each in blocks of BLOCK inputs: the block's PANEL scales, and of
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

#if LANES == 16
/* The lanes of a vector that `left` more values fill. */
INLINE __mmask16 filled(size_t left) { return left < LANES ? (__mmask16)((1u << left) - 1) : 0xFFFF; }
#endif

#include "tiles.c"

/* Uses the packing of tiles.c. */
#include "pairs.c"

/* Outputs of a vector. */
size_t draftsmith_lanes(void) { return LANES; }

size_t draftsmith_packed_bytes(int kind, size_t outputs, size_t inputs) {
    if (IN_PAIRS(kind)) return panel_count(outputs) * group_count(inputs) * GROUP * PANEL * 2;
    return (kind == CODES ? TABLE_BYTES : 0) + panel_count(outputs) * panel_bytes(kind, inputs);
}

/* Rows `ids` of the matrix that was packed, in fp32: to [count][inputs] */
void draftsmith_rows(int kind, const char *packed, const int64_t *ids, float *to, size_t count, size_t inputs) {
    vec table[16 / LANES];
    if (kind == CODES) memcpy(table, packed, TABLE_BYTES);
#pragma omp parallel for schedule(static)
    for (size_t r = 0; r < count; r++) {
        size_t id = (size_t)ids[r];
        int v = (int)(id % PANEL / LANES);
        if (IN_PAIRS(kind)) {
            const uint16_t *halves_of = (const uint16_t *)packed;
            for (size_t i = 0; i < inputs; i++) {
                uint32_t bits = (uint32_t)halves_of[place_in_tiles(id / PANEL, i, id % PANEL, inputs)] << 16;
                memcpy(to + r * inputs + i, &bits, sizeof(float));
            }
            continue;
        }
        const char *panel = panel_at(kind, packed, id / PANEL, inputs);
        for (size_t i = 0; i < inputs; i++) {
            const char *block = panel + i / BLOCK * BLOCK_BYTES;
            const uint8_t *codes = (const uint8_t *)block + PANEL * sizeof(float) + i % BLOCK * PANEL / 2;
            vec values = kind == CODES ? decoded(table, codes, v) * load(FP32, block, 0, v)
                                       : load(kind, panel, i * PANEL, v);
            to[r * inputs + i] = values[id % LANES];
        }
    }
}

/* Add to the sums of ROWS rows, WIDE vectors of each, what `inputs` inputs contribute, and fetch `lines` cache lines from
   `ahead` on meanwhile. `panel_stride` and `sums_stride` count values. `table` is of CODES, whose panel begins with the
   scales of its one block. What is widened is also kept in `wide` unless that is NULL. Few rows only wait for memory, and
   wait less when the lines go to the first-level cache; more rows need its space. */
INLINE void tile(
    const int kind, const vec *table, const int ROWS, const int WIDE, const float *x, size_t x_stride, const char *panel,
    size_t panel_stride, size_t inputs, float *sums, size_t sums_stride, const char *ahead, size_t lines, float *wide) {
    const uint8_t *codes = (const uint8_t *)panel + PANEL * sizeof(float);
    vec scale[VECTORS];
    if (kind == CODES)
#pragma GCC unroll 8
        for (int v = 0; v < WIDE; v++) scale[v] = load(FP32, panel, 0, v);
    vec sum[TILE][VECTORS];
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 8
        for (int v = 0; v < WIDE; v++) sum[r][v] = *(const vec *)(sums + r * sums_stride + v * LANES);
    /* Spread over the inputs without a division: `lines` in `inputs` steps. */
    size_t owed = 0;
    for (size_t i = 0; i < inputs; i++) {
        vec w[VECTORS];
#pragma GCC unroll 8
        for (int v = 0; v < WIDE; v++)
            w[v] = kind == CODES ? decoded(table, codes + i * PANEL / 2, v) * scale[v]
                                 : load(kind, panel, i * panel_stride, v);
        if (wide)
#pragma GCC unroll 8
            for (int v = 0; v < WIDE; v++) *(vec *)(wide + i * PANEL + v * LANES) = w[v];
        for (owed += lines; owed >= inputs; owed -= inputs, ahead += 64) {
            if (ROWS <= 3)
                __builtin_prefetch(ahead, 0, 3);
            else
                __builtin_prefetch(ahead, 0, 2);
        }
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; r++) {
            float value = x[r * x_stride + i];
#pragma GCC unroll 8
            for (int v = 0; v < WIDE; v++)
                sum[r][v] = kind == PAIRS ? add_pairs(w[v], value, sum[r][v])
                                          : multiply_add(w[v], value - (vec){0}, sum[r][v]);
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 8
        for (int v = 0; v < WIDE; v++) *(vec *)(sums + r * sums_stride + v * LANES) = sum[r][v];
}

#define TILE_OF(ROWS) \
    tile(kind, table, ROWS, WIDE, x, x_stride, panel, panel_stride, inputs, sums, sums_stride, ahead, lines, wide)
INLINE void tile_of(
    const int kind, const vec *table, size_t rows, const int WIDE, const float *x, size_t x_stride, const char *panel,
    size_t panel_stride, size_t inputs, float *sums, size_t sums_stride, const char *ahead, size_t lines, float *wide) {
    switch (rows) {
        case 1: TILE_OF(1); break;
        case 2: TILE_OF(2); break;
        case 3: TILE_OF(3); break;
        case 4: TILE_OF(4); break;
        case 5: TILE_OF(5); break;
        default: TILE_OF(6); break;
    }
}

/* Tiles over all rows of a slice of a panel, of WIDE vectors an input. With `wide` (PANEL floats per input) the first
   tile widens the slice for all of them. */
INLINE void rows_over_slice(
    const int kind, const vec *table, size_t rows, const int WIDE, const float *x, size_t x_stride, const char *panel,
    size_t panel_stride, size_t inputs, float *sums, size_t sums_stride, const char *ahead, size_t lines, float *wide) {
    size_t tiles = (rows + TILE - 1) / TILE, done = 0;
    for (size_t t = 0; t < tiles; t++) {
        /* Tiles of like size: 7 rows are 4 + 3, not 6 + 1. */
        size_t begin = rows * t / tiles, count = rows * (t + 1) / tiles - begin;
        size_t due = lines * (t + 1) / tiles - done;
        const float *from = x + begin * x_stride;
        float *to = sums + begin * sums_stride;
        const char *next = ahead + done * 64;
        done += due;
        const char *widened = (const char *)wide;
        if (!wide)
            tile_of(
                kind, table, count, WIDE, from, x_stride, panel, panel_stride, inputs, to, sums_stride, next, due, NULL);
        else if (t == 0)
            tile_of(
                kind, table, count, WIDE, from, x_stride, panel, panel_stride, inputs, to, sums_stride, next, due, wide);
        else
            tile_of(FP32, NULL, count, WIDE, from, x_stride, widened, PANEL, inputs, to, sums_stride, next, due, NULL);
    }
}

/* One panel over at most MOST_ROWS rows. */
INLINE void panel_over_rows(
    const int kind, const vec *table, const char *panel, const float *x, size_t rows, size_t inputs, float *sums) {
    float wide[SLICE * PANEL] __attribute__((aligned(64)));
    size_t most = kind == CODES ? BLOCK : SLICE;
    for (size_t i = 0; i < inputs; i += most) {
        size_t count = inputs - i < most ? inputs - i : most;
        size_t bytes = kind == CODES ? BLOCK_BYTES : count * PANEL * BYTES(kind);
        const char *slice = panel + (kind == CODES ? i / BLOCK * BLOCK_BYTES : i * PANEL * BYTES(kind));
        /* Behind the last panel the fetches fall on nothing, which is allowed. */
        const char *ahead = slice + bytes;
        size_t lines = kind != CODES && rows <= STREAMED ? 0 : bytes / 64;
        int once = BYTES(kind) < 4 && rows > (kind == CODES ? TILE : 2 * TILE);
        rows_over_slice(
            kind, table, rows, VECTORS, x + i, inputs, slice, PANEL, count, sums, PANEL, ahead, lines, once ? wide : NULL);
    }
}

/* The product, by the threads of the parallel region that it is called in. */
INLINE void linear(
    const int kind, const float *x, const char *packed, const float *bias, const float *other, float *y, size_t rows,
    size_t inputs, size_t outputs) {
    size_t panels = panel_count(outputs);
    vec table[16 / LANES];
    if (kind == CODES) memcpy(table, packed, TABLE_BYTES);
    float sums[MOST_ROWS * PANEL] __attribute__((aligned(64)));
#pragma omp for schedule(static)
    for (size_t p = 0; p < panels; p++) {
        size_t first = p * PANEL, width = outputs - first < PANEL ? outputs - first : PANEL;
        for (size_t r = 0; r < rows; r++) {
            if (other)
                memcpy(sums + r * PANEL, other + r * outputs + first, width * sizeof(float));
            else
                memset(sums + r * PANEL, 0, width * sizeof(float));
            if (width < PANEL) memset(sums + r * PANEL + width, 0, (PANEL - width) * sizeof(float));
            if (bias)
                for (size_t o = 0; o < width; o++) sums[r * PANEL + o] += bias[first + o];
        }
        panel_over_rows(kind, table, panel_at(kind, packed, p, inputs), x, rows, inputs, sums);
        for (size_t r = 0; r < rows; r++) memcpy(y + r * outputs + first, sums + r * PANEL, width * sizeof(float));
    }
}

/* bf16 values of room that a product needs for its rows. */
size_t draftsmith_room(int kind, size_t rows, size_t inputs) {
    size_t most = rows < MOST_ROWS ? rows : MOST_ROWS;
    if (kind == PAIRS) return rounded_values(most, inputs);
    return kind == TILES ? split_values(most, inputs) : 0;
}

/* room: for `draftsmith_room`, shared by the threads. */
static void linear_of_kind(
    int kind, const float *x, const char *packed, const float *bias, const float *other, float *y, size_t rows,
    size_t inputs, size_t outputs, uint16_t *room) {
    switch (kind) {
        case FP32: linear(FP32, x, packed, bias, other, y, rows, inputs, outputs); break;
        case BF16: linear(BF16, x, packed, bias, other, y, rows, inputs, outputs); break;
        case FP16: linear(FP16, x, packed, bias, other, y, rows, inputs, outputs); break;
        case CODES: linear(CODES, x, packed, bias, other, y, rows, inputs, outputs); break;
        case PAIRS:
            x = rounded(x, rows, inputs, room);
            linear(PAIRS, x, packed, bias, other, y, rows, pair_count(inputs), outputs);
            break;
        case TILES: linear_by_tiles(x, packed, bias, other, y, rows, inputs, outputs, room); break;
    }
}

/* bias [outputs] and other [rows][outputs] may be NULL; y may be other. rows <= MOST_ROWS. room: see linear_of_kind. */
void draftsmith_linear(
    int kind, const float *x, const char *packed, const float *bias, const float *other, float *y, size_t rows,
    size_t inputs, size_t outputs, uint16_t *room) {
#pragma omp parallel
    linear_of_kind(kind, x, packed, bias, other, y, rows, inputs, outputs, room);
}
