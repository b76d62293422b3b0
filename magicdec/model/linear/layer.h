// A linear layer with packed weights, as other libraries call it.
#pragma once
#include <cstdint>

struct LinearLayer {
    const void *packed, *bias;  // bias: added by the layer, or null
    int64_t N, K;
    int64_t bits, group, scale_type, has_minimum, least;  // of numbers in groups (packed_groups.h); bits is 0 of others
    int64_t rounds;                                       // the activations that these are multiplied with
    const int32_t* order;                                 // of the inputs of numbers in groups, as in packed_groups.h, or null
};

// out [R, N] = x [R, K] times the packed weight, plus bias, computed by the threads of a Team (team.h), all of which call it.
// `room` is scratch memory for R * K floats.
using MultiplyInTeam = void (*)(void* team, const LinearLayer* w, const void* x, int64_t R, float* room, void* out);
