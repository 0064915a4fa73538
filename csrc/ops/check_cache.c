/* check_cache.c: the argument rules of operators that write cache rows or read them back. */
#include "ops/check_cache.h"

#include "core/rule_parts.h"
#include "ops/check_attention.h"

smla_kv_set
smla_formats_of_size(int32_t head_dim)
{
    smla_kv_set formats = 0;
    for (int i = 0; i < SMLA_NUM_KV_FORMATS; i++) {
        formats |= smla_kv_formats[i].head_dim == head_dim ? SMLA_KV_SET(i) : 0;
    }
    return formats;
}

/* ---- Write --------------------------------------------------------------------------------- */

/* Checks that an array has a row per slot. */
static smla_status
require_rows(const smla_checker *c, const DLTensor *slot_mapping, const char *name,
             const DLTensor *rows)
{
    if (smla_size(slot_mapping, 0) > smla_size(rows, 0)) {
        return smla_refuse(
            c, "`%s` must have at least one row per entry of `slot_mapping` (%lld), got %lld", name,
            (long long)smla_size(slot_mapping, 0), (long long)smla_size(rows, 0));
    }
    return SMLA_OK;
}

smla_status
smla_require_slot_mapping(smla_checker *c, const DLTensor *slot_mapping)
{
    return smla_require_1d(c, "slot_mapping", slot_mapping, SMLA_DTYPE_INT64 | SMLA_DTYPE_INT32,
                           SMLA_ANY, SMLA_RULE_ANY_LAST_STRIDE, NULL);
}

/* Fills the rows of a write: two parts of an array's rows, or of two arrays'. */
static void
fill_rows(const DLTensor *kv_c, const void *k_pe, int64_t k_pe_stride_token,
          smla_cache_write_params *params)
{
    params->kv_c = smla_data(kv_c);
    params->kv_c_stride_token = smla_stride(kv_c, 0);
    params->k_pe = k_pe;
    params->k_pe_stride_token = k_pe_stride_token;
    params->input_type = smla_float_type_of(kv_c);
}

smla_status
smla_require_concat(smla_checker *c, const smla_concat_and_cache_mla_args *args,
                    smla_kv_set formats, unsigned dtypes, smla_cache_write_params *params)
{
    smla_kv_view kv;
    const smla_cache_rule cache = {.name = "kv_cache",
                                   .tensor = args->kv_cache,
                                   .kv_format = args->kv_format,
                                   .formats = formats,
                                   .flags = SMLA_RULE_OUTPUT};
    const smla_kv_format_info *format = NULL;
    SMLA_TRY(smla_find_format(c, &cache, &format));
    SMLA_TRY(smla_require_2d(c, "kv_c", args->kv_c, dtypes, SMLA_ANY, format->nope_dim, 0,
                             "tokens, and the values of their latents"));
    SMLA_TRY(smla_require(c, &(smla_rule){.name = "k_pe",
                                          .tensor = args->k_pe,
                                          .dtypes = smla_dtype(args->kv_c),
                                          .flags = SMLA_RULE_OPTIONAL, /* see below */
                                          .ndim = 2,
                                          .shape = {SMLA_ANY, format->rope_dim},
                                          .hint = "tokens, and the RoPE values of their keys"}));
    SMLA_TRY(smla_require_kv(c, &cache, &kv));
    SMLA_TRY(smla_require_slot_mapping(c, args->slot_mapping));
    SMLA_TRY(require_rows(c, args->slot_mapping, "kv_c", args->kv_c));
    if (args->k_pe != NULL) {
        SMLA_TRY(require_rows(c, args->slot_mapping, "k_pe", args->k_pe));
    } else if (kv.format->rope_dim > 0) {
        return smla_require_pointer(c->op, "k_pe", NULL, c->error);
    }
    const smla_call call = smla_call_of(c, args->stream, kv.format);
    smla_fill_cache_write(&call, cache.name, &kv, "slot_mapping", args->slot_mapping, params);
    fill_rows(args->kv_c, smla_data(args->k_pe), smla_stride(args->k_pe, 0), params);
    return smla_require_kv_scale(c, "kv_scale", &args->kv_scale, kv.format, &params->kv_scale);
}

smla_status
smla_check_concat_and_cache_mla(const smla_concat_and_cache_mla_args *args,
                                smla_cache_write_params *params, const smla_backend **backend,
                                smla_error *error)
{
    smla_checker c;
    smla_open_checker(&c, "concat_and_cache_mla", error);
    SMLA_TRY(smla_require_concat(&c, args, SMLA_KV_CONCAT, SMLA_DTYPE_FLOATS, params));
    return smla_finish_check(&c, backend);
}

