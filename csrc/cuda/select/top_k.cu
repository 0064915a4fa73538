/* top_k.cu: top_k_per_row with one CTA per row, for every GPU, and the choice of clusters. The
 * kernel and its seven headings are in top_k.cuh.
 */
#include "cuda/select/top_k_clusters.h"
#include "cuda/select/top_k_launch.cuh"

namespace {

template <bool IS_BF16>
__global__ void
__launch_bounds__(BLOCK_THREADS, 2) top_k_kernel(const __grid_constant__ top_k_args args)
{
    select_rows<IS_BF16, 1>(args);
}

/* How many CTAs share a row: so many that the keys of a CTA leave room for a second one on the SM,
 * and that few rows fill the device. A grid of one wave is worth some keys that do not fit. */
int
choose_ctas(const smla_top_k_params *p, const smla_cuda_device *device)
{
    enum { USUAL_BYTES = 64 << 10, MOST_BYTES = 128 << 10, LEAST_BYTES = 8 << 10 };
    const int64_t bytes = p->num_columns * (p->is_bf16 ? 2 : 4);
    const int64_t room = 2 * (int64_t)device->num_sms; /* CTAs of one wave */
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

/* The CTAs that hold a row in `parts`, of 1024 threads; more than there can be if none do. */
int
count_held_ctas(int64_t keys, int parts)
{
    int ctas = 1;
    while (ctas <= SMLA_MAX_ROW_CTAS && keys > (int64_t)SMLA_HELD_KEYS * 1024 * parts * ctas) {
        ctas *= 2;
    }
    return ctas;
}

/* Whether all rows run at once. The SMs of a cluster are neighbours, so some SMs have no cluster of
 * more than 2: 12 of an H200's 132. */
bool
are_resident(int64_t rows, int ctas, int num_sms)
{
    return rows * ctas <= (ctas > 2 ? num_sms - num_sms / 11 : num_sms);
}

/* Whether rows of up to 32,768 keys take less time if two CTAs share an SM, one of which works
 * while the other waits: 8 % less, unless the last rows then leave more SMs idle. */
bool
are_worth_halves(int64_t rows, int num_sms)
{
    const int64_t rounds = smla_count_parts(rows, num_sms);
    const int64_t double_rounds = smla_count_parts(rows, 2 * num_sms);
    return double_rounds * 2 * 11 <= rounds * 12;
}

/* How clusters hold rows. Rows that all run at once have an SM to each CTA, and as many CTAs as are
 * of use. Of short rows two CTAs share an SM. Of others, threads have twice as many keys, and read
 * what is left. None are held if there are so few short rows that the time is that of barriers, of
 * which the other kernel has less. */
bool
choose_held_plan(const smla_top_k_params *p, const smla_cuda_device *device, smla_held_plan *plan)
{
    enum {
        LEAST_KEYS = 16 << 10, /* a CTA's, where a row could have fewer CTAs */
        FEW_ROWS = 16,
        SHORT_ROW = 60 << 10,
        MOST_ROWS = 1 << 30, /* the kernel counts rows by 32 bits */
    };
    const int64_t keys = count_row_keys(p);
    const int64_t rows = p->num_tokens;
    int ctas = count_held_ctas(keys, 1);
    while (ctas < SMLA_MAX_ROW_CTAS && are_resident(rows, 2 * ctas, device->num_sms) &&
           keys / (2 * ctas) >= LEAST_KEYS) {
        ctas *= 2;
    }
    const bool are_short = keys <= SMLA_HELD_KEYS * 1024;
    if (keys <= SMLA_HELD_KEYS * 512) {
        *plan = (smla_held_plan){1, 512, 1};
    } else if (ctas <= SMLA_MAX_ROW_CTAS && are_resident(rows, ctas, device->num_sms)) {
        *plan = (smla_held_plan){ctas, 1024, 1};
    } else if (are_short) {
        const bool have_halves = are_worth_halves(rows, device->num_sms);
        *plan = have_halves ? (smla_held_plan){1, 512, 2} : (smla_held_plan){1, 1024, 1};
    } else {
        const int most = count_held_ctas(keys, 2);
        *plan = most <= SMLA_MAX_ROW_CTAS ? (smla_held_plan){most, 1024, 2}
                                          : (smla_held_plan){SMLA_MAX_ROW_CTAS, 1024, 3};
    }
    return rows <= MOST_ROWS && (rows >= FEW_ROWS || keys > SHORT_ROW);
}

} // namespace

cudaError_t
smla_cuda_launch_top_k_per_row(const smla_top_k_params *p, const smla_cuda_device *device)
{
    static uint64_t allowed[2];
    const bool is_hopper = smla_cuda_is_hopper(device);
    const int ctas = is_hopper ? choose_ctas(p, device) : 1;
    smla_held_plan plan;
    if (is_hopper && choose_held_plan(p, device, &plan)) {
        return smla_cuda_launch_top_k_held(p, plan);
    }
    if (ctas > 1) {
        return smla_cuda_launch_top_k_clusters(p, ctas);
    }
    return p->is_bf16 ? launch_top_k(top_k_kernel<true>, p, 1, &allowed[1])
                      : launch_top_k(top_k_kernel<false>, p, 1, &allowed[0]);
}
