// Attention over tiles of codes (native_int8.h, native_int4.h) for every CPU, by products of pairs of 16-bit integers.
//
// Codes are unpacked in registers to 16 bits. A query is rounded to 2 * MOST_STEPS + 1 numbers up to its largest magnitude, and
// a query's weights of a tile, each times the scale of its value, to as many up to their largest: 200 times as fine as int8
// codes are. Sums of integers are exact, and all else is computed for a query by itself, of the keys that it sees, so that its
// result is the same to the bit whatever other queries are computed with it.

// A number has two integers if queries are float32, which then keep their bits: the second one counts 1 / FINER of a step.
#if defined(CODES_OF_FLOAT32)
constexpr int TERMS = 2;
#else
constexpr int TERMS = 1;
#endif
constexpr float FINER = 32768.0f;
constexpr int MOST_STEPS = HEAD_SIZE <= 512 ? 32767 : 16383;  // times MOST_CODE and HEAD_SIZE it has 31 bits
constexpr float LEAST_MOST = 1e-30f;                          // what is smaller is rounded to 0

// Of fewer bits, what follows is prefetched into the L1 cache.
using NextCodes = InOrder<W == 16 ? 1 : 2>;

// W numbers of at most 2^15 are rounded by adding this: the lower 16 bits are then those of the integers.
constexpr float ROUNDER = 12582912.0f;

// How `Pools` store numbers: a part of an entry has a pair of 16 bits (pairs_of_quad), and rows of entries have the keys'
// dimensions that share a scale.
template <typename Pools>
struct CodedForm : Pools {
    using Pools::HALVES, Pools::NUM_SCALES, Pools::SCALED, Pools::SCALED_BYTES;
    static constexpr int PARTS = 2 * HALVES, ROWS = SCALED_BYTES / 4, KEY_PAIRS = NUM_SCALES * ROWS * PARTS;

    // The dimension of number `word` of a pair of a query.
    static int dimension(int pair, int word) {
        const int row = pair / PARTS, part = pair % PARTS, byte = row % ROWS * 4 + 2 * word + part / HALVES;
        return row / ROWS * SCALED + part % HALVES * SCALED_BYTES + byte;
    }
    // Whether numbers of a half of a byte exist.
    static bool has_half(int group, int half) { return group * SCALED + half * SCALED_BYTES < HEAD_SIZE; }
};

// A query's numbers are those of its pairs times `step`.
template <typename Form>
struct CodedQuery {
    int16_t pairs[TERMS][Form::KEY_PAIRS][2];
    float step;
};

// Not inlined, as `soften_wide`.
template <typename Form, typename S>
__attribute__((noinline)) void round_query(const S* from, CodedQuery<Form>* to) {
    float numbers[2 * Form::KEY_PAIRS] = {}, most = LEAST_MOST;
    for (int d = 0; d < HEAD_SIZE; ++d) numbers[d] = to_float(from[d]);
    Form::mix_query(numbers);
    bool has_numbers = true;
    for (int d = 0; d < HEAD_SIZE; ++d) {
        most = std::max(most, std::fabs(numbers[d]));
        has_numbers &= is_finite(numbers[d]);
    }
    const float inverse = MOST_STEPS / most;
    for (int pair = 0; pair < Form::KEY_PAIRS; ++pair)
        for (int word = 0; word < 2; ++word) {
            float rest = numbers[Form::dimension(pair, word)] * inverse;
            for (int term = 0; term < TERMS; ++term) {
                const float steps = std::rint(rest);
                to->pairs[term][pair][word] = int16_t(steps);
                rest = (rest - steps) * FINER;
            }
        }
    // Integers have no NaN: the scores of a query that has one get it from here.
    to->step = has_numbers ? most / MOST_STEPS : not_a_number();
}

template <typename Form>
inline void read_query(const CodedQuery<Form>* q, int64_t m, float* numbers) {
    for (int pair = 0; pair < Form::KEY_PAIRS; ++pair)
        for (int word = 0; word < 2; ++word)
            if (const int d = Form::dimension(pair, word); d < HEAD_SIZE) {
                float steps = q[m].pairs[0][pair][word];
                if (TERMS > 1) steps += q[m].pairs[TERMS - 1][pair][word] / FINER;
                numbers[d] = steps * q[m].step;
            }
}

