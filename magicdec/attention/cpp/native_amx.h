// The bfloat16 path of native.cpp on the matrix unit AMX, over the same pools as native_bf16.h. A product takes about the
// same time for 16 queries as for one. It serves short chunks; native_registers.h has prefill.
//
// Keys are processed in tiles, which end at multiples of TILE, and these in groups of 32 tokens, which begin at multiples
// of 32. A token outside the range has weight 0; what the pool holds for it is finite (kv/pool.py). The result for a query
// is the same to the bit whatever other queries are computed with it.
constexpr int64_t GROUP = 2 * amx::STEP;  // tokens of one product of weights and values
constexpr int64_t TILE_GROUPS = TILE / GROUP;      // of a tile: two

// Per thread. Queries are in equal blocks of rows, of which the last may have a few more rows than there are queries.
struct AmxScratch {
    alignas(64) float scores[MAX_QUERIES * TILE];
    alignas(64) uint32_t weights[MAX_QUERIES * TILE / 2];  // bfloat16 pairs
    alignas(64) float acc[MAX_QUERIES * HEAD_SIZE];
    amx::Registers registers;
};

// Keys of one segment that are processed together, in whole groups. `keys` is the pool's tile in which they lie, from its
// group `first` on; `values` is where that group begins. Tokens before `low` and from `high` on do not belong to the segment.
struct Stretch {
    const uint32_t *keys, *values;
    int64_t first, groups, low, high;

    // Keys from `slot` on: `count` of them, or as many as the tile has.
    static Stretch at(const bfloat16* k_pool, const bfloat16* v_pool, int64_t slot, int64_t count) {
        const int64_t tile = slot / TILE * TILE * PAIRS, lane = slot % TILE, first = lane / GROUP;
        const int64_t low = lane % GROUP, high = low + std::min(count, TILE - lane);
        return {reinterpret_cast<const uint32_t*>(k_pool) + tile,
                reinterpret_cast<const uint32_t*>(v_pool) + tile + first * amx::STEP * HEAD_SIZE,
                first, (high + GROUP - 1) / GROUP, low, high};
    }
    const uint32_t* keys_of(int64_t group) const { return keys + (first + group) * GROUP; }
};

class AmxQueries {
public:
    AmxQueries(const uint32_t* q, int64_t M, bool is_far, AmxScratch& scratch)
        : q(q), blocks((M + amx::ROWS - 1) / amx::ROWS), rows((M + blocks - 1) / blocks), scores(scratch.scores),
          weights(scratch.weights), acc(scratch.acc), is_far(is_far), registers(scratch.registers) {
        std::fill(acc, acc + blocks * rows * HEAD_SIZE, 0.0f);
    }

    // Scores of all queries for all groups. While keys are read, those of `next` are prefetched. Call it before `weigh`.
    void score(const Stretch& keys, const Stretch& next) const {
        registers.load(rows);
        amx::Ahead ahead{next.keys_of(0), amx::STEP * TILE_GROUPS / keys.groups, is_far, next.groups < TILE_GROUPS};
        for (int64_t b = 0; b < blocks; b += 2, ahead.lines = 0)
            if (b + 1 == blocks && keys.groups == TILE_GROUPS) {
                score_part<1, 4>(b, 0, keys, ahead);
            } else {
                for (int64_t g = 0; g < keys.groups; ++g)
                    b + 1 == blocks ? score_part<1, 2>(b, g, keys, ahead) : score_part<2, 2>(b, g, keys, ahead);
            }
    }

    // Softmax of query m's scores: weights of the visible tokens [from, to), relative to the running `maximum`. Updates
    // `maximum` and `total`, and scales the sums of before. `sums` receives the weights of each vector of keys, or is null.
    float soften(int64_t m, int64_t groups, int64_t from, int64_t to, float* maximum, float* total, float* sums) const {
        float scale;
        by_vectors(groups * GROUP, [&]<int C>() {
            soften_to_pairs<C>(scores + m * TILE, from, to, LOG2_E / std::sqrt(float(HEAD_SIZE)), maximum, total, &scale,
                               weights + m * TILE / 2, sums);
        });
        if (scale != 1.0f)
            for (int d = 0; d < HEAD_SIZE; ++d) acc[m * HEAD_SIZE + d] *= scale;
        return scale;
    }

