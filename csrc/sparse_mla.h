/* sparse_mla.h: the public C API of sparse_mla, Multi-head Latent Attention over any array.
 *
 * This header includes all others that callers need. They are in sparse_mla/, and each can be
 * included alone. They need the C standard library and DLPack, nothing else. In the order of this
 * list they go from the simplest use to the rarest:
 *   status.h      every call returns a status and fills the caller's error
 *   cache.h       write tokens into a paged cache, gather them back
 *   index.h       positions -> slots
 *   attention.h   attention -> merge, and the kernels that serve them
 *   varlen.h      attention to contiguous keys and values: prefill in the form of MHA
 *   projection.h  kv_b_proj split, projections, per-tensor quantisation
 *   norm.h        norms around the attention of DeepSeek V4
 *   rope.h        RoPE of what attention returns
 *   compressor.h  groups of tokens become rows of DeepSeek V4's compressed caches
 *   topk.h        the choice of the best keys by their scores
 *   indexer.h     scores of keys, and scores and choice in one call
 *   step.h        the metadata builder and the forward pass of one layer
 *   v4_step.h     the same for DeepSeek V4
 *   dense_step.h  the same for dense MLA
 *   paged_step.h  the metadata builder for attention to pages of heads, in every forward mode
 *
 * Conventions
 *   - Arrays are `const DLTensor *`, all on one device; NULL means absent. The caller provides the
 *     outputs, which must not share a byte with other arrays unless an args struct says that they
 *     may be an input. Parts of one buffer may lie between each other: slices, splits and
 *     transposes of it are told apart exactly. Strides are honoured. The last dimension must be
 *     contiguous, except in arrays [T], [R] and [H], block tables, lse, max_logits, the weights and
 *     scales of split_kv_b_proj, absorb_q_proj and absorb_o_proj, o_scale, weight_scale, out_scale
 *     and the arrays of dynamic_per_tensor_quant.
 *   - An args struct begins with `struct_size`, which the caller sets to sizeof. Start from
 *     `{.struct_size = sizeof args}`: every field left out is zero, its default. A library older
 *     than its caller accepts a longer struct if the fields that it does not know are zero.
 *   - Every argument is checked before anything is written. No call exits. A call prints only if
 *     SPARSE_MLA_LOG=1 is in the environment: one line on stderr.
 *   - On CUDA a call enqueues its work on `stream`, a cudaStream_t. The CPU ignores `stream`.
 *   - Any thread may call. Calls share the CPU's threads, and on CUDA launch graphs per stream,
 *     a cuBLAS handle per device and a table of the latest plans.
 *
 * Shapes use T query tokens, H heads (1...128), K index columns, R requests, W block table columns,
 * D = 576 = 512 (kv_lora_rank) + 64 (qk_rope_head_dim), or D = 512 for rows without RoPE, whose
 * k_pe is [T, 0]. A cache is [pages, block_size, row], [pages, block_size, 1, row] or flat [S, row]
 * (docs/formats.md). A cache in split pages may also be [pages, page bytes], with `block_size` and
 * `kv_format`. Edge cases of an operator stand at its args struct.
 */
#ifndef SPARSE_MLA_H
#define SPARSE_MLA_H

#include "sparse_mla/attention.h"
#include "sparse_mla/cache.h"
#include "sparse_mla/compressor.h"
#include "sparse_mla/dense_step.h"
#include "sparse_mla/index.h"
#include "sparse_mla/indexer.h"
#include "sparse_mla/norm.h"
#include "sparse_mla/paged_step.h"
#include "sparse_mla/projection.h"
#include "sparse_mla/rope.h"
#include "sparse_mla/status.h"
#include "sparse_mla/step.h"
#include "sparse_mla/topk.h"
#include "sparse_mla/v4_step.h"
#include "sparse_mla/varlen.h"

#endif /* SPARSE_MLA_H */
