// Attention within documents, or a tree of them, in bf16: forward and backward passes over blocks of 32 queries and 32 keys. See `attention.py`
// for the formulas. Matrices are stored transposed, keys in rows and queries in columns, so that maxima and sums over keys need no cross-lane
// operations, and each product's left side is read in memory order:
//
//     S^T = K Q^T    P^T = exp(S^T - log sum)    O^T = V^T P^T    dP^T = V dO^T    dS^T = P^T (dP^T - rowsum(dO O))
//     dV += P^T dO   dK += dS^T Q                dQ^T = K^T dS^T
//
// Products use AMX. On processors without AMX, this file contains only `has_attention_blocks`, and attention is a few batched products in PyTorch:
// with AVX-512's bf16 instructions, blocks were slower than these. Not guaranteed: identical bits with a different number of threads.

#include "lanes.hpp"

#if defined(__AMX_BF16__) && defined(__AVX512BF16__) && defined(__linux__)
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

static const num BLOCK = 32;  // queries, keys, and the step of a product's inner dimension

// Zeroed memory aligned to a cache line.
template <class T> struct Room {
    T *at;
    explicit Room(num size) : at((T *)std::aligned_alloc(64, (size * sizeof(T) + 63) / 64 * 64)) { std::memset(at, 0, size * sizeof(T)); }
    ~Room() { std::free(at); }
    Room(const Room &) = delete;
    operator T *() const { return at; }
};

// Configures eight tiles of 16 rows of 64 bytes for its lifetime.
struct Tiles {
    Tiles() {
        alignas(64) uint8_t config[64] = {1};
        for (int tile = 0; tile < 8; tile++) config[16 + 2 * tile] = 64, config[48 + tile] = 16;
        _tile_loadconfig(config);
    }
    ~Tiles() { _tile_release(); }
};

// c (32, 32) = or += a b. Step k covers 32 of the inner dimension: columns of a from steps[k] on, (32, 32); rows of b, two per word, (16, 32).
static void multiply(const half *a, num a_stride, const num *steps, const uint32_t *b, num b_stride, float *c, num c_stride, num inner, bool add) {
    if (add) {
        _tile_loadd(0, c, c_stride * 4);
        _tile_loadd(1, c + 16, c_stride * 4);
        _tile_loadd(2, c + 16 * c_stride, c_stride * 4);
        _tile_loadd(3, c + 16 * c_stride + 16, c_stride * 4);
    } else {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    }
    for (num k = 0; k < inner; k++, b += 16 * b_stride) {
        _tile_loadd(4, a + steps[k], a_stride * 2);
        _tile_loadd(6, b, b_stride * 4);
        _tile_loadd(7, b + 16, b_stride * 4);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        _tile_loadd(5, a + steps[k] + 16 * a_stride, a_stride * 2);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, c, c_stride * 4);
    _tile_stored(1, c + 16, c_stride * 4);
    _tile_stored(2, c + 16 * c_stride, c_stride * 4);
    _tile_stored(3, c + 16 * c_stride + 16, c_stride * 4);
}

// e^x for x <= 88; the coefficients are those of `exponential`.
static inline __m512 exponential(__m512 x) {
    __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504088896341f)), 8);
    __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x);
    r = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), r);
    __m512 p = _mm512_set1_ps(1.9875691500e-4f);
    for (float c : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f})
        p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(c));
    p = _mm512_fmadd_ps(_mm512_mul_ps(p, r), r, _mm512_add_ps(r, _mm512_set1_ps(1.0f)));
    return _mm512_scalef_ps(p, n);
}

static inline __m512i rounded(__m512 x) { return _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(x)); }
// Interleave two rows of a product's right side: the first goes into the lower halves of the words.
static inline __m512i paired(__m512 first, __m512 second) { return _mm512_or_si512(rounded(first), _mm512_slli_epi32(rounded(second), 16)); }
static inline void store_half(half *to, __m512 x) { _mm256_storeu_si256((__m256i *)to, (__m256i)_mm512_cvtneps_pbh(x)); }

