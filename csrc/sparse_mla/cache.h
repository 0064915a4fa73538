/* cache.h: formats of cache rows, and calls that write tokens into a paged cache or gather them.
 * The conventions are in sparse_mla.h. */
#ifndef SPARSE_MLA_CACHE_H
#define SPARSE_MLA_CACHE_H

#include "sparse_mla/status.h"

#ifdef __cplusplus
extern "C" {
#endif

/* How one token is stored. SMLA_KV_INFER: the cache's dtype and last dimension decide. */
typedef enum smla_kv_format {
    SMLA_KV_INFER = 0,
    SMLA_KV_BFLOAT16 = 1,    /* 576 bf16, 1152 bytes; without RoPE 512 bf16, 1024 bytes */
    SMLA_KV_FP8_DS_MLA = 2,  /* 512 e4m3, 4 fp32 scales, 64 bf16, 656 bytes */
    SMLA_KV_FP8_V4 = 3,      /* 448 e4m3, 64 bf16, 7 UE8M0 scales and a 0, 584 bytes, split pages */
    SMLA_KV_FP8_E4M3 = 4,    /* 576 e4m3, 576 bytes, without RoPE 512; one kv_scale for the cache */
    SMLA_KV_FP8_INDEX = 5,   /* 128 e4m3, 1 fp32 scale, 132 bytes, split pages */
    SMLA_KV_MXFP4_INDEX = 6, /* 128 e2m1, 4 UE8M0 scales, 68 bytes, split pages */
    SMLA_KV_FP8_V41 = 7,     /* 512 e4m3, 16 UE8M0 scales, 528 bytes */
    SMLA_KV_FP8_V41_SPLIT = 8,  /* the same in split pages */
    SMLA_KV_FP4_V41 = 9,        /* 512 e2m1, 32 e4m3 scales, 288 bytes */
    SMLA_KV_FP4_V41_SPLIT = 10, /* the same in split pages */
    SMLA_KV_FP8_NOPE = 11,      /* 512 e4m3, 4 fp32 scales, 528 bytes */
    SMLA_KV_FP8_TOKEN = 12,     /* FP8_DS_MLA with one scale for the token, written 4 times */
} smla_kv_format;

/* A scale: one fp32 on the device, or else a number, which is 1 if it is left out. */
typedef struct smla_scale_arg {
    const DLTensor *tensor;
    double value;
} smla_scale_arg;

/* Writes one token per entry of slot_mapping. Negative slots are skipped. A slot past the end is an
 * error on the CPU, and is skipped on CUDA. Formats are bfloat16 and fp8_e4m3 of 576 or 512 values,
 * fp8_ds_mla, fp8_token and fp8_nope. FP8 rows of 512 values have the bytes of
 * quantize_and_insert_k_cache. */
typedef struct smla_concat_and_cache_mla_args {
    size_t struct_size;
    const DLTensor *kv_c;         /* [>= T, 512] bf16 | fp16 | fp32 */
    const DLTensor *k_pe;         /* [>= T, 64], the dtype of kv_c; [>= T, 0] or NULL for keys of
                                   * 512 values */
    const DLTensor *kv_cache;     /* out: a cache; slot = page * block_size + row number */
    const DLTensor *slot_mapping; /* [T] int64 | int32 */
    int32_t kv_format;            /* smla_kv_format */
    void *stream;
    smla_scale_arg kv_scale; /* fp8_e4m3 only */
} smla_concat_and_cache_mla_args;

SMLA_API smla_status smla_concat_and_cache_mla(const smla_concat_and_cache_mla_args *args,
                                               smla_error *error);

/* Upconvert-gather: out[workspace_starts[r] + p] = bf16(row of position p + seq_starts[r]) for
 * p < seq_lens[r]. A bad page or a row past out fails on the CPU; CUDA writes zeros or skips it. */
typedef struct smla_gather_kv_cache_args {
    size_t struct_size;
    const DLTensor *kv_cache;         /* [pages, block_size, row] */
    const DLTensor *block_table;      /* [R, W] int32 */
    const DLTensor *seq_lens;         /* [R] int32 */
    const DLTensor *workspace_starts; /* [R] int32 */
    const DLTensor *seq_starts;       /* [R] int32, optional: 0 when absent */
    const DLTensor *out;              /* out [>= sum of seq_lens, D] bf16 */
    int32_t kv_format;
    void *stream;
    smla_scale_arg kv_scale; /* fp8_e4m3 only */
    int64_t block_size;      /* a cache [pages, page bytes] needs it; else 0 or the cache's */
} smla_gather_kv_cache_args;

SMLA_API smla_status smla_gather_kv_cache(const smla_gather_kv_cache_args *args, smla_error *error);

/* Writes every value of a cache as fp32 or bf16, rounded once: for inspection. */
typedef struct smla_dequantize_kv_cache_args {
    size_t struct_size;
    const DLTensor *kv_cache; /* [pages, block_size, row] */
    const DLTensor *out;      /* out [pages, block_size, D], or [S, D] if flat; fp32 | bf16 */
    int32_t kv_format;
    void *stream;
    smla_scale_arg kv_scale; /* fp8_e4m3 only */
    int64_t block_size;      /* a cache [pages, page bytes] needs it; else 0 or the cache's */
} smla_dequantize_kv_cache_args;

SMLA_API smla_status smla_dequantize_kv_cache(const smla_dequantize_kv_cache_args *args,
                                              smla_error *error);

/* Writes rows of 512 values, after norm and RoPE, in any format but fp8_ds_mla and those of the
 * indexer. Slots are as in concat_and_cache_mla. */
typedef struct smla_insert_k_cache_args {
    size_t struct_size;
    const DLTensor *k;            /* [>= T, 512] bf16 | fp16 | fp32, rounded to bf16 */
    const DLTensor *k_cache;      /* out: a cache of keys of 512 values */
    const DLTensor *slot_mapping; /* [T] int64 | int32 */
    smla_scale_arg kv_scale;      /* fp8_e4m3 only */
    int32_t kv_format;
    int64_t block_size; /* a cache [pages, page bytes] needs it; else 0 or the cache's */
    void *stream;
} smla_insert_k_cache_args;

SMLA_API smla_status smla_quantize_and_insert_k_cache(const smla_insert_k_cache_args *args,
                                                      smla_error *error);

/* Writes the indexer's keys of 128 values, as fp8_index or mxfp4_index. */
typedef struct smla_indexer_k_cache_args {
    size_t struct_size;
    const DLTensor *k;            /* [>= T, 128] bf16 | fp16 | fp32, rounded to bf16 */
    const DLTensor *k_cache;      /* out: a cache of keys of 128 values */
    const DLTensor *slot_mapping; /* [T] int64 | int32 */
    int32_t kv_format;
    int64_t block_size; /* a cache [pages, page bytes] needs it; else 0 or the cache's */
    void *stream;
} smla_indexer_k_cache_args;

SMLA_API smla_status smla_indexer_k_quant_and_cache(const smla_indexer_k_cache_args *args,
                                                    smla_error *error);

/* out[r, offset + i] = bf16(row of position seq_lens[r] - g + i of request r) for i < g =
 * gather_lens[r]. A bad page or a row past M fails on the CPU; CUDA writes zeros or skips it. */
typedef struct smla_gather_k_cache_args {
    size_t struct_size;
    const DLTensor *out;         /* out [R, M, D] bf16 */
    const DLTensor *k_cache;     /* [pages, block_size, row] */
    const DLTensor *seq_lens;    /* [R] int32 */
    const DLTensor *gather_lens; /* [R] int32, optional: seq_lens when absent */
    const DLTensor *block_table; /* [R, W] int32 */
    int64_t block_size;
    int64_t offset;
    smla_scale_arg kv_scale; /* fp8_e4m3 only */
    int32_t kv_format;
    void *stream;
} smla_gather_k_cache_args;

SMLA_API smla_status smla_dequantize_and_gather_k_cache(const smla_gather_k_cache_args *args,
                                                        smla_error *error);

/* Writes the keys and values of a token to each slot of slot_mapping, in the pages that
 * paged_attention reads: Hk KV heads, keys of D and values of Dv values. A cache of e4m3 gets
 * e4m3(x / scale), true division in fp32, saturating; another one has the dtype of k and gets
 * copies. Both caches may be views of one buffer: side by side in a row, or pages in turn. Slots
 * are as in concat_and_cache_mla. */
typedef struct smla_reshape_and_cache_args {
    size_t struct_size;
    const DLTensor *k;            /* [>= T, Hk, D] bf16 | fp16 | fp32 */
    const DLTensor *v;            /* [>= T, Hk, Dv], the dtype of k */
    const DLTensor *k_cache;      /* out [P, ps, Hk, D], the dtype of k | e4m3 (or uint8) */
    const DLTensor *v_cache;      /* out [P, ps, Hk, Dv], the dtype of k_cache */
    const DLTensor *slot_mapping; /* [T] int64 | int32; slot = page * ps + row number */
    smla_scale_arg k_scale;       /* e4m3 only; its array may have a scale per KV head: [Hk] */
    smla_scale_arg v_scale;       /* likewise */
    void *stream;
} smla_reshape_and_cache_args;

SMLA_API smla_status smla_reshape_and_cache(const smla_reshape_and_cache_args *args,
                                            smla_error *error);

/* Copies rows from a cache to another one of the same format, byte for byte: row i from slot
 * src_slots[i] of src to slot dst_slots[i] of dst. Rows with a negative slot in either list are
 * skipped; slots past the end are as in concat_and_cache_mla. Bytes of a slot that is written twice
 * are undefined. dst may be src, as a whole, if no row is both read and written.
 *
 * On CUDA, where the slots are, each cache is in memory of their device or in host memory that CUDA
 * has pinned, whatever device its DLTensor names; the device reads and writes it in place. */
typedef struct smla_transfer_kv_cache_args {
    size_t struct_size;
    const DLTensor *src;       /* a cache of any format */
    const DLTensor *dst;       /* out: a cache of the same format, with pages of any size */
    const DLTensor *src_slots; /* [N] int64 | int32; slot = page * block_size + row number */
    const DLTensor *dst_slots; /* [N] int64 | int32 */
    int32_t kv_format;
    int64_t block_size; /* caches [pages, page bytes] need it; else 0, or that of both */
    void *stream;
} smla_transfer_kv_cache_args;

SMLA_API smla_status smla_transfer_kv_cache(const smla_transfer_kv_cache_args *args,
                                            smla_error *error);

#ifdef __cplusplus
}
#endif

#endif /* SPARSE_MLA_CACHE_H */
