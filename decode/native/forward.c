/* A forward of a language model, or of a draft head with its layer, over a few tokens behind a cache, in one call and
   one parallel region. `struct model` says what its layers consist of.

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

/* The position of a token, the rows behind each other. */
static int64_t position_of(const struct step *s, size_t token) {
    return s->positions[token / s->queries * s->position_stride + token % s->queries];
}

/* Floats that a thread needs for attention: see `attend`. */
static size_t attention_floats(const struct model *m, const struct step *s) {
    return m->size * PANEL + TOGETHER * (score_slots(s) + 2 * m->size);
}

/* Floats that a token's states need. */
static size_t token_floats(const struct model *m) {
    size_t inner = widest_gate_up(m);
    return m->width + widest_input(m) + projected(m) + m->heads * m->size + 2 * inner;
}

/* Values of room that the product with the most inputs needs. */
static size_t widest_room(const struct model *m, size_t rows) {
    size_t inputs = widest_input(m), mixed = m->heads * m->size, inner = widest_gate_up(m);
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

/* y = x / root of the mean of squares * weight, for `count` values; with a bias, of x less its mean, and plus the bias. */
INLINE void norm(const float *x, const float *weight, const float *bias, float *y, size_t count, float eps) {
    float mean = 0;
    if (bias) {
        vec sums = {0};
        size_t i = 0;
        for (; i + LANES <= count; i += LANES) sums += at(x + i);
        for (int lane = 0; lane < LANES; lane++) mean += sums[lane];
        for (; i < count; i++) mean += x[i];
        mean /= (float)count;
    }
    vec squares = {0};
    size_t i = 0;
    for (; i + LANES <= count; i += LANES) {
        vec centred = at(x + i) - mean;
        squares = multiply_add(centred, centred, squares);
    }
    float sum = 0;
    for (int lane = 0; lane < LANES; lane++) sum += squares[lane];
    for (; i < count; i++) sum += (x[i] - mean) * (x[i] - mean);
    float by = 1.0f / sqrtf(sum / (float)count + eps);
    for (i = 0; i < count; i++) y[i] = (x[i] - mean) * by * weight[i];
    for (i = 0; i < count && bias; i++) y[i] += bias[i];
}

static void norm_rows(const float *x, struct norm n, float *y, size_t rows, size_t width, float eps) {
#pragma omp for schedule(static)
    for (size_t r = 0; r < rows; r++) norm(x + r * width, n.weight, n.bias, y + r * width, width, eps);
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

/* x += a product, which the weight of an RMS norm scales first where it is not NULL; `added` has room for it. */
static void add_times(
    const struct matrix *m, const float *weight, float eps, const float *from, float *added, float *x, size_t rows,
    size_t inputs, uint16_t *room) {
    times(m, from, weight ? NULL : x, weight ? added : x, rows, inputs, room);
    if (!weight) return;
#pragma omp for schedule(static)
    for (size_t r = 0; r < rows; r++) {
        float *row = added + r * m->outputs, *to = x + r * m->outputs;
        norm(row, weight, NULL, row, m->outputs, eps);
        for (size_t i = 0; i < m->outputs; i++) to[i] += row[i];
    }
}

/* A head of a projection: of queries, keys or values. */
struct head {
    enum { QUERY, KEY, VALUE } part;
    size_t number;
};

static struct head head_at(const struct model *m, size_t place) {
    if (m->interleaved) return (struct head){place % 3, place / 3};
    if (place < m->heads) return (struct head){QUERY, place};
    size_t behind = place - m->heads;
    return (struct head){behind < m->groups ? KEY : VALUE, behind % m->groups};
}

/* Norms of heads where the model has them, rotation by the position; keys and values go into the cache. */
static void rotate(
    const struct model *m, const struct step *s, const struct layer *layer, float *qkv, float *keys, float *values) {
    size_t size = m->size, turned = m->turned, half = turned / 2, all = m->heads + 2 * m->groups;
#pragma omp for schedule(static)
    for (size_t place = 0; place < s->batch * s->queries * all; place++) {
        size_t query = place / all % s->queries, row = place / all / s->queries;
        struct head head = head_at(m, place % all);
        float *x = qkv + place * size;
        size_t slot = row * s->batch_stride + head.number * s->group_stride + (s->column + query) * size;
        if (head.part == VALUE) {
            memcpy(values + slot, x, size * sizeof(float));
            continue;
        }
        const float *weight = head.part == QUERY ? layer->query_norm : layer->key_norm;
        if (weight) norm(x, weight, NULL, x, size, m->eps);
        float *to = head.part == QUERY ? x : keys + slot;
        if (to != x) memcpy(to + turned, x + turned, (size - turned) * sizeof(float));
        size_t position = (size_t)s->positions[row * s->position_stride + query];
        const float *turn = s->kinds[layer->kind].rotary + position * 2 * turned;
        for (size_t e = 0; e < half; e++) {
            float a = x[e], b = x[e + half];
            to[e] = a * turn[e] + b * turn[turned + e];
            to[e + half] = b * turn[e + half] + a * turn[turned + half + e];
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
    const struct model *m, const struct step *s, const struct kind *kind, const float *qkv, const float *keys,
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
                const float *from_head = qkv + token * projected(m) + (m->interleaved ? 3 * head : head) * size;
                memcpy(queries + t * size, from_head, size * sizeof(float));
                to[t] = mixed + (token * m->heads + head) * size;
                masks[t] = kind->mask ? kind->mask + row * kind->batch_stride + query * kind->query_stride : NULL;
            }
            score(
                slots, size, m->scale, m->attention_cap, queries, masks, count, keys + from, columns, scores, stride, top);
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

/* inner = activation(gate) * up, where both lie side by side; without a gate, activation(up). */
static void activate(const struct model *m, const float *gate_up, float *inner, size_t rows, size_t width) {
    size_t pieces = (width + 511) / 512, apart = m->gated ? 2 * width : width;
#pragma omp for schedule(static)
    for (size_t piece = 0; piece < rows * pieces; piece++) {
        const float *gate = gate_up + piece / pieces * apart, *up = m->gated ? gate + width : NULL;
        float *to = inner + piece / pieces * width;
        size_t i = piece % pieces * 512, end = i + 512 < width ? i + 512 : width;
        for (; i + LANES <= end; i += LANES) {
            vec value = activated(m->activation, at(gate + i));
            *(vec *)(to + i) = up ? value * at(up + i) : value;
        }
        if (i < end) {
            /* The same function for what fills no vector. */
            float last[LANES] = {0};
            memcpy(last, gate + i, (end - i) * sizeof(float));
            vec value = activated(m->activation, at(last));
            for (size_t k = i; k < end; k++) to[k] = up ? value[k - i] * up[k] : value[k - i];
        }
    }
}

/* x = cap * tanh(x / cap) */
static void cap_logits(float *x, size_t count, float cap) {
#pragma omp for schedule(static)
    for (size_t i = 0; i < count / LANES * LANES; i += LANES) *(vec *)(x + i) = capped(at(x + i), cap);
#pragma omp single
    {
        float last[LANES] = {0};
        size_t rest = count % LANES;
        memcpy(last, x + count - rest, rest * sizeof(float));
        vec value = capped(at(last), cap);
        memcpy(x + count - rest, &value, rest * sizeof(float));
    }
}

static void embed(const struct model *m, const struct step *s, float *x) {
    size_t width = m->width, count = s->batch * s->queries;
    if (m->embedding_packed)
        draftsmith_rows((int)m->embedding_kind, m->embedding, s->tokens, x, count, width);
    else
        for (size_t i = 0; i < count; i++)
            memcpy(x + i * width, (const float *)m->embedding + (size_t)s->tokens[i] * width, width * sizeof(float));
    for (size_t i = 0; i < count * width; i++) x[i] *= m->embedding_scale;
    for (size_t i = 0; i < count && m->places; i++) {
        const float *place = m->places + (size_t)position_of(s, i) * width;
        for (size_t e = 0; e < width; e++) x[i * width + e] += place[e];
    }
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
        norm(embedded, o->embedding_norm, NULL, left, width, m->eps);
        norm(feature, o->feature_norm, NULL, right, width, m->eps);
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
        sizeof(struct matrix), sizeof(struct norm), sizeof(struct layer), sizeof(struct opening), sizeof(struct model),
        sizeof(struct kind), sizeof(struct step)};
    memcpy(sizes, own, sizeof(own));
}

/* Whether the model has an embedding for each token, and all that it needs of each position. */
static int embeds(const struct model *m, const struct step *s) {
    for (size_t i = 0; i < s->batch * s->queries; i++) {
        size_t position = (size_t)position_of(s, i);
        for (size_t k = 0; k < 2 && m->turned; k++)
            if (s->kinds[k].rotary && position >= s->kinds[k].rotary_count) return 0;
        if (m->opening) continue;
        if (s->tokens[i] < 0 || (size_t)s->tokens[i] >= m->vocabulary) return 0;
        if (m->places && position >= m->place_count) return 0;
    }
    return 1;
}

/* 0, or 1 for a token or position that has no embedding. */
int draftsmith_forward(const struct model *m, const struct step *s) {
    if (!embeds(m, s)) return 1;
    size_t count = s->batch * s->queries, width = m->width;
    size_t inner = widest_gate_up(m);
    float *x = s->scratch, *h = x + count * width, *qkv = h + count * widest_input(m), *mixed = qkv + count * projected(m);
    float *gate_up = mixed + count * m->heads * m->size, *gate = gate_up + count * inner;
    float *scores = gate + count * inner, *state = s->states;
    char *rest = (char *)(scores + (size_t)omp_get_max_threads() * attention_floats(m, s));
    uint16_t *room = (uint16_t *)(rest + -(uintptr_t)rest % 64);
    if (s->remembers) {
        remember(m, s, qkv, room);
        return 0;
    }
    if (!m->opening) embed(m, s, x);
#pragma omp parallel firstprivate(state)
    {
        if (m->opening) open_head(m, s, x, h, count, room);
        for (size_t i = 0; i < m->count; i++) {
            const struct layer *layer = m->layers + i;
            float *keys = s->keys + i * s->layer_stride, *values = s->values + i * s->layer_stride;
            size_t inner_width = m->gated ? layer->gate_up.outputs / 2 : layer->gate_up.outputs;
            if (s->wanted[i]) {
#pragma omp single
                memcpy(state, x, count * width * sizeof(float));
                state += count * width;
            }
            fetch_cache(m, s, keys, values);
            int joined = i == 0 && m->opening && m->opening->embedding_norm;
            int normed = layer->norm.weight != NULL;
            if (normed) norm_rows(x, layer->norm, h, count, width, m->eps);
            times(&layer->qkv, normed || joined ? h : x, NULL, qkv, count, joined ? 2 * width : width, room);
            rotate(m, s, layer, qkv, keys, values);
            attend(m, s, s->kinds + layer->kind, qkv, keys, values, mixed, scores);
            if (m->parallel) norm_rows(x, layer->ffn_norm, h, count, width, m->eps);
            add_times(&layer->out, layer->out_norm, m->eps, mixed, h, x, count, m->heads * m->size, room);
            if (!m->parallel) norm_rows(x, layer->ffn_norm, h, count, width, m->eps);
            times(&layer->gate_up, h, NULL, gate_up, count, width, room);
            activate(m, gate_up, gate, count, inner_width);
            add_times(&layer->down, layer->down_norm, m->eps, gate, h, x, count, inner_width, room);
        }
        float *last = m->norm.weight ? h : x;
        if (m->norm.weight) norm_rows(x, m->norm, h, count, width, m->eps);
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
        size_t kept = s->batch * s->kept;
        if (m->head.values && kept) times(&m->head, last, NULL, s->logits, kept, width, room);
        if (m->logit_cap > 0) cap_logits(s->logits, kept * m->head.outputs, m->logit_cap);
    }
    return 0;
}
