/* y[rows][outputs] = x[rows][inputs] . w[outputs][inputs]^T (+ bias) (+ other), multiplied and added in fp32.

   A product with 1 to 64 rows should cost what it costs to read the weights once. The weights are packed beforehand in
   panels of PANEL outputs, input by input, so that they are read as one stream. They are kept in fp32, or in bf16 or
   fp16 where that holds every value exactly; 16-bit values are widened to fp32 in registers, so the arithmetic and
   its order, and therefore every bit of the result, do not depend on how the weights are kept. A slice of a panel
   stays in the first-level cache while all rows pass over it, TILE rows at a time with their sums in registers; in
   the meantime the next slice is fetched. Sums run over the inputs in order, by fused multiply-add where there is one.

   Plain C with GCC's vector types, so that the compiler picks the instructions of the machine it runs on. */

#include <stddef.h>
#include <stdint.h>
#include <string.h>
#if defined(__F16C__)
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

typedef float vec __attribute__((vector_size(LANES * 4), aligned(4)));
typedef uint32_t words __attribute__((vector_size(LANES * 4), aligned(4)));
typedef uint16_t halves __attribute__((vector_size(LANES * 2), aligned(2)));

/* How the values of a packed matrix are kept. The same numbers stand in __init__.py. */
enum { FP32, BF16, FP16 };
#define BYTES(kind) ((size_t)((kind) == FP32 ? 4 : 2))

/* One fp16 value as fp32, without the conversion instruction that not every processor has. */
INLINE float from_half(uint16_t half) {
    uint32_t magnitude = half & 0x7fff, bits;
    float value = (float)magnitude * 0x1p-24f; /* what a subnormal number stands for */
    if (magnitude >= 0x0400) {
        /* The exponent's offset is 15 there and 127 here; infinity and NaN have the largest exponent in both. */
        bits = (magnitude << 13) + ((magnitude >= 0x7c00 ? 224u : 112u) << 23);
        memcpy(&value, &bits, 4);
    }
    memcpy(&bits, &value, 4);
    bits |= (uint32_t)(half & 0x8000) << 16;
    memcpy(&value, &bits, 4);
    return value;
}

/* LANES values from `place` on, in fp32. */
INLINE vec load(const int kind, const void *from, size_t place) {
    if (kind == FP32) return *(const vec *)((const float *)from + place);
    const uint16_t *half = (const uint16_t *)from + place;
    if (kind == BF16) return (vec)(__builtin_convertvector(*(const halves *)half, words) << 16);
#if LANES == 16
    return (vec)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)half));
#elif LANES == 8 && defined(__F16C__)
    return (vec)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)half));
#elif defined(__aarch64__)
    return (vec)vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(half)));
#else
    vec value;
    for (int lane = 0; lane < LANES; lane++) value[lane] = from_half(half[lane]);
    return value;
#endif
}

/* Outputs of the packed matrix: a multiple of PANEL; surplus columns are zero. */
size_t draftsmith_padded(size_t outputs) { return (outputs + PANEL - 1) / PANEL * PANEL; }

/* weights [outputs][inputs] -> packed [outputs / PANEL][inputs][PANEL], both of the kind given */
void draftsmith_pack(int kind, const char *weights, char *packed, size_t outputs, size_t inputs) {
    size_t panels = draftsmith_padded(outputs) / PANEL, bytes = BYTES(kind);
#pragma omp parallel for schedule(static)
    for (size_t p = 0; p < panels; p++) {
        char *to = packed + p * inputs * PANEL * bytes;
        for (size_t i = 0; i < inputs; i++)
            for (size_t output = p * PANEL; output < (p + 1) * PANEL; output++, to += bytes) {
                const char *from = weights + (output * inputs + i) * bytes;
                if (output >= outputs)
                    memset(to, 0, bytes);
                else if (bytes == 4)
                    memcpy(to, from, 4);
                else
                    memcpy(to, from, 2);
            }
    }
}

/* Rows `ids` of the matrix that was packed, in fp32: to [count][inputs] */
void draftsmith_rows(int kind, const char *packed, const int64_t *ids, float *to, size_t count, size_t inputs) {
#pragma omp parallel for schedule(static)
    for (size_t r = 0; r < count; r++) {
        size_t id = (size_t)ids[r];
        const char *from = packed + (id / PANEL * inputs * PANEL + id % PANEL) * BYTES(kind);
        for (size_t i = 0; i < inputs; i++, from += PANEL * BYTES(kind)) {
            uint16_t half;
            if (kind == FP32)
                memcpy(to + r * inputs + i, from, 4);
            else {
                memcpy(&half, from, 2);
                uint32_t bits = (uint32_t)half << 16;
                if (kind == BF16)
                    memcpy(to + r * inputs + i, &bits, 4);
                else
                    to[r * inputs + i] = from_half(half);
            }
        }
    }
}

