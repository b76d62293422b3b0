// Attention over tiles of bfloat16 pairs (native_tile.h), int8 (native_int8.h) or int4 (native_int4.h) for every CPU: they
// are widened to float32 in registers (kernels/wide.h). Queries, weights and sums are float32.

inline vec load_scales(const bfloat16* scales) { return load_wide(&scales->value); }

// A tile that is widened for the chunk of a prefill; as FloatRows of native_chunk.h.
struct WidenedTile {
    static constexpr int KEY = 1, DIMENSION = TILE;
    static inline const float SCALE = 1.0f / std::sqrt(float(HEAD_SIZE));
    const float *keys, *values;
    alignas(64) float widened[2 * TILE * HEAD_SIZE];
    void find(const bfloat16* k_pool, const bfloat16* v_pool, int64_t slot) {
        const int64_t tile = slot / TILE * TILE * HEAD_SIZE;
        point_at(slot % TILE);
        widen_pairs<TILE>(k_pool + tile, PAIRS, widened);
        widen_pairs<HEAD_SIZE>(v_pool + tile, TILE / 2, widened + TILE * HEAD_SIZE);
    }
    void find(const int8_t* k_pool, const int8_t* v_pool, int64_t slot) {
        const QuadTile tile = QuadPools::at(k_pool, v_pool, slot / TILE * TILE, TILE);
        point_at(slot % TILE);
        for (int d = 0; d < HEAD_SIZE; ++d)
            for (int i = 0; i < TILE; i += W)
                store(widened + d * TILE + i,
                      of_quad(load_bits(tile.keys + d / 4 * TILE + i), d % 4) * load(tile.key_scales + i));
        for (int t = 0; t < TILE; ++t)
            for (int i = 0; i < HEAD_SIZE; i += W)
                store(widened + (TILE + t) * HEAD_SIZE + i,
                      of_quad(load_bits(tile.values + t / 4 * HEAD_SIZE + i), t % 4) * tile.value_scales[t]);
    }
    void find(const uint8_t* k_pool, const uint8_t* v_pool, int64_t slot) {
        const NibbleTile tile = NibblePools::at(k_pool, v_pool, slot / TILE * TILE, TILE);
        point_at(slot % TILE);
        for (int d = 0; d < HEAD_SIZE; ++d) {
            const int g = d / GROUP_SIZE, part = d % 4 * 2 + d % GROUP_SIZE / HALF, row = g * HALF / 4 + d % HALF / 4;
            for (int i = 0; i < TILE; i += W)
                store(widened + d * TILE + i,
                      of_octet(load_bits(tile.keys + row * TILE + i), part) * load_scales(tile.key_scales + g * TILE + i));
        }
        for (int t = 0; t < TILE; ++t)
            for (int d = 0; d < HEAD_SIZE; d += W) {
                const int g = d / GROUP_SIZE, part = t % 4 * 2 + d % GROUP_SIZE / HALF;
                const uint32_t* row = tile.values + t / 4 * TOKEN_BYTES + g * HALF;
                store(widened + (TILE + t) * HEAD_SIZE + d,
                      of_octet(load_bits(row + d % HALF), part) * to_float(tile.value_scales[g * TILE + t]));
            }
    }
    void point_at(int64_t lane) { keys = widened + lane, values = widened + (TILE + lane) * HEAD_SIZE; }
    // Rows [2 * pairs][WIDTH] from [pairs][WIDTH][2].
    template <int WIDTH>
    static void widen_pairs(const bfloat16* from, int64_t pairs, float* to) {
        for (int64_t pair = 0; pair < pairs; ++pair, from += 2 * WIDTH, to += 2 * WIDTH)
            for (int i = 0; i < WIDTH; i += W) {
                bits both;
                std::memcpy(&both, from + 2 * i, sizeof(both));
                store(to + i, (vec)(both << 16));
                store(to + WIDTH + i, (vec)(both & 0xffff0000));
            }
    }
};

struct WideScratch {
    alignas(64) float scores[MAX_QUERIES * TILE];  // which become weights
    float scale[MAX_QUERIES];
    ChunkScratch chunk;
    WidenedTile tile;
    float* weights_of(int64_t query) { return scores + query * TILE; }
};

