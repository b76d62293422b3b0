// Prompts of linear attention (delta.py, recur_in_chunks): the tokens of a chunk are computed together, by products of matrices.
// With S the state before a chunk, e_i the decay from there to token i, and r_ij that from token j to i, the corrections X solve
//
//     x_i + beta_i sum_{j < i} r_ij (k_i . k_j) x_j = beta_i (v_i - e_i S^T k_i),
//
// a token reads o_i = e_i S^T q_i + sum_{j <= i} r_ij (q_i . k_j) x_j, and after the n tokens S is e_n S + sum_i r_ni k_i x_i^T.
// What depends on keys and queries alone is computed once for the value heads of a key head. Columns of S and X depend on no
// others: a panel of them stays in the L1 cache, from the products with S to those that change it.
//
// Shapes: B rows, T tokens, H value heads and G key heads, D and E the sizes of a key and of a value.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include <omp.h>

#include "../../kernels/wide.h"

namespace {

constexpr int CHUNK = 64;
constexpr int V = 2, COLUMNS = V * W;          // of a panel
constexpr int TILE = W == 16 ? 8 : 4;          // rows whose sums fit into registers with those columns
constexpr float LOG2_E = 1.44269504f;

struct Problem {
    int64_t B, T, G, H, D, E;
    float* states;                             // [B, H, D, E]
    const float *q, *k, *v, *decays, *rates;   // [B, T, G, D] twice, [B, T, H, E], [B, T, H] twice
    float* out;                                // [B, T, H, E]
};

using Sums = vec[TILE][V];
using Square = float[CHUNK][CHUNK];
using Panel = float[COLUMNS];

// sums[n] += sum over i of entry (n, i) of `left` times row i of `right`.
inline void multiply(Left left, const Panel* right, int64_t count, Sums& sums) {
    for (int64_t i = 0; i < count; ++i, left.x += left.step) {
        const vec columns[V] = {load(right[i]), load(right[i] + W)};
        for (int n = 0; n < TILE; ++n) {
            const vec factor = broadcast(left.x[n * left.row]);
            for (int c = 0; c < V; ++c) sums[n][c] = fused(factor, columns[c], sums[n][c]);
        }
    }
}

inline void read(Sums& sums, const Panel* from) {
    for (int n = 0; n < TILE; ++n)
        for (int c = 0; c < V; ++c) sums[n][c] = load(from[n] + c * W);
}
inline void write(const Sums& sums, Panel* to) {
    for (int n = 0; n < TILE; ++n)
        for (int c = 0; c < V; ++c) store(to[n] + c * W, sums[n][c]);
}
inline void scale(Sums& sums, const float* factors, int64_t step) {
    for (int n = 0; n < TILE; ++n)
        for (int c = 0; c < V; ++c) sums[n][c] *= broadcast(factors[n * step]);
}

// exp of x [CHUNK], none of which is above 0.
inline void exp_chunk(float* x) {
    for (int i = 0; i < CHUNK; i += W) store(x + i, exp2_wide(load(x + i) * broadcast(LOG2_E)));
}

// A chunk of one key head and then of one value head, filled up with tokens that are zeros, which change nothing.
struct Chunk {
    int64_t depth;                             // D, rounded up to whole tiles
    std::vector<float> keys, queries, kept;    // [CHUNK, depth]; keys times their decay to the end of the chunk
    std::vector<float> columns;                // keys by columns, in panels: [panels, depth, COLUMNS]
    Square key_products, query_products;       // of each token and those before it
    Square mixing, scores;                     // -beta_i r_ij (k_i . k_j), r_ij (q_i . k_j)
    float decays[CHUNK], since[CHUNK], rates[CHUNK];  // the logarithm of e, e and beta
    float total;                               // e of the last token
    std::vector<float> state;                  // [depth, COLUMNS]
    Panel corrections[CHUNK];

    explicit Chunk(int64_t D)
        : depth((D + TILE - 1) / TILE * TILE), keys(CHUNK * depth), queries(keys.size()), kept(keys.size()),
          columns(keys.size()), state(depth * COLUMNS) {}

    Panel* state_rows() { return reinterpret_cast<Panel*>(state.data()); }
    Left rows(const std::vector<float>& x, int64_t first) const { return {x.data() + first * depth, depth, 1}; }
    Left rows(const Square& x, int64_t first) const { return {x[first], CHUNK, 1}; }

    void take_keys(const Problem& p, int64_t b, int64_t begin, int64_t count, int64_t g) {
        std::fill(keys.begin() + count * depth, keys.end(), 0.0f);
        std::fill(queries.begin() + count * depth, queries.end(), 0.0f);
        for (int64_t i = 0; i < count; ++i) {
            const int64_t from = ((b * p.T + begin + i) * p.G + g) * p.D;
            std::memcpy(&keys[i * depth], p.k + from, p.D * sizeof(float));
            std::memcpy(&queries[i * depth], p.q + from, p.D * sizeof(float));
        }
        for (int64_t i = 0; i < CHUNK; ++i)
            for (int64_t d = 0; d < p.D; ++d)
                columns[(i / COLUMNS * depth + d) * COLUMNS + i % COLUMNS] = keys[i * depth + d];
        for (int64_t i = 0; i < CHUNK; i += TILE)
            for (int64_t j = 0; j < i + TILE; j += COLUMNS) {
                const Panel* right = reinterpret_cast<const Panel*>(&columns[j * depth]);
                for (auto [left, products] : {std::pair(&keys, &key_products), std::pair(&queries, &query_products)}) {
                    Sums sums{};
                    multiply(rows(*left, i), right, p.D, sums);
                    for (int n = 0; n < TILE; ++n)
                        for (int c = 0; c < V; ++c) store((*products)[i + n] + j + c * W, sums[n][c]);
                }
            }
    }

