#include "simt/symmetric_table.h"

#include <map>
#include <mutex>
#include <utility>

#include "core/error.h"
#include "simt/scheduler.h"

namespace moe::simt {
namespace {

struct Entry {
  size_t bytes;
  std::vector<std::byte*> by_pe;
};

struct Table {
  std::mutex mutex;
  std::map<const std::byte*, Entry> entries;  ///< by where they begin here

  static Table& get() {
    static auto* instance = new Table;  // streams may run during exit
    return *instance;
  }
};

}  // namespace

SymmetricMapping::SymmetricMapping(const std::byte* own,
                                   size_t bytes,
                                   std::vector<std::byte*> by_pe)
    : own_(own) {
  const std::lock_guard lock(Table::get().mutex);
  Table::get().entries[own] = {bytes, std::move(by_pe)};
}

SymmetricMapping::~SymmetricMapping() {
  const std::lock_guard lock(Table::get().mutex);
  Table::get().entries.erase(own_);
}

std::byte* SymmetricMapping::find(int pe, const void* place, size_t bytes) {
  const auto* const wanted = static_cast<const std::byte*>(place);
  Table& table = Table::get();
  const std::lock_guard lock(table.mutex);
  auto found = table.entries.upper_bound(wanted);
  if (found == table.entries.begin())
    throw EmulationError(concat("a put names ", place, ", which is no symmetric memory"));
  --found;
  const Entry& entry = found->second;
  const auto offset = static_cast<size_t>(wanted - found->first);
  if (offset > entry.bytes || bytes > entry.bytes - offset)
    throw EmulationError(concat("a put names ",
                                bytes,
                                " bytes at ",
                                offset,
                                " of symmetric memory of ",
                                entry.bytes,
                                " bytes, or past its end"));
  if (pe < 0 || static_cast<size_t>(pe) >= entry.by_pe.size())
    throw EmulationError(concat("a put goes to PE ", pe, " of ", entry.by_pe.size()));
  return entry.by_pe[static_cast<size_t>(pe)] + offset;
}

}  // namespace moe::simt
