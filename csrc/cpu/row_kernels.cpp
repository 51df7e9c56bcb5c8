#include "cpu/row_kernels.h"

#include <bit>

#include "cpu/row_kernels_tables.h"
#include "layout/wire_format.h"

#if defined(__x86_64__)
#include <cpuid.h>
#include <xmmintrin.h>
#elif !defined(__aarch64__)
#include <cfenv>
#endif

namespace moe::cpu {
namespace {

static_assert(std::endian::native == std::endian::little, "rows are read as little-endian words");

struct Tables {
  const RowKernels* row_kernels;
  const RoofKernels* roof_kernels;
};

constexpr Tables kPortable{&kPortableRowKernels, &kPortableRoofKernels};

#if defined(__x86_64__)
constexpr Tables kAvx2{&kAvx2RowKernels, &kAvx2RoofKernels};
constexpr Tables kAvx512{&kAvx512RowKernels, &kAvx512RoofKernels};

bool has_avx2() {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  const bool has_f16c = __get_cpuid(1, &eax, &ebx, &ecx, &edx) && (ecx & bit_F16C) != 0;
  return has_f16c && __builtin_cpu_supports("avx2");
}

bool has_avx512() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
}
#endif

const Tables* find_tables(std::string_view name) {
  if (name == "portable")
    return &kPortable;
#if defined(__x86_64__)
  if (name == "avx2" && has_avx2())
    return &kAvx2;
  if (name == "avx512" && has_avx512())
    return &kAvx512;
#endif
  return nullptr;
}

#if defined(__aarch64__)
uint64_t read_fpcr() {
  uint64_t value = 0;
  asm volatile("mrs %0, fpcr" : "=r"(value));
  return value;
}

void write_fpcr(uint64_t value) {
  asm volatile("msr fpcr, %0" ::"r"(value));
}
#endif

}  // namespace

bool can_quantize(const layout::WireFormat& format, layout::ScaleFormat scale) {
  return format.is_e4m3(scale) && (format.block == 32 || format.block == 64 || format.block == 128);
}

RowQuantization row_quantization(const layout::WireFormat& format,
                                 layout::ScaleFormat scale,
                                 DType dtype,
                                 int64_t hidden) {
  return {dtype, format.block, format.least_amax, scale, hidden};
}

const RowKernels* find_row_kernels(std::string_view name) {
  const Tables* tables = find_tables(name);
  return tables ? tables->row_kernels : nullptr;
}

const RoofKernels* find_roof_kernels(std::string_view name) {
  const Tables* tables = find_tables(name);
  return tables ? tables->roof_kernels : nullptr;
}

#if defined(__x86_64__)

FloatingPointScope::FloatingPointScope() : saved_(_mm_getcsr()) {
  constexpr unsigned kFlushToZero = 1u << 15;
  constexpr unsigned kDenormalsAreZero = 1u << 6;
  constexpr unsigned kRounding = 3u << 13;
  _mm_setcsr(static_cast<unsigned>(saved_) & ~(kFlushToZero | kDenormalsAreZero | kRounding));
}

FloatingPointScope::~FloatingPointScope() {
  _mm_setcsr(static_cast<unsigned>(saved_));
}

#elif defined(__aarch64__)

FloatingPointScope::FloatingPointScope() : saved_(read_fpcr()) {
  constexpr uint64_t kFlushToZero = 1u << 24;
  constexpr uint64_t kFlushInputsToZero = 1u << 0;
  constexpr uint64_t kRounding = 3u << 22;
  write_fpcr(saved_ & ~(kFlushToZero | kFlushInputsToZero | kRounding));
}

FloatingPointScope::~FloatingPointScope() {
  write_fpcr(saved_);
}

#else

FloatingPointScope::FloatingPointScope() : saved_(static_cast<uint64_t>(std::fegetround())) {
  std::fesetround(FE_TONEAREST);
}

FloatingPointScope::~FloatingPointScope() {
  std::fesetround(static_cast<int>(saved_));
}

#endif

}  // namespace moe::cpu