// Which keys the queries of each block attend to: `entries` from starts[block] to starts[block + 1], each twice the index of a key block, plus
// one if a mask applies: bit q of its word j, of 32, is set if query q attends to key j. Without a mask, all queries attend to all keys.
struct Plan {
    const num *starts, *entries;
    const uint32_t *masks;
    num count(num block) const { return starts[block + 1] - starts[block]; }
    num most(num blocks) const { num most = 0; for (num b = 0; b < blocks; b++) most = std::max(most, count(b)); return most; }
    num key(num block, num e) const { return entries[starts[block] + e] / 2 * BLOCK; }
    // The mask of an entry; null where every query attends to every key
    const uint32_t *mask(num block, num e) const { return entries[starts[block] + e] % 2 ? masks + (starts[block] + e) * BLOCK : nullptr; }
};

struct Line {
    num tokens, heads, kv_heads, size;      // H query heads share K key heads; h elements per head
    num group, blocks, padded, wide;        // H / K; number of blocks of 32 tokens; tokens and h rounded up to multiples of 32
    Line(num n, num h, num k, num d) : tokens(n), heads(h), kv_heads(k), size(d), group(h / k), blocks((n + 31) / 32), padded(blocks * 32), wide((d + 31) / 32 * 32) {}
};

// Copies a head's rows (n, h) of a line: as stored (padded, wide), and transposed (wide, padded)
static void copy_head(const half *from, num stride, const Line &line, half *rows, half *turned) {
    for (num i = 0; i < line.tokens; i++) {
        if (rows) std::memcpy(rows + i * line.wide, from + i * stride, sizeof(half) * line.size);
        if (turned) for (num d = 0; d < line.size; d++) turned[d * line.padded + i] = from[i * stride + d];
    }
}

// Packs a block's rows (count, h) as the right side of a product over h, `along` (wide / 2, 32), and of one over the rows, `across` (16, wide)
static void pack(const half *from, num stride, num count, const Line &line, uint32_t *along, uint32_t *across) {
    for (num i = 0; i < count; i++) {
        const half *row = from + i * stride;
        for (num p = 0; p < line.size / 2; p++) along[p * BLOCK + i] = row[2 * p] | (uint32_t)row[2 * p + 1] << 16;
        if (across) {
            uint32_t *pair = across + i / 2 * line.wide;
            if (i % 2) for (num d = 0; d < line.size; d++) pair[d] |= (uint32_t)row[d] << 16;
            else for (num d = 0; d < line.size; d++) pair[d] = row[d];
        }
    }
}

// Maxima and sums over keys of the scores of 32 queries
struct Extent { __m512 most[2] = {_mm512_set1_ps(-1e30f), _mm512_set1_ps(-1e30f)}, sum[2] = {_mm512_setzero_ps(), _mm512_setzero_ps()}; };

static inline __mmask16 bits_of(const uint32_t *mask, num j, num side) { return mask ? mask[j] >> (16 * side) : 0xffff; }

// Update the maxima with a block's scores (32 keys, 32 queries).
static void take_maxima(const float *scores, const uint32_t *mask, Extent &extent) {
    for (num side = 0; side < 2; side++)
        for (num j = 0; j < BLOCK; j++)
            extent.most[side] = _mm512_mask_max_ps(extent.most[side], bits_of(mask, j, side), extent.most[side], _mm512_load_ps(scores + j * BLOCK + 16 * side));
}

// exp(scores - maximum), two keys per word, (16, 32); also adds the results to the sums
static void weigh(const float *scores, const uint32_t *mask, Extent &extent, uint32_t *shares) {
    for (num side = 0; side < 2; side++)
        for (num j = 0; j < BLOCK; j += 2) {
            const float *s = scores + j * BLOCK + 16 * side;
            __m512 even = _mm512_maskz_mov_ps(bits_of(mask, j, side), exponential(_mm512_sub_ps(_mm512_load_ps(s), extent.most[side])));
            __m512 odd = _mm512_maskz_mov_ps(bits_of(mask, j + 1, side), exponential(_mm512_sub_ps(_mm512_load_ps(s + BLOCK), extent.most[side])));
            extent.sum[side] = _mm512_add_ps(extent.sum[side], _mm512_add_ps(even, odd));
            _mm512_store_si512(shares + j / 2 * BLOCK + 16 * side, paired(even, odd));
        }
}

