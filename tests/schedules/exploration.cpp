#include "schedules/exploration.h"

#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <iostream>
#include <new>
#include <stdexcept>
#include <utility>

#include "core/error.h"

namespace moe::simt::checker {
namespace {

/// Facts that the parent needs to know of a child that ends before it has reported.
struct Progress {
  volatile uint64_t seed = 0;
  volatile uint64_t num_schedules = 0;  ///< begun
  volatile uint64_t num_steps = 0;
  volatile uint64_t num_failed = 0;
};

/// Progress in memory that a child shares with its parent.
class SharedProgress {
 public:
  SharedProgress()
      : memory_(mmap(
            nullptr, sizeof(Progress), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0)) {
    MOE_CHECK(memory_ != MAP_FAILED, "no memory to share with a child: ", std::strerror(errno));
    new (memory_) Progress;
  }
  ~SharedProgress() { munmap(memory_, sizeof(Progress)); }
  SharedProgress(const SharedProgress&) = delete;
  SharedProgress& operator=(const SharedProgress&) = delete;

  Progress& operator*() const { return *static_cast<Progress*>(memory_); }

 private:
  void* memory_;
};

double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

Outcome explore_here(const Scenario& scenario, const Exploration& exploration, Progress& progress) {
  Outcome outcome;
  const auto start = std::chrono::steady_clock::now();
  for (uint64_t seed = exploration.first_seed; seed < exploration.end_seed; ++seed) {
    progress.seed = seed;
    progress.num_schedules = ++outcome.num_schedules;
    const Findings findings = run_schedule(scenario, seed);
    progress.num_steps = outcome.num_steps += last_trace().num_steps;
    if (!findings.empty()) {
      if (outcome.num_failed++ == 0) {
        outcome.first_failed = seed;
        outcome.findings = findings.kept();
      }
      progress.num_failed = outcome.num_failed;
      if (!exploration.keeps_going)
        break;
    }
    if (exploration.most_seconds > 0 && seconds_since(start) >= exploration.most_seconds)
      break;
  }
  return outcome;
}

// --- From the child to its parent: numbers of 8 bytes, and texts behind their length
// ---------------

void put(std::string& message, uint64_t number) {
  message.append(reinterpret_cast<const char*>(&number), sizeof(number));
}

void put(std::string& message, const std::string& text) {
  put(message, text.size());
  message += text;
}

class Reader {
 public:
  explicit Reader(std::string message) : message_(std::move(message)) {}

  uint64_t number() {
    uint64_t number = 0;
    std::memcpy(&number, take(sizeof(number)), sizeof(number));
    return number;
  }
  std::string text() {
    const uint64_t bytes = number();
    return {take(bytes), bytes};
  }

 private:
  const char* take(uint64_t bytes) {
    if (bytes > message_.size() - at_)
      throw std::runtime_error("a child ended in the middle of its report");
    at_ += bytes;
    return message_.data() + at_ - bytes;
  }

  std::string message_;
  uint64_t at_ = 0;
};

std::string pack(const Outcome& outcome, const std::set<std::string>& faults) {
  std::string message;
  for (const uint64_t number :
       {outcome.num_schedules, outcome.num_steps, outcome.num_failed, outcome.first_failed})
    put(message, number);
  put(message, uint64_t{has_met_fault()});
  put(message, outcome.findings.size());
  for (const Finding& finding : outcome.findings) {
    put(message, static_cast<uint64_t>(finding.kind));
    put(message, finding.text);
  }
  put(message, faults.size());
  for (const std::string& name : faults)
    put(message, name);
  return message;
}

Outcome unpack(Reader reader, std::set<std::string>* faults) {
  Outcome outcome;
  outcome.num_schedules = reader.number();
  outcome.num_steps = reader.number();
  outcome.num_failed = reader.number();
  outcome.first_failed = reader.number();
  outcome.has_met_fault = reader.number() != 0;
  for (uint64_t num_left = reader.number(); num_left > 0; --num_left) {
    const auto kind = static_cast<Kind>(reader.number());
    outcome.findings.push_back({kind, reader.text()});
  }
  for (uint64_t num_left = reader.number(); num_left > 0; --num_left) {
    std::string name = reader.text();
    if (faults != nullptr)
      faults->insert(std::move(name));
  }
  return outcome;
}

void write_all(int fd, const std::string& message) {
  for (size_t at = 0; at < message.size();) {
    const ssize_t bytes = write(fd, message.data() + at, message.size() - at);
    if (bytes < 0 && errno != EINTR)
      throw std::runtime_error(concat("no report to the parent: ", std::strerror(errno)));
    at += bytes > 0 ? static_cast<size_t>(bytes) : 0;
  }
}

std::string read_all(int fd) {
  std::string message;
  std::array<char, 4096> part;
  for (;;) {
    const ssize_t bytes = read(fd, part.data(), part.size());
    if (bytes < 0 && errno != EINTR)
      throw std::runtime_error(concat("no report of a child: ", std::strerror(errno)));
    if (bytes == 0)
      return message;
    if (bytes > 0)
      message.append(part.data(), static_cast<size_t>(bytes));
  }
}

[[noreturn]] void run_child(const Scenario& scenario,
                            const Exploration& exploration,
                            Progress& progress,
                            bool wants_faults,
                            int fd) {
  try {
    std::set<std::string> faults;
    note_faults(wants_faults ? &faults : nullptr);
    write_all(fd, pack(explore_here(scenario, exploration, progress), faults));
    _exit(EXIT_SUCCESS);
  } catch (const std::exception& error) {
    std::cerr << error.what() << std::endl;
    _exit(EXIT_FAILURE);
  }
}

/// Finding about a child that a signal ended.
Outcome crashed(const Progress& progress, int signal) {
  Outcome outcome;
  outcome.num_schedules = progress.num_schedules;
  outcome.num_steps = progress.num_steps;
  outcome.num_failed = progress.num_failed + 1;
  outcome.first_failed = progress.seed;
  outcome.has_met_fault = true;  // or the finding is one without it
  outcome.findings.push_back({Kind::kCrash,
                              concat("signal ",
                                     signal,
                                     " (",
                                     strsignal(signal),
                                     ") ended the schedule of seed ",
                                     static_cast<uint64_t>(progress.seed))});
  return outcome;
}

}  // namespace

Outcome explore(const Scenario& scenario,
                const Exploration& exploration,
                std::set<std::string>* faults) {
  const SharedProgress progress;
  std::array<int, 2> ends{};
  MOE_CHECK(pipe(ends.data()) == 0, "no pipe to a child: ", std::strerror(errno));
  std::cout.flush();
  const auto start = std::chrono::steady_clock::now();
  const pid_t child = fork();
  MOE_CHECK(child >= 0, "no child process: ", std::strerror(errno));
  if (child == 0) {
    close(ends[0]);
    run_child(scenario, exploration, *progress, faults != nullptr, ends[1]);
  }
  close(ends[1]);
  std::string message = read_all(ends[0]);
  close(ends[0]);
  int status = 0;
  while (waitpid(child, &status, 0) < 0 && errno == EINTR) {
  }
  if (WIFEXITED(status) && WEXITSTATUS(status) != 0)
    throw std::runtime_error(concat("exit status ", WEXITSTATUS(status), " of ", scenario.name));
  Outcome outcome = WIFSIGNALED(status) ? crashed(*progress, WTERMSIG(status))
                                        : unpack(Reader(std::move(message)), faults);
  outcome.scenario = &scenario;
  outcome.seconds = seconds_since(start);
  return outcome;
}

}  // namespace moe::simt::checker
