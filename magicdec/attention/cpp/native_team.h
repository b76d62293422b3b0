// One layer's attention, computed together by the threads of a team.
#pragma once
#include "../../kernels/team.h"
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

// Attention of one forward over a planned view. `plan_view` is called by one thread when the team has met, `place` for each
// token, and `attend` and `merge` by all threads of a team, in this order. Every layer of a forward may use one plan.
template <typename Kernel, typename S>
class Attention {
public:
    using Query = typename Kernel::Query;

    void plan_view(const Problem& p, const Table& table, const Ranges& ranges, bool with_mass) {
        const bool is_chunk = p.is_prefill() && !with_mass;
        const int64_t block = is_chunk ? queries_of_chunk(p, Kernel::CHUNK_BLOCK) : Kernel::QUERY_BLOCK;
        make_plan(p, table, ranges, block, plan);
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
        const int64_t M = p.num_queries();
        typename Kernel::Scratch scratch;
        // What a task finds: maxima, sums of weights and weighted sums of values, and the mass of each query.
        constexpr int64_t most = std::max<int64_t>(MAX_QUERIES, Kernel::CHUNK_BLOCK);
        alignas(64) float maxima[most], totals[most], values[most * HEAD_SIZE];
        static thread_local std::vector<float> masses;
        int64_t read = 0;
        if (with_mass) masses.resize(std::max(masses.size(), size_t(MAX_QUERIES * plan.most_blocks)));
        float* mass = with_mass ? masses.data() : nullptr;
        share(
            int64_t(plan.tasks.size()),
            [&](int64_t i) {
                const Task& task = plan.tasks[i];
                read = Kernel::attend(
                    p, task, plan.segments.data(), pools.k, pools.v,
                    queries.data() + ((task.row * p.G + task.head) * M + task.first_query) * Kernel::QUERY_SIZE, scratch,
                    maxima, totals, values, Mass{mass, plan.pieces[task.piece].num_blocks});
            },
            [&](int64_t i) {
                const Task& task = plan.tasks[i];
                const Piece& piece = plan.pieces[task.piece];
                float* result = results.data() + task.piece * width(p);
                std::copy_n(maxima, task.num_queries, result + task.first_query);
                std::copy_n(totals, task.num_queries, result + M + task.first_query);
                std::copy_n(values, task.num_queries * HEAD_SIZE, result + 2 * M + task.first_query * HEAD_SIZE);
                if (mass)
                    std::copy_n(mass, task.num_queries * piece.num_blocks,
                                sums.data() + piece.mass + task.first_query * piece.num_blocks);
                keys_read += read;
            });
    }

    // Merge the pieces of each row into out [B, T, H, D] and the log-sum-exp of the scores, lse [B, T, H]. `sinks` [H] are
    // logits that are scores of a key without a value, or null. If `mass` [B, G, num_blocks] is given, it receives the
    // attention weights of each block.
    void merge(const Problem& p, const float* sinks, S* out, float* lse, float* mass, int64_t num_blocks) {
        share(p.B * p.T, [&](int64_t i) {
            for (int64_t h = 0; h < p.H; ++h) merge_head(p, i / p.T, i % p.T, h, sinks, out, lse);
        });
        if (!mass) return;
        share(p.B * p.G, [&](int64_t i) {
            merge_mass(p, plan, i / p.G, i % p.G, results.data(), width(p), sums.data(), lse, mass + i * num_blocks, num_blocks);
        });
    }

    std::atomic<int64_t> keys_read{0};  // keys (per row and KV head, each with its value) that were read so far

private:
    static int64_t width(const Problem& p) { return p.num_queries() * (HEAD_SIZE + 2); }

    void merge_head(const Problem& p, int64_t b, int64_t t, int64_t h, const float* sinks, S* out, float* lse) const {
        constexpr int D = HEAD_SIZE;
        const int64_t M = p.num_queries(), rep = p.group(), g = h / rep, m = t * rep + h % rep;
        const int64_t first = plan.first_piece[b * p.G + g], last = plan.first_piece[b * p.G + g + 1];
        float top = sinks ? sinks[h] : HIDDEN, total = 0, merged[D] = {};
        for (int64_t i = first; i < last; ++i) top = std::max(top, results[i * width(p) + m]);
        if (sinks) total = exp_negative(sinks[h] - top);
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