// log sum exp of each query's scores, and 1 / sum exp(score - maximum). A padding row has no keys, so its share is zero.
static void finish(const Extent &extent, float *norms, float *inverse) {
    alignas(64) float total[BLOCK], greatest[BLOCK];
    for (num side = 0; side < 2; side++) {
        _mm512_store_ps(total + 16 * side, extent.sum[side]);
        _mm512_store_ps(greatest + 16 * side, extent.most[side]);
    }
    for (num i = 0; i < BLOCK; i++) {
        norms[i] = total[i] == 0 ? INFINITY : greatest[i] + std::log(total[i]);
        inverse[i] = total[i] == 0 ? 0 : 1 / total[i];
    }
}

// P^T = exp(S^T - norms) and dS^T = P^T (dP^T - inner) for a block of keys and a head's queries, in rows `width` apart; dS^T also with two keys per word
static void differentiate(const float *scores, const float *upper, const float *norms, const float *inner, const uint32_t *mask, half *shares,
                          half *differences, num width, uint32_t *changes) {
    for (num side = 0; side < 2; side++) {
        __m512 norm = _mm512_loadu_ps(norms + 16 * side), along = _mm512_load_ps(inner + 16 * side), before = _mm512_setzero_ps();
        for (num j = 0; j < BLOCK; j++) {
            num at = j * BLOCK + 16 * side, to = j * width + 16 * side;
            __m512 p = _mm512_maskz_mov_ps(bits_of(mask, j, side), exponential(_mm512_sub_ps(_mm512_load_ps(scores + at), norm)));
            __m512 change = _mm512_mul_ps(p, _mm512_sub_ps(_mm512_load_ps(upper + at), along));
            store_half(shares + to, p);
            store_half(differences + to, change);
            if (j % 2) _mm512_store_si512(changes + j / 2 * BLOCK + 16 * side, paired(before, change));
            before = change;
        }
    }
}

static inline float dot(const half *a, const half *b, num d) {
    float sum = 0;
    #pragma omp simd reduction(+ : sum)
    for (num c = 0; c < d; c++) sum += wide(a[c]) * wide(b[c]);
    return sum;
}

// Start offsets of the steps of a contiguous inner dimension: enough for heads up to 2,048 wide, or up to 64 query heads per key head
static const struct Steps {
    num at[64];
    Steps() { for (num k = 0; k < 64; k++) at[k] = k * BLOCK; }
} WHOLE;

extern "C" {

// Whether the kernel lets this process use the tile registers.
int has_attention_blocks() { return syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18 /* tile data */) == 0; }

// Plans a line of n tokens in which token i attends to the keys [firsts[s], lasts[s]) for each s in [offsets[i], offsets[i + 1]). Writes the number of
// entries of each block of queries to `counts` and, if given, the plan to `entries` and `masks`.
void plan_attention(const num *offsets, const num *firsts, const num *lasts, const num *starts, num *counts, num *entries, uint32_t *masks, num n, int threads) {
    num blocks = (n + BLOCK - 1) / BLOCK;
    std::vector<num> number(blocks, -1), found;
    std::vector<uint32_t> bits;
    for (num block = 0; block < blocks; block++) {
        found.clear();
        bits.clear();
        for (num i = block * BLOCK; i < std::min(n, (block + 1) * BLOCK); i++)
            for (num s = offsets[i]; s < offsets[i + 1]; s++)
                for (num key = firsts[s] / BLOCK; key * BLOCK < lasts[s]; key++) {
                    if (number[key] < 0) {
                        number[key] = found.size();
                        found.push_back(key);
                        bits.resize(bits.size() + BLOCK, 0);
                    }
                    num begin = std::max(firsts[s] - key * BLOCK, (num)0), end = std::min(lasts[s] - key * BLOCK, BLOCK);
                    for (num j = begin; j < end; j++) bits[number[key] * BLOCK + j] |= 1u << (i - block * BLOCK);
                }
        counts[block] = found.size();
        for (num key : found) number[key] = -1;
        if (!entries) continue;
        for (num e = 0; e < (num)found.size(); e++) {
            const uint32_t *mask = bits.data() + e * BLOCK;
            bool masked = std::any_of(mask, mask + BLOCK, [](uint32_t m) { return m != 0xffffffffu; });
            entries[starts[block] + e] = 2 * found[e] + masked;
            std::memcpy(masks + (starts[block] + e) * BLOCK, mask, sizeof(uint32_t) * BLOCK);
        }
    }
}

