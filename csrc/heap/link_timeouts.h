#pragma once

#include <chrono>

// Times after which a connection to a peer counts as lost, and that the end of one may take.

namespace moe::heap {

/// Shorter silences come of loaded machines and of links that drop packets.
constexpr double kLeastLinkTimeoutS = 2.0;
constexpr int kLinkLooks = 8;       ///< looks at a connection, within its limit
constexpr double kMostLookS = 5.0;  ///< seconds between two of them
constexpr int kLinkQuestions = 4;   ///< questions to the machine of an idle peer, within its limit
constexpr double kMostKeepaliveS = 30.0;  ///< seconds between two of them

/// A peer that is stopped may not read its last messages: leaving waits no longer than this for it
/// to take any. One that is slow gets all of them.
constexpr auto kFlushLimit = std::chrono::seconds(1);
constexpr auto kCatchUpLimit = std::chrono::seconds(1);

}  // namespace moe::heap
