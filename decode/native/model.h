/* A model, and one step of it, as structures.py has them.

   X tokens (batch rows times queries of each), P slots of the cache that are read. */

#ifndef DRAFTSMITH_MODEL_H
#define DRAFTSMITH_MODEL_H

#include <stddef.h>
#include <stdint.h>

struct matrix {
    const char *values;
    const float *bias; /* may be NULL */
    size_t outputs, kind;
};

struct layer {
    struct matrix qkv, out, gate_up, down;
    const float *norm, *query_norm, *key_norm, *ffn_norm; /* all but ffn_norm may be NULL */
    size_t mask;                                          /* which of the step's masks */
};

/* What a draft head makes of the embedding of a token and the feature before it, both given with the step. EAGLE: x = fc
   [embedding, feature]. EAGLE-3, without `fc.values`: x = feature, normed where `feature_normed`, and the first layer
   reads [normed embedding, normed feature]. A block drafter, which has none of the three: x = embedding. */
struct opening {
    struct matrix fc;
    const float *embedding_norm, *feature_norm;
    size_t feature_normed;
};

struct model {
    const struct layer *layers;
    size_t count;
    struct matrix head;            /* without values: no logits */
    const float *norm;             /* may be NULL */
    const struct opening *opening; /* NULL: x is the embedding of the token */
    const char *embedding; /* [vocabulary][width] in fp32, or packed in `embedding_kind` where `embedding_packed` */
    size_t embedding_packed, embedding_kind, vocabulary;
    size_t width, heads, groups, size;
    float eps, scale;
};

struct mask {
    const float *values; /* [batch][queries][P], added to the scores; NULL: everything is seen */
    size_t batch_stride, query_stride;
};

struct step {
    size_t batch, queries, kept; /* logits of the last `kept` queries of each row */
    const int64_t *tokens, *positions;
    const float *embedded, *features; /* [X][width], of a model with an opening, which reads no tokens */
    size_t remembers;                 /* of a block drafter: cache keys and values of the features, and nothing else */
    size_t position_stride; /* between rows; 0: all have the same */
    const float *rotary;    /* [positions][2 * size]: cosines, then sines with the sign of the half that is added */
    float *keys, *values;   /* [layers][batch][groups][slots][size] */
    size_t layer_stride, batch_stride, group_stride, column;
    struct mask masks[2];
    float *states;         /* [number wanted][X][width] */
    const uint8_t *wanted; /* [layers + 2]: whether the state before that layer, after all layers, after the last norm, is wanted */
    float *logits;         /* [batch * kept][vocabulary] */
    float *scratch;
};

#endif
