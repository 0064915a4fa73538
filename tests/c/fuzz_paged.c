/* fuzz_paged.c: libFuzzer for calls on pages: the builds of a paged step, reshape_and_cache and
 * paged_attention. Other than in fuzz_check.c, the calls run.
 *
 * The input's bytes choose sizes, types, masks, and every length, slot and entry of a table; most
 * of these are good ones. Each array has exactly its own bytes of the heap, where AddressSanitizer
 * notices any other access. For any input a call returns a status of the enum, an error's text
 * begins with the operator's name, and what a build returns is a batch that attention can read.
 */
#include "fuzz_input.h"

enum { MAX_TENSORS = 16, MAX_LEN = 40, MAX_DIMS = 4 };

/* The arrays of an input. */
typedef struct held {
    DLTensor tensors[MAX_TENSORS];
    int64_t shapes[MAX_TENSORS][MAX_DIMS];
    int64_t strides[MAX_TENSORS][MAX_DIMS];
    int count;
} held;

static DLTensor *
hold(held *h, DLDataType dtype, int ndim, const int64_t *shape)
{
    const int at = h->count++;
    DLTensor *const t = &h->tensors[at];
    int64_t count = 1;
    require(at < MAX_TENSORS && ndim <= MAX_DIMS, "too many arrays", "");
    for (int i = ndim - 1; i >= 0; i--) {
        h->shapes[at][i] = shape[i];
        h->strides[at][i] = count;
        count *= shape[i];
    }
    *t = (DLTensor){.data = calloc(1, (size_t)(count * dtype.bits / 8)),
                    .device = cpu,
                    .ndim = ndim,
                    .dtype = dtype,
                    .shape = h->shapes[at],
                    .strides = h->strides[at]};
    return t;
}

#define HOLD(h, dtype, ...) hold(h, dtype, COUNT(__VA_ARGS__), (int64_t[]){__VA_ARGS__})

static void
release(held *h)
{
    for (int i = 0; i < h->count; i++) {
        free(h->tensors[i].data);
    }
}

/* Numbers of a vector or a table, mostly below `most`. */
static const DLTensor *
read_ints(reader *r, DLTensor *t, int64_t most)
{
    int64_t count = 1;
    for (int i = 0; i < t->ndim; i++) {
        count *= t->shape[i];
    }
    for (int64_t i = 0; i < count; i++) {
        const int64_t x = read_count(r, most > 0 ? most : 1);
        if (t->dtype.bits == 64) {
            ((int64_t *)t->data)[i] = x;
        } else if (t->dtype.bits == 32) {
            ((int32_t *)t->data)[i] = (int32_t)x;
        } else {
            ((uint8_t *)t->data)[i] = (uint8_t)(x & 1);
        }
    }
    return t;
}

static bool
happens(reader *r, int in)
{
    return read_byte(r) % in == 0;
}

static DLDataType
read_int_type(reader *r)
{
    return happens(r, 2) ? int64 : int32;
}

/* Values of any bits, NaN and infinities among them. */
static const DLTensor *
read_values(reader *r, DLTensor *t)
{
    int64_t bytes = t->dtype.bits / 8;
    for (int i = 0; i < t->ndim; i++) {
        bytes *= t->shape[i];
    }
    const uint8_t first = read_byte(r), step = read_byte(r);
    for (int64_t i = 0; i < bytes; i++) {
        ((uint8_t *)t->data)[i] = (uint8_t)(first + i * step);
    }
    return t;
}

/* ---- Builds -------------------------------------------------------------------------------- */

static void
require_running(const smla_paged_part *part, const int32_t *lens, const int32_t *starts)
{
    require(starts[0] == 0, "a sum that does not begin with 0", "");
    for (int64_t i = 0; i < part->num_rows; i++) {
        require(lens[i] >= 0 && starts[i + 1] == starts[i] + lens[i], "another sum of lengths", "");
    }
}

