// schedules: runs scenarios under many schedules and says what was wrong. tests/schedules/README.md

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <iostream>
#include <set>
#include <sstream>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core/error.h"
#include "schedules/exploration.h"
#include "schedules/run.h"

namespace moe::simt::checker {
namespace {

constexpr const char* kUsage =
    "schedules --scenario NAME[,NAME...]|all [--seeds FIRST:END] [--fault NAME] [--keep-going]\n"
    "          [--seconds LIMIT] [--json] [--list-faults] | --list\n"
    "Runs every seed of [FIRST, END) of each scenario; exit 0 when all is clean, 1 when something\n"
    "was found, 2 for a wrong argument. The first finding ends a scenario, but for --keep-going.\n"
    "With --fault one of tests/schedules/faults is switched on.\n"
    "--seconds ends each scenario early, after the schedule that runs then.\n"
    "--list-faults names the faults that the code which ran could have switched on.\n";

struct Options {
  std::vector<std::string> names;
  Exploration exploration;
  std::string fault = "none";
  bool is_json = false;
  bool is_list = false;
  bool lists_faults = false;
};

uint64_t to_number(const std::string& text) {
  size_t end = 0;
  const uint64_t number = text.empty() ? 0 : std::stoull(text, &end);
  MOE_CHECK(!text.empty() && end == text.size(), "not a number: '", text, "'");
  return number;
}

void read_seeds(const std::string& text, Options* options) {
  const size_t colon = text.find(':');
  options->exploration.first_seed = to_number(text.substr(0, colon));
  options->exploration.end_seed = colon == std::string::npos ? options->exploration.first_seed + 1
                                                             : to_number(text.substr(colon + 1));
  MOE_CHECK(options->exploration.first_seed < options->exploration.end_seed,
            "--seeds ",
            text,
            " names no seed: the first is to be below the end");
}

Options read_options(int argc, char** argv) {
  Options options;
  for (int i = 1; i < argc; ++i) {
    const std::string_view option = argv[i];
    const auto value = [&]() -> std::string {
      MOE_CHECK(i + 1 < argc, option, " needs a value");
      return argv[++i];
    };
    if (option == "--scenario") {
      std::istringstream names(value());
      for (std::string name; std::getline(names, name, ',');)
        options.names.push_back(name);
    } else if (option == "--seeds") {
      read_seeds(value(), &options);
    } else if (option == "--fault") {
      options.fault = value();
    } else if (option == "--seconds") {
      options.exploration.most_seconds = static_cast<double>(to_number(value()));
    } else if (option == "--json") {
      options.is_json = true;
    } else if (option == "--keep-going") {
      options.exploration.keeps_going = true;
    } else if (option == "--list-faults") {
      options.lists_faults = true;
    } else if (option == "--list") {
      options.is_list = true;
    } else {
      throw InvalidArgument(concat("unknown option ", option, "\n", kUsage));
    }
  }
  MOE_CHECK(options.is_list || !options.names.empty(), kUsage);
  return options;
}

std::vector<const Scenario*> chosen(const Options& options) {
  std::vector<const Scenario*> found;
  for (const std::string& name : options.names) {
    const size_t num_before = found.size();
    for (const Scenario& scenario : scenarios())
      if (name == "all" ? !scenario.is_wrong : name == scenario.name)
        found.push_back(&scenario);
    MOE_CHECK(found.size() > num_before, "there is no scenario '", name, "'; --list names all");
  }
  return found;
}

std::string quoted(const std::string& text) {
  std::string json = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\')
      json += '\\';
    if (c == '\n')
      json += "\\n";
    else if (static_cast<unsigned char>(c) >= 0x20)
      json += c;
  }
  return json + '"';
}

void print_json(const std::vector<Outcome>& outcomes, const Options& options) {
  std::cout << "{\"fault\": " << quoted(options.fault) << ", \"scenarios\": [";
  for (size_t i = 0; i < outcomes.size(); ++i) {
    const Outcome& outcome = outcomes[i];
    std::cout << (i == 0 ? "" : ", ") << "{\"name\": " << quoted(outcome.scenario->name)
              << ", \"schedules\": " << outcome.num_schedules
              << ", \"failed\": " << outcome.num_failed << ", \"steps\": " << outcome.num_steps
              << ", \"seconds\": " << outcome.seconds;
    if (outcome.num_failed > 0)
      std::cout << ", \"first_failed\": " << outcome.first_failed;
    std::cout << ", \"findings\": [";
    for (size_t k = 0; k < outcome.findings.size(); ++k)
      std::cout << (k == 0 ? "" : ", ")
                << "{\"kind\": " << quoted(kind_name(outcome.findings[k].kind))
                << ", \"text\": " << quoted(outcome.findings[k].text) << "}";
    std::cout << "]}";
  }
  std::cout << "]}\n";
}

void print(const Outcome& outcome, const Options& options) {
  const double rate =
      outcome.seconds > 0 ? static_cast<double>(outcome.num_schedules) / outcome.seconds : 0;
  std::cout << outcome.scenario->name << ": " << outcome.num_schedules << " schedules, "
            << outcome.num_steps / outcome.num_schedules << " accesses each, "
            << static_cast<int64_t>(rate) << " per second, "
            << (outcome.num_failed == 0 ? "clean" : concat(outcome.num_failed, " FAILED")) << "\n";
  if (outcome.num_failed == 0)
    return;
  for (const Finding& finding : outcome.findings)
    std::cout << "  " << kind_name(finding.kind) << ": " << finding.text << "\n";
  std::cout << "  replay: schedules --scenario " << outcome.scenario->name << " --seeds "
            << outcome.first_failed;
  if (options.fault != "none")
    std::cout << " --fault " << options.fault;
  std::cout << "\n";
}

int run(const Options& options) {
  if (options.is_list) {
    for (const Scenario& scenario : scenarios())
      std::cout << scenario.name << (scenario.is_wrong ? " (wrong on purpose)" : "") << ": "
                << scenario.summary << "\n";
    return 0;
  }
  set_fault(options.fault == "none" ? nullptr : options.fault.c_str());
  std::set<std::string> faults;
  std::vector<Outcome> outcomes;
  bool is_clean = true;
  bool has_met_fault = options.fault == "none";
  for (const Scenario* const scenario : chosen(options)) {
    outcomes.push_back(
        explore(*scenario, options.exploration, options.lists_faults ? &faults : nullptr));
    is_clean = is_clean && outcomes.back().num_failed == 0;
    has_met_fault = has_met_fault || outcomes.back().has_met_fault;
    if (!options.is_json)
      print(outcomes.back(), options);
    std::cout.flush();
  }
  if (options.is_json)
    print_json(outcomes, options);
  for (const std::string& name : faults)
    std::cout << name << "\n";
  MOE_CHECK(has_met_fault,
            "no code that ran has a fault '",
            options.fault,
            "'; --list-faults names those of these scenarios");
  return is_clean ? 0 : 1;
}

}  // namespace
}  // namespace moe::simt::checker

int main(int argc, char** argv) {
  try {
    return moe::simt::checker::run(moe::simt::checker::read_options(argc, argv));
  } catch (const std::exception& error) {
    std::cerr << error.what() << "\n";
    return 2;
  }
}
