/* isa.c: the table of instruction sets, the choice among them, and what is true of all of them. */
#define _DEFAULT_SOURCE /* syscall */ // NOLINT(cert-dcl37-c,cert-dcl51-cpp)

#include "cpu/isa.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cpu/attention/attention.h"
#include "cpu/cache/cache.h"
#include "cpu/index/slot.h"
#include "cpu/indexer/score_tiles.h"
#include "cpu/norm/norm.h"
#include "cpu/projection/projection.h"
#include "cpu/rope/rotate.h"
#include "cpu/topk/select.h"
#include "cpu/varlen/varlen.h"

#if defined(SMLA_HAVE_X86_ISA)
#include <cpuid.h>
#include <stdatomic.h>
#include <sys/syscall.h>
#include <unistd.h>
#elif defined(SMLA_HAVE_ARM_ISA)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

static bool
support_base(void)
{
    return true;
}

#if defined(SMLA_HAVE_X86_ISA)
/* Every processor with AVX2 has F16C, too. */
static bool
support_avx2(void)
{
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
}

static bool
support_avx512(void)
{
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("fma");
}

static bool
support_avx512bf16(void)
{
    return support_avx512() && __builtin_cpu_supports("avx512vbmi") &&
           __builtin_cpu_supports("avx512bf16");
}

/* On Intel's cores pairs of bf16 took 1.2 to 1.7 times as long as fp32. This matters only without
 * AMX, whose entry comes first. */
static bool
is_intel(void)
{
    return __builtin_cpu_is("intel");
}

/* Linux keeps room for a thread's tiles only in processes that have asked for it. */
static bool
request_tiles(void)
{
    enum { REQUEST_PERMISSION = 0x1023, TILE_DATA = 18 }; /* asm/prctl.h, since Linux 5.16 */
    return syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
}

/* The answer is kept, because it never changes. Two threads that ask at the same time find the same
 * answer. */
static bool
support_amx(void)
{
    enum { UNKNOWN, YES, NO };
    static atomic_int answer = UNKNOWN;
    if (atomic_load(&answer) == UNKNOWN) {
        const unsigned amx = 1u << 22 | 1u << 24; /* AMX-BF16, AMX-TILE */
        unsigned eax, ebx, ecx, edx = 0;
        const bool has_amx =
            __get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) != 0 && (edx & amx) == amx;
        atomic_store(&answer, support_avx512bf16() && has_amx && request_tiles() ? YES : NO);
    }
    return atomic_load(&answer) == YES;
}
#elif defined(SMLA_HAVE_ARM_ISA)
static bool
support_neon(void)
{
    return (getauxval(AT_HWCAP) & HWCAP_ASIMD) != 0;
}

static bool
support_neonbf16(void)
{
    return support_neon() && (getauxval(AT_HWCAP2) & HWCAP2_BF16) != 0;
}
#endif

/* The fastest entry comes first.
 *
 * On machines with AVX-512 rows are converted in vectors of AVX2, too, because bytes_avx2.h has no
 * conversions of 16 lanes; they are 1.2 to 1.8 times as fast on a Sapphire Rapids (RESULTS.md). */
