/* local_batches.c: local attention as a batch of virtual requests. Positions are cut into blocks of
 * `attention_chunk`, and queries see keys of their own block alone. So every block of a request in
 * which queries stand is a request of its own. It computes with host integers only.
 */
#include "core/args.h"
#include "core/rule.h"
#include "step/batch.h"

static const char op[] = "local_attention_batches";

/* Where virtual requests go; without arrays they are counted. */
typedef struct batch_writer {
    const smla_local_attention_args *args;
    const smla_local_batches *out;
    int64_t num_batches;
    int64_t num_queries;
} batch_writer;

/* The pages of a block. Columns behind the table's last one repeat it; nothing reads them. */
static void
write_pages(const batch_writer *w, int64_t req, int64_t start)
{
    const smla_local_attention_args *const a = w->args;
    const int64_t columns = a->attention_chunk / a->block_size;
    for (int64_t i = 0; i < columns; i++) {
        const int64_t wanted = start / a->block_size + i;
        const int64_t column = wanted < a->table_width ? wanted : a->table_width - 1;
        w->out->block_table[w->num_batches * columns + i] =
            column < 0 ? 0 : a->block_table[req * a->table_width + column];
    }
}

/* `num_queries` queries of a request over the keys start...start + num_keys - 1. */
static void
add_batch(batch_writer *w, int64_t req, int64_t num_queries, int64_t start, int64_t num_keys)
{
    w->num_queries += num_queries;
    if (w->out->query_lens != NULL) {
        w->out->query_lens[w->num_batches] = (int32_t)num_queries;
        w->out->query_start_loc[w->num_batches + 1] = (int32_t)w->num_queries;
        w->out->seq_lens[w->num_batches] = (int32_t)num_keys;
        write_pages(w, req, start);
    }
    w->num_batches++;
}

/* A request with more queries than tokens is padding: its queries have no key. */
static void
cut_request(batch_writer *w, int64_t req)
{
    const int64_t chunk = w->args->attention_chunk;
    const int64_t num_queries = smla_query_len(w->args->query_start_loc, req);
    const int64_t num_keys = w->args->seq_lens[req];
    if (num_keys < num_queries) {
        add_batch(w, req, num_queries, 0, 0);
        return;
    }
    for (int64_t query = num_keys - num_queries; query < num_keys;) {
        const int64_t start = query / chunk * chunk;
        const int64_t end = start + chunk < num_keys ? start + chunk : num_keys;
        add_batch(w, req, end - query, start, end - start);
        query = end;
    }
}

static smla_status
check_sizes(const smla_local_attention_args *a, smla_error *error)
{
    SMLA_TRY(smla_require_least(op, "block_size", a->block_size, 1, error));
    if (a->attention_chunk < 1 || a->attention_chunk > INT32_MAX ||
        a->attention_chunk % a->block_size != 0) {
        return smla_fail_value(
            error, op,
            "`attention_chunk` must be a multiple of block_size = %lld, 1 to %d, got %lld",
            (long long)a->block_size, INT32_MAX, (long long)a->attention_chunk);
    }
    return SMLA_OK;
}

static smla_status
check_requests(const smla_local_attention_args *a, smla_error *error)
{
    SMLA_TRY(smla_check_query_start_loc(op, a->query_start_loc, a->num_reqs, INT64_MAX, error));
    if (a->num_reqs > 0) {
        SMLA_TRY(smla_require_pointer(op, "seq_lens", a->seq_lens, error));
    }
    if (a->table_width > 0 && a->num_reqs > 0) {
        SMLA_TRY(smla_require_pointer(op, "block_table", a->block_table, error));
    }
    for (int64_t req = 0; req < a->num_reqs; req++) {
        const int64_t len = a->seq_lens[req];
        if (len < 0) {
            return smla_fail_value(error, op, "`seq_lens` must be >= 0, got %lld at request %lld",
                                   (long long)len, (long long)req);
        }
        const int64_t pages = (len + a->block_size - 1) / a->block_size;
        if (pages > a->table_width) {
            return smla_fail_value(error, op,
                                   "`block_table` must have %lld columns for the %lld tokens of "
                                   "request %lld, got %lld",
                                   (long long)pages, (long long)len, (long long)req,
                                   (long long)a->table_width);
        }
    }
    return SMLA_OK;
}

smla_status
smla_local_attention_batches(const smla_local_attention_args *args, const smla_local_batches *out,
                             int64_t *num_batches, smla_error *error)
{
    static const smla_local_batches none = {0};
    smla_local_attention_args known;
    SMLA_TRY(smla_read_args(op, &known, sizeof known, args, error));
    SMLA_TRY(smla_require_pointer(op, "num_batches", num_batches, error));
    if (out != NULL) {
        SMLA_TRY(smla_require_pointer(op, "query_lens", out->query_lens, error));
        SMLA_TRY(smla_require_pointer(op, "query_start_loc", out->query_start_loc, error));
        SMLA_TRY(smla_require_pointer(op, "seq_lens", out->seq_lens, error));
        SMLA_TRY(smla_require_pointer(op, "block_table", out->block_table, error));
    }
    SMLA_TRY(check_sizes(&known, error));
    SMLA_TRY(check_requests(&known, error));
    if (out != NULL) {
        out->query_start_loc[0] = 0;
    }
    batch_writer w = {.args = &known, .out = out == NULL ? &none : out};
    for (int64_t req = 0; req < known.num_reqs; req++) {
        cut_request(&w, req);
    }
    *num_batches = w.num_batches;
    return SMLA_OK;
}