// Calls body.operator()<V>(i) for vectors i .. i + V - 1 of `count`, with V = MOST, then 1.
template <int MOST, typename Body>
inline void in_some_vectors(int count, Body body) {
    int i = 0;
    for (; i + MOST <= count; i += MOST) body.template operator()<MOST>(i);
    for (int rest = 1; rest < MOST && i < count; ++rest, ++i) body.template operator()<1>(i);
}

#include "native_codes_softmax.h"
#include "native_codes_amx.h"

template <typename Form>
struct CodedScratch {
    alignas(64) float scores[MAX_QUERIES * TILE];
    alignas(64) uint32_t pairs[Form::KEY_PAIRS * TILE];  // the codes of keys, then of values, if `is_unpacked`
    CodedWeights<Form> weights[MAX_QUERIES];
    ValueScales<Form> value_scales;
    bool is_unpacked;
    float scale[MAX_QUERIES];
    ChunkScratch chunk;
    WidenedTile tile;
#if defined(HAS_CODE_REGISTERS)
    CodeRegisters<Form> registers;
#endif
    CodedWeights<Form>* weights_of(int64_t query) { return weights + query; }
};

// Codes are unpacked where they are multiplied, or once for several blocks of queries.
template <typename Form>
struct CodedTiles : Form {
    using Left = CodedQuery<Form>;
    using Tile = typename Form::Tile;
    using Form::HALVES, Form::NUM_SCALES, Form::PARTS, Form::ROWS, Form::SCALED, Form::SCALED_BYTES;
    static constexpr bool has_registers = false;
    static constexpr bool UNPACKS = W == 8;  // where registers are few; else it is no gain
    static constexpr int MOST_ROWS = (UNPACKS ? ::ROWS : 10) / TERMS, TOKEN_BYTES = NUM_SCALES * SCALED_BYTES;
    CodedScratch<Form>* scratch = nullptr;

#if defined(HAS_CODE_REGISTERS)
    // Where queries are multiplied in tile registers, all at once.
    CodeRegisters<Form>* registers() const { return scratch->registers.is_used ? &scratch->registers : nullptr; }
#endif

    void begin_keys(const Tile& tile, int64_t num_queries, int64_t ahead) const {
        scratch->is_unpacked = UNPACKS && num_queries > MOST_ROWS;
        if (scratch->is_unpacked) unpack<TILE>(tile.keys, NUM_SCALES * ROWS, (tile.high + W - 1) / W, tile.keys + ahead);
    }

    template <int N, int C>
    void score(const Left* q, const Tile& tile, int64_t ahead, float* scores) const {
        if constexpr (UNPACKS && 2 * N >= MOST_ROWS)
            if (scratch && scratch->is_unpacked)
                return score_vectors<N, true>(q, tile, scratch->pairs, nullptr, C * LANES / W, scores);
        score_vectors<N, false>(q, tile, tile.keys, tile.keys + ahead, C * LANES / W, scores);
    }

    template <int C>
    void soften(const Tile& tile, const float* scores, int64_t from, int64_t to, float factor, float* maximum, float* total,
                float* scale, CodedWeights<Form>* weights, float* sums) const {
        scratch->value_scales.find(tile, from, to);
        soften_codes(scores, from, to, factor, maximum, total, scale, scratch->value_scales, weights, sums);
    }

#if defined(__AVX512F__)
    void soften_fours(const Tile& tile, const float* scores, int64_t count, float factor, float* maximum, float* total,
                      float* scale, CodedWeights<Form>* weights) const {
        scratch->value_scales.find(tile, 0, TILE);
        soften_fours_codes(scores, count, factor, maximum, total, scale, scratch->value_scales, weights);
    }
#endif

    void begin_values(const Tile& tile, int64_t ahead) const {
        if (scratch->is_unpacked) unpack<TOKEN_BYTES>(tile.values, tile.num_groups, TOKEN_BYTES / W, tile.values + ahead);
    }

