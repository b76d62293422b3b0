// A forward of a model over the paged KV cache, or several in a row that draft greedily: embedding, layers, attention,
// head, all-reduce over ranks and the largest logit, in one parallel region. The layers may be some of a model's (a stage
// of a pipeline): hidden states then come in, or go out, or both. Nothing is computed here that the
// kernels of single layers do not compute: this file calls them in order, so that a token has the same bits either way.
//
// A decoder with RMS norms, rotary embedding, a gated SiLU MLP and sequential residuals. Activations are S: bfloat16, or
// float.
//
// Shapes: B rows, T new tokens, H query heads and G KV heads of this rank, D head size, V vocabulary rows of this rank.
#pragma once
#include <ctime>
#include <vector>

#include "../attention/cpp/native_team.h"
#include "../distributed/shared_memory.h"
#include "../kernels/barrier.h"
#include "../model/elementwise/rows.h"
#include "../model/linear/packed_float32.h"
#include "../model/linear/packed_int4.h"
#if defined(__AVX512BF16__)
#include "../model/linear/packed.h"
#endif

// These are filled by executor.py, field by field in this order.
struct LinearLayer {
    const void *packed, *bias;  // bias: added by the layer, or null
    const float* scale;         // of int8 weights, or null
    int64_t N, K, is_int4;
};
struct Layer {
    const void *attention_norm, *mlp_norm, *q_norm, *k_norm;  // q_norm and k_norm may be null
    const void *output_bias, *down_bias;                      // added after the all-reduce; may be null
    LinearLayer qkv, output, gate_up, down;
};
struct Model {
    int64_t num_layers, hidden, H, G, vocab_size, rope_pairs, interleaved;
    float eps, query_scale;  // query_scale: YaRN's factor for rotated queries, 1 without
    const void *embedding, *norm;  // null where this part of the model has none
    const float* rope;  // [positions, 2, rope_pairs]
    LinearLayer head;  // N is 0 without a head
    int64_t first_id;  // vocabulary id of the head's first row
    const Layer* layers;
};
struct Cache {
    char *k, *v;  // of the first layer
    int64_t layer_bytes, table_stride, block_size;
    const int64_t* table;
};
struct Exchange {  // the all-reduce; size 1: none
    char* segment;
    int64_t rank, size, slot_bytes, wait_ms;
    int64_t (*keep_waiting)(int64_t rank);  // called with a rank that is late; 0 ends the call
    uint64_t turn;                          // of the last exchange, also on return
};
struct Call {
    int64_t B, T, steps;  // `steps` forwards: the first over T tokens of each row, the others over one draft token
    const int64_t *tokens, *rows, *seq_lens, *committed, *offsets;  // [B, T], then [B] each; offsets may be null
    const void* hidden_in;  // S [B, T, hidden] instead of tokens, or null
    const int64_t* ranges;  // visible committed tokens [range_layers, B, range_heads, num_ranges, 2]
    int64_t range_layers, range_heads, num_ranges, window;
    Trees trees;  // of which the tokens are the last nodes, if there are nodes
    int64_t last_only;  // whether only the last token of each row is wanted
    void* logits;       // S [B, T or 1, V], or null
    void* hidden_out;   // S [B, T or 1, hidden] after the last of these layers, instead of logits, or null
    int64_t* drafts;    // [B, steps], or null
    float* mass;        // attention weights [layers, B, G, num_blocks], or null
    int64_t num_blocks;
    void* queries;      // S [layers, B, T, H, D] after RoPE, or null
    const int64_t* cancelled;  // or null; the forward ends between layers once the first of these two numbers is
    int64_t cancelled_value;   // this one and the monotonic clock has reached the second, in ns
    int64_t layers_done;       // out: layers that were computed, if it may be cancelled
    int64_t keys_seen;  // out: visible keys of a head, summed over rows and forwards
    int64_t keys_read;  // out: keys that the kernels read, summed over forwards, layers, rows and KV heads
    int64_t num_drafted;  // out: drafts of each row
    double pa;  // a row stops after a draft that is less probable; the call ends when all rows have stopped
};

enum { DONE, INTERRUPTED, UNKNOWN_TOKEN };

