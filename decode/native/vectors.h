/* Vectors of the processor, in GCC's types: the compiler picks the instructions of the machine it runs on. */

#ifndef DRAFTSMITH_VECTORS_H
#define DRAFTSMITH_VECTORS_H

#include <omp.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#if defined(__F16C__) || defined(__AVX2__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

/* Sums, one input of all panel columns, and a broadcast value have to fit the registers. */
#if defined(__AVX512F__)
#define LANES 16
#define VECTORS 4
#elif defined(__AVX2__)
#define LANES 8
#define VECTORS 2
#else
#define LANES 4
#define VECTORS 4
#endif
#define PANEL (LANES * VECTORS)
#define INLINE static inline __attribute__((always_inline))

typedef float vec __attribute__((vector_size(LANES * 4), aligned(4)));
typedef uint32_t words __attribute__((vector_size(LANES * 4), aligned(4)));

/* a * b + c, rounded once where the processor can. Written out: left to the compiler, it would depend on the loop
   around it whether a product is rounded before it is added, and rows would differ in their last bits. */
INLINE vec multiply_add(vec a, vec b, vec c) {
#if LANES == 16
    return (vec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif LANES == 8 && defined(__FMA__)
    return (vec)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
    return (vec)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
    return a * b + c;
#endif
}

typedef double doubles __attribute__((vector_size(LANES * 8)));

INLINE vec at(const float *place) { return *(const vec *)place; }

#if LANES == 16
/* The lanes of a vector that `left` more values fill. */
INLINE __mmask16 filled(size_t left) { return left < LANES ? (__mmask16)((1u << left) - 1) : 0xFFFF; }
#endif

#endif
