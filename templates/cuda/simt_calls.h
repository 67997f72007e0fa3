// What a kernel sees of the GPU that a CPU stands in for, and calls of it; a part of simt.h.
//
// The machine behind it is a library of its own (`attnc.verify.simt`), compiled once and with optimisation, whatever a
// kernel is compiled with. `line` is the place of a call: a fault tells, and lanes or warps that meet at different places are one.
#pragma once

#include "simt_words.h"

SIMT_STATE Dim threadIdx, blockIdx, gridDim;

namespace simt {

constexpr int SHARED = 1 << 18;  // bytes: more than a block can have, to see what it writes past its own

enum class At { instruction, barrier, end };
enum class Type { tf32, f16, bf16 };  // of the operands of a product

[[noreturn]] SIMT void fail(const char* what, int line);
SIMT void meet(At at, int line);
SIMT void meet_warp(int line);
SIMT uint32_t shuffle(uint32_t x, int lane, int line);
SIMT uint32_t shuffle_xor(uint32_t x, int mask, int line);
SIMT bool any_lane(bool x, int line);
SIMT bool any_thread(bool x, int line);

SIMT void copy_async(void* to, const void* from, bool inside, int line);
SIMT void commit_copies();
SIMT void wait_copies(int groups);

SIMT uint32_t load_word(uint32_t place, int line);
SIMT void load_matrices(uint32_t (&x)[4], uint32_t row, bool transposed, int line);
SIMT void multiply(Type type, float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, int line);

// Returns what went wrong, or null. memory: for the fibers and their stacks.
SIMT const char* launch(void (*kernel)(), int blocks, int threads, int shared_bytes, uint64_t seed, char* memory, int = 1);

}  // namespace simt
