// The operations between two matrix products in bf16 on a CPU, in training and in decoding: one pass over memory each. `primitives.py` and
// `decoding.py` document the formulas; `native.py` builds this file. bf16 is stored in 16-bit words; all sums are float32 (float64 for losses). Rows
// are divided among threads in equal shares, so a result may depend on the number of threads, but never on their speed.

#include "lanes.hpp"

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

// The first m heads of x (n, all, 2h) times weights (m, 2h), normed first if `normed`, rotated by cos, sin (n, h).
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

// Backward: the first m heads of grad (n, all, 2h) are rotated back, the others only rounded. of_weights (threads, m, 2h): partial sums.
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

// Overwrites logits z (n, v) with e = exp(z - max z); sums (n,) of e; losses (n,) = log s + max z - z_t. Rows from `real` on get 0, 1, 0.
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
            most = most > z ? most : z;  // std::max prevents vectorization
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

// Overwrites logits z (n, v) with p = softmax(z / temperature); norms (n,) = log sum exp(z / temperature); entropies (n,) of p.
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

// Overwrites scores (batch, kv, tile, group, s) with softmax(scores + mask); the mask (batch, tile, c) applies to the last c keys.
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

// total[index] += rows (m, w); each row of the total is updated by a single thread
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

// Backward: the gradients of matrix (f, d) and of weight, as partial sums (threads, d), from the gradient of the product, part (f, d).
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

// -- decoding ----------------------------------------------------------------------------------------------------------

// Adds y, if given, to the residual stream x (n, d); whole = x / rms(x).
void add_unit(float *x, const half *y, half *whole, num n, num d, float eps, int threads) {
    ROWS for (num i = 0; i < n; i++) {
        float *row = x + i * d, sum = 0;
        half *to = whole + i * d;
        if (y) {
            const half *more = y + i * d;
            LANES for (num j = 0; j < d; j++) row[j] += wide(more[j]);
        }
        #pragma omp simd reduction(+ : sum)
        for (num j = 0; j < d; j++) sum += row[j] * row[j];
        float s = 1.0f / std::sqrt(sum / (float)d + eps);
        LANES for (num j = 0; j < d; j++) to[j] = narrow(row[j] * s);
    }
}

// Heads x (n, m + 2k, 2h) of one new token per row: m queries -> q (n, m, 2h) in float32; k keys -> keys (rows, k, 2h, s), k values ->
// values (rows, k, s, 2h), at columns[i] of rows[i]. Queries and keys are normed if `normed`, multiplied by weights (m + k, 2h),
// and rotated by row positions[i] of cos, sin (., h).
void decode_heads(const half *x, const float *weights, const float *cos, const float *sin, const num *positions, const num *rows,
                  const num *columns, float *q, half *keys, half *values, num n, num m, num k, num h, num s, float eps, int normed,
                  int threads) {
    ROWS for (num i = 0; i < n; i++) {
        const float *c = cos + positions[i] * h, *t = sin + positions[i] * h;
        std::vector<float> room(2 * h);
        float *turned = room.data();
        for (num j = 0; j < m + k; j++) {
            const half *a = x + (i * (m + 2 * k) + j) * 2 * h, *b = a + h;
            const float *u = weights + j * 2 * h, *v = u + h;
            float inverse = 1.0f;
            if (normed) {
                float sum = 0;
                #pragma omp simd reduction(+ : sum)
                for (num e = 0; e < 2 * h; e++) sum += wide(a[e]) * wide(a[e]);
                inverse = 1.0f / std::sqrt(sum / (float)(2 * h) + eps);
            }
            float *to = j < m ? q + (i * m + j) * 2 * h : turned;
            LANES for (num e = 0; e < h; e++) {
                float first = wide(a[e]) * inverse * u[e], second = wide(b[e]) * inverse * v[e];
                to[e] = first * c[e] - second * t[e];
                to[h + e] = second * c[e] + first * t[e];
            }
            if (j < m) continue;
            half *key = keys + (rows[i] * k + j - m) * 2 * h * s + columns[i];
            for (num e = 0; e < 2 * h; e++) key[e * s] = narrow(turned[e]);
        }
        for (num j = 0; j < k; j++)
            std::memcpy(values + ((rows[i] * k + j) * s + columns[i]) * 2 * h, x + (i * (m + 2 * k) + m + k + j) * 2 * h, 4 * h);
    }
}

}  // extern "C"

// scores (G, room) of G queries (G, d) and the first `length` keys (d, s); s is a multiple of 32
template <int G> static inline void scores_of(const float *q, const half *keys, num d, num s, num length, float *scores, num room) {
    for (num t = 0; t < length; t += 2 * LANE) {
        lanes left[G] = {}, right[G] = {};
        for (num e = 0; e < d; e++) {
            lanes first = load(keys + e * s + t), second = load(keys + e * s + t + LANE);
            for (int g = 0; g < G; g++) {
                left[g] += first * q[g * d + e];
                right[g] += second * q[g * d + e];
            }
        }
        for (int g = 0; g < G; g++) {
            store(scores + g * room + t, left[g]);
            store(scores + g * room + t + LANE, right[g]);
        }
    }
}

