// A forward of a model over the paged KV cache, or several in a row that draft greedily: embedding, layers, attention,
// head, all-reduce over ranks and the largest logit, in one parallel region. The layers may be some of a model's (a stage
// of a pipeline): hidden states then come in, or go out, or both. Nothing is computed here that the
// kernels of single layers do not compute: this file calls them in order, so that a token has the same bits either way.
//
// A decoder with RMS norms, rotary embedding, a gated MLP (or a mixture of such experts) and sequential residuals.
// Activations are S: bfloat16, or float.
//
// Rows may have different numbers of new tokens: linear layers then read their weights once for all of them.
//
// Shapes: B rows, T new tokens, H query heads and G KV heads of this rank, D head size, V vocabulary rows of this rank.
#pragma once
#include <ctime>
#include <deque>
#include <vector>

#include "../../distributed/shared_memory.h"
#include "../../kernels/team.h"
#include "forward_part.h"

enum { DONE, INTERRUPTED, UNKNOWN_TOKEN };

namespace {

// x += y, rounded once.
template <typename S>
inline void add_row(const S* y, int64_t width, S* x) {
    for (int64_t i = 0; i < width; ++i) store(x + i, to_float(x[i]) + to_float(y[i]));
}

// The largest logit of a row among those of a rank, its id, the sum of exp(logit - largest) over the rank's, and how many
// of these logits are not finite.
struct Best {
    double logit, id, sum, wrong;
};

// To which experts the tokens of a forward go.
struct Route {
    std::vector<int64_t> chosen;  // [tokens, experts of a token]
    std::vector<float> weights;   // [tokens, experts of a token]
    std::vector<int64_t> places;  // [tokens, experts of a token]: a row each, in the order of experts
    std::vector<int64_t> begin;   // the first row of each expert, and the end
    std::vector<int64_t> next;    // of each expert, while rows are given

    int64_t count(int64_t expert) const { return begin[expert + 1] - begin[expert]; }

    // Sets `places` and `begin` of the first `rows` choices. Returns the number of experts that were chosen.
    int64_t order(int64_t num_experts, int64_t rows) {
        begin.assign(num_experts + 1, 0);
        for (int64_t i = 0; i < rows; ++i) ++begin[chosen[i] + 1];
        const int64_t untouched = std::count(begin.begin() + 1, begin.end(), 0);
        for (int64_t e = 0; e < num_experts; ++e) begin[e + 1] += begin[e];
        next.assign(begin.begin(), begin.end());
        for (int64_t i = 0; i < rows; ++i) places[i] = next[chosen[i]]++;
        return num_experts - untouched;
    }
};

template <typename S, typename Kernel, typename Short = Kernel>
class Forward {
public:
    // `caches`: one of each view, the same for all calls.
    int64_t run(const Model& model, const Cache* caches, Exchange& exchange, Call* calls, int64_t num_calls) {
        m = &model, peers = &exchange, c = calls;
        status = DONE;
        num_steps = c->steps, cancelled_at = model.num_layers;
        tokens.clear();
        while (int64_t(room_for_parts.size()) < num_calls) room_for_parts.emplace_back();
        parts.clear();
        int64_t first = 0;
        for (int64_t i = 0; i < num_calls; ++i) {
            Call& call = calls[i];
            parts.push_back(&room_for_parts[i]);
            parts[i]->start(model, caches, call, first);
            if (call.tokens) tokens.insert(tokens.end(), call.tokens, call.tokens + call.B * call.T);
            first += call.B * call.T;
        }
        goes_on.assign(c->B, true);
        resize(first);
        team.run([&] {
            for (int64_t step = 0; step < num_steps; ++step) run_step(step);
        });
        for (PartOfThis* part : parts) part->call->keys_read = part->keys_read();
        return status;
    }

private:
    using PartOfThis = Part<S, Kernel, Short>;

    // All functions from here on are called by all threads of the team, but for those that say otherwise.
    void run_step(int64_t step) {
        if (step) team.meet();  // late threads may still read the plans of the step before
        team.by_one([&] { begin(step); });
        m->hidden_norm ? embed_pairs(step) : embed();
        for (int64_t layer = 0; layer < m->num_layers; ++layer) {
            if (is_cancelled(layer)) return;
            keep_states(layer);
            run_layer(layer);
        }
        keep_states(m->num_layers);
        if (c->hidden_out)
            hand_on();
        else
            run_head();
        if (c->drafts) draft(step);
    }

