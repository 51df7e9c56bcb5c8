#include "heap/remote_dial.h"

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "core/error.h"

namespace moe::heap {

void RemoteDial::start() {
  attempts_.clear();
  text_.clear();
  num_tried_ = 0;
  num_others_ = 0;
  for (size_t i = 0; i < target_->num_tcp_addresses; ++i) {
    const IpAddress& address = target_->tcp_addresses[i];
    const std::string where = address.version == 4
                                  ? concat(address.text(), ":", target_->tcp_port)
                                  : concat("[", address.text(), "]:", target_->tcp_port);
    ++num_tried_;
    OwnedFd socket = dial_tcp(address, target_->tcp_port);
    if (socket)
      attempts_.push_back({std::move(socket), where});
    else
      note_failure(where, errno);
  }
}

std::vector<OwnedFd> RemoteDial::take_connected() {
  std::vector<OwnedFd> connected;
  std::erase_if(attempts_, [&](Attempt& attempt) {
    pollfd polled{attempt.socket.get(), POLLOUT, 0};
    if (::poll(&polled, 1, 0) != 1)
      return false;
    const int error = dial_error(attempt.socket);
    if (error != 0) {
      note_failure(attempt.where, error);
    } else {
      ++num_others_;
      connected.push_back(std::move(attempt.socket));
    }
    return true;
  });
  return connected;
}

void RemoteDial::note_failure(const std::string& where, int error) {
  num_others_ += error == ECONNREFUSED ? 0 : 1;
  text_ += concat(text_.empty() ? "" : ", ", where, ": ", std::strerror(error));
}

std::string RemoteDial::text() const {
  std::string text = text_;
  for (const Attempt& attempt : attempts_)
    text += concat(text.empty() ? "" : ", ", attempt.where, ": no answer");
  return text;
}

void RemoteDial::add_polled(std::vector<pollfd>* polled) const {
  for (const Attempt& attempt : attempts_)
    polled->push_back({attempt.socket.get(), POLLOUT, 0});
}

}  // namespace moe::heap
