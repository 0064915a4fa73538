/* chunks.c: cuts prefills into chunks that share a workspace, whether they have their cache rows or
 * their context there. It computes with host integers only.
 */
#include "step/chunks.h"

#include "core/args.h"
#include "core/rule.h"

/* ---- Workspaces ---------------------------------------------------------------------------- */

enum { PREFILL_MODEL_LENGTHS = 5 };
enum { MODEL_LENGTHS = 8, PAGES_PER_REQUEST = 4, MOST_TOKENS = 65536 };

int64_t
smla_prefill_workspace_size(int64_t max_model_len)
{
    int64_t tokens;
    return __builtin_mul_overflow(PREFILL_MODEL_LENGTHS, max_model_len, &tokens) ? INT64_MAX
                                                                                 : tokens;
}

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

/* ---- A list of chunks ---------------------------------------------------------------------- */

typedef struct chunk_writer {
    const smla_prefills *prefills;
    smla_chunk_list *list;
    smla_context_chunk open; /* the chunk that parts go to */
    int64_t used;            /* room of the workspace that it takes */
} chunk_writer;

static void
open_chunk(chunk_writer *w, int64_t req)
{
    w->open = (smla_context_chunk){.req_start = req, .req_end = req, .first = w->list->num_parts};
    w->used = 0;
}

/* What `num_rows` rows of one prefill take of the workspace. */
static int64_t
room_for(const smla_prefills *p, int64_t num_rows)
{
    return p->counts_requests && num_rows > 0 ? 1 : num_rows;
}

/* Adds rows of the chunk's next prefill. */
static void
add_rows(chunk_writer *w, int64_t start, int64_t num_rows)
{
    smla_chunk_list *const list = w->list;
    if (list->parts != NULL) {
        list->starts[list->num_parts] = (int32_t)start;
        list->lens[list->num_parts] = (int32_t)num_rows;
    }
    list->num_parts += w->prefills->counts_requests && num_rows == 0 ? 0 : 1;
    w->open.req_end++;
    w->open.num_tokens += num_rows;
    w->open.max_len = num_rows > w->open.max_len ? num_rows : w->open.max_len;
    w->used += room_for(w->prefills, num_rows);
}

/* Ends the open chunk, if it has prefills. */
static void
close_chunk(chunk_writer *w)
{
    const smla_context_chunk *const open = &w->open;
    if (open->req_end == open->req_start) {
        return;
    }
    const int64_t i = w->list->num_chunks++;
    if (w->list->ends != NULL) {
        w->list->ends[i] = open->req_end;
    }
    if (w->list->parts != NULL) {
        w->list->parts[i] = *open;
    }
    if (w->list->chunks != NULL) {
        const int32_t *const starts = w->prefills->query_start_loc;
        w->list->chunks[i] = (smla_prefill_chunk){.req_start = open->req_start,
                                                  .req_end = open->req_end,
                                                  .token_start = starts[open->req_start],
                                                  .token_end = starts[open->req_end],
                                                  .tot_seqlen = open->num_tokens};
    }
}

/* ---- Cuts ---------------------------------------------------------------------------------- */

/* Every chunk has the same rows of every prefill: those from c * size on. */
static smla_status
cut_equally(const char *op, const smla_prefills *p, chunk_writer *w, smla_error *error)
{
    int64_t longest = 0;
    int64_t count = 0;
    for (int64_t req = 0; req < p->num_prefills; req++) {
        longest = p->lens[req] > longest ? p->lens[req] : longest;
        count += p->lens[req] > 0;
    }
    if (count == 0) {
        return SMLA_OK;
    }
    const int64_t size = p->workspace_tokens / count / p->block_size * p->block_size;
    if (size == 0) {
        return smla_fail_value(
            error, op,
            "`workspace_tokens` must have a page of %lld tokens for each of %lld prefills "
            "with context, got %lld",
            (long long)p->block_size, (long long)count, (long long)p->workspace_tokens);
    }
    for (int64_t start = 0; start < longest; start += size) {
        open_chunk(w, 0);
        for (int64_t req = 0; req < p->num_prefills; req++) {
            const int64_t rest = p->lens[req] - start;
            add_rows(w, start, rest < 0 ? 0 : rest < size ? rest : size);
        }
        close_chunk(w);
    }
    return SMLA_OK;
}

/* The rows of a prefill that does not fit which the open chunk still takes. */
static int64_t
find_cut(const chunk_writer *w, int64_t rest)
{
    const int64_t page = w->prefills->block_size;
    if (page == 0) {
        return 0;
    }
    const int64_t pages = (w->prefills->workspace_tokens - w->used) / page;
    const int64_t most = (rest - 1) / page;
    return (pages < most ? pages : most) * page;
}

