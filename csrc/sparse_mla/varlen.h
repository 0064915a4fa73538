/* varlen.h: attention of query tokens to the keys and values of their request, which have heads of
 * their own: contiguous arrays, the way to prefill, or pages of a cache. The conventions are in
 * sparse_mla.h. */
#ifndef SPARSE_MLA_VARLEN_H
#define SPARSE_MLA_VARLEN_H

#include "sparse_mla/attention.h"

#ifdef __cplusplus
extern "C" {
#endif

/* out = softmax(logits) v of B requests, which follow each other in all arrays. Request b has the
 * query tokens cu_seqlens_q[b]...cu_seqlens_q[b + 1] - 1 and the keys cu_seqlens_k[b]... likewise;
 * both may be none. Query head h reads KV head h / (H / Hk). The logit of a key is softmax_scale *
 * q_descale * k_descale * (q . k); masks, softcap and sink are those of smla_mla_attention_args. A
 * token that sees no key has out 0 and lse -inf. Rows of no request are not read, and written only
 * where fills_padding asks for it.
 *
 * A query or a key may be two arrays, whose values are those of one row of D = Pn + R. k_pe is
 * shared by all heads. D is at most 576, Dv at most 512, and Pn, R, D and Dv are multiples of 8.
 *
 * Each row is summed in one order, which depends on its request's keys alone: no number of splits
 * changes it, and no scratch memory is needed. Calls on several streams need workspaces of their
 * own. */
typedef struct smla_varlen_attention_args {
    size_t struct_size;
    const DLTensor *q;            /* [Tq, H, D] bf16 | fp16 | e4m3; [Tq, H, Pn] with q_pe */
    const DLTensor *q_pe;         /* [Tq, H, R], the dtype of q; optional */
    const DLTensor *k;            /* [Tk, Hk, D], the dtype of q | e4m3, with an e4m3 query any of
                                   * the three; [Tk, Hk, Pn] with k_pe */
    const DLTensor *k_pe;         /* [Tk, R], the dtype of k; optional */
    const DLTensor *v;            /* [Tk, Hk, Dv], the dtype of k */
    const DLTensor *cu_seqlens_q; /* [B + 1] int32 */
    const DLTensor *cu_seqlens_k; /* [B + 1] int32 */
    const DLTensor *attn_sink;    /* [>= H] fp32, optional: out *= 1 / (1 + exp(sink - lse)) */
    const DLTensor *out;          /* out [Tq, H, Dv], the dtype of q | fp32; bf16 | fp32 for e4m3 */
    const DLTensor *lse;          /* out [Tq, H] fp32, natural log */
    const DLTensor *workspace;    /* [any] uint8, optional: of 16 bytes or more on a GPU, aligned to
                                   * 8, long calls are faster; changes no result */
    smla_scale_arg q_descale;     /* an e4m3 query only: a number, one fp32, or [n, Hk] fp32, where
                                   * n divides B and B / n requests share a row */
    smla_scale_arg k_descale;     /* e4m3 keys only, likewise */
    smla_scale_arg v_descale;     /* e4m3 values only, likewise */
    double softmax_scale;
    double softcap;          /* 0: none */
    int64_t window_left;     /* -1 = open; read where has_window is set */
    int64_t window_right;    /* the same; 0 with is_causal */
    int64_t attention_chunk; /* 0: none */
    int64_t max_seqlen_q;    /* hints, which change no result; 0: none */
    int64_t max_seqlen_k;
    int32_t has_window;
    int32_t is_causal;
    int32_t num_splits; /* 0...64; changes no result */
    void *stream;
    int32_t fills_padding; /* as in smla_mla_attention_args */
} smla_varlen_attention_args;

SMLA_API smla_status smla_varlen_attention(const smla_varlen_attention_args *args,
                                           smla_error *error);

/* The same of keys and values that lie in pages, to decode or to extend: GQA, MQA and MHA models,
 * and MLA with qv. Request b has n_k = cache_seqlens[b] - cache_leftpad[b] keys, those of this step
 * among them. Key j is at position x = cache_leftpad[b] + j: in the page block_table[b, x / ps] at
 * x % ps, or in the slot slot_table[b, x]. An entry that is negative, past the cache or past the
 * table's last column hides its key, and a page without a visible key is not read. No result
 * depends on the size of pages, nor on which of the two tables there is. Ranks of context
 * parallelism are those of smla_mla_attention_args.
 *
 * With qv, the absorbed form of MLA, the logit of a key is that of q . k + qv . v, where k is the
 * key's RoPE part and v its latent; qv has q's descale, and D + Dv is at most 576. */
typedef struct smla_paged_attention_args {
    size_t struct_size;
    const DLTensor *q;             /* [T, H, D] bf16 | fp16 | e4m3 */
    const DLTensor *qv;            /* [T, H, Dv], the dtype of q; optional */
    const DLTensor *k_cache;       /* [P, ps, Hk, D], the dtype of q | e4m3, with an e4m3 query any
                                    * of the three */
    const DLTensor *v_cache;       /* [P, ps, Hk, Dv], the dtype of k_cache */
    const DLTensor *block_table;   /* [>= B, W] int32 pages; or slot_table in its place */
    const DLTensor *cache_seqlens; /* [B] int32; a negative one counts as 0 */
    const DLTensor *cu_seqlens_q;  /* [B + 1] int32, optional; NULL: a token per request */
    const DLTensor *slot_table;    /* [>= B, W] int32 slots, optional */
    const DLTensor *cache_leftpad; /* [B] int32, optional; not beside cp_size */
    const DLTensor *attn_sink;     /* [>= H] fp32, optional: out *= 1 / (1 + exp(sink - lse)) */
    const DLTensor *out;           /* out [T, H, Dv], the dtype of q | fp32; bf16 | fp32 for e4m3 */
    const DLTensor *lse;           /* out [T, H] fp32, natural log */
    const DLTensor *workspace;     /* [any] uint8, optional: with attention_workspace_size bytes and
                                    * num_splits 0, a GPU's kernels split keys where this pays */
    smla_scale_arg q_descale;      /* an e4m3 query only, as in smla_varlen_attention_args */
    smla_scale_arg k_descale;      /* e4m3 keys only, likewise */
    smla_scale_arg v_descale;      /* e4m3 values only, likewise */
    double softmax_scale;
    double softcap;          /* 0: none */
    int64_t window_left;     /* -1 = open; read where has_window is set */
    int64_t window_right;    /* the same; 0 with is_causal */
    int64_t attention_chunk; /* 0: none */
    int64_t cp_rank;
    int64_t cp_size; /* 0: no context parallelism */
    int64_t cp_interleave;
    int64_t max_seqlen_q; /* hints, which change no result; 0: none */
    int64_t max_seqlen_k;
    int32_t has_window;
    int32_t is_causal;
    int32_t num_splits; /* 1...64: parts of each request's keys; 0: the plan chooses */
    void *stream;
    int32_t fills_padding; /* as in smla_mla_attention_args */
} smla_paged_attention_args;

SMLA_API smla_status smla_paged_attention(const smla_paged_attention_args *args, smla_error *error);

#ifdef __cplusplus
}
#endif

#endif /* SPARSE_MLA_VARLEN_H */
