/* A forward of the LLaMA family, or of a draft head with its layer, over a few tokens behind a cache, in one call and one
   parallel region.

   Written in tensor operations, a layer is some fifteen calls, and for a small draft they cost more than the
   arithmetic. Here a step of the network is one call. Every number of a token depends on that token and on what it
   attends to alone, summed in the order of the cache: what a mask hides adds an exact zero. So a token gets the same
   bits whatever shares its forward, alone or in a tree, and greedy speculation cannot fall otherwise at a tie.

   X tokens (batch rows times queries of each), P slots of the cache that are read, E size of a head. */

#include "model.h"

#include <math.h>

#include "attention.h"
#include "linear.h"
#include "tiles.h"

#define FETCHED_SLOTS (2 * PANEL)     /* `transposed` fetches what comes behind them */
#define FETCHED_MOST ((size_t)1 << 18) /* bytes for a thread, which its second-level cache has room for */

static size_t widest_gate_up(const struct model *m) {
    size_t most = 0;
    for (size_t i = 0; i < m->count; i++)
        if (m->layers[i].gate_up.outputs > most) most = m->layers[i].gate_up.outputs;
    return most;
}

/* Values that the first layer, or `fc` before it, reads for a token. */
static size_t widest_input(const struct model *m) { return m->opening ? 2 * m->width : m->width; }

static size_t projected(const struct model *m) { return (m->heads + 2 * m->groups) * m->size; }

static size_t score_slots(const struct step *s) {
    return (s->column + s->queries + PANEL - 1) / PANEL * PANEL;
}

/* Floats that a thread needs for attention: see `attend`. */
static size_t attention_floats(const struct model *m, const struct step *s) {
    return m->size * PANEL + TOGETHER * (score_slots(s) + 2 * m->size);
}

/* Floats that a token's states need. */
static size_t token_floats(const struct model *m) {
    size_t inner = widest_gate_up(m);
    return m->width + widest_input(m) + projected(m) + m->heads * m->size + inner + inner / 2;
}

/* Values of room that the product with the most inputs needs. */
static size_t widest_room(const struct model *m, size_t rows) {
    size_t inputs = widest_input(m), mixed = m->heads * m->size, inner = widest_gate_up(m) / 2;
    if (mixed > inputs) inputs = mixed;
    if (inner > inputs) inputs = inner;
    size_t tiles = draftsmith_room(TILES, rows, inputs), pairs = draftsmith_room(PAIRS, rows, inputs);
    return tiles > pairs ? tiles : pairs;
}

/* Floats of `scratch` that a step needs: of its tokens, its threads, and room for a product that begins a cache line. */
size_t draftsmith_scratch(const struct model *m, const struct step *s) {
    size_t tokens = s->batch * s->queries, threads = (size_t)omp_get_max_threads();
    return tokens * token_floats(m) + threads * attention_floats(m, s) + widest_room(m, tokens) / 2 + 16;
}

/* y = x / root of the mean of squares * weight, for `count` values */
INLINE void norm(const float *x, const float *weight, float *y, size_t count, float eps) {
    vec squares = {0};
    size_t i = 0;
    for (; i + LANES <= count; i += LANES) squares = multiply_add(at(x + i), at(x + i), squares);
    float sum = 0;
    for (int lane = 0; lane < LANES; lane++) sum += squares[lane];
    for (; i < count; i++) sum += x[i] * x[i];
    float by = 1.0f / sqrtf(sum / (float)count + eps);
    for (i = 0; i < count; i++) y[i] = x[i] * by * weight[i];
}

static void norm_rows(const float *x, const float *weight, float *y, size_t rows, size_t width, float eps) {
#pragma omp for schedule(static)
    for (size_t r = 0; r < rows; r++) norm(x + r * width, weight, y + r * width, width, eps);
}

