// What stands between two matrix products in training in bf16 on a CPU: one pass over memory each. `pieces.py` documents the
// formulas, builds this file and calls it. bf16 is held in 16-bit words; all sums are float32 (of losses: float64). Rows are divided
// over threads in equal shares, so that a result depends on the number of threads at most, never on their speed.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

typedef uint16_t half;
typedef int64_t num;

static inline float bits(uint32_t x) { float y; std::memcpy(&y, &x, 4); return y; }
static inline uint32_t word(float x) { uint32_t y; std::memcpy(&y, &x, 4); return y; }
static inline float wide(half x) { return bits((uint32_t)x << 16); }

// To the nearest, ties to even; what is not a number stays so.
static inline half narrow(float x) {
    uint32_t u = word(x), rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
    return (half)((u & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : rounded);
}

// e^x with a relative error below 2e-7: 2^n times a polynomial of what is left (the coefficients are those of Cephes' expf). Zero below -88,
// infinite above 88.7; what is not a number stays so.
static inline float exponential(float x) {
    const float shift = 12582912.0f;  // 1.5 * 2^23: adding it rounds to a whole number
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

#define ROWS _Pragma("omp parallel for schedule(static) num_threads(threads)")
#define LANES _Pragma("omp simd")

extern "C" {

// x (n, d) -> whole = x * scale in bf16, scale (n,) = 1 / sqrt(mean(x^2) + eps)
void unit(const float *x, half *whole, float *scale, num n, num d, float eps, int threads) {
    ROWS for (num i = 0; i < n; i++) {
        const float *row = x + i * d;
        half *to = whole + i * d;
        float sum = 0;
        #pragma omp simd reduction(+ : sum)
        for (num j = 0; j < d; j++) sum += row[j] * row[j];
        float s = 1.0f / std::sqrt(sum / (float)d + eps);
        scale[i] = s;
        LANES for (num j = 0; j < d; j++) to[j] = narrow(row[j] * s);
    }
}

void unit_back(const half *grad, const half *whole, const float *scale, float *result, num n, num d, int threads) {
    ROWS for (num i = 0; i < n; i++) {
        const half *g = grad + i * d, *w = whole + i * d;
        float *to = result + i * d, sum = 0, s = scale[i];
        #pragma omp simd reduction(+ : sum)
        for (num j = 0; j < d; j++) sum += wide(g[j]) * wide(w[j]);
        sum /= (float)d;
        LANES for (num j = 0; j < d; j++) to[j] = (wide(g[j]) - wide(w[j]) * sum) * s;
    }
}

// The first m heads of x (n, all, 2h) times weights (m, 2h), normed before where `normed`, turned by cos, sin (n, h).
void heads(const half *x, const float *weights, const float *cos, const float *sin, half *turned, float *scale, num n, num all,
           num m, num h, float eps, int normed, int threads) {
    ROWS for (num i = 0; i < n; i++) {
        const float *c = cos + i * h, *s = sin + i * h;
        for (num k = 0; k < m; k++) {
            const half *a = x + (i * all + k) * 2 * h, *b = a + h;
            const float *u = weights + k * 2 * h, *v = u + h;
            half *left = turned + (i * m + k) * 2 * h, *right = left + h;
            float inverse = 1.0f;
            if (normed) {
                float sum = 0;
                #pragma omp simd reduction(+ : sum)
                for (num j = 0; j < 2 * h; j++) sum += wide(a[j]) * wide(a[j]);
                inverse = 1.0f / std::sqrt(sum / (float)(2 * h) + eps);
            }
            scale[i * m + k] = inverse;
            LANES for (num j = 0; j < h; j++) {
                float first = wide(a[j]) * inverse * u[j], second = wide(b[j]) * inverse * v[j];
                left[j] = narrow(first * c[j] - second * s[j]);
                right[j] = narrow(second * c[j] + first * s[j]);
            }
        }
    }
}

// Back again: of grad (n, all, 2h) the first m heads are turned back, the others only rounded. of_weights (threads, m, 2h): partial sums.
void heads_back(const float *grad, const half *x, const float *scale, const float *weights, const float *cos, const float *sin,
                half *result, float *of_weights, num n, num all, num m, num h, int normed, int threads) {
    std::memset(of_weights, 0, sizeof(float) * threads * m * 2 * h);
    ROWS for (int part = 0; part < threads; part++) {
        float *sums = of_weights + part * m * 2 * h;
        std::vector<float> room(2 * h);
        float *back = room.data();
        for (num i = n * part / threads; i < n * (part + 1) / threads; i++) {
            const float *c = cos + i * h, *s = sin + i * h;
            for (num k = 0; k < m; k++) {
                const float *a = grad + (i * all + k) * 2 * h, *b = a + h, *w = weights + k * 2 * h;
                const half *from = x + (i * all + k) * 2 * h;
                half *to = result + (i * all + k) * 2 * h;
                float *total = sums + k * 2 * h, inverse = scale[i * m + k], along = 0;
                LANES for (num j = 0; j < h; j++) {
                    back[j] = a[j] * c[j] + b[j] * s[j];
                    back[h + j] = b[j] * c[j] - a[j] * s[j];
                }
                #pragma omp simd reduction(+ : along)
                for (num j = 0; j < 2 * h; j++) {
                    float whole = wide(from[j]) * inverse, product = back[j] * whole;
                    total[j] += product;
                    along += product * w[j];
                }
                along = normed ? along / (float)(2 * h) : 0.0f;
                float outer = normed ? inverse : 1.0f;
                LANES for (num j = 0; j < 2 * h; j++)
                    to[j] = narrow((back[j] * w[j] - wide(from[j]) * inverse * along) * outer);
            }
            const float *a = grad + (i * all + m) * 2 * h;
            half *to = result + (i * all + m) * 2 * h;
            LANES for (num j = 0; j < (all - m) * 2 * h; j++) to[j] = narrow(a[j]);
        }
    }
}

// silu(g) * u of x (n, 2f) = (g, u) side by side
void gated(const half *x, half *result, num n, num f, int threads) {
    ROWS for (num i = 0; i < n; i++) {
        const half *gate = x + i * 2 * f, *up = gate + f;
        half *to = result + i * f;
        LANES for (num j = 0; j < f; j++) {
            float g = wide(gate[j]);
            to[j] = narrow(g * sigmoid(g) * wide(up[j]));
        }
    }
}

void gated_back(const half *grad, const half *x, half *result, num n, num f, int threads) {
    ROWS for (num i = 0; i < n; i++) {
        const half *gate = x + i * 2 * f, *up = gate + f, *above = grad + i * f;
        half *left = result + i * 2 * f, *right = left + f;
        LANES for (num j = 0; j < f; j++) {
            float g = wide(gate[j]), share = sigmoid(g), silu = g * share, of = wide(above[j]);
            left[j] = narrow((share + silu * (1.0f - share)) * wide(up[j]) * of);
            right[j] = narrow(silu * of);
        }
    }
}

// In the place of logits (n, v): e = exp(z - max z); their sums (n,); losses (n,) = log s + max z - z_t. Rows from `real` on: 0, 1, 0.
void exponentials(half *logits, const num *targets, float *sums, double *losses, num n, num v, num real, int threads) {
    ROWS for (num i = 0; i < n; i++) {
        half *row = logits + i * v;
        if (i >= real) {
            std::memset(row, 0, sizeof(half) * v);
            sums[i] = 1.0f;
            losses[i] = 0.0;
            continue;
        }
        float most = -INFINITY, sum = 0, aimed = wide(row[targets[i]]);
        #pragma omp simd reduction(max : most)
        for (num j = 0; j < v; j++) {
            float z = wide(row[j]);
            most = most > z ? most : z;  // std::max hinders vectors
        }
        #pragma omp simd reduction(+ : sum)
        for (num j = 0; j < v; j++) {
            float e = exponential(wide(row[j]) - most);
            sum += e;
            row[j] = narrow(e);
        }
        sums[i] = sum;
        losses[i] = std::log((double)sum) + (double)most - (double)aimed;
    }
}

// In the place of logits (n, v): p = softmax(z / temperature); norms (n,) = log sum exp(z / temperature); entropies (n,) of p.
void softmax(half *logits, float *norms, float *entropies, num n, num v, float temperature, int threads) {
    float inverse = 1.0f / temperature;
    ROWS for (num i = 0; i < n; i++) {
        half *row = logits + i * v;
        std::vector<float> room(v);
        float *e = room.data(), most = -INFINITY, sum = 0, along = 0;
        #pragma omp simd reduction(max : most)
        for (num j = 0; j < v; j++) {
            float z = wide(row[j]);
            most = most > z ? most : z;
        }
        #pragma omp simd reduction(+ : sum, along)
        for (num j = 0; j < v; j++) {
            float z = (wide(row[j]) - most) * inverse;
            e[j] = exponential(z);
            sum += e[j];
            along += e[j] * z;
        }
        float share = 1.0f / sum, logarithm = std::log(sum);
        norms[i] = logarithm + most * inverse;
        entropies[i] = logarithm - along * share;
        LANES for (num j = 0; j < v; j++) row[j] = narrow(e[j] * share);
    }
}

// In the place of scores (batch, kv, tile, group, s): softmax(scores + mask), the mask (batch, tile, c) of the last c keys.
void probabilities(half *scores, const half *mask, num batch, num kv, num tile, num group, num s, num c, int threads) {
    ROWS for (num i = 0; i < batch * kv * tile; i++) {
        const half *hides = mask + (i / (kv * tile) * tile + i % tile) * c;
        std::vector<float> room(s);
        float *e = room.data();
        for (num k = 0; k < group; k++) {
            half *row = scores + (i * group + k) * s;
            float most = -INFINITY, sum = 0;
            LANES for (num j = 0; j < s; j++) e[j] = wide(row[j]);
            LANES for (num j = 0; j < c; j++) e[s - c + j] += wide(hides[j]);
            #pragma omp simd reduction(max : most)
            for (num j = 0; j < s; j++) most = most > e[j] ? most : e[j];
            #pragma omp simd reduction(+ : sum)
            for (num j = 0; j < s; j++) {
                e[j] = exponential(e[j] - most);
                sum += e[j];
            }
            float inverse = 1.0f / sum;
            LANES for (num j = 0; j < s; j++) row[j] = narrow(e[j] * inverse);
        }
    }
}

// total[index] += rows (m, w); a row of the total belongs to one thread
void add_rows(float *total, const num *index, const half *rows, num m, num w, int threads) {
    ROWS for (int share = 0; share < threads; share++)
        for (num i = 0; i < m; i++) {
            if (index[i] % threads != share) continue;
            float *to = total + index[i] * w;
            const half *from = rows + i * w;
            LANES for (num j = 0; j < w; j++) to[j] += wide(from[j]);
        }
}

// matrix (f, d) times weight (d,), in bf16
void fold(const float *matrix, const float *weight, half *result, num f, num d, int threads) {
    ROWS for (num i = 0; i < f; i++)
        LANES for (num j = 0; j < d; j++) result[i * d + j] = narrow(matrix[i * d + j] * weight[j]);
}

// Back: from the gradient of the product, part (f, d), to those of matrix (f, d) and weight: partial sums (threads, d).
void unfold(const half *part, const float *matrix, const float *weight, float *of_matrix, float *of_weight, num f, num d, int threads) {
    std::memset(of_weight, 0, sizeof(float) * threads * d);
    ROWS for (int share = 0; share < threads; share++) {
        float *sums = of_weight + share * d;
        for (num i = f * share / threads; i < f * (share + 1) / threads; i++) {
            const half *from = part + i * d;
            LANES for (num j = 0; j < d; j++) {
                float g = wide(from[j]);
                sums[j] += g * matrix[i * d + j];
                of_matrix[i * d + j] = g * weight[j];
            }
        }
    }
}

}  // extern "C"
