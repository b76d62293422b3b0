// What a draft reads of its context in blocks of keys: their mean keys, their scores by the newest query, and the ranges
// of the best of them. Float32; no infinities occur.
//
// Shapes: L layers, B rows of a forward, G KV heads, D head size.
#include <vector>

#include "../kernels/arithmetic.h"

namespace {

constexpr int64_t BLOCK = 16;  // keys of a block (WEIGHTS_BLOCK of kv/view.py)
constexpr int64_t TILE = 64;   // tokens of a tile of the tiled layout (kv/layout.py)

enum { PLAIN_FLOAT32, PLAIN_BFLOAT16, TILED_BFLOAT16, TILED_INT8, TILED_INT4, TILED_FP8 };

struct Best { float score; int64_t block; };

// The `count` blocks of [first, last) with the largest scores, the earlier of equal ones, in no order.
inline void take_best(const float* scores, int64_t first, int64_t last, int64_t count, std::vector<Best>& best) {
    best.clear();
    if (count == 0) return;
    int64_t least = 0;
    auto find_least = [&] {  // of equal scores the latest block
        for (int64_t i = least = 0; i < int64_t(best.size()); ++i)
            if (best[i].score < best[least].score || (best[i].score == best[least].score && best[i].block > best[least].block))
                least = i;
    };
    for (int64_t block = first; block < last; ++block) {
        if (int64_t(best.size()) < count) {
            best.push_back({scores[block], block});
            if (int64_t(best.size()) == count) find_least();
        } else if (scores[block] > best[least].score) {
            best[least] = {scores[block], block};
            find_least();
        }
    }
}

// The mean of the BLOCK keys from `slot` on.
template <typename S>
void mean_plain(const S* pool, int64_t slot, int64_t D, float* to) {
    std::fill(to, to + D, 0.0f);
    for (int64_t i = 0; i < BLOCK; ++i)
        for (int64_t d = 0; d < D; ++d) to[d] += to_float(pool[(slot + i) * D + d]) / BLOCK;
}

inline void mean_tiled(const bfloat16* pool, int64_t slot, int64_t D, float* to) {
    const bfloat16* tile = pool + slot / TILE * TILE * D + slot % TILE * 2;
    for (int64_t d = 0; d < D; d += 2, tile += 2 * TILE) {
        to[d] = sum_of(BLOCK, [&](int64_t i) { return to_float(tile[2 * i]); }) / BLOCK;
        to[d + 1] = sum_of(BLOCK, [&](int64_t i) { return to_float(tile[2 * i + 1]); }) / BLOCK;
    }
}

// Codes are [D / 4][TILE][4] of a tile, whose scales follow (Int8Tiled of kv/layout.py).
inline void mean_int8(const int8_t* pool, int64_t slot, int64_t D, float* to) {
    const int8_t* tile = pool + slot / TILE * TILE * (D + 4);
    const float* scales = reinterpret_cast<const float*>(tile + TILE * D) + slot % TILE;
    for (int64_t d = 0; d < D; ++d) {
        const int8_t* codes = tile + (d / 4 * TILE + slot % TILE) * 4 + d % 4;
        to[d] = sum_of(BLOCK, [&](int64_t i) { return codes[4 * i] * scales[i]; }) / BLOCK;
    }
}

// Bytes are [TOKEN_BYTES / 4][TILE][4] of a tile, whose scales [groups][TILE] follow (Int4 of kv/layout.py). They are of keys whose
// parts of MIXED dimensions are transformed: the mean of these is that of the keys, transformed likewise.
inline void mean_int4(const int8_t* pool, int64_t slot, int64_t D, float* to) {
    constexpr int64_t GROUP = 32, HALF = GROUP / 2, MIXED = 16;
    const int64_t filled = (D + MIXED - 1) / MIXED * MIXED;
    std::vector<float> mean(filled);
    const int64_t groups = (D + GROUP - 1) / GROUP, lane = slot % TILE;
    const int8_t* tile = pool + slot / TILE * TILE * groups * (HALF + 2);
    const bfloat16* scales = reinterpret_cast<const bfloat16*>(tile + TILE * groups * HALF) + lane;
    for (int64_t d = 0; d < filled; ++d) {
        const int64_t byte = d / GROUP * HALF + d % HALF;
        const int8_t* bytes = tile + (byte / 4 * TILE + lane) * 4 + byte % 4;
        const float sum = sum_of(BLOCK, [&](int64_t i) {
            const int8_t both = bytes[4 * i];
            const int code = d % GROUP < HALF ? int8_t(both << 4) >> 4 : both >> 4;
            return code * to_float(scales[d / GROUP * TILE + i]);
        });
        mean[d] = sum / (BLOCK * MIXED);
    }
    for (int64_t half = 1; half < MIXED; half *= 2)
        for (int64_t d = 0; d < filled; ++d)
            if (!(d & half)) {
                const float a = mean[d], b = mean[d + half];
                mean[d] = a + b, mean[d + half] = a - b;
            }
    std::copy_n(mean.begin(), D, to);
}

// A code has a sign, four bits of an exponent, which are 7 too many, and three bits of a number that begins with 1, or with 0 if the
// exponent's are 0.
inline float of_fp8(uint8_t code) {
    const int exponent = code >> 3 & 15, rest = code & 7;
    const float number = exponent ? std::ldexp(float(8 + rest), exponent - 10) : std::ldexp(float(rest), -9);
    return code & 0x80 ? -number : number;
}

// Codes are [D / 4][TILE][4] of a tile (Float8 of kv/layout.py).
inline void mean_fp8(const uint8_t* pool, int64_t slot, int64_t D, float* to) {
    const uint8_t* tile = pool + slot / TILE * TILE * D;
    for (int64_t d = 0; d < D; ++d) {
        const uint8_t* codes = tile + (d / 4 * TILE + slot % TILE) * 4 + d % 4;
        to[d] = sum_of(BLOCK, [&](int64_t i) { return of_fp8(codes[4 * i]); }) / BLOCK;
    }
}

inline void mean_keys(int kind, const char* pool, int64_t slot, int64_t D, float* to) {
    if (kind == PLAIN_FLOAT32) return mean_plain((const float*)pool, slot, D, to);
    if (kind == PLAIN_BFLOAT16) return mean_plain((const bfloat16*)pool, slot, D, to);
    if (kind == TILED_BFLOAT16) return mean_tiled((const bfloat16*)pool, slot, D, to);
    if (kind == TILED_INT8) return mean_int8((const int8_t*)pool, slot, D, to);
    if (kind == TILED_INT4) return mean_int4((const int8_t*)pool, slot, D, to);
    mean_fp8((const uint8_t*)pool, slot, D, to);
}

}  // namespace