    template <int N>
    void weigh(const CodedWeights<Form>* weights, const Tile& tile, int64_t ahead, const float* scale, float* acc) const {
        if constexpr (UNPACKS && 2 * N >= MOST_ROWS)
            if (scratch->is_unpacked) return weigh_vectors<N, true>(weights, tile, scratch->pairs, nullptr, scale, acc);
        weigh_vectors<N, false>(weights, tile, tile.values, tile.values + ahead, scale, acc);
    }

private:
    // Prefetches the scales of the next tile, which follow its codes.
    static void prefetch_scales(NextCodes ahead) {
        constexpr int lines = sizeof(*Tile::key_scales) * NUM_SCALES * TILE / 64;
        for (int i = 0; i < lines; ++i) ahead(nullptr);
    }

    // The parts of `count` rows of entries, each [PARTS][WIDTH].
    template <int WIDTH>
    void unpack(const uint32_t* entries, int64_t count, int64_t num_vectors, const uint32_t* following) const {
        auto next = reinterpret_cast<const char*>(following);
        uint32_t* to = scratch->pairs;
        for (int64_t row = 0; row < count; ++row, entries += WIDTH, to += PARTS * WIDTH)
            for (int64_t i = 0; i < num_vectors; ++i) {
                const bits some = load_bits(entries + W * i);
                if (W == 16 || i % 2 == 0) NextCodes{next}(nullptr);
                unrolled<PARTS>([&]<int part>() {
                    const bits x = Form::pairs(some, part);
                    std::memcpy(to + part * WIDTH + W * i, &x, sizeof(x));
                });
            }
        prefetch_scales(NextCodes{next});
    }

    // Adds the products of N queries' terms with `count` rows of V vectors of entries: part p of row k is multiplied by
    // left.operator()<p>(n, term, k), and is in the sums p % SUMS.
    template <bool IS_UNPACKED, int WIDTH, int R, int V, int SUMS, typename Pairs>
    static void multiply(Pairs left, const uint32_t* entries, int64_t count, NextCodes ahead, integers (&sums)[R][V][SUMS]) {
        for (int64_t row = 0; row < count; ++row, entries += (IS_UNPACKED ? PARTS : 1) * WIDTH) {
            bits packed[V];
            if (!IS_UNPACKED)
                for (int v = 0; v < V; ++v) {
                    packed[v] = load_bits(entries + W * v);
                    if (W == 16 || v % 2 == 0) ahead(nullptr);
                }
            unrolled<PARTS>([&]<int part>() {
                bits x[V];
                for (int v = 0; v < V; ++v)
                    x[v] = IS_UNPACKED ? load_bits(entries + part * WIDTH + W * v) : Form::pairs(packed[v], part);
                unrolled<R>([&]<int r>() {
                    const int32_t pair = left.template operator()<part>(r / TERMS, r % TERMS, row);
                    for (int v = 0; v < V; ++v) sums[r][v][part % SUMS] = add_pair_products(sums[r][v][part % SUMS], x[v], pair);
                });
            });
        }
    }

    // Vectors of sums for N queries that fit into registers.
    template <bool IS_UNPACKED>
    static constexpr int most_vectors(int N) {
        return IS_UNPACKED ? vectors_of(N * TERMS) : N * TERMS <= 2 ? 4 : 2;
    }

    // The sums of a query's terms.
    template <int R, int V, int SUMS>
    static vec joined(const integers (&sums)[R][V][SUMS], int n, int v, int i) {
        const vec whole = __builtin_convertvector(sums[n * TERMS][v][i], vec);
        if (TERMS == 1) return whole;
        return fused(__builtin_convertvector(sums[n * TERMS + TERMS - 1][v][i], vec), broadcast(1 / FINER), whole);
    }