/* room: for `draftsmith_room`. */
static void times(
    const struct matrix *m, const float *x, const float *other, float *y, size_t rows, size_t inputs, uint16_t *room) {
    for (size_t r = 0; r < rows; r += MOST_ROWS) {
        size_t count = rows - r < MOST_ROWS ? rows - r : MOST_ROWS;
        struct product p = {
            .x = x + r * inputs,
            .packed = m->values,
            .bias = m->bias,
            .other = other ? other + r * m->outputs : NULL,
            .y = y + r * m->outputs,
            .rows = count,
            .inputs = inputs,
            .outputs = m->outputs,
            .room = room};
        draftsmith_product((int)m->kind, p);
    }
}

/* Norms of heads where the model has them, rotation by the position; keys and values go into the cache. */
static void rotate(
    const struct model *m, const struct step *s, const struct layer *layer, float *qkv, float *keys, float *values) {
    size_t size = m->size, half = size / 2, all = m->heads + 2 * m->groups;
#pragma omp for schedule(static)
    for (size_t place = 0; place < s->batch * s->queries * all; place++) {
        size_t head = place % all, query = place / all % s->queries, row = place / all / s->queries;
        float *x = qkv + place * size;
        size_t group = head < m->heads ? 0 : (head - m->heads) % m->groups;
        size_t slot = row * s->batch_stride + group * s->group_stride + (s->column + query) * size;
        if (head >= m->heads + m->groups) {
            memcpy(values + slot, x, size * sizeof(float));
            continue;
        }
        const float *weight = head < m->heads ? layer->query_norm : layer->key_norm;
        if (weight) norm(x, weight, x, size, m->eps);
        const float *turn = s->rotary + (size_t)s->positions[row * s->position_stride + query] * 2 * size;
        float *to = head < m->heads ? x : keys + slot;
        for (size_t e = 0; e < half; e++) {
            float a = x[e], b = x[e + half];
            to[e] = a * turn[e] + b * turn[size + e];
            to[e + half] = b * turn[e + half] + a * turn[size + half + e];
        }
    }
}

/* Into how many parts the queries that share keys are split: into several only where the threads would else get unequal
   shares. */
static size_t parts_of_sharing(const struct model *m, const struct step *s) {
    size_t units = s->batch * m->groups, sharing = m->heads / m->groups * s->queries, parts = 1;
    while (units * parts % (size_t)omp_get_num_threads() && parts < sharing) parts++;
    return parts;
}

/* Fetch the keys and values that `attend` begins with into the second-level cache, by the threads that read them: there
   they would wait for them, while the products before only wait for a stream of weights. */
static void fetch_cache(const struct model *m, const struct step *s, const float *keys, const float *values) {
    size_t parts = parts_of_sharing(m, s), units = s->batch * m->groups * parts;
    size_t most = FETCHED_MOST * (size_t)omp_get_num_threads() / (units * 2 * m->size * sizeof(float));
    size_t slots = s->column < FETCHED_SLOTS ? s->column : FETCHED_SLOTS;
    if (slots > most) slots = most;
#pragma omp for schedule(static) nowait
    for (size_t unit = 0; unit < units; unit++) {
        size_t group = unit / parts % m->groups, row = unit / parts / m->groups;
        size_t from = row * s->batch_stride + group * s->group_stride;
        for (size_t at = 0; at < slots * m->size; at += 64 / sizeof(float)) {
            __builtin_prefetch(keys + from + at, 0, 2);
            __builtin_prefetch(values + from + at, 0, 2);
        }
    }
}

