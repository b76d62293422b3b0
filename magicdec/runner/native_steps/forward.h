// A forward of a model over the paged KV cache, or several in a row that draft greedily: embedding, layers, attention,
// head, all-reduce over ranks and the largest logit, in one parallel region. The layers may be some of a model's (a stage
// of a pipeline): hidden states then come in, or go out, or both. Nothing is computed here that the
// kernels of single layers do not compute: this file calls them in order, so that a token has the same bits either way.
//
// A decoder with RMS norms, rotary embedding, a gated MLP (SiLU or GELU) and sequential residuals. Activations are S:
// bfloat16, or float.
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

// Whether a number is neither infinite nor NaN, by its bits: kernels are compiled for finite numbers alone, so that a
// comparison of numbers may be taken for true.
inline bool is_finite(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    return (bits & 0x7f800000) != 0x7f800000;
}
inline bool is_finite(bfloat16 x) { return (x.value & 0x7f80) != 0x7f80; }

// The largest logit of a row among those of a rank, its id, the sum of exp(logit - largest) over the rank's, and how many
// of these logits are not finite.
struct Best {
    double logit, id, sum, wrong;
};

template <typename S, typename Kernel, typename Short = Kernel>
class Forward {
public:
    int64_t run(const Model& model, const Cache& cache, Exchange& exchange, Call* calls, int64_t num_calls) {
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
            parts[i]->start(model, cache, call, first);
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
            const volatile int64_t* numbers = c->cancelled;
            if (numbers[0] == c->cancelled_value && now_ns() >= numbers[1])
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

    static int64_t now_ns() {
        timespec now;
        clock_gettime(CLOCK_MONOTONIC, &now);
        return now.tv_sec * 1000000000LL + now.tv_nsec;
    }

    // Called by one thread.
    void resize(int64_t R) {
        const int64_t heads = m->H + 2 * m->G, mlp = m->layers[0].gate_up.N, inner = m->layers[0].down.K;
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
        linear(w.gate_up, normed.data(), R, gate_up.data());
        const int64_t width = w.gate_up.N / 2, stride = w.down.K;  // the kernel pads an odd width by one zero
        team.share(R, [&](int64_t r) {
            gate_row(m->is_gelu, &gate_up[r * 2 * width], width, &hidden[r * stride]);
            std::fill(&hidden[r * stride] + width, &hidden[r * stride] + stride, S{});
        });
        linear(w.down, hidden.data(), R, part.data());
        const bool is_last = layer + 1 == m->num_layers;
        add_part(w.down_bias, w.post_mlp_norm,
                 !is_last ? m->layers[layer + 1].attention_norm : c->hidden_out ? nullptr : m->norm);
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
            double sum = 0;
            if (c->pa > 0)
                for (int64_t i = 0; i < V; ++i) sum += exp_negative(to_float(row[i]) - most);
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
    std::vector<Best> best, found;
    std::vector<bool> goes_on;  // rows whose chain has not stopped
};

}  // namespace