// Softmax of one query's scores for a tile, in place: weights of the visible lanes [from, to), relative to the running
// `maximum`, and zeros in the others. Updates `maximum` and `total`; `scale` is the factor for earlier sums, and `sums` get
// the weights' sums by LANES keys, or are null. If there are `value_scales`, they multiply the weights at last. Not inlined,
// so that a query has the same bits wherever this is called.
__attribute__((noinline)) void soften_wide(float* scores, int64_t from, int64_t to, float factor, float* maximum, float* total,
                                           float* scale, float* sums, const float* value_scales) {
    constexpr int V = TILE / W;
    typedef int32_t lanes __attribute__((vector_size(W * 4)));
    const bool is_whole = from <= 0 && to >= TILE;  // mostly
    vec s[V], top = broadcast(HIDDEN), sum = {};
    lanes lane, seen[V];
    for (int i = 0; i < W; ++i) lane[i] = i;
    for (int i = 0; i < V; ++i) {
        s[i] = load(scores + W * i) * factor;
        if (!is_whole) {
            seen[i] = (lane + W * i >= int(from)) & (lane + W * i < int(to));
            s[i] = seen[i] ? s[i] : broadcast(HIDDEN);
        }
        top = larger(top, s[i]);
    }
    const float highest = std::max(*maximum, max_across(top));
    for (int i = 0; i < V; ++i) {
        s[i] = exp2_wide(s[i] - highest);
        if (!is_whole) s[i] = seen[i] ? s[i] : vec{};
        sum += s[i];
    }
    // Mostly the maximum stays. Then the factor is exactly 1.
    *scale = highest == *maximum ? 1.0f : exp2_wide(broadcast(*maximum - highest))[0];
    *total = *total * *scale + sum_across(sum);
    *maximum = highest;
    if (sums)
        for (int i = 0; i < TILE / LANES && LANES * i < to; ++i) {
            vec part = s[i * LANES / W];
            for (int j = 1; j < LANES / W; ++j) part += s[i * LANES / W + j];
            sums[i] = sum_across(part);
        }
    for (int i = 0; i < V; ++i) store(scores + W * i, value_scales ? s[i] * load(value_scales + W * i) : s[i]);
}

// Calls body.operator()<V>(i) for vectors i, i + 1, .. i + V - 1 of COUNT, with V at most MOST.
template <int COUNT, int MOST, typename Body>
inline void in_vectors(Body body) {
    constexpr int rest = COUNT % MOST;
    for (int i = 0; i + MOST <= COUNT; i += MOST) body.template operator()<MOST>(i);
    if constexpr (rest > 0) body.template operator()<rest>(COUNT - rest);
}

// What both storages share, by their `Pools`, whose entries hold GROUP numbers: `multiply<N, V>(left, entries, stride, column, count,
// ahead, sums)` adds the products of `count` entries of V vectors of columns from `column` on. A few columns are multiplied at a time, as registers allow; the next tile is
// prefetched in the order of its addresses all the same, since memory is read at its full rate only so.
template <typename Tiles, typename Pools>
struct WideProducts : Pools {
    using Left = float;
    static constexpr bool has_registers = false;
    static void mix_query(float*) {}  // keys are stored as they are

    template <int N, int C, typename AnyTile>
    void score(const float* q, const AnyTile& tile, int64_t ahead, float* scores) const {
        auto next = reinterpret_cast<const char*>(tile.keys + ahead);
        in_vectors<C * LANES / W, vectors_of(N)>([&]<int V>(int i) {
            vec s[N][V] = {};
            Tiles::multiply(::Left{q, HEAD_SIZE, 1}, tile.keys, TILE, W * i, HEAD_SIZE / Tiles::GROUP, InOrder{next}, s);
            for (int n = 0; n < N; ++n)
                for (int v = 0; v < V; ++v) store(scores + n * TILE + W * (i + v), Tiles::scaled(tile, W * (i + v), s[n][v]));
        });
    }

    template <int C, typename AnyTile>
    void soften(const AnyTile& tile, float* scores, int64_t from, int64_t to, float factor, float* maximum, float* total,
                float* scale, float*, float* sums) const {
        soften_wide(scores, from, to, factor, maximum, total, scale, sums, Tiles::value_scales(tile));
    }