// q, k, v: rows of n tokens, q_stride etc. apart, with heads of size d side by side. out (n, H, d); sums (H, blocks * 32): log sum exp of each query's scores.
void attention_forward(const half *q, const half *k, const half *v, const num *starts, const num *entries, const uint32_t *masks, half *out, float *sums,
                       num q_stride, num k_stride, num v_stride, num n, num heads, num kv_heads, num d, int threads) {
    const Line line(n, heads, kv_heads, d);
    const num copied = line.padded * line.wide;
    Room<half> keys(kv_heads * copied), turned(kv_heads * copied);
    for (num head = 0; head < kv_heads; head++) {
        copy_head(k + head * d, k_stride, line, keys + head * copied, nullptr);
        copy_head(v + head * d, v_stride, line, nullptr, turned + head * copied);
    }
    const Plan plan{starts, entries, masks};
    const num most = plan.most(line.blocks);
    #pragma omp parallel num_threads(threads)
    {
        Tiles tiles;
        Room<float> scores(most * BLOCK * BLOCK), result(BLOCK * BLOCK), inverse(BLOCK);
        Room<uint32_t> shares(most * BLOCK / 2 * BLOCK), along(line.wide / 2 * BLOCK);
        std::vector<num> steps(most);
        #pragma omp for schedule(static)
        for (num job = 0; job < line.blocks * heads; job++) {
            num block = job / heads, head = job % heads, count = plan.count(block), begin = block * BLOCK, rows = std::min(BLOCK, n - begin);
            const half *own = keys + head / line.group * copied, *values = turned + head / line.group * copied;
            pack(q + begin * q_stride + head * d, q_stride, rows, line, along, nullptr);
            Extent extent;
            for (num e = 0; e < count; e++) {
                float *s = scores + e * BLOCK * BLOCK;
                steps[e] = plan.key(block, e);
                multiply(own + steps[e] * line.wide, line.wide, WHOLE.at, along, BLOCK, s, BLOCK, line.wide / BLOCK, false);
                take_maxima(s, plan.mask(block, e), extent);
            }
            for (num e = 0; e < count; e++)
                weigh(scores + e * BLOCK * BLOCK, plan.mask(block, e), extent, shares + e * BLOCK / 2 * BLOCK);
            finish(extent, sums + head * line.padded + begin, inverse);
            for (num column = 0; column < d; column += BLOCK) {
                multiply(values + column * line.padded, line.padded, steps.data(), shares, BLOCK, result, BLOCK, count, false);
                for (num i = 0; i < rows; i++) {
                    half *to = out + ((begin + i) * heads + head) * d + column;
                    for (num c = 0; c < std::min(BLOCK, d - column); c++) to[c] = narrow(result[c * BLOCK + i] * inverse[i]);
                }
            }
        }
    }
}

