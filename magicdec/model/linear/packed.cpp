// Packing of weights, and linear layers over packed weights, as Python calls them.
#include "layer.h"
#include "packed_float32.h"
#include "packed_groups.h"
#if defined(__AVX512BF16__)
#include "packed.h"
#endif

// weight [N, K] to packed [ceil(N / 64), K, 64]; rows past N are zeros.
extern "C" void magicdec_pack_float32(const float* weight, int64_t N, int64_t K, float* packed) {
    constexpr int64_t width = float32::WIDTH;
#pragma omp parallel for
    for (int64_t block = 0; block < (N + width - 1) / width; ++block)
        for (int64_t k = 0; k < K; ++k)
            for (int64_t j = 0, row; j < width; ++j)
                packed[(block * K + k) * width + j] = (row = block * width + j) < N ? weight[row * K + k] : 0.0f;
}

// See `linear` of packed_float32.h. `room` is scratch memory for R * K floats, here and below.
extern "C" void magicdec_linear_float32(const float* x, int64_t R, const float* packed, int64_t N, int64_t K,
                                        const float* bias, float* room, float* out) {
    in_team([&] { linear_float32(x, R, packed, N, K, bias, room, out); });
}

// weight [N, K] (K even) to packed [ceil(N / 64), K / 2, 64] pairs; rows past N are zeros.
extern "C" void magicdec_pack(const uint16_t* weight, int64_t N, int64_t K, uint32_t* packed) {
    constexpr int64_t width = float32::WIDTH, part = 16;
    const int64_t pairs = K / 2;
#pragma omp parallel for collapse(2)
    for (int64_t block = 0; block < (N + width - 1) / width; ++block)
        for (int64_t first = 0; first < pairs; first += part)
            for (int64_t j = 0; j < width; ++j) {
                const int64_t row = block * width + j, count = std::min(part, pairs - first);
                uint32_t numbers[part] = {};
                if (row < N) std::memcpy(numbers, weight + row * K + 2 * first, 4 * count);
                for (int64_t i = 0; i < count; ++i) packed[(block * pairs + first + i) * width + j] = numbers[i];
            }
}

// numbers [N, K] (K a multiple of the group), scale and minimum [N, K / group] as stored to packed
// [ceil(N / 64), K / group, words] (packed_groups.h). Rows past N have scales of zero.
extern "C" void magicdec_pack_groups(const int8_t* numbers, const void* scale, const void* minimum, int64_t N, int64_t K,
                                     const groups::Format* f, uint32_t* packed) {
    constexpr int64_t width = groups::WIDTH;
    const int64_t count = K / f->group, each = 32 / f->bits;
#pragma omp parallel for
    for (int64_t block = 0; block < (N + width - 1) / width; ++block)
        for (int64_t g = 0; g < count; ++g) {
            uint32_t* group = packed + (block * count + g) * f->words();
            std::fill_n(group, f->words(), 0);
            for (int64_t j = 0, row; j < width && (row = block * width + j) < N; ++j) {
                for (int64_t part = 0; part < 1 + f->has_minimum; ++part) {
                    const void* from = part ? minimum : scale;
                    uint32_t* to = group + part * f->scale_words();
                    if (f->scale == groups::FLOAT32)
                        to[j] = ((const uint32_t*)from)[row * count + g];
                    else
                        ((uint16_t*)to)[j] = ((const uint16_t*)from)[row * count + g];
                }
                for (int64_t i = 0; i < f->group; ++i) {
                    const uint32_t number = uint32_t(numbers[row * K + g * f->group + i] - f->least);
                    const int64_t in = i % each, shift = f->bits == 4 ? in % 4 * 8 + in / 4 * 4 : in * 8;
                    group[f->before() + i / each * width + j] |= number << shift;
                }
            }
        }
}

// See `linear_bf16` and `groups::linear`.
extern "C" void magicdec_linear(const uint16_t* x, int64_t R, const uint32_t* packed, int64_t N, int64_t K,
                                const uint16_t* bias, float* room, uint16_t* out) {
    in_team([&] { linear_bf16(x, R, packed, N, K, bias, room, out); });
}

extern "C" void magicdec_linear_groups(const uint16_t* x, int64_t R, const groups::Weights* packed, int64_t N, int64_t K,
                                       int64_t rounds, const uint16_t* bias, float* room, uint16_t* out) {
    in_team([&] { groups::linear((const bfloat16*)x, R, *packed, N, K, rounds, (const bfloat16*)bias, room, (bfloat16*)out); });
}

extern "C" void magicdec_linear_groups_float32(const float* x, int64_t R, const groups::Weights* packed, int64_t N, int64_t K,
                                               int64_t rounds, const float* bias, float* room, float* out) {
    in_team([&] { groups::linear(x, R, *packed, N, K, rounds, bias, room, out); });
}

namespace {

template <typename S>
inline void linear_groups(const LinearLayer& w, const S* x, int64_t R, float* room, S* out) {
    const groups::Weights weights{(const uint32_t*)w.packed, {w.bits, w.group, w.scale_type, w.has_minimum, w.least}, w.order};
    groups::linear(x, R, weights, w.N, w.K, w.rounds, (const S*)w.bias, room, out);
}

}  // namespace

// See MultiplyInTeam.
extern "C" void magicdec_linear_in_team(void* team, const LinearLayer* w, const void* x, int64_t R, float* room, void* out) {
    const Team::Guest guest(*(Team*)team);
    if (w->bits) return linear_groups(*w, (const bfloat16*)x, R, room, (bfloat16*)out);
    linear_bf16((const uint16_t*)x, R, (const uint32_t*)w->packed, w->N, w->K, (const uint16_t*)w->bias, room, (uint16_t*)out);
}

extern "C" void magicdec_linear_in_team_float32(void* team, const LinearLayer* w, const void* x, int64_t R, float* room,
                                                void* out) {
    const Team::Guest guest(*(Team*)team);
    if (w->bits) return linear_groups(*w, (const float*)x, R, room, (float*)out);
    linear_float32((const float*)x, R, (const float*)w->packed, w->N, w->K, (const float*)w->bias, room, (float*)out);
}