namespace {

inline void linear(const LinearLayer& w, const float* x, int64_t R, std::vector<float>& room, float* out) {
    if (w.is_int4) return int4::linear(x, R, (const uint32_t*)w.packed, w.N, w.K, (const float*)w.bias, room.data(), out);
    linear_float32(x, R, (const float*)w.packed, w.N, w.K, (const float*)w.bias, room.data(), out);
}
inline void linear(const LinearLayer& w, const bfloat16* x, int64_t R, std::vector<float>& room, bfloat16* out) {
    const uint16_t *from = (const uint16_t*)x, *bias = (const uint16_t*)w.bias;
    if (w.is_int4)
        int4::linear(x, R, (const uint32_t*)w.packed, w.N, w.K, (const bfloat16*)w.bias, room.data(), out);
    else if (w.scale)
        linear_int8(from, R, (const uint8_t*)w.packed, w.scale, w.N, w.K, bias, room.data(), (uint16_t*)out);
    else
        linear_bf16(from, R, (const uint32_t*)w.packed, w.N, w.K, bias, room.data(), (uint16_t*)out);
}

// x += y, rounded once.
template <typename S>
inline void add_row(const S* y, int64_t width, S* x) {
    for (int64_t i = 0; i < width; ++i) store(x + i, to_float(x[i]) + to_float(y[i]));
}

// The largest logit of a row among those of a rank, its id, and the sum of exp(logit - largest) over the rank's.
struct Best {
    double logit, id, sum;
};

template <typename S, typename Kernel>
class Forward {
public:
    int64_t run(const Model& model, const Cache& cache, Exchange& exchange, Call& call) {
        m = &model, kv = &cache, peers = &exchange, c = &call;
        status = DONE;
        is_ended = false;
        attention.keys_read = 0;
        call.keys_seen = 0;
        tokens.assign(call.tokens, call.tokens + (call.tokens ? call.B * call.T : 0));
        lengths.assign(call.seq_lens, call.seq_lens + call.B);
        goes_on.assign(call.B, true);
        resize();
#pragma omp parallel
        {
            const Barrier::Member member(barrier);
            for (int64_t step = 0; step < call.steps && !is_ended; ++step) run_step(step);
        }
        call.keys_read = attention.keys_read;
        return status;
    }

private:
    // All functions from here on are called by all threads of the parallel region, but for those that say otherwise.
    void run_step(int64_t step) {
        by_one([&] { begin(step); });
        embed();
        for (int64_t layer = 0; layer < m->num_layers && !is_cancelled(layer); ++layer) run_layer(layer);
        if (is_ended) return;
        if (c->hidden_out)
            hand_on();
        else
            run_head();
        if (c->drafts) draft(step);
    }

    // The others wait.
    template <typename Body>
    static void by_one(Body body) {
#pragma omp single nowait
        body();
        wait_for_threads();
    }

    // Whether the forward ends before this layer: the same on all threads.
    bool is_cancelled(int64_t layer) {
        if (!c->cancelled) return false;
        by_one([&] {
            const volatile int64_t* numbers = c->cancelled;
            is_ended = numbers[0] == c->cancelled_value && now_ns() >= numbers[1];
            if (!is_ended) c->layers_done = layer + 1;
        });
        return is_ended;
    }

    static int64_t now_ns() {
        timespec now;
        clock_gettime(CLOCK_MONOTONIC, &now);
        return now.tv_sec * 1000000000LL + now.tv_nsec;
    }

    void resize() {
        const int64_t R = c->B * c->T, heads = m->H + 2 * m->G, mlp = m->layers[0].gate_up.N, inner = m->layers[0].down.K;
        x.resize(R * m->hidden);
        normed.resize(R * m->hidden);
        part.resize(R * m->hidden);
        qkv.resize(R * heads * HEAD_SIZE);
        mixed.resize(R * m->H * HEAD_SIZE);
        lse.resize(R * m->H);
        gate_up.resize(R * mlp);
        hidden.resize(R * inner);
        room.resize(R * std::max({m->hidden, m->H * HEAD_SIZE, inner}));
        if (!c->logits) logits.resize(c->B * (c->last_only ? 1 : c->T) * m->head.N);
        best.resize(c->B);
        found.resize(c->B * peers->size);
        ranges.resize(c->range_layers * c->B * c->range_heads * (c->num_ranges + 1) * 2);
    }