    // Whether the forward ends before this layer: the same on all threads, also on one that is late and finds that the others
    // were cancelled before a later layer.
    bool is_cancelled(int64_t layer) {
        if (!c->cancelled) return false;
        team.by_one([&] {
            if (*(const volatile int64_t*)c->cancelled == c->cancelled_value)
                cancelled_at = layer;
            else
                c->layers_done = layer + 1;
        });
        return cancelled_at <= layer;
    }

    void keep_states(int64_t layer) {
        for (const PartOfThis* part : parts) {
            const Call& call = *part->call;
            const int64_t size = part->num_tokens() * m->hidden;
            for (int64_t i = 0; i < call.num_states; ++i)
                if (call.state_layers[i] == layer)
                    team.by_one([&] {
                        std::memcpy((S*)call.states + i * size, &x[part->first * m->hidden], size * sizeof(S));
                    });
        }
    }

    // Called by one thread.
    void resize(int64_t R) {
        const int64_t heads = m->H + 2 * m->G;
        int64_t mlp = 0, inner = 0;
        c->experts_read = 0;
        while (int64_t(routes.size()) < m->num_layers) routes.emplace_back();
        for (int64_t i = 0; i < m->num_layers; ++i) {
            const Layer& w = m->layers[i];
            if (w.experts) {
                resize_experts(*w.experts, R, routes[i]);
                inner = std::max({inner, w.experts->down[0].K, w.experts->shared_down.K});
            } else {
                mlp = std::max(mlp, w.gate_up.N);
                inner = std::max(inner, w.down.K);
            }
        }
        x.resize(R * m->hidden);
        normed.resize(R * m->hidden);
        part.resize(R * m->hidden);
        qkv.resize(R * heads * HEAD_SIZE);
        mixed.resize(R * m->H * HEAD_SIZE);
        lse.resize(R * m->H);
        gate_up.resize(R * mlp);
        hidden.resize(R * inner);
        const int64_t inputs = m->hidden_norm ? 2 * m->hidden : m->hidden;
        if (m->hidden_norm) pairs.resize(R * inputs), fed_back.resize(c->B * m->hidden);
        room.resize(R * std::max({inputs, m->H * HEAD_SIZE, inner}));
        if (!c->logits) logits.resize(c->B * m->head.N);
        best.resize(c->B);
        found.resize(c->B * peers->size);
    }

    // Called by one thread.
    void resize_experts(const Experts& experts, int64_t R, Route& route) {
        const int64_t rows = R * experts.num_used;
        route.chosen.resize(rows), route.weights.resize(rows), route.places.resize(rows);
        route.begin.resize(experts.num_experts + 1), route.next.resize(experts.num_experts + 1);
        auto grow = [](auto& numbers, int64_t count) { numbers.resize(std::max<size_t>(numbers.size(), count)); };
        grow(router_logits, R * experts.num_experts);
        grow(gathered, rows * m->hidden);
        grow(expert_up, rows * experts.gate_up[0].N);
        grow(expert_hidden, rows * experts.down[0].K);
        grow(expert_out, rows * m->hidden);
        grow(sums, R * m->hidden);
        grow(shared_up, R * experts.shared_gate_up.N);
        grow(shared_hidden, R * experts.shared_down.K);
        grow(shared_out, R * experts.shared_down.N);
        grow(shared_logits, R * experts.shared_gate.N);
    }

    // Called by one thread.
    void begin(int64_t step) {
        for (int64_t& id : tokens) {
            if (id < 0 || id >= m->vocab_size) status = UNKNOWN_TOKEN;
            id = std::clamp<int64_t>(id, 0, m->vocab_size - 1);
        }
        for (PartOfThis* part : parts) part->begin(step);
        num_tokens = num_outputs = 0;
        for (const PartOfThis* part : parts) {
            num_tokens += part->num_tokens();
            num_outputs += part->problem.B * part->num_outputs();
        }
    }

    void embed() {
        const void* weight = m->layers[0].attention_norm;
        for (const PartOfThis* part : parts) {
            const S* rows = (const S*)(part->call->hidden_in ? part->call->hidden_in : m->embedding);
            team.share(part->num_tokens(), [&](int64_t i) {
                const int64_t r = part->first + i;
                std::memcpy(&x[r * m->hidden], rows + (part->call->hidden_in ? i : tokens[r]) * m->hidden,
                            m->hidden * sizeof(S));
                if (m->embedding_scale != 1.0f && !part->call->hidden_in)
                    for (int64_t j = r * m->hidden; j < (r + 1) * m->hidden; ++j)
                        store(&x[j], to_float(x[j]) * m->embedding_scale);
                norm(weight, r);
            });
        }
    }