/* A part's first step: lengths below their bound, and entries for them. */
static void
require_part(const smla_paged_part *part, int64_t entry, bool has_bound)
{
    volatile int32_t sum = 0;
    for (int64_t i = 0; i < part->num_rows; i++) {
        const int64_t len = part->cache_seqlens[i];
        const int64_t columns = (len + entry - 1) / entry;
        require(!has_bound || len <= part->max_seq_len_k, "a length beyond its bound", "");
        require(columns <= part->columns, "more keys than entries", "");
        for (int64_t j = 0; j < columns; j++) {
            sum = sum ^ part->entries[i * part->entries_stride + j];
        }
    }
}

static void
require_metadata(const smla_paged_metadata *m, int64_t page_size, bool has_bound)
{
    const smla_paged_part *const rows[] = {&m->expand, &m->swa_spec};
    require_part(&m->requests, page_size, has_bound);
    for (int64_t step = 0; step < m->num_steps; step++) {
        require_running(&m->requests, m->requests.cache_seqlens + step * m->seqlens_stride,
                        m->requests.cu_seqlens_k + step * m->starts_stride);
        for (int i = 0; i < 2 && rows[i]->entries != NULL; i++) {
            require_running(rows[i], rows[i]->cache_seqlens + step * m->row_seqlens_stride,
                            rows[i]->cu_seqlens_k + step * m->row_starts_stride);
        }
    }
    for (int i = 0; i < 2 && rows[i]->entries != NULL; i++) {
        require_part(rows[i], 1, true);
    }
    for (int64_t i = 0; i < m->num_reqs; i++) {
        require(m->requests.cu_seqlens_q[i] <= m->requests.cu_seqlens_q[i + 1],
                "query starts that fall", "");
    }
    for (int64_t i = 0; i < m->local.num_batches; i++) {
        require(m->local.query_start_loc[i] <= m->local.query_start_loc[i + 1] &&
                    m->local.seqused_k[i] >= 0 &&
                    (!has_bound || m->local.seqused_k[i] <= m->local.max_seq_len),
                "a virtual request out of order", "");
    }
}

static smla_paged_config
read_config(reader *r)
{
    const int64_t page_size = read_config_count(r, 5);
    return (smla_paged_config){
        .struct_size = sizeof(smla_paged_config),
        .max_bs = read_config_count(r, 6),
        .max_num_tokens = read_config_count(r, 60),
        .max_context_len = read_config_count(r, MAX_LEN),
        .page_size = page_size,
        .topk = read_count(r, 4),
        .num_draft_tokens = read_count(r, 5),
        .speculative_num_steps = read_count(r, 5),
        .attention_chunk = happens(r, 3) ? page_size % 6 * (read_byte(r) % 5) : 0,
        .sliding_window_size = read_count(r, 30),
        .has_window = happens(r, 3),
        .has_window_pool = happens(r, 3),
        .is_encoder_decoder = happens(r, 4),
        .drafts_only = happens(r, 8),
        .device = cpu,
    };
}