    // Lengths, visible ranges and the plan of the next forward; called by one thread.
    void begin(int64_t step) {
        if (step)
            for (int64_t& length : lengths) length += problem.T;
        const int64_t T = step ? 1 : c->T;
        table = {kv->table, c->rows, kv->table_stride};
        problem = attention.with_trees({c->B, T, m->H, m->G, HEAD_SIZE, kv->block_size, lengths.data(), c->window}, table,
                                       c->trees);
        c->keys_seen += c->B * c->trees.num_nodes;
        for (int64_t& id : tokens) {
            if (id < 0 || id >= m->vocab_size) status = UNKNOWN_TOKEN;
            id = std::clamp<int64_t>(id, 0, m->vocab_size - 1);
        }
        for (int64_t layer = 0; layer < c->range_layers; ++layer)
            for (int64_t b = 0; b < c->B; ++b)
                for (int64_t g = 0; g < c->range_heads; ++g) add_tail((layer * c->B + b) * c->range_heads + g, b);
        for (int64_t b = 0; b < c->B; ++b)
            for (int64_t r = 0; r <= c->num_ranges; ++r) {
                const int64_t* range = of_layer(0).of(b, 0) + 2 * r;
                c->keys_seen += range[1] - range[0];
            }
        if (c->range_layers == 1) attention.plan_view(problem, table, of_layer(0), c->mass);
    }

    // The ranges of one row and head with its uncommitted tokens before a tree, cut at the sliding window as in kv/view.py.
    void add_tail(int64_t place, int64_t b) {
        const int64_t stop = problem.paths ? c->trees.base[b] : lengths[b] + problem.T;
        const int64_t oldest = problem.paths ? stop : lengths[b];  // the smallest position of a new token
        const int64_t *from = c->ranges + place * c->num_ranges * 2, first = oldest + 1 - c->window;
        int64_t* to = ranges.data() + place * (c->num_ranges + 1) * 2;
        const bool is_cut = c->window && c->range_heads == 1 && c->range_layers == 1;
        for (int64_t i = 0; i < 2 * c->num_ranges; ++i) to[i] = is_cut ? std::max(from[i], first) : from[i];
        to[2 * c->num_ranges] = c->window ? std::max(c->committed[b], first) : c->committed[b];
        to[2 * c->num_ranges + 1] = stop;
    }

    Ranges of_layer(int64_t layer) const {
        const int64_t place = c->range_layers > 1 ? layer : 0, size = c->B * c->range_heads * (c->num_ranges + 1) * 2;
        return {ranges.data() + place * size, c->num_ranges + 1, c->range_heads};
    }

    int64_t num_tokens() const { return problem.B * problem.T; }

    void embed() {
        const Layer& first = m->layers[0];
#pragma omp for schedule(static) nowait
        for (int64_t r = 0; r < num_tokens(); ++r) {
            const S* rows = (const S*)(c->hidden_in ? c->hidden_in : m->embedding);
            std::memcpy(&x[r * m->hidden], rows + (c->hidden_in ? r : tokens[r]) * m->hidden, m->hidden * sizeof(S));
            norm(first.attention_norm, r);
        }
        wait_for_threads();
    }

    void norm(const void* weight, int64_t r) {
        rms_norm_row(&x[r * m->hidden], (const S*)weight, m->eps, m->hidden, &normed[r * m->hidden]);
    }

    void run_layer(int64_t layer) {
        const Layer& w = m->layers[layer];
        const int64_t R = num_tokens();
        linear(w.qkv, normed.data(), R, room, qkv.data());
        attend(layer);
        linear(w.output, mixed.data(), R, room, part.data());
        add_part(w.output_bias, w.mlp_norm);
        linear(w.gate_up, normed.data(), R, room, gate_up.data());
        const int64_t width = w.gate_up.N / 2, stride = w.down.K;  // the kernel pads an odd width by one zero
#pragma omp for schedule(static) nowait
        for (int64_t r = 0; r < R; ++r) {
            silu_gate_row(&gate_up[r * 2 * width], width, &hidden[r * stride]);
            std::fill(&hidden[r * stride] + width, &hidden[r * stride] + stride, S{});
        }
        wait_for_threads();
        linear(w.down, hidden.data(), R, room, part.data());
        const bool is_last = layer + 1 == m->num_layers;
        add_part(w.down_bias, !is_last ? m->layers[layer + 1].attention_norm : c->hidden_out ? nullptr : m->norm);
    }

