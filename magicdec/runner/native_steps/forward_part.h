// What a forward computes: calls, each with rows that have the same number of new tokens, and the attention of one of them.
#pragma once
#include <deque>
#include <vector>

#include "../../attention/cpp/native_team.h"
#include "../../model/elementwise/rows.h"
#include "../../model/linear/layer.h"

// These are filled by executor.py, field by field in this order.
struct Experts {  // of experts, in place of a layer's MLP
    int64_t num_experts, num_used, renormalises;
    LinearLayer router;
    const LinearLayer *gate_up, *down;  // [num_experts]
    const void* const* down_bias;       // [num_experts], added by this rank, or null
    Gate gate;
    LinearLayer shared_gate_up, shared_down;  // of all tokens; N is 0 without
    LinearLayer shared_gate;                  // of one output, whose sigmoid is the weight of the shared expert; N is 0: it is 1
};
struct Layer {
    const void *attention_norm, *mlp_norm;
    const void *q_norm, *k_norm, *post_attention_norm, *post_mlp_norm;  // may be null
    const void *output_bias, *down_bias;                      // added after the all-reduce; may be null
    const float* rope;                                        // [positions, 2, rope_pairs]
    const float* sinks;                                       // logits [H] in the softmax; may be null
    float query_scale;                                        // of rotated queries: YaRN's factor, 1 without
    LinearLayer qkv, output, gate_up, down;
    const Experts* experts;  // null: the layer has an MLP
};
struct Model {
    int64_t num_layers, hidden, H, G, vocab_size, rope_pairs, interleaved;
    float eps, embedding_scale;
    const void *embedding, *norm;  // null where this part of the model has none
    LinearLayer head;  // N is 0 without a head
    MultiplyInTeam multiply;  // computes all linear layers
    Gate gate;         // of MLPs
    int64_t first_id;  // vocabulary id of the head's first row
    // Of an EAGLE-3 head, null or 0 of a model: the norm of the states that its first layer takes beside embeddings, the ids of
    // its drafts, whether that layer's residual is the normed state, and whether the next draft takes the normed output.
    const void* hidden_norm;
    const int64_t* target_ids;
    int64_t norm_before_residual, norm_output;
    const Layer* layers;
};
struct Cache {  // of the layers with one window
    char *k, *v;  // of the first of them
    int64_t layer_bytes, table_stride, block_size;
    const int64_t* table;
};
struct Exchange {  // the all-reduce; size 1: none
    char* segment;
    int64_t rank, size, slot_bytes, wait_ms;
    int64_t (*keep_waiting)(int64_t rank);  // called with a rank that is late; 0 ends the call
    uint64_t turn;                          // of the last exchange, also on return
};
// What layers with the same window see of the cache.
struct View {
    const int64_t* ranges;  // visible committed tokens [layers, B, heads, num_ranges, 2]
    // layers: all with this view, or 1 if ranges are the same in each; heads: G, or 1
    int64_t layers, heads, num_ranges;
    int64_t window;     // 0: none
    int64_t keys_seen;  // out: visible keys of a head in one layer, summed over rows and forwards
};
// Rows with the same number of new tokens. One forward computes one call, or several with other rows each.
struct Call {
    int64_t B, T, steps;  // `steps` forwards: the first over T tokens of each row, the others over one draft token
    const int64_t *tokens, *rows, *seq_lens, *committed, *offsets;  // [B, T], then [B] each; offsets may be null
    const void* hidden_in;  // S [B, T, hidden] instead of tokens, of a head beside them, or null
    View* views;
    int64_t num_views;  // and caches
    const int64_t* view_of;  // [2, layers]: the view of each layer, then its number among the layers with that view
    int64_t is_of_prompt;  // whether the T tokens are a part of a prompt
    int64_t num_outputs;  // newest tokens of each row whose logits or hidden states are wanted
    void* logits;       // S [outputs of all calls, V] in the first call, or null
    void* hidden_out;   // S [outputs of all calls, hidden] after the last of these layers, instead of logits, or null
    int64_t* drafts;    // [B, steps] of a single call, or null
    float* mass;        // attention weights [layers, B, G, num_blocks], or null
    int64_t num_blocks;
    void* queries;      // S [layers, B, T, H, D] after RoPE, or null
    void* states;       // S [num_states, B, T, hidden]: x before each of the `state_layers`, of which one may follow the last
    const int64_t* state_layers;
    int64_t num_states;
    const int64_t* cancelled;  // or null; the forward ends between layers once this number is
    int64_t cancelled_value;   // this one
    int64_t layers_done;       // out: layers that were computed, if it may be cancelled
    int64_t keys_read;  // out: keys that the kernels read, summed over forwards, layers, rows and KV heads
    int64_t num_drafted;  // out: drafts of each row
    int64_t experts_read;  // out, in the first call: experts that were read, summed over forwards and layers
    // out, in the first call: whether logits are infinite or NaN; those of drafts on any rank, others on this one
    int64_t not_finite;
    double pa;  // a row stops after a draft that is less probable; the call ends when all rows have stopped
};

