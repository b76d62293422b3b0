// Prefill on CPUs without tile registers and dot products: a chunk of a prompt over the pools of native_float32.h, or over
// tiles of bfloat16 (native_tile.h), which are widened once for all queries of a task.
//
// Each query has a lane of its own, so that both products multiply a number of the cache, in all lanes, by a vector of
// queries or weights, and the softmax needs no sums across lanes. The result for a query is the same to the bit whatever
// other queries are computed with it. Scores are to base 2.

constexpr int ACROSS = 2 * W;            // queries that are computed together, in the lanes of two vectors
constexpr int DOWN = W == 16 ? 12 : 6;   // most rows of a product at a time; the sums leave three registers for its factors

// Most queries of a task. A tile is widened, and comes from memory, once for all of them; theirs and their sums stay in L2.
constexpr int CHUNK_QUERIES = std::clamp(16384 / HEAD_SIZE / 32 * 32, MAX_QUERIES, 256);

struct ChunkScratch {
    alignas(64) float queries[CHUNK_QUERIES * HEAD_SIZE];  // [group of ACROSS queries][HEAD_SIZE][ACROSS]
    alignas(64) float acc[CHUNK_QUERIES * HEAD_SIZE];      // weighted values, in the same order
    alignas(64) float weights[TILE * ACROSS];              // scores, then weights, of one group: [key][ACROSS]
    alignas(64) float maximum[CHUNK_QUERIES], total[CHUNK_QUERIES], scale[ACROSS];
};

// Keys and values of float32 pools, where they lie. Element d of key j is keys[j * KEY + d * DIMENSION]; values are rows of
// HEAD_SIZE numbers.
struct FloatRows {
    static constexpr int KEY = HEAD_SIZE, DIMENSION = 1;
    static constexpr float SCALE = 1.0f;  // of the queries, which are scaled when they are staged
    const float *keys, *values;
    void find(const float* k_pool, const float* v_pool, int64_t slot) {
        keys = k_pool + slot * HEAD_SIZE, values = v_pool + slot * HEAD_SIZE;
    }
};

// out [N][ACROSS] = out times scale [ACROSS], or nothing if ADDS is false, plus left [N][steps] times right [steps][ACROSS].
// Entry (n, k) of `left` is left[n * ROW + k * STEP]. Not inlined, since the loop then needs more registers than there are.
template <int N, int ROW, int STEP, bool ADDS>
__attribute__((noinline)) void chunk_product(const float* left, const float* right, int64_t steps, const float* scale,
                                             float* out) {
    vec a[N], b[N];
    unrolled<N>([&]<int n>() {
        a[n] = ADDS ? load(out + n * ACROSS) * load(scale) : vec{};
        b[n] = ADDS ? load(out + n * ACROSS + W) * load(scale + W) : vec{};
    });
    for (int64_t k = 0; k < steps; ++k) {
        const vec x = load(right + k * ACROSS), y = load(right + k * ACROSS + W);
        unrolled<N>([&]<int n>() {
            const vec number = broadcast(left[n * ROW + k * STEP]);
            a[n] = fused(number, x, a[n]);
            b[n] = fused(number, y, b[n]);
        });
    }
    unrolled<N>([&]<int n>() {
        store(out + n * ACROSS, a[n]);
        store(out + n * ACROSS + W, b[n]);
    });
}

template <int ROW, int STEP, bool ADDS>
inline void chunk_products(int64_t rows, const float* left, const float* right, int64_t steps, const float* scale,
                           float* out) {
    in_blocks<DOWN>(rows, [&]<int N>(int64_t n) {
        chunk_product<N, ROW, STEP, ADDS>(left + n * ROW, right, steps, scale, out + n * ACROSS);
    });
}

// Softmax of a group's scores for `count` keys: weights relative to the running `maximum` [ACROSS], which is updated like the
// `total` [ACROSS] of the weights. Sets `scale` [ACROSS], the factors for earlier sums. `is_cut`: some scores are HIDDEN.
template <bool is_cut>
inline void chunk_softmax(float* scores, int64_t count, float* maximum, float* total, float* scale) {
    const vec before[] = {load(maximum), load(maximum + W)};
    vec top[] = {before[0], before[1]}, sum[2] = {};
    for (int64_t j = 0; j < count; ++j)
        for (int i = 0; i < 2; ++i) top[i] = larger(top[i], load(scores + j * ACROSS + i * W));
    const auto weigh = [&]<int KEYS>(float* of) {
        vec weights[2 * KEYS];
        for (int n = 0; n < 2 * KEYS; ++n) weights[n] = load(of + n * W) - top[n % 2];
        exp2_each(weights);
        for (int n = 0; n < 2 * KEYS; ++n) {
            if (is_cut) weights[n] = load(of + n * W) > 0.5f * HIDDEN ? weights[n] : vec{};
            store(of + n * W, weights[n]);
            sum[n % 2] += weights[n];
        }
    };
    int64_t j = 0;
    for (; j + 2 <= count; j += 2) weigh.template operator()<2>(scores + j * ACROSS);
    if (j < count) weigh.template operator()<1>(scores + j * ACROSS);
    for (int i = 0; i < 2; ++i) {
        const vec factor = exp2_wide(before[i] - top[i]);
        store(scale + i * W, factor);
        store(total + i * W, load(total + i * W) * factor + sum[i]);
        store(maximum + i * W, top[i]);
    }
}

