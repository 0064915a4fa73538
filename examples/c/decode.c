/* decode.c: one decode step over a paged FP8 cache, in C.
 *
 *   make lib && export PKG_CONFIG_PATH=build/lib/pkgconfig
 *   cc -std=c11 examples/c/decode.c $(pkg-config --cflags --libs sparse_mla) \
 *       -Wl,-rpath,$PWD/build/lib -lm -o decode && ./decode
 */
#include <math.h>
#include <sparse_mla.h>
#include <stdio.h>
#include <string.h>

enum { TOKENS = 100, HEADS = 4, TOPK = 3, PAGES = 2, BLOCK = 64 };

static const DLDataType bf16 = {kDLBfloat, 16, 1}, fp32 = {kDLFloat, 32, 1}, u8 = {kDLUInt, 8, 1},
                        i32 = {kDLInt, 32, 1};

/* A contiguous array on the CPU; strides may stay NULL. */
#define ARRAY(data_, dtype_, ndim_, ...) \
    (&(DLTensor){.data = (data_),        \
                 .device = {kDLCPU, 0},  \
                 .ndim = (ndim_),        \
                 .dtype = (dtype_),      \
                 .shape = (int64_t[]){__VA_ARGS__}})

static float kv_c[TOKENS][512], k_pe[TOKENS][64], lse[HEADS];
static uint16_t q[HEADS][576], out[HEADS][512];
static uint8_t workspace[1 << 23]; /* enough here; smla_attention_workspace_size tells */
static _Alignas(16) uint8_t kv_cache[PAGES][BLOCK][656];

static float
from_bf16(uint16_t x)
{
    const uint32_t bits = (uint32_t)x << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

int
main(void)
{
    smla_error error;
    int32_t slots[TOKENS];
    for (int t = 0; t < TOKENS; t++) { /* key t has t / 10 in every value */
        slots[t] = t;
        for (int i = 0; i < 512; i++) {
            kv_c[t][i] = (float)t / 10.0f;
        }
    }
    const smla_concat_and_cache_mla_args write = {.struct_size = sizeof write,
                                                  .kv_c = ARRAY(kv_c, fp32, 2, TOKENS, 512),
                                                  .k_pe = ARRAY(k_pe, fp32, 2, TOKENS, 64),
                                                  .kv_cache =
                                                      ARRAY(kv_cache, u8, 3, PAGES, BLOCK, 656),
                                                  .slot_mapping = ARRAY(slots, i32, 1, TOKENS)};
    int32_t chosen[TOPK] = {10, 20, 90}; /* what an indexer would select */
    const smla_sparse_attention_args attend = {.struct_size = sizeof attend,
                                               .q = ARRAY(q, bf16, 3, 1, HEADS, 576),
                                               .kv = write.kv_cache,
                                               .indices = ARRAY(chosen, i32, 2, 1, TOPK),
                                               .out = ARRAY(out, bf16, 3, 1, HEADS, 512),
                                               .lse = ARRAY(lse, fp32, 2, 1, HEADS),
                                               .workspace =
                                                   ARRAY(workspace, u8, 1, sizeof workspace),
                                               .softmax_scale = 0.1};
    if (smla_concat_and_cache_mla(&write, &error) != SMLA_OK ||
        smla_sparse_attention(&attend, &error) != SMLA_OK) {
        fprintf(stderr, "%s: %s\n", smla_status_name(error.status), error.text);
        return 1;
    }
    /* A query of zeros weighs all keys alike: the mean of 1, 2 and 9, and the logarithm of 3. */
    printf("out[0][0] = %.3f, lse[0] = %.6f\n", from_bf16(out[0][0]), lse[0]);
    const int good =
        fabsf(from_bf16(out[0][0]) - 4.0f) < 0.02f && fabsf(lse[0] - logf(3.0f)) < 1e-6f;
    puts(good ? "as expected" : "NOT what it should be");
    return good ? 0 : 1;
}