static const smla_cpu_isa isas[] = {
#if defined(SMLA_HAVE_X86_ISA)
    {.name = "amx",
     .is_supported = support_amx,
     .attention = &smla_attention_amx,
     .attention_source = "attention_amx.c",
     .projection = &smla_projection_avx512bf16,
     .cache = &smla_cache_avx512,
     .norm = &smla_norm_avx512,
     .rotate = &smla_rotate_avx2,
     .select = &smla_select_avx512,
     .logits = &smla_logits_avx512,
     .slots = &smla_slots_avx512,
     .varlen = &smla_varlen_amx},
    {.name = "avx512bf16",
     .is_supported = support_avx512bf16,
     .is_slow = is_intel,
     .attention = &smla_attention_avx512bf16,
     .attention_source = "attention_avx512bf16.c",
     .projection = &smla_projection_avx512bf16,
     .cache = &smla_cache_avx512,
     .norm = &smla_norm_avx512,
     .rotate = &smla_rotate_avx2,
     .select = &smla_select_avx512,
     .logits = &smla_logits_avx512,
     .slots = &smla_slots_avx512,
     .varlen = &smla_varlen_avx512bf16},
    {.name = "avx512",
     .is_supported = support_avx512,
     .attention = &smla_attention_avx512,
     .attention_source = "attention_avx512.c",
     .projection = &smla_projection_avx512,
     .cache = &smla_cache_avx512,
     .norm = &smla_norm_avx512,
     .rotate = &smla_rotate_avx2,
     .select = &smla_select_avx512,
     .logits = &smla_logits_avx512,
     .slots = &smla_slots_avx512,
     .varlen = &smla_varlen_avx512},
    {.name = "avx2",
     .is_supported = support_avx2,
     .attention = &smla_attention_avx2,
     .attention_source = "attention_avx2.c",
     .projection = &smla_projection_avx2,
     .cache = &smla_cache_avx2,
     .norm = &smla_norm_avx2,
     .rotate = &smla_rotate_avx2,
     .select = &smla_select_avx2,
     .logits = &smla_logits_avx2,
     .slots = &smla_slots_avx2,
     .varlen = &smla_varlen_avx2},
#elif defined(SMLA_HAVE_ARM_ISA)
    {.name = "neonbf16",
     .is_supported = support_neonbf16,
     .attention = &smla_attention_neonbf16,
     .attention_source = "attention_neonbf16.c",
     .projection = &smla_projection_neonbf16,
     .cache = &smla_cache_base,
     .norm = &smla_norm_base,
     .rotate = &smla_rotate_base,
     .select = &smla_select_base,
     .logits = &smla_logits_base,
     .slots = &smla_slots_base,
     .varlen = &smla_varlen_neonbf16},
    {.name = "neon",
     .is_supported = support_neon,
     .attention = &smla_attention_neon,
     .attention_source = "attention_neon.c",
     .projection = &smla_projection_neon,
     .cache = &smla_cache_base,
     .norm = &smla_norm_base,
     .rotate = &smla_rotate_base,
     .select = &smla_select_base,
     .logits = &smla_logits_base,
     .slots = &smla_slots_base,
     .varlen = &smla_varlen_neon},
#endif
    {.name = "base",
     .is_supported = support_base,
     .attention = &smla_attention_base,
     .attention_source = "attention_base.c",
     .projection = &smla_projection_base,
     .cache = &smla_cache_base,
     .norm = &smla_norm_base,
     .rotate = &smla_rotate_base,
     .select = &smla_select_base,
     .logits = &smla_logits_base,
     .slots = &smla_slots_base,
     .varlen = &smla_varlen_base},
};

enum { NUM_ISAS = sizeof isas / sizeof isas[0] };

smla_status
smla_cpu_choose_isa(const char *op, const smla_cpu_isa **chosen, smla_error *error)
{
    const char *const forced = getenv("SPARSE_MLA_CPU_ISA");
    const bool is_forced = forced != NULL && forced[0] != '\0';
    char choices[128] = "";
    size_t length = 0;
    for (int i = 0; i < NUM_ISAS; i++) {
        const smla_cpu_isa *const isa = &isas[i];
        if (!isa->is_supported()) {
            continue;
        }
        const bool is_slow = isa->is_slow != NULL && isa->is_slow();
        if (is_forced ? strcmp(forced, isa->name) == 0 : !is_slow) {
            *chosen = isa;
            return SMLA_OK;
        }
        length += (size_t)snprintf(choices + length, sizeof choices - length, "%s%s",
                                   length > 0 ? ", " : "", isa->name);
    }
    return smla_fail(error, SMLA_ERROR_VALUE,
                     "%s: environment variable `SPARSE_MLA_CPU_ISA` must be one of %s on this "
                     "machine, got %.32s",
                     op, choices, forced);
}

int64_t
smla_cpu_attention_scratch_bytes(int64_t num_heads)
{
    int64_t most = 0;
    for (int i = 0; i < NUM_ISAS; i++) {
        const int64_t bytes = smla_attention_scratch_bytes(&isas[i].attention->scratch, num_heads);
        most = bytes > most ? bytes : most;
    }
    return most;
}

int64_t
smla_cpu_varlen_scratch_bytes(const smla_attention_params *params)
{
    int64_t most = 0;
    for (int i = 0; i < NUM_ISAS; i++) {
        const int64_t bytes = smla_varlen_scratch_bytes(&isas[i].varlen->scratch, params);
        most = bytes > most ? bytes : most;
    }
    return most;
}

int64_t
smla_cpu_kernels(smla_kernel_info *rows, int64_t capacity)
{
    const smla_cpu_isa *chosen = NULL;
    (void)smla_cpu_choose_isa("kernels", &chosen, NULL);
    for (int i = 0; i < NUM_ISAS && i < capacity; i++) {
        rows[i] = (smla_kernel_info){
            .device = "cpu",
            .arch = isas[i].name,
            .kv_format = "fp8_ds_mla, bfloat16, any of 512 values",
            .heads = "1...128",
            .name = isas[i].attention_source,
            .available = isas[i].is_supported(),
            .selected = &isas[i] == chosen,
        };
    }
    return NUM_ISAS;
}
