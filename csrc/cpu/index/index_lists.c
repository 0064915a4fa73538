/* index_lists.c: the index lists of DeepSeek V4's attention: top-k positions to slots, workspace
 * rows of a prefill chunk, slots of a mixed batch.
 *
 * A row of a list is written by one thread, from its first column to its last.
 */
#include <string.h>

#include "core/params_index.h"
#include "cpu/cpu.h"
#include "cpu/index/slot.h"
#include "cpu/isa.h"
#include "cpu/machine/threads.h"

enum { MIN_PARALLEL_ENTRIES = 1 << 16 }; /* below, starting threads costs more than they save */

/* ---- Tokens and requests ------------------------------------------------------------------- */

static bool
is_valid_token(const uint8_t *is_valid, int64_t stride, int64_t token)
{
    return is_valid == NULL || is_valid[token * stride] != 0;
}

static int64_t
read_start(const smla_query_batch *batch, int64_t req)
{
    return batch->query_start_loc[req * batch->query_start_loc_stride];
}

/* The request of a token; -1 for a token past the last request. It is probably request `guess` or
 * the one behind it. */
static int64_t
find_request(const smla_query_batch *batch, int64_t token, int64_t guess)
{
    int64_t low = 0;
    int64_t high = batch->num_reqs;
    if (token >= read_start(batch, high)) {
        return -1;
    }
    if (read_start(batch, guess) <= token) {
        low = guess;
        high = low + 2 < high && read_start(batch, low + 2) > token ? low + 2 : high;
    }
    while (high - low > 1) {
        const int64_t middle = (low + high) / 2;
        if (read_start(batch, middle) <= token) {
            low = middle;
        } else {
            high = middle;
        }
    }
    return low;
}

/* What a token sees: its position, the length of its window, and how many compressed rows. A token
 * past the end of its request sees nothing. */
typedef struct token_sight {
    int64_t position;
    int64_t window_len;
    int64_t topk_len;
} token_sight;

static token_sight
find_sight(const smla_query_batch *batch, int64_t req, int64_t token, int64_t window, int64_t ratio,
           int64_t topk)
{
    const int64_t num_left = read_start(batch, req + 1) - token;
    const int64_t position = batch->seq_lens[req * batch->seq_lens_stride] - num_left;
    const int64_t seen = num_left <= 0 || position < 0 ? 0 : position + 1;
    return (token_sight){.position = position,
                         .window_len = seen < window ? seen : window,
                         .topk_len = seen / ratio < topk ? seen / ratio : topk};
}

/* ---- Values that a call refuses ------------------------------------------------------------ */

static smla_status
check_request_id(const char *op, const char *table, int64_t req, int64_t num_reqs, int64_t token,
                 smla_error *error)
{
    if (req >= 0 && req < num_reqs) {
        return SMLA_OK;
    }
    return smla_fail_value(
        error, op, "`req_id_per_token` must name a row of `%s` (0 to %lld), got %lld at token %lld",
        table, (long long)num_reqs - 1, (long long)req, (long long)token);
}

static smla_status
check_starts(const char *op, const smla_query_batch *batch, smla_error *error)
{
    for (int64_t req = 0; req < batch->num_reqs; req++) {
        const int64_t start = read_start(batch, req);
        const int64_t end = read_start(batch, req + 1);
        if (end < start) {
            return smla_fail_value(
                error, op,
                "`query_start_loc` must not decrease, got %lld after %lld at request %lld",
                (long long)end, (long long)start, (long long)req);
        }
    }
    return SMLA_OK;
}

smla_status
smla_cpu_check_global_topk(const smla_topk_slots_params *p, smla_error *error)
{
    for (int64_t token = 0; token < p->num_tokens; token++) {
        if (is_valid_token(p->is_valid, p->is_valid_stride, token)) {
            SMLA_TRY(check_request_id(p->call.op, p->table,
                                      p->req_id_per_token[token * p->req_id_stride], p->num_reqs,
                                      token, error));
        }
    }
    return SMLA_OK;
}

/* Checks that the workspace has the window of each token of a request, and nothing of another one.
 * A request whose tokens see nothing needs none. */
static smla_status
check_gather_len(const char *op, const smla_combine_topk_swa_params *p, int64_t req,
                 smla_error *error)
{
    const int64_t num_queries = read_start(&p->batch, req + 1) - read_start(&p->batch, req);
    const int64_t seq_len = p->batch.seq_lens[req * p->batch.seq_lens_stride];
    const int64_t gather_len = p->gather_lens[req * p->gather_lens_stride];
    if (num_queries == 0 || seq_len <= 0) {
        return SMLA_OK;
    }
    const int64_t first = seq_len - num_queries - p->window + 1;
    const int64_t least = first < 0 ? seq_len : seq_len - first;
    const int64_t room = p->request_rows - p->window_start;
    const int64_t most = seq_len < room ? seq_len : room;
    if (gather_len < least || gather_len > most) {
        return smla_fail_value(error, op,
                               "`gather_lens` must hold the windows of request %lld (at least "
                               "%lld) and fit its sequence and its rows (at most %lld), got %lld",
                               (long long)req, (long long)least, (long long)most,
                               (long long)gather_len);
    }
    return SMLA_OK;
}