// ranges [L, B, G, most + 2, 2] of visible tokens, in ascending order: sinks, the best blocks, the window. Row b's scores
// of a layer and head are at scores + layer * layer_stride + rows[b] * row_stride + head * head_stride. `split` [5, B] is:
// the first sink, the end of the sinks, the begin of the window, the number of blocks, and the number of tokens.
extern "C" void magicdec_top_blocks(const float* scores, int64_t layer_stride, int64_t row_stride, int64_t head_stride,
                                    const int64_t* rows, const int64_t* split, int64_t L, int64_t B, int64_t G,
                                    int64_t most, int64_t* ranges) {
#pragma omp parallel
    {
        std::vector<Best> best;
#pragma omp for collapse(3) schedule(static)
        for (int64_t layer = 0; layer < L; ++layer)
            for (int64_t b = 0; b < B; ++b)
                for (int64_t g = 0; g < G; ++g) {
                    const int64_t first = split[b], last = split[B + b], start = split[2 * B + b];
                    const float* of_head = scores + layer * layer_stride + rows[b] * row_stride + g * head_stride;
                    take_best(of_head, (last + BLOCK - 1) / BLOCK, start / BLOCK, split[3 * B + b], best);
                    std::sort(best.begin(), best.end(), [](Best x, Best y) { return x.block < y.block; });
                    int64_t* to = ranges + ((layer * B + b) * G + g) * (most + 2) * 2;
                    *to++ = first, *to++ = std::min(last, start);
                    for (int64_t i = 0; i < most; ++i) {  // what a row does not take is an empty range
                        const int64_t begin = i < int64_t(best.size()) ? best[i].block * BLOCK : start;
                        *to++ = begin, *to++ = std::min(begin + BLOCK, start);
                    }
                    *to++ = start, *to++ = split[4 * B + b];
                }
    }
}

