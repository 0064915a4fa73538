/* prefill.c: attention over flat bf16 rows, as a prefill does after the gather of cache.c.
 *
 * The context is twice as long as the workspace, so it is attended in two chunks. Each chunk gives
 * a partial result with its log-sum-exp, and smla_merge_attn_states makes one result of both.
 */
#include "common.h"

enum { TOKENS = 4, HEADS = 8, TOPK = 32, ROWS = 64, CHUNKS = 2, CONTEXT = CHUNKS * ROWS };

static uint16_t context[CONTEXT][576], q[TOKENS][HEADS][576];
static uint16_t part[CHUNKS][TOKENS][HEADS][512], out[TOKENS][HEADS][512];
static float part_lse[CHUNKS][TOKENS][HEADS], lse[TOKENS][HEADS], keys[CONTEXT][576];
static int32_t positions[TOKENS][TOPK], indices[TOKENS][TOPK];

int
main(void)
{
    smla_error error;
    const double scale = 1 / sqrt(192);
    fill_bf16(context, sizeof context);
    fill_bf16(q, sizeof q);
    for (int t = 0; t < TOKENS; t++) { /* the queries are the last tokens of the context */
        const int visible = CONTEXT - TOKENS + t + 1; /* a token sees itself and those before */
        for (int k = 0; k < TOPK; k++) {
            positions[t][k] = (k * 37 + t * 11) % visible;
        }
    }

    int64_t bytes;
    const smla_attention_workspace_args size = {.struct_size = sizeof size,
                                                .num_tokens = TOKENS,
                                                .num_heads = HEADS,
                                                .topk = TOPK,
                                                .device = {kDLCPU, 0}};
    check(smla_attention_workspace_size(&size, &bytes, &error), &error);
    void *const scratch = allocate(bytes);
    for (int c = 0; c < CHUNKS; c++) {
        for (int t = 0; t < TOKENS; t++) {
            for (int k = 0; k < TOPK; k++) { /* -1: this key is in the other chunk */
                const int is_here = positions[t][k] / ROWS == c;
                indices[t][k] = is_here ? positions[t][k] % ROWS : -1;
            }
        }
        const smla_sparse_attention_args attend = {.struct_size = sizeof attend,
                                                   .q = ARRAY(q, bf16, TOKENS, HEADS, 576),
                                                   .kv_cache =
                                                       ARRAY(context[c * ROWS], bf16, ROWS, 576),
                                                   .indices = ARRAY(indices, i32, TOKENS, TOPK),
                                                   .out = ARRAY(part[c], bf16, TOKENS, HEADS, 512),
                                                   .lse = ARRAY(part_lse[c], fp32, TOKENS, HEADS),
                                                   .workspace = ARRAY(scratch, u8, bytes),
                                                   .softmax_scale = scale};
        check(smla_sparse_attention(&attend, &error), &error);
        printf("chunk %d: lse[0][0] = %.4f\n", c, part_lse[c][0][0]);
    }
    free(scratch);

    const smla_merge_attn_states_args merge = {.struct_size = sizeof merge,
                                               .out_a = ARRAY(part[0], bf16, TOKENS, HEADS, 512),
                                               .lse_a = ARRAY(part_lse[0], fp32, TOKENS, HEADS),
                                               .out_b = ARRAY(part[1], bf16, TOKENS, HEADS, 512),
                                               .lse_b = ARRAY(part_lse[1], fp32, TOKENS, HEADS),
                                               .out = ARRAY(out, bf16, TOKENS, HEADS, 512),
                                               .lse = ARRAY(lse, fp32, TOKENS, HEADS)};
    check(smla_merge_attn_states(&merge, &error), &error);
    printf("merged:  lse[0][0] = %.4f\n", lse[0][0]);

    for (int p = 0; p < CONTEXT; p++) {
        for (int i = 0; i < 576; i++) {
            keys[p][i] = from_bf16(context[p][i]);
        }
    }
    /* Compare one head with the formula over the whole context. The two parts were rounded to bf16,
     * and so was the sum of them: twice the error of one call is allowed. */
    const int t = TOKENS - 1, h = HEADS - 1;
    return verdict(
        count_wrong(out[t][h], q[t][h], keys[0], 576, positions[t], TOPK, scale, 0, 1.0 / 128));
}