    // The input of a head: in the first step of a draft with the states that come in, then with the head's own output.
    void embed_pairs(int64_t step) {
        const int64_t width = m->hidden;
        for (const PartOfThis* part : parts) {
            const S* states = step ? fed_back.data() : (const S*)part->call->hidden_in;
            team.share(part->num_tokens(), [&](int64_t i) {
                const int64_t r = part->first + i;
                const S *state = states + i * width, *embedded = (const S*)m->embedding + tokens[r] * width;
                S* pair = &pairs[r * 2 * width];
                rms_norm_row(embedded, (const S*)m->layers[0].attention_norm, m->eps, width, pair);
                rms_norm_row(state, (const S*)m->hidden_norm, m->eps, width, pair + width);
                std::memcpy(&x[r * width], m->norm_before_residual ? pair + width : state, width * sizeof(S));
            });
        }
    }

    void linear(const LinearLayer& w, const S* from, int64_t R, S* to) {
        m->multiply(&team, &w, from, R, room.data(), to);
    }

    void norm(const void* weight, int64_t r) {
        rms_norm_row(&x[r * m->hidden], (const S*)weight, m->eps, m->hidden, &normed[r * m->hidden]);
    }

    void run_layer(int64_t layer) {
        const Layer& w = m->layers[layer];
        const int64_t R = num_tokens;
        linear(w.qkv, m->hidden_norm && layer == 0 ? pairs.data() : normed.data(), R, qkv.data());
        attend(layer);
        linear(w.output, mixed.data(), R, part.data());
        add_part(w.output_bias, w.post_attention_norm, w.mlp_norm);
        if (w.experts) {
            run_experts(*w.experts, routes[layer]);
        } else {
            linear(w.gate_up, normed.data(), R, gate_up.data());
            gate(m->gate, gate_up.data(), w.gate_up.N / 2, 1, w.down.K, hidden.data());
            linear(w.down, hidden.data(), R, part.data());
        }
        const bool is_last = layer + 1 == m->num_layers;
        add_part(w.down_bias, w.post_mlp_norm,
                 !is_last ? m->layers[layer + 1].attention_norm : c->hidden_out ? nullptr : m->norm);
    }

    // The gated activation of rows of twice `width` numbers, as many of each token as `rows`. Those of `to` have `stride`: the
    // kernel pads an odd width by one zero.
    void gate(const Gate& kind, const S* from, int64_t width, int64_t rows, int64_t stride, S* to) {
        team.share(num_tokens, [&](int64_t token) {
            for (int64_t r = token * rows; r < (token + 1) * rows; ++r) {
                gate_row(kind, from + r * 2 * width, width, to + r * stride);
                std::fill(to + r * stride + width, to + (r + 1) * stride, S{});
            }
        });
    }

    // What the experts of each token make of it, in `part`. Each expert that any token goes to reads its weights once. Of
    // every layer there is a route of its own, since a late thread may still read that of a layer before.
    void run_experts(const Experts& w, Route& route) {
        const int64_t R = num_tokens, used = w.num_used, width = m->hidden;
        linear(w.router, normed.data(), R, router_logits.data());
        team.share(R, [&](int64_t r) {
            route_row(&router_logits[r * w.num_experts], w.num_experts, used, w.renormalises, &route.chosen[r * used],
                      &route.weights[r * used]);
        });
        team.by_one([&] { c->experts_read += route.order(w.num_experts, R * used); });
        team.share(R, [&](int64_t r) {
            for (int64_t i = r * used; i < (r + 1) * used; ++i)
                std::memcpy(&gathered[route.places[i] * width], &normed[r * width], width * sizeof(S));
        });
        const int64_t units = w.gate_up[0].N, stride = w.down[0].K;
        for (int64_t e = 0; e < w.num_experts; ++e)
            if (const int64_t count = route.count(e); count)
                linear(w.gate_up[e], &gathered[route.begin[e] * width], count, &expert_up[route.begin[e] * units]);
        gate(w.gate, expert_up.data(), units / 2, used, stride, expert_hidden.data());
        for (int64_t e = 0; e < w.num_experts; ++e)
            if (const int64_t count = route.count(e); count)
                linear(w.down[e], &expert_hidden[route.begin[e] * stride], count, &expert_out[route.begin[e] * width]);
        if (w.shared_gate_up.N) {
            linear(w.shared_gate_up, normed.data(), R, shared_up.data());
            gate(w.gate, shared_up.data(), w.shared_gate_up.N / 2, 1, w.shared_down.K, shared_hidden.data());
            linear(w.shared_down, shared_hidden.data(), R, shared_out.data());
            if (w.shared_gate.N) linear(w.shared_gate, normed.data(), R, shared_logits.data());
        }
        team.share(R, [&](int64_t r) { add_experts(w, route, r); });
    }