/* softmax(q . k * scale + mask) . v. `scratch`, by thread: the block of keys, then queries, outputs and scores. */
static void attend(
    const struct model *m, const struct step *s, const struct mask *mask, const float *qkv, const float *keys,
    const float *values, float *mixed, float *scratch) {
    size_t slots = s->column + s->queries, size = m->size, ratio = m->heads / m->groups;
    size_t sharing = ratio * s->queries, parts = parts_of_sharing(m, s), stride = score_slots(s);
    float *columns = scratch + (size_t)omp_get_thread_num() * attention_floats(m, s), *queries = columns + size * PANEL;
    float *out = queries + TOGETHER * size, *scores = out + TOGETHER * size;
#pragma omp for schedule(static)
    for (size_t unit = 0; unit < s->batch * m->groups * parts; unit++) {
        size_t part = unit % parts, group = unit / parts % m->groups, row = unit / parts / m->groups;
        size_t end = sharing * (part + 1) / parts, from = row * s->batch_stride + group * s->group_stride;
        for (size_t begin = sharing * part / parts; begin < end; begin += TOGETHER) {
            const float *masks[TOGETHER];
            float top[TOGETHER], *to[TOGETHER];
            size_t count = end - begin < TOGETHER ? end - begin : TOGETHER;
            for (size_t t = 0; t < count; t++) {
                /* The heads of one query lie side by side. */
                size_t query = (begin + t) / ratio, head = group * ratio + (begin + t) % ratio;
                size_t token = row * s->queries + query;
                memcpy(queries + t * size, qkv + token * projected(m) + head * size, size * sizeof(float));
                to[t] = mixed + (token * m->heads + head) * size;
                masks[t] = mask->values ? mask->values + row * mask->batch_stride + query * mask->query_stride : NULL;
            }
            score(slots, size, m->scale, queries, masks, count, keys + from, columns, scores, stride, top);
            for (size_t t = 0; t < count; t++) top[t] = weighed(scores + t * stride, slots, top[t]);
            memset(out, 0, count * size * sizeof(float));
            for (size_t p = 0; p < slots; p += PANEL)
                mix_slots(
                    count, out, scores + p, stride, values + from + p * size, slots - p < PANEL ? slots - p : PANEL, size);
            for (size_t t = 0; t < count; t++)
                for (size_t e = 0; e < size; e++) to[t][e] = out[t * size + e] / top[t];
        }
    }
}

/* inner = silu(gate) * up; both lie side by side. */
static void gated(const float *gate_up, float *inner, size_t rows, size_t width) {
    size_t pieces = (width + 511) / 512;
#pragma omp for schedule(static)
    for (size_t piece = 0; piece < rows * pieces; piece++) {
        const float *gate = gate_up + piece / pieces * 2 * width, *up = gate + width;
        float *to = inner + piece / pieces * width;
        size_t i = piece % pieces * 512, end = i + 512 < width ? i + 512 : width;
        for (; i + LANES <= end; i += LANES)
            *(vec *)(to + i) = at(gate + i) / (exponential(-at(gate + i)) + 1.0f) * at(up + i);
        if (i < end) {
            /* The same function for what fills no vector. */
            float last[LANES] = {0};
            memcpy(last, gate + i, (end - i) * sizeof(float));
            vec value = at(last) / (exponential(-at(last)) + 1.0f);
            for (size_t k = i; k < end; k++) to[k] = value[k - i] * up[k];
        }
    }
}

static void embed(const struct model *m, const int64_t *tokens, float *x, size_t count) {
    size_t row = m->width * sizeof(float);
    if (m->embedding_packed)
        draftsmith_rows((int)m->embedding_kind, m->embedding, tokens, x, count, m->width);
    else
        for (size_t i = 0; i < count; i++) memcpy(x + i * m->width, m->embedding + (size_t)tokens[i] * row, row);
}

/* x, and in `h` what the first layer of EAGLE-3 reads. Both by the threads of the parallel region. */
static void open_head(
    const struct model *m, const struct step *s, float *x, float *h, size_t count, uint16_t *room) {
    const struct opening *o = m->opening;
    size_t width = m->width;
#pragma omp for schedule(static)
    for (size_t r = 0; r < count; r++) {
        const float *embedded = s->embedded + r * width;
        if (!o->fc.values && !o->feature_norm) {
            memcpy(x + r * width, embedded, width * sizeof(float));
            continue;
        }
        const float *feature = s->features + r * width;
        float *left = h + r * 2 * width, *right = left + width;
        if (o->fc.values) {
            memcpy(left, embedded, width * sizeof(float));
            memcpy(right, feature, width * sizeof(float));
            continue;
        }
        norm(embedded, o->embedding_norm, left, width, m->eps);
        norm(feature, o->feature_norm, right, width, m->eps);
        memcpy(x + r * width, o->feature_normed ? right : feature, width * sizeof(float));
    }
    if (o->fc.values) times(&o->fc, h, NULL, x, count, 2 * width, room);
}