namespace {

// One call of a forward. Its attention is computed by Kernel, or by Short where that serves it.
template <typename S, typename Kernel, typename Short>
class Part {
public:
    // Called by one thread before the first forward. There is a cache of each view. `first` is the call's first token among
    // those of all calls.
    void start(const Model& model, const Cache* caches, Call& of, int64_t first_token) {
        m = &model, call = &of, first = first_token;
        lengths.assign(of.seq_lens, of.seq_lens + of.B);
        while (int64_t(seen.size()) < of.num_views) seen.emplace_back();
        for (int64_t i = 0; i < of.num_views; ++i) seen[i].start(of.views[i], caches[i], of);
    }

    // Lengths, visible ranges and the plan of the next forward; called by one thread.
    void begin(int64_t step) {
        if (step)
            for (int64_t& length : lengths) length += problem.T;
        const Call& c = *call;
        problem = {c.B, step ? 1 : c.T, m->H, m->G, HEAD_SIZE, 0, lengths.data(), 0, !step && c.is_of_prompt};
        for (int64_t i = 0; i < c.num_views; ++i) {
            Seen& view = seen[i];
            view.begin(problem, c.committed);
            if (view.of->layers == 1) view.plan(0, c.mass != nullptr);
        }
    }

    bool has_ranges_of_own(int64_t layer) const { return call->views[call->view_of[layer]].layers > 1; }
    // Called by one thread for each layer that has ranges of its own.
    void plan_layer(int64_t layer) { view_of(layer).plan(number_of(layer), call->mass != nullptr); }

    // `attend` and `merge` are called by all threads, which must meet after either.
    void attend(int64_t layer) {
        Seen& view = view_of(layer);
        view.with_attention(
            [&](auto& attention) { attention.attend(view.problem, pools(attention, view, layer), call->mass); });
    }
    void merge(int64_t layer, S* mixed, float* lse) {
        float* mass = call->mass ? call->mass + layer * call->B * m->G * call->num_blocks : nullptr;
        Seen& view = view_of(layer);
        view.with_attention([&](auto& attention) {
            attention.merge(view.problem, m->layers[layer].sinks, mixed + first * m->H * HEAD_SIZE, lse + first * m->H, mass,
                            call->num_blocks);
        });
    }

    // Norms and rotates the heads of a token, and hands them to attention. `q` are its queries, keys and values.
    void place(int64_t layer, int64_t b, int64_t t, S* q) {
        const Layer& w = m->layers[layer];
        S *k = q + m->H * HEAD_SIZE, *v = k + m->G * HEAD_SIZE;
        if (w.q_norm) {
            for (int64_t h = 0; h < m->H; ++h) norm_head(w.q_norm, q + h * HEAD_SIZE);
            for (int64_t g = 0; g < m->G; ++g) norm_head(w.k_norm, k + g * HEAD_SIZE);
        }
        const int64_t position = problem.position(b, t) + (call->offsets ? call->offsets[b] : 0);
        rotate_token(q, w.rope + position * 2 * m->rope_pairs, HEAD_SIZE, m->H + m->G, m->rope_pairs, m->interleaved);
        if (w.query_scale != 1.0f)
            for (int64_t h = 0; h < m->H; ++h)
                for (int64_t i = 0; i < 2 * m->rope_pairs; ++i)
                    store(q + h * HEAD_SIZE + i, to_float(q[h * HEAD_SIZE + i]) * w.query_scale);
        if (call->queries)
            std::memcpy((S*)call->queries + ((layer * problem.B + b) * problem.T + t) * m->H * HEAD_SIZE, q,
                        m->H * HEAD_SIZE * sizeof(S));
        Seen& view = view_of(layer);
        view.with_attention([&](auto& attention) {
            attention.place(view.problem, view.table, pools(attention, view, layer), b, t, q, k, v);
        });
    }