// The numbers of query m.
inline void read_query(const float* q, int64_t m, float* numbers) { std::copy_n(q + m * HEAD_SIZE, HEAD_SIZE, numbers); }

// The queries of one task. Lanes past the last one repeat its visibility, and their results are not used.
class Chunk {
public:
    template <typename Query>
    Chunk(const Problem& p, const Task& task, const Query* q, float scale, ChunkScratch& scratch)
        : p(p), task(task), x(scratch) {
        const int64_t M = task.num_queries, lanes = num_groups() * ACROSS;
        std::fill_n(x.queries, lanes * HEAD_SIZE, 0.0f);
        std::fill_n(x.acc, lanes * HEAD_SIZE, 0.0f);
        std::fill_n(x.maximum, lanes, HIDDEN);
        std::fill_n(x.total, lanes, 0.0f);
        for (int64_t m = 0; m < M; ++m) {
            float numbers[HEAD_SIZE];
            read_query(q, m, numbers);
            for (int d = 0; d < HEAD_SIZE; ++d) x.queries[place(m, d)] = numbers[d] * scale;
        }
    }

    int64_t num_groups() const { return (task.num_queries + ACROSS - 1) / ACROSS; }

    // Attention of one group to those of `count` keys and values from `position` on that any of its queries sees.
    template <typename Rows>
    void attend(int64_t group, const Rows& rows, int64_t position, int64_t count) {
        const int64_t first = group * ACROSS, last = first + ACROSS - 1;
        if (seen(first, position, count).from == count) return;  // they have left the window of all
        count = seen(last, position, count).to;
        if (count == 0) return;
        float *maximum = x.maximum + first, *total = x.total + first;
        chunk_products<Rows::KEY, Rows::DIMENSION, false>(count, rows.keys, x.queries + first * HEAD_SIZE, HEAD_SIZE, nullptr,
                                                   x.weights);
        if (seen(first, position, count).to < count || seen(last, position, count).from > 0) {
            hide(first, position, count);
            chunk_softmax<true>(x.weights, count, maximum, total, x.scale);
        } else {
            chunk_softmax<false>(x.weights, count, maximum, total, x.scale);
        }
        chunk_products<1, HEAD_SIZE, true>(HEAD_SIZE, rows.values, x.weights, count, x.scale, x.acc + first * HEAD_SIZE);
    }

    void results(float* maximum, float* total, float* acc) const {
        for (int64_t m = 0; m < task.num_queries; ++m) maximum[m] = x.maximum[m] * LN_2;
        std::copy_n(x.total, task.num_queries, total);
        for (int64_t m = 0; m < task.num_queries; ++m)
            for (int d = 0; d < HEAD_SIZE; ++d) acc[m * HEAD_SIZE + d] = x.acc[place(m, d)];
    }

private:
    static int64_t place(int64_t m, int d) { return (m / ACROSS * HEAD_SIZE + d) * ACROSS + m % ACROSS; }

    Problem::Span seen(int64_t m, int64_t position, int64_t count) const {
        return p.seen(task, std::min(m, task.num_queries - 1), position, count);
    }

    // Hides the scores of the keys that a query of the group does not see.
    void hide(int64_t first, int64_t position, int64_t count) {
        for (int i = 0; i < ACROSS; ++i) {
            const auto [from, to] = seen(first + i, position, count);
            for (int64_t j = 0; j < from; ++j) x.weights[j * ACROSS + i] = HIDDEN;
            for (int64_t j = to; j < count; ++j) x.weights[j * ACROSS + i] = HIDDEN;
        }
    }

    const Problem& p;
    const Task& task;
    ChunkScratch& x;
};

// As `attend_piece` of native_float32.h; `rows` finds keys and values in the pools. Keys after the last query are not read.
template <typename Rows, typename Pool, typename Query>
inline int64_t attend_chunk(Rows& rows, const Problem& p, const Task& task, const Segment* segments, const Pool* k_pool,
                            const Pool* v_pool, const Query* q, ChunkScratch& x, float* maximum, float* total, float* acc) {
    const int64_t end = p.seq_lens[task.row] + (task.first_query + task.num_queries - 1) / p.group() + 1;
    int64_t read = 0;
    Chunk chunk(p, task, q, Rows::SCALE * LOG2_E, x);
    for (int64_t i = task.segment_begin; i < task.segment_end; ++i) {
        const Segment& segment = segments[i];
        const int64_t stop = std::min(segment.count, end - segment.first);
        for (int64_t at = 0, count; at < stop; at += count) {
            const int64_t position = segment.first + at;
            count = std::min(tile_end(position) - segment.first, stop) - at;
            read += count;
            rows.find(k_pool, v_pool, segment.slot + task.head * p.block_size + at);
            for (int64_t group = 0; group < chunk.num_groups(); ++group) chunk.attend(group, rows, position, count);
        }
    }
    chunk.results(maximum, total, acc);
    return read;
}
