/* The product of tiles.c. */

#ifndef DRAFTSMITH_TILES_H
#define DRAFTSMITH_TILES_H

#include "linear.h"

#define TILE_ROWS 16  /* rows of a tile: of x, or pairs of inputs */
#define SPLITS 3
#define TILE_VALUES (TILE_ROWS * GROUP)

INLINE size_t tile_count(size_t rows) { return (SPLITS * rows + TILE_ROWS - 1) / TILE_ROWS; }

/* bf16 values that `rows` rows of x need, split. */
INLINE size_t split_values(size_t rows, size_t inputs) { return tile_count(rows) * group_count(inputs) * TILE_VALUES; }

/* By the threads of the parallel region that it is called in. p->room: `split_values`. */
void draftsmith_linear_by_tiles(const struct product *p);

#endif
