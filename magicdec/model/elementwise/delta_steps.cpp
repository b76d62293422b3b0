// The steps of linear attention (delta.py): each block of a state's columns is read once, takes what the newest tokens have
// written, then the new tokens, and is written where the row's base moves to. A column of a state depends on no other, so that a
// block stays in the L1 cache.
//
// Shapes: B rows, T new tokens, H value heads and G key heads, D and E the sizes of a key and of a value.
#include <cmath>
#include <cstdint>
#include <vector>

#include <omp.h>

#include "../../kernels/wide.h"

namespace {

struct Problem {
    int64_t B, T, G, H, D, E, num_slots;
    float *states, *corrections;                    // [rows, H, D, E], [rows, slots, H, E]
    const float *keys, *decays;                     // [rows, slots, G, D], [rows, slots, H]
    const int64_t *rows, *base, *first, *moved;     // [B]
    const float *q, *k, *v, *new_decays, *rates;    // [B, T, G, D] twice, [B, T, H, E], [B, T, H] twice
    float* out;                                     // [B, T, H, E]
};

// What a token has of one head: the key [D] to which it writes, the factor by which the state decays before, and the correction
// [E]. The new ones have theirs computed, with the query [D], value [E] and rate, and their output [E].
struct Token {
    const float* key;
    float decay;
    float* correction;
    const float *query = nullptr, *value = nullptr;
    float rate = 0;
    float* out = nullptr;
};

// A state [D, E], which takes the tokens between its base and where that moves, those up to the new ones, and these.
struct Head {
    float* state;
    std::vector<Token> settled, open, added;
};

void describe(const Problem& p, int64_t b, int64_t h, Head& head) {
    const int64_t row = p.rows[b], g = h * p.G / p.H;
    head.state = p.states + (row * p.H + h) * p.D * p.E;
    head.settled.clear();
    head.open.clear();
    head.added.clear();
    for (int64_t position = p.base[b]; position < p.first[b]; ++position) {
        const int64_t slot = row * p.num_slots + position % p.num_slots;
        (position < p.moved[b] ? head.settled : head.open)
            .push_back({.key = p.keys + (slot * p.G + g) * p.D,
                        .decay = std::exp(p.decays[slot * p.H + h]),
                        .correction = p.corrections + (slot * p.H + h) * p.E});
    }
    for (int64_t t = 0; t < p.T; ++t) {
        const int64_t token = b * p.T + t, slot = row * p.num_slots + (p.first[b] + t) % p.num_slots;
        head.added.push_back({.key = p.k + (token * p.G + g) * p.D,
                              .decay = std::exp(p.new_decays[token * p.H + h]),
                              .correction = p.corrections + (slot * p.H + h) * p.E,
                              .query = p.q + (token * p.G + g) * p.D,
                              .value = p.v + (token * p.H + h) * p.E,
                              .rate = p.rates[token * p.H + h],
                              .out = p.out + (token * p.H + h) * p.E});
    }
}

inline void fill(float& x, float value) { x = value; }
inline void fill(vec& x, float value) { x = broadcast(value); }
inline void read(float& x, const float* from) { x = *from; }
inline void read(vec& x, const float* from) { x = load(from); }

// Neighbouring columns of one row: V numbers, or as many vectors of them.
template <typename Numbers, int V>
struct Columns {
    static constexpr int WIDTH = sizeof(Numbers) / sizeof(float), COUNT = V * WIDTH;
    Numbers parts[V];

    static Columns at(const float* x) {
        Columns read_there;
        for (int i = 0; i < V; ++i) read(read_there.parts[i], x + i * WIDTH);
        return read_there;
    }
    void write(float* x) const {
        for (int i = 0; i < V; ++i) store(x + i * WIDTH, parts[i]);
    }
    void multiply(float factor) {
        for (int i = 0; i < V; ++i) parts[i] = parts[i] * factor;
    }
    void add(float factor, const Columns& other) {
        Numbers factors;
        fill(factors, factor);
        for (int i = 0; i < V; ++i) parts[i] = fused(factors, other.parts[i], parts[i]);
    }
};

// The columns of a head from `c` on. `S` [D] is scratch. Sums are chains of fused additions, so that a token has the same bits
// alone and among others, and so has a state that is computed again of what was written.
template <typename Numbers, int V>
void take_columns(const Problem& p, const Head& head, int64_t c, float* S) {
    using Some = Columns<Numbers, V>;
    const auto take = [&](Some& s, const std::vector<Token>& tokens, int64_t d) {
        for (const Token& token : tokens) {
            s.multiply(token.decay);
            s.add(token.key[d], Some::at(token.correction + c));
        }
    };
    Some held{};  // what the state has for a token's key
    for (int64_t d = 0; d < p.D; ++d) {
        float* state = head.state + d * p.E + c;
        Some s = Some::at(state);
        take(s, head.settled, d);
        if (!head.settled.empty()) s.write(state);
        take(s, head.open, d);
        s.multiply(head.added[0].decay);
        held.add(head.added[0].key[d], s);
        s.write(S + d * Some::COUNT);
    }
    for (int64_t t = 0; t < p.T; ++t) {
        const Token &token = head.added[t], *next = t + 1 < p.T ? &token + 1 : nullptr;
        Some correction = Some::at(token.value + c), sum{}, held_next{};
        correction.add(-1, held);
        correction.multiply(token.rate);
        correction.write(token.correction + c);
        for (int64_t d = 0; d < p.D; ++d) {
            Some s = Some::at(S + d * Some::COUNT);
            s.add(token.key[d], correction);
            sum.add(token.query[d], s);
            if (!next) continue;
            s.multiply(next->decay);
            held_next.add(next->key[d], s);
            s.write(S + d * Some::COUNT);
        }
        sum.write(token.out + c);
        held = held_next;
    }
}

template <typename Numbers, int V>
int64_t take_blocks(const Problem& p, const Head& head, int64_t c, float* S) {
    constexpr int COUNT = Columns<Numbers, V>::COUNT;
    for (; c + COUNT <= p.E; c += COUNT) take_columns<Numbers, V>(p, head, c, S);
    return c;
}

constexpr int VECTORS = 32 / W;  // of 128 numbers each, a block has 16 KiB of an L1 cache of at least 32

}  // namespace

extern "C" void magicdec_delta_steps(const int64_t* sizes, float* states, const float* keys, float* corrections,
                                     const float* decays, const int64_t* rows, const int64_t* base, const int64_t* first,
                                     const int64_t* moved, const float* q, const float* k, const float* v,
                                     const float* new_decays, const float* rates, float* out) {
    const Problem p{sizes[0], sizes[1], sizes[2], sizes[3], sizes[4], sizes[5], sizes[6], states, corrections, keys, decays,
                    rows,     base,     first,    moved,    q,        k,        v,        new_decays, rates,      out};
#pragma omp parallel
    {
        std::vector<float> S(p.D * VECTORS * W);
        Head head;
#pragma omp for collapse(2)
        for (int64_t b = 0; b < p.B; ++b)
            for (int64_t h = 0; h < p.H; ++h) {
                describe(p, b, h, head);
                int64_t c = take_blocks<vec, VECTORS>(p, head, 0, S.data());
                c = take_blocks<vec, 1>(p, head, c, S.data());
                take_blocks<float, 1>(p, head, c, S.data());
            }
    }
}
