/* The product of linear.c with weights in bf16 by the tile registers of newer processors (Intel's AMX), each instruction
   of which multiplies 16 rows with 16 outputs. Up to five rows fill one tile, and cost what one row costs.

   Tiles multiply bf16 numbers exactly and add in fp32. An fp32 number is the sum of three bf16 numbers, its first,
   second and third eight bits, so each row of x becomes SPLITS rows of bf16, and nothing of x is lost. A sum is one of
   fp32 in an order that depends on the inputs only: a row has the same bits in any company. Tiles take numbers below
   2^-126 for zero.

   A packed panel has GROUP inputs after GROUP inputs; of two inputs, the values lie side by side for each of the PANEL
   outputs. Surplus inputs are zero. */

#include "tiles.h"

#define MOST_TILES (SPLITS * MOST_ROWS / TILE_ROWS)

#if defined(__AMX_BF16__) && defined(__AMX_TILE__) && LANES == 16 && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>

#define RESIDENT 32 /* groups of a panel that stay in the second-level cache for all rows */
#define FETCHED 128 /* bytes of two lines, which memory gives together */
#define NEAR 8192   /* bytes from what is multiplied to what is fetched for it alone */
#define GROUP_BYTES ((size_t)(GROUP * PANEL * 2))
#define PAIR_BYTES ((size_t)(2 * PANEL * 2))
#define SUMS_STRIDE (PANEL * sizeof(float))

/* The compiler does not know what tile instructions read and write: here, what is behind `place` is in memory. */
#define IN_MEMORY(place) __asm__ volatile("" : : "r"(place) : "memory")

/* Whether this process may use the tile registers, which the system grants on request. */
int draftsmith_tiles(void) {
    const long request = 0x1023, tile_data = 18; /* ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA */
    return syscall(SYS_arch_prctl, request, tile_data) == 0;
}

struct tile_config {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
} __attribute__((aligned(64)));

static const struct tile_config EIGHT_TILES = {
    .palette = 1, .row_bytes = {64, 64, 64, 64, 64, 64, 64, 64}, .rows = {16, 16, 16, 16, 16, 16, 16, 16}};

/* 16 values in bf16, of numbers that it holds. */
INLINE __m256i halved(__m512 x) { return _mm512_cvtepi32_epi16(_mm512_srli_epi32(_mm512_castps_si512(x), 16)); }

/* Rows 3r, 3r + 1 and 3r + 2 of the tiles: row r of x cut after its first, and its second eight bits. */
static void split_rows(const float *x, size_t rows, size_t inputs, uint16_t *split) {
    const __m512 first = _mm512_castsi512_ps(_mm512_set1_epi32((int)0xFFFF0000));
    size_t groups = group_count(inputs);
#pragma omp for schedule(static)
    for (size_t r = 0; r < rows; r++) {
        uint16_t *to[SPLITS];
        for (size_t s = 0; s < SPLITS; s++) {
            size_t row = SPLITS * r + s;
            to[s] = split + row / TILE_ROWS * groups * TILE_VALUES + row % TILE_ROWS * GROUP;
        }
        for (size_t i = 0; i < groups * GROUP; i += LANES) {
            __m512 value = _mm512_maskz_loadu_ps(filled(i < inputs ? inputs - i : 0), x + r * inputs + i);
            __m512 high = _mm512_and_ps(value, first);
            /* What is infinite or no number stays so, also without its last bits, and leaves nothing over. */
            __mmask16 finite = _mm512_cmp_ps_mask(_mm512_sub_ps(value, value), _mm512_setzero_ps(), _CMP_EQ_OQ);
            high = _mm512_mask_mov_ps(_mm512_add_ps(value, value), finite, high);
            __m512 rest = _mm512_maskz_sub_ps(finite, value, high);
            __m512 middle = _mm512_and_ps(rest, first);
            size_t place = i / GROUP * TILE_VALUES + i % GROUP;
            _mm256_storeu_si256((__m256i *)(to[0] + place), halved(high));
            _mm256_storeu_si256((__m256i *)(to[1] + place), halved(middle));
            _mm256_storeu_si256((__m256i *)(to[2] + place), halved(_mm512_sub_ps(rest, middle)));
        }
    }
}