    int64_t num_tokens() const { return problem.B * problem.T; }
    int64_t num_outputs() const { return std::min(call->num_outputs, problem.T); }  // of each row
    int64_t keys_read() const {
        int64_t sum = 0;
        for (int64_t i = 0; i < call->num_views; ++i) sum += seen[i].attention.keys_read + seen[i].short_attention.keys_read;
        return sum;
    }

    Call* call;
    int64_t first;
    Problem problem;

private:
    // The attention of the layers with one view.
    struct Seen {
        void start(View& view, const Cache& cache, const Call& call) {
            of = &view, kv = &cache;
            table = {cache.table, call.rows, cache.table_stride};
            ranges.resize(view.layers * call.B * view.heads * (view.num_ranges + 1) * 2);
            attention.keys_read = short_attention.keys_read = 0;
            view.keys_seen = 0;
        }

        void begin(const Problem& of_part, const int64_t* committed) {
            problem = of_part;
            problem.window = of->window, problem.block_size = kv->block_size;
            if constexpr (!std::is_same_v<Short, Kernel>) is_short = Short::serves(problem);
            for (int64_t layer = 0; layer < of->layers; ++layer)
                for (int64_t b = 0; b < problem.B; ++b)
                    for (int64_t g = 0; g < of->heads; ++g)
                        add_tail((layer * problem.B + b) * of->heads + g, problem.seq_lens[b], committed[b]);
            for (int64_t b = 0; b < problem.B; ++b)
                for (int64_t r = 0; r <= of->num_ranges; ++r) {
                    const int64_t* range = of_layer(0).of(b, 0) + 2 * r;
                    of->keys_seen += range[1] - range[0];
                }
        }

        // `layer` is its number among the layers with this view.
        void plan(int64_t layer, bool with_mass) {
            with_attention([&](auto& attention) { attention.plan_view(problem, table, of_layer(layer), with_mass); });
        }

        template <typename Body>
        void with_attention(Body body) {
            is_short ? body(short_attention) : body(attention);
        }

        View* of;
        const Cache* kv;
        Table table;
        Problem problem;
        Attention<Kernel, S> attention;
        Attention<Short, S> short_attention;

    private:
        // The ranges of one row and head with its uncommitted tokens, cut at the sliding window as in kv/view.py.
        void add_tail(int64_t place, int64_t length, int64_t committed) {
            const int64_t *from = of->ranges + place * of->num_ranges * 2, first = length + 1 - of->window;
            int64_t* to = ranges.data() + place * (of->num_ranges + 1) * 2;
            const bool is_cut = of->window && of->heads == 1 && of->layers == 1;
            for (int64_t i = 0; i < 2 * of->num_ranges; ++i) to[i] = is_cut ? std::max(from[i], first) : from[i];
            to[2 * of->num_ranges] = of->window ? std::max(committed, first) : committed;
            to[2 * of->num_ranges + 1] = length + problem.T;
        }

        Ranges of_layer(int64_t layer) const {
            const int64_t place = of->layers > 1 ? layer : 0;
            const int64_t size = problem.B * of->heads * (of->num_ranges + 1) * 2;
            return {ranges.data() + place * size, of->num_ranges + 1, of->heads};
        }

        bool is_short = false;
        std::vector<int64_t> ranges;
    };

    Seen& view_of(int64_t layer) { return seen[call->view_of[layer]]; }
    int64_t number_of(int64_t layer) const { return call->view_of[m->num_layers + layer]; }

    template <typename Own>
    static Pools<Own> pools_of(const Attention<Own, S>&, char* k, char* v) {
        return {(typename Own::Pool*)k, (typename Own::Pool*)v};
    }
    template <typename Any>
    auto pools(const Any& attention, const Seen& view, int64_t layer) const {
        const int64_t offset = number_of(layer) * view.kv->layer_bytes;
        return pools_of(attention, view.kv->k + offset, view.kv->v + offset);
    }

    void norm_head(const void* weight, S* head) {
        S from[HEAD_SIZE];
        std::memcpy(from, head, sizeof(from));
        rms_norm_row(from, (const S*)weight, m->eps, problem.D, head);
    }

    const Model* m;
    std::vector<int64_t> lengths;
    std::deque<Seen> seen;  // by view
};

}  // namespace