smla_status
smla_cpu_check_combine_topk_swa(const smla_combine_topk_swa_params *p, smla_error *error)
{
    static const char op[] = "combine_topk_swa_indices";
    SMLA_TRY(check_starts(op, &p->batch, error));
    const int64_t num_queries = read_start(&p->batch, p->batch.num_reqs) - read_start(&p->batch, 0);
    if (num_queries > p->num_tokens) {
        return smla_fail_value(
            error, op,
            "`query_start_loc` must have at most the %lld tokens of `topk_indices`, got %lld",
            (long long)p->num_tokens, (long long)num_queries);
    }
    for (int64_t req = 0; req < p->batch.num_reqs; req++) {
        SMLA_TRY(check_gather_len(op, p, req, error));
    }
    return SMLA_OK;
}

/* Only tokens whose request matters need a good request id. */
smla_status
smla_cpu_check_mixed_indices(const smla_mixed_indices_params *p, smla_error *error)
{
    static const char op[] = "build_mixed_sparse_indices";
    SMLA_TRY(check_starts(op, &p->batch, error));
    const int64_t end = read_start(&p->batch, p->batch.num_reqs);
    const bool are_positions = p->decode_indices_are_local && p->decode_topk > 0;
    for (int64_t token = 0; token < p->num_tokens; token++) {
        const bool has_request =
            token >= p->num_decode_tokens
                ? token < end
                : are_positions && is_valid_token(p->is_valid, p->is_valid_stride, token);
        if (has_request) {
            SMLA_TRY(check_request_id(op, "seq_lens", p->req_id_per_token[token * p->req_id_stride],
                                      p->batch.num_reqs, token, error));
        }
    }
    return SMLA_OK;
}

/* ---- Top-k positions to slots -------------------------------------------------------------- */

void
smla_cpu_write_global_topk(const smla_slot_isa *kernel, const smla_topk_slots_params *p,
                           int64_t token)
{
    const int32_t *in = p->topk_indices + token * p->topk_indices_stride_token;
    int32_t *out = p->out + token * p->out_stride_token;
    int64_t count = 0;
    if (is_valid_token(p->is_valid, p->is_valid_stride, token)) {
        const smla_page_row row =
            smla_page_row_of(&p->pages, p->req_id_per_token[token * p->req_id_stride]);
        count = kernel->find_slots(&row, in, p->topk, out);
        if (count > 0 && count < p->topk) {
            kernel->close_holes(out, p->topk);
        }
    }
    smla_clear_columns(out, count, p->topk);
    p->lens[token * p->lens_stride] = (int32_t)count;
}

smla_status
smla_cpu_compute_global_topk_indices_and_lens(const smla_topk_slots_params *p, smla_error *error)
{
    const smla_cpu_isa *isa = NULL;
    SMLA_TRY(smla_cpu_choose_isa(p->call.op, &isa, error));
    SMLA_TRY(smla_cpu_check_global_topk(p, error));
#pragma omp parallel for schedule(static) if (p->num_tokens * p->topk >= MIN_PARALLEL_ENTRIES)
    for (int64_t token = 0; token < p->num_tokens; token++) {
        smla_cpu_write_global_topk(isa->slot, p, token);
    }
    return SMLA_OK;
}

/* ---- Workspace rows of a prefill chunk ----------------------------------------------------- */

static void
write_combined(const smla_slot_isa *kernel, const smla_combine_topk_swa_params *p, int64_t token,
               int64_t req)
{
    int32_t *out = p->out + token * p->out_stride_token;
    const int64_t query = token + read_start(&p->batch, 0);
    int64_t len = 0;
    if (req >= 0) {
        const token_sight sight = find_sight(&p->batch, req, query, p->window, p->ratio, p->topk);
        const int64_t base = p->request_rows * req;
        const int64_t seq_len = p->batch.seq_lens[req * p->batch.seq_lens_stride];
        const int64_t gather_start = seq_len - p->gather_lens[req * p->gather_lens_stride];
        const int64_t first = sight.position - sight.window_len + 1;
        kernel->add_base(p->topk_indices + token * p->topk_indices_stride_token, sight.topk_len,
                         base, out);
        smla_write_run(out + sight.topk_len, base + p->window_start + first - gather_start,
                       sight.window_len);
        len = sight.topk_len + sight.window_len;
    }
    smla_clear_columns(out, len, p->width);
    p->lens[token * p->lens_stride] = (int32_t)len;
}

smla_status
smla_cpu_combine_topk_swa_indices(const smla_combine_topk_swa_params *p, smla_error *error)
{
    const smla_cpu_isa *isa = NULL;
    SMLA_TRY(smla_cpu_choose_isa("combine_topk_swa_indices", &isa, error));
    SMLA_TRY(smla_cpu_check_combine_topk_swa(p, error));
    int64_t req = 0; /* the row of a thread's last token */
#pragma omp parallel for schedule(static) \
    firstprivate(req) if (p->num_tokens * p->width >= MIN_PARALLEL_ENTRIES)
    for (int64_t token = 0; token < p->num_tokens; token++) {
        req = find_request(&p->batch, token + read_start(&p->batch, 0), req < 0 ? 0 : req);
        write_combined(isa->slot, p, token, req);
    }
    return SMLA_OK;
}