// out (G, d) += weights (G, room) times the first `length` values (length, d), B lanes of d at a time
template <int G, int B> static inline void gather(const float *weights, const half *values, num d, num length, float *out, num room) {
    for (num e = 0; e < d; e += B * LANE) {
        lanes sums[G][B];
        for (int g = 0; g < G; g++)
            for (int b = 0; b < B; b++) sums[g][b] = load(out + g * d + e + b * LANE);
        for (num t = 0; t < length; t++) {
            const half *value = values + t * d + e;
            lanes parts[B];
            for (int b = 0; b < B; b++) parts[b] = load(value + b * LANE);
            for (int g = 0; g < G; g++)
                for (int b = 0; b < B; b++) sums[g][b] += parts[b] * weights[g * room + t];
        }
        for (int g = 0; g < G; g++)
            for (int b = 0; b < B; b++) store(out + g * d + e + b * LANE, sums[g][b]);
    }
}

template <int G> static inline void gather_all(const float *weights, const half *values, num d, num length, float *out, num room) {
#ifdef __AVX512F__
    const int broad = G <= 4 ? 4 : 2;
#else
    const int broad = 1;  // sixteen registers of eight numbers
#endif
    if (d % (broad * LANE)) gather<G, 1>(weights, values, d, length, out, room);
    else gather<G, broad>(weights, values, d, length, out, room);
}

// Attention of one row's token: a single softmax over the keys of its prompt and its own keys; out (G, d) in bf16.
template <int G> static void attend_row(const float *q, const half *prompt_keys, const half *prompt_values, num before, num prompt_s,
                                        const half *keys, const half *values, num own, num s, num d, half *out, std::vector<float> &room) {
    num begin = (before + 31) / 32 * 32, all = begin + (own + 31) / 32 * 32;
    if ((num)room.size() < G * (all + d)) room.resize(G * (all + d));
    float *scores = room.data(), *sums = scores + G * all;
    scores_of<G>(q, prompt_keys, d, prompt_s, before, scores, all);
    scores_of<G>(q, keys, d, s, own, scores + begin, all);
    float inverse[G];
    for (int g = 0; g < G; g++) {
        float *row = scores + g * all, most = -INFINITY, sum = 0;
        for (num t = before; t < begin; t++) row[t] = -INFINITY;
        for (num t = begin + own; t < all; t++) row[t] = -INFINITY;
        #pragma omp simd reduction(max : most)
        for (num t = 0; t < all; t++) most = most > row[t] ? most : row[t];
        #pragma omp simd reduction(+ : sum)
        for (num t = 0; t < all; t++) {
            row[t] = exponential(row[t] - most);
            sum += row[t];
        }
        inverse[g] = 1.0f / sum;
    }
    std::memset(sums, 0, sizeof(float) * G * d);
    gather_all<G>(scores, prompt_values, d, before, sums, all);
    gather_all<G>(scores + begin, values, d, own, sums, all);
    for (int g = 0; g < G; g++)
        LANES for (num e = 0; e < d; e++) out[g * d + e] = narrow(sums[g * d + e] * inverse[g]);
}

extern "C" {

// Attention of q (n, k * group, d) to before[i] tokens in row prompts[i] of prompt_keys (., k, d, prompt_s) and prompt_values, then own[i]
// tokens in row rows[i] of keys (., k, d, s) and values (., k, s, d). out (n, k * group, d) in bf16. d is a multiple of 16.
void decode_attention(const float *q, const half *keys, const half *values, const half *prompt_keys, const half *prompt_values,
                      const num *rows, const num *own, const num *prompts, const num *before, half *out, num n, num k, num group, num d,
                      num s, num prompt_s, int threads) {
    #pragma omp parallel num_threads(threads)
    {
        std::vector<float> room;
        #pragma omp for schedule(static)
        for (num j = 0; j < n * k; j++) {
            num i = j / k, head = j % k, first = (prompts[i] * k + head) * d * prompt_s, mine = (rows[i] * k + head) * d * s;
#define GROUP(G) case G: attend_row<G>(q + j * G * d, prompt_keys + first, prompt_values + first, before[i], prompt_s, keys + mine, \
                                       values + mine, own[i], s, d, out + j * G * d, room); break;
            switch (group) { GROUP(1) GROUP(2) GROUP(3) GROUP(4) GROUP(5) GROUP(6) GROUP(7) GROUP(8) }
#undef GROUP
        }
    }
}

}  // extern "C"

// -- the next token ----------------------------------------------------------------------------------------------------

static inline float number(const half *z, num j) { return wide(z[j]); }
static inline float number(const float *z, num j) { return z[j]; }

