/* v4.c: the attention of one decoded token of DeepSeek V4. It sees the last 128 tokens (a sliding
 * window) and some compressed rows, each of which stands for a group of four tokens. Both caches
 * hold 584 bytes per row (fp8_v4), and a sink per head takes a part of the softmax.
 *
 *   make lib && export PKG_CONFIG_PATH=build/lib/pkgconfig
 *   cc -std=c11 examples/c/v4.c $(pkg-config --cflags --libs sparse_mla) \
 *       -Wl,-rpath,$PWD/build/lib -lm -o v4 && ./v4
 */
#include "common.h"

enum {
    TOKENS = 300,
    GROUPS = TOKENS / 4, /* complete groups, which are the compressed rows */
    WINDOW = 128,
    TOPK = 16, /* compressed rows that the token sees */
    HEADS = 4,
    BLOCK = 64,
    PAGES = 5,       /* pages of the window's cache, which keeps all tokens here */
    GROUP_PAGES = 2, /* pages of the compressed cache */
};

static uint16_t rows[TOKENS][512], compressed[GROUPS][512], q[HEADS][512], out[HEADS][512];
static _Alignas(8) uint8_t window_cache[PAGES][BLOCK][584];
static _Alignas(8) uint8_t compressed_cache[GROUP_PAGES][BLOCK][584];
static float lse[HEADS], keys[(PAGES + GROUP_PAGES) * BLOCK][512];

/* Writes row i to slot i of a cache: data to its place among the page's first 64 * 576 bytes, the
 * scales behind them. */
static void
insert_rows(uint16_t *source, int count, const DLTensor *cache)
{
    int64_t slots[TOKENS];
    for (int i = 0; i < count; i++) {
        slots[i] = i;
    }
    smla_error error;
    const DLDataType i64 = {kDLInt, 64, 1};
    const smla_insert_k_cache_args insert = {.struct_size = sizeof insert,
                                             .k = ARRAY(source, bf16, count, 512),
                                             .k_cache = cache,
                                             .slot_mapping = ARRAY(slots, i64, count)};
    check(smla_quantize_and_insert_k_cache(&insert, &error), &error);
}

/* The values that a cache stands for. */
static void
read_keys(const DLTensor *cache, int pages, float (*to)[512])
{
    smla_error error;
    const smla_dequantize_kv_cache_args dequantize = {.struct_size = sizeof dequantize,
                                                      .kv_cache = cache,
                                                      .out = ARRAY(to, fp32, pages, BLOCK, 512)};
    check(smla_dequantize_kv_cache(&dequantize, &error), &error);
}

int
main(void)
{
    smla_error error;
    const double scale = 1 / sqrt(512);
    fill_bf16(rows, sizeof rows);
    fill_bf16(compressed, sizeof compressed); /* the layer's compressor would make these */
    fill_bf16(q, sizeof q);
    const DLTensor *const window = ARRAY(window_cache, u8, PAGES, BLOCK, 584);
    const DLTensor *const groups = ARRAY(compressed_cache, u8, GROUP_PAGES, BLOCK, 584);
    insert_rows(rows[0], TOKENS, window);
    insert_rows(compressed[0], GROUPS, groups);

    int32_t recent[WINDOW], chosen[TOPK]; /* slots: oldest first, and an indexer's choice */
    for (int i = 0; i < WINDOW; i++) {
        recent[i] = TOKENS - WINDOW + i;
    }
    for (int i = 0; i < TOPK; i++) {
        chosen[i] = (i * 29 + 3) % GROUPS;
    }
    float sinks[HEADS] = {-1, 0, 4, 2.5f};
    int64_t bytes;
    const smla_attention_workspace_args size = {.struct_size = sizeof size,
                                                .num_tokens = 1,
                                                .num_heads = HEADS,
                                                .topk = WINDOW,
                                                .extra_topk = TOPK,
                                                .device = {kDLCPU, 0}};
    check(smla_attention_workspace_size(&size, &bytes, &error), &error);
    void *const workspace = allocate(bytes);
    const smla_sparse_attention_args attend = {.struct_size = sizeof attend,
                                               .q = ARRAY(q, bf16, 1, HEADS, 512),
                                               .kv = window,
                                               .indices = ARRAY(recent, i32, 1, WINDOW),
                                               .extra_kv = groups,
                                               .extra_indices = ARRAY(chosen, i32, 1, TOPK),
                                               .attn_sink = ARRAY(sinks, fp32, HEADS),
                                               .out = ARRAY(out, bf16, 1, HEADS, 512),
                                               .lse = ARRAY(lse, fp32, 1, HEADS),
                                               .workspace = ARRAY(workspace, u8, bytes),
                                               .softmax_scale = scale};
    check(smla_sparse_attention(&attend, &error), &error);
    free(workspace);
    printf("out[0][0] = %.4f, lse[0] = %.4f\n", from_bf16(out[0][0]), lse[0]);

    /* Compare with the formula over the rows of both caches, one behind the other. */
    int32_t seen[WINDOW + TOPK];
    memcpy(seen, recent, sizeof recent);
    for (int i = 0; i < TOPK; i++) {
        seen[WINDOW + i] = PAGES * BLOCK + chosen[i];
    }
    read_keys(window, PAGES, keys);
    read_keys(groups, GROUP_PAGES, keys + PAGES * BLOCK);
    int wrong = 0;
    for (int h = 0; h < HEADS; h++) {
        wrong += count_wrong(out[h], q[h], keys[0], 512, seen, WINDOW + TOPK, scale, exp(sinks[h]),
                             1.0 / 256);
    }
    return verdict(wrong);
}
