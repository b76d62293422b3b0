// One layer's attention, computed together by the threads of a parallel region.
#pragma once
#include "../../kernels/barrier.h"
#include "native_plan.h"

namespace {

// Convert the sums of one row and head, which are relative to the maxima of its pieces, to attention probabilities. They
// are summed over the queries (into the first query's sums), then over the segments that share a block.
inline void merge_mass(const Problem& p, const Plan& plan, int64_t b, int64_t g, const float* results, int64_t width,
                       float* sums, const float* lse, float* out, int64_t num_blocks) {
    const int64_t M = p.num_queries(), rep = p.group();
    std::fill(out, out + num_blocks, 0.0f);
    for (int64_t i = plan.first_piece[b * p.G + g]; i < plan.first_piece[b * p.G + g + 1]; ++i) {
        const Piece& piece = plan.pieces[i];
        float* added = sums + piece.mass;
        for (int64_t m = 0; m < M; ++m) {
            const float total = lse[(b * p.T + m / rep) * p.H + g * rep + m % rep];
            const float weight = exp_negative(results[i * width + m] - total);
            for (int64_t e = 0; e < piece.num_blocks; ++e) {
                const float part = weight * added[m * piece.num_blocks + e];
                added[e] = m ? added[e] + part : part;
            }
        }
        for (int64_t s = piece.segment_begin; s < piece.segment_end; ++s) {
            const Segment& segment = plan.segments[s];
            const int64_t first = segment.first / BLOCK, count = blocks_touched(segment.first, segment.count);
            for (int64_t e = 0; e < count; ++e) out[first + e] += *added++;
        }
    }
}

// The pools of one layer.
template <typename Kernel>
struct Pools {
    typename Kernel::Pool *k, *v;
};

// Attention of one forward over a planned view. `plan_view` is called by one thread, `place` for each token, and
// `attend` and `merge` by all threads of a parallel region, in this order. Threads must meet after each of these three,
// which do not wait, so that several calls can be computed at once. Every layer of a forward may use one plan.
template <typename Kernel, typename S>
class Attention {
public:
    using Query = typename Kernel::Query;

    void plan_view(const Problem& p, const Table& table, const Ranges& ranges, bool with_mass) {
        make_plan(p, table, ranges, Kernel::QUERY_BLOCK, plan);
        constexpr int64_t beyond = 15;  // queries that a tile of 16 may reach past the last one
        queries.resize((p.B * p.G * p.num_queries() + beyond) * Kernel::QUERY_SIZE);
        results.resize(plan.pieces.size() * width(p));
        if (with_mass) sums.resize(plan.mass_size);
    }

    // Append the key and value [G, D] of token t of row b, and keep its queries [H, D].
    void place(const Problem& p, const Table& table, Pools<Kernel> pools, int64_t b, int64_t t, const S* q, const S* k,
               const S* v) {
        const int64_t M = p.num_queries(), rep = p.group(), slot = table.slot(p, b, p.position(b, t));
        for (int64_t g = 0; g < p.G; ++g)
            Kernel::append(k + g * HEAD_SIZE, v + g * HEAD_SIZE, slot + g * p.block_size, pools.k, pools.v);
        for (int64_t h = 0; h < p.H; ++h)
            Kernel::stage(q + h * HEAD_SIZE,
                          queries.data() + ((b * p.G + h / rep) * M + t * rep + h % rep) * Kernel::QUERY_SIZE);
    }

    void attend(const Problem& p, Pools<Kernel> pools, bool with_mass) {
        const int64_t M = p.num_queries(), tasks = int64_t(plan.tasks.size());
        const int64_t taken = std::max<int64_t>(1, tasks / (16 * omp_get_num_threads()));
        typename Kernel::Scratch scratch;
#pragma omp for schedule(dynamic, taken) nowait
        for (int64_t i = 0; i < tasks; ++i) {
            const Task& task = plan.tasks[i];
            float* result = results.data() + task.piece * width(p);
            const Piece& piece = plan.pieces[task.piece];
            float* mass = with_mass ? sums.data() + piece.mass + task.first_query * piece.num_blocks : nullptr;
            keys_read += Kernel::attend(
                p, task, plan.segments.data(), pools.k, pools.v,
                queries.data() + ((task.row * p.G + task.head) * M + task.first_query) * Kernel::QUERY_SIZE, scratch,
                result + task.first_query, result + M + task.first_query,
                result + 2 * M + task.first_query * HEAD_SIZE, Mass{mass, piece.num_blocks});
        }
    }

    // Merge the pieces of each row into out [B, T, H, D] and the log-sum-exp of the scores, lse [B, T, H]. If `mass`
    // [B, G, num_blocks] is given, it receives the attention weights of each block.
    void merge(const Problem& p, S* out, float* lse, float* mass, int64_t num_blocks) {
#pragma omp for collapse(2) schedule(static) nowait
        for (int64_t b = 0; b < p.B; ++b)
            for (int64_t t = 0; t < p.T; ++t)
                for (int64_t h = 0; h < p.H; ++h) merge_head(p, b, t, h, out, lse);
        if (!mass) return;
        wait_for_threads();
#pragma omp for collapse(2) schedule(static) nowait
        for (int64_t b = 0; b < p.B; ++b)
            for (int64_t g = 0; g < p.G; ++g)
                merge_mass(p, plan, b, g, results.data(), width(p), sums.data(), lse, mass + (b * p.G + g) * num_blocks,
                           num_blocks);
    }

    std::atomic<int64_t> keys_read{0};  // keys (per row and KV head, each with its value) that were read so far

private:
    static int64_t width(const Problem& p) { return p.num_queries() * (HEAD_SIZE + 2); }

    void merge_head(const Problem& p, int64_t b, int64_t t, int64_t h, S* out, float* lse) const {
        constexpr int D = HEAD_SIZE;
        const int64_t M = p.num_queries(), rep = p.group(), g = h / rep, m = t * rep + h % rep;
        const int64_t first = plan.first_piece[b * p.G + g], last = plan.first_piece[b * p.G + g + 1];
        float top = HIDDEN, total = 0, merged[D] = {};
        for (int64_t i = first; i < last; ++i) top = std::max(top, results[i * width(p) + m]);
        for (int64_t i = first; i < last; ++i) {
            const float* result = results.data() + i * width(p);
            const float weight = exp_negative(result[m] - top);
            total += weight * result[M + m];
            for (int d = 0; d < D; ++d) merged[d] += weight * result[2 * M + m * D + d];
        }
        S* to = out + ((b * p.T + t) * p.H + h) * D;
        for (int d = 0; d < D; ++d) store(to + d, merged[d] / total);
        lse[(b * p.T + t) * p.H + h] = top + std::log(total);
    }

    Plan plan;
    std::vector<float> results, sums;
    std::vector<Query> queries;
};

}  // namespace