    void attend(int64_t layer) {
        using Pool = typename Kernel::Pool;
        const Pools<Kernel> pools = {(Pool*)(kv->k + layer * kv->layer_bytes), (Pool*)(kv->v + layer * kv->layer_bytes)};
        float* mass = c->mass ? c->mass + layer * c->B * m->G * c->num_blocks : nullptr;
        if (c->range_layers > 1) by_one([&] { attention.plan_view(problem, table, of_layer(layer), mass); });
#pragma omp for collapse(2) schedule(static) nowait
        for (int64_t b = 0; b < problem.B; ++b)
            for (int64_t t = 0; t < problem.T; ++t) place(layer, b, t, pools);
        wait_for_threads();
        attention.attend(problem, pools, mass);
        attention.merge(problem, mixed.data(), lse.data(), mass, c->num_blocks);
    }

    // Norms and rotates the heads of a token, and hands them to attention.
    void place(int64_t layer, int64_t b, int64_t t, Pools<Kernel> pools) {
        const Layer& w = m->layers[layer];
        S* q = &qkv[(b * problem.T + t) * (m->H + 2 * m->G) * HEAD_SIZE];
        S *k = q + m->H * HEAD_SIZE, *v = k + m->G * HEAD_SIZE;
        if (w.q_norm) {
            for (int64_t h = 0; h < m->H; ++h) norm_head(w.q_norm, q + h * HEAD_SIZE);
            for (int64_t g = 0; g < m->G; ++g) norm_head(w.k_norm, k + g * HEAD_SIZE);
        }
        const int64_t position = problem.position(b, t) + (c->offsets ? c->offsets[b] : 0);
        rotate_token(q, m->rope + position * 2 * m->rope_pairs, HEAD_SIZE, m->H + m->G, m->rope_pairs, m->interleaved);
        if (m->query_scale != 1.0f)
            for (int64_t h = 0; h < m->H; ++h)
                for (int64_t i = 0; i < 2 * m->rope_pairs; ++i)
                    store(q + h * HEAD_SIZE + i, to_float(q[h * HEAD_SIZE + i]) * m->query_scale);
        if (c->queries)
            std::memcpy((S*)c->queries + ((layer * problem.B + b) * problem.T + t) * m->H * HEAD_SIZE, q,
                        m->H * HEAD_SIZE * sizeof(S));
        attention.place(problem, table, pools, b, t, q, k, v);
    }

    void norm_head(const void* weight, S* head) {
        S from[HEAD_SIZE];
        std::memcpy(from, head, sizeof(from));
        rms_norm_row(from, (const S*)weight, m->eps, problem.D, head);
    }

    // Sum `part` over the ranks, add it to x, and norm x for what follows, if anything does.
    void add_part(const void* bias, const void* weight) {
        if (peers->size > 1) {
#pragma omp master
            all_reduce(part.data(), num_tokens() * m->hidden);
            wait_for_threads();
        }
#pragma omp for schedule(static) nowait
        for (int64_t r = 0; r < num_tokens(); ++r) {
            if (bias) add_row((const S*)bias, m->hidden, &part[r * m->hidden]);
            add_row(&part[r * m->hidden], m->hidden, &x[r * m->hidden]);
            if (weight) norm(weight, r);
        }
        wait_for_threads();
    }

    void hand_on() {
        const int64_t T = problem.T, each = c->last_only ? 1 : T, bytes = each * m->hidden * sizeof(S);
#pragma omp for schedule(static) nowait
        for (int64_t b = 0; b < problem.B; ++b)
            std::memcpy((char*)c->hidden_out + b * bytes, &x[(b * T + T - each) * m->hidden], bytes);
        wait_for_threads();
    }

