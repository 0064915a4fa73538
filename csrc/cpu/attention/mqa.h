/* mqa.h: what the files of attention over latents share. One file cuts calls (mqa.c); one kernel
 * (mqa_kernel.c) is compiled once per instruction set into a smla_mqa_isa.
 *
 * A *part* is one split of one token: the keys of the split's column range. Running it leaves a
 * *state*; the states of a token are folded in the order of their splits, and finished into out,
 * lse and max_logits. A token with one key or none has no states (mqa_one_key.c).
 */
#pragma once

#include "cpu/attention/attention.h"

enum {
    SMLA_HEAD_ALIGN = 16, /* states and scratch have a multiple of this many heads: whole vectors */
    SMLA_FOLD_HEADS = 32, /* heads per fold task: whole groups of heads of every kernel */
    SMLA_WORKSPACE_ALIGN = 64,
};

/* The state of softmax after some keys, before the division:
 *   out[d][h] = sum_j 2^(s_jh - ref_h) * v_jd,  sum[h] = sum_j 2^(s_jh - ref_h)
 * with s in the log2 domain and ref_h the log2 of a power-of-two reference, which depends on
 * max_log2[h] only. Only the kernel knows the layout of out. */
typedef struct smla_mqa_state {
    double *sum;     /* [padded heads] */
    float *max_log2; /* [padded heads] */
    float *out;      /* [512][padded heads], in groups of heads */
} smla_mqa_state;

static inline int64_t
smla_pad_heads(int64_t num_heads)
{
    return (num_heads + SMLA_HEAD_ALIGN - 1) / SMLA_HEAD_ALIGN * SMLA_HEAD_ALIGN;
}

static inline int64_t
smla_mqa_state_bytes(int64_t num_heads)
{
    const int64_t bytes_per_head = sizeof(double) + sizeof(float) * (1 + SMLA_KV_LORA_RANK);
    return smla_pad_heads(num_heads) * bytes_per_head;
}

static inline smla_mqa_state
smla_mqa_state_at(uint8_t *memory, int64_t num_heads)
{
    const int64_t heads = smla_pad_heads(num_heads);
    double *const sum = (double *)memory;
    float *const max_log2 = (float *)(sum + heads);
    return (smla_mqa_state){.sum = sum, .max_log2 = max_log2, .out = max_log2 + heads};
}

/* The heads of a fold task: `begin` is a multiple of SMLA_FOLD_HEADS. */
typedef struct smla_head_range {
    int64_t begin;
    int64_t end;
} smla_head_range;

/* The kernel of one instruction set. */
typedef struct smla_mqa_isa {
    /* Bytes for a block of keys, and for each padded head's query. A state lies in front. */
    smla_attention_scratch scratch;
    /* Computes one part with subnormal numbers kept. What `state` contains before does not
     * matter. Units of bf16 do not keep them. */
    void (*run_part_exactly)(const smla_attention_params *params, int64_t token, int split,
                             uint8_t *scratch, smla_mqa_state state);
    /* Computes one part, on the fp32 unit's run_part_exactly if it has to. */
    void (*run_part)(const smla_attention_params *params, int64_t token, int split,
                     uint8_t *scratch, smla_mqa_state state);
    /* total += part. */
    void (*fold)(smla_head_range heads, smla_mqa_state total, smla_mqa_state part);
    /* Writes the token's rows of the outputs. Overwrites the state. */
    void (*finish)(const smla_attention_params *params, int64_t token, smla_head_range heads,
                   smla_mqa_state state);
} smla_mqa_isa;

/* ---- Tokens with one key or none (mqa_one_key.c) ------------------------------------------- */

typedef struct smla_only_key {
    smla_kv_token token;
    const smla_kv_format_info *format;
    float kv_scale; /* the scale of the whole cache */
} smla_only_key;

/* Counts the keys of a part up to 2, and finds the first. A duplicate is a second key. The search
 * ends at the second key, which is usually in column 1. */
int smla_find_keys(const smla_attention_params *params, int64_t token, int split,
                   smla_only_key *first);

/* Whether a part has columns, without a look at what they name. */
bool smla_has_columns(const smla_attention_params *params, int64_t token, int split);

/* Writes all results of some heads of a token with one key. */
void smla_attend_one_key(const smla_attention_params *params, int64_t token, smla_head_range heads,
                         const smla_only_key *only);

/* The same for a token without keys. */
void smla_attend_no_key(const smla_attention_params *params, int64_t token, smla_head_range heads);

/* ---- Calls (mqa.c) ------------------------------------------------------------------------- */

smla_status smla_attend_mqa(const smla_attention_params *given, const struct smla_cpu_isa *isa,
                            smla_error *error);
