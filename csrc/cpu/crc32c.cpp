#include "cpu/crc32c.h"

#include <array>
#include <bit>
#include <cstring>

#include "cpu/crc32c_fold.h"

#if defined(__aarch64__)
#include <sys/auxv.h>
#endif

namespace moe::cpu {
namespace {

static_assert(std::endian::native == std::endian::little, "bytes are read as little-endian words");

// The register of a checksum holds the remainder with its bits reversed; what is handed out is its
// complement.
constexpr uint32_t kPolynomial = 0x82F63B78;

using ByteTable = std::array<uint32_t, 256>;

constexpr ByteTable make_byte_table() {
  ByteTable table{};
  for (uint32_t value = 0; value < 256; ++value) {
    uint32_t crc = value;
    for (int bit = 0; bit < 8; ++bit)
      crc = (crc >> 1) ^ ((crc & 1) != 0 ? kPolynomial : 0);
    table[value] = crc;
  }
  return table;
}

constexpr ByteTable kByteTable = make_byte_table();

/// The register after @p num_zeros further bytes, all of them zero.
constexpr uint32_t pass_zeros(uint32_t crc, size_t num_zeros) {
  for (size_t i = 0; i < num_zeros; ++i)
    crc = (crc >> 8) ^ kByteTable[crc & 255];
  return crc;
}

/// pass_zeros() of one number of zeros, which is linear: by each byte of the register.
using ZerosTable = std::array<ByteTable, 4>;

constexpr ZerosTable make_zeros_table(size_t num_zeros) {
  ZerosTable table{};
  for (size_t byte_idx = 0; byte_idx < 4; ++byte_idx)
    for (size_t bit = 0; bit < 8; ++bit) {
      const uint32_t passed = pass_zeros(uint32_t{1} << (8 * byte_idx + bit), num_zeros);
      for (size_t value = 0; value < 256; ++value)
        if ((value >> bit & 1) != 0)
          table[byte_idx][value] ^= passed;
    }
  return table;
}

uint32_t pass_zeros(const ZerosTable& table, uint32_t crc) {
  return table[0][crc & 255] ^ table[1][crc >> 8 & 255] ^ table[2][crc >> 16 & 255] ^
         table[3][crc >> 24];
}

uint64_t load_word(const std::byte* data) {
  uint64_t word = 0;
  std::memcpy(&word, data, sizeof(word));
  return word;
}

/// Eight bytes at a time, each looked up with as many zeros as bytes follow it.
struct PortableStep {
  static constexpr size_t kStreamBytes = 0;

  static uint32_t add_word(uint32_t crc, uint64_t word) {
    word ^= crc;
    uint32_t sum = 0;
    for (size_t i = 0; i < 8; ++i)
      sum ^= kTables[i][word >> (8 * i) & 255];
    return sum;
  }
  static uint32_t add_byte(uint32_t crc, uint8_t byte) {
    return (crc >> 8) ^ kByteTable[(crc ^ byte) & 255];
  }

 private:
  static constexpr std::array<ByteTable, 8> make_tables() {
    std::array<ByteTable, 8> tables{};
    for (size_t i = 0; i < 8; ++i)
      for (size_t value = 0; value < 256; ++value)
        tables[i][value] = pass_zeros(kByteTable[value], 7 - i);
    return tables;
  }
  static const std::array<ByteTable, 8> kTables;
};

constexpr std::array<ByteTable, 8> PortableStep::kTables = PortableStep::make_tables();

#if defined(__SSE4_2__)
struct Sse42Step {
  static constexpr size_t kStreamBytes = 1024;

  static uint32_t add_word(uint32_t crc, uint64_t word) {
    return static_cast<uint32_t>(__builtin_ia32_crc32di(crc, word));
  }
  static uint32_t add_byte(uint32_t crc, uint8_t byte) { return __builtin_ia32_crc32qi(crc, byte); }
};
#endif

#if defined(__aarch64__)
struct ArmStep {
  static constexpr size_t kStreamBytes = 1024;

