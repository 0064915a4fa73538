/* context.c: cuts the cached context of prefills into chunks that fit a workspace. It computes with
 * host integers only.
 */
#include "core/args.h"
#include "core/rule.h"
#include "step/chunks.h"

enum { MODEL_LENGTHS = 8, PAGES_PER_REQUEST = 4, MOST_TOKENS = 65536 };

int64_t
smla_context_workspace_size(int64_t max_model_len, int64_t max_num_seqs, int64_t block_size)
{
    const int64_t least = max_num_seqs * block_size;
    /* Four times that may be more than an int64 holds, but counts only up to MOST_TOKENS. */
    const int64_t pages = PAGES_PER_REQUEST * (least < MOST_TOKENS ? least : MOST_TOKENS);
    int64_t tokens = MODEL_LENGTHS * max_model_len;
    tokens = tokens > pages ? tokens : pages;
    tokens = tokens < MOST_TOKENS ? tokens : MOST_TOKENS;
    tokens = tokens > least ? tokens : least;
    return (tokens + block_size - 1) / block_size * block_size;
}

/* What a plan writes. Without `chunks` it only counts. */
typedef struct context_writer {
    smla_context_chunk *chunks;
    int32_t *starts;
    int32_t *lens;
    int64_t num_chunks;
    int64_t num_entries;
    smla_context_chunk open; /* the chunk that entries go to */
} context_writer;

static void
open_chunk(context_writer *w, int64_t req)
{
    w->open = (smla_context_chunk){.req_start = req, .req_end = req, .first = w->num_entries};
}

/* Adds rows of the chunk's next request. */
static void
add_rows(context_writer *w, int64_t start, int64_t len)
{
    if (w->chunks != NULL) {
        w->starts[w->num_entries] = (int32_t)start;
        w->lens[w->num_entries] = (int32_t)len;
    }
    w->num_entries++;
    w->open.req_end++;
    w->open.num_tokens += len;
    w->open.max_len = len > w->open.max_len ? len : w->open.max_len;
}

/* Ends the open chunk, if it has rows. */
static void
close_chunk(context_writer *w)
{
    if (w->open.num_tokens == 0) {
        return;
    }
    if (w->chunks != NULL) {
        w->chunks[w->num_chunks] = w->open;
    }
    w->num_chunks++;
}

/* ---- Plans --------------------------------------------------------------------------------- */

/* Every chunk has the same rows of every request: those from c * size on. */
static smla_status
split_equally(const char *op, const smla_context_args *args, context_writer *w, smla_error *error)
{
    int64_t longest = 0;
    int64_t count = 0;
    for (int64_t req = 0; req < args->num_prefills; req++) {
        const int32_t context = args->context_lens[req];
        longest = context > longest ? context : longest;
        count += context > 0;
    }
    if (count == 0) {
        return SMLA_OK;
    }
    const int64_t size = args->workspace_tokens / count / args->block_size * args->block_size;
    if (size == 0) {
        return smla_fail_value(error, op,
                               "`workspace_tokens` must have a page of %lld tokens for each of "
                               "%lld prefills with context, got %lld",
                               (long long)args->block_size, (long long)count,
                               (long long)args->workspace_tokens);
    }
    for (int64_t start = 0; start < longest; start += size) {
        open_chunk(w, 0);
        for (int64_t req = 0; req < args->num_prefills; req++) {
            const int64_t rest = args->context_lens[req] - start;
            add_rows(w, start, rest < 0 ? 0 : rest < size ? rest : size);
        }
        close_chunk(w);
    }
    return SMLA_OK;
}

/* Whether a prefill is one of those that do not change how the others are cut. */
static bool
has_no_query(const int32_t *query_start_loc, int64_t req)
{
    return query_start_loc != NULL && smla_query_len(query_start_loc, req) == 0;
}