/* Checks an operator that writes whole rows of `width` values. */
static smla_status
check_insert(const char *op, const smla_insert_k_cache_args *args, int32_t width,
             smla_cache_write_params *params, const smla_backend **backend, smla_error *error)
{
    smla_checker c;
    smla_kv_view kv;
    const smla_cache_rule cache =
        SMLA_CACHE_OF(args, k_cache, smla_formats_of_size(width), SMLA_RULE_OUTPUT);
    const smla_kv_format_info *format = NULL;
    smla_open_checker(&c, op, error);
    SMLA_TRY(smla_find_format(&c, &cache, &format));
    SMLA_TRY(smla_require_2d(&c, "k", args->k, SMLA_DTYPE_FLOATS, SMLA_ANY, width, 0,
                             "tokens, and the values of their keys"));
    SMLA_TRY(smla_require_kv(&c, &cache, &kv));
    SMLA_TRY(smla_require_slot_mapping(&c, args->slot_mapping));
    SMLA_TRY(require_rows(&c, args->slot_mapping, "k", args->k));
    const smla_call call = smla_call_of(&c, args->stream, kv.format);
    smla_fill_cache_write(&call, cache.name, &kv, "slot_mapping", args->slot_mapping, params);
    fill_rows(args->k, smla_data_at(args->k, kv.format->nope_dim * smla_element_bytes(args->k)),
              smla_stride(args->k, 0), params);
    SMLA_TRY(smla_require_kv_scale(&c, "kv_scale", &args->kv_scale, kv.format, &params->kv_scale));
    return smla_finish_check(&c, backend);
}

smla_status
smla_check_quantize_and_insert_k_cache(const smla_insert_k_cache_args *args,
                                       smla_cache_write_params *params,
                                       const smla_backend **backend, smla_error *error)
{
    return check_insert("quantize_and_insert_k_cache", args, SMLA_KV_LORA_RANK, params, backend,
                        error);
}

smla_status
smla_check_indexer_k_quant_and_cache(const smla_indexer_k_cache_args *args,
                                     smla_cache_write_params *params, const smla_backend **backend,
                                     smla_error *error)
{
    const smla_insert_k_cache_args insert = {.k = args->k,
                                             .k_cache = args->k_cache,
                                             .slot_mapping = args->slot_mapping,
                                             .kv_format = args->kv_format,
                                             .block_size = args->block_size,
                                             .stream = args->stream};
    return check_insert("indexer_k_quant_and_cache", &insert, SMLA_INDEX_HEAD_DIM, params, backend,
                        error);
}

/* ---- Keys and values of heads -------------------------------------------------------------- */

/* Checks what goes to both caches. */
static smla_status
require_heads(smla_checker *c, const smla_reshape_and_cache_args *args)
{
    SMLA_TRY(smla_require_3d(c, "k", args->k, SMLA_DTYPE_FLOATS, SMLA_ANY, SMLA_ANY, SMLA_ANY, 0,
                             "tokens, KV heads, values"));
    SMLA_TRY(smla_require_num_heads(c, "k", smla_size(args->k, 1)));
    SMLA_TRY(smla_require_head_dim(c, "k", smla_size(args->k, 2), SMLA_HEAD_DIM));
    SMLA_TRY(smla_require_3d(c, "v", args->v, smla_dtype(args->k), SMLA_ANY, smla_size(args->k, 1),
                             SMLA_ANY, 0, "tokens, the heads of `k`, values"));
    return smla_require_head_dim(c, "v", smla_size(args->v, 2), SMLA_KV_LORA_RANK);
}

/* Checks the scale of a cache: a number, one fp32, or one per head. A cache of copies has none. */
static smla_status
require_head_scale(smla_checker *c, const smla_named_scale *arg, const smla_named_array *cache,
                   smla_head_write *part)
{
    const DLTensor *const tensor = arg->given.tensor;
    const int64_t num_heads = smla_size(cache->tensor, 2);
    part->scale = (smla_given_scale){.value = 1.0f};
    part->scale_stride_head = 0;
    if (!(smla_dtype(cache->tensor) & SMLA_DTYPE_E4M3_OR_BYTES)) {
        return smla_require_no_scale(c, arg, cache);
    }
    SMLA_TRY(smla_read_scale_number(c, arg->name, &arg->given, &part->scale.value));
    if (tensor == NULL) {
        return SMLA_OK;
    }
    const bool has_heads = tensor->ndim == 1 && tensor->shape[0] == num_heads;
    if (!has_heads && !smla_has_one_value(tensor)) {
        return smla_refuse(c,
                           "`%s` must have one value or shape [%lld], or be a float, got shape %s",
                           arg->name, (long long)num_heads, smla_describe_shape(tensor).text);
    }
    part->scale.pointer = smla_data(tensor);
    part->scale_stride_head = has_heads ? smla_stride(tensor, 0) : 0;
    for (int64_t head = 0; c->device.device_type == kDLCPU && head < num_heads; head++) {
        SMLA_TRY(
            smla_require_positive(c->op, arg->name, smla_read_head_scale(part, head), c->error));
    }
    return SMLA_OK;
}