    void run_head() {
        const int64_t T = problem.T;
        if (c->last_only && T > 1)  // rows that the head sees, one after the other
            by_one([&] {
                for (int64_t b = 0; b < problem.B; ++b)
                    std::memmove(&normed[b * m->hidden], &normed[(b * T + T - 1) * m->hidden], m->hidden * sizeof(S));
            });
        linear(m->head, normed.data(), c->last_only ? problem.B : num_tokens(), room, logits_data());
    }

    S* logits_data() { return c->logits ? (S*)c->logits : logits.data(); }

    // The id of the largest logit of each row, the smallest of equal ones, becomes its next token.
    void draft(int64_t step) {
        const int64_t V = m->head.N;
#pragma omp for schedule(static) nowait
        for (int64_t b = 0; b < problem.B; ++b) {
            const S* row = logits_data() + b * V;
            float most = to_float(row[0]);
            for (int64_t i = 1; i < V; ++i) most = std::max(most, to_float(row[i]));
            int64_t id = 0;
            while (id < V - 1 && to_float(row[id]) != most) ++id;
            double sum = 0;
            if (c->pa > 0)
                for (int64_t i = 0; i < V; ++i) sum += exp_negative(to_float(row[i]) - most);
            best[b] = {most, double(id + m->first_id), sum};
        }
        wait_for_threads();
        by_one([&] {
            choose();
            for (int64_t b = 0; b < problem.B; ++b) c->drafts[b * c->steps + step] = tokens[b];
            c->num_drafted = step + 1;
            is_ended = std::find(goes_on.begin(), goes_on.end(), true) == goes_on.end();
        });
    }

    void choose() {
        tokens.resize(problem.B);
        std::copy(best.begin(), best.end(), found.begin());
        if (peers->size > 1 && exchange_with(best.data(), best.size() * sizeof(Best)))
            segment().collect((char*)found.data(), best.size() * sizeof(Best));
        for (int64_t b = 0; b < problem.B; ++b) {
            Best top = found[b];
            double sum = 0;
            for (int64_t rank = 1; rank < peers->size; ++rank) {
                const Best& other = found[rank * problem.B + b];
                if (other.logit > top.logit || (other.logit == top.logit && other.id < top.id)) top = other;
            }
            for (int64_t rank = 0; rank < peers->size; ++rank) {
                const Best& part = found[rank * problem.B + b];
                sum += part.sum * std::exp(part.logit - top.logit);
            }
            tokens[b] = int64_t(top.id);
            if (sum * c->pa > 1) goes_on[b] = false;  // its probability is 1 / sum
        }
    }

    void all_reduce(S* data, int64_t count) {
        const int64_t most = peers->slot_bytes / int64_t(sizeof(S));
        for (int64_t at = 0; at < count; at += most) {
            const int64_t size = std::min(most, count - at);
            if (!exchange_with(data + at, size * sizeof(S))) return;
            if constexpr (sizeof(S) == 2)
                segment().sum_bfloat16((uint16_t*)data + at, size);
            else
                segment().sum(data + at, size);
        }
    }

    // Post `bytes` of data to the other ranks and wait for theirs. False if the call was interrupted; then nothing more
    // is exchanged, and the rest of the call computes numbers that nobody uses.
    bool exchange_with(const void* data, int64_t bytes) {
        if (status == INTERRUPTED) return false;
        ++peers->turn;
        segment().post(data, bytes);
        for (int64_t late; (late = segment().wait(peers->wait_ms)) >= 0;)
            if (!peers->keep_waiting(late)) {
                status = INTERRUPTED;
                return false;
            }
        return true;
    }

    shared_memory::Segment segment() const {
        return {peers->segment, peers->rank, peers->size, peers->slot_bytes, peers->turn};
    }

    const Model* m;
    const Cache* kv;
    Exchange* peers;
    Call* c;
    Problem problem;
    Table table;
    Attention<Kernel, S> attention;
    Barrier barrier;
    int64_t status;
    bool is_ended;
    std::vector<int64_t> tokens, lengths, ranges;
    std::vector<S> x, normed, part, qkv, mixed, gate_up, hidden, logits;
    std::vector<float> lse, room;  // room: scratch memory of linear layers
    std::vector<Best> best, found;
    std::vector<bool> goes_on;  // rows whose chain has not stopped
};

}  // namespace