static inline float block_sum(const float *weights, num begin, num v, float floor) {  // the sum of a block of 64 weights, without those below floor
    num end = begin + 64 < v ? begin + 64 : v;
    float sum = 0;
    #pragma omp simd reduction(+ : sum)
    for (num j = begin; j < end; j++) sum += weights[j] >= floor ? weights[j] : 0.0f;
    return sum;
}

static double sum_from(const float *weights, num v, float floor) {
    double total = 0;
    for (num begin = 0; begin < v; begin += 64) total += block_sum(weights, begin, v, floor);
    return total;
}

// The smallest weight among the fewest most likely tokens whose weights sum to at least `target`. Bisects over float bits, which are
// monotonic, until only a few tokens are left in between; only those are sorted.
static float nucleus_floor(const float *weights, num v, float least, double target, std::vector<float> &few) {
    uint32_t low = word(least), high = word(1.0f) + 1;  // sum(>= low) >= target > sum(>= high)
    for (int halving = 0; halving < 14 && high - low > 1; halving++) {
        uint32_t middle = low + (high - low) / 2;
        if (sum_from(weights, v, bits(middle)) >= target) low = middle;
        else high = middle;
    }
    few.clear();
    for (num j = 0; j < v; j++)
        if (weights[j] >= bits(low) && weights[j] < bits(high)) few.push_back(weights[j]);
    std::sort(few.begin(), few.end(), std::greater<float>());
    double above = sum_from(weights, v, bits(high));
    float floor = bits(low);
    for (float weight : few) {
        above += floor = weight;
        if (above >= target) break;
    }
    return floor;
}

template <typename T> static void choose_row(const T *z, num v, double share, float temperature, float top_p, num top_k, num *token,
                                             double *logprob, std::vector<float> &room, std::vector<float> &few) {
    float *weights = room.data(), most = -INFINITY;
    #pragma omp simd reduction(max : most)
    for (num j = 0; j < v; j++) most = most > number(z, j) ? most : number(z, j);
    if (temperature == 0.0f) {
        LANES for (num j = 0; j < v; j++) weights[j] = exponential(number(z, j) - most);
        num best = 0;
        while (best < v - 1 && number(z, best) != most) best++;
        *token = best;
        *logprob = -std::log(sum_from(weights, v, 0.0f));
        return;
    }
    LANES for (num j = 0; j < v; j++) weights[j] = exponential((number(z, j) - most) / temperature);
    double total = sum_from(weights, v, 0.0f), kept = total;
    float floor = 0.0f;
    if (0 < top_k && top_k < v) {
        few.assign(weights, weights + v);
        std::nth_element(few.begin(), few.begin() + top_k - 1, few.end(), std::greater<float>());
        floor = few[top_k - 1];
        kept = sum_from(weights, v, floor);
    }
    if (top_p < 1.0f) {
        floor = nucleus_floor(weights, v, floor, (double)top_p * kept, few);
        kept = sum_from(weights, v, floor);
    }
    double target = share * kept, before = 0;
    num chosen = 0;  // its block: the first where the running sum exceeds the target; if rounding leaves none, the last with nonzero weights
    double until = 0;
    for (num begin = 0; begin < v; begin += 64) {
        float sum = block_sum(weights, begin, v, floor);
        if (sum == 0.0f) continue;
        chosen = begin, before = until, until += sum;
        if (until > target) break;
    }
    num last = chosen;
    for (num j = chosen; j < v && j < chosen + 64; j++) {
        if (weights[j] < floor || weights[j] == 0.0f) continue;
        last = j, before += weights[j];
        if (before > target) break;
    }
    *token = last;
    *logprob = ((double)number(z, last) - (double)most) / (double)temperature - std::log(total);
}

template <typename T> static void choose_rows(const T *z, const double *shares, num *tokens, double *logprobs, num n, num v,
                                              float temperature, float top_p, num top_k, int threads) {
    #pragma omp parallel num_threads(threads)
    {
        std::vector<float> room(v), few;
        #pragma omp for schedule(static)
        for (num i = 0; i < n; i++)
            choose_row(z + i * v, v, shares ? shares[i] : 0.0, temperature, top_p, top_k, tokens + i, logprobs + i, room, few);
    }
}

extern "C" {

// Tokens (n,) and their log-probabilities from logits z (n, v); see `choose` in generation/sampling.py.
void choose_bf16(const half *z, const double *shares, num *tokens, double *logprobs, num n, num v, float temperature, float top_p,
                 num top_k, int threads) {
    choose_rows(z, shares, tokens, logprobs, n, v, temperature, top_p, top_k, threads);
}

void choose_fp32(const float *z, const double *shares, num *tokens, double *logprobs, num n, num v, float temperature, float top_p,
                 num top_k, int threads) {
    choose_rows(z, shares, tokens, logprobs, n, v, temperature, top_p, top_k, threads);
}

}  // extern "C"
