/* top_k.cu: top_k_per_row with one CTA per row, for every GPU, and the choice of clusters. The
 * kernel and its seven headings are in top_k.cuh.
 */
#include "cuda/topk/top_k_launch.cuh"

namespace {

template <bool IS_BF16>
__global__ void
__launch_bounds__(BLOCK_THREADS, 2) top_k_kernel(const __grid_constant__ top_k_args args)
{
    select_rows<IS_BF16, 1>(args);
}

/* How many CTAs share a row: so many that the keys of a CTA leave room for a second CTA on the SM,
 * and so many that a few rows fill the device. A grid of one wave is worth more than room for the
 * last of the keys. */
int
choose_ctas(const smla_top_k_params *p, const smla_cuda_device *device)
{
    enum { USUAL_BYTES = 64 << 10, MOST_BYTES = 128 << 10, LEAST_BYTES = 8 << 10 };
    const int64_t bytes = p->num_columns * (p->is_bf16 ? 2 : 4);
    const int64_t room = 2 * (int64_t)device->num_sms; /* number of CTAs in one wave */
    const int64_t rows = p->num_tokens;
    int ctas = 1;
    while (ctas < SMLA_MAX_ROW_CTAS && bytes / ctas > USUAL_BYTES) {
        ctas *= 2;
    }
    if (ctas > 1 && rows * ctas > room && rows * ctas / 2 <= room &&
        bytes / (ctas / 2) <= MOST_BYTES) {
        ctas /= 2;
    }
    while (ctas < SMLA_MAX_ROW_CTAS && rows * ctas * 2 <= room &&
           bytes / (2 * ctas) >= LEAST_BYTES) {
        ctas *= 2;
    }
    return ctas;
}

/* The number of CTAs of 1024 threads in which a row of `keys` is resident in `parts`. The result is
 * more than SMLA_MAX_ROW_CTAS if no number suffices. */
int
count_resident_ctas(int64_t keys, int parts)
{
    int ctas = 1;
    while (ctas <= SMLA_MAX_ROW_CTAS && keys > (int64_t)SMLA_RESIDENT_KEYS * 1024 * parts * ctas) {
        ctas *= 2;
    }
    return ctas;
}

/* Whether all rows run at once. The SMs of a cluster are neighbours, so some SMs have no cluster of
 * more than 2 CTAs: 12 of an H200's 132. */
bool
run_at_once(int64_t rows, int ctas, int num_sms)
{
    return rows * ctas <= (ctas > 2 ? num_sms - num_sms / 11 : num_sms);
}

/* Whether rows of up to 32,768 keys take less time if two CTAs share an SM and one works while the
 * other waits. They take 8 % less, unless more SMs are then idle in the last round. */
bool
are_worth_halves(int64_t rows, int num_sms)
{
    const int64_t rounds = smla_count_parts(rows, num_sms);
    const int64_t double_rounds = smla_count_parts(rows, 2 * num_sms);
    return double_rounds * 2 * 11 <= rounds * 12;
}

/* Chooses how rows are resident in clusters; returns false where the other kernel is faster. If all
 * rows run at once, each CTA has an SM to itself, and rows get as many CTAs as are of use. If they
 * do not, two CTAs share an SM for short rows. For long rows each thread has twice as many keys,
 * and reads those that do not fit. The other kernel is faster for a few short rows, because their
 * time is that of barriers, of which it has less. */
bool
choose_resident_plan(const smla_top_k_params *p, const smla_cuda_device *device,
                     smla_resident_plan *plan)
{
    enum {
        LEAST_KEYS = 16 << 10, /* keys per CTA, where a row could also have fewer CTAs */
        FEW_ROWS = 16,
        SHORT_ROW = 60 << 10,
        MOST_ROWS = 1 << 30, /* the kernel counts rows in 32 bits */
    };
    const int64_t keys = count_row_keys(p);
    const int64_t rows = p->num_tokens;
    int ctas = count_resident_ctas(keys, 1);
    while (ctas < SMLA_MAX_ROW_CTAS && run_at_once(rows, 2 * ctas, device->num_sms) &&
           keys / (2 * ctas) >= LEAST_KEYS) {
        ctas *= 2;
    }
    const bool are_short = keys <= SMLA_RESIDENT_KEYS * 1024;
    if (keys <= SMLA_RESIDENT_KEYS * 512) {
        *plan = (smla_resident_plan){1, 512, 1};
    } else if (ctas <= SMLA_MAX_ROW_CTAS && run_at_once(rows, ctas, device->num_sms)) {
        *plan = (smla_resident_plan){ctas, 1024, 1};
    } else if (are_short) {
        const bool have_halves = are_worth_halves(rows, device->num_sms);
        *plan = have_halves ? (smla_resident_plan){1, 512, 2} : (smla_resident_plan){1, 1024, 1};
    } else {
        const int most = count_resident_ctas(keys, 2);
        *plan = most <= SMLA_MAX_ROW_CTAS ? (smla_resident_plan){most, 1024, 2}
                                          : (smla_resident_plan){SMLA_MAX_ROW_CTAS, 1024, 3};
    }
    return rows <= MOST_ROWS && (rows >= FEW_ROWS || keys > SHORT_ROW);
}

} // namespace

cudaError_t
smla_cuda_launch_top_k_per_row(const smla_top_k_params *p, const smla_cuda_device *device)
{
    const bool is_hopper = smla_cuda_is_hopper(device);
    const int ctas = is_hopper ? choose_ctas(p, device) : 1;
    smla_resident_plan plan;
    if (is_hopper && choose_resident_plan(p, device, &plan)) {
        return smla_cuda_launch_top_k_resident(p, plan);
    }
    if (ctas > 1) {
        return smla_cuda_launch_top_k_clusters(p, ctas);
    }
    return p->is_bf16 ? launch_top_k<top_k_kernel<true>>(p, 1)
                      : launch_top_k<top_k_kernel<false>>(p, 1);
}
