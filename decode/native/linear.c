/* y[rows][outputs] = x[rows][inputs] . w[outputs][inputs]^T (+ bias) (+ other), multiplied and added in fp32.

   A product with 1 to 64 rows should cost what it costs to read the weights once. The weights are packed beforehand in
   panels of PANEL outputs, input by input, so that they are read as one stream. They are kept in fp32, or in bf16 or
   fp16 where that holds every value exactly, or as the four-bit codes of a quantised checkpoint; they are widened to
   fp32 in registers, so the arithmetic and its order, and therefore every bit of the result, do not depend on how the
   weights are kept. Weights in bf16 are multiplied by tiles.c where the processor can, in another order, and those of a
   model that computes in bf16 by pairs.h. A slice of a panel stays in the first-level cache while all rows pass over it,
   TILE rows at a time with their sums in registers; in the meantime the next slice is fetched. Sums run over the inputs
   in order, by fused multiply-add where there is one.

   Plain C with GCC's vector types, so that the compiler picks the instructions of the machine it runs on. */

#include "linear.h"

#include "panels.h"
#include "tiles.h"

/* Up to so many rows the processor's own prefetching keeps up with the stream of weights, and fetches of ours only take
   its place: on AMD's Zen a row is 5 to 10 % faster without them in 16 bits, 15 % and more in fp32. Elsewhere not tried.
   Codes of four bits want them with any number of rows. */
#if defined(__znver1__) || defined(__znver2__) || defined(__znver3__) || defined(__znver4__) || defined(__znver5__)
#define STREAMED TILE
#else
#define STREAMED 0
#endif

/* Whether the processor multiplies pairs of bf16 numbers. */
int draftsmith_pairs(void) { return MULTIPLIES_PAIRS; }

/* Outputs of a vector. */
size_t draftsmith_lanes(void) { return LANES; }

size_t draftsmith_packed_bytes(int kind, size_t outputs, size_t inputs) {
    if (IN_PAIRS(kind)) return panel_count(outputs) * group_count(inputs) * GROUP * PANEL * 2;
    return (kind == CODES ? TABLE_BYTES : 0) + panel_count(outputs) * panel_bytes(kind, inputs);
}

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
        struct slice s = {
            .x = x + i,
            .x_stride = inputs,
            .panel = slice,
            .panel_stride = PANEL,
            .inputs = count,
            .sums = sums,
            .sums_stride = PANEL,
            .ahead = ahead,
            .lines = lines,
            .wide = once ? wide : NULL};
        rows_over_slice(kind, table, rows, VECTORS, s);
    }
}

INLINE void linear(const int kind, const struct product p) {
    size_t panels = panel_count(p.outputs);
    vec table[16 / LANES];
    if (kind == CODES) memcpy(table, p.packed, TABLE_BYTES);
    float sums[MOST_ROWS * PANEL] __attribute__((aligned(64)));
#pragma omp for schedule(static)
    for (size_t panel = 0; panel < panels; panel++) {
        size_t first = panel * PANEL, width = p.outputs - first < PANEL ? p.outputs - first : PANEL;
        for (size_t r = 0; r < p.rows; r++) {
            if (p.other)
                memcpy(sums + r * PANEL, p.other + r * p.outputs + first, width * sizeof(float));
            else
                memset(sums + r * PANEL, 0, width * sizeof(float));
            if (width < PANEL) memset(sums + r * PANEL + width, 0, (PANEL - width) * sizeof(float));
            if (p.bias)
                for (size_t o = 0; o < width; o++) sums[r * PANEL + o] += p.bias[first + o];
        }
        panel_over_rows(kind, table, panel_at(kind, p.packed, panel, p.inputs), p.x, p.rows, p.inputs, sums);
        for (size_t r = 0; r < p.rows; r++) memcpy(p.y + r * p.outputs + first, sums + r * PANEL, width * sizeof(float));
    }
}

size_t draftsmith_room(int kind, size_t rows, size_t inputs) {
    size_t most = rows < MOST_ROWS ? rows : MOST_ROWS;
    if (kind == PAIRS) return rounded_values(most, inputs);
    return kind == TILES ? split_values(most, inputs) : 0;
}

void draftsmith_product(int kind, struct product p) {
    switch (kind) {
        case FP32: linear(FP32, p); break;
        case BF16: linear(BF16, p); break;
        case FP16: linear(FP16, p); break;
        case CODES: linear(CODES, p); break;
        case PAIRS:
            p.x = rounded(p.x, p.rows, p.inputs, p.room);
            p.inputs = pair_count(p.inputs);
            linear(PAIRS, p);
            break;
        case TILES: draftsmith_linear_by_tiles(&p); break;
    }
}

/* As `struct product` says; rows <= MOST_ROWS. */
void draftsmith_linear(
    int kind, const float *x, const char *packed, const float *bias, const float *other, float *y, size_t rows,
    size_t inputs, size_t outputs, uint16_t *room) {
    struct product p = {x, packed, bias, other, y, rows, inputs, outputs, room};
#pragma omp parallel
    draftsmith_product(kind, p);
}