/* What is fetched while something else is multiplied: `share` bytes after each product of two tiles, up to `end`. A core
   waits for a few lines at a time, so many fetched at once would delay the products behind them. `near`: into the
   first-level cache, else the second. */
struct fetches {
    const char *from, *end;
    size_t share;
    int near;
};

INLINE void fetch_share(struct fetches *f) {
    const char *end = f->from + f->share < f->end ? f->from + f->share : f->end;
    for (; f->from < end; f->from += FETCHED) {
        if (f->near) {
            __builtin_prefetch(f->from, 0, 3);
            __builtin_prefetch(f->from + 64, 0, 3);
        } else {
            __builtin_prefetch(f->from, 0, 2);
            __builtin_prefetch(f->from + 64, 0, 2);
        }
    }
}

/* Add to the sums [TILE_ROWS][PANEL] of one tile of x what `groups` of inputs contribute, with all outputs of a panel.
   Registers 0 to 3 have sums, 4 has x, 5 to 7 have weights. */
INLINE void one_tile(const uint16_t *x, const char *weights, size_t groups, float *sums, struct fetches *ahead) {
    _tile_loadd(0, sums, SUMS_STRIDE);
    _tile_loadd(1, sums + LANES, SUMS_STRIDE);
    _tile_loadd(2, sums + 2 * LANES, SUMS_STRIDE);
    _tile_loadd(3, sums + 3 * LANES, SUMS_STRIDE);
    for (size_t g = 0; g < groups; g++, x += TILE_VALUES, weights += GROUP_BYTES) {
        _tile_loadd(4, x, GROUP * 2);
        _tile_loadd(5, weights, PAIR_BYTES);
        _tile_dpbf16ps(0, 4, 5);
        fetch_share(ahead);
        _tile_loadd(6, weights + 64, PAIR_BYTES);
        _tile_dpbf16ps(1, 4, 6);
        fetch_share(ahead);
        _tile_loadd(7, weights + 128, PAIR_BYTES);
        _tile_dpbf16ps(2, 4, 7);
        fetch_share(ahead);
        _tile_loadd(5, weights + 192, PAIR_BYTES);
        _tile_dpbf16ps(3, 4, 5);
        fetch_share(ahead);
    }
    _tile_stored(0, sums, SUMS_STRIDE);
    _tile_stored(1, sums + LANES, SUMS_STRIDE);
    _tile_stored(2, sums + 2 * LANES, SUMS_STRIDE);
    _tile_stored(3, sums + 3 * LANES, SUMS_STRIDE);
}

/* The same for two tiles of x, the second `x_stride` values on, with half of the outputs: each reading serves twice.
   Registers 0 to 3 have sums, 4 and 5 have x, 6 and 7 have weights. */
INLINE void two_tiles(
    const uint16_t *x, size_t x_stride, const char *weights, size_t groups, float *sums, struct fetches *ahead) {
    float *second = sums + TILE_ROWS * PANEL;
    _tile_loadd(0, sums, SUMS_STRIDE);
    _tile_loadd(1, second, SUMS_STRIDE);
    _tile_loadd(2, sums + LANES, SUMS_STRIDE);
    _tile_loadd(3, second + LANES, SUMS_STRIDE);
    for (size_t g = 0; g < groups; g++, x += TILE_VALUES, weights += GROUP_BYTES) {
        _tile_loadd(4, x, GROUP * 2);
        _tile_loadd(5, x + x_stride, GROUP * 2);
        _tile_loadd(6, weights, PAIR_BYTES);
        _tile_dpbf16ps(0, 4, 6);
        fetch_share(ahead);
        _tile_dpbf16ps(1, 5, 6);
        fetch_share(ahead);
        _tile_loadd(7, weights + 64, PAIR_BYTES);
        _tile_dpbf16ps(2, 4, 7);
        fetch_share(ahead);
        _tile_dpbf16ps(3, 5, 7);
        fetch_share(ahead);
    }
    _tile_stored(0, sums, SUMS_STRIDE);
    _tile_stored(1, second, SUMS_STRIDE);
    _tile_stored(2, sums + LANES, SUMS_STRIDE);
    _tile_stored(3, second + LANES, SUMS_STRIDE);
}