/* Whether a prefill without rows belongs to the open chunk, so that the chunk's prefills stay
 * neighbours. One without query tokens does not change how the others are cut. But one without
 * context ends the chunk, because it takes no part in merges. */
static bool
joins_without_rows(const chunk_writer *w, int64_t req)
{
    const int32_t *const starts = w->prefills->query_start_loc;
    return w->prefills->block_size == 0 ||
           (w->used > 0 && starts != NULL && smla_query_len(starts, req) == 0);
}

/* Each chunk is filled, prefill after prefill. */
static void
pack(const smla_prefills *p, chunk_writer *w)
{
    open_chunk(w, 0);
    for (int64_t req = 0; req < p->num_prefills; req++) {
        int64_t start = 0;
        int64_t rest = p->lens[req];
        while (room_for(p, rest) > p->workspace_tokens - w->used) {
            const int64_t cut = find_cut(w, rest);
            if (cut > 0) {
                add_rows(w, start, cut);
            }
            close_chunk(w);
            open_chunk(w, req);
            start += cut;
            rest -= cut;
        }
        if (rest > 0 || joins_without_rows(w, req)) {
            add_rows(w, start, rest);
        } else {
            close_chunk(w);
            open_chunk(w, req + 1);
        }
    }
    close_chunk(w);
}

/* Prefills that stay whole must fit the workspace one by one. */
static smla_status
require_fit(const char *op, const smla_prefills *p, smla_error *error)
{
    for (int64_t req = 0; req < p->num_prefills; req++) {
        const int64_t len = p->lens[req];
        if (len < 0) {
            return smla_fail_value(error, op, "`seq_lens` must be >= 0, got %lld at request %lld",
                                   (long long)len, (long long)(p->first_req + req));
        }
        if (room_for(p, len) > p->workspace_tokens) {
            return smla_fail_value(
                error, op,
                "`seq_lens` must fit the workspace of %lld tokens one by one, got %lld "
                "at request %lld (raise prefill_workspace_tokens)",
                (long long)p->workspace_tokens, (long long)len, (long long)(p->first_req + req));
        }
    }
    return SMLA_OK;
}

smla_status
smla_cut_prefills(const char *op, const smla_prefills *p, smla_chunk_list *list, smla_error *error)
{
    chunk_writer w = {.prefills = p, .list = list};
    if (p->are_cut_equally) {
        return cut_equally(op, p, &w, error);
    }
    if (p->block_size == 0) {
        SMLA_TRY(require_fit(op, p, error));
    } else if (p->workspace_tokens < p->block_size) {
        return smla_fail_value(
            error, op, "`workspace_tokens` must be at least a page of %lld tokens, got %lld",
            (long long)p->block_size, (long long)p->workspace_tokens);
    }
    pack(p, &w);
    return SMLA_OK;
}

/* ---- Entries ------------------------------------------------------------------------------- */

smla_status
smla_split_prefill_chunks(const int32_t *seq_lens, int64_t num_reqs, int64_t workspace_tokens,
                          int64_t *ends, int64_t *num_chunks, smla_error *error)
{
    static const char op[] = "split_prefill_chunks";
    if (num_reqs > 0) {
        SMLA_TRY(smla_require_pointer(op, "seq_lens", seq_lens, error));
        SMLA_TRY(smla_require_pointer(op, "ends", ends, error));
    }
    SMLA_TRY(smla_require_pointer(op, "num_chunks", num_chunks, error));
    SMLA_TRY(smla_require_least(op, "workspace_tokens", workspace_tokens, 0, error));
    const smla_prefills prefills = {.lens = seq_lens,
                                    .num_prefills = num_reqs,
                                    .workspace_tokens = workspace_tokens};
    smla_chunk_list list = {.ends = ends};
    SMLA_TRY(smla_cut_prefills(op, &prefills, &list, error));
    *num_chunks = list.num_chunks;
    return SMLA_OK;
}

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
    const smla_prefills prefills = {.lens = known.context_lens,
                                    .num_prefills = known.num_prefills,
                                    .workspace_tokens = known.workspace_tokens,
                                    .block_size = known.block_size,
                                    .are_cut_equally = known.plan == SMLA_CONTEXT_EQUAL};
    smla_chunk_list list = {.parts = chunks, .starts = starts, .lens = lens};
    SMLA_TRY(smla_cut_prefills(op, &prefills, &list, error));
    *num_chunks = list.num_chunks;
    *num_entries = list.num_parts;
    return SMLA_OK;
}