    // The weighted sum of what a token's experts made of it, in the order of their numbers, and the shared one last.
    void add_experts(const Experts& w, const Route& route, int64_t r) {
        const int64_t used = w.num_used, width = m->hidden;
        float* sum = &sums[r * width];
        std::fill(sum, sum + width, 0.0f);
        for (int64_t last = -1, k = 0; k < used; ++k) {
            int64_t next = -1;
            for (int64_t i = r * used; i < (r + 1) * used; ++i)
                if (route.chosen[i] > last && (next < 0 || route.chosen[i] < route.chosen[next])) next = i;
            last = route.chosen[next];
            add_expert_row(&expert_out[route.places[next] * width], (const S*)(w.down_bias ? w.down_bias[last] : nullptr),
                           route.weights[next], width, sum);
        }
        if (w.shared_gate_up.N)
            add_expert_row(&shared_out[r * width], (const S*)nullptr, w.shared_gate.N ? weigh(shared_logits[r]) : 1.0f, width,
                           sum);
        for (int64_t i = 0; i < width; ++i) store(&part[r * width + i], sum[i]);
    }

    void attend(int64_t layer) {
        if (has_ranges_of_own(layer)) {
            team.meet();  // late threads may still read the plan of the layer before
            team.by_one([&] {
                for (PartOfThis* part : parts)
                    if (part->has_ranges_of_own(layer)) part->plan_layer(layer);
            });
        }
        const int64_t width = (m->H + 2 * m->G) * HEAD_SIZE;
        for (PartOfThis* part : parts) {
            const int64_t T = part->problem.T;
            team.share(part->problem.B * T,
                       [&](int64_t i) { part->place(layer, i / T, i % T, &qkv[(part->first + i) * width]); });
        }
        for (PartOfThis* part : parts) part->attend(layer);
        for (PartOfThis* part : parts) part->merge(layer, mixed.data(), lse.data());
    }

    bool has_ranges_of_own(int64_t layer) const {
        return std::any_of(parts.begin(), parts.end(),
                           [&](const PartOfThis* part) { return part->has_ranges_of_own(layer); });
    }

    // Sum `part` over the ranks, norm it if it has a norm, add it to x, and norm x for what follows, if anything does.
    void add_part(const void* bias, const void* own_norm, const void* weight) {
        if (peers->size > 1) team.by_first([&] { all_reduce(part.data(), num_tokens * m->hidden); });
        team.share(num_tokens, [&](int64_t r) {
            if (bias) add_row((const S*)bias, m->hidden, &part[r * m->hidden]);
            const S* added = &part[r * m->hidden];
            if (own_norm) {
                rms_norm_row(added, (const S*)own_norm, m->eps, m->hidden, &normed[r * m->hidden]);
                added = &normed[r * m->hidden];
            }
            add_row(added, m->hidden, &x[r * m->hidden]);
            if (weight) norm(weight, r);
        });
    }

    void hand_on() {
        team.by_one([&] { copy_outputs(x.data(), (S*)c->hidden_out); });
    }

    void run_head() {
        if (num_outputs < num_tokens) team.by_one([&] { copy_outputs(normed.data(), normed.data()); });
        if (!num_outputs) return;
        if (m->hidden_norm)
            team.by_one([&] {
                if (m->norm_output)
                    std::copy_n(normed.data(), num_outputs * m->hidden, fed_back.data());
                else
                    copy_outputs(x.data(), fed_back.data());
            });
        linear(m->head, normed.data(), num_outputs, logits_data());
        if (!c->drafts) look_for_flaws();
    }