static void
fill_part(const DLTensor *rows, const DLTensor *cache, smla_head_write *part)
{
    part->rows = smla_data(rows);
    part->stride_token = smla_stride(rows, 0);
    part->stride_head = smla_stride(rows, 1);
    part->cache = smla_data(cache);
    part->cache_stride_page = smla_stride(cache, 0);
    part->cache_stride_token = smla_stride(cache, 1);
    part->cache_stride_head = smla_stride(cache, 2);
    part->dim = smla_size(rows, 2);
}

smla_status
smla_check_reshape_and_cache(const smla_reshape_and_cache_args *args, smla_reshape_params *params,
                             const smla_backend **backend, smla_error *error)
{
    smla_checker c;
    const DLTensor *const slots = args->slot_mapping;
    const DLTensor *const rows[SMLA_WRITTEN_PARTS] = {args->k, args->v};
    const smla_named_array caches[] = {SMLA_NAMED(args, k_cache), SMLA_NAMED(args, v_cache)};
    const smla_named_scale scales[] = {SMLA_NAMED(args, k_scale), SMLA_NAMED(args, v_scale)};
    smla_open_checker(&c, "reshape_and_cache", error);
    SMLA_TRY(require_heads(&c, args));
    SMLA_TRY(smla_require_k_cache(&c, caches[0].tensor,
                                  smla_dtype(args->k) | SMLA_DTYPE_E4M3_OR_BYTES,
                                  smla_size(args->k, 1), smla_size(args->k, 2), SMLA_RULE_OUTPUT,
                                  "pages, tokens, the heads and values of `k`"));
    SMLA_TRY(smla_require_v_cache(&c, caches[1].tensor, caches[0].tensor, smla_size(args->v, 2),
                                  SMLA_RULE_OUTPUT,
                                  "the pages, tokens and heads of `k_cache`, the values of `v`"));
    SMLA_TRY(smla_require_slot_mapping(&c, slots));
    SMLA_TRY(require_rows(&c, slots, "k", args->k));
    SMLA_TRY(require_rows(&c, slots, "v", args->v));
    for (int i = 0; i < SMLA_WRITTEN_PARTS; i++) {
        SMLA_TRY(require_head_scale(&c, &scales[i], &caches[i], &params->parts[i]));
        fill_part(rows[i], caches[i].tensor, &params->parts[i]);
    }
    SMLA_TRY(smla_finish_check(&c, backend));
    const smla_kv_view pages = {.num_pages = smla_size(args->k_cache, 0),
                                .block_size = smla_size(args->k_cache, 1)};
    params->call = smla_call_of(&c, args->stream, NULL);
    smla_fill_cache_write(&params->call, caches[0].name, &pages, "slot_mapping", slots,
                          &params->slots);
    params->num_heads = smla_size(args->k, 1);
    params->input_type = smla_float_type_of(args->k);
    params->quantizes = (smla_dtype(args->k_cache) & SMLA_DTYPE_E4M3_OR_BYTES) != 0;
    return SMLA_OK;
}

/* ---- Transfer ------------------------------------------------------------------------------ */

