/* What a slice of a panel contributes to rows of sums, TILE rows at a time with their sums in registers. */

#ifndef DRAFTSMITH_PANELS_H
#define DRAFTSMITH_PANELS_H

#include "pairs.h"

#define SLICE 128 /* inputs of a panel that stay in the first-level cache while all rows pass over them */

/* Some inputs of a panel, and the rows and sums that they are multiplied with and added to. Strides count values. */
struct slice {
    const float *x;
    size_t x_stride;
    const char *panel;
    size_t panel_stride, inputs;
    float *sums;
    size_t sums_stride;
    const char *ahead; /* `lines` cache lines from here on are fetched meanwhile */
    size_t lines;
    float *wide; /* what is widened is kept here too, PANEL floats per input; may be NULL */
};

/* Add to the sums of ROWS rows, WIDE vectors of each, what a slice contributes. `table` is of CODES, whose panel begins
   with the scales of its one block. Few rows only wait for memory, and wait less when the lines go to the first-level
   cache; more rows need its space. */
INLINE void tile(const int kind, const vec *table, const int ROWS, const int WIDE, const struct slice s) {
    const float *x = s.x;
    const char *panel = s.panel, *ahead = s.ahead;
    float *sums = s.sums, *wide = s.wide;
    const size_t x_stride = s.x_stride, panel_stride = s.panel_stride, inputs = s.inputs, sums_stride = s.sums_stride;
    const size_t lines = s.lines;
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

INLINE void tile_of(const int kind, const vec *table, size_t rows, const int WIDE, const struct slice s) {
    switch (rows) {
        case 1: tile(kind, table, 1, WIDE, s); break;
        case 2: tile(kind, table, 2, WIDE, s); break;
        case 3: tile(kind, table, 3, WIDE, s); break;
        case 4: tile(kind, table, 4, WIDE, s); break;
        case 5: tile(kind, table, 5, WIDE, s); break;
        default: tile(kind, table, 6, WIDE, s); break;
    }
}

/* Tiles over all rows of a slice, of WIDE vectors an input. With `wide` the first tile widens the slice for all of
   them. */
INLINE void rows_over_slice(const int kind, const vec *table, size_t rows, const int WIDE, const struct slice s) {
    size_t tiles = (rows + TILE - 1) / TILE, done = 0;
    for (size_t t = 0; t < tiles; t++) {
        /* Tiles of like size: 7 rows are 4 + 3, not 6 + 1. */
        size_t begin = rows * t / tiles, count = rows * (t + 1) / tiles - begin;
        struct slice own = s;
        own.x += begin * s.x_stride;
        own.sums += begin * s.sums_stride;
        own.ahead += done * 64;
        own.lines = s.lines * (t + 1) / tiles - done;
        done += own.lines;
        if (!s.wide || t == 0) {
            tile_of(kind, table, count, WIDE, own);
            continue;
        }
        own.panel = (const char *)s.wide;
        own.panel_stride = PANEL;
        own.wide = NULL;
        tile_of(FP32, NULL, count, WIDE, own);
    }
}

#endif