/* Each chunk is filled, request after request. A request that does not fit is cut at a page. */
static smla_status
pack(const char *op, const smla_context_args *args, const int32_t *query_start_loc,
     context_writer *w, smla_error *error)
{
    const int64_t page = args->block_size;
    if (args->workspace_tokens < page) {
        return smla_fail_value(
            error, op, "`workspace_tokens` must be at least a page of %lld tokens, got %lld",
            (long long)page, (long long)args->workspace_tokens);
    }
    open_chunk(w, 0);
    for (int64_t req = 0; req < args->num_prefills; req++) {
        int64_t start = 0;
        int64_t rest = args->context_lens[req];
        while (rest > args->workspace_tokens - w->open.num_tokens) {
            const int64_t pages = (args->workspace_tokens - w->open.num_tokens) / page;
            const int64_t most = (rest - 1) / page;
            const int64_t cut = (pages < most ? pages : most) * page;
            if (cut > 0) {
                add_rows(w, start, cut);
            }
            close_chunk(w);
            open_chunk(w, req);
            start += cut;
            rest -= cut;
        }
        if (rest > 0) {
            add_rows(w, start, rest);
        } else if (has_no_query(query_start_loc, req) && w->open.num_tokens > 0) {
            add_rows(w, 0, 0); /* the chunk's requests stay neighbours */
        } else { /* a request without context ends the chunk, because it takes no part in merges */
            close_chunk(w);
            open_chunk(w, req + 1);
        }
    }
    close_chunk(w);
    return SMLA_OK;
}

/* ---- Entry --------------------------------------------------------------------------------- */

static smla_status
check_context(const char *op, const smla_context_args *args, smla_error *error)
{
    if (args->num_prefills > 0) {
        SMLA_TRY(smla_require_pointer(op, "context_lens", args->context_lens, error));
    }
    SMLA_TRY(smla_require_least(op, "block_size", args->block_size, 1, error));
    SMLA_TRY(
        smla_require_count(op, "workspace_tokens", args->workspace_tokens, 0, INT32_MAX, error));
    if (args->plan != SMLA_CONTEXT_EQUAL && args->plan != SMLA_CONTEXT_PACKED) {
        return smla_fail_value(error, op, "`plan` must be 0 or 1, got %d", (int)args->plan);
    }
    for (int64_t req = 0; req < args->num_prefills; req++) {
        if (args->context_lens[req] < 0) {
            return smla_fail_value(error, op, "`context_lens` must be >= 0, got %d at request %lld",
                                   args->context_lens[req], (long long)req);
        }
    }
    return SMLA_OK;
}

smla_status
smla_cut_context(const char *op, const smla_context_args *args, const int32_t *query_start_loc,
                 smla_context_chunk *chunks, int32_t *starts, int32_t *lens, int64_t *num_chunks,
                 int64_t *num_entries, smla_error *error)
{
    context_writer w = {.chunks = chunks, .starts = starts, .lens = lens};
    SMLA_TRY(args->plan == SMLA_CONTEXT_EQUAL ? split_equally(op, args, &w, error)
                                              : pack(op, args, query_start_loc, &w, error));
    *num_chunks = w.num_chunks;
    *num_entries = w.num_entries;
    return SMLA_OK;
}

smla_status
smla_split_context_chunks(const smla_context_args *args, smla_context_chunk *chunks,
                          int32_t *starts, int32_t *lens, int64_t *num_chunks, int64_t *num_entries,
                          smla_error *error)
{
    static const char op[] = "split_context_chunks";
    smla_context_args known;
    SMLA_TRY(smla_read_args(op, &known, sizeof known, args, error));
    SMLA_TRY(smla_require_pointer(op, "num_chunks", num_chunks, error));
    SMLA_TRY(smla_require_pointer(op, "num_entries", num_entries, error));
    if (chunks != NULL) {
        SMLA_TRY(smla_require_pointer(op, "starts", starts, error));
        SMLA_TRY(smla_require_pointer(op, "lens", lens, error));
    }
    SMLA_TRY(check_context(op, &known, error));
    return smla_cut_context(op, &known, NULL, chunks, starts, lens, num_chunks, num_entries, error);
}
