/* attention_calls.h: calls of sparse_attention on random inputs, compared with reference.h. */
#pragma once

#include "ops/dispatch.h"
#include "reference.h"
#include "testing.h"

typedef struct outputs {
    array *out, *lse, *max_logits;
} outputs;

static inline outputs
make_outputs(int64_t tokens, int64_t heads)
{
    return (outputs){.out = ARRAY(bf16, tokens, heads, NOPE),
                     .lse = ARRAY(fp32, tokens, heads),
                     .max_logits = ARRAY(fp32, tokens, heads)};
}

static inline const DLTensor *
optional(const array *a)
{
    return a == NULL ? NULL : &a->tensor;
}

/* Exactly what sparse_attention needs; smla_attention_workspace_size has room for mla_attention. */
static inline int64_t
workspace_bytes(const attention_inputs *in, int num_splits)
{
    const bool has_extra = in->lists[1].kv != NULL;
    const smla_attention_workspace_args args = {.struct_size = sizeof args,
                                                .num_tokens = in->q->shape[0],
                                                .num_heads = in->q->shape[1],
                                                .topk = in->lists[0].indices->shape[1],
                                                .extra_topk =
                                                    has_extra ? in->lists[1].indices->shape[1] : 0,
                                                .num_splits = num_splits,
                                                .device = cpu};
    int64_t bytes = -1;
    EXPECT_OK(smla_sparse_workspace_size(&args, &bytes, &error));
    int64_t of_any = -1;
    EXPECT_OK(smla_attention_workspace_size(&args, &of_any, &error));
    EXPECT(of_any >= bytes && (of_any > bytes) == (args.num_tokens > 0));
    return bytes;
}

static inline smla_sparse_attention_args
make_args(const attention_inputs *in, int num_splits, const outputs *o, const array *workspace)
{
    return (smla_sparse_attention_args){.struct_size = sizeof(smla_sparse_attention_args),
                                        .q = &in->q->tensor,
                                        .q_pe = optional(in->q_pe),
                                        .kv_cache = &in->lists[0].kv->tensor,
                                        .indices = &in->lists[0].indices->tensor,
                                        .topk_length = optional(in->lists[0].topk_length),
                                        .attn_sink = optional(in->attn_sink),
                                        .extra_kv_cache = optional(in->lists[1].kv),
                                        .extra_indices = optional(in->lists[1].indices),
                                        .extra_topk_length = optional(in->lists[1].topk_length),
                                        .out = &o->out->tensor,
                                        .lse = &o->lse->tensor,
                                        .max_logits = optional(o->max_logits),
                                        .workspace = optional(workspace),
                                        .softmax_scale = in->softmax_scale,
                                        .num_splits = num_splits};
}

/* The workspace has exactly the size asked for, so that a byte too many meets a red zone. */
static inline void
attend(const attention_inputs *in, int num_splits, const outputs *o)
{
    const array *workspace = ARRAY(uint8, workspace_bytes(in, num_splits));
    const smla_sparse_attention_args args = make_args(in, num_splits, o, workspace);
    EXPECT_OK(smla_sparse_attention(&args, &error));
}

static inline void
attend_and_compare(const attention_inputs *in, int num_splits)
{
    const outputs o = make_outputs(in->q->shape[0], in->q->shape[1]);
    attend(in, num_splits, &o);
    expect_attention(in, o.out, o.lse, o.max_logits);
}

/* Slots with duplicates; some are negative or past the end. */
static inline array *
random_slots(int64_t tokens, int64_t topk, int64_t slots)
{
    array *a = ARRAY(int32, tokens, topk);
    for (int64_t i = 0; i < tokens * topk; i++) {
        const int64_t kind = random_int(12);
        const int64_t slot =
            kind == 0 ? -1 - random_int(5) : (kind == 1 ? slots : random_int(slots));
        SET(a, (double)slot, i / topk, i % topk);
    }
    return a;
}

/* [pages, block, row] with a gap behind every page; flat when `pages` is 0. */
static inline array *
make_cache(DLDataType dtype, int64_t pages, int64_t block)
{
    const int64_t row = dtype.bits == 8 ? FP8_ROW : ROW;
    if (pages == 0) {
        return fill_cache(ARRAY(dtype, block, row));
    }
    return fill_cache(slice(ARRAY(dtype, pages, block + 1, row), 1, 0, block, 1));
}

static inline attention_inputs
make_inputs(DLDataType dtype, int64_t tokens, int64_t heads, int64_t topk)
{
    const array *kv = make_cache(dtype, 4, 11);
    return (attention_inputs){.q = fill_normal(ARRAY(bf16, tokens, heads, ROW), 1.0),
                              .lists = {{.kv = kv, .indices = random_slots(tokens, topk, 44)}},
                              .softmax_scale = 0.1};
}