    template <int N, typename AnyTile>
    void weigh(const float* weights, const AnyTile& tile, int64_t ahead, const float* scale, float* acc) const {
        const ::Left left = {weights + Tiles::GROUP * tile.first_group, TILE, 1};
        auto next = reinterpret_cast<const char*>(tile.values + ahead);
        in_vectors<HEAD_SIZE / W, vectors_of(N)>([&]<int V>(int i) {
            vec a[N][V];
            for (int n = 0; n < N; ++n)
                for (int v = 0; v < V; ++v) a[n][v] = load(acc + n * HEAD_SIZE + W * (i + v)) * scale[n];
            Tiles::multiply(left, tile.values, HEAD_SIZE, W * i, tile.num_groups, InOrder{next}, a);
            for (int n = 0; n < N; ++n)
                for (int v = 0; v < V; ++v) store(acc + n * HEAD_SIZE + W * (i + v), a[n][v]);
        });
    }
};

struct WidePairs : WideProducts<WidePairs, PairPools> {
    static constexpr int GROUP = 2;
    template <int N, int V>
    static void multiply(::Left left, const uint32_t* entries, int64_t stride, int column, int64_t pairs, InOrder ahead,
                         vec (&sums)[N][V]) {
        ::multiply(left, entries + column, stride, pairs, sums, ahead);
    }
    static vec scaled(const Tile&, int, vec scores) { return scores; }
    static const float* value_scales(const Tile&) { return nullptr; }
};

struct WideQuads : WideProducts<WideQuads, QuadPools> {
    static constexpr int GROUP = 4;
    template <int N, int V>
    static void multiply(::Left left, const uint32_t* entries, int64_t stride, int column, int64_t quads, InOrder ahead,
                         vec (&sums)[N][V]) {
        for (int64_t quad = 0; quad < quads; ++quad, left.x += 4) {
            const uint32_t* row = entries + quad * stride + column;
            for (int i = 0; i < V; ++i) {
                const bits all = load_bits(row + W * i);
                if (W == 16 || i % 2 == 0) ahead(row);
                unrolled<4>([&]<int part>() {
                    const vec x = of_quad(all, part);
                    for (int n = 0; n < N; ++n)
                        sums[n][i] = fused(broadcast(left.x[n * left.row + part]), x, sums[n][i]);
                });
            }
        }
    }
    static vec scaled(const QuadTile& tile, int column, vec scores) { return scores * load(tile.key_scales + column); }
    static const float* value_scales(const QuadTile& tile) { return tile.value_scales; }
};

// As WideProducts, of codes whose scales differ among the dimensions of a token: they multiply a group's part of a score, and
// the weights for a group of values.
struct WideNibbles : NibblePools {
    using Left = float;
    static constexpr bool has_registers = false;

    template <int N, int C>
    void score(const float* q, const NibbleTile& tile, int64_t ahead, float* scores) const {
        auto next = reinterpret_cast<const char*>(tile.keys + ahead);
        in_vectors<C * LANES / W, vectors_of(N)>([&]<int V>(int i) {
            for (int g = 0; g < GROUPS; ++g) {
                vec s[N][V] = {};
                score_group<N, V>(q + g * GROUP_SIZE, tile.keys + g * (HALF / 4) * TILE + W * i, has_high(g), InOrder{next}, s);
                for (int v = 0; v < V; ++v) {
                    const vec scale = load_scales(tile.key_scales + g * TILE + W * (i + v));
                    for (int n = 0; n < N; ++n) {
                        float* to = scores + n * TILE + W * (i + v);
                        store(to, g ? fused(s[n][v], scale, load(to)) : s[n][v] * scale);
                    }
                }
            }
        });
    }

    template <int C>
    void soften(const NibbleTile&, float* scores, int64_t from, int64_t to, float factor, float* maximum, float* total,
                float* scale, float*, float* sums) const {
        soften_wide(scores, from, to, factor, maximum, total, scale, sums, nullptr);
    }