smla_status
smla_check_transfer_kv_cache(const smla_transfer_kv_cache_args *args, smla_transfer_params *params,
                             const smla_backend **backend, smla_error *error)
{
    smla_checker c;
    smla_kv_view views[SMLA_TRANSFER_SIDES];
    DLTensor seen[SMLA_TRANSFER_SIDES];
    const smla_named_array slots[] = {SMLA_NAMED(args, src_slots), SMLA_NAMED(args, dst_slots)};
    smla_cache_rule caches[] = {SMLA_CACHE_OF(args, src, SMLA_KV_ALL, 0),
                                SMLA_CACHE_OF(args, dst, SMLA_KV_ALL, SMLA_RULE_OUTPUT)};
    smla_open_checker(&c, "transfer_kv_cache", error);
    /* The slots come first, because they decide the device. */
    for (int i = 0; i < SMLA_TRANSFER_SIDES; i++) {
        SMLA_TRY(smla_require_1d(&c, slots[i].name, slots[i].tensor,
                                 SMLA_DTYPE_INT64 | SMLA_DTYPE_INT32,
                                 i == 0 ? SMLA_ANY : smla_size(slots[0].tensor, 0),
                                 SMLA_RULE_ANY_LAST_STRIDE,
                                 i == 0 ? NULL : "an entry per entry of `src_slots`"));
    }
    for (int i = 0; i < SMLA_TRANSFER_SIDES; i++) {
        const DLTensor *const given = caches[i].tensor;
        caches[i].tensor = smla_see_from(c.device, kDLCPU, given, &seen[i]); /* if pinned */
        SMLA_TRY(smla_require_kv(&c, &caches[i], &views[i]));
        const bool is_host = caches[i].tensor != given;
        params->host_memory[i] =
            is_host ? c.arrays[c.num_arrays - 1].range : (smla_byte_range){.low = NULL};
    }
    c.arrays[c.num_arrays - 1].may_be[0] = caches[0].tensor;
    const smla_kv_format_info *const src = views[0].format;
    const smla_kv_format_info *const dst = views[1].format;
    if (smla_row_as_read(dst)->number != src->number) {
        return smla_refuse(&c,
                           "`dst` must be of the format of `src`, %s with %d elements a token, got "
                           "%s with %d",
                           src->name, src->row_elements, dst->name, dst->row_elements);
    }
    SMLA_TRY(smla_finish_check(&c, backend));
    params->call = smla_call_of(&c, args->stream, dst);
    for (int i = 0; i < SMLA_TRANSFER_SIDES; i++) {
        smla_fill_cache_write(&params->call, caches[i].name, &views[i], slots[i].name,
                              slots[i].tensor, &params->sides[i]);
    }
    return SMLA_OK;
}

/* ---- Read ---------------------------------------------------------------------------------- */

smla_status
smla_check_gather_kv_cache(const smla_gather_kv_cache_args *args, smla_gather_params *params,
                           const smla_backend **backend, smla_error *error)
{
    smla_checker c;
    smla_kv_view kv;
    smla_given_scale kv_scale;
    const smla_cache_rule cache = SMLA_CACHE_OF(args, kv_cache, SMLA_KV_ALL, 0);
    smla_open_checker(&c, "gather_kv_cache", error);
    SMLA_TRY(smla_require_kv(&c, &cache, &kv));
    SMLA_TRY(smla_require_block_table(&c, args->block_table));
    const int64_t num_reqs = smla_size(args->block_table, 0);
    SMLA_TRY(smla_require_vector(&c, "seq_lens", args->seq_lens, num_reqs, 0, NULL));
    SMLA_TRY(
        smla_require_vector(&c, "workspace_starts", args->workspace_starts, num_reqs, 0, NULL));
    SMLA_TRY(smla_require_vector(&c, "seq_starts", args->seq_starts, num_reqs, SMLA_RULE_OPTIONAL,
                                 NULL));
    SMLA_TRY(smla_require_2d(&c, "out", args->out, SMLA_DTYPE_BF16, SMLA_ANY, kv.format->head_dim,
                             SMLA_RULE_OUTPUT, NULL));
    SMLA_TRY(smla_require_kv_scale(&c, "kv_scale", &args->kv_scale, kv.format, &kv_scale));
    SMLA_TRY(smla_finish_check(&c, backend));
    *params = (smla_gather_params){
        .call = smla_call_of(&c, args->stream, kv.format),
        .num_reqs = num_reqs,
        .num_blocks = smla_size(args->block_table, 1),
        .block_table = smla_data(args->block_table),
        .block_table_stride_req = smla_stride(args->block_table, 0),
        .block_table_stride_block = smla_stride(args->block_table, 1),
        SMLA_SET_VECTOR(seq_lens, args->seq_lens),
        SMLA_SET_VECTOR(workspace_starts, args->workspace_starts),
        SMLA_SET_VECTOR(seq_starts, args->seq_starts),
        .kv = kv,
        .kv_scale = kv_scale,
        .out = smla_data(args->out),
        .out_tokens = smla_size(args->out, 0),
        .out_stride_token = smla_stride(args->out, 0),
    };
    return SMLA_OK;
}