    void take_decays(const Problem& p, int64_t b, int64_t begin, int64_t count, int64_t h) {
        float sum = 0;
        for (int64_t i = 0; i < CHUNK; ++i) {
            const int64_t token = (b * p.T + begin + i) * p.H + h;
            sum += i < count ? p.decays[token] : 0.0f;
            decays[i] = since[i] = sum;
            rates[i] = i < count ? p.rates[token] : 0.0f;
        }
        exp_chunk(since);
        total = since[CHUNK - 1];
        for (int64_t i = 0; i < CHUNK; ++i) {
            const int64_t end = (i / TILE + 1) * TILE;
            float ratios[CHUNK] = {};
            for (int64_t j = 0; j <= i; ++j) ratios[j] = decays[i] - decays[j];
            exp_chunk(ratios);
            for (int64_t j = 0; j < end; ++j) {
                mixing[i][j] = j < i ? -rates[i] * ratios[j] * key_products[i][j] : 0.0f;
                scores[i][j] = j <= i ? ratios[j] * query_products[i][j] : 0.0f;
            }
        }
        float left[CHUNK];
        for (int64_t i = 0; i < CHUNK; ++i) left[i] = sum - decays[i];
        exp_chunk(left);
        for (int64_t i = 0; i < CHUNK; ++i)
            for (int64_t d = 0; d < p.D; ++d) kept[i * depth + d] = left[i] * keys[i * depth + d];
    }

    // The columns of a head from `c` on. Sums are chains of fused additions, the same for any number of columns.
    void take_columns(const Problem& p, int64_t b, int64_t begin, int64_t count, int64_t h, int64_t c) {
        const int64_t width = std::min<int64_t>(COLUMNS, p.E - c);
        const size_t bytes = width * sizeof(float);
        float* held = p.states + (b * p.H + h) * p.D * p.E + c;
        Panel* S = state_rows();
        if (width < COLUMNS) std::fill(state.begin(), state.end(), 0.0f);  // no numbers of another panel
        for (int64_t d = 0; d < p.D; ++d) std::memcpy(S[d], held + d * p.E, bytes);
        const auto place = [&](int64_t i) { return ((b * p.T + begin + i) * p.H + h) * p.E + c; };
        for (int64_t i = 0; i < CHUNK; ++i) {
            if (i >= count || width < COLUMNS) std::fill(corrections[i], corrections[i] + COLUMNS, 0.0f);
            if (i < count) std::memcpy(corrections[i], p.v + place(i), bytes);
        }
        for (int64_t i = 0; i < count; i += TILE) {
            Sums seen{}, solved;
            multiply(rows(keys, i), S, p.D, seen);
            scale(seen, since + i, 1);
            read(solved, corrections + i);
            for (int n = 0; n < TILE; ++n)
                for (int v = 0; v < V; ++v) solved[n][v] = (solved[n][v] - seen[n][v]) * broadcast(rates[i + n]);
            multiply(rows(mixing, i), corrections, i, solved);
            for (int n = 1; n < TILE; ++n)
                for (int m = 0; m < n; ++m)
                    for (int v = 0; v < V; ++v)
                        solved[n][v] = fused(broadcast(mixing[i + n][i + m]), solved[m][v], solved[n][v]);
            write(solved, corrections + i);

            Sums outputs{};
            multiply(rows(queries, i), S, p.D, outputs);
            scale(outputs, since + i, 1);
            multiply(rows(scores, i), corrections, i + TILE, outputs);
            Panel written[TILE];
            write(outputs, written);
            for (int64_t n = 0; n < std::min<int64_t>(TILE, count - i); ++n) std::memcpy(p.out + place(i + n), written[n], bytes);
        }
        for (int64_t d = 0; d < p.D; d += TILE) {
            Sums sums;
            read(sums, S + d);
            scale(sums, &total, 0);
            multiply(Left{kept.data() + d, 1, depth}, corrections, count, sums);
            write(sums, S + d);
        }
        for (int64_t d = 0; d < p.D; ++d) std::memcpy(held + d * p.E, S[d], bytes);
    }
};

}  // namespace

extern "C" void magicdec_delta_chunks(const int64_t* sizes, float* states, const float* q, const float* k, const float* v,
                                      const float* decays, const float* rates, float* out) {
    const Problem p{sizes[0], sizes[1], sizes[2], sizes[3], sizes[4], sizes[5], states, q, k, v, decays, rates, out};
    // Few key heads are divided among threads, which then compute what these have in common again.
    const int64_t all = p.H / p.G, together = p.B * p.G < 4 * omp_get_max_threads() ? 1 : all;
#pragma omp parallel
    {
        Chunk chunk(p.D);
#pragma omp for schedule(dynamic)
        for (int64_t unit = 0; unit < p.B * p.H / together; ++unit) {
            const int64_t b = unit / (p.H / together), first = unit % (p.H / together) * together;
            for (int64_t begin = 0; begin < p.T; begin += CHUNK) {
                const int64_t count = std::min<int64_t>(CHUNK, p.T - begin);
                chunk.take_keys(p, b, begin, count, first / all);
                for (int64_t h = first; h < first + together; ++h) {
                    chunk.take_decays(p, b, begin, count, h);
                    for (int64_t c = 0; c < p.E; c += COLUMNS) chunk.take_columns(p, b, begin, count, h, c);
                }
            }
        }
    }
}
