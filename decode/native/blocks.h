/* Blocks of a row over the vocabulary, and tokens taken from it. */

#ifndef DRAFTSMITH_BLOCKS_H
#define DRAFTSMITH_BLOCKS_H

#include "vectors.h"

#define SEARCHED 128 /* values of a block; only blocks with one of the largest values are searched */

/* Where the block ends that begins at `begin`. */
INLINE size_t block_end(size_t begin, size_t width) { return begin + SEARCHED < width ? begin + SEARCHED : width; }

INLINE int is_among(int64_t place, const int64_t *places, size_t count) {
    for (size_t k = 0; k < count; k++)
        if (places[k] == place) return 1;
    return 0;
}

#endif