/* The features are the text before a block: every layer projects the same. */
static void remember(const struct model *m, const struct step *s, float *qkv, uint16_t *room) {
#pragma omp parallel
    for (size_t i = 0; i < m->count; i++) {
        const struct layer *layer = m->layers + i;
        times(&layer->qkv, s->features, NULL, qkv, s->batch * s->queries, m->width, room);
        rotate(m, s, layer, qkv, s->keys + i * s->layer_stride, s->values + i * s->layer_stride);
    }
}

/* Sizes of the structures that structures.py has too, in its order. */
void draftsmith_sizes(size_t *sizes) {
    const size_t own[] = {
        sizeof(struct matrix), sizeof(struct layer), sizeof(struct opening), sizeof(struct model), sizeof(struct mask),
        sizeof(struct step)};
    memcpy(sizes, own, sizeof(own));
}

/* 0, or 1 for a token that the vocabulary does not have. */
int draftsmith_forward(const struct model *m, const struct step *s) {
    size_t count = s->batch * s->queries, width = m->width;
    for (size_t i = 0; i < count && !m->opening; i++)
        if (s->tokens[i] < 0 || (size_t)s->tokens[i] >= m->vocabulary) return 1;
    size_t inner = widest_gate_up(m);
    float *x = s->scratch, *h = x + count * width, *qkv = h + count * widest_input(m), *mixed = qkv + count * projected(m);
    float *gate_up = mixed + count * m->heads * m->size, *gate = gate_up + count * inner;
    float *scores = gate + count * (inner / 2), *state = s->states;
    char *rest = (char *)(scores + (size_t)omp_get_max_threads() * attention_floats(m, s));
    uint16_t *room = (uint16_t *)(rest + -(uintptr_t)rest % 64);
    if (s->remembers) {
        remember(m, s, qkv, room);
        return 0;
    }
    if (!m->opening) embed(m, s->tokens, x, count);
#pragma omp parallel firstprivate(state)
    {
        if (m->opening) open_head(m, s, x, h, count, room);
        for (size_t i = 0; i < m->count; i++) {
            const struct layer *layer = m->layers + i;
            float *keys = s->keys + i * s->layer_stride, *values = s->values + i * s->layer_stride;
            size_t half = layer->gate_up.outputs / 2;
            if (s->wanted[i]) {
#pragma omp single
                memcpy(state, x, count * width * sizeof(float));
                state += count * width;
            }
            fetch_cache(m, s, keys, values);
            int joined = i == 0 && m->opening && m->opening->embedding_norm;
            if (layer->norm) norm_rows(x, layer->norm, h, count, width, m->eps);
            times(&layer->qkv, layer->norm || joined ? h : x, NULL, qkv, count, joined ? 2 * width : width, room);
            rotate(m, s, layer, qkv, keys, values);
            attend(m, s, s->masks + layer->mask, qkv, keys, values, mixed, scores);
            times(&layer->out, mixed, x, x, count, m->heads * m->size, room);
            norm_rows(x, layer->ffn_norm, h, count, width, m->eps);
            times(&layer->gate_up, h, NULL, gate_up, count, width, room);
            gated(gate_up, gate, count, half);
            times(&layer->down, gate, x, x, count, half, room);
        }
        float *last = m->norm ? h : x;
        if (m->norm) norm_rows(x, m->norm, h, count, width, m->eps);
#pragma omp single
        {
            const float *ends[2] = {x, last};
            for (size_t i = 0; i < 2; i++)
                if (s->wanted[m->count + i]) {
                    memcpy(state, ends[i], count * width * sizeof(float));
                    state += count * width;
                }
            for (size_t row = 0; row < s->batch; row++)
                memmove(
                    last + row * s->kept * width, last + ((row + 1) * s->queries - s->kept) * width,
                    s->kept * width * sizeof(float));
        }
        if (m->head.values && s->kept) times(&m->head, last, NULL, s->logits, s->batch * s->kept, width, room);
    }
    return 0;
}
