// Prefill in float32: a chunk of a prompt over the pools of native_float32.h.
//
// Each query has a lane of its own, so that both products multiply a number of the cache, in all lanes, by a vector of
// queries or weights, and the softmax needs no sums across lanes. The result for a query is the same to the bit whatever
// other queries are computed with it.

constexpr int ACROSS = 2 * W;           // queries that are computed together, in the lanes of two vectors
constexpr int DOWN = W == 16 ? 8 : 4;   // rows of a product at a time; their sums fill half of the registers

struct ChunkScratch {
    alignas(64) float queries[MAX_QUERIES * HEAD_SIZE];  // [group of ACROSS queries][HEAD_SIZE][ACROSS]
    alignas(64) float acc[MAX_QUERIES * HEAD_SIZE];      // weighted values, in the same order
    alignas(64) float weights[TILE * ACROSS];            // scores, then weights, of one group: [key][ACROSS]
    alignas(64) float maximum[MAX_QUERIES], total[MAX_QUERIES], scale[ACROSS];
};

// out [N][ACROSS] = out times scale [ACROSS], or nothing if that is null, plus left [N][steps] times right [steps][ACROSS].
// Entry (n, k) of `left` is left[n * ROW + k * STEP]. Not inlined, since the loop then needs more registers than there are.
template <int N, int ROW, int STEP>
__attribute__((noinline)) void chunk_product(const float* left, const float* right, int64_t steps, const float* scale,
                                             float* out) {
    vec a[N][2] = {};
    if (scale)
        for (int n = 0; n < N; ++n)
            for (int i = 0; i < 2; ++i) a[n][i] = load(out + n * ACROSS + i * W) * load(scale + i * W);
    for (int64_t k = 0; k < steps; ++k) {
        const vec x = load(right + k * ACROSS), y = load(right + k * ACROSS + W);
        for (int n = 0; n < N; ++n) {
            const float number = left[n * ROW + k * STEP];
            a[n][0] += number * x;
            a[n][1] += number * y;
        }
    }
    for (int n = 0; n < N; ++n)
        for (int i = 0; i < 2; ++i) *reinterpret_cast<vec*>(out + n * ACROSS + i * W) = a[n][i];
}

template <int ROW, int STEP>
inline void chunk_products(int64_t rows, const float* left, const float* right, int64_t steps, const float* scale,
                           float* out) {
    int64_t n = 0;
    for (; n + DOWN <= rows; n += DOWN)
        chunk_product<DOWN, ROW, STEP>(left + n * ROW, right, steps, scale, out + n * ACROSS);
    for (; n < rows; ++n) chunk_product<1, ROW, STEP>(left + n * ROW, right, steps, scale, out + n * ACROSS);
}

// Softmax of a group's scores for `count` keys: weights relative to the running `maximum` [ACROSS], which is updated.
// Sets `scale` [ACROSS], the factors for earlier sums.
inline void chunk_softmax(float* scores, int64_t count, float* maximum, float* scale) {
    float top[ACROSS];
    for (int i = 0; i < ACROSS; ++i) top[i] = maximum[i];
    for (int64_t j = 0; j < count; ++j)
        for (int i = 0; i < ACROSS; ++i) top[i] = std::max(top[i], scores[j * ACROSS + i]);
    for (int64_t j = 0; j < count; ++j)
        for (int i = 0; i < ACROSS; ++i) scores[j * ACROSS + i] = exp_negative(scores[j * ACROSS + i] - top[i]);
    for (int i = 0; i < ACROSS; ++i) scale[i] = exp_negative(maximum[i] - top[i]);
    for (int i = 0; i < ACROSS; ++i) maximum[i] = top[i];
}

// Adds the weights of `count` keys to total [ACROSS], whose sums before are scaled.
inline void chunk_sum(const float* weights, int64_t count, const float* scale, float* total) {
    float added[ACROSS] = {};
    for (int64_t j = 0; j < count; ++j)
        for (int i = 0; i < ACROSS; ++i) added[i] += weights[j * ACROSS + i];
    for (int i = 0; i < ACROSS; ++i) total[i] = total[i] * scale[i] + added[i];
}