    template <int N, bool IS_UNPACKED>
    __attribute__((noinline)) static void score_vectors(const Left* q, const Tile& tile, const uint32_t* keys,
                                                        const uint32_t* following, int num_vectors, float* scores) {
        // Sums of all groups and of one are in registers, if there are so many.
        constexpr int most = NUM_SCALES > 1 && W == 16 && N * TERMS > 5 ? 1 : most_vectors<IS_UNPACKED>(N);
        auto next = reinterpret_cast<const char*>(following);
        in_some_vectors<most>(num_vectors, [&]<int V>(int i) {
            vec sums[N][V] = {};
            for (int g = 0; g < NUM_SCALES; ++g) {
                integers s[N * TERMS][V][1] = {};
                const auto left = [&]<int part>(int n, int term, int64_t row) {
                    int32_t pair;
                    std::memcpy(&pair, q[n].pairs[term][(g * ROWS + row) * PARTS + part], 4);
                    return pair;
                };
                multiply<IS_UNPACKED, TILE>(left, keys + g * ROWS * (IS_UNPACKED ? PARTS : 1) * TILE + W * i, ROWS,
                                            NextCodes{next}, s);
                for (int v = 0; v < V; ++v) {
                    const vec scale = load_scales(tile.key_scales + g * TILE + W * (i + v));
                    unrolled<N>([&]<int n>() { sums[n][v] = fused(joined(s, n, v, 0), scale, sums[n][v]); });
                }
            }
            unrolled<N>([&]<int n>() {
                for (int v = 0; v < V; ++v) store(scores + n * TILE + W * (i + v), sums[n][v] * q[n].step);
            });
        });
        if (!IS_UNPACKED) prefetch_scales(NextCodes{next});
    }

    template <int N, bool IS_UNPACKED>
    __attribute__((noinline)) static void weigh_vectors(const CodedWeights<Form>* weights, const Tile& tile,
                                                        const uint32_t* values, const uint32_t* following,
                                                        const float* scale, float* acc) {
        constexpr int most = std::min(SCALED_BYTES / W, most_vectors<IS_UNPACKED>(N) / HALVES);
        auto next = reinterpret_cast<const char*>(following);
        for (int g = 0; g < NUM_SCALES; ++g)
            in_some_vectors<most>(SCALED_BYTES / W, [&]<int V>(int i) {
                integers s[N * TERMS][V][HALVES] = {};
                const auto left = [&]<int part>(int n, int term, int64_t quad) {
                    return int32_t(weights[n].pairs[term][g][2 * (tile.first_group + quad) + part / HALVES]);
                };
                multiply<IS_UNPACKED, TOKEN_BYTES>(left, values + g * SCALED_BYTES + W * i, tile.num_groups, NextCodes{next}, s);
                unrolled<HALVES>([&]<int h>() {
                    if (!Form::has_half(g, h)) return;
                    unrolled<N>([&]<int n>() {
                        for (int v = 0; v < V; ++v) {
                            float* to = acc + n * HEAD_SIZE + g * SCALED + h * SCALED_BYTES + W * (i + v);
                            const vec part = joined(s, n, v, h);
                            store(to, fused(part, broadcast(weights[n].steps[g]), load(to) * scale[n]));
                        }
                    });
                });
            });
        if (!IS_UNPACKED) prefetch_scales(NextCodes{next});
    }
};

template <typename Pools>
struct CodedKernel : CodedTiles<CodedForm<Pools>> {
    using Form = CodedForm<Pools>;
    using Pool = typename Pools::Pool;
    using Query = CodedQuery<Form>;
    static constexpr int QUERY_SIZE = 1;
    // Prompts by float32 where vectors are short; else integers are faster, and a prompt's tokens have the bits of steps.
    static constexpr bool has_chunks = W == 8;
    static constexpr int64_t QUERY_BLOCK = MAX_QUERIES, CHUNK_BLOCK = has_chunks ? CHUNK_QUERIES : MAX_QUERIES;
    using Scratch = CodedScratch<Form>;
    template <typename S>
    static void stage(const S* from, Query* to) {
        round_query<Form>(from, to);
    }
    static int64_t attend(const Problem& p, const Task& task, const Segment* segments, const Pool* k_pool, const Pool* v_pool,
                          const Query* q, Scratch& scratch, float* maximum, float* total, float* acc, const Mass& mass) {
        if (has_chunks && p.is_prefill() && !mass.data)
            return attend_chunk(scratch.tile, p, task, segments, k_pool, v_pool, q, scratch.chunk, maximum, total, acc);
        scratch.value_scales.tile = nullptr;  // of another task
#if defined(HAS_CODE_REGISTERS)
        scratch.registers.begin(task, q);
#endif
        const CodedTiles<Form> tiles{{}, &scratch};
        return attend_tiles<CodedKernel>(tiles, p, task, segments, k_pool, v_pool, q, scratch, maximum, total, acc, mass);
    }
};
using CodedInt8 = CodedKernel<QuadPools>;
using CodedInt4 = CodedKernel<NibblePools>;