smla_status
smla_check_dequantize_and_gather_k_cache(const smla_gather_k_cache_args *args,
                                         smla_gather_params *params, const smla_backend **backend,
                                         smla_error *error)
{
    smla_checker c;
    smla_kv_view kv;
    smla_given_scale kv_scale;
    const smla_cache_rule cache = SMLA_CACHE_OF(args, k_cache, SMLA_KV_ALL, 0);
    smla_open_checker(&c, "dequantize_and_gather_k_cache", error);
    SMLA_TRY(smla_require_kv(&c, &cache, &kv));
    SMLA_TRY(smla_require_count(c.op, "block_size", args->block_size, 1, INT32_MAX, error));
    SMLA_TRY(smla_require_3d(&c, "out", args->out, SMLA_DTYPE_BF16, SMLA_ANY, SMLA_ANY,
                             kv.format->head_dim, SMLA_RULE_OUTPUT,
                             "requests, rows, values of a key"));
    const int64_t num_reqs = smla_size(args->out, 0);
    SMLA_TRY(smla_require_vector(&c, "seq_lens", args->seq_lens, num_reqs, 0, NULL));
    SMLA_TRY(smla_require_vector(&c, "gather_lens", args->gather_lens, num_reqs, SMLA_RULE_OPTIONAL,
                                 NULL));
    SMLA_TRY(smla_require_block_table(&c, args->block_table));
    if (smla_size(args->block_table, 0) != num_reqs) {
        return smla_refuse(&c,
                           "`block_table` must have a row per request of `out` (%lld), got %lld",
                           (long long)num_reqs, (long long)smla_size(args->block_table, 0));
    }
    SMLA_TRY(smla_require_count(c.op, "offset", args->offset, 0, smla_size(args->out, 1), error));
    SMLA_TRY(smla_require_kv_scale(&c, "kv_scale", &args->kv_scale, kv.format, &kv_scale));
    SMLA_TRY(smla_finish_check(&c, backend));
    *params = (smla_gather_params){
        .call = smla_call_of(&c, args->stream, kv.format),
        .num_reqs = num_reqs,
        .num_blocks = smla_size(args->block_table, 1),
        .block_table = smla_data(args->block_table),
        .block_table_stride_req = smla_stride(args->block_table, 0),
        .block_table_stride_block = smla_stride(args->block_table, 1),
        SMLA_SET_VECTOR(seq_lens, args->seq_lens),
        .offset = args->offset,
        SMLA_SET_VECTOR(gather_lens, args->gather_lens),
        .kv = kv,
        .kv_scale = kv_scale,
        .out = smla_data(args->out),
        .out_tokens = smla_size(args->out, 1),
        .out_stride_req = smla_stride(args->out, 0),
        .out_stride_token = smla_stride(args->out, 1),
    };
    return SMLA_OK;
}

smla_status
smla_check_dequantize_kv_cache(const smla_dequantize_kv_cache_args *args,
                               smla_dequantize_params *params, const smla_backend **backend,
                               smla_error *error)
{
    smla_checker c;
    smla_kv_view kv;
    smla_given_scale kv_scale;
    const smla_cache_rule cache = SMLA_CACHE_OF(args, kv_cache, SMLA_KV_ALL, 0);
    smla_open_checker(&c, "dequantize_kv_cache", error);
    SMLA_TRY(smla_require_kv(&c, &cache, &kv));
    const bool is_flat =
        args->kv_cache->ndim == 2 && kv.format->layout == SMLA_PAGE_ROWS; /* not [pages, bytes] */
    smla_rule out = {.name = "out",
                     .tensor = args->out,
                     .dtypes = SMLA_DTYPE_FP32 | SMLA_DTYPE_BF16,
                     .flags = SMLA_RULE_OUTPUT,
                     .ndim = is_flat ? 2 : 3,
                     .shape = {kv.num_pages, kv.block_size, kv.format->head_dim}};
    if (is_flat) {
        out.shape[0] = smla_kv_num_slots(&kv);
        out.shape[1] = kv.format->head_dim;
    }
    SMLA_TRY(smla_require(&c, &out));
    SMLA_TRY(smla_require_kv_scale(&c, "kv_scale", &args->kv_scale, kv.format, &kv_scale));
    SMLA_TRY(smla_finish_check(&c, backend));
    *params = (smla_dequantize_params){
        .call = smla_call_of(&c, args->stream, kv.format),
        .kv = kv,
        .kv_scale = kv_scale,
        .out = smla_data(args->out),
        .out_type = smla_float_type_of(args->out),
        .out_stride_page = is_flat ? 0 : smla_stride(args->out, 0),
        .out_stride_token = smla_stride(args->out, is_flat ? 0 : 1),
    };
    return SMLA_OK;
}