    // Whether a logit is not finite; drafts find that out where they look for the largest one.
    void look_for_flaws() {
        constexpr int64_t PART = 4096;
        const S* from = logits_data();
        const int64_t count = num_outputs * m->head.N;
        team.share((count + PART - 1) / PART, [&](int64_t i) {
            const int64_t first = i * PART;
            int64_t wrong = 0;
            for (int64_t i = first; i < std::min(first + PART, count); ++i) wrong += !is_finite(from[i]);
            if (wrong) {
#pragma omp atomic write
                c->not_finite = 1;
            }
        });
    }

    // The hidden states of the tokens that are wanted, one after the other; called by one thread.
    void copy_outputs(const S* from, S* to) {
        for (const PartOfThis* part : parts) {
            const int64_t T = part->problem.T, wanted = part->num_outputs(), size = wanted * m->hidden;
            for (int64_t b = 0; b < part->problem.B; ++b, to += size)
                std::memmove(to, from + (part->first + (b + 1) * T - wanted) * m->hidden, size * sizeof(S));
        }
    }

    S* logits_data() { return c->logits ? (S*)c->logits : logits.data(); }

    // The id of the largest logit of each row, the smallest of equal ones, becomes its next token.
    void draft(int64_t step) {
        const int64_t V = m->head.N;
        team.share(c->B, [&](int64_t b) {
            const S* row = logits_data() + b * V;
            float most = to_float(row[0]);
            for (int64_t i = 1; i < V; ++i) most = std::max(most, to_float(row[i]));
            int64_t id = 0;
            while (id < V - 1 && to_float(row[id]) != most) ++id;
            const auto weight = [&](int64_t i) { return exp_negative(to_float(row[i]) - most); };
            const double sum = c->pa > 0 ? sum_of<double>(V, weight) : 0;
            int64_t wrong = 0;
            for (int64_t i = 0; i < V; ++i) wrong += !is_finite(row[i]);
            best[b] = {most, double(id + m->first_id), sum, double(wrong)};
        });
        team.by_one([&] {
            choose();
            for (int64_t b = 0; b < c->B; ++b) c->drafts[b * c->steps + step] = tokens[b];
            c->num_drafted = step + 1;
            if (std::find(goes_on.begin(), goes_on.end(), true) == goes_on.end()) num_steps = step + 1;
        });
    }

    void choose() {
        tokens.resize(c->B);
        std::copy(best.begin(), best.end(), found.begin());
        if (peers->size > 1) gather_best();
        for (int64_t b = 0; b < c->B; ++b) {
            Best top = found[b];
            double sum = 0;
            for (int64_t rank = 1; rank < peers->size; ++rank) {
                const Best& other = found[rank * c->B + b];
                if (other.logit > top.logit || (other.logit == top.logit && other.id < top.id)) top = other;
            }
            for (int64_t rank = 0; rank < peers->size; ++rank) {
                const Best& part = found[rank * c->B + b];
                if (part.wrong > 0) c->not_finite = 1;
                sum += part.sum * std::exp(part.logit - top.logit);
            }
            tokens[b] = m->target_ids ? m->target_ids[int64_t(top.id)] : int64_t(top.id);
            if (sum * c->pa > 1) goes_on[b] = false;  // its probability is 1 / sum
        }
    }

    // Every rank's `best`, in rank order, into `found`.
    void gather_best() {
        const int64_t most = peers->slot_bytes / int64_t(sizeof(Best));
        for (int64_t at = 0; at < c->B; at += most) {
            const int64_t bytes = std::min(most, c->B - at) * sizeof(Best);
            if (!exchange_with(&best[at], bytes)) return;
            segment().collect((char*)&found[at], bytes, c->B * sizeof(Best));
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
    Exchange* peers;
    Call* c;  // the first one
    std::deque<PartOfThis> room_for_parts;  // which keeps their memory from one forward to the next
    std::vector<PartOfThis*> parts;
    Team team;
    int64_t status, num_tokens, num_outputs;
    // Set while late threads read them, and so that these still take all loops that the others took.
    std::atomic<int64_t> num_steps, cancelled_at;
    std::vector<int64_t> tokens;
    std::vector<S> x, normed, part, qkv, mixed, gate_up, hidden, logits, pairs, fed_back;
    std::vector<float> lse, room;  // room: scratch memory of linear layers
    std::deque<Route> routes;      // by layer
    std::vector<S> router_logits, gathered, expert_up, expert_hidden, expert_out;
    std::vector<S> shared_up, shared_hidden, shared_out, shared_logits;
    std::vector<float> sums;
    std::vector<Best> best, found;
    std::vector<bool> goes_on;  // rows whose chain has not stopped
};

}  // namespace