// The queries of one task. Lanes past the last one repeat its visibility, and their results are not used.
class Chunk {
public:
    Chunk(const Problem& p, const Task& task, const float* q, ChunkScratch& scratch) : p(p), task(task), x(scratch) {
        const int64_t M = task.num_queries, lanes = num_groups() * ACROSS;
        std::fill_n(x.queries, lanes * HEAD_SIZE, 0.0f);
        std::fill_n(x.acc, lanes * HEAD_SIZE, 0.0f);
        std::fill_n(x.maximum, lanes, HIDDEN);
        std::fill_n(x.total, lanes, 0.0f);
        for (int64_t m = 0; m < M; ++m)
            for (int d = 0; d < HEAD_SIZE; ++d) x.queries[place(m, d)] = q[m * HEAD_SIZE + d];
    }

    int64_t num_groups() const { return (task.num_queries + ACROSS - 1) / ACROSS; }

    // Attention of one group to `count` keys and values [count][HEAD_SIZE] from `position` on.
    void attend(int64_t group, const float* keys, const float* values, int64_t position, int64_t count) {
        const int64_t first = group * ACROSS;
        float *maximum = x.maximum + first, *total = x.total + first;
        chunk_products<HEAD_SIZE, 1>(count, keys, x.queries + first * HEAD_SIZE, HEAD_SIZE, nullptr, x.weights);
        const bool is_cut = seen(first, position, count).to < count || seen(first + ACROSS - 1, position, count).from > 0;
        if (is_cut) hide(first, position, count, HIDDEN);
        chunk_softmax(x.weights, count, maximum, x.scale);
        if (is_cut) hide(first, position, count, 0.0f);
        chunk_sum(x.weights, count, x.scale, total);
        chunk_products<1, HEAD_SIZE>(HEAD_SIZE, values, x.weights, count, x.scale, x.acc + first * HEAD_SIZE);
    }

    void results(float* maximum, float* total, float* acc) const {
        std::copy_n(x.maximum, task.num_queries, maximum);
        std::copy_n(x.total, task.num_queries, total);
        for (int64_t m = 0; m < task.num_queries; ++m)
            for (int d = 0; d < HEAD_SIZE; ++d) acc[m * HEAD_SIZE + d] = x.acc[place(m, d)];
    }

private:
    static int64_t place(int64_t m, int d) { return (m / ACROSS * HEAD_SIZE + d) * ACROSS + m % ACROSS; }

    Problem::Span seen(int64_t m, int64_t position, int64_t count) const {
        return p.seen(task, std::min(m, task.num_queries - 1), position, count);
    }

    // Sets the entries of the keys that a query of the group does not see.
    void hide(int64_t first, int64_t position, int64_t count, float value) {
        for (int i = 0; i < ACROSS; ++i) {
            const auto [from, to] = seen(first + i, position, count);
            for (int64_t j = 0; j < from; ++j) x.weights[j * ACROSS + i] = value;
            for (int64_t j = to; j < count; ++j) x.weights[j * ACROSS + i] = value;
        }
    }

    const Problem& p;
    const Task& task;
    ChunkScratch& x;
};

// As `attend_piece` of native_float32.h. Keys after the last query are not read.
inline int64_t attend_chunk(const Problem& p, const Task& task, const Segment* segments, const float* k_pool, const float* v_pool,
                     const float* q, ChunkScratch& x, float* maximum, float* total, float* acc) {
    const int64_t end = p.seq_lens[task.row] + (task.first_query + task.num_queries - 1) / p.group() + 1;
    int64_t read = 0;
    Chunk chunk(p, task, q, x);
    for (int64_t i = task.segment_begin; i < task.segment_end; ++i) {
        const Segment& segment = segments[i];
        const int64_t stop = std::min(segment.count, end - segment.first);
        for (int64_t at = 0, count; at < stop; at += count) {
            const int64_t first = (segment.slot + task.head * p.block_size + at) * HEAD_SIZE;
            count = std::min(tile_end(segment.first + at) - segment.first, stop) - at;
            read += count;
            for (int64_t group = 0; group < chunk.num_groups(); ++group)
                chunk.attend(group, k_pool + first, v_pool + first, segment.first + at, count);
        }
    }
    chunk.results(maximum, total, acc);
    return read;
}