/* sums [tiles * TILE_ROWS][PANEL] of a panel. A slice of it stays in the second-level cache while several tiles of x pass
   over it; in the meantime the next slice is fetched. */
INLINE void panel_by_tiles(const char *panel, const uint16_t *split, size_t tiles, size_t groups, float *sums) {
    memset(sums, 0, tiles * TILE_ROWS * SUMS_STRIDE);
    IN_MEMORY(sums);
    for (size_t begin = 0; begin < groups; begin += RESIDENT) {
        size_t count = groups - begin < RESIDENT ? groups - begin : RESIDENT;
        size_t bytes = count * GROUP_BYTES, share = (GROUP_BYTES / 4 / FETCHED + tiles - 1) / tiles * FETCHED;
        /* One tile of x reads the weights once, and takes them soon. Behind the last panel the fetches fall on nothing,
           which is allowed. */
        const char *weights = panel + begin * GROUP_BYTES, *next = weights + (tiles == 1 ? NEAR : bytes);
        struct fetches ahead = {next, next + bytes, share, tiles == 1};
        for (size_t t = 0; t < tiles; t++) {
            /* An even tile takes the next one along for the first half of the outputs, an odd one for the second. */
            size_t first = t / 2 * 2, odd = t % 2;
            const uint16_t *x = split + (first * groups + begin) * TILE_VALUES;
            float *to = sums + first * TILE_ROWS * PANEL;
            if (first + 1 == tiles)
                one_tile(x, weights, count, to, &ahead);
            else
                two_tiles(x, groups * TILE_VALUES, weights + odd * 128, count, to + odd * 2 * LANES, &ahead);
        }
    }
    IN_MEMORY(sums);
}

/* y = the sum of a row's three parts, bias and other, which may be NULL. */
INLINE void joined(const float *parts, const float *bias, const float *other, float *y, size_t width) {
    for (size_t o = 0; o < width; o += LANES) {
        __mmask16 there = filled(width - o);
        __m512 low = _mm512_add_ps(_mm512_loadu_ps(parts + PANEL + o), _mm512_loadu_ps(parts + 2 * PANEL + o));
        __m512 sum = _mm512_add_ps(_mm512_loadu_ps(parts + o), low);
        if (bias) sum = _mm512_add_ps(sum, _mm512_maskz_loadu_ps(there, bias + o));
        if (other) sum = _mm512_add_ps(sum, _mm512_maskz_loadu_ps(there, other + o));
        _mm512_mask_storeu_ps(y + o, there, sum);
    }
}

void draftsmith_linear_by_tiles(const struct product *p) {
    size_t panels = panel_count(p->outputs), groups = group_count(p->inputs);
    float sums[MOST_TILES * TILE_ROWS * PANEL] __attribute__((aligned(64)));
    struct tile_config theirs;
    split_rows(p->x, p->rows, p->inputs, p->room);
    IN_MEMORY(p->room);
    /* Torch's own products may have configured the tiles for themselves. */
    IN_MEMORY(&theirs);
    _tile_storeconfig(&theirs);
    _tile_loadconfig(&EIGHT_TILES);
#pragma omp for schedule(static)
    for (size_t panel = 0; panel < panels; panel++) {
        size_t first = panel * PANEL, width = p->outputs - first < PANEL ? p->outputs - first : PANEL;
        panel_by_tiles(p->packed + panel * groups * GROUP_BYTES, p->room, tile_count(p->rows), groups, sums);
        for (size_t r = 0; r < p->rows; r++)
            joined(
                sums + SPLITS * r * PANEL, p->bias ? p->bias + first : NULL,
                p->other ? p->other + r * p->outputs + first : NULL, p->y + r * p->outputs + first, width);
    }
    if (theirs.palette)
        _tile_loadconfig(&theirs);
    else
        _tile_release();
}
#else
int draftsmith_tiles(void) { return 0; }

void draftsmith_linear_by_tiles(const struct product *p) {}
#endif
