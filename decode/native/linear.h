/* y[rows][outputs] = x[rows][inputs] . w[outputs][inputs]^T (+ bias) (+ other). */

#ifndef DRAFTSMITH_LINEAR_H
#define DRAFTSMITH_LINEAR_H

#include "packing.h"

#define MOST_ROWS 256 /* of a product */

struct product {
    const float *x;
    const char *packed;
    const float *bias;  /* [outputs], may be NULL */
    const float *other; /* [rows][outputs], may be NULL or y */
    float *y;
    size_t rows, inputs, outputs;
    uint16_t *room; /* of draftsmith_room, shared by the threads */
};

/* The product, by the threads of the parallel region that it is called in. */
void draftsmith_product(int kind, struct product p);

/* bf16 values of room that a product needs for its rows. */
size_t draftsmith_room(int kind, size_t rows, size_t inputs);

/* Rows `ids` of the matrix that was packed, in fp32: to [count][inputs] */
void draftsmith_rows(int kind, const char *packed, const int64_t *ids, float *to, size_t count, size_t inputs);

#endif