static void
build(reader *r, smla_paged_builder *builder, const smla_paged_config *config)
{
    held h = {.count = 0};
    const int64_t reqs = read_byte(r) % 8;
    const int64_t rows = read_byte(r) % 8 + 1, width = read_byte(r) % (MAX_LEN + 12);
    const int64_t slots = read_byte(r) % 64;
    const int64_t entries = read_byte(r) * (int64_t)4;
    const int64_t num_loc = read_byte(r) % 64;
    const int32_t mode = (int32_t)read_count(r, 8);
    int32_t bounds[3][8];
    for (int i = 0; i < 3; i++) {
        for (int j = 0; j < 8; j++) {
            bounds[i][j] = (int32_t)read_count(r, MAX_LEN);
        }
    }
    smla_paged_build_args args = {
        .struct_size = sizeof args,
        .seq_lens = read_ints(r, HOLD(&h, int32, reqs), MAX_LEN),
        .req_pool_indices = read_ints(r, HOLD(&h, read_int_type(r), reqs), rows),
        .req_to_token = read_ints(r, HOLD(&h, int32, rows, width), 64),
        .full_to_swa_index_mapping = config->has_window_pool != 0 || happens(r, 16)
                                         ? read_ints(r, HOLD(&h, int32, slots), 64)
                                         : NULL,
        .extend_seq_lens = happens(r, 2) ? read_ints(r, HOLD(&h, int32, reqs), 8) : NULL,
        .out_cache_loc =
            happens(r, 2) ? read_ints(r, HOLD(&h, read_int_type(r), num_loc), 64) : NULL,
        .custom_mask = happens(r, 2) ? read_ints(r, HOLD(&h, uint8, entries), 2) : NULL,
        .encoder_lens = config->is_encoder_decoder != 0 || happens(r, 16)
                            ? read_ints(r, HOLD(&h, int32, reqs), MAX_LEN)
                            : NULL,
        .seq_lens_cpu = happens(r, 3) ? bounds[0] : NULL,
        .extend_seq_lens_cpu = happens(r, 3) ? bounds[1] : NULL,
        .encoder_lens_cpu = happens(r, 3) ? bounds[2] : NULL,
        .num_reqs = happens(r, 16) ? read_number(r) : reqs,
        .spec_step = read_count(r, 5),
        .num_steps = read_count(r, 5),
        .common_prefix_len = happens(r, 4) ? read_count(r, 20) : 0,
        .mode = mode,
    };
    if (happens(r, 3)) {
        args.is_fixed = 1;
        args.num_tokens = happens(r, 8) ? read_number(r) : reqs * (read_byte(r) % 9);
        args.num_padding_reqs = read_count(r, 9);
        args.common_prefix_len = 0;
    }
    const smla_paged_metadata *m = NULL;
    smla_error e;
    const smla_status status = smla_paged_builder_build(builder, &args, &m, &e);
    require_sound("MetadataBuilder.build", status, &e);
    if (status == SMLA_OK) {
        /* The remainder of an encoder's bound says nothing of that of its length. */
        require_metadata(m, config->page_size == 0 ? 1 : config->page_size,
                         args.encoder_lens_cpu == NULL);
    }
    release(&h);
}

static void
fuzz_builds(reader *r)
{
    const smla_paged_config config = read_config(r);
    smla_paged_builder *builder = NULL;
    smla_error e;
    const smla_status status = smla_paged_builder_create(&config, &builder, &e);
    require_sound("MetadataBuilder", status, &e);
    for (int i = read_byte(r) % 3; status == SMLA_OK && i >= 0; i--) {
        build(r, builder, &config);
    }
    smla_paged_builder_destroy(builder);
}

/* ---- Operators ----------------------------------------------------------------------------- */

static DLDataType
read_cache_type(reader *r)
{
    static const DLDataType types[] = {{kDLBfloat, 16, 1},
                                       {kDLFloat, 16, 1},
                                       {kDLFloat8_e4m3fn, 8, 1},
                                       {kDLUInt, 8, 1}};
    return types[read_byte(r) % 4];
}

static void
fuzz_reshape(reader *r)
{
    held h = {.count = 0};
    const int64_t rows = read_byte(r) % 6, heads = read_byte(r) % 3 + 1;
    const int64_t pages = read_byte(r) % 4, size = read_byte(r) % 4 + 1;
    const int64_t dim = read_byte(r) % 5 * 8, value_dim = read_byte(r) % 40;
    const DLDataType from = happens(r, 3) ? fp32 : happens(r, 2) ? fp16 : bf16;
    const DLDataType to = happens(r, 2) ? from : read_cache_type(r);
    const smla_reshape_and_cache_args args = {
        .struct_size = sizeof args,
        .k = read_values(r, HOLD(&h, from, rows, heads, dim)),
        .v = read_values(r, HOLD(&h, from, rows, heads, value_dim)),
        .k_cache = HOLD(&h, to, pages, size, heads, dim),
        .v_cache = HOLD(&h, to, pages, size, heads, value_dim),
        .slot_mapping = read_ints(r, HOLD(&h, read_int_type(r), rows - (rows > 0 && happens(r, 3))),
                                  pages * size),
        .k_scale.value = (double)read_count(r, 3),
        .v_scale.tensor = happens(r, 4) ? read_values(r, HOLD(&h, fp32, heads)) : NULL,
    };
    smla_error e;
    require_sound("reshape_and_cache", smla_reshape_and_cache(&args, &e), &e);
    release(&h);
}

