#pragma once

#include <cstdint>
#include <set>
#include <string>
#include <vector>

#include "schedules/run.h"

namespace moe::simt::checker {

/// Seeds of one scenario, and when to stop.
struct Exploration {
  uint64_t first_seed = 0;
  uint64_t end_seed = 100;
  bool keeps_going = false;  ///< after a schedule that failed
  double most_seconds = 0;   ///< none for 0
};

struct Outcome {
  const Scenario* scenario = nullptr;
  uint64_t num_schedules = 0;
  uint64_t num_steps = 0;
  uint64_t num_failed = 0;
  uint64_t first_failed = 0;
  bool has_met_fault = false;     ///< the fault that is switched on, if any
  std::vector<Finding> findings;  ///< of the first schedule that failed
  double seconds = 0;
};

/// Runs the seeds in a process of its own. Code of the host is not kept from reading through a
/// pointer that a fault has made wrong: a signal ends that process, and is a finding of the
/// schedule that ran.
/// @param faults gets the names of faults that the code came across, unless null or crashed.
Outcome explore(const Scenario& scenario,
                const Exploration& exploration,
                std::set<std::string>* faults);

}  // namespace moe::simt::checker
