/* attention.h: attention over the rows that a list of slots names, the merge of two results,
 * and which kernels there are. The conventions are in sparse_mla.h. */
#ifndef SPARSE_MLA_ATTENTION_H
#define SPARSE_MLA_ATTENTION_H

#include "sparse_mla/cache.h"

#ifdef __cplusplus
extern "C" {
#endif

/* out = softmax(softmax_scale * q k^T) v over the cache rows that `indices` names, where v is the
 * first 512 values of k. A duplicate counts twice. A row without keys has out 0 and lse -inf. Keys
 * that `indices` does not name are not read.
 *
 * `kv_cache` is of any format but those of the indexer and fp4_v41, which can only be
 * `extra_kv_cache`. Both caches have keys of as many values, D. What belongs to `extra_kv_cache` is
 * an error without it. */
typedef struct smla_sparse_attention_args {
    size_t struct_size;
    const DLTensor *q;                 /* [T, H, D] bf16, [T, H, 512] with q_pe; e4m3 if D is 512 */
    const DLTensor *q_pe;              /* [T, H, 64] bf16, optional */
    const DLTensor *kv_cache;          /* cache [pages, block_size, row], or flat [S, row] */
    const DLTensor *indices;           /* [T, K] int32 slots; negative or out of range = none */
    const DLTensor *topk_length;       /* [T] int32, optional: columns in use, clamped to [0, K] */
    const DLTensor *attn_sink;         /* [>= H] fp32, optional: out *= 1 / (1 + exp(sink - lse)) */
    const DLTensor *extra_kv_cache;    /* a second cache in the same softmax, optional */
    const DLTensor *extra_indices;     /* [T, K'] int32, with extra_kv_cache */
    const DLTensor *extra_topk_length; /* [T] int32, optional */
    const DLTensor *out;               /* out [T, >= H, 512] bf16; further heads stay as they are */
    const DLTensor *lse;               /* out [T, H] fp32: natural log of the softmax sum */
    const DLTensor *max_logits;        /* out [T, H] fp32, optional: the largest scaled logit */
    const DLTensor *workspace;         /* [size below] uint8, not shared with concurrent calls */
    double softmax_scale; /* times q_scale: 0 or normal in fp32; with kv_scale, too: <= 2.35e38 */
    int32_t num_splits;   /* 0 = the plan chooses; 1...64 fix the order of all sums */
    int32_t kv_format;
    int32_t extra_kv_format;
    int32_t lse_empty_is_plus_inf; /* 1: lse of a row without keys is +inf, as in FlashMLA */
    void *stream;
    smla_scale_arg q_scale;        /* an e4m3 query only: it multiplies logits */
    smla_scale_arg kv_scale;       /* fp8_e4m3 only */
    smla_scale_arg extra_kv_scale; /* fp8_e4m3 only */
    int64_t block_size;            /* tokens per page of a kv_cache [pages, page bytes], else 0 */
    int64_t extra_block_size;
} smla_sparse_attention_args;

SMLA_API smla_status smla_sparse_attention(const smla_sparse_attention_args *args,
                                           smla_error *error);

/* sparse_attention of a DeepSeek V4 layer, with one table of indices for both caches: the first
 * `window` columns are slots of swa_kv_cache, the others of compressed_kv_cache. A length counts
 * both parts. Caches are bfloat16, fp8_v4 or fp8_e4m3. The workspace is that of attention, whose
 * lists have window and K' columns. */
typedef struct smla_sparse_mla_dsv4_args {
    size_t struct_size;
    const DLTensor *query;            /* [T, H, 512] bf16 | e4m3 */
    const DLTensor *swa_kv_cache;     /* [pages, block_size, row] */
    const DLTensor *workspace_buffer; /* [attention_workspace_size] uint8, with any contents */
    const DLTensor *sparse_indices;   /* [T, window + K'] int32; negative or past the end = none */
    const DLTensor *compressed_kv_cache; /* as swa_kv_cache; where K' is 0, it may be the same */
    const DLTensor *sparse_topk_lens;    /* [T] int32: columns in use */
    const DLTensor *seq_lens;            /* [R] int32, optional, not read */
    smla_scale_arg bmm1_scale;           /* softmax_scale * q_scale * kv_scale; required; divided
                                          * by bmm2_scale, it must be normal in fp32; both are at
                                          * most 2.35e38 */
    smla_scale_arg bmm2_scale;           /* kv_scale; fp8_e4m3 only */
    const DLTensor *sinks;               /* [>= H] fp32, optional */
    int64_t window;
    const DLTensor *cum_seq_lens_q; /* [R + 1] int32, optional, not read */
    int64_t max_q_len;              /* not read */
    const DLTensor *out;            /* out [T, >= H, 512] bf16 */
    void *stream;
} smla_sparse_mla_dsv4_args;

SMLA_API smla_status smla_sparse_mla_dsv4(const smla_sparse_mla_dsv4_args *args, smla_error *error);

/* Results of which a call fills the rows that belong to no request, as it must where it made the
 * results for its caller: out with 0, lse with the value of a token without keys. */
enum { SMLA_FILLS_OUT = 1, SMLA_FILLS_LSE = 2 };

/* Attention of a request's tokens to the keys of its paged cache, without a list of keys: decode,
 * extend and absorbed prefill. Of n_q query tokens and n_k keys of a request, query i is at
 * position p = n_k - n_q + i, and sees key j where all that apply hold: j <= p (causal);
 * p - window_left <= j <= p + window_right; j / attention_chunk == p / attention_chunk. A softcap
 * c > 0 makes logits c * tanh(logit / c). A cache row is the key, and its first 512 values are v.
 * A token that sees no key has out 0 and lse -inf.
 *
 * Key j is in the page block_table[b, j / page size], or in the slot slot_table[b, j]. An entry
 * that is negative, past the cache or past the table's last column hides its key. With cp_size
 * ranks of context parallelism, tables have the rank's own keys only, and lengths and masks count
 * all. */
typedef struct smla_mla_attention_args {
    size_t struct_size;
    const DLTensor *q;             /* [T, H, D] | [B, n, H, D] bf16; D is 512 with q_pe; e4m3
                                    * if keys have 512 values */
    const DLTensor *q_pe;          /* [T, H, 64] | [B, n, H, 64] bf16, optional */
    const DLTensor *kv_cache;      /* [pages, block_size, row] */
    const DLTensor *block_table;   /* [>= B, W] int32 pages; or slot_table in its place */
    const DLTensor *cache_seqlens; /* [B] int32: n_k, with the keys of this step */
    const DLTensor *cu_seqlens_q; /* [B + 1] int32, optional: the first query token of each request.
                                    * NULL: a query [B, H, D] has one per request, a query
                                    * [B, n, H, D] n. Rows of tokens from the last number on
                                    * stay as they are, but see fills_padding */
    const DLTensor *slot_table;   /* [>= B, W] int32 slots, optional */
    const DLTensor *attn_sink;    /* [>= H] fp32, optional: out *= 1 / (1 + exp(sink - lse)) */
    const DLTensor *out;          /* out [T, >= H, 512] | [B, n, >= H, 512] bf16 */
    const DLTensor *lse;          /* out [T, H] | [B, n, H] fp32, natural log */
    const DLTensor *workspace;    /* [size below] uint8, not shared with concurrent calls */
    smla_scale_arg q_scale;       /* an e4m3 query only: it multiplies logits */
    smla_scale_arg kv_scale;      /* fp8_e4m3 only */
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
    int32_t num_splits; /* 0 = the plan chooses; 1...64 cut each request's keys into so many */
    int32_t kv_format;
    int32_t lse_empty_is_plus_inf; /* as in smla_sparse_attention_args */
    void *stream;
    int32_t fills_padding; /* SMLA_FILLS_OUT, SMLA_FILLS_LSE, both or 0: see there */
} smla_mla_attention_args;

SMLA_API smla_status smla_mla_attention(const smla_mla_attention_args *args, smla_error *error);

/* The bytes of workspace that smla_sparse_attention needs, and smla_mla_attention and
 * smla_paged_attention, where K is the longest n_k. They never fall if T, H, K or head_dim_v
 * grows. With num_keys they have room for so many rows of a cache, where prefills on FP8 rows of
 * this shape are faster when they widen the rows first. Calls without that room read the cache. */
typedef struct smla_attention_workspace_args {
    size_t struct_size;
    int64_t num_tokens;
    int64_t num_heads;
    int64_t topk;
    int64_t extra_topk; /* 0 without extra_indices */
    int32_t num_splits; /* as in the call of attention */
    DLDevice device;
    int64_t head_dim_v; /* Dv of smla_paged_attention; 0: 512, which all others have */
    int64_t num_keys;   /* rows of the cache, pages times tokens per page; 0: none is widened */
} smla_attention_workspace_args;

SMLA_API smla_status smla_attention_workspace_size(const smla_attention_workspace_args *args,
                                                   int64_t *bytes, smla_error *error);

/* Merges two partial results over disjoint keys by softmax weight. An lse +inf counts as -inf. The
 * parts have been computed without the sink, which is no part of lse either. out may be out_a or
 * out_b, lse may be lse_a or lse_b: the whole of it. */
typedef struct smla_merge_attn_states_args {
    size_t struct_size;
    const DLTensor *out_a; /* [T, H, V] bf16 | fp16 | fp32 */
    const DLTensor *lse_a; /* [T, H] fp32, natural log */
    const DLTensor *out_b; /* the shape and dtype of out_a */
    const DLTensor *lse_b; /* [T, H] fp32, natural log */
    const DLTensor *out;   /* out, the shape and dtype of out_a */
    const DLTensor *lse;   /* out [T, H] fp32 */
    void *stream;
    const DLTensor *attn_sink; /* [>= H] fp32, optional: out *= 1 / (1 + exp(sink - lse)) */
    /* The last so many tokens have no part a, a prefill's context: their rows are out_b and lse_b,
     * whatever out_a and lse_a hold. */
    int64_t tokens_without_context;
} smla_merge_attn_states_args;

SMLA_API smla_status smla_merge_attn_states(const smla_merge_attn_states_args *args,
                                            smla_error *error);

/* As many arrays as parts: slices of one array, which has a dimension more, or a list of arrays. */
typedef struct smla_parts_arg {
    const DLTensor *stacked;     /* [N, ...]; NULL: the list */
    const DLTensor *const *list; /* `count` arrays of any strides */
    int64_t count;
} smla_parts_arg;

/* Merges 1...64 partial results over disjoint keys in one pass, always in the order of the parts. A
 * part with an lse of -inf or +inf has no say, whatever its row holds. If all are such, the row is
 * that of part 0, and lse is -inf. Two parts give the bits of merge_attn_states.
 *
 * The GPU of `out` merges. Arrays of a list may be on other GPUs if it can read their memory, which
 * is mapped there or has peer access. What wrote that memory must be done. */
typedef struct smla_merge_attn_partials_args {
    size_t struct_size;
    smla_parts_arg outs;       /* N of [T, H, V] bf16 | fp16 | fp32 */
    smla_parts_arg lses;       /* N of [T, H] fp32, natural log */
    const DLTensor *attn_sink; /* [>= H] fp32, optional: out *= 1 / (1 + exp(sink - lse)) */
    const DLTensor *out;       /* out [T, H, V], the dtype of outs, or bf16 or fp16 of fp32 outs */
    const DLTensor *lse;       /* out [T, H] fp32 */
    void *stream;
} smla_merge_attn_partials_args;

SMLA_API smla_status smla_merge_attn_partials(const smla_merge_attn_partials_args *args,
                                              smla_error *error);

/* One entry of the dispatch table: which kernel serves which arguments. */
typedef struct smla_kernel_info {
    const char *device;    /* "cpu" or "cuda" */
    const char *arch;      /* instruction set or compute capability that the kernel needs */
    const char *kv_format; /* "fp8_ds_mla, bfloat16" */
    const char *heads;     /* "1...128" */
    const char *name;      /* source file; mqa_avx2.c is mqa_kernel.c for AVX2 */
    int available;         /* 1 when this machine can run it */
    int selected;          /* 1 when attention calls take it */
} smla_kernel_info;

/* Fills at most `capacity` entries of `rows`, and returns how many the table has. */
SMLA_API int64_t smla_kernels(smla_kernel_info *rows, int64_t capacity);

#ifdef __cplusplus
}
#endif

#endif /* SPARSE_MLA_ATTENTION_H */
