/* Functions of single values: exponential, activations, soft caps. */

#ifndef DRAFTSMITH_ACTIVATION_H
#define DRAFTSMITH_ACTIVATION_H

#include "vectors.h"

enum activation { SILU, GELU_TANH, GELU, RELU };

/* exp(x); 0 below what fp32 holds as a normal number. */
INLINE vec exponential(vec x) {
    words tiny = (words)(x < -87.3f), huge = (words)(x > 88.3f);
    x = (vec)(((words)x & ~huge) | ((words)((vec){0} + 88.3f) & huge));
    vec n = (x * 1.44269504f + 12582912.0f) - 12582912.0f; /* the nearest integer */
    vec r = x - n * 0.693359375f + n * 2.12194440e-4f;
    vec p = r * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    typedef int32_t ints __attribute__((vector_size(LANES * 4)));
    words power = (words)(__builtin_convertvector((vec)((words)n & ~tiny), ints) + 127) << 23;
    return (vec)((words)(p * (vec)power) & ~tiny);
}

/* x where it is above 0, else 0; NaN stays. */
INLINE vec positive(vec x) { return (vec)((words)x & ~(words)(x < 0.0f)); }

/* Half of 1 - erf(x / sqrt(2)) for x >= 0, within 1e-7 (Abramowitz and Stegun, 7.1.26). */
INLINE vec normal_tail(vec x) {
    vec t = 1.0f / (x * 0.23164189f + 1.0f);
    vec p = t * 0.53070271f - 0.72657601f;
    p = p * t + 0.71070687f;
    p = p * t - 0.14224837f;
    p = p * t + 0.12741480f;
    return p * t * exponential(x * x * -0.5f);
}

INLINE vec activated(size_t activation, vec x) {
    switch (activation) {
        case SILU: return x / (exponential(-x) + 1.0f);
        case GELU_TANH: return x / (exponential((x * x * x * 0.044715f + x) * -1.5957691f) + 1.0f);
        case GELU: {
            vec size = positive(x) + positive(-x);
            return positive(x) - size * normal_tail(size);
        }
        default: return positive(x);
    }
}

/* cap * tanh(x / cap) */
INLINE vec capped(vec x, float cap) { return cap - 2.0f * cap / (exponential(x * (2.0f / cap)) + 1.0f); }

#endif
