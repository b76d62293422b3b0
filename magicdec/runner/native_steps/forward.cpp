// The forward of forward.h, as Python calls it. Compiled for one head size, HEAD_SIZE, in a few seconds.
#include "forward.h"

// `storage` of the KV pools is FLOAT32 or BFLOAT16, the same as of weights and activations; or FP8, INT8 or INT4 in a library
// compiled with CODES_OF_BFLOAT16 or CODES_OF_FLOAT32, with weights and activations of that. Returns DONE, INTERRUPTED if
// `keep_waiting` said so, or UNKNOWN_TOKEN.
extern "C" int64_t magicdec_forward(int storage, const Model* model, const Cache* caches, Exchange* exchange, Call* calls,
                                    int64_t num_calls) {
    auto run = [&](auto& forward) { return forward.run(*model, caches, *exchange, calls, num_calls); };
#if defined(HAS_CODES)
    if (storage == FP8) {
        static thread_local Forward<Computed, Fp8> forward;
        return run(forward);
    }
    if (storage == INT8) {
        static thread_local Forward<Computed, CodedInt8> forward;
        return run(forward);
    }
    static thread_local Forward<Computed, CodedInt4> forward;
    return run(forward);
#else
    if (storage == FLOAT32) {
        static thread_local Forward<float, Float32> forward;
        return run(forward);
    }
#if defined(HAS_TILES)
    using PairKernel = Bf16;
    using ShortKernel = AmxBf16;
#elif defined(__AVX512BF16__)
    using PairKernel = Bf16;
    using ShortKernel = Bf16;
#else
    using PairKernel = Wide;
    using ShortKernel = Wide;
#endif
    static thread_local Forward<bfloat16, PairKernel, ShortKernel> forward;
    return run(forward);
#endif
}
