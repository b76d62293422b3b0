// The functions of shared_memory.h that Python calls.
#include "shared_memory.h"

using shared_memory::Segment;

extern "C" {

void magicdec_post(char* segment, int64_t rank, int64_t size, int64_t slot_bytes, uint64_t turn, const void* x,
                   int64_t bytes) {
    Segment{segment, rank, size, slot_bytes, turn}.post(x, bytes);
}

int64_t magicdec_wait(char* segment, int64_t size, uint64_t turn, int64_t timeout_ms) {
    return Segment{segment, 0, size, 0, turn}.wait(timeout_ms);
}

void magicdec_sum_float32(char* segment, int64_t size, int64_t slot_bytes, uint64_t turn, float* x, int64_t count) {
    Segment{segment, 0, size, slot_bytes, turn}.sum(x, count);
}

void magicdec_sum_float64(char* segment, int64_t size, int64_t slot_bytes, uint64_t turn, double* x, int64_t count) {
    Segment{segment, 0, size, slot_bytes, turn}.sum(x, count);
}

void magicdec_sum_bfloat16(char* segment, int64_t size, int64_t slot_bytes, uint64_t turn, uint16_t* x,
                           int64_t count) {
    Segment{segment, 0, size, slot_bytes, turn}.sum_bfloat16(x, count);
}

void magicdec_collect(char* segment, int64_t size, int64_t slot_bytes, uint64_t turn, char* out, int64_t bytes) {
    Segment{segment, 0, size, slot_bytes, turn}.collect(out, bytes, bytes);
}

}  // extern "C"