// scores [L, B, G, N]: the softmax over the blocks spans[b] (first, stop) of mean key . query / sqrt(D), summed over the rep
// query heads of a KV head; 0 for all other blocks. queries [L, R, G, rep, D] are those of all R rows of the cache, of
// which rows [B] take part, and means [L, T, G, blocks, D] those of T rows, of which each has one of texts [B].
extern "C" void magicdec_score_blocks(const float* queries, const float* means, const int64_t* rows,
                                      const int64_t* texts, const int64_t* spans, int64_t L, int64_t B, int64_t G,
                                      int64_t R, int64_t T, int64_t rep, int64_t D, int64_t blocks, int64_t N,
                                      float* scores) {
    const float scale = 1.0f / std::sqrt(float(D));
#pragma omp parallel
    {
        std::vector<float> weights(N);
#pragma omp for collapse(3) schedule(static)
        for (int64_t layer = 0; layer < L; ++layer)
            for (int64_t b = 0; b < B; ++b)
                for (int64_t g = 0; g < G; ++g) {
                    const int64_t place = (layer * R + rows[b]) * G + g;
                    const int64_t text = (layer * T + texts[b]) * G + g;
                    const int64_t first = spans[2 * b], stop = std::min(spans[2 * b + 1], N);
                    float* to = scores + ((layer * B + b) * G + g) * N;
                    std::fill(to, to + N, 0.0f);
                    for (int64_t head = 0; head < rep; ++head) {
                        const float* query = queries + (place * rep + head) * D;
                        float most = -1e30f;
                        for (int64_t i = first; i < stop; ++i) {
                            const float* mean = means + (text * blocks + i) * D;
                            weights[i] = sum_of(D, [&](int64_t d) { return query[d] * mean[d]; }) * scale;
                            most = std::max(most, weights[i]);
                        }
                        for (int64_t i = first; i < stop; ++i) weights[i] = exp_negative(weights[i] - most);
                        const float total = sum_of(stop - first, [&](int64_t i) { return weights[first + i]; });
                        for (int64_t i = first; i < stop; ++i) to[i] += weights[i] / total;
                    }
                }
    }
}

// means [L, R, G, blocks, D]: fill the mean keys of blocks first[b] .. last[b] - 1 of each of rows [B] from the pools of
// keys, which are `layer_bytes` apart. `table` [R, stride] has each row's blocks of `block_size` tokens in the pool.
extern "C" void magicdec_mean_keys(int kind, const char* pools, int64_t layer_bytes, const int64_t* table,
                                   int64_t stride, int64_t block_size, const int64_t* rows, const int64_t* first,
                                   const int64_t* last, int64_t L, int64_t B, int64_t G, int64_t R, int64_t D,
                                   int64_t blocks, float* means) {
#pragma omp parallel for collapse(3) schedule(static)
    for (int64_t layer = 0; layer < L; ++layer)
        for (int64_t b = 0; b < B; ++b)
            for (int64_t g = 0; g < G; ++g)
                for (int64_t block = first[b]; block < last[b]; ++block) {
                    const int64_t at = block * BLOCK, held = table[rows[b] * stride + at / block_size];
                    const int64_t slot = (held * G + g) * block_size + at % block_size;
                    mean_keys(kind, pools + layer * layer_bytes, slot, D,
                              means + (((layer * R + rows[b]) * G + g) * blocks + block) * D);
                }
}