    // Add the weighted values of all groups to the sums of all queries.
    void weigh(const Stretch& keys, const Stretch& next) const {
        amx::Ahead ahead{next.values, amx::STEP * next.groups / keys.groups, is_far};
        constexpr int REST = HEAD_SIZE % 64 / 16, last = HEAD_SIZE - 16 * REST;
        for (int64_t b = 0; b < blocks; b += 2, ahead.lines = 0) {
            if (b + 1 == blocks) {
                for (int d = 0; d < last; d += 64) weigh_part<1, 4>(b, d, keys, ahead);
                if constexpr (REST > 0) weigh_part<1, REST>(b, last, keys, ahead);
            } else {
                for (int d = 0; d + 32 <= HEAD_SIZE; d += 32) weigh_part<2, 2>(b, d, keys, ahead);
                if constexpr (REST % 2 > 0) weigh_part<2, 1>(b, HEAD_SIZE - 16, keys, ahead);
            }
        }
    }

private:
    template <int BLOCKS, int C>
    void score_part(int64_t b, int64_t group, const Stretch& keys, amx::Ahead& ahead) const {
        amx::zero_sums<BLOCKS * C>();
        amx::add_products<BLOCKS, C>({q + b * rows * PAIRS, PAIRS * 4, rows * PAIRS},
                                     {keys.keys_of(group), TILE * 4}, PAIRS / amx::STEP, ahead);
        amx::store_sums<BLOCKS, C>(scores + b * rows * TILE + group * GROUP, TILE * 4, rows * TILE);
    }

    template <int BLOCKS, int C>
    void weigh_part(int64_t b, int d, const Stretch& keys, amx::Ahead& ahead) const {
        float* sums = acc + b * rows * HEAD_SIZE + d;
        amx::load_sums<BLOCKS, C>(sums, HEAD_SIZE * 4, rows * HEAD_SIZE);
        amx::add_products<BLOCKS, C>({weights + b * rows * TILE / 2, TILE * 2, rows * TILE / 2},
                                     {keys.values + d, HEAD_SIZE * 4}, keys.groups, ahead);
        amx::store_sums<BLOCKS, C>(sums, HEAD_SIZE * 4, rows * HEAD_SIZE);
    }

    const uint32_t* q;
    int64_t blocks, rows;
    float* scores;
    uint32_t* weights;
    float* acc;
    bool is_far;
    amx::Registers& registers;
};

struct AmxBf16 : Bf16 {
    using Scratch = AmxScratch;
    // Whether it is used. The number of tokens does not decide between decoding and verification, which agree to the bit.
    static bool serves(const Problem& p) {
        return !p.is_prefill() && PAIRS % amx::STEP == 0 && may_use_tiles();
    }

    // Like attend_piece of native_float32.h, but q is [queries][PAIRS] bfloat16 pairs and not scaled.
    static int64_t attend(const Problem& p, const Task& task, const Segment* segments, const bfloat16* k_pool,
                          const bfloat16* v_pool, const Query* q, Scratch& x, float* maximum, float* total, float* acc,
                          const Mass& mass) {
        const int64_t M = task.num_queries, head = task.head * p.block_size;
        const int64_t end = p.position(task.row, (task.first_query + M - 1) / p.group()) + 1;  // of what is visible
        int64_t read = 0, met = 0;  // keys read, and blocks of keys processed for `mass`
        const AmxQueries queries(q, M, task.is_far, x);
        mass.clear(M);
        std::fill(maximum, maximum + M, HIDDEN);
        std::fill(total, total + M, 0.0f);
        // Adds the keys of a stretch, `count` from `position` on, to the results. Not inlined, as in native_tile.h.
        auto add = [&](const Stretch& keys, const Stretch& next, int64_t position, int64_t count)
                       __attribute__((noinline)) {
            queries.score(keys, next);
            for (int64_t m = 0; m < M; ++m) {
                const auto [from, to] = p.seen(task, m, position, count);
                alignas(16) float sums[TILE / LANES];
                const float scale = queries.soften(m, keys.groups, keys.low + from, keys.low + to, maximum + m, total + m,
                                                   mass.data ? sums : nullptr);
                if (!mass.data) continue;
                mass.rescale(m, met, scale);  // one vector holds one block of keys
                std::copy_n(sums + keys.low / LANES, blocks_touched(position, count), mass.of(m) + met);
            }
            queries.weigh(keys, next);
        };
        for (int64_t i = task.segment_begin; i < task.segment_end; ++i) {
            const Segment& segment = segments[i];
            const int64_t stop = std::min(segment.count, end - segment.first), slot = segment.slot + head;
            const bool is_last = i + 1 == task.segment_end;
            const int64_t following = is_last ? task.next : head + segments[i + 1].slot;
            const int64_t next_count = is_last ? task.next_count : segments[i + 1].count;
            for (int64_t at = 0, count; at < stop; at += count) {
                const int64_t position = segment.first + at;
                count = std::min(position / TILE * TILE + TILE - segment.first, stop) - at;
                read += count;
                const auto keys = Stretch::at(k_pool, v_pool, slot + at, count);
                const auto next = at + count < stop
                                      ? Stretch::at(k_pool, v_pool, slot + at + count, stop - at - count)
                                      : Stretch::at(k_pool, v_pool, following, next_count);
                add(keys, next, position, count);
                met += blocks_touched(position, count);
            }
        }
        std::copy_n(x.acc, M * HEAD_SIZE, acc);
        for (int64_t m = 0; m < M; ++m) maximum[m] *= LN_2;  // to base e
        return read;
    }
};