static void
fuzz_attention(reader *r)
{
    held h = {.count = 0};
    const int64_t tokens = read_byte(r) % 6, kv_heads = read_byte(r) % 2 + 1;
    const int64_t heads = kv_heads * (read_byte(r) % 3 + 1);
    const int64_t pages = read_byte(r) % 5, size = read_byte(r) % 5 + 1;
    const int64_t dim = read_byte(r) % 5 * 8, value_dim = read_byte(r) % 5 * 8;
    const int64_t reqs = happens(r, 3) ? tokens : read_byte(r) % 5, columns = read_byte(r) % 9;
    const bool has_slots = happens(r, 3);
    const DLDataType type = read_cache_type(r);
    const DLDataType kv_type = happens(r, 2) ? type : read_cache_type(r);
    DLTensor *const table = HOLD(&h, int32, reqs + happens(r, 4), columns);
    DLTensor *starts = NULL;
    if (reqs != tokens || happens(r, 2)) {
        starts = HOLD(&h, int32, reqs + 1);
        read_starts(r, starts->data, reqs);
    }
    DLTensor *const lens = HOLD(&h, int32, reqs);
    read_ints(r, table, has_slots ? pages * size : pages);
    read_ints(r, lens, 40);
    for (int64_t req = 0; req < reqs; req++) { /* because two billion hidden keys take minutes */
        int32_t *const len = (int32_t *)lens->data + req;
        *len = *len > 5000 ? 5000 : *len;
    }
    const smla_paged_attention_args args = {
        .struct_size = sizeof args,
        .q = read_values(r, HOLD(&h, type, tokens, heads, dim)),
        .qv = happens(r, 4) ? read_values(r, HOLD(&h, type, tokens, heads, value_dim)) : NULL,
        .k_cache = read_values(r, HOLD(&h, kv_type, pages, size, kv_heads, dim)),
        .v_cache = read_values(r, HOLD(&h, kv_type, pages, size, kv_heads, value_dim)),
        .block_table = has_slots ? NULL : table,
        .slot_table = has_slots ? table : NULL,
        .cache_seqlens = lens,
        .cu_seqlens_q = starts,
        .cache_leftpad = happens(r, 4) ? read_ints(r, HOLD(&h, int32, reqs), 6) : NULL,
        .attn_sink = happens(r, 4) ? read_values(r, HOLD(&h, fp32, heads)) : NULL,
        .out = HOLD(&h, happens(r, 2) || type.bits == 8 ? fp32 : type, tokens, heads, value_dim),
        .lse = HOLD(&h, fp32, tokens, heads),
        .k_descale.value = (double)read_count(r, 3),
        .softmax_scale = happens(r, 4) ? read_double(r) : 0.1,
        .softcap = happens(r, 8) ? read_double(r) : 0,
        .window_left = happens(r, 3) ? -1 : read_count(r, 20),
        .window_right = happens(r, 3) ? -1 : read_count(r, 4),
        .attention_chunk = happens(r, 4) ? read_count(r, 9) : 0,
        .cp_rank = read_count(r, 3),
        .cp_size = happens(r, 8) ? read_count(r, 4) : 0,
        .cp_interleave = read_count(r, 4),
        .has_window = happens(r, 3),
        .is_causal = happens(r, 2),
        .num_splits = (int32_t)read_count(r, 5),
        .fills_padding = happens(r, 2),
    };
    smla_error e;
    require_sound("paged_attention", smla_paged_attention(&args, &e), &e);
    release(&h);
}

int
LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    reader r = {.data = data, .size = size};
    switch (read_byte(&r) % 4) {
    case 0: fuzz_reshape(&r); break;
    case 1: fuzz_attention(&r); break;
    default: fuzz_builds(&r);
    }
    return 0;
}