/* Add to the sums of ROWS rows what `inputs` inputs contribute, and fetch `lines` cache lines from `ahead` on meanwhile. */
INLINE void tile(
    const int kind, const int ROWS, const float *x, size_t x_stride, const void *panel, size_t inputs, float *sums,
    const char *ahead, size_t lines) {
    vec sum[TILE][VECTORS];
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 8
        for (int v = 0; v < VECTORS; v++) sum[r][v] = *(const vec *)(sums + r * PANEL + v * LANES);
    /* Spread over the inputs without a division: `lines` in `inputs` steps. */
    size_t owed = 0;
    for (size_t i = 0; i < inputs; i++) {
        vec w[VECTORS];
#pragma GCC unroll 8
        for (int v = 0; v < VECTORS; v++) w[v] = load(kind, panel, i * PANEL + v * LANES);
        for (owed += lines; owed >= inputs; owed -= inputs, ahead += 64) __builtin_prefetch(ahead, 0, 2);
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; r++) {
            float value = x[r * x_stride + i];
#pragma GCC unroll 8
            for (int v = 0; v < VECTORS; v++) sum[r][v] += w[v] * value;
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 8
        for (int v = 0; v < VECTORS; v++) *(vec *)(sums + r * PANEL + v * LANES) = sum[r][v];
}

INLINE void rows_over_slice(
    const int kind, size_t rows, const float *x, size_t x_stride, const void *panel, size_t inputs, float *sums,
    const char *ahead, size_t lines) {
    size_t tiles = (rows + TILE - 1) / TILE, done = 0;
    for (size_t t = 0; t < tiles; t++) {
        /* Tiles of like size: 7 rows are 4 + 3, not 6 + 1. */
        size_t begin = rows * t / tiles, count = rows * (t + 1) / tiles - begin;
        size_t due = lines * (t + 1) / tiles - done;
        const float *from = x + begin * x_stride;
        float *to = sums + begin * PANEL;
        const char *next = ahead + done * 64;
        done += due;
        switch (count) {
            case 1: tile(kind, 1, from, x_stride, panel, inputs, to, next, due); break;
            case 2: tile(kind, 2, from, x_stride, panel, inputs, to, next, due); break;
            case 3: tile(kind, 3, from, x_stride, panel, inputs, to, next, due); break;
            case 4: tile(kind, 4, from, x_stride, panel, inputs, to, next, due); break;
            case 5: tile(kind, 5, from, x_stride, panel, inputs, to, next, due); break;
            default: tile(kind, 6, from, x_stride, panel, inputs, to, next, due); break;
        }
    }
}

/* One panel over at most MOST_ROWS rows. */
INLINE void panel_over_rows(
    const int kind, const char *panel, const float *x, size_t rows, size_t inputs, float *sums) {
    float wide[SLICE * PANEL] __attribute__((aligned(64)));
    for (size_t i = 0; i < inputs; i += SLICE) {
        size_t count = inputs - i < SLICE ? inputs - i : SLICE;
        const char *slice = panel + i * PANEL * BYTES(kind);
        /* Behind the last panel the fetches fall on nothing, which is allowed. */
        const char *ahead = slice + count * PANEL * BYTES(kind);
        size_t lines = count * PANEL * BYTES(kind) / 64;
        if (kind == FP32 || rows <= 2 * TILE)
            rows_over_slice(kind, rows, x + i, inputs, slice, count, sums, ahead, lines);
        else {
            /* Many tiles: widened once for all of them. */
            for (size_t k = 0; k < count * PANEL; k += LANES) *(vec *)(wide + k) = load(kind, slice, k);
            rows_over_slice(FP32, rows, x + i, inputs, wide, count, sums, ahead, lines);
        }
    }
}

INLINE void linear(
    const int kind, const float *x, const char *packed, const float *bias, const float *other, float *y, size_t rows,
    size_t inputs, size_t outputs) {
    size_t panels = draftsmith_padded(outputs) / PANEL;
#pragma omp parallel
    {
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
            panel_over_rows(kind, packed + first * inputs * BYTES(kind), x, rows, inputs, sums);
            for (size_t r = 0; r < rows; r++)
                memcpy(y + r * outputs + first, sums + r * PANEL, width * sizeof(float));
        }
    }
}

/* bias [outputs] and other [rows][outputs] may be NULL. rows <= MOST_ROWS. */
void draftsmith_linear(
    int kind, const float *x, const char *packed, const float *bias, const float *other, float *y, size_t rows,
    size_t inputs, size_t outputs) {
    switch (kind) {
        case FP32: linear(FP32, x, packed, bias, other, y, rows, inputs, outputs); break;
        case BF16: linear(BF16, x, packed, bias, other, y, rows, inputs, outputs); break;
        case FP16: linear(FP16, x, packed, bias, other, y, rows, inputs, outputs); break;
    }
}
