// Scalars and vectors in bf16 and float32, for attention.cpp and primitives.cpp.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <vector>

typedef uint16_t half;
typedef int64_t num;

static inline float bits(uint32_t x) { float y; std::memcpy(&y, &x, 4); return y; }
static inline uint32_t word(float x) { uint32_t y; std::memcpy(&y, &x, 4); return y; }
static inline float wide(half x) { return bits((uint32_t)x << 16); }

// Round to nearest, ties to even; NaN stays NaN.
static inline half narrow(float x) {
    uint32_t u = word(x), rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
    return (half)((u & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : rounded);
}

// e^x with a relative error below 2e-7: 2^n times a polynomial of the remainder (with the coefficients of Cephes' expf). Zero below -88,
// infinite above 88.7; NaN stays NaN.
static inline float exponential(float x) {
    const float shift = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
    float y = x < -88.0f ? -88.0f : (x > 89.0f ? 89.0f : x);
    float shifted = y * 1.44269504088896341f + shift, n = shifted - shift;
    float r = y - n * 0.693359375f + n * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    int32_t exponent = (int32_t)(word(shifted) - word(shift)) + 127;
    float power = bits((uint32_t)(exponent > 254 ? 255 : exponent) << 23);
    return p * power;
}

static inline float sigmoid(float x) { return 1.0f / (1.0f + exponential(-x)); }

// Vectors of sixteen numbers; the compiler splits them if registers are narrower.
typedef float lanes __attribute__((vector_size(64)));
typedef uint32_t words __attribute__((vector_size(64)));
typedef half halves __attribute__((vector_size(32)));
static const num LANE = 16;

static inline lanes load(const half *from) {
    halves x;
    std::memcpy(&x, from, sizeof x);
    words w = __builtin_convertvector(x, words) << 16;
    lanes y;
    std::memcpy(&y, &w, sizeof y);
    return y;
}

static inline lanes load(const float *from) { lanes x; std::memcpy(&x, from, sizeof x); return x; }
static inline void store(float *to, lanes x) { std::memcpy(to, &x, sizeof x); }

#define ROWS _Pragma("omp parallel for schedule(static) num_threads(threads)")
#define LANES _Pragma("omp simd")
