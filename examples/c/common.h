/* common.h: what the examples share. It describes arrays, checks calls, makes inputs, and has the
 * formula of attention in double, which the examples compare their results with.
 */
#ifndef COMMON_H
#define COMMON_H

#include <math.h>
#include <sparse_mla.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const DLDataType bf16 = {kDLBfloat, 16, 1}, fp32 = {kDLFloat, 32, 1}, u8 = {kDLUInt, 8, 1},
                        i32 = {kDLInt, 32, 1};

/* ARRAY(data, dtype, sizes...): a contiguous array on the CPU, so its strides may stay NULL. Like
 * any compound literal it lives until the end of the block that it stands in. */
#define SHAPE(...) ((int64_t[]){__VA_ARGS__})
#define ARRAY(data_, dtype_, ...)                                                \
    (&(DLTensor){.data = (data_),                                                \
                 .device = {kDLCPU, 0},                                          \
                 .ndim = (int32_t)(sizeof SHAPE(__VA_ARGS__) / sizeof(int64_t)), \
                 .dtype = (dtype_),                                              \
                 .shape = SHAPE(__VA_ARGS__)})

/* Ends the program if a call failed. The text names the argument and says what it must be. */
static inline void
check(smla_status status, const smla_error *error)
{
    if (status != SMLA_OK) {
        fprintf(stderr, "%s: %s\n", smla_status_name(status), error->text);
        exit(EXIT_FAILURE);
    }
}

static inline void *
allocate(int64_t bytes)
{
    void *const memory = malloc((size_t)bytes);
    if (memory == NULL) {
        fprintf(stderr, "no memory for %lld bytes\n", (long long)bytes);
        exit(EXIT_FAILURE);
    }
    return memory;
}

static inline float
from_bf16(uint16_t x)
{
    const uint32_t bits = (uint32_t)x << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* Fills an array with multiples of 1/128 in [-1, 1), the same ones in every run. bf16 holds such
 * values exactly, so it is enough to drop the lower half of the float. */
static inline void
fill_bf16(void *array, size_t bytes)
{
    static uint32_t state = 1;
    uint16_t *const values = array;
    for (size_t i = 0; i < bytes / sizeof *values; i++) {
        state = state * 1664525u + 1013904223u; /* a linear congruential generator */
        const float value = (float)(state >> 24) / 128.0f - 1.0f;
        uint32_t bits;
        memcpy(&bits, &value, sizeof bits);
        values[i] = (uint16_t)(bits >> 16);
    }
}

/* Computes one head by the formula: out = softmax(scale * q k^T) v over the rows of `keys` that
 * `slots` names, where v is the first 512 of a key's `head_size` values. `sink_weight` is
 * exp(sink), which the softmax's sum has beside the keys' weights, or 0. Returns how many values of
 * `out` are off by more than allowed * (sum of weight * |v| + |out|). One attention call stays
 * within 1/256 of that: the README's section on accuracy has the whole bound. */
static inline int
count_wrong(const uint16_t *out, const uint16_t *q, const float *keys, int head_size,
            const int32_t *slots, int num_slots, double scale, double sink_weight, double allowed)
{
    double sum = sink_weight, want[512] = {0}, size[512] = {0};
    for (int k = 0; k < num_slots; k++) {
        const float *const key = keys + (ptrdiff_t)slots[k] * head_size;
        double logit = 0;
        for (int i = 0; i < head_size; i++) {
            logit += (double)from_bf16(q[i]) * key[i];
        }
        const double weight = exp(scale * logit); /* no overflow: these logits are small */
        sum += weight;
        for (int i = 0; i < 512; i++) {
            want[i] += weight * key[i];
            size[i] += weight * fabs(key[i]);
        }
    }
    int wrong = 0;
    for (int i = 0; i < 512; i++) {
        const double error = fabs(from_bf16(out[i]) - want[i] / sum);
        wrong += !(error <= allowed * (size[i] + fabs(want[i])) / sum); /* a NaN is wrong too */
    }
    return wrong;
}

/* Says how the comparison went, and returns the program's exit status. */
static inline int
verdict(int wrong)
{
    printf("%d values are wrong: %s\n", wrong, wrong == 0 ? "good" : "BAD");
    return wrong == 0 ? EXIT_SUCCESS : EXIT_FAILURE;
}

#endif /* COMMON_H */
