// Attention of new tokens over a paged KV cache, for CPUs: prefill, decode and verification.
//
// One pass over the visible keys of each (row, KV head): the query heads that share the KV head and the row's new
// tokens are packed into M queries, so K and V are read once for all of them. A sequence is divided into pieces, which
// are distributed over threads and merged by log-sum-exp (Flash-Decoding, Dao et al. 2023). Storage is float32,
// bfloat16, FP8, int8 or int4; arithmetic is float32, or integers for the last two. On request the same pass also sums the
// attention weights by blocks of keys, without changing a bit of the output.
//
// native_plan.h plans, native_team.h computes and merges. The arithmetic is in native_float32.h and native_chunk.h (chunks of
// a prefill) for float32, in native_tile.h and native_wide.h for bfloat16, in native_fp8.h for FP8, and in native_int8.h,
// native_int4.h, native_codes.h and native_codes_softmax.h for int8 and int4; native_softmax.h turns scores into weights. CPUs
// with bfloat16 dot products have native_bf16.h, and those with tile registers native_registers.h, native_amx.h and
// native_codes_amx.h.
//
// Shapes: B rows, T new tokens, H query heads, G KV heads, D head size; M = T * H/G packed queries, token-major.
#include "native_received.h"
#include "native_team.h"

namespace {

std::atomic<int64_t> keys_read{0};

struct Strides { int64_t row, token; };

template <typename Kernel, typename S>
void run(const Problem& p, const S* q, Strides qs, const S* k, Strides ks, const S* v, Strides vs,
         Pools<Kernel> pools, const Table& table, const Ranges& ranges, const float* sinks, S* out, float* lse, float* mass,
         int64_t num_blocks) {
    static thread_local Attention<Kernel, S> own;
    Attention<Kernel, S>& attention = own;  // each OpenMP thread has its own thread-locals, so pass a reference
    attention.plan_view(p, table, ranges, mass);
    attention.keys_read = 0;
    in_team([&] {
        share(p.B * p.T, [&](int64_t i) {
            const int64_t b = i / p.T, t = i % p.T;
            attention.place(p, table, pools, b, t, q + b * qs.row + t * qs.token, k + b * ks.row + t * ks.token,
                            v + b * vs.row + t * vs.token);
        });
        attention.attend(p, pools, mass);
        attention.merge(p, sinks, out, lse, mass, num_blocks);
    });
    keys_read += attention.keys_read;
}

}  // namespace

// How bfloat16 is multiplied: 0 widened to float32, 1 by dot products.
extern "C" int magicdec_has_dot_products() {
#if defined(__AVX512BF16__)
    return 1;
#else
    return 0;
#endif
}

// Whether it is multiplied in the tile registers of this CPU.
extern "C" int magicdec_may_use_tiles() { return may_use_tiles(); }

// Number of keys (per row and KV head, each with its value) read by all calls in this process so far.
extern "C" int64_t magicdec_keys_read() { return keys_read; }

// Appends k_new, v_new [B,T,G,D] at positions seq_lens.. and computes attention: out [B,T,H,D], lse [B,T,H] float32.
// `shape` is B, T, H, G, D, block_size, table_stride, num_ranges, then (row, token) strides of q, k_new, v_new, then
// range_heads, num_blocks, window (0: none) and whether the tokens are a part of a prompt. `ranges` [B, range_heads,
// num_ranges, 2] are the visible keys, including new ones; range_heads is G, or 1 if they are the same for all heads. `mass`
// [B, G, num_blocks] float32 receives the attention probability of each block of keys, summed over the queries, or is null.
// `sinks` [H] float32 are logits that take part in the softmax, and in lse, like keys without values, or null. `is_widened`:
// bfloat16 is widened, whatever this CPU has. `storage` of the pools is FLOAT32 or BFLOAT16, the same as of all other
// tensors; or FP8, INT8 or INT4 in a library compiled with CODES_OF_BFLOAT16 or CODES_OF_FLOAT32, with other tensors of that.
// Compiled for one head size, HEAD_SIZE, in some seconds. Returns 0, or 1 if D is another size.
extern "C" int magicdec_attention(int storage, int is_widened, const int64_t* shape, const void* q,
                                  const void* k_new, const void* v_new, void* k_pool, void* v_pool,
                                  const int64_t* table, const int64_t* rows, const int64_t* seq_lens,
                                  const int64_t* ranges, const float* sinks, void* out, float* lse, float* mass) {
    const Problem p{shape[0], shape[1], shape[2], shape[3], shape[4], shape[5], seq_lens, shape[16], shape[17] != 0};
    if (p.D != HEAD_SIZE) return 1;
    auto call = [&](auto kernel, auto number) {
        using S = decltype(number);
        using Pool = typename decltype(kernel)::Pool;
        run<decltype(kernel)>(p, (const S*)q, {shape[8], shape[9]}, (const S*)k_new, {shape[10], shape[11]},
                              (const S*)v_new, {shape[12], shape[13]}, {(Pool*)k_pool, (Pool*)v_pool},
                              {table, rows, shape[6]}, {ranges, shape[7], shape[14]}, sinks, (S*)out, lse, mass, shape[15]);
        return 0;
    };
#if defined(HAS_CODES)
    if (storage == FP8) return call(Fp8{}, Computed{});
    return storage == INT8 ? call(CodedInt8{}, Computed{}) : call(CodedInt4{}, Computed{});
#else
    if (storage == FLOAT32) return call(Float32{}, float{});
#if defined(__AVX512BF16__)
#if defined(HAS_TILES)
    if (!is_widened && AmxBf16::serves(p)) return call(AmxBf16{}, bfloat16{});
#endif
    if (!is_widened) return call(Bf16{}, bfloat16{});
#endif
    return call(Wide{}, bfloat16{});
#endif
}

// Attention weights that keys received from the newest tokens, out [B, G, length - first]: see `receive`. `shape` is B, T,
// H, G, block_size, table_stride, first, length. `sinks` [H] or null: as above.
extern "C" void magicdec_received(int storage, const int64_t* shape, const void* q, const void* keys, const int64_t* table,
                                  const int64_t* rows, const float* sinks, float* out) {
    const Received r{shape[0], shape[1], shape[2], shape[3], shape[4], shape[6], shape[7], sinks};
    const Table blocks{table, rows, shape[5]};
#if defined(HAS_CODES)
    const auto queries = (const Computed*)q;
    if (storage == FP8) return receive<Fp8Scores>(r, queries, (const fp8*)keys, blocks, out);
    if (storage == INT8) return receive<WideScores<CodedInt8>>(r, queries, (const int8_t*)keys, blocks, out);
    receive<WideScores<CodedInt4>>(r, queries, (const uint8_t*)keys, blocks, out);
#else
    if (storage == FLOAT32) return receive<Float32Scores>(r, (const float*)q, (const float*)keys, blocks, out);
#if defined(__AVX512BF16__)
    receive<Bf16Scores>(r, (const bfloat16*)q, (const bfloat16*)keys, blocks, out);
#else
    receive<WideScores<Wide>>(r, (const bfloat16*)q, (const bfloat16*)keys, blocks, out);
#endif
#endif
}
