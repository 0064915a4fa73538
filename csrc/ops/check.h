/* check.h: Args -> Params, one function per operator. Defined in check.c and check_absorption.c. */
#ifndef SMLA_CHECK_H
#define SMLA_CHECK_H

#include "core/backend.h"
#include "core/rule.h"

/* Each checks every rule of its operator and fills `params` and the backend that will run it. */
smla_status smla_check_cache_write(const smla_concat_and_cache_mla_args *args,
                                   smla_cache_write_params *params, const smla_backend **backend,
                                   smla_error *error);
smla_status smla_check_gather(const smla_gather_kv_cache_args *args, smla_gather_params *params,
                              const smla_backend **backend, smla_error *error);
smla_status smla_check_dequantize(const smla_dequantize_kv_cache_args *args,
                                  smla_dequantize_params *params, const smla_backend **backend,
                                  smla_error *error);
smla_status smla_check_convert(const smla_convert_req_index_args *args, smla_convert_params *params,
                               const smla_backend **backend, smla_error *error);
smla_status smla_check_attention(const smla_sparse_attention_args *args,
                                 smla_attention_params *params, smla_attention_plan *plan,
                                 const smla_backend **backend, smla_error *error);
smla_status smla_check_attention_workspace(const smla_attention_workspace_args *args,
                                           smla_attention_shape *shape,
                                           const smla_backend **backend, smla_error *error);
smla_status smla_check_merge(const smla_merge_attn_states_args *args, smla_merge_params *params,
                             const smla_backend **backend, smla_error *error);
smla_status smla_check_split_weight(const smla_split_kv_b_proj_args *args,
                                    smla_split_weight_params *params, const smla_backend **backend,
                                    smla_error *error);
smla_status smla_check_k_up_proj(const smla_k_up_proj_args *args, smla_projection_params *params,
                                 const smla_backend **backend, smla_error *error);
smla_status smla_check_v_up_proj(const smla_v_up_proj_args *args, smla_projection_params *params,
                                 const smla_backend **backend, smla_error *error);
smla_status smla_check_quant(const smla_dynamic_per_tensor_quant_args *args,
                             smla_quant_params *params, const smla_backend **backend,
                             smla_error *error);

/* ---- Parts that several operators share ---------------------------------------------------- */

/* Of an array whose dtype has been checked. */
smla_float_type smla_float_type_of(const DLTensor *tensor);

/* The caller's stream on the device of the arrays. */
smla_stream smla_stream_of(const smla_checker *checker, void *handle);

smla_status smla_require_num_heads(const smla_checker *checker, const char *name,
                                   int64_t num_heads);

/* The last step: the backend of the arrays' device, and no output over another array. */
smla_status smla_finish_check(const smla_checker *checker, const smla_backend **backend);

/* q [T, H, 576], or the pair [T, H, 512] and [T, H, 64], as the cache's format has it: one rule for
 * attention and forward. */
smla_status smla_require_query(smla_checker *checker, const smla_kv_format_info *format,
                               const DLTensor *q, const DLTensor *q_pe, int64_t num_tokens,
                               int64_t num_heads, unsigned flags);

#endif /* SMLA_CHECK_H */
