/* isa.c: the table of instruction sets, the choice among them, and what is true of all of them. */
#define _DEFAULT_SOURCE /* syscall */ // NOLINT(cert-dcl37-c,cert-dcl51-cpp)

#include "cpu/isa.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cpu/attention/mha.h"
#include "cpu/attention/mqa.h"

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

#define DECLARE(kernel, set) extern const struct smla_##kernel##_isa smla_##kernel##_##set;
#define NAMES(set) .name = #set, .is_supported = support_##set, .attention_name = "mqa_" #set ".c"
#define USE(kernel, set) .kernel = &smla_##kernel##_##set,

#if defined(SMLA_HAVE_X86_ISA)
SMLA_AMX_KERNELS(DECLARE)
#elif defined(SMLA_HAVE_ARM_ISA)
SMLA_NEONBF16_KERNELS(DECLARE)
#else
SMLA_BASE_KERNELS(DECLARE)
#endif

/* The fastest entry comes first. In a list of kernels a set's own replace those of smaller sets. */
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Woverride-init"
static const smla_cpu_isa isas[] = {
#if defined(SMLA_HAVE_X86_ISA)
    {NAMES(amx), SMLA_AMX_KERNELS(USE)},
    {NAMES(avx512bf16), .is_slow = is_intel, SMLA_AVX512BF16_KERNELS(USE)},
    {NAMES(avx512), SMLA_AVX512_KERNELS(USE)},
    {NAMES(avx2), SMLA_AVX2_KERNELS(USE)},
#elif defined(SMLA_HAVE_ARM_ISA)
    {NAMES(neonbf16), SMLA_NEONBF16_KERNELS(USE)},
    {NAMES(neon), SMLA_NEON_KERNELS(USE)},
#endif
    {NAMES(base), SMLA_BASE_KERNELS(USE)},
};
#pragma GCC diagnostic pop

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
smla_cpu_attention_scratch_bytes(bool is_mha, const int64_t counts[2])
{
    int64_t most = 0;
    for (int i = 0; i < NUM_ISAS; i++) {
        const smla_attention_scratch *const scratch =
            is_mha ? &isas[i].mha->scratch : &isas[i].mqa->scratch;
        const int64_t bytes =
            scratch->bytes + counts[0] * scratch->bytes_per[0] + counts[1] * scratch->bytes_per[1];
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
            .name = isas[i].attention_name,
            .available = isas[i].is_supported(),
            .selected = &isas[i] == chosen,
        };
    }
    return NUM_ISAS;
}