  static uint32_t add_word(uint32_t crc, uint64_t word) {
    asm(".arch_extension crc\n\tcrc32cx %w0, %w0, %x1" : "+r"(crc) : "r"(word));
    return crc;
  }
  static uint32_t add_byte(uint32_t crc, uint8_t byte) {
    asm(".arch_extension crc\n\tcrc32cb %w0, %w0, %w1" : "+r"(crc) : "r"(uint32_t{byte}));
    return crc;
  }
};

bool has_arm_crc() {
  constexpr unsigned long kCrc32 = 1ul << 7;  // HWCAP_CRC32
  return (getauxval(AT_HWCAP) & kCrc32) != 0;
}
#endif

/// Three streams side by side where there is enough: an instruction ends two cycles after the next
/// could begin.
template <typename Step>
uint32_t add_streams(uint32_t crc, const std::byte*& data, size_t& bytes) {
  constexpr size_t kStream = Step::kStreamBytes;
  static constexpr ZerosTable kPassStream = make_zeros_table(kStream);
  for (; bytes >= 3 * kStream; data += 3 * kStream, bytes -= 3 * kStream) {
    uint32_t second = 0;
    uint32_t third = 0;
    for (size_t i = 0; i < kStream; i += sizeof(uint64_t)) {
      crc = Step::add_word(crc, load_word(data + i));
      second = Step::add_word(second, load_word(data + kStream + i));
      third = Step::add_word(third, load_word(data + 2 * kStream + i));
    }
    crc = pass_zeros(kPassStream, crc) ^ second;
    crc = pass_zeros(kPassStream, crc) ^ third;
  }
  return crc;
}

template <typename Step>
uint32_t extend_by(uint32_t crc, const std::byte* data, size_t bytes) {
  crc = ~crc;
  if constexpr (Step::kStreamBytes > 0)
    crc = add_streams<Step>(crc, data, bytes);
  for (; bytes >= sizeof(uint64_t); data += sizeof(uint64_t), bytes -= sizeof(uint64_t))
    crc = Step::add_word(crc, load_word(data));
  for (; bytes > 0; ++data, --bytes)
    crc = Step::add_byte(crc, static_cast<uint8_t>(*data));
  return ~crc;
}

#if defined(__x86_64__) && defined(__SSE4_2__)
bool has_wide_clmul() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("vpclmulqdq");
}

/// Long messages are shortened to one block first.
uint32_t extend_by_folding(uint32_t crc, const std::byte* data, size_t bytes) {
  constexpr size_t kBlock = Crc32cFold::kBlockBytes;
  constexpr uint32_t kOne = 0x80000000;  // x to the power of 0
  constexpr Crc32cFold kFold{uint64_t{pass_zeros(kOne, kBlock + 4)} << 1,
                             uint64_t{pass_zeros(kOne, kBlock - 4)} << 1};
  const size_t num_blocks = bytes / kBlock;
  if (num_blocks < 8)
    return extend_by<Sse42Step>(crc, data, bytes);
  std::array<std::byte, kBlock> folded;
  fold_crc32c_avx512(kFold, ~crc, data, num_blocks, folded.data());
  crc = extend_by<Sse42Step>(~uint32_t{0}, folded.data(), kBlock);
  return extend_by<Sse42Step>(crc, data + num_blocks * kBlock, bytes - num_blocks * kBlock);
}
#endif

constexpr Crc32c kPortableCrc32c{"portable", &extend_by<PortableStep>};
#if defined(__SSE4_2__)
constexpr Crc32c kSse42Crc32c{"sse4.2", &extend_by<Sse42Step>};
constexpr Crc32c kAvx512Crc32c{"avx512", &extend_by_folding};
#endif
#if defined(__aarch64__)
constexpr Crc32c kArmCrc32c{"armv8-crc", &extend_by<ArmStep>};
#endif

}  // namespace

const Crc32c* find_crc32c(std::string_view name) {
  if (name == kPortableCrc32c.name)
    return &kPortableCrc32c;
#if defined(__SSE4_2__)
  if (name == kSse42Crc32c.name && __builtin_cpu_supports("sse4.2"))
    return &kSse42Crc32c;
  if (name == kAvx512Crc32c.name && has_wide_clmul())
    return &kAvx512Crc32c;
#endif
#if defined(__aarch64__)
  if (name == kArmCrc32c.name && has_arm_crc())
    return &kArmCrc32c;
#endif
  return nullptr;
}

const Crc32c& best_crc32c() {
  static const Crc32c& best = []() -> const Crc32c& {
    for (const std::string_view name : {"avx512", "sse4.2", "armv8-crc"})
      if (const Crc32c* const found = find_crc32c(name))
        return *found;
    return kPortableCrc32c;
  }();
  return best;
}

}  // namespace moe::cpu