// grads (n, H + 2K, d) in float32, of queries, keys and values, from above (n, H, d), the gradient of out, and what the forward pass returned.
void attention_backward(const half *above, const half *out, const half *q, const half *k, const half *v, const num *starts, const num *entries,
                        const uint32_t *masks, const float *sums, float *grads, num q_stride, num k_stride, num v_stride, num n, num heads, num kv_heads,
                        num d, int threads) {
    const Line line(n, heads, kv_heads, d);
    const num copied = line.padded * line.wide, group = line.group, all = heads + 2 * kv_heads;
    Room<half> keys(kv_heads * copied), turned(kv_heads * copied), values(kv_heads * copied);
    for (num head = 0; head < kv_heads; head++) {
        copy_head(k + head * d, k_stride, line, keys + head * copied, turned + head * copied);
        copy_head(v + head * d, v_stride, line, values + head * copied, nullptr);
    }
    const Plan plan{starts, entries, masks};
    const num most = plan.most(line.blocks);
    Room<float> of_keys(threads * kv_heads * copied), of_values(threads * kv_heads * copied);  // one share per thread
    #pragma omp parallel for schedule(static) num_threads(threads)
    for (int share = 0; share < threads; share++) {
        Tiles tiles;
        const num along_size = line.wide / 2 * BLOCK, across_size = BLOCK / 2 * line.wide, width = group * BLOCK;
        Room<uint32_t> queries(group * along_size), uppers(group * along_size), of_queries(group * across_size), of_uppers(group * across_size);
        Room<uint32_t> changes(group * most * BLOCK / 2 * BLOCK);  // dS of each head, (32 * most keys / 2, 32 queries)
        Room<float> scores(BLOCK * BLOCK), upper(BLOCK * BLOCK), inner(group * BLOCK);
        Room<half> shares(BLOCK * width), differences(BLOCK * width);  // P^T, dS^T: keys, then the queries of each head
        std::vector<num> steps(most);
        num jobs = line.blocks * kv_heads;
        for (num job = jobs * share / threads; job < jobs * (share + 1) / threads; job++) {
            num head = job / line.blocks, block = job % line.blocks, count = plan.count(block), begin = block * BLOCK, rows = std::min(BLOCK, n - begin);
            if (rows < BLOCK)
                for (auto *room : {&queries, &uppers, &of_queries, &of_uppers}) std::memset(room->at, 0, sizeof(uint32_t) * group * along_size);
            for (num g = 0; g < group; g++) {
                num h = head * group + g;
                const half *from = above + (begin * heads + h) * d;
                pack(q + begin * q_stride + h * d, q_stride, rows, line, queries + g * along_size, of_queries + g * across_size);
                pack(from, heads * d, rows, line, uppers + g * along_size, of_uppers + g * across_size);
                for (num i = 0; i < rows; i++) inner[g * BLOCK + i] = dot(from + i * heads * d, out + ((begin + i) * heads + h) * d, d);
            }
            float *dk = of_keys + (share * kv_heads + head) * copied, *dv = of_values + (share * kv_heads + head) * copied;
            for (num e = 0; e < count; e++) {
                num key = steps[e] = plan.key(block, e), at = head * copied + key * line.wide;
                for (num g = 0; g < group; g++) {
                    multiply(keys + at, line.wide, WHOLE.at, queries + g * along_size, BLOCK, scores, BLOCK, line.wide / BLOCK, false);
                    multiply(values + at, line.wide, WHOLE.at, uppers + g * along_size, BLOCK, upper, BLOCK, line.wide / BLOCK, false);
                    differentiate(scores, upper, sums + (head * group + g) * line.padded + begin, inner + g * BLOCK, plan.mask(block, e), shares + g * BLOCK,
                                  differences + g * BLOCK, width, changes + (g * most + e) * BLOCK / 2 * BLOCK);
                }
                for (num column = 0; column < line.wide; column += BLOCK) {
                    multiply(shares, width, WHOLE.at, of_uppers + column, line.wide, dv + key * line.wide + column, line.wide, group, true);
                    multiply(differences, width, WHOLE.at, of_queries + column, line.wide, dk + key * line.wide + column, line.wide, group, true);
                }
            }
            for (num g = 0; g < group; g++)
                for (num column = 0; column < d; column += BLOCK) {
                    multiply(turned + head * copied + column * line.padded, line.padded, steps.data(), changes + g * most * BLOCK / 2 * BLOCK, BLOCK, scores,
                             BLOCK, count, false);
                    for (num i = 0; i < rows; i++) {
                        float *to = grads + ((begin + i) * all + head * group + g) * d + column;
                        for (num c = 0; c < std::min(BLOCK, d - column); c++) to[c] = scores[c * BLOCK + i];
                    }
                }
        }
    }
    ROWS for (num i = 0; i < n; i++)
        for (num head = 0; head < kv_heads; head++) {
            float *dk = grads + (i * all + heads + head) * d, *dv = dk + kv_heads * d;
            for (num c = 0; c < d; c++) {
                num at = head * copied + i * line.wide + c;
                dk[c] = of_keys[at];
                dv[c] = of_values[at];
                for (num share = 1; share < threads; share++) {
                    dk[c] += of_keys[share * kv_heads * copied + at];
                    dv[c] += of_values[share * kv_heads * copied + at];
                }
            }
        }
}

}
#else
extern "C" int has_attention_blocks() { return 0; }
#endif
