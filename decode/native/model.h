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

/* RMS norm; with a bias LayerNorm, which subtracts the mean first. No weight: no norm. */
struct norm {
    const float *weight, *bias;
};

struct layer {
    struct matrix qkv, out, gate_up, down;
    struct norm norm, ffn_norm;
    const float *query_norm, *key_norm; /* RMS norms of heads; may be NULL */
    const float *out_norm, *down_norm;  /* RMS norms of what `out` and `down` add to the state; may be NULL */
    size_t kind;                        /* which of the step's kinds */
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
    struct norm norm;
    const struct opening *opening; /* NULL: x is the embedding of the token */
    const char *embedding; /* [vocabulary][width] in fp32, or packed in `embedding_kind` where `embedding_packed` */
    size_t embedding_packed, embedding_kind, vocabulary;
    const float *places; /* [place_count][width], learned and added to the embedding by position; may be NULL */
    size_t place_count;
    size_t width, heads, groups, size;
    size_t turned;      /* the first elements of a head that are rotated; 0: none */
    size_t activation;  /* one of activation.h */
    size_t gated;       /* gate_up has gate and up side by side; else it has no gate */
    size_t parallel;    /* attention and the rest of a layer read the same state */
    size_t interleaved; /* qkv has a query, a key and a value head by head */
    float eps, scale;
    float embedding_scale;
    float attention_cap, logit_cap; /* x becomes cap * tanh(x / cap); 0: none */
};

/* What layers of one kind share. */
struct kind {
    const float *mask; /* [batch][queries][P], added to the scores; NULL: everything is seen */
    size_t batch_stride, query_stride;
    const float *rotary; /* [positions][2 * turned]: cosines, then sines with the sign of the half that is added */
    size_t rotary_count; /* positions that it has */
};

struct step {
    size_t batch, queries, kept; /* logits of the last `kept` queries of each row */
    const int64_t *tokens, *positions;
    const float *embedded, *features; /* [X][width], of a model with an opening, which reads no tokens */
    size_t remembers;                 /* of a block drafter: cache keys and values of the features, and nothing else */
    size_t position_stride; /* between rows; 0: all have the same */
    float *keys, *values;   /* [layers][batch][groups][slots][size] */
    size_t layer_stride, batch_stride, group_stride, column;
    struct kind kinds[2];
    float *states;         /* [number wanted][X][width] */
    const uint8_t *wanted; /* [layers + 2]: whether the state before that layer, after all layers, after the last norm, is wanted */
    float *logits;         /* [batch * kept][vocabulary] */
    float *scratch;
};

#endif
