// Which region of symmetric memory ranks take, from what all of them say; prints nothing when
// right.

#include "nvshmem/region_pool.h"

#include <cstdio>
#include <cstdlib>

#include "core/error.h"

namespace {

using moe::nvshmem::RegionPool;

void expect(bool holds, const char* what) {
  if (holds)
    return;
  std::printf("%s\n", what);
  std::exit(1);
}

template <typename Call>
std::string error_of(const Call& call) {
  try {
    call();
  } catch (const moe::InvalidArgument& error) {
    return error.what();
  }
  return "";
}

int choose(const RegionPool& first, const RegionPool& second, int64_t bytes) {
  return RegionPool::choose({first.describe(bytes), second.describe(bytes)});
}

}  // namespace

int main() {
  std::byte memory[4] = {};
  RegionPool first;
  RegionPool second;
  expect(choose(first, second, 10) == RegionPool::kNone, "there is a region where none was made");
  for (RegionPool* pool : {&first, &second}) {
    expect(pool->add(&memory[0], 100) == 0, "the first region is not 0");
    expect(pool->add(&memory[1], 40) == 1, "the second region is not 1");
    expect(pool->add(&memory[2], 60) == 2, "the third region is not 2");
  }
  expect(first.total_bytes() == 200, "sizes do not add up");
  expect(choose(first, second, 40) == RegionPool::kNone, "a region that is taken is chosen");
  first.give_back(1);
  expect(choose(first, second, 40) == RegionPool::kNone, "chosen though another rank has it");
  second.give_back(1);
  expect(choose(first, second, 40) == 1, "what all have given back is not chosen");
  expect(choose(first, second, 41) == RegionPool::kNone, "a region that is too small is chosen");
  for (RegionPool* pool : {&first, &second}) {
    pool->give_back(0);
    pool->give_back(2);
  }
  expect(choose(first, second, 41) == 2, "not the smallest that fits is chosen");
  expect(first.take(2) == &memory[2], "another region is taken");
  expect(second.take(2) == &memory[2], "another region is taken");
  expect(choose(first, second, 41) == 0, "a region that is taken again is chosen");
  const std::string sizes =
      error_of([&] { RegionPool::choose({first.describe(7), second.describe(8)}); });
  expect(sizes.find("asks for 7 bytes, rank 1 for 8") != std::string::npos, sizes.c_str());
  second.add(&memory[3], 20);
  const std::string numbers = error_of([&] { choose(first, second, 8); });
  expect(numbers.find("has 3 regions between nodes, rank 1 has 4") != std::string::npos,
         numbers.c_str());
  std::puts("ok");
}