    template <int N>
    void weigh(const float* weights, const NibbleTile& tile, int64_t ahead, const float* scale, float* acc) const {
        auto next = reinterpret_cast<const char*>(tile.values + ahead);
        const int64_t first = 4 * tile.first_group, last = first + 4 * tile.num_groups;
        alignas(64) float scaled[N * TILE];
        for (int g = 0; g < GROUPS; ++g) {
            for (int64_t t = first / W * W; t < last; t += W) {
                const vec own = load_scales(tile.value_scales + g * TILE + t);
                for (int n = 0; n < N; ++n) store(scaled + n * TILE + t, load(weights + n * TILE + t) * own);
            }
            in_vectors<HALF / W, N == 1 ? HALF / W : 1>([&]<int V>(int i) {
                float* to = acc + g * GROUP_SIZE + W * i;
                const uint32_t* values = tile.values + g * HALF + W * i;
                if (has_high(g))
                    weigh_group<N, V, 2>(scaled + first, values, tile.num_groups, InOrder{next}, scale, to);
                else
                    weigh_group<N, V, 1>(scaled + first, values, tile.num_groups, InOrder{next}, scale, to);
            });
        }
    }

private:
    // Adds the products of N queries with V vectors of keys, of one group.
    template <int N, int V>
    static void score_group(const float* q, const uint32_t* keys, bool is_whole, InOrder ahead, vec (&sums)[N][V]) {
        for (int row = 0; row < HALF / 4; ++row, q += 4, keys += TILE)
            for (int v = 0; v < V; ++v) {
                const bits octets = load_bits(keys + W * v);
                if (W == 16 || v % 2 == 0) ahead(keys);
                unrolled<4>([&]<int i>() {
                    const vec low = of_octet(octets, 2 * i);
                    for (int n = 0; n < N; ++n) sums[n][v] = fused(broadcast(q[n * HEAD_SIZE + i]), low, sums[n][v]);
                    if (!is_whole) return;
                    const vec high = of_octet(octets, 2 * i + 1);
                    for (int n = 0; n < N; ++n) sums[n][v] = fused(broadcast(q[n * HEAD_SIZE + HALF + i]), high, sums[n][v]);
                });
            }
    }

    // Adds to `acc` times `scale` the weighted sums of W * V bytes of values, for the HALVES that they have.
    template <int N, int V, int HALVES>
    static void weigh_group(const float* weights, const uint32_t* values, int64_t quads, InOrder ahead, const float* scale,
                            float* acc) {
        vec a[N][V][HALVES];
        for (int n = 0; n < N; ++n)
            for (int v = 0; v < V; ++v)
                for (int h = 0; h < HALVES; ++h) a[n][v][h] = load(acc + n * HEAD_SIZE + HALF * h + W * v) * scale[n];
        for (int64_t quad = 0; quad < quads; ++quad, weights += 4, values += TOKEN_BYTES)
            for (int v = 0; v < V; ++v) {
                const bits octets = load_bits(values + W * v);
                if (W == 16 || v % 2 == 0) ahead(values);
                unrolled<4>([&]<int t>() {
                    unrolled<HALVES>([&]<int h>() {
                        const vec x = of_octet(octets, 2 * t + h);
                        for (int n = 0; n < N; ++n)
                            a[n][v][h] = fused(broadcast(weights[n * TILE + t]), x, a[n][v][h]);
                    });
                });
            }
        for (int n = 0; n < N; ++n)
            for (int v = 0; v < V; ++v)
                for (int h = 0; h < HALVES; ++h) store(acc + n * HEAD_SIZE + HALF * h + W * v, a[n][v][h]);
    }
};

template <typename Tiles>
struct WideKernel : Tiles {
    using Pool = typename Tiles::Pool;
    using Query = float;
    static constexpr int QUERY_SIZE = HEAD_SIZE;
    static constexpr int64_t QUERY_BLOCK = MAX_QUERIES, CHUNK_BLOCK = CHUNK_QUERIES;
    using Scratch = WideScratch;
    template <typename S>
    static void stage(const S* from, Query* to) {
        for (int d = 0; d < HEAD_SIZE; ++d) to[d] = to_float(from[d]);
        Tiles::mix_query(to);
    }
    static int64_t attend(const Problem& p, const Task& task, const Segment* segments, const Pool* k_pool, const Pool* v_pool,
                          const Query* q, Scratch& scratch, float* maximum, float* total, float* acc, const Mass& mass) {
        if (p.is_prefill() && !mass.data)
            return attend_chunk(scratch.tile, p, task, segments, k_pool, v_pool, q, scratch.chunk, maximum, total, acc);
        return attend_tiles<WideKernel>(Tiles{}, p, task, segments, k_pool, v_pool, q, scratch, maximum, total, acc, mass);
    }
};
using Wide = WideKernel<WidePairs>;
using WideInt8 = WideKernel<WideQuads>;
using WideInt4 = WideKernel<WideNibbles>;
