/* y[rows][outputs] = x[rows][inputs] . w[outputs][inputs]^T (+ bias) (+ other) for a few rows, in fp32.

   A product with 2 to 64 rows should cost what it costs to read the weights once. The weights are packed beforehand in
   panels of PANEL outputs, input by input, so that they are read as one stream. A slice of a panel (SLICE inputs)
   stays in the first-level cache while all rows pass over it, TILE rows at a time with their sums in registers; in
   the meantime the next slice is fetched. Sums run over the inputs in order, by fused multiply-add.

   Plain C with GCC's vector types, so that the compiler picks the instructions of the machine it runs on. */

#include <stddef.h>
#include <string.h>

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

typedef float vec __attribute__((vector_size(LANES * 4), aligned(4)));

/* Outputs of the packed matrix: a multiple of PANEL; surplus columns are zero. */
size_t draftsmith_padded(size_t outputs) { return (outputs + PANEL - 1) / PANEL * PANEL; }

/* weights [outputs][inputs] -> packed [outputs / PANEL][inputs][PANEL] */
void draftsmith_pack(const float *weights, float *packed, size_t outputs, size_t inputs) {
    size_t panels = draftsmith_padded(outputs) / PANEL;
#pragma omp parallel for schedule(static)
    for (size_t p = 0; p < panels; p++) {
        float *panel = packed + p * inputs * PANEL;
        for (size_t i = 0; i < inputs; i++)
            for (size_t o = 0; o < PANEL; o++) {
                size_t output = p * PANEL + o;
                panel[i * PANEL + o] = output < outputs ? weights[output * inputs + i] : 0.0f;
            }
    }
}

/* Add to the sums of ROWS rows what `inputs` inputs contribute, and fetch `lines` cache lines from `ahead` on meanwhile. */
static inline __attribute__((always_inline)) void tile(
    const int ROWS, const float *x, size_t x_stride, const float *panel, size_t inputs, float *sums, const char *ahead,
    size_t lines) {
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
        for (int v = 0; v < VECTORS; v++) w[v] = *(const vec *)(panel + i * PANEL + v * LANES);
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

static void rows_over_slice(
    size_t rows, const float *x, size_t x_stride, const float *panel, size_t inputs, float *sums, const char *ahead,
    size_t lines) {
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
            case 1: tile(1, from, x_stride, panel, inputs, to, next, due); break;
            case 2: tile(2, from, x_stride, panel, inputs, to, next, due); break;
            case 3: tile(3, from, x_stride, panel, inputs, to, next, due); break;
            case 4: tile(4, from, x_stride, panel, inputs, to, next, due); break;
            case 5: tile(5, from, x_stride, panel, inputs, to, next, due); break;
            default: tile(6, from, x_stride, panel, inputs, to, next, due); break;
        }
    }
}

/* bias [outputs] and other [rows][outputs] may be NULL. rows <= MOST_ROWS. */
void draftsmith_linear(
    const float *x, const float *packed, const float *bias, const float *other, float *y, size_t rows, size_t inputs,
    size_t outputs) {
    size_t panels = draftsmith_padded(outputs) / PANEL;
#pragma omp parallel
    {
        float sums[MOST_ROWS * PANEL] __attribute__((aligned(64)));
#pragma omp for schedule(static)
        for (size_t p = 0; p < panels; p++) {
            const float *panel = packed + p * inputs * PANEL;
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
            for (size_t i = 0; i < inputs; i += SLICE) {
                size_t count = inputs - i < SLICE ? inputs - i : SLICE;
                const float *slice = panel + i * PANEL;
                /* Behind the last panel the fetches fall on nothing, which is allowed. */
                rows_over_slice(
                    rows, x + i, inputs, slice, count, sums, (const char *)(slice + count * PANEL),
                    count * PANEL * sizeof(float) / 64);
            }
            for (size_t r = 0; r < rows; r++)
                memcpy(y + r * outputs + first, sums + r * PANEL, width * sizeof(float));
        }
    }
}
