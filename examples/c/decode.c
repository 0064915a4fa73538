/* decode.c: the attention of one decoded token over a paged FP8 cache.
 *
 *   make lib && export PKG_CONFIG_PATH=build/lib/pkgconfig
 *   cc -std=c11 examples/c/decode.c $(pkg-config --cflags --libs sparse_mla) \
 *       -Wl,-rpath,$PWD/build/lib -lm -o decode && ./decode
 */
#include "common.h"

enum { TOKENS = 100, HEADS = 4, TOPK = 16, PAGES = 2, BLOCK = 64 };

static uint16_t kv_c[TOKENS][512], k_pe[TOKENS][64], q[HEADS][576], out[HEADS][512];
static _Alignas(16) uint8_t kv_cache[PAGES][BLOCK][656]; /* FP8 rows need this alignment */
static float lse[HEADS], keys[PAGES * BLOCK][576];

int
main(void)
{
    smla_error error;
    const double scale = 1 / sqrt(192);
    fill_bf16(kv_c, sizeof kv_c);
    fill_bf16(k_pe, sizeof k_pe);
    fill_bf16(q, sizeof q);

    int32_t slots[TOKENS]; /* token t goes to row t % BLOCK of page t / BLOCK */
    for (int t = 0; t < TOKENS; t++) {
        slots[t] = t;
    }
    const DLTensor *const cache = ARRAY(kv_cache, u8, PAGES, BLOCK, 656);
    const smla_concat_and_cache_mla_args write = {.struct_size = sizeof write,
                                                  .kv_c = ARRAY(kv_c, bf16, TOKENS, 512),
                                                  .k_pe = ARRAY(k_pe, bf16, TOKENS, 64),
                                                  .kv_cache = cache,
                                                  .slot_mapping = ARRAY(slots, i32, TOKENS)};
    check(smla_concat_and_cache_mla(&write, &error), &error);

    int32_t chosen[TOPK]; /* the slots that an indexer would select, in any order */
    for (int k = 0; k < TOPK; k++) {
        chosen[k] = (k * 37 + 5) % TOKENS;
    }
    int64_t bytes;
    const smla_attention_workspace_args size = {.struct_size = sizeof size,
                                                .num_tokens = 1,
                                                .num_heads = HEADS,
                                                .topk = TOPK,
                                                .device = {kDLCPU, 0}};
    check(smla_attention_workspace_size(&size, &bytes, &error), &error);
    void *const workspace = allocate(bytes);
    const smla_sparse_attention_args attend = {.struct_size = sizeof attend,
                                               .q = ARRAY(q, bf16, 1, HEADS, 576),
                                               .kv_cache = cache,
                                               .indices = ARRAY(chosen, i32, 1, TOPK),
                                               .out = ARRAY(out, bf16, 1, HEADS, 512),
                                               .lse = ARRAY(lse, fp32, 1, HEADS),
                                               .workspace = ARRAY(workspace, u8, bytes),
                                               .softmax_scale = scale};
    check(smla_sparse_attention(&attend, &error), &error);
    free(workspace);
    printf("out[0][0] = %.4f, lse[0] = %.4f\n", from_bf16(out[0][0]), lse[0]);

    /* Compare the last head with the formula over the values that the cache stands for. */
    const smla_dequantize_kv_cache_args dequantize = {.struct_size = sizeof dequantize,
                                                      .kv_cache = cache,
                                                      .out = ARRAY(keys, fp32, PAGES, BLOCK, 576)};
    check(smla_dequantize_kv_cache(&dequantize, &error), &error);
    const int last = HEADS - 1;
    return verdict(
        count_wrong(out[last], q[last], keys[0], 576, chosen, TOPK, scale, 0, 1.0 / 256));
}