/* ---- Slots of a mixed batch ---------------------------------------------------------------- */

static int64_t
count_positions(const int32_t *entries, int64_t count)
{
    int64_t num_positions = 0;
    for (int64_t i = 0; i < count; i++) {
        num_positions += entries[i] >= 0;
    }
    return num_positions;
}

/* The compressed columns of a decode token. Returns their length. */
static int64_t
write_decode_indices(const smla_slot_isa *kernel, const smla_mixed_indices_params *p, int64_t token,
                     int32_t *out)
{
    if (p->decode_topk == 0) {
        return 0;
    }
    const int32_t *in = p->decode_indices + token * p->decode_indices_stride_token;
    if (!p->decode_indices_are_local) {
        memcpy(out, in, (size_t)p->decode_topk * sizeof *out);
        const int64_t len =
            p->decode_lens == NULL ? p->decode_topk : p->decode_lens[token * p->decode_lens_stride];
        return len < 0 ? 0 : len < p->decode_topk ? len : p->decode_topk;
    }
    if (!is_valid_token(p->is_valid, p->is_valid_stride, token)) {
        smla_clear_columns(out, 0, p->decode_topk);
        return 0;
    }
    const smla_page_row row =
        smla_page_row_of(&p->compressed_pages, p->req_id_per_token[token * p->req_id_stride]);
    (void)kernel->find_slots(&row, in, p->decode_topk, out);
    return count_positions(in, p->decode_topk);
}

static void
write_decode(const smla_slot_isa *kernel, const smla_mixed_indices_params *p, int64_t token)
{
    int32_t *out = p->out + token * p->out_stride_token;
    memcpy(out, p->decode_swa_indices + token * p->decode_swa_stride_token,
           (size_t)p->window * sizeof *out);
    const int64_t len = write_decode_indices(kernel, p, token, out + p->window);
    smla_clear_columns(out, p->window + p->decode_topk, p->width);
    p->lens[token * p->lens_stride] = (int32_t)(p->window + len);
}

/* The compressed columns of a prefill token. */
static void
write_prefill_topk(const smla_slot_isa *kernel, const smla_mixed_indices_params *p, int64_t token,
                   int64_t count, int32_t *out)
{
    if (count == 0) {
        return;
    }
    const int64_t prefill_token = token - p->num_decode_tokens;
    const int32_t *in = p->prefill_indices + prefill_token * p->prefill_indices_stride_token;
    const smla_page_row row =
        smla_page_row_of(&p->compressed_pages, p->req_id_per_token[token * p->req_id_stride]);
    (void)kernel->find_slots(&row, in, count, out);
}

/* The slots of a window. Pages of few slots are found as those of any list. */
static void
write_window(const smla_slot_isa *kernel, const smla_page_row *row, int64_t first, int64_t count,
             int32_t *out)
{
    enum { FEW_SLOTS = 16 };
    if (row->block_size >= FEW_SLOTS) {
        smla_write_slots(out, row, first, count);
    } else {
        smla_write_run(out, first, count);
        (void)kernel->find_slots(row, out, count, out);
    }
}

static void
write_prefill(const smla_slot_isa *kernel, const smla_mixed_indices_params *p, int64_t token)
{
    int32_t *out = p->out + token * p->out_stride_token;
    token_sight sight = {.window_len = 0};
    if (token < read_start(&p->batch, p->batch.num_reqs)) {
        const int64_t req = p->req_id_per_token[token * p->req_id_stride];
        const smla_page_row swa = smla_page_row_of(&p->swa_pages, req);
        sight = find_sight(&p->batch, req, token, p->window, p->ratio, p->topk);
        write_window(kernel, &swa, sight.position - sight.window_len + 1, sight.window_len, out);
        write_prefill_topk(kernel, p, token, sight.topk_len, out + p->window);
    }
    smla_clear_columns(out, sight.window_len, p->window);
    smla_clear_columns(out, p->window + sight.topk_len, p->width);
    p->lens[token * p->lens_stride] = (int32_t)(p->window + sight.topk_len);
}

smla_status
smla_cpu_build_mixed_sparse_indices(const smla_mixed_indices_params *p, smla_error *error)
{
    const smla_cpu_isa *isa = NULL;
    SMLA_TRY(smla_cpu_choose_isa("build_mixed_sparse_indices", &isa, error));
    SMLA_TRY(smla_cpu_check_mixed_indices(p, error));
#pragma omp parallel for schedule(static) if (p->num_tokens * p->width >= MIN_PARALLEL_ENTRIES)
    for (int64_t token = 0; token < p->num_tokens; token++) {
        if (token < p->num_decode_tokens) {
            write_decode(isa->slot, p, token);
        } else {
            write_prefill(isa->slot, p, token);
        }
    }
    return SMLA_OK;
}
